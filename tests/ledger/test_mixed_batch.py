"""Batches of many tasks: large groups get the switched model's exact logits, small groups the same logits up to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from torch import Tensor, nn

from forgetfree.core.readout_model import ReadoutModel
from forgetfree.core.regions import Region
from forgetfree.errors import TaskError, UsageError
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.ledger import Ledger, Record
from forgetfree.ledger.mixed_batch import MixedBatchModel
from forgetfree.ledger.switch import LedgerSwitch
from forgetfree.models.loading import LoadedModel, load_model
from forgetfree.testing.tiny import HIDDEN

TASKS = ("a", "b", "c", "d", "e")
#: Families with norms other than LayerNorm, with a tensor outside of all layers, or (OPT) with layers that get flattened rows.
EXACT = {
    *("Deberta", "DebertaV2", "XLNet", "OPT", "T5", "MT5", "UMT5", "Phi3"),
    *("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3Text"),
}


def ledger_of(model: ReadoutModel, way: str = "union", size: int = 12, small: str = "", **changes: Any) -> Ledger:
    """Return a ledger of random regions that share entries; ``small`` tasks change little; each task has 2, 3 or 4 labels."""
    space = model.space()
    generator = torch.Generator().manual_seed(3)
    ledger = Ledger(space, "unknown", "selection" if way == "selection" else "parents")
    for number, task in enumerate(TASKS):
        drawn = torch.randint(len(space), (size + number,), generator=generator)
        region = Region.of(torch.cat([drawn, torch.tensor([0, 5, len(space) - 1])]))
        parents = {"union": TASKS[number - 1], "tree": ("", "", "a", "c", "b")[number]} if number else {}
        parent = parents.get(way, "")
        owned = ledger.free(region, parent)
        values = space.gather(model.backbone, owned.indices)
        values = values + torch.randn(len(owned), generator=generator).to(values) * (1e-5 if task in small else 1)
        ledger.append(Record(task, region, Graft(owned, values), 0.1, parent=parent, **changes.get(task, {})))
        words = (7, 9, 11, 13)[: 2 + number % 3] if model.readout == "prompt" else ()
        model.add_task(task, 2 + number % 3, words, seed=number)
    return ledger


def mixed_of(model: ReadoutModel, ledger: Ledger, **options: Any) -> MixedBatchModel:
    return MixedBatchModel(model, LedgerSwitch(ledger, model.backbone, check=False), **options)


@torch.no_grad()
def expected(model: ReadoutModel, ledger: Ledger, rows: list[Tensor], tasks: list[str], pad: int) -> list[Tensor]:
    """Return the switched model's answers; the rows of each task are one batch."""
    switch, answers = LedgerSwitch(ledger, model.backbone, check=False), {}
    for task in set(tasks):
        numbers = [number for number, other in enumerate(tasks) if other == task]
        x = nn.utils.rnn.pad_sequence([rows[i] for i in numbers], batch_first=True, padding_value=pad)
        with switch.task(task):
            answers |= zip(numbers, model(x, model.task_label(task)), strict=True)
    return [answers[number] for number in range(len(rows))]


def both(
    model: Any, ledger: Ledger, rows: list[Tensor], tasks: str, pad: int | None, **options: Any
) -> tuple[list[Tensor], list[Tensor], MixedBatchModel]:
    """Return the answers of a `MixedBatchModel`, those of the switched model, and the `MixedBatchModel`."""
    mixed = mixed_of(model, ledger, pad=pad, **options)
    return mixed.answer(rows, list(tasks)), expected(model, ledger, rows, list(tasks), pad or 0), mixed


def rows_of(loaded: LoadedModel, tasks: Sequence[str]) -> list[Tensor]:
    """Return rows of two to fourteen tokens."""
    generator = torch.Generator().manual_seed(1)
    words = sorted(set(range(len(loaded.tokenizer))) - set(loaded.tokenizer.all_special_ids))
    drawn = [torch.randint(len(words), (2 + 5 * i % 13,), generator=generator) for i in range(len(tasks))]
    return [torch.tensor(words)[each] for each in drawn]


