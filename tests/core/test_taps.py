"""Gradients of a region's entries alone equal PyTorch's gradients of whole tensors, in all families and for each operation."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import families
import pytest
import simulated_gpu
import torch
from families import FAMILIES
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from forgetfree.core import products
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.products import EntriesOfProduct
from forgetfree.core.readout_model import autocast
from forgetfree.core.regions import Region
from forgetfree.core.trained import RegionParameters, in_training, trainable


def random_region(space: ParameterSpace, share: float = 0.1) -> Region:
    generator = torch.Generator().manual_seed(len(space))
    return Region.from_mask(torch.rand(len(space), generator=generator) < share)


def gradients(model: nn.Module, region: Region, losses: list[Callable[[], Tensor]], *, sampling: bool) -> Tensor:
    """Return the region's gradient of the sum of ``losses``, computed entry by entry or from whole tensors."""
    trained = RegionParameters(model, ParameterSpace.of(model), region)
    with in_training(model, trained, []) if sampling else trainable(model, trained.touched):
        for loss in losses:
            torch.manual_seed(1)
            loss().backward()  # type: ignore[no-untyped-call]
        trained.collect()
    assert trained.values.grad is not None
    return trained.values.grad


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 3e-7) -> None:
    assert float(expected.norm()) > 0
    assert float((found - expected).norm() / expected.norm()) < tolerance


# -- Families --------------------------------------------------------------------------------------------


@pytest.mark.sampled("DebertaV2-True", "Falcon-True")
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_the_gradients_of_whole_tensors(name: str, dropout: bool) -> None:
    """The batch has two parts whose rows differ in length."""
    torch.manual_seed(0)
    model = families.body(name).train(dropout)
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(10, 60, shape, generator=generator) for shape in ((3, 7), (2, 5))]

    def loss_of(ids: Tensor) -> Callable[[], Tensor]:
        more = {"decoder_input_ids": ids} if FAMILIES[name].head == "AutoModelForSeq2SeqLM" else {}
        return lambda: model(input_ids=ids, **more).last_hidden_state.sin().mean()

    losses = [loss_of(ids) for ids in rows]
    region = random_region(ParameterSpace.of(model))
    assert_close(gradients(model, region, losses, sampling=True), gradients(model, region, losses, sampling=False))
    assert all(type(parameter) is nn.Parameter and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "kept"), [("Bert", 2**28), ("GPT2", 2000), ("Albert", 2000), ("T5", 2**28), ("Bart", 2000)]
)
def test_a_gpu_computes_all_products_together(name: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This covers layers called twice, with different numbers of rows, Conv1D layers, and a third pass."""
    monkeypatch.setattr(products, "KEPT_BYTES", kept)
    torch.manual_seed(0)
    model = families.body(name)
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(10, 60, (3, 7), generator=generator) for _ in range(3)]
    more = [torch.randint(10, 60, (3, 5), generator=generator) for _ in range(3)]
    region = random_region(ParameterSpace.of(model))

    def losses(device: str) -> list[Callable[[], Tensor]]:
        def loss(ids: Tensor, target: Tensor) -> Tensor:
            decoder = {"decoder_input_ids": target} if FAMILIES[name].head == "AutoModelForSeq2SeqLM" else {}
            return model(input_ids=ids, **decoder).last_hidden_state.sin().mean()

        return [partial(loss, ids.to(device), each.to(device)) for ids, each in zip(rows, more, strict=True)]

    expected = gradients(model, region, losses("cpu"), sampling=False)
    with simulated_gpu.present():
        model.to("cuda")
        assert_close(gradients(model, region, losses("cuda"), sampling=True).cpu(), expected, 1e-6)
        assert all(tensor.storage_offset() == 0 for tensor in model.parameters())  # each has its own memory


# -- Uses of a matrix ------------------------------------------------------------------------------------


class Product(torch.autograd.Function):
    """A custom function: no module or torch function shows that the matrix is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dw = dy.reshape(-1, 6).T @ x.reshape(-1, 6).to(dy.dtype) if ctx.needs_input_grad[1] else None
        return (dy @ weight.to(dy.dtype)).to(x.dtype), dw


class Scaled(nn.Linear):
    """A layer that computes something else than its base class."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 1.3, self.bias).tanh()


class Gated(nn.Linear):
    """A layer that takes another argument before the rows."""

    def forward(self, gate: float, x: Tensor) -> Tensor:  # type: ignore[override]
        return gate * super().forward(x) if gate else x


class Odd(nn.Module):
    """A model that uses its matrices in unusual ways, with a plain last layer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.conv = Conv1D(6, 6)
        self.scaled, self.gated = Scaled(6, 6), Gated(6, 6)
        self.passes = 0
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 3)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)

    def forward(self, name: str, x: Tensor) -> Tensor:
        self.passes += 1
        return self.last(self.norm(USES[name](self, x, self.two.weight)))


def input_changed_in_place(m: Odd, x: Tensor, two: Tensor) -> Tensor:
    """PyTorch saves the rounded copy for the backward pass, and so allows the change."""
    x = m.one(x).float() * 1.0
    y = m.two(x)
    return x.add_(y) if y.dtype != x.dtype else x + y


