"""The answers of a strategy on the test rows of a stream while it learns; what cannot have changed is not computed again.

A task that `ContinualStrategy.changed_by` does not name keeps its answers. So do learned tasks of a strategy that claims
``forget_free``, once a sample of their rows has been answered again with the same bits: a stream of T tasks costs T whole
evaluations of learned tasks in place of T².
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import torch

from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.streams import EncodedTask
from forgetfree.results.metrics import Predictions
from forgetfree.seeds import derive_seed

#: The rows of a learned task that are answered again, at least.
CHECKED_ROWS = 32


class StreamAnswers:
    """A strategy's answers on every task, brought up to date after each task that it learns.

    Args:
        strategy: before it learns the first task.
        upper_triangle: evaluate tasks before they are learned, too.

    Attributes:
        answers: the latest, by the names of the tasks that were evaluated.
        broken: a phrase for each time that ``forget_free`` was claimed and did not hold.
    """

    def __init__(self, strategy: ContinualStrategy, *, upper_triangle: bool = True) -> None:
        self._strategy, self._upper = strategy, upper_triangle
        self.answers: dict[str, Predictions] = {}
        self.broken: list[str] = []
        self._learned: list[EncodedTask] = []

    def before(self, known: dict[str, Predictions] | None = None) -> dict[str, Predictions]:
        """Return the answers before the first task, on all tasks or on none.

        Args:
            known: what they are; default: they are computed.
        """
        if self._upper:
            self.answers = dict(self._strategy.evaluate() if known is None else known)
        return dict(self.answers)

    def after(self, task: EncodedTask) -> dict[str, Predictions]:
        """Return the answers after ``task`` was learned: on all tasks, or on those learned so far."""
        strategy, before = self._strategy, list(self._learned)
        self._learned.append(task)
        named = strategy.changed_by(task)
        wanted = [
            each
            for each in (strategy.stream.tasks if self._upper else self._learned)
            if named is None or each in named or each.name not in self.answers
        ]
        # Where the stream withholds the task, a model for each task is chosen among those learned so far.
        claimed = strategy.forget_free and (strategy.stream.scenario == "task" or not strategy.taskwise)
        proved = [each for each in before if each in wanted] if claimed else []
        changed = self._changed(proved)
        if changed:
            names = ", ".join(each.name for each in changed)
            self.broken.append(
                f"forget_free: claimed as True, but learning {task.name} changed the answers for {names}"
            )
        unchanged = [each for each in proved if each not in changed]
        self.answers |= strategy.evaluate([each for each in wanted if each not in unchanged])
        return dict(self.answers)

    def _changed(self, tasks: Sequence[EncodedTask]) -> list[EncodedTask]:
        """Return the tasks of which a sample of rows is answered otherwise than before, in any bit."""
        strategy, rows = self._strategy, dict[str, list[int]]()

        def some(task: EncodedTask, batches: list[list[int]]) -> list[list[int]]:
            chosen = sample(batches, derive_seed(strategy.seed, "check", task.name, len(self._learned)))
            rows[task.name] = sorted(row for batch in chosen for row in batch)
            return chosen

        strategy.choose_batches = some
        try:
            again = strategy.evaluate(tasks)
        finally:
            strategy.choose_batches = None
        return [task for task in tasks if not _same(self.answers[task.name].logits[rows[task.name]], again[task.name])]


def sample(batches: list[list[int]], seed: int) -> list[list[int]]:
    """Return as many of the batches, spread evenly, as hold `CHECKED_ROWS` rows, if there are so many.

    They are whole, since the bits of a row's logits depend on the rows beside it.

    Args:
        batches: row numbers, each batch but the last of one size.
        seed: chooses the first.
    """
    count = len(batches)
    first = Random(seed).randrange(count)
    apart = min(count, max(1, count * len(batches[0]) // CHECKED_ROWS))
    chosen: list[list[int]] = []
    for i in sorted(range(count), key=lambda i: ((i - first) % count % apart, (i - first) % count)):
        if sum(map(len, chosen)) >= CHECKED_ROWS:
            break
        chosen.append(batches[i])
    return chosen


def _same(held: np.ndarray, again: Predictions) -> bool:
    return torch.equal(torch.from_numpy(held), torch.from_numpy(again.logits))
