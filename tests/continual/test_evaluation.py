"""Answers that are reused from one row of the learning matrix to the next equal those of a full evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from forgetfree import registry
from forgetfree.continual.strategy import ContinualStrategy, StreamAnswers
from forgetfree.continual.strategy_parts import Training
from forgetfree.continual.task_inference import answer_for
from forgetfree.kinds.kind import Kind
from forgetfree.options import build
from forgetfree.testing import tiny_stream
from forgetfree.training.encoded_task import EncodedTask

SMALL = {"steps": 3, "batch_size": 4, "learning_rate": 0.05, "evaluation_batch_size": 5}
NAMES = ("qnli", "ag_news", "sst2")


def make(name: str, **how: Any) -> ContinualStrategy:
    cls = registry.strategy(name)
    known = cls.Options.model_fields
    stream = tiny_stream(how.pop("tasks", NAMES), **how.pop("of", {}))
    options = {"sparsity": 0.05, "mask_steps": 1, "rank": 2} | SMALL | how
    return cls(stream=stream, options=build(cls.Options, {k: v for k, v in options.items() if k in known}, name))


def learn(strategy: ContinualStrategy, answers: StreamAnswers) -> list[dict[str, Any]]:
    rows = [answers.before()]
    for task, experience in zip(strategy.stream.tasks, strategy.stream.benchmark.train_stream, strict=True):
        strategy.train(experience)
        rows.append(answers.after(task))
    return rows


def count_rows(strategy: ContinualStrategy) -> list[tuple[str, int]]:
    """Return a list that records each evaluation from now on: task and number of rows."""
    counted: list[tuple[str, int]] = []
    evaluate = strategy.evaluate

    def counting(tasks: Any = None) -> Any:
        found = evaluate(tasks)
        counted.extend(
            (name, len(each.lengths if each.labels is None else each.labels)) for name, each in found.items()
        )
        return found

    strategy.evaluate = counting  # type: ignore[method-assign]
    return counted


@pytest.mark.sampled(share=0.35)
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("continual-ft", {}),
        ("packnet", {"of": {"scenario": "class"}}),
        ("grafting-continual", {"of": {"scenario": "class"}, "task_inference": "router"}),
    ],
    ids=str,
)
def test_rows_are_those_of_a_full_evaluation(name: str, how: dict[str, Any]) -> None:
    strategy = make(name, **dict(how))
    answers = StreamAnswers(strategy)
    full: list[dict[str, Any]] = [strategy.evaluate()]
    rows = [answers.before()]
    for task, experience in zip(strategy.stream.tasks, strategy.stream.benchmark.train_stream, strict=True):
        strategy.train(experience)
        rows.append(answers.after(task))
        full.append(strategy.evaluate())
    assert not answers.broken
    for row, expected in zip(rows, full, strict=True):
        assert list(row) == list(expected)
        for task_name, found in row.items():
            assert torch.equal(torch.from_numpy(found.logits), torch.from_numpy(expected[task_name].logits))
            assert np.array_equal(found.labels, expected[task_name].labels)


def test_a_learned_task_is_evaluated_once_and_then_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kind, "checked_rows", 4)
    strategy = make("bitfit", evaluation_batch_size=2)
    counted = count_rows(strategy)
    learn(strategy, StreamAnswers(strategy, upper_triangle=False))
    size = len(strategy.stream.tasks[0].test)
    assert size > 4
    for i in range(3):  # samples of earlier tasks, the whole new task, and a sample of it
        expected = [*((name, 4) for name in NAMES[:i]), (NAMES[i], size), (NAMES[i], 4)]
        assert counted[: len(expected)] == expected
        del counted[: len(expected)]
    assert not counted


def test_of_texts_eight_are_written_again() -> None:
    strategy = make("bitfit", tasks=NAMES[:2], of={"readout": "generate"}, steps=1)
    counted = count_rows(strategy)
    learn(strategy, StreamAnswers(strategy, upper_triangle=False))
    assert counted == [("qnli", 16), ("qnli", 8), ("qnli", 8), ("ag_news", 16), ("ag_news", 8)]


class Forgetful(ContinualStrategy):
    """Claims to forget nothing, but trains one model for all tasks."""

    forget_free: ClassVar[bool] = True

    def begin(self, task: EncodedTask) -> Training:
        return self.everything(task)

    @contextmanager
    def answering(self, task: EncodedTask) -> Iterator[None]:
        yield


def test_a_broken_claim_is_told_and_scored_as_it_is() -> None:
    stream = tiny_stream(NAMES)
    strategy = Forgetful(stream=stream, options=build(Forgetful.Options, SMALL, "it"))
    answers = StreamAnswers(strategy)
    answers.before()
    for task, experience in zip(stream.tasks, stream.benchmark.train_stream, strict=True):
        strategy.train(experience)
        row = answers.after(task)
        for name, found in strategy.evaluate().items():
            assert np.array_equal(found.logits, row[name].logits)
    assert answers.broken == [
        "forget_free is True, but learning ag_news changed the predictions for qnli",
        "forget_free is True, but learning sst2 changed the predictions for qnli, ag_news",
    ]


def test_a_claim_that_breaks_for_long_rows_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kind, "checked_rows", 6)
    strategy = make("grafting-continual", evaluation_batch_size=8)
    answering = strategy.answering

    @contextmanager
    def turned(task: EncodedTask) -> Iterator[Any]:
        longest = sorted(task.test.lengths)[-len(task.test) // 4]

        def answer(x: torch.Tensor, t: Any) -> torch.Tensor:
            return strategy.model(x, t) + (x.ne(0).sum(1, keepdim=True) >= longest) * float(len(strategy.learned))

        with answering(task):
            yield answer

    monkeypatch.setattr(strategy, "answering", turned)
    answers = StreamAnswers(strategy, upper_triangle=False)
    learn(strategy, answers)
    assert len(answers.broken) == 2


def test_the_router_enters_each_model_once_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = make("fine-tune", of={"scenario": "class"}, task_inference="router", evaluation_batch_size=2)
    learn(strategy, StreamAnswers(strategy, upper_triangle=False))
    entered: list[str] = []
    answering = strategy.answering
    monkeypatch.setattr(strategy, "answering", lambda task: entered.append(task.name) or answering(task))
    ahead = strategy.evaluate()
    assert entered == list(NAMES) * len(NAMES)
    monkeypatch.setattr(
        "forgetfree.continual.template.answer_for", lambda strategy, task, _: answer_for(strategy, task)
    )
    for name, answers in strategy.evaluate().items():  # without precomputed answers, batch by batch
        assert np.array_equal(answers.logits, ahead[name].logits)
    assert len(entered) > 2 * len(NAMES) ** 2
