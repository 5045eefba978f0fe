"""Training on all data at once, with Avalanche: not continual learning, but a reference for it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

from avalanche.training import supervised

from forgetfree.continual.adapter import TemplateStrategy
from forgetfree.continual.strategy_parts import Training, undo_on_error
from forgetfree.options import option
from forgetfree.training.encoded_task import EncodedTask
from forgetfree.training.training_options import TrainingOptions


class Cumulative(TemplateStrategy, supervised.Cumulative):
    """Train each task on its examples together with those of all earlier tasks."""

    dataset: Any

    def setup(self) -> None:
        """Count all rows as stored."""
        self.keep_beside(lambda: self.dataset)

    def begin(self, task: EncodedTask) -> Training:
        """Train everything. The rows of an interrupted task are dropped."""
        self.scope.enter_context(undo_on_error(partial(setattr, self, "dataset", self.dataset)))
        return self.everything_by_avalanche(task)


class JointOptions(TrainingOptions):
    """Options of `Joint`, in addition to those of training."""

    steps_factor: float = option(
        1.0,
        "factor on the sum of the steps of all tasks; with a value above 1, such as 4, joint comes closer to an "
        "upper bound",
        above=0,
    )


class Joint(TemplateStrategy, supervised.JointTraining):
    """Train once on the examples of all tasks, for ``steps_factor`` times the sum of their steps.

    The first experience trains on the whole stream; later experiences do nothing, so nothing is forgotten. With a
    factor of 1, it is not an upper bound on other strategies: examples of all tasks are mixed, and a task that needs many
    steps may be learned less well within these steps than alone.
    """

    Options = JointOptions

    def setup(self) -> None:
        """Count all rows as stored."""
        self.keep_beside(lambda: [experience.dataset for experience in self.stream.benchmark.train_stream])

    def train(self, experiences: Any, eval_streams: Any = None, **kwargs: Any) -> Any:
        """Train on the whole stream, once."""
        for experience in experiences if isinstance(experiences, Iterable) else [experiences]:
            self.check_experience(experience)
        if self.learned:
            return self.evaluator.get_last_metrics()
        return super().train(self.stream.benchmark.train_stream, eval_streams, **kwargs)

    def begin(self, task: EncodedTask) -> Training:
        """Train everything on all tasks."""
        tasks, options = self.stream.tasks, cast(JointOptions, self.options)
        steps = max(1, round(options.steps_factor * sum(task.full_steps(options) for task in tasks)))
        return self.everything_by_avalanche(task, steps=steps, learns=tasks)

    def changed_by(self, learned: EncodedTask) -> list[EncodedTask] | None:
        """Return all tasks for the first, none for the others."""
        return None if learned is self.stream.tasks[0] else []