@pytest.fixture(autouse=True)
def corrected_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow corrections for regions of any size: in tiny models, a region is a large share of the space."""
    monkeypatch.setattr("forgetfree.ledger.mixed_batch._MOST", 1)


@pytest.fixture
def loaded(model_directory: Any) -> LoadedModel:
    found = load_model(str(model_directory("bert")), "linear")
    found.model.eval()
    return found


def close(answers: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.allclose(one, other, atol=2e-5, rtol=0) for one, other in zip(answers, others, strict=True))


def same(answers: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(answers, others, strict=True))


# -- What it answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["union", "selection", "alone", "tree"])
def test_groups_have_the_bits_of_the_switched_model(loaded: LoadedModel, way: str) -> None:
    ledger, tasks = ledger_of(loaded.model, way), "abbacabacccabc"
    answers, exact, _ = both(loaded.model, ledger, rows_of(loaded, tasks), tasks, loaded.pad)
    assert [len(row) for row in answers] == [{"a": 2, "b": 3, "c": 4}[task] for task in tasks]
    assert same(answers, exact)


@pytest.mark.sampled("ac-alone")
@pytest.mark.parametrize("way", ["union", "selection", "alone", "tree"])
@pytest.mark.parametrize("tasks", ["eadbc", "aebbe", "ddabcccccd", "ac"])
def test_small_groups_have_its_logits(loaded: LoadedModel, way: str, tasks: str) -> None:
    """The tasks lie before and after the shared stage; one batch also has a large group."""
    ledger = ledger_of(loaded.model, way)
    rows = rows_of(loaded, list(tasks))
    mixed = mixed_of(loaded.model, ledger, pad=loaded.pad)
    exact = expected(loaded.model, ledger, rows, list(tasks), loaded.pad)
    for _ in range(2):  # the first call compares with exact logits, the second trusts the corrections
        answers = mixed.answer(rows, list(tasks))
        assert close(answers, exact)
    assert not mixed._exact
    assert not same(answers, exact)
    bare = expected(loaded.model, ledger, rows, list(tasks), loaded.pad)
    assert same(exact, bare)  # θ_pre is unchanged


@pytest.mark.sampled("ModernBert", "OPT")
@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_family_is_corrected_or_answered_exactly(tmp_path: Path, name: str) -> None:
    """Families differ in shared layers, kinds of norms, tensors outside of layers, and rows in the second dimension."""
    loaded = load_model(str(families.write(name, tmp_path)), "linear")
    loaded.model.eval()
    ledger = ledger_of(loaded.model, size=200)
    mixed = mixed_of(loaded.model, ledger, pad=loaded.pad)
    for tasks in ("edcba", "abcde"):
        rows = rows_of(loaded, list(tasks))
        answers, exact = mixed.answer(rows, list(tasks)), expected(loaded.model, ledger, rows, list(tasks), loaded.pad)
        assert close(answers, exact)
        assert same(answers, exact) == (name in EXACT)
    assert {task for task, _ in mixed._proven} == (set() if name in EXACT else set("abde"))  # c is at the shared stage


# -- What stays exact ------------------------------------------------------------------------------------


def test_large_changes_stay_exact(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    ledger = ledger_of(loaded.model, size=len(loaded.model.space()) // 100)
    answers, exact, _ = both(loaded.model, ledger, rows_of(loaded, "abcde"), "abcde", loaded.pad)
    assert same(answers, exact)


def test_all_is_exact_where_that_is_asked_for(loaded: LoadedModel) -> None:
    tasks = list("abcde")
    answers, exact, _ = both(
        loaded.model, ledger_of(loaded.model), rows_of(loaded, tasks), "abcde", loaded.pad, smallest_group=1
    )
    assert same(answers, exact)


class Vision(ReadoutModel):
    """A norm with buffers and two linear layers; the second may be used without being called."""

    def __init__(self, *, called: bool = True) -> None:
        backbone = nn.ModuleDict(
            {"norm": nn.BatchNorm1d(6), "first": nn.Linear(6, HIDDEN), "second": nn.Linear(HIDDEN, HIDDEN)}
        )
        super().__init__(tiny.pre_trained(lambda: backbone), "linear")
        self.called = called

    @property
    def hidden_size(self) -> int:
        return HIDDEN

    def features(self, x: Tensor) -> Tensor:
        layers: Any = self.backbone
        hidden = layers.first(layers.norm(x)).tanh()
        second = layers.second
        return second(hidden) if self.called else nn.functional.linear(hidden, second.weight, second.bias)


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("buffers", [{}, {"norm.running_mean": torch.full((6,), 3.0)}])
def test_a_module_that_is_not_called_is_noticed_and_buffers_are_the_tasks(
    called: bool, buffers: dict[str, Tensor]
) -> None:
    """The rows are vectors, without a length."""
    model = Vision(called=called).eval()
    rows = list(torch.randn(5, 6, generator=torch.Generator().manual_seed(0)))
    answers, exact, mixed = both(model, ledger_of(model, c={"buffers": buffers}), rows, "edcba", None)
    assert close(answers, exact)
    assert bool(mixed._exact) == (not called)


@pytest.mark.sampled("alone")
@pytest.mark.parametrize("way", ["union", "selection", "alone", "tree"])
def test_tiny_changes_do_not_vouch_for_large_ones(loaded: LoadedModel, way: str) -> None:
    """A layer may compute otherwise than its class; the error is invisible where corrections hardly move the logits."""
    ledger = ledger_of(loaded.model, way, size=500, small="abc")
    layer: Any = loaded.model.backbone.get_submodule("encoder.layer.0.intermediate.dense")
    layer.forward = lambda x: 2 * nn.functional.linear(x, layer.weight, layer.bias)
    mixed = mixed_of(loaded.model, ledger, pad=loaded.pad)
    for tasks in ("abc", "abcde"):
        rows = rows_of(loaded, tasks)
        answers, exact = mixed.answer(rows, list(tasks)), expected(loaded.model, ledger, rows, list(tasks), loaded.pad)
        assert close(answers, exact)
        assert mixed._exact == (set() if tasks == "abc" else {"d", "e"})


# -- What it leaves behind -------------------------------------------------------------------------------


def test_the_model_is_left_as_it_was(loaded: LoadedModel) -> None:
    ledger = ledger_of(loaded.model)
    loaded.model.train()
    loaded.model.backbone.get_submodule("encoder.layer.0").eval()
    modes = [module.training for module in loaded.model.modules()]
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    mixed = mixed_of(loaded.model, ledger, pad=loaded.pad)
    with torch.random.fork_rng():
        drawn = torch.get_rng_state()
        mixed.answer(rows_of(loaded, list("abcde")), list("abcde"))
        assert torch.equal(torch.get_rng_state(), drawn)
    with pytest.raises(IndexError):
        mixed.answer([torch.tensor([10**6])] * 2, ["a", "b"])
    assert all(torch.equal(before[name], tensor) for name, tensor in loaded.model.state_dict().items())
    assert [module.training for module in loaded.model.modules()] == modes
    assert not any(module._forward_hooks for module in loaded.model.modules())


def test_the_ledger_may_grow_meanwhile(loaded: LoadedModel) -> None:
    ledger = ledger_of(loaded.model)
    mixed = mixed_of(loaded.model, ledger, pad=loaded.pad)
    mixed.answer(rows_of(loaded, list("ab")), list("ab"))
    owned = ledger.free(Region.of([1, 2, 3]), "e")
    ledger.append(Record("new", Region.of([1, 2, 3]), Graft(owned, torch.full((len(owned),), 2.0)), 0.1, parent="e"))
    loaded.model.add_task("new", 2)
    tasks = ["new", "a", "e"]
    rows = rows_of(loaded, tasks)
    assert close(mixed.answer(rows, tasks), expected(loaded.model, ledger, rows, tasks, loaded.pad))


def test_nothing_is_answered_for_nothing(loaded: LoadedModel) -> None:
    mixed = mixed_of(loaded.model, ledger_of(loaded.model))
    assert mixed.answer([], []) == []
    with pytest.raises(UsageError, match="got 1 row and 2 tasks"):
        mixed.answer([torch.tensor([1])], ["a", "b"])
    with pytest.raises(TaskError, match="holds no task 'z'"):
        mixed.answer([torch.tensor([1])], ["z"])
