"""Whether a strategy keeps the contract of `forgetfree.continual.strategy.ContinualStrategy`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from forgetfree import registry
from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.stream import Stream, make_stream
from forgetfree.data.rows import TaskRows
from forgetfree.display import listed
from forgetfree.errors import UsageError
from forgetfree.models.state import StateStore
from forgetfree.options import build
from forgetfree.testing.outcomes import (
    check_answers,
    check_bytes,
    check_forgetting,
    check_ledger,
    check_loaded,
    check_readouts,
    check_restored,
    check_stale,
)
from forgetfree.testing.runs import Breaches, Observer, Run, learn, tensors
from forgetfree.testing.tiny import other_rows, tiny_model, tiny_stream, tiny_task

#: Momentum and decay move what has no gradient, so frozen entries are tested by both.
SMALL: dict[str, Any] = {
    "steps": 3,
    "batch_size": 4,
    "learning_rate": 0.05,
    "optimizer": "momentum",
    "weight_decay": 0.1,
}
#: Labels are few, so that a memory of few rows has one for each.
_LABELS = {"qnli": 2, "ag_news": 2, "sst2": 2}
#: Other streams of two tasks, on which there is less to check.
VARIANTS: dict[str, Callable[[], Stream]] = {
    "scenario=class": partial(tiny_stream, ("qnli", "ag_news"), scenario="class"),
    "scenario=domain": partial(tiny_stream, ("qnli", "sst2"), scenario="domain"),
    "readout=prompt": partial(tiny_stream, ("qnli", "ag_news"), readout="prompt"),
    "readout=generate": partial(tiny_stream, ("qnli", "sst2"), readout="generate"),
}
_VARIANT_REMEDY = (
    "The task may be withheld at inference, a prompt's readout has no tensors, and a text has a label a token: look at "
    "setup(), begin() and answering(), and whether the class is taskwise; or refuse the stream in check()."
)


def check_strategy(cls: type[ContinualStrategy], **options: Any) -> None:
    """Run ``cls`` on three tiny tasks, several times over, and raise unless it does all that a strategy must.

    Checked are: the class and its options; training, evaluation and `bytes_kept`; that only what `begin`
    lists moves, and no other task's readout; that the seed determines the result, whatever was drawn or trained before
    and whenever tasks are evaluated, and that another seed gives another for every task; that neither test rows nor rows
    of later tasks have a part in what is learned; that the next strategy finds θ_pre;
    `save` and `load`; `changed_by`; ``forget_free`` where it is claimed. Then two tasks with
    ``scenario="class"``, with ``scenario="domain"``, read by prompts, and answered by texts, unless `check` refuses them.
    All comparisons are bit by bit. Takes a second or two.

    Args:
        cls: the strategy.
        options: that suit a model of two layers of width 16, 24 training rows and two labels a task, where the defaults do
            not, such as ``sparsity=0.05``. Default beside them: 3 steps of 4 rows by SGD with momentum and weight decay.

    Raises:
        ConformanceError: it breaks the contract; names every fault found, the tasks or tensors that differ, and the hook.
        UsageError: an option that ``cls`` does not have, or a value out of its range or too small for the three tasks.
    """
    faults = Breaches()
    subject = f"{getattr(cls, '__name__', repr(cls))} does not keep the contract of a strategy"
    _check_class(cls, faults)
    faults.raise_any(subject)  # nothing could be run
    chosen = build(cls.Options, SMALL | options, cls.__name__)
    if options:
        cls.check(chosen, three_tasks())  # the caller's choice, not the strategy's fault
    with TemporaryDirectory() as directory:
        finished = _check_runs(cls, chosen, faults, Path(directory))
        if finished and not faults:  # else they would say the same again
            _check_variants(cls, chosen, faults, Path(directory))
    faults.raise_any(subject)


def _check_runs(cls: type[ContinualStrategy], options: Any, faults: Breaches, directory: Path) -> bool:
    """Make all checks where the task is known; return whether the stream could be learned at all."""
    stream = three_tasks()
    pre_trained = tensors(stream.model)
    observer = Observer(faults)
    store = StateStore(directory / "fine-tuned")
    run = None
    with faults.catching(
        "run: three tasks trained and evaluated", "The hook is in the traceback that this error was raised from."
    ):
        run = learn(cls, options, stream, observe=observer, rows_after=(1, 2, 3), store=store)
    if run is None:
        return False
    run.watch.report(faults)
    check_answers(run, faults)
    check_bytes(observer.bytes, faults)
    check_forgetting(run, faults)
    check_stale(run, faults)
    check_readouts(run, faults)
    check_ledger(run, faults)
    check_loaded(cls, options, run, three_tasks(), store, directory / "saved", faults)
    check_restored(stream, pre_trained, run, faults)
    if check_repeated(cls, options, run, faults):  # else two runs differ for that reason, too
        check_seed(cls, options, run, faults)
        check_rows(cls, options, run, faults)
    return True


def _check_variants(cls: type[ContinualStrategy], options: Any, faults: Breaches, directory: Path) -> None:
    """Check streams whose labels share one readout, or are read by prompts."""
    for name, make in VARIANTS.items():
        stream = make()
        with faults.catching(f"{name}: check()", "Take the stream, or refuse it by a UsageError."):
            try:
                cls.check(options, stream)
            except UsageError:
                continue
        with faults.catching(f"{name}: two tasks trained and evaluated", _VARIANT_REMEDY):
            texts = stream.model.readout == "generate"  # whose forgetting no other stream tells
            run = learn(cls, options, stream, look_after=range(3) if texts else (0, 2), store=StateStore())
            check_answers(run, faults, f"{name}: ")
            if texts:
                check_forgetting(run, faults, f"{name}: ")
            if name != "scenario=domain":  # of which files say the same
                check_loaded(cls, options, run, make(), run.strategy.store, directory / name, faults, f"{name}: ")


# -- Before anything is run ------------------------------------------------------------------------------


def _check_class(cls: Any, faults: Breaches) -> None:
    """Check that it is a subclass of `ContinualStrategy` with options, and has its constructor."""
    try:
        registry.strategy_class(cls)
    except UsageError as error:
        faults.add(f"class: {error}.")
        return
    constructor = inspect.unwrap(cls.__init__)  # Avalanche wraps that of every subclass
    if constructor is not inspect.unwrap(ContinualStrategy.__init__):
        faults.add(
            f"__init__: expected ContinualStrategy's own, got {constructor.__qualname__}. Drop it: the runner makes every "
            "strategy alike. What is to be prepared once belongs into setup(), what a user may choose into Options."
        )
    if "__dataclass_params__" not in vars(cls.Options):  # a dataclass that inherits from a frozen one is frozen
        faults.add(
            f"Options: expected a frozen dataclass, got {cls.Options.__name__}, which is none. Decorate it with "
            "@dataclass(frozen=True, kw_only=True)."
        )


# -- What determines results, and what must not: seeds, draws, earlier use, evaluation, rows of others ----


def three_tasks(test: bool = False, later: tuple[str, ...] = ()) -> Stream:
    """Return three tiny tasks with a fresh model; with other rows than usual for ``test``, and of the tasks ``later``."""

    def rows_of(name: str) -> TaskRows:
        rows = tiny_task(name, _LABELS[name])
        if test:
            rows = replace(rows, test=other_rows(rows.test, _LABELS[name]))
        if name in later:
            train, validation = (other_rows(part, _LABELS[name]) for part in (rows.train, rows.validation))
            rows = replace(rows, train=train, validation=validation)
        return rows

    return make_stream(",".join(_LABELS), [rows_of(name) for name in _LABELS], tiny_model())


def check_repeated(cls: type[ContinualStrategy], options: Any, run: Run, faults: Breaches) -> bool:
    """Whether learning again gives the same: after other draws, on the used stream, with evaluations in between."""
    remedy = "It could be trained before: look at setup(), and at answering() while another task is trained."
    with faults.catching("run: once more on the stream, evaluating during training", remedy):
        other = learn(cls, options, run.strategy.stream, look_after=(0, 3), drawn=1, evaluate_within=True)
        if difference := run.differs(other):
            faults.add(
                "seeds: expected the same result from the same seed, also after other draws from the global generators, on a "
                f"used stream, and with evaluations during training, got others, {difference}. Draw from generators seeded by "
                "self.phase_seed(…), keep what is learned in the strategy, made again in setup(), and let answering() leave "
                "the model as it found it."
            )
            return False
        return True
    return False


def check_seed(cls: type[ContinualStrategy], options: Any, run: Run, faults: Breaches) -> None:
    """Check that another seed gives another result for every task."""
    with faults.catching("seeds: three tasks learned with seed=1", "Any whole number must do."):
        other = learn(cls, options, three_tasks(), look_after=(3,), seed=1)
        if same := [task for task in run.tasks if not run.last.differs(other.last, [task])]:
            faults.add(
                "seeds: expected seed=1 to give another result than seed=0, got the very same answers and tensors for "
                f"{listed(same)}. Draw from generators seeded by self.phase_seed(…), which derives from self.seed."
            )


def check_rows(cls: type[ContinualStrategy], options: Any, run: Run, faults: Breaches) -> None:
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
