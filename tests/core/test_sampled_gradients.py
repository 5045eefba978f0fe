"""Gradients of a region's entries alone, against PyTorch's gradients of whole tensors: in all families, and piece by piece."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import families
import pytest
import torch
from families import FAMILIES
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.readout_model import autocast
from forgetfree.core.regions import Region
from forgetfree.core.sampled_gradients import Entries, SampledWeight
from forgetfree.core.steps import trainable
from forgetfree.core.trained import RegionParameters, WholeTensors, in_training


def random_region(space: ParameterSpace, share: float = 0.1) -> Region:
    generator = torch.Generator().manual_seed(len(space))
    return Region.from_mask(torch.rand(len(space), generator=generator) < share)


def gradients(model: nn.Module, region: Region, losses: list[Callable[[], Tensor]], *, sampling: bool) -> Tensor:
    """The region's gradient of the sum of ``losses``, entry by entry or from whole tensors."""
    trained = RegionParameters(model, ParameterSpace.of(model), region)
    with in_training(model, trained, []) if sampling else trainable(model, trained.touched):
        for loss in losses:
            torch.manual_seed(1)
            loss().backward()  # type: ignore[no-untyped-call]
        whole = [tensor for tensor in trained.touched if tensor.dim() == 2 and tensor.grad is not None]
        trained.collect()
    if sampling:
        model.whole = len(whole)  # type: ignore[assignment]
    assert trained.values.grad is not None
    return trained.values.grad


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 3e-7) -> None:
    assert float(expected.norm()) > 0
    assert float((found - expected).norm() / expected.norm()) < tolerance


# -- Families --------------------------------------------------------------------------------------------

#: Those that multiply by some matrices in another way, and so need their whole gradients.
WHOLE = ("Falcon", "XLNet")


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_the_gradients_of_whole_tensors(name: str, dropout: bool) -> None:
    """Of two parts of a batch, whose rows differ in length."""
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
    assert bool(model.whole) == (name in WHOLE)
    assert all(type(parameter) is nn.Parameter and parameter.requires_grad for parameter in model.parameters())


# -- Uses of a matrix ------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Matrices in all sorts of uses, and a last one that is simple."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.conv = Conv1D(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 3)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)

    def use(self, name: str, x: Tensor) -> Tensor:
        two: Any = self.two.weight
        if name == "functional":
            x = F.linear(self.one(x), two)
        elif name == "by keyword":
            x = F.linear(self.one(x), weight=two)
        elif name == "twice":
            x = self.two(torch.tanh(self.two(x)))
        elif name == "in another way first":
            x = self.two(x @ two.T)
        elif name == "in another way last":
            x = self.two(x) @ two.T
        elif name == "beside itself":
            x = x @ (two @ two) + F.linear(two, two).sum()
        elif name == "penalty":
            x = self.two(x) + two.square().sum()
        elif name == "fused":
            x = self.attention(x, x, x)[0]
        elif name == "conv":
            x = self.conv(x)
        elif name == "changed in place":
            x = self.two(x).mul_(2.0).relu_()
        elif name == "kept apart":
            x = self.two(x) + self.one(x).detach()
        elif name == "its dtype and shape":
            x = self.two(x.to(two.dtype)) * two.shape[0] * float(two.detach().norm()) * two.requires_grad
        elif name == "checkpoint":
            x = checkpoint(lambda x: self.two(torch.tanh(self.one(x))), x, use_reentrant=False)
        elif name == "reentrant checkpoint":
            x = checkpoint(lambda x: self.two(torch.tanh(self.one(x))), self.norm(x), use_reentrant=True)
        return self.last(self.norm(x))


USES = {
    "functional": 0,
    "by keyword": 1,
    "twice": 0,
    "in another way first": 1,
    "in another way last": 1,
    "beside itself": 1,
    "penalty": 1,
    "fused": 2,
    "conv": 0,
    "changed in place": 0,
    "kept apart": 0,
    "checkpoint": 0,
    "reentrant checkpoint": 0,
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", USES)
def test_every_use_of_a_matrix_counts(name: str, precision: str) -> None:
    """However a matrix is used: what is no product of rows with it makes it need its whole gradient."""
    model = Odd()
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))

    def loss() -> Tensor:
        with autocast(precision, "cpu"):
            return model.use(name, x).float().sin().sum()

    region = random_region(ParameterSpace.of(model), 0.5)
    sampled = gradients(model, region, [loss, loss, loss], sampling=True)
    assert model.whole == USES[name]
    expected = gradients(model, region, [loss, loss, loss], sampling=False)
    assert_close(sampled, expected, 3e-7 if precision == "fp32" else 1e-2)


