"""What determines a strategy's results, and what must not: seeds, draws, earlier use, evaluation, rows of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forgetfree.data.rows import TaskRows
from forgetfree.strategy import ContinualStrategy
from forgetfree.streams import Stream, make_stream
from forgetfree.testing.faults import Faults
from forgetfree.testing.runs import Run, learn
from forgetfree.testing.tiny_streams import copies, other_rows, tiny_model, tiny_task

#: Labels are few, so that a memory of few rows has one for each.
_LABELS = {"qnli": 2, "ag_news": 2, "sst2": 2}


@copies
def three_tasks(test: bool = False, later: tuple[str, ...] = ()) -> Stream:
    """Three tiny tasks with a fresh model.

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
    remedy = "It could be trained before: look at setup(), suspend(), resume() and snapshot()."
    with faults.catching("run: once more on the stream, evaluating during training", remedy):
        # One run for all that must not matter; where it does, a second look says what.
        if run.differs(_evaluating(cls, options, run.strategy.stream, drawn=1)):
            faults.add(_why_another(cls, options, run))
            return False
        return True
    return False


def _why_another(cls: type[ContinualStrategy], options: Any, run: Run) -> str:
    """The same seed gave another result: after other draws, on a used stream, or evaluating in between."""
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
        f"{difference or 'in some runs'}. Look at snapshot(), suspend(), resume(), enter_evaluation() and leave_evaluation()."
    )


def _evaluating(cls: type[ContinualStrategy], options: Any, stream: Stream, drawn: int = 0) -> Run:
    return learn(cls, options, stream, look_after=(0, 3), drawn=drawn, evaluate_within=True)


def check_seed(cls: type[ContinualStrategy], options: Any, run: Run, faults: Faults) -> None:
    """Another seed gives another result."""
    with faults.catching("seeds: one task learned with seed=1", "Any whole number must do."):
        stream = three_tasks()
        other = learn(cls, options, stream, experiences=stream.benchmark.train_stream[:1], look_after=(1,), seed=1)
        first = run.tasks[0]
        if not run.looks[1].differs(other.looks[1], [first]):
            faults.add(
                f"seeds: expected seed=1 to give another result than seed=0, got the very same answers and tensors for "
                f"{first}. Draw from generators seeded by self.phase_seed(…), which derives from self.seed."
            )


def check_rows(cls: type[ContinualStrategy], options: Any, run: Run, faults: Faults) -> None:
    """What is learned of a task depends neither on test rows nor on rows of tasks that come later."""
    later = tuple(name for name in run.tasks if name not in run.learned[2])

    def difference(stream: Stream) -> str:
        other = learn(cls, options, stream, experiences=stream.benchmark.train_stream[:2], look_after=())
        assert run.training_rows is not None and other.training_rows is not None
        return run.training_rows.differs(other.training_rows)

    remedy = "Look at prepare(), before_step() and commit(): train on task.train, choose by task.validation."
    with faults.catching("rows: two tasks learned from other rows", remedy):
        if not difference(three_tasks(test=True, later=later)):
            return
        for what, stream in (("test rows", three_tasks(test=True)), ("rows of later tasks", three_tasks(later=later))):
            if found := difference(stream):
                of = f" ({', '.join(later)})" if what != "test rows" else ""
                faults.add(
                    f"rows: expected what is learned of {run.tasks[0]} and {run.tasks[1]} to be the same whatever the "
                    f"{what}{of} are, got others, {found}. {remedy}"
                )
