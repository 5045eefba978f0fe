"""The answers of a strategy on the test rows of a stream while it learns; what cannot have changed is not computed again.

A task that `ContinualStrategy.changed_by` does not name keeps its answers. So do learned tasks of a strategy that claims
``forget_free``, once a sample of their rows has been answered again with the same bits: a stream of T tasks costs T whole
evaluations of learned tasks in place of T².
"""

from __future__ import annotations

from collections.abc import Sequence

from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.data.rows import evenly
from forgetfree.results.answers import Answers
from forgetfree.training.encoded_task import EncodedTask


class StreamAnswers:
    """A strategy's answers on every task, brought up to date after each task that it learns.

    Args:
        strategy: before it learns the first task.
        upper_triangle: evaluate tasks before they are learned, too.

    Attributes:
        answers: the latest, by the names of the tasks that were evaluated.
        sampled: the answers to samples of learned tasks, from right after they were learned.
        broken: a phrase for each time that ``forget_free`` was claimed and did not hold.
    """

    def __init__(self, strategy: ContinualStrategy, *, upper_triangle: bool = True) -> None:
        self._strategy, self._upper = strategy, upper_triangle
        self.answers: dict[str, Answers] = {}
        self.broken: list[str] = []
        self._learned: list[EncodedTask] = []
        self.sampled: dict[str, Answers] = {}

    def resume(self, learned: Sequence[EncodedTask], answers: dict[str, Answers], sampled: dict[str, Answers]) -> None:
        """Go on after the tasks ``learned``, with ``answers`` and ``sampled`` as they were then."""
        self._learned, self.answers, self.sampled = list(learned), dict(answers), sampled

    def before(self, known: dict[str, Answers] | None = None) -> dict[str, Answers]:
        """Return the answers before the first task, on all tasks or on none.

        Args:
            known: what they are; default: they are computed.
        """
        if self._upper:
            self.answers = dict(self._strategy.evaluate() if known is None else known)
        return dict(self.answers)

    def begun(self, learned: Sequence[EncodedTask]) -> dict[str, Answers]:
        """Return the answers of a strategy that has learned the first tasks already, on all tasks or on these."""
        self._learned = list(learned)
        self.answers = dict(self._strategy.evaluate(None if self._upper else learned))
        if self._claims:
            self.sampled = self._answer_sample(learned)
        return dict(self.answers)

    def after(self, task: EncodedTask) -> dict[str, Answers]:
        """Return the answers after ``task`` was learned: on all tasks, or on those learned so far."""
        strategy, before = self._strategy, list(self._learned)
        self._learned.append(task)
        named = strategy.changed_by(task)
        wanted = [
            each
            for each in (strategy.stream.tasks if self._upper else self._learned)
            if named is None or each in named or each.name not in self.answers
        ]
        proved = [each for each in before if each in wanted] if self._claims else []
        changed = self._changed(proved)
        if changed:
            names = ", ".join(each.name for each in changed)
            self.broken.append(
                f"forget_free: claimed as True, but learning {task.name} changed the answers for {names}"
            )
        self.answers |= strategy.evaluate([each for each in wanted if each not in proved or each in changed])
        if self._claims:
            self.sampled |= self._answer_sample([task, *changed])
        return dict(self.answers)

    @property
    def _claims(self) -> bool:
        """Whether learned tasks are to keep their answers."""
        # Where the stream withholds the task, a model for each task is chosen among those learned so far.
        return self._strategy.forget_free and (self._strategy.stream.scenario == "task" or not self._strategy.taskwise)

    def _changed(self, tasks: Sequence[EncodedTask]) -> list[EncodedTask]:
        """Return the tasks whose sample is answered otherwise than right after they were learned, in any bit."""
        again = self._answer_sample(tasks)
        return [task for task in tasks if not self.sampled[task.name].same_as(again[task.name])]

    def _answer_sample(self, tasks: Sequence[EncodedTask]) -> dict[str, Answers]:
        self._strategy.choose_batches = lambda task, batches: sample(batches, task.kind.checked_rows)
        try:
            return self._strategy.evaluate(tasks) if tasks else {}
        finally:
            self._strategy.choose_batches = None


def sample(batches: list[list[int]], count: int) -> list[list[int]]:
    """Return at most ``count`` rows, in batches no larger.

    They are spread evenly over batches that stand in the order of length, and are the same at every call, since the bits of a
    row's logits depend on the rows beside it.
    """
    rows, size = [row for batch in batches for row in batch], max(map(len, batches))
    chosen = [rows[place] for place in evenly(len(rows), count)]
    return [chosen[i : i + size] for i in range(0, len(chosen), size)]