def test_a_region_in_upper_layers_needs_nothing_of_the_lower_ones() -> None:
    """Back-propagation ends at the lowest layer that holds an entry."""
    model = families.body("Bert")
    space = ParameterSpace.of(model)
    names = [spec.name for spec in space.tensors]
    first = next(spec for spec in space.tensors if spec.name == "encoder.layer.1.attention.self.query.weight")
    trained = RegionParameters(model, space, Region.of(first.offset + torch.arange(0, first.size, 7)))
    below: list[bool] = []
    layers: Any = model.encoder
    layers.layer[0].register_forward_hook(lambda module, args, output: below.append(output[0].requires_grad))
    with in_training(model, trained, []):
        loss = model(input_ids=torch.arange(10, 22).view(2, 6)).last_hidden_state.sin().sum()
        loss.backward()
        assert below == [False]
        assert [name for name, p in model.named_parameters() if p.grad is not None] == [] != names
        trained.collect()
    assert trained.values.grad is not None and bool(trained.values.grad.ne(0).all())


def test_no_gradient_of_the_size_of_a_matrix_is_kept() -> None:
    """What a step leaves: the region's vector, and gradients of vectors such as biases."""
    model = families.body("Bert")
    trained = RegionParameters(model, ParameterSpace.of(model), random_region(ParameterSpace.of(model), 0.01))
    with in_training(model, trained, []):
        model(input_ids=torch.arange(10, 22).view(2, 6)).last_hidden_state.sin().sum().backward()
        kept = [p for p in model.parameters() if p.grad is not None]
        assert all(p.dim() == 1 for p in kept)
        trained.collect()
        assert all(p.grad is None for p in model.parameters())


def test_an_update_starts_from_nothing_and_parts_add_up() -> None:
    model = nn.Linear(4, 3)
    trained = RegionParameters(model, ParameterSpace.of(model), Region.of([0, 5, 13]))
    x = torch.randn(5, 4)
    with in_training(model, trained, []):
        for _ in range(2):  # a second update adds nothing to the first one's gradient
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
        model.zero_grad()  # as loops do, also in the middle of an update
        trained.values.grad = None
        model(x).square().sum().backward()
        trained.collect()
        torch.testing.assert_close(trained.values.grad, expected)


def test_parameters_are_what_they_were_after_an_error_and_in_copies() -> None:
    model = nn.Linear(4, 3)
    trained = RegionParameters(model, ParameterSpace.of(model), Region.of([0]))
    with pytest.raises(ZeroDivisionError), in_training(model, trained, []):
        assert type(model.weight) is SampledWeight
        assert isinstance(model.weight, nn.Parameter)
        assert dict(model.named_parameters())["weight"] is model.weight
        twin = copy.deepcopy(model)
        assert torch.equal(twin(torch.ones(4)), model(torch.ones(4)))
        raise ZeroDivisionError
    assert type(model.weight) is nn.Parameter
    assert model.weight.requires_grad
    assert vars(model.weight) == {}


def test_whole_tensors_stay_parameters() -> None:
    model = nn.Linear(4, 3)
    with in_training(model, WholeTensors(model.parameters()), []):
        assert type(model.weight) is nn.Parameter


# -- Entries of a product --------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("share", [0.0, 0.002, 0.02, 0.5, 1.0])
def test_entries_of_a_product(rows: int, dtype: torch.dtype, share: float) -> None:
    """Of few entries and many, scattered and in a block."""
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.randn(rows, width, generator=generator).to(dtype) for width in (70, 90))
    scattered = torch.rand(70, 90, generator=generator) < share
    block = torch.zeros(70, 90, dtype=torch.bool)
    block[: math.ceil(70 * share), 5 : 5 + math.ceil(20 * share)] = True
    for mask in (scattered, block):
        local = mask.flatten().nonzero().squeeze(1)
        found = Entries(mask.shape, local, torch.promote_types(dtype, torch.float32)).of(left, right).double()
        expected = (left.double().t() @ right.double())[mask]
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * math.sqrt(rows))


def test_a_scattered_region_and_one_in_a_block_take_different_roads() -> None:
    scattered = torch.randperm(384 * 384, generator=torch.Generator().manual_seed(0))[:1500].sort().values
    assert Entries(torch.Size((384, 384)), scattered)._pattern is not None
    block = (torch.arange(0, 384, 6)[:, None] * 384 + torch.arange(0, 384, 30)).flatten()
    assert Entries(torch.Size((384, 384)), block)._pattern is None
