"""What is noted while a strategy learns: what it says at rest, what its updates move, what it tells of its progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from forgetfree.learning.monitor import PHASES, Monitor
from forgetfree.testing.faults import Faults, differing, listed
from forgetfree.testing.runs import Look, Run, look


class Observer:
    """What holds at rest, before the first task and after each."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        #: What `bytes_kept` said each time.
        self.bytes: list[Any] = []

    def __call__(self, strategy: Any) -> Look:
        """Look at the strategy; twice over before the first task and after the last."""

        def weights() -> dict[str, Tensor]:  # buffers may be put back later: by the next task, or by an evaluation
            return {name: p.detach().clone() for name, p in strategy.model.named_parameters()}

        before = weights()
        seen = look(strategy)
        if moved := differing(before, weights()):
            self._faults.add(
                f"evaluate: expected to find the model as it was before, got {listed(moved)} changed. Put "
                "back after the yield of answering() what was changed before it."
            )
        if len(strategy.learned) in (0, len(strategy.stream.tasks)):
            backwards = look(strategy, list(strategy.stream.benchmark.test_stream)[::-1])
            if changed := seen.differs(backwards):
                self._faults.add(
                    f"evaluate: expected the same answers in any order of the tasks, got others, {changed}. Look at "
                    "answering()."
                )
        self.bytes.append(strategy.bytes_kept())
        return seen


class Watch:
    """As an Avalanche plugin: which parameters an update moves that it must not."""

    def __init__(self) -> None:
        self._before: dict[str, Tensor] = {}
        self._moved: dict[str, None] = {}
        #: By task, the parameters that its updates may move.
        self.listed: dict[str, set[str]] = {}

    def before_update(self, strategy: Any, **_: Any) -> None:
        """Note what must stay."""
        task, trained = strategy.task, strategy.training.trained
        free = {id(parameter) for parameter in (*trained.touched, *trained.parameters, *strategy.training.readout)}
        parameters = dict(strategy.model.named_parameters())
        self.listed[task.name] = {name for name, parameter in parameters.items() if id(parameter) in free}
        self._before = {n: p.detach().clone() for n, p in parameters.items() if n not in self.listed[task.name]}

    def after_update(self, strategy: Any, **_: Any) -> None:
        """Compare the tensors with what may have moved."""
        now = dict(strategy.model.named_parameters())
        self._moved |= dict.fromkeys(n for n, was in self._before.items() if not torch.equal(was, now[n]))

    def report(self, faults: Faults) -> None:
        """What moved."""
        if self._moved:
            faults.add(
                "training: expected an update to move nothing but what begin(task) lists as trained.touched and readout, got "
                f"{listed(list(self._moved))} moved. List it there, or look at trained.write()."
            )


class Recorder(Monitor):
    """Notes every phase with the steps announced and the numbers heard."""

    def __init__(self) -> None:
        self._phases: list[tuple[str, Any, int, list[int]]] = []

    @contextmanager
    def phase(self, task: str, phase: Any, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Note one."""
        heard: list[int] = []
        yield lambda step, loss: heard.append(step)
        self._phases.append((task, phase, steps, heard))

    def report(self, faults: Faults, run: Run) -> None:
        """What was said of them."""
        for task, phase, steps, heard in self._phases:
            if phase not in PHASES:
                faults.add(
                    f"progress: expected a phase of {', '.join(PHASES)}, got {phase!r}. Look at self.monitor.phase(…)."
                )
            if task not in run.tasks:
                faults.add(f"progress: expected a task of the stream, got {task!r}. Look at self.monitor.phase(…).")
            if heard != list(range(1, steps + 1)):
                faults.add(
                    f"progress: expected to hear of each step of {phase} that was announced, 1 to {steps}, got {len(heard)}: "
                    f"{listed(list(map(str, heard))) or 'none'}. Look at Training.steps, and at self.monitor.phase(…)."
                )
        trained = {task for task, phase, _, heard in self._phases if heard and phase != "evaluate"}
        # Nothing needs to be trained for a task that was learned with an earlier one.
        new = [task for task, learned in zip(run.tasks, run.learned, strict=False) if task not in learned]
        if mute := [task for task in new if task not in trained]:
            faults.add(
                f"progress: expected to hear of the training of every task, got no step of {listed(mute)}. Look at "
                "Training.steps, and train within self.monitor.phase(…)."
            )
