"""A model's state is kept, put back and saved bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from forgetfree.core.parameters import tensors_of
from forgetfree.errors import ModelError
from forgetfree.models.state import ModelState, StateStore
from forgetfree.models.task_model import TaskModel
from forgetfree.models.token_inputs import TokenLayout


@pytest.fixture
def model() -> TaskModel:
    """BERT with two linear readouts, a persistent buffer and one that is not persistent."""
    backbone, tokenizer = tiny.build("bert")
    backbone.register_buffer("seen", torch.tensor([1.5, -0.0]))
    backbone.register_buffer("scratch", torch.tensor([7.0]), persistent=False)
    model = TaskModel(backbone, TokenLayout(tokenizer.pad_token_id), "linear")
    for name, labels in (("first", 2), ("second", 3)):
        model.add_task(name, labels)
    return model


def known_or_made(store: StateStore, key: str, make: Callable[[], ModelState]) -> ModelState:
    """Return the state stored under a key; if there is none, make and store it."""
    with store.making(key) as known:
        if known is not None:
            return known
        made = make()
        store.put(key, made)
        return made


@torch.no_grad()
def disturb(model: TaskModel) -> None:
    """Change everything that training may change."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.add_(1)


def same(a: ModelState, b: ModelState) -> bool:
    def bits(state: ModelState) -> dict[str, bytes]:
        named = {"theta": state.theta, **{f"b/{name}": tensor for name, tensor in state.buffers.items()}}
        for task, tensors in state.readouts.items():
            named |= {f"{task}/{name}": tensor for name, tensor in tensors.items()}
        return {name: tensor.contiguous().numpy().tobytes() for name, tensor in named.items()}

    return bits(a) == bits(b)


def test_a_task_that_is_read_by_label_words_survives_the_file(tmp_path: Path) -> None:
    """Its readout has no tensor, but it is still a task."""
    backbone, tokenizer = tiny.build("bert-mlm")
    model = TaskModel(backbone, TokenLayout(tokenizer.pad_token_id, tokenizer.mask_token_id), "prompt")
    model.add_task("words", 2, (7, 8))
    store = StateStore(tmp_path)
    store.put("key", ModelState.of(model))
    state = store.get("key")
    assert state is not None and state.readouts == {"words": {}}
    state.load_(model, ["words"])


def test_a_state_is_put_back_bit_for_bit(model: TaskModel) -> None:
    state = ModelState.of(model)
    assert "seen" in state.buffers and "scratch" not in state.buffers
    disturb(model)
    assert not same(state, ModelState.of(model))  # the state is a copy, not the model's own tensors
    state.load_(model)
    assert same(state, ModelState.of(model))


def test_a_state_of_another_model_is_refused_before_anything_changes(model: TaskModel) -> None:
    state = ModelState.of(model)
    disturb(model)
    before = ModelState.of(model)
    first = dict(state.readouts["first"])
    for changes, message in (
        (
            {"theta": state.theta[:-1]},
            rf"expected 'theta' of shape \({len(state.theta)},\), got \({len(state.theta) - 1},\)",
        ),
        ({"buffers": {}}, "expected 'buffer, .*' of shape .*, got none"),
        ({"readouts": {**state.readouts, "second": first}}, r"'readout of second, \w+' of shape \(3.*got \(2"),
        (
            {"readouts": {"first": {"weight": first["weight"][:, :1], "bias": first["bias"]}}},
            r"of shape \(2, 16\), got \(2, 1\)",
        ),
    ):
        with pytest.raises(ModelError, match=f"The saved weights do not fit the model: .*{message}"):
            replace(state, **changes).load_(model)
    assert same(before, ModelState.of(model))


def test_putting_back_one_task_leaves_the_readouts_of_others(model: TaskModel) -> None:
    state = ModelState.of(model, ["second"])
    disturb(model)
    disturbed = tensors_of(model.readout_module(0))
    state.load_(model)
    assert all(torch.equal(disturbed[name], t) for name, t in tensors_of(model.readout_module(0)).items())
    assert same(state, ModelState.of(model, ["second"]))


def test_a_saved_state_is_the_same_state(model: TaskModel, tmp_path: Path) -> None:
    state = ModelState.of(model)
    state.save(tmp_path / "a" / "state.safetensors")
    assert same(state, ModelState.load(tmp_path / "a" / "state.safetensors"))
    assert "1/readout/weight" in load_file(tmp_path / "a" / "state.safetensors")


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_state_is_made_once(model: TaskModel, tmp_path: Path, on_disk: bool) -> None:
    store, made = StateStore(tmp_path if on_disk else None), []

    def make() -> ModelState:
        made.append(ModelState.of(model))
        return made[-1]

    assert store.get("key") is None
    first = known_or_made(store, "key", make)
    assert same(first, known_or_made(store, "key", make))
    known_or_made(store, "other", make)
    assert len(made) == 2


def test_a_damaged_file_is_made_again(model: TaskModel, tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    store.put("key", ModelState.of(model))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-10])
    assert store.get("key") is None
    remade = known_or_made(store, "key", lambda: ModelState.of(model))
    assert same(remade, ModelState.of(model))
    assert store.get("key") is not None