#: Ways to combine inputs ``x`` of a model ``m`` with the matrix ``two`` of one of its layers.
USES: dict[str, Callable[[Odd, Tensor, Any], Tensor]] = {
    "functional": lambda m, x, two: F.linear(m.one(x), two),
    "by keyword": lambda m, x, two: F.linear(m.one(x), weight=two),
    "twice": lambda m, x, two: m.two(torch.tanh(m.two(x))),
    "in another way first": lambda m, x, two: m.two(x @ two.T),
    "in another way last": lambda m, x, two: m.two(x) @ two.T,
    "transposed": lambda m, x, two: (x[..., None, :] @ two.mT)[..., 0, :] + x @ two.H,
    "beside itself": lambda m, x, two: x @ (two @ two) + F.linear(two, two).sum(),
    "penalty": lambda m, x, two: m.two(x) + x * two.square().sum(),
    "fused": lambda m, x, two: m.attention(x, x, x)[0],
    "conv": lambda m, x, two: m.conv(x),
    "changed in place": lambda m, x, two: m.two(x).mul_(2.0).relu_(),
    "bias in place": lambda m, x, two: F.linear(x, two).add_(m.one.bias),
    "bias copied": lambda m, x, two: F.linear(x, two) + torch.zeros(6).copy_(m.one.bias),
    "kept apart": lambda m, x, two: m.two(x) + m.one(x).detach(),
    "its dtype and shape": lambda m, x, two: m.two(x.to(two.dtype)) * two.shape[0] * float(two.detach().norm()),
    "looked at": lambda m, x, two: m.two(x) * float(two.data[0, 0]) + len(m.state_dict()),
    "function of its own": lambda m, x, two: Product.apply(x, two),
    "input changed in place": input_changed_in_place,
    "checkpoint": lambda m, x, two: checkpoint(lambda x: m.two(torch.tanh(m.one(x))), x, use_reentrant=False),
    "reentrant checkpoint": lambda m, x, two: checkpoint(
        lambda x: m.two(torch.tanh(m.one(x))), m.norm(x), use_reentrant=True
    ),
    "not in the first pass": lambda m, x, two: x if m.passes == 1 else m.two(x),
    "times zero in the first pass": lambda m, x, two: x + (m.passes > 1) * m.two(x),
    "from the second pass on": lambda m, x, two: m.two(x) + (F.linear(x, two) if m.passes > 1 else 0),
    "penalty from the second pass on": lambda m, x, two: m.two(x) + (x * two.square().sum() if m.passes > 1 else 0),
    "forward": lambda m, x, two: m.two.forward(x) + m.conv.forward(x),
    "own forward": lambda m, x, two: m.scaled(m.one(x)),
    "its arguments": lambda m, x, two: m.gated(gate=2.0, x=m.one(input=x)),
}


@pytest.mark.sampled("kept apart-fp32")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", USES)
def test_every_use_of_a_matrix_counts(name: str, precision: str) -> None:
    """A gradient includes each use of a matrix, in the first pass and in later ones."""
    model = Odd()
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))

    def loss() -> Tensor:
        with autocast(precision, "cpu"):
            return model(name, x).float().sin().sum()

    region = random_region(ParameterSpace.of(model), 0.5)
    sampled = gradients(model, region, [loss, loss, loss], sampling=True)
    model.passes = 0
    expected = gradients(model, region, [loss, loss, loss], sampling=False)
    assert_close(sampled, expected, 3e-7 if precision == "fp32" else 1e-2)


def test_a_region_in_upper_layers_needs_nothing_of_the_lower_ones() -> None:
    """Backpropagation ends at the lowest layer with an entry of the region."""
    model = families.body("Bert")
    space = ParameterSpace.of(model)
    first = next(spec for spec in space.tensors if spec.name == "encoder.layer.1.attention.self.query.weight")
    trained = RegionParameters(model, space, Region.of(first.offset + torch.arange(0, first.size, 7)))
    below: list[bool] = []
    layers: Any = model.encoder
    layers.layer[0].register_forward_hook(lambda module, args, output: below.append(output[0].requires_grad))
    with in_training(model, trained, []):
        loss = model(input_ids=torch.arange(10, 22).view(2, 6)).last_hidden_state.sin().sum()
        loss.backward()
        assert below == [False]
        assert all(p.grad is None for p in model.parameters())  # no gradient has the size of a matrix
        trained.collect()
    assert trained.values.grad is not None and bool(trained.values.grad.ne(0).all())


def test_an_update_starts_from_nothing_and_parts_add_up() -> None:
    model = nn.Linear(4, 3)
    trained = RegionParameters(model, ParameterSpace.of(model), Region.of([0, 5, 13]))
    x = torch.randn(5, 4)
    with in_training(model, trained, []):
        for _ in range(2):  # the second update does not add to the first one's gradient
            trained.values.grad = None
            for part in (x[:2], x[2:]):
                model(part).square().sum().backward()
            trained.collect()
            whole = nn.Linear(4, 3)
            whole.load_state_dict(model.state_dict())
            whole(x).square().sum().backward()
            assert whole.weight.grad is not None and trained.values.grad is not None
            expected = torch.cat([whole.weight.grad.flatten(), whole.bias.grad])[[0, 5, 13]]
            torch.testing.assert_close(trained.values.grad, expected)
        model(x).sum().backward()
        model.zero_grad()  # training loops may call it in the middle of an update
        trained.values.grad = None
        model(x).square().sum().backward()
        trained.collect()
        torch.testing.assert_close(trained.values.grad, expected)


