"""Graftable tensors in one buffer: the same parameters and bits, and nobody notices."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forgetfree.core.parameters import ParameterSpace
from forgetfree.ledger.flat import FlatTensors


class Odd(nn.Module):
    """Sizes that are no multiple of 64 bytes, an empty tensor, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"a": (5, 7), "b": (3,), "none": (0, 4), "c": (16, 16), "d": (1,)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.register_buffer("mean", torch.zeros(4))


def entries(space: ParameterSpace, seed: int, share: float = 0.2) -> Tensor:
    return (torch.rand(len(space), generator=torch.Generator().manual_seed(seed)) < share).nonzero().squeeze(1)


def is_one_buffer(model: nn.Module, space: ParameterSpace) -> bool:
    return len({each.untyped_storage().data_ptr() for each in space.parameters(model) if each.numel()}) == 1


def check_same(model: nn.Module, space: ParameterSpace, flat: FlatTensors) -> None:
    """What is written and read is what the space writes and reads tensor by tensor."""
    twin = copy.deepcopy(model)
    for seed in range(3):
        at = entries(space, seed)
        values = torch.randn(len(at), generator=torch.Generator().manual_seed(seed)).to(space.dtype)
        flat.scatter_(at, values)
        space.scatter_(twin, at, values)
        assert torch.equal(space.flatten(model), space.flatten(twin))
        other = entries(space, seed + 10)
        assert torch.equal(flat.gather(other), space.gather(twin, other))
    flat.scatter_(at[:0], values[:0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_reads_and_writes_as_the_space_does(dtype: torch.dtype) -> None:
    model = Odd().to(dtype)
    space, parameters = ParameterSpace.of(model), list(model.parameters())
    before = space.flatten(model)
    flat = FlatTensors(model, space)
    flat.gather(entries(space, 0))
    assert torch.equal(space.flatten(model), before)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(each.is_leaf and each.data_ptr() % 64 == 0 for each in parameters)
    assert is_one_buffer(model, space)
    check_same(model, space, flat)
    flat.release()
    assert len({each.untyped_storage().data_ptr() for each in parameters if each.numel()}) == 4
    check_same(model, space, flat)  # and takes it anew


@pytest.mark.sampled("gpt2")
@pytest.mark.parametrize("family", list(tiny.KINDS))
def test_models_answer_alike_in_a_buffer(family: str) -> None:
    model, _ = tiny.build(family)
    model.eval()
    space, x = ParameterSpace.of(model), torch.tensor([[2, 5, 6, 7, 3]])
    with torch.no_grad():
        before = model(x)[0]
        FlatTensors(model, space).gather(entries(space, 0))
        assert is_one_buffer(model, space)
        assert torch.equal(model(x)[0], before)
    check_same(model, space, FlatTensors(model, space))


def test_two_of_one_model_share_the_buffer() -> None:
    model = Odd()
    space = ParameterSpace.of(model)
    one, other = FlatTensors(model, space), FlatTensors(model, space)
    one.gather(entries(space, 0))
    address = model.a.data_ptr()
    check_same(model, space, other)
    assert model.a.data_ptr() == address
    other.release()
    check_same(model, space, one)


def _replaced(model: nn.Module) -> None:
    model.c = nn.Parameter(torch.ones(16, 16))


def _assigned(model: nn.Module) -> None:
    model.load_state_dict({name: tensor.clone() + 1 for name, tensor in model.state_dict().items()}, assign=True)


def _moved(model: nn.Module) -> None:
    model.to(torch.float64).to(torch.float32)


def _narrowed(model: nn.Module) -> None:
    model.to(torch.bfloat16)


def _turned_in_place(model: nn.Module) -> None:
    model.c.data = model.c.data.t()


def _read_as_half(model: nn.Module) -> None:
    model.b.data = model.b.data.view(torch.float16).flatten()[: model.b.numel()].view(model.b.shape)


@pytest.mark.parametrize("change", [_replaced, _assigned, _moved, _narrowed, _turned_in_place, _read_as_half])
def test_other_storage_is_noticed(change: Callable[[nn.Module], None]) -> None:
    model = Odd()
    space = ParameterSpace.of(model)
    flat = FlatTensors(model, space)
    check_same(model, space, flat)
    change(model)
    check_same(model, space, flat)


def _some_half(model: nn.Module) -> None:
    model.b.data = model.b.data.half()


def _turned(model: nn.Module) -> None:
    model.c.data = model.c.data.t()


def _shared_by_processes(model: nn.Module) -> None:
    model.share_memory()


def _in_a_larger_one(model: nn.Module) -> None:
    model.c.data = torch.randn(20, 16)[2:18]


def _in_a_buffer(model: nn.Module) -> None:
    model.mean = model.c.data.view(-1)[:4]


def _twice(model: nn.Module) -> None:
    model.c.data = torch.randn(16, 16)
    model.e = nn.Parameter(model.c.data)


@pytest.mark.parametrize("change", [_some_half, _turned, _shared_by_processes, _in_a_larger_one, _in_a_buffer, _twice])
def test_tensors_that_need_their_own_storage_keep_it(change: Callable[[nn.Module], None]) -> None:
    model = Odd()
    change(model)
    space = ParameterSpace.of(model, exclude=("^e$",))
    addresses = [each.data_ptr() for each in model.parameters()]
    check_same(model, space, FlatTensors(model, space))
    assert [each.data_ptr() for each in model.parameters()] == addresses


def test_autograd_notices_what_changes_between_the_passes() -> None:
    model = nn.Linear(4, 4)
    space = ParameterSpace.of(model)
    flat, x = FlatTensors(model, space), torch.randn(2, 4, requires_grad=True)
    flat.gather(entries(space, 0))
    loss = model(x).sum()
    flat.scatter_(torch.tensor([3]), torch.tensor([9.0]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_training_goes_on_in_the_buffer() -> None:
    """An optimizer that was made before has the same parameters, and its steps the same bits."""
    thetas = []
    for in_buffer in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2))
        space, optimizer = ParameterSpace.of(model), torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(4):
            if in_buffer and step == 2:
                FlatTensors(model, space).gather(entries(space, 0))
            optimizer.zero_grad()
            model(torch.ones(3, 5) * step).square().sum().backward()
            optimizer.step()
        thetas.append(space.flatten(model))
    assert torch.equal(*thetas)


def test_files_and_copies_are_those_of_any_model(tmp_path: Path) -> None:
    model, _ = tiny.build("bert")
    space = ParameterSpace.of(model)
    model.save_pretrained(tmp_path / "before")
    size = len(saved(model.state_dict()))
    flat = FlatTensors(model, space)
    flat.gather(entries(space, 0))
    model.save_pretrained(tmp_path / "after")
    before, after = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("before", "after"))
    assert before == after
    save_file(model.state_dict(), tmp_path / "state.safetensors")
    assert all(
        torch.equal(tensor, model.state_dict()[name])
        for name, tensor in load_file(tmp_path / "state.safetensors").items()
    )
    assert len(saved(model.state_dict())) < 1.1 * size
    twin = copy.deepcopy(model)
    flat.scatter_(torch.arange(5), torch.full((5,), 3.0))
    assert not torch.equal(space.flatten(twin), space.flatten(model))
    assert not is_one_buffer(twin, space)
    flat.release()
    assert len(saved(model.encoder.layer[0].state_dict())) < size / 2


def saved(state: dict[str, Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
