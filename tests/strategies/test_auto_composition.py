"""``composition=auto``: each task on the union so far or on θ_pre alone, as its validation rows prefer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from forgetfree import registry
from forgetfree.checkpoint import Checkpoint
from forgetfree.continual import region_strategy
from forgetfree.jobs.checkpoints import pack
from forgetfree.ledger.ledger import Record
from forgetfree.tensor_file import checksum
from forgetfree.training.encoded_task import predict
from forgetfree.training.monitor import Monitor

MakeStream = Callable[..., Any]
TASKS = ("qnli", "ag_news", "sst2")
OPTIONS: dict[str, Any] = {
    **{"steps": 4, "batch_size": 4, "optimizer": "sgd", "learning_rate": 0.2, "sparsity": 0.05},
    **{"mask_steps": 2, "mask_batch_size": 12},
}


def learn(stream: Any, **changes: Any) -> Any:
    cls = registry.strategy("grafting-continual")
    strategy = cls(stream=stream, options=cls.Options(**OPTIONS | changes), device="cpu")
    for experience in stream.benchmark.train_stream:
        strategy.train(experience)
    return strategy


def prefer(monkeypatch: pytest.MonkeyPatch, alone: set[str]) -> None:
    """Let validation rows prefer that these tasks stand alone."""

    asked = Counter[str]()

    def loss(model: Any, task: Any, rows: Any, options: Any) -> float:
        asked[task.name] += 1
        is_alone = asked[task.name] % 2 == 1  # first, before the training on the union
        return float(is_alone != (task.name in alone))

    monkeypatch.setattr(region_strategy, "loss_of", loss)


def assert_same(one: Record, other: Record) -> None:
    assert one.region == other.region and one.owned.region == other.owned.region
    assert torch.equal(one.owned.values, other.owned.values)
    assert one.readout.keys() == other.readout.keys()
    assert all(torch.equal(tensor, other.readout[name]) for name, tensor in one.readout.items())


@pytest.mark.sampled("alone2")
@pytest.mark.parametrize("alone", [set(), {"ag_news"}, {"sst2"}, {"ag_news", "sst2"}])
def test_each_task_is_that_of_the_composition_that_is_preferred(
    tiny_stream: MakeStream, monkeypatch: pytest.MonkeyPatch, alone: set[str], tmp_path: Path
) -> None:
    """Bit for bit the task of a run of that composition, whose stream lacks the earlier tasks that stand alone."""
    prefer(monkeypatch, alone)
    stream = tiny_stream()
    cls = registry.strategy("grafting-continual")
    strategy = cls(stream=stream, options=cls.Options(**OPTIONS, composition="auto"), device="cpu")
    answers: dict[str, Any] = {}
    for task, experience in zip(stream.tasks, stream.benchmark.train_stream, strict=True):
        strategy.train(experience)
        answers[task.name] = strategy.evaluate([task])[task.name].logits
    assert [record.alone for record in strategy.ledger.records] == [task in alone for task in TASKS]

    united = [task for task in TASKS if task not in alone]
    union = learn(tiny_stream(stream=",".join(united)))
    apart = learn(tiny_stream(), composition="alone")
    for record in strategy.ledger.records:
        other = apart if record.alone else union
        assert_same(record, other.ledger.records[other.ledger.position(record.task)])
    final = strategy.evaluate()
    for task in TASKS:  # forget-free
        other = apart if task in alone else union
        assert (final[task].logits == answers[task]).all()
        assert (
            final[task].logits
            == other.evaluate([each for each in other.stream.tasks if each.name == task])[task].logits
        ).all()

    strategy.save(tmp_path)
    again = cls(stream=tiny_stream(), options=strategy.options, device="cpu")
    again.load(tmp_path)
    assert [record.alone for record in again.ledger.records] == [record.alone for record in strategy.ledger.records]
    loaded = again.evaluate()
    assert all((loaded[task].logits == final[task].logits).all() for task in TASKS)
    assert torch.equal(strategy.space.flatten(strategy.model.backbone), union.space.flatten(union.model.backbone))


@pytest.mark.sampled(share=0.4)
def test_what_has_the_lower_loss_on_validation_rows_is_recorded(tiny_stream: MakeStream) -> None:
    """By a slow search: the task of a run of each composition, with its loss on all validation rows, row by row."""
    chosen = []
    for learning_rate in (0.02, 0.4):
        auto = learn(tiny_stream(stream="qnli,sst2"), composition="auto", learning_rate=learning_rate)
        rivals = []
        for way in ("union", "alone"):
            rival = learn(tiny_stream(stream="qnli,sst2"), composition=way, learning_rate=learning_rate)
            task = rival.stream.tasks[1]
            with rival.answering(task):
                logits = predict(rival.model, task.validation, batch_size=1)
            _, y, _ = task.validation.batch(range(len(task.validation)))
            rivals.append((round(float(F.cross_entropy(logits, y)), 6), rival.ledger.records[1]))
        alone = rivals[1][0] < rivals[0][0]
        assert auto.ledger.records[1].alone == alone
        assert_same(auto.ledger.records[1], rivals[alone][1])
        chosen.append(alone)
    assert set(chosen) == {True, False}


class Starts(Checkpoint):
    """Notes what each phase is known by."""

    def __init__(self) -> None:
        self.known_by: list[str] = []

    def begin(self, steps: int, state: Any, *about: Any) -> int:
        text, tensors = pack([steps, state.state_dict() | {"generators": None}, about])
        self.known_by.append(checksum(tensors, {"state": text}))
        return 0


def test_a_checkpoint_tells_both_trainings_apart(tiny_stream: MakeStream) -> None:
    """Where nothing of γ is owned, both start from the same values with the same seed; what they stand on differs."""
    starts, monitor = Starts(), Monitor()
    monitor.checkpoint = lambda: starts  # type: ignore[method-assign]
    stream, cls = tiny_stream(stream="qnli,sst2"), registry.strategy("grafting-continual")
    apart = {"sparsity": 0.001, "region_from": "random"}
    options = cls.Options(**OPTIONS | apart, composition="auto")
    strategy = cls(stream=stream, options=options, device="cpu", monitor=monitor)
    for experience in stream.benchmark.train_stream:
        strategy.train(experience)
    first, second = (record.region for record in strategy.ledger.records)
    assert len(first & second) == 0 and len(first) and len(second)
    assert len(starts.known_by) == 5  # a readout and a region each; the second region trained twice
    assert len(set(starts.known_by)) == 5