def test_an_input_changed_in_place_is_noticed() -> None:
    """PyTorch raises the same error as with whole gradients: the product would use overwritten values."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    trained = RegionParameters(model, ParameterSpace.of(model), Region.of([0, 20]))
    with in_training(model, trained, []):
        h = model[0](torch.ones(2, 4))
        y = model[1](h)
        h.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), Conv1D(7, 5), nn.Tanh(), nn.Linear(7, 6))


X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


def twice(model: nn.Module) -> None:
    loss = model(X).sin().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def another_gradient_beside(model: nn.Module) -> None:
    x = X.clone().requires_grad_()
    assert torch.autograd.grad(model(x).sum(), [x])[0].any()
    model(X).sin().sum().backward()


def of_gradients(model: nn.Module) -> None:
    x = X.clone().requires_grad_()
    y = model(x).sin()
    (dx,) = torch.autograd.grad(y.sum(), [x], create_graph=True)
    (y.sum() + dx.square().sum()).backward()


def of_gradients_of_gradients(model: nn.Module) -> None:
    x = X.clone().requires_grad_()
    (dx,) = torch.autograd.grad(model(x).sum(), [x], create_graph=True)
    (dx,) = torch.autograd.grad(dx.square().sum(), [x], create_graph=True)
    dx.square().sum().backward()


def with_a_graph(model: nn.Module) -> None:
    with warnings.catch_warnings():  # about reference cycles
        warnings.simplefilter("ignore")
        model(X).sin().sum().backward(create_graph=True)


@pytest.mark.sampled("with_a_graph")
@pytest.mark.parametrize(
    "backward", [twice, another_gradient_beside, with_a_graph, of_gradients, of_gradients_of_gradients]
)
def test_every_way_to_take_gradients(backward: Callable[[nn.Module], None]) -> None:
    """The region's gradient is exactly what a backward pass adds to the gradients of parameters."""
    found = []
    for sampling in (True, False):
        model = net()
        trained = RegionParameters(model, ParameterSpace.of(model), random_region(ParameterSpace.of(model), 0.5))
        with in_training(model, trained, [], sampling=sampling):
            for _ in range(2):
                trained.values.grad = None
                backward(model)
                trained.collect()
        assert trained.values.grad is not None
        found.append(trained.values.grad.detach())
    assert_close(*found)


class Failing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError


def test_parameters_are_what_they_were_after_an_error() -> None:
    """This includes an error raised within a forward pass."""
    model = nn.Sequential(nn.LayerNorm(4), Failing(4, 3))
    before = dict(model.named_parameters())
    trained = RegionParameters(model, ParameterSpace.of(model), Region.of([0, 9]))
    with pytest.raises(ZeroDivisionError), in_training(model, trained, []):
        assert list(model.parameters()) == list(before.values())
        model(torch.ones(4))
    assert all("weight" not in vars(module) for module in model)
    assert all(each is before[name] and each.requires_grad for name, each in model.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded])
def test_copies_are_models_of_their_own(copied: Callable[[nn.Module], Any]) -> None:
    """Copies made during training can be trained by themselves, and tied tensors stay tied."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    trained = RegionParameters(model, ParameterSpace.of(model), Region.of([0]))
    with in_training(model, trained, []):
        twin = copied(model)
        assert torch.equal(twin(torch.ones(4)), model(torch.ones(4)))
    assert all(type(parameter) is nn.Parameter for parameter in twin.parameters())
    assert twin[1].weight is twin[0].weight
    assert twin[0].weight.data_ptr() != model[0].weight.data_ptr()
    twin.requires_grad_(True)(torch.ones(4)).sum().backward()
    assert bool(twin[0].weight.grad.any())
    assert model[0].weight.grad is None and trained.values.grad is None


# -- Entries of a product --------------------------------------------------------------------------------


@pytest.mark.sampled("0.0-dtype0-200")
@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("share", [0.0, 0.002, 0.02, 0.5, 1.0])
def test_entries_of_a_product(rows: int, dtype: torch.dtype, share: float) -> None:
    """The entries are few or many, scattered or in a block."""
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.randn(rows, width, generator=generator).to(dtype) for width in (70, 90))
    scattered = torch.rand(70, 90, generator=generator) < share
    block = torch.zeros(70, 90, dtype=torch.bool)
    block[: math.ceil(70 * share), 5 : 5 + math.ceil(20 * share)] = True
    for mask in (scattered, block):
        local = mask.flatten().nonzero().squeeze(1)
        found = EntriesOfProduct(mask.shape, local, torch.promote_types(dtype, torch.float32)).of(left, right).double()
        expected = (left.double().t() @ right.double())[mask]
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * math.sqrt(rows))
