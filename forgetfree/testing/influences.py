"""What determines a strategy's results, and what must not: seeds, draws, earlier use, evaluation, rows of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.streams import Stream, make_stream
from forgetfree.data.rows import TaskRows
from forgetfree.display import listed
from forgetfree.tasks import SPLITS
from forgetfree.testing.faults import Faults
from forgetfree.testing.runs import Run, learn
from forgetfree.testing.tiny import copies, other_rows, tiny_model, tiny_task

#: Labels are few, so that a memory of few rows has one for each.
_LABELS = {"qnli": 2, "ag_news": 2, "sst2": 2}


@copies
def three_tasks(test: bool = False, later: tuple[str, ...] = ()) -> Stream:
    """Return three tiny tasks with a fresh model.

    Args:
        test: whether they have other test rows than usual.
        later: tasks with other training and validation rows.
    """

    def rows_of(name: str) -> TaskRows:
        rows = tiny_task(name, _LABELS[name])
        if test:
            rows = replace(rows, test=other_rows(rows.test, _LABELS[name]))
        if name in later:
            train, validation = (other_rows(part, _LABELS[name]) for part in (rows.train, rows.validation))
            rows = replace(rows, train=train, validation=validation)
        return rows

    return make_stream(",".join(_LABELS), [rows_of(name) for name in _LABELS], tiny_model())


def check_repeated(cls: type[ContinualStrategy], options: Any, run: Run, faults: Faults) -> bool:
    """Whether learning again gives the same: after other draws, on the used stream, with evaluations in between."""
    remedy = "It could be trained before: look at setup(), and at answering() while another task is trained."
    with faults.catching("run: once more on the stream, evaluating during training", remedy):
        # One run for all that must not matter; where it does, a second look says what.
        if run.differs(_evaluating(cls, options, run.strategy.stream, drawn=1)):
            faults.add(_why_another(cls, options, run))
            return False
        return True
    return False


def _why_another(cls: type[ContinualStrategy], options: Any, run: Run) -> str:
    """Say why the same seed gave another result: after other draws, on a used stream, or evaluating in between."""
    if difference := run.differs(learn(cls, options, three_tasks(), look_after=(0, 3))):
        return (
            f"seeds: expected the same result from the same seed, got others, {difference}, although nothing else "
            "changed. Draw from generators seeded by self.phase_seed(…), and keep nothing in the class."
        )
    if difference := run.differs(learn(cls, options, three_tasks(), look_after=(0, 3), drawn=1)):
        return (
            f"seeds: expected a result that the seed alone determines, got others, {difference}, after other draws from "
            "the global generators. Draw from generators of your own, seeded by self.phase_seed(…)."
        )
    if difference := run.differs(learn(cls, options, run.strategy.stream, look_after=(0, 3))):
        return (
            f"fresh start: expected a new strategy on a used stream to learn as on a fresh one, got others, {difference}. "
            "Keep what is learned in the strategy, made again in setup(), and not in the stream or its model."
        )
    difference = run.differs(_evaluating(cls, options, three_tasks()))
    return (
        "evaluation: expected the same result with evaluations during training as with one after each task, got others, "
        f"{difference or 'in some runs'}. Look at answering(): it must leave the model as it found it, in training too."
    )


def _evaluating(cls: type[ContinualStrategy], options: Any, stream: Stream, drawn: int = 0) -> Run:
    return learn(cls, options, stream, look_after=(0, 3), drawn=drawn, evaluate_within=True)


def check_seed(cls: type[ContinualStrategy], options: Any, run: Run, faults: Faults) -> None:
    """Check that another seed gives another result in every task."""
    with faults.catching("seeds: three tasks learned with seed=1", "Any whole number must do."):
        other = learn(cls, options, three_tasks(), look_after=(3,), seed=1)
        same = [task for task in run.tasks if not run.last.differs(other.last, [task])]
        # A later task ends otherwise already where it starts otherwise: its own training must differ, too.
        alike = [t for t, batches in run.batches.items() if batches == other.batches.get(t) and t not in same]
        for what, tasks in (("answers and tensors for", same), ("batches and draws in the training of", alike)):
            if tasks:
                faults.add(
                    f"seeds: expected seed=1 to give another result than seed=0, got the very same {what} {listed(tasks)}. "
                    "Draw from generators seeded by self.phase_seed(…), which derives from self.seed."
                )


def check_rows(cls: type[ContinualStrategy], options: Any, run: Run, faults: Faults) -> None:
    """Check that what is learned of a task depends neither on test rows nor on rows of tasks that come later."""
    remedy = "Look at begin() and commit(): train on task.train, choose by task.validation."

    def check(counts: Sequence[int], what: str, stream: Stream) -> None:
        """Check that after any of ``counts`` tasks, the answers to their training rows are those of the usual stream."""
        with faults.catching(f"rows: learned with other {what}", remedy):
            experiences = stream.benchmark.train_stream[: max(counts)]
            other = learn(cls, options, stream, experiences=experiences, look_after=(), rows_after=counts)
            for count in counts:
                if difference := run.training_rows[count].differs(other.training_rows[count]):
                    learned = ", ".join(run.tasks[:count])
                    faults.add(
                        f"rows: expected what is learned of {learned} to be the same with any {what}, got others, "
                        f"{difference}. {remedy}"
                    )
                    return

    for count in (1, 2):
        if later := tuple(name for name in run.tasks if name not in run.learned[count]):
            check([count], f"rows of later tasks ({', '.join(later)})", three_tasks(later=later))
    check([1, 2, 3], "test rows", three_tasks(test=True))


def check_stream_rows(stream: Stream, faults: Faults) -> None:
    """Check that learning has changed none of the stream's rows, which the benchmark reads, too."""
    if changed := [
        f"{task.name} ({split})"
        for task, usual in zip(stream.tasks, three_tasks().tasks, strict=True)
        for split in SPLITS
        if getattr(task, split).digest != getattr(usual, split).digest
    ]:
        faults.add(
            f"rows: expected the stream's rows to stay as they are, got others in {listed(changed)}. Change copies of them."
        )
