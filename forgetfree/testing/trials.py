"""Trains a strategy on a stream and records its answers, the tensors behind them, the moved parameters and its claims.

Faults are collected in `Breaches`, and reported together.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.strategy_parts import Training
from forgetfree.continual.stream import Stream
from forgetfree.display import listed
from forgetfree.errors import ConformanceError, Faults
from forgetfree.results.answers import LabelAnswers
from forgetfree.training.encoded_task import EncodedTask

Tensors = dict[str, Tensor]


class Breaches(Faults):
    """The breaches of a contract found so far."""

    _cause: Exception | None = None

    @contextmanager
    def catching(self, what: str, remedy: str) -> Iterator[None]:
        """Convert an error that is raised inside into a fault of ``what``."""
        try:
            yield
        except Exception as error:
            self._cause = self._cause or error
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}"
            self.add(f"{what}: expected no error, got {type(error).__name__}: {error} ({where}). {remedy}")

    def raise_any(self, subject: str) -> None:
        """Raise ``ConformanceError`` with all breaches, if there are any."""
        if self:
            raise ConformanceError(subject, self) from self._cause


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every tensor of a model, buffers included."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Return the names whose tensors differ by a bit, or that only one of the two has."""
    return [
        name
        for name in dict.fromkeys([*one, *other])
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]


# -- Records -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """The answers of a strategy at one moment.

    Attributes:
        logits: the logits of each task; where texts are the answers, the losses and the ids of their tokens.
        models: for each task, all tensors of the model that answered it.
    """

    logits: Tensors
    models: dict[str, Tensors]

    def differs(self, other: Look, tasks: Iterable[str] | None = None) -> str:
        """Return a phrase on the ``tasks`` (default: all) with other logits or tensors; empty if there is none."""
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
    """Answers with the model in its current state, and cannot be trained."""

    def begin(self, task: EncodedTask) -> Training:
        """Refuse."""
        raise NotImplementedError

    def answering(self, task: EncodedTask) -> AbstractContextManager[None]:
        """Change nothing."""
        return nullcontext()


class _Models:
    """An Avalanche plugin that records the tensors of the model that answers each task."""

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
    return Look({name: _numbers(answers) for name, answers in strategy.predictions.items()}, models.seen)


def _numbers(answers: Any) -> Tensor:
    """Return the logits; where texts are the answers, the losses and the ids of their tokens, as one column."""
    if isinstance(answers, LabelAnswers):
        return torch.from_numpy(np.array(answers.logits))
    numbers = [each for name, each in sorted(answers.tensors().items()) if name != "texts"]
    return torch.from_numpy(np.concatenate(numbers, dtype=np.float64)).unsqueeze(1)


class Watch:
    """An Avalanche plugin that records the parameters that an update moves although it must not."""

    def __init__(self) -> None:
        self._before: dict[str, Tensor] = {}
        self._moved: dict[str, None] = {}
        #: By task, the parameters that its updates may move.
        self.listed: dict[str, set[str]] = {}

    def before_update(self, strategy: Any, **_: Any) -> None:
        """Copy the parameters that must not move."""
        task, trained = strategy.task, strategy.training.trained
        free = {id(parameter) for parameter in (*trained.touched, *trained.parameters, *strategy.training.readout)}
        parameters = dict(strategy.model.named_parameters())
        self.listed[task.name] = {name for name, parameter in parameters.items() if id(parameter) in free}
        self._before = {n: p.detach().clone() for n, p in parameters.items() if n not in self.listed[task.name]}

    def after_update(self, strategy: Any, **_: Any) -> None:
        """Record the parameters that have moved."""
        now = dict(strategy.model.named_parameters())
        self._moved |= dict.fromkeys(n for n, was in self._before.items() if not torch.equal(was, now[n]))

    def report(self, faults: Breaches) -> None:
        """Add the moved parameters to the breaches."""
        if self._moved:
            faults.add(
                "training: expected an update to move only the tensors that begin(task) lists as trained.touched and readout, "
                f"got {listed(self._moved)} moved. List them there, or check trained.write()."
            )


@dataclass
class Trial:
    """A strategy that has learned a stream.

    Attributes:
        strategy: the trained strategy.
        looks: its answers, by the number of experiences learned so far.
        learned: the names of the tasks learned so far, by the same number.
        training_rows: its answers to the training rows of the first k tasks, after k of them.
        watch: the parameters that its updates moved.
    """

    strategy: Any
    looks: dict[int, Look] = field(default_factory=dict)
    learned: list[list[str]] = field(default_factory=list)
    training_rows: dict[int, Look] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)

    @property
    def tasks(self) -> list[str]:
        """The names of the stream's tasks."""
        return [task.name for task in self.strategy.stream.tasks]

    @property
    def last(self) -> Look:
        """The last look."""
        return self.looks[max(self.looks)]

    def differs(self, other: Trial) -> str:
        """Return a phrase on the first difference of the results; empty if there is none."""
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
    evaluate_within: bool = False,
    **arguments: Any,
) -> Trial:
    """Train a strategy ``cls`` with ``options`` on ``stream``; ``arguments`` are further constructor arguments.

    ``observe`` is called after each number of learned tasks in ``look_after`` (default: all, also 0); after those in
    ``rows_after``, the training rows of the learned tasks are answered. ``drawn`` seeds the global generators before. With
    ``evaluate_within`` the second task is evaluated before, during and after the training of each.
    """
    for draw_from in (random.seed, np.random.seed, torch.manual_seed):
        draw_from(drawn)
    if evaluate_within:
        arguments |= {"eval_every": 2, "peval_mode": "iteration"}
    run = Trial(cls(stream=stream, options=options, device="cpu", **arguments))  # on a CPU, bits can be compared
    run.strategy.plugins.append(run.watch)  # in every run: a plugin makes all gradients be computed, so bits compare
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


# -- Records between tasks -------------------------------------------------------------------------------


class Observer:
    """Observes a strategy between tasks: before the first task and after each."""

    def __init__(self, faults: Breaches) -> None:
        self._faults = faults
        #: The result of `bytes_kept` each time.
        self.bytes: list[Any] = []

    def __call__(self, strategy: Any) -> Look:
        """Return a look at the strategy; report weights that evaluation changed."""

        def weights() -> dict[str, Tensor]:  # buffers may be put back later: by the next task, or by an evaluation
            return {name: p.detach().clone() for name, p in strategy.model.named_parameters()}

        before = weights()
        seen = look(strategy)
        if moved := differing(before, weights()):
            self._faults.add(
                f"evaluate: expected to find the model as it was before, got {listed(moved)} changed. "
                "After its yield, answering() must undo the changes that it made before."
            )
        self.bytes.append(strategy.bytes_kept())
        return seen
