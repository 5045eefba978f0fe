"""A strategy learns a stream, and is looked at: what it answers, and by which tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgetfree.continual.strategy import ContinualStrategy, Training
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.testing.faults import differing, listed, tensors

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Look:
    """What a strategy answers at one moment.

    Attributes:
        logits: of every task.
        models: of every task, all tensors of the model that answered it.
    """

    logits: Tensors
    models: dict[str, Tensors]

    def differs(self, other: Look, tasks: Iterable[str] | None = None) -> str:
        """Which of ``tasks`` (default: all) have other logits or another model, with the tensors; empty if none has."""
        models = {task: differing(self.models[task], other.models[task]) for task in tasks or self.models}
        answers = differing({t: self.logits[t] for t in models}, {t: other.logits[t] for t in models})
        if not answers and not any(models.values()):
            return ""
        changed = answers or [task for task, names in models.items() if names]
        names = list(dict.fromkeys(name for task in changed for name in models[task]))
        what = "the answers for" if answers else "the model of"
        return (
            f"{what} {listed(changed)} ({f'tensors that differ: {listed(names)}' if names else 'by the same tensors'})"
        )


class Untrained(ContinualStrategy):
    """Answers by the model as it finds it, and cannot be trained."""

    def begin(self, task: EncodedTask) -> Training:
        """Refuse."""
        raise NotImplementedError

    def answering(self, task: EncodedTask) -> AbstractContextManager[None]:
        """Change nothing."""
        return nullcontext()


class _Models:
    """As an Avalanche plugin: the tensors of the model that answers each task."""

    def __init__(self) -> None:
        self.seen: dict[str, Tensors] = {}

    def before_eval_forward(self, strategy: Any, **_: Any) -> None:
        if strategy.task.name not in self.seen:
            self.seen[strategy.task.name] = tensors(strategy.model)


def look(strategy: Any, experiences: Sequence[Any] | None = None) -> Look:
    """Return the answers to ``experiences``; default: the test rows of every task."""
    models = _Models()
    strategy.plugins.append(models)
    try:
        if experiences is None:
            strategy.evaluate()
        else:
            strategy.predictions = {}
            strategy.eval(experiences)
    finally:
        strategy.plugins.remove(models)
    logits = {name: torch.from_numpy(np.array(answer.logits)) for name, answer in strategy.predictions.items()}
    return Look(logits, models.seen)


class _Given:
    """As an Avalanche plugin: what the training steps of each task are given."""

    def __init__(self, steps: dict[str, list[Any]]) -> None:
        self._steps = steps

    def before_training_iteration(self, strategy: Any, **_: Any) -> None:
        drawn = torch.initial_seed() if strategy.options.dropout else None
        self._steps.setdefault(strategy.task.name, []).append((strategy.mb_x.tolist(), drawn))


@dataclass
class Run:
    """A strategy that has learned a stream.

    Attributes:
        strategy: with all that it has learned.
        looks: at its answers, by how many experiences it had learned.
        learned: the names of the tasks it had learned after so many.
        training_rows: its answers to the training rows of the first k tasks, after k of them.
        given: by task, what each of its training steps was given: rows, and the seed of dropout, if there is any.
    """

    strategy: Any
    looks: dict[int, Look] = field(default_factory=dict)
    learned: list[list[str]] = field(default_factory=list)
    training_rows: dict[int, Look] = field(default_factory=dict)
    given: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def tasks(self) -> list[str]:
        """The names of the stream's tasks."""
        return [task.name for task in self.strategy.stream.tasks]

    @property
    def last(self) -> Look:
        """The last look."""
        return self.looks[max(self.looks)]

    def differs(self, other: Run) -> str:
        """What of the results is not the same, if anything."""
        if difference := self.looks[0].differs(other.looks[0]):
            return f"{difference} before training"
        difference = self.last.differs(other.last)
        return difference and f"{difference} after the last task"


def learn(
    cls: type[ContinualStrategy],
    options: Any,
    stream: Stream,
    *,
    experiences: Iterable[Any] | None = None,
    look_after: Container[int] | None = None,
    rows_after: Container[int] = (),
    observe: Callable[[Any], Look] = look,
    drawn: int = 0,
    watch: Any = None,
    evaluate_within: bool = False,
    **arguments: Any,
) -> Run:
    """Learn ``stream`` by ``cls`` with ``options``.

    Args:
        cls: the strategy.
        options: its options.
        stream: what it learns.
        experiences: to train on; default: the stream's, one a task.
        look_after: how many experiences it has learned when it is looked at; default: at every one, and before the first.
        rows_after: how many it has learned when it is asked for their training rows, too.
        observe: looks at the strategy.
        drawn: the state of the global generators before.
        watch: an Avalanche plugin that the strategy does not know of.
        evaluate_within: evaluate the second task before, during and after the training of each.
        arguments: more for the constructor.
    """
    _draw_from(drawn)
    if evaluate_within:
        arguments |= {"eval_every": 2, "peval_mode": "iteration"}
    run = Run(cls(stream=stream, options=options, device="cpu", **arguments))  # whose bits compare
    run.strategy.plugins += [_Given(run.given), *([watch] if watch else [])]
    training = stream.benchmark.train_stream

    def note(count: int) -> None:
        if look_after is None or count in look_after:
            run.looks[count] = observe(run.strategy)
        run.learned.append([task.name for task in run.strategy.learned])
        if count in rows_after:
            run.training_rows[count] = look(run.strategy, list(training[:count]))

    note(0)
    for count, experience in enumerate(training if experiences is None else experiences, 1):
        run.strategy.train(experience, eval_streams=[stream.benchmark.test_stream[1:2]] if evaluate_within else None)
        note(count)
    return run


def _draw_from(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def own_randomness() -> Iterator[None]:
    """Leave the caller's generators as they were."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
