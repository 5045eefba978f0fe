"""A fingerprint is computed once per state of the tensors, and again whenever they may have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from forgetfree.core import fingerprint
from forgetfree.core.fingerprint import fingerprint_of, restored


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record each hash computation."""
    hashed, compute = list[Any](), fingerprint._digest
    monkeypatch.setattr(fingerprint, "_digest", lambda *of: hashed.append(1) or compute(*of))
    return hashed


def test_it_is_the_hash_of_names_shapes_dtypes_and_bytes() -> None:
    model, expected = network(), hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        expected.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode() + tensor.numpy().tobytes())
    assert fingerprint_of(model) == fingerprint_of(network()) == expected.hexdigest()


def write_in_place(model: Any) -> None:
    with torch.no_grad():
        model[0].weight[0, 0] += 1


def replace_memory(model: Any) -> None:
    model[0].weight.data = model[0].weight.data + 1


def cast_and_cast_back(model: Any) -> None:
    """The new memory may be at the old address."""
    with torch.no_grad():
        model[0].weight += 1e-4
    fingerprint_of(model)
    model.half().float()


def replace_tensor(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() + 1)


def take_a_fused_step(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(4, 3)).square().sum().backward()
    version = model[0].weight._version
    optimizer.step()
    assert model[0].weight._version == version  # a fused step does not increment the version


def take_a_step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()


def write_a_buffer(model: Any) -> None:
    model[1](torch.randn(4, 2))


class Copying(nn.Sequential):
    """A model whose state dictionary holds copies."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: tensor.clone() for name, tensor in super().state_dict(*args, **kwargs).items()}


def test_a_state_of_copies_is_watched_by_the_tensors_themselves(hashed: list[Any]) -> None:
    model = Copying(nn.Linear(3, 2))
    before = fingerprint_of(model)
    assert fingerprint_of(model) == before and len(hashed) == 1
    write_in_place(model)
    assert fingerprint_of(model) != before and len(hashed) == 2


def test_what_is_done_in_place_to_quantised_weights_is_seen(hashed: list[Any]) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model, other = (nn.Sequential(nn.Linear(32, 32)) for _ in range(2))
    for each in (model, other):
        quantize_(each, Int8WeightOnlyConfig())
    before = fingerprint_of(model)
    assert fingerprint_of(model) == before and len(hashed) == 1
    with torch.no_grad():
        model[0].weight.copy_(other[0].weight)
    assert fingerprint_of(model) != before


@pytest.mark.parametrize(
    "change",
    [
        write_in_place,
        replace_memory,
        cast_and_cast_back,
        replace_tensor,
        take_a_fused_step,
        take_a_step,
        write_a_buffer,
    ],
)
def test_what_changes_weights_is_seen(change: Callable[[Any], None]) -> None:
    model = network()
    before = fingerprint_of(model)
    change(model)
    now = fingerprint_of(model)
    assert now != before and now == fingerprint_of(model, anew=True)


def test_nothing_is_hashed_twice(hashed: list[Any]) -> None:
    """This holds when a step trains another model; each of two models is hashed by itself."""
    model, other = network(), network()
    assert fingerprint_of(model) == fingerprint_of(model) == fingerprint_of(model, without="pooler")
    take_a_step(other)
    fingerprint_of(model)
    assert len(hashed) == 1
    fingerprint_of(other)
    fingerprint_of(model, anew=True)
    assert len(hashed) == 3


def test_what_is_put_back_is_known_again(hashed: list[Any]) -> None:
    model = network()
    before, weight = fingerprint_of(model), model[0].weight.detach().clone()
    with restored(model, ["0.weight"]):
        write_in_place(model)
        assert fingerprint_of(model) != before
        model[0].weight.data.copy_(weight)
    assert (fingerprint_of(model), len(hashed)) == (before, 2)
    with pytest.raises(ValueError), restored(model, ["0.weight"]):
        write_in_place(model)
        raise ValueError
    assert fingerprint_of(model) != before


@pytest.mark.parametrize("change", [cast_and_cast_back, replace_tensor, replace_memory, write_a_buffer, take_a_step])
def test_what_somebody_else_changed_meanwhile_is_not_known_again(change: Callable[[Any], None]) -> None:
    model = network()
    before = fingerprint_of(model)
    with restored(model, ["0.weight"]):
        change(model)
    assert fingerprint_of(model) == fingerprint_of(model, anew=True) != before


def test_weights_that_count_nothing_are_hashed_each_time() -> None:
    with torch.inference_mode():
        model = network()
        before = fingerprint_of(model)
        model[0].weight += 1
    assert fingerprint_of(model) != before
