"""Checks that a strategy keeps the contract of `forgetfree.continual.strategy.ContinualStrategy`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from forgetfree import registry
from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.stream import Stream, make_stream
from forgetfree.data.rows import TaskRows
from forgetfree.display import listed
from forgetfree.errors import UsageError
from forgetfree.models.state import StateStore
from forgetfree.options import build
from forgetfree.testing.tiny import other_rows, tiny_model, tiny_stream, tiny_task
from forgetfree.testing.trials import Breaches, Look, Observer, Trial, Untrained, differing, learn, look, tensors
from forgetfree.training.encoded_task import EncodedTask

#: Momentum and decay move entries without a gradient, so frozen entries are tested with both.
SMALL: dict[str, Any] = {
    "steps": 3,
    "batch_size": 4,
    "learning_rate": 0.05,
    "optimizer": "momentum",
    "weight_decay": 0.1,
}
#: The tasks have few labels, so that a memory of few rows has a row for each label.
_LABELS = {"qnli": 2, "ag_news": 2, "sst2": 2}
#: Other streams of two tasks, with fewer checks.
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
    """Run ``cls`` on three tiny tasks, several times over, and raise an error unless it keeps the contract of a strategy.

    It checks the class and its options; training, evaluation and `bytes_kept`; that only the parameters that `begin` lists
    move, and no other task's readout; that the seed determines the result, independently of earlier draws and trainings and
    of the times of evaluation, and that another seed gives another result for every task; that neither test rows nor rows of
    later tasks change the learned weights; that the next strategy starts from θ_pre; `save` and `load`; `changed_by`; and
    ``forget_free`` if it is claimed. Then it checks two tasks with ``scenario="class"``, with ``scenario="domain"``, with
    prompts, and with text answers, unless `check` refuses them. All comparisons are bit by bit. It takes a second or two.

    Args:
        cls: the strategy.
        options: options, such as ``sparsity=0.05``, if the defaults do not suit a model of two layers of width 16, 24 training
            rows and two labels per task. Other defaults: 3 steps of 4 rows by SGD with momentum and weight decay.

    Raises:
        ConformanceError: it breaks the contract; names every fault found, the tasks or tensors that differ, and the hook.
        UsageError: ``cls`` has no such option, or a value is out of its range or too small for the three tasks.
    """
    faults = Breaches()
    subject = f"{getattr(cls, '__name__', repr(cls))} does not keep the contract of a strategy"
    _check_class(cls, faults)
    faults.raise_any(subject)  # without a valid class, nothing can be run
    chosen = build(cls.Options, SMALL | options, cls.__name__)
    if options:
        cls.check(chosen, three_tasks())  # the caller's choice, not the strategy's fault
    with TemporaryDirectory() as directory:
        finished = _check_runs(cls, chosen, faults, Path(directory))
        if finished and not faults:  # else they would repeat the same faults
            _check_variants(cls, chosen, faults, Path(directory))
    faults.raise_any(subject)


def _check_runs(cls: type[ContinualStrategy], options: Any, faults: Breaches, directory: Path) -> bool:
    """Run all checks with known tasks; return whether the stream could be learned at all."""
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
    if check_repeated(cls, options, run, faults):  # else two runs differ for this reason, too
        check_seed(cls, options, run, faults)
        check_rows(cls, options, run, faults)
    return True


def _check_variants(cls: type[ContinualStrategy], options: Any, faults: Breaches, directory: Path) -> None:
    """Check the streams of `VARIANTS`."""
    for name, make in VARIANTS.items():
        stream = make()
        with faults.catching(f"{name}: check()", "Take the stream, or refuse it by a UsageError."):
            try:
                cls.check(options, stream)
            except UsageError:
                continue
        with faults.catching(f"{name}: two tasks trained and evaluated", _VARIANT_REMEDY):
            texts = stream.model.readout == "generate"  # no other stream shows forgetting with texts
            run = learn(cls, options, stream, look_after=range(3) if texts else (0, 2), store=StateStore())
            check_answers(run, faults, f"{name}: ")
            if texts:
                check_forgetting(run, faults, f"{name}: ")
            if name != "scenario=domain":  # its files are like those of scenario=class
                check_loaded(cls, options, run, make(), run.strategy.store, directory / name, faults, f"{name}: ")


# -- Before anything is run ------------------------------------------------------------------------------


def _check_class(cls: Any, faults: Breaches) -> None:
    """Check that it is a subclass of `ContinualStrategy` with options, and overrides no final member."""
    try:
        registry.strategy_class(cls)
    except UsageError as error:
        faults.add(f"class: {error}.")
        return
    constructor = inspect.unwrap(cls.__init__)  # Avalanche wraps that of every subclass
    if constructor is not inspect.unwrap(ContinualStrategy.__init__):
        faults.add(
            f"__init__: expected ContinualStrategy's own, got {constructor.__qualname__}. Drop it: the runner makes every "
            "strategy alike. Put preparation into setup(), and the user's choices into Options."
        )
    finals = {name for base in cls.__mro__ for name, member in vars(base).items() if _is_final(member)}
    for name in sorted(finals):
        if not _is_final(inspect.getattr_static(cls, name)):
            faults.add(f"{name}: expected the contract's own, which is final, got another. Give yours another name.")


def _is_final(member: Any) -> bool:
    return bool(getattr(getattr(member, "fget", member), "__final__", False))


# -- A strategy that has learned a stream: answers, claims, storage, restored model --------------------------


def check_answers(run: Trial, faults: Breaches, where: str = "") -> None:
    """Check that every test row of every task has a row of finite logits, and that something was learned."""
    stream: Stream = run.strategy.stream
    labelled = [task for task in stream.tasks if task.kind.answer == "label"]
    expected = {task.name: (len(task.test), stream.model.readout_of(task.label).n_labels) for task in labelled}
    for seen in run.looks.values():
        shapes = {name: tuple(seen.logits[name].shape) for name in expected if name in seen.logits}
        if shapes != expected:
            faults.add(
                f"{where}evaluate: expected logits (n, n_labels) by task, {expected}, got {shapes}. Check the "
                "models that answering() yields."
            )
        if broken := [name for name, logits in seen.logits.items() if not bool(torch.isfinite(logits).all())]:
            faults.add(
                f"{where}evaluate: expected finite logits, got others for {listed(broken)}. Check the models that "
                "answering() yields."
            )
    same = []
    for count, later in pairwise(sorted(run.looks)):
        before, after = run.looks[count].logits, run.looks[later].logits
        new = [name for name in run.learned[later] if name not in run.learned[count]]
        same += [name for name in new if name in after and torch.equal(before[name], after[name])]
    if same:
        faults.add(
            f"{where}training: expected learning a task to change its logits, got the same logits for {listed(same)}. Check "
            "the Training that begin() returns, and answering()."
        )


def _steps(run: Trial) -> Iterator[tuple[EncodedTask, Look, Look]]:
    """Yield each task with the looks before and after it was learned."""
    for position, task in enumerate(run.strategy.stream.tasks):
        yield task, run.looks[position], run.looks[position + 1]


def check_forgetting(run: Trial, faults: Breaches, where: str = "") -> None:
    """Check `forget_free`, if it is claimed: later tasks must not change the answers of a learned task."""
    if not run.strategy.forget_free:
        return
    changes: list[str] = []
    then = Look({}, {})  # of each task, right after it was learned
    for task, _, now in _steps(run):
        if changed := differing(then.logits, {name: now.logits[name] for name in then.logits}):
            changes.append(f"learning {task.name} changed {then.differs(now, changed)}")
        then.logits[task.name], then.models[task.name] = now.logits[task.name], now.models[task.name]
    if changes:
        faults.add(
            f"{where}forget_free: claimed as True, but {'; '.join(changes)}. Check answering(), buffers and readouts "
            "included; or do not claim it."
        )


def check_stale(run: Trial, faults: Breaches) -> None:
    """Check `changed_by`, which decides the results that are copied from one row of the matrix to the next."""
    for task, before, after in _steps(run):
        changed_tasks = run.strategy.changed_by(task)
        changed_by = set(run.tasks) if changed_tasks is None else {other.name for other in changed_tasks}
        if fresh := [name for name in differing(before.logits, after.logits) if name not in changed_by]:
            faults.add(
                f"changed_by: expected every task whose answers may change by learning {task.name}, got a list without "
                f"{listed(fresh)}, though it changed {before.differs(after, fresh)}. Name it, or look at answering()."
            )


def check_readouts(run: Trial, faults: Breaches) -> None:
    """Check that learning a task does not change the readouts of other tasks, except for those that `begin` lists."""
    stream: Stream = run.strategy.stream
    for task, before, after in _steps(run):
        for other in stream.tasks:
            own = {id(parameter) for parameter in stream.model.readout_module(other.label).parameters()}
            names = {name for name, parameter in stream.model.named_parameters() if id(parameter) in own}
            moved = [name for name in differing(before.models[other.name], after.models[other.name]) if name in names]
            if moved and other is not task and not set(moved) <= run.watch.listed.get(task.name, set()):
                faults.add(
                    f"readouts: expected learning {task.name} to leave the readout that answers {other.name}, got "
                    f"{listed(moved)} moved. Check begin(), commit() and answering(), or list it in Training.readout."
                )


def check_ledger(run: Trial, faults: Breaches) -> None:
    """Check that entries that no task owns have never moved."""
    strategy = run.strategy
    if strategy.ledger is None:
        return
    answering = run.last.models[run.tasks[-1]]
    theta = torch.cat([answering[f"backbone.{spec.name}"].reshape(-1) for spec in strategy.space.tensors]).cpu()
    moved = (theta != strategy.pre_trained.theta) & ~strategy.ledger.owned().mask(len(strategy.space)).cpu()
    if entries := int(moved.sum()):
        names = [strategy.space.tensors[i].name for i, *_ in strategy.space.split(moved.nonzero().flatten())]
        faults.add(
            f"ledger: expected entries that no task owns to hold θ_pre, got {entries} that do not, in {listed(names)}. Check "
            "begin(), and the record that commit() writes."
        )


def check_restored(stream: Stream, pre_trained: dict[str, Tensor], run: Trial, faults: Breaches) -> None:
    """Check that another strategy on the stream starts from θ_pre and answers as the first did."""
    remedy = (
        "Only the graftable tensors, readouts and persistent buffers are put back: let nothing else move, and take off "
        "hooks and modules after each task."
    )
    with faults.catching("fresh start: another strategy on the stream", remedy):
        seen = look(Untrained(stream=stream, device="cpu"))
        moved = list(dict.fromkeys(n for model in seen.models.values() for n in differing(pre_trained, model)))
        if moved:
            faults.add(
                f"fresh start: expected the next strategy to find the pre-trained model, got {listed(moved)} other than it "
                f"was. {remedy}"
            )
        elif changed := differing(run.looks[0].logits, seen.logits):
            faults.add(
                "fresh start: expected the next strategy to answer as the pre-trained model does, got other logits for "
                f"{listed(changed)}, though the weights are the same. {remedy}"
            )
        if frozen := [name for name, parameter in stream.model.named_parameters() if not parameter.requires_grad]:
            faults.add(
                f"fresh start: expected parameters to require gradients again, got requires_grad = False for "
                f"{listed(frozen)}. List the trained parameters in Training.trained.touched, whose flags are restored."
            )


def check_loaded(
    cls: type[ContinualStrategy],
    options: Any,
    run: Trial,
    stream: Stream,
    store: StateStore,
    directory: Path,
    faults: Breaches,
    where: str = "",
) -> None:
    """Check that a new strategy on a new stream gives the same answers from the saved files."""
    what = f"{where}save and load"
    remedy = (
        "Write in storage.save() all that answering needs, and put it back in storage.load(), note_learned(…) included."
    )
    with faults.catching(what, remedy):
        directory.mkdir(parents=True)
        run.strategy.save(directory)
        loaded: Any = cls(stream=stream, options=options, store=store, device="cpu")
        loaded.load(directory)
        seen = look(loaded)
        if differing(run.last.logits, seen.logits):
            faults.add(
                f"{what}: expected a new strategy to answer as the saved one did, got others, "
                f"{run.last.differs(seen)}. {remedy}"
            )


def check_bytes(sizes: list[Any], faults: Breaches) -> None:
    """Check the results of `bytes_kept` before the first task and after each: integers, positive once a task is learned."""
    whole = all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in sizes)
    if not whole or not all(sizes[1:]):
        faults.add(
            "bytes_kept: expected integers of at least 0, and above 0 once a task is learned, got "
            f"{', '.join(map(str, sizes))} before the first task and after each. Count in storage.bytes_kept() the "
            "bytes that storage.save() writes and those that the next task needs."
        )


# -- Reproducibility: seeds, draws, earlier use, evaluation, rows of others -------------------------------


def three_tasks(test: bool = False, later: tuple[str, ...] = ()) -> Stream:
    """Return three tiny tasks with a fresh model; ``test`` replaces all test rows, ``later`` the rows of these tasks."""

    def rows_of(name: str) -> TaskRows:
        rows = tiny_task(name, _LABELS[name])
        if test:
            rows = replace(rows, test=other_rows(rows.test, _LABELS[name]))
        if name in later:
            train, validation = (other_rows(part, _LABELS[name]) for part in (rows.train, rows.validation))
            rows = replace(rows, train=train, validation=validation)
        return rows

    return make_stream(",".join(_LABELS), [rows_of(name) for name in _LABELS], tiny_model())


def check_repeated(cls: type[ContinualStrategy], options: Any, run: Trial, faults: Breaches) -> bool:
    """Return whether learning again gives the same: after other draws, on the used stream, with evaluations in between."""
    remedy = "It could be trained before: look at setup(), and at answering() while another task is trained."
    with faults.catching("run: once more on the stream, evaluating during training", remedy):
        other = learn(cls, options, run.strategy.stream, look_after=(0, 3), drawn=1, evaluate_within=True)
        if difference := run.differs(other):
            faults.add(
                "seeds: expected the same result from the same seed, also after other draws from the global generators, on a "
                f"used stream, and with evaluations during training, got others, {difference}. Draw from generators seeded by "
                "self.phase_seed(…), store results in attributes that setup() creates, and let answering() leave the "
                "model as it found it."
            )
            return False
        return True
    return False


def check_seed(cls: type[ContinualStrategy], options: Any, run: Trial, faults: Breaches) -> None:
    """Check that another seed gives another result for every task."""
    with faults.catching("seeds: three tasks learned with seed=1", "Any whole number must do."):
        other = learn(cls, options, three_tasks(), look_after=(3,), seed=1)
        if same := [task for task in run.tasks if not run.last.differs(other.last, [task])]:
            faults.add(
                "seeds: expected seed=1 to give another result than seed=0, got the very same answers and tensors for "
                f"{listed(same)}. Draw from generators seeded by self.phase_seed(…), which derives from self.seed."
            )


def check_rows(cls: type[ContinualStrategy], options: Any, run: Trial, faults: Breaches) -> None:
    """Check that a learned task depends neither on test rows nor on rows of later tasks."""
    remedy = "Check begin() and commit(): train on task.train, choose by task.validation."

    def check(counts: Sequence[int], what: str, stream: Stream) -> None:
        """Check that after any of ``counts`` tasks, the answers to their training rows equal those on the usual stream."""
        with faults.catching(f"rows: learned with other {what}", remedy):
            experiences = stream.benchmark.train_stream[: max(counts)]
            other = learn(cls, options, stream, experiences=experiences, look_after=(), rows_after=counts)
            for count in counts:
                if difference := run.training_rows[count].differs(other.training_rows[count]):
                    learned = ", ".join(run.tasks[:count])
                    faults.add(
                        f"rows: expected the same result of {learned} with any {what}, got others, "
                        f"{difference}. {remedy}"
                    )
                    return

    for count in (1, 2):
        if later := tuple(name for name in run.tasks if name not in run.learned[count]):
            check([count], f"rows of later tasks ({', '.join(later)})", three_tasks(later=later))
    check([1, 2, 3], "test rows", three_tasks(test=True))
