"""What must hold of a strategy that has learned a stream: its answers, its claims, what it keeps and what it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.stream import Stream
from forgetfree.display import listed
from forgetfree.models.state import StateStore
from forgetfree.testing.runs import Breaches, Look, Run, Untrained, differing, look
from forgetfree.training.encoded_task import EncodedTask


def check_answers(run: Run, faults: Breaches, where: str = "") -> None:
    """Check that every test row of every task has a row of finite logits, and that something was learned."""
    stream: Stream = run.strategy.stream
    labelled = [task for task in stream.tasks if task.classes]
    expected = {task.name: (len(task.test), stream.model.heads[task.label].n_labels) for task in labelled}
    for seen in run.looks.values():
        shapes = {name: tuple(seen.logits[name].shape) for name in expected if name in seen.logits}
        if shapes != expected:
            faults.add(
                f"{where}evaluate: expected logits (n, n_labels) by task, {expected}, got {shapes}. Look at what "
                "answering() yields."
            )
        if broken := [name for name, logits in seen.logits.items() if not bool(torch.isfinite(logits).all())]:
            faults.add(
                f"{where}evaluate: expected finite logits, got others for {listed(broken)}. Look at what answering() yields."
            )
    same = []
    for count, later in pairwise(sorted(run.looks)):
        before, after = run.looks[count].logits, run.looks[later].logits
        new = [name for name in run.learned[later] if name not in run.learned[count]]
        same += [name for name in new if name in after and torch.equal(before[name], after[name])]
    if same:
        faults.add(
            f"{where}training: expected other answers by learning a task than before, got the very same for {listed(same)}. "
            "Look at what begin() returns, and at answering()."
        )


def _steps(run: Run) -> Iterator[tuple[EncodedTask, Look, Look]]:
    """Yield each task with the looks before and after it was learned."""
    for position, task in enumerate(run.strategy.stream.tasks):
        yield task, run.looks[position], run.looks[position + 1]


def check_forgetting(run: Run, faults: Breaches, where: str = "") -> None:
    """Check `forget_free`, where it is claimed: each task is answered after any later one as right after it was learned."""
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
            f"{where}forget_free: claimed as True, but {'; '.join(changes)}. Look at answering(), buffers and readouts "
            "included; or do not claim it."
        )


def check_stale(run: Run, faults: Breaches) -> None:
    """Check `changed_by`, by which results are taken over from one row of the matrix to the next."""
    for task, before, after in _steps(run):
        changed_tasks = run.strategy.changed_by(task)
        changed_by = set(run.tasks) if changed_tasks is None else {other.name for other in changed_tasks}
        if fresh := [name for name in differing(before.logits, after.logits) if name not in changed_by]:
            faults.add(
                f"changed_by: expected every task whose answers may change by learning {task.name}, got a list without "
                f"{listed(fresh)}, though it changed {before.differs(after, fresh)}. Name it, or look at answering()."
            )


def check_readouts(run: Run, faults: Breaches) -> None:
    """Check that learning a task leaves the readouts that answer the others, but for those that `begin` lists."""
    stream: Stream = run.strategy.stream
    for task, before, after in _steps(run):
        for other in stream.tasks:
            own = {id(parameter) for parameter in stream.model.readout_module(other.label).parameters()}
            names = {name for name, parameter in stream.model.named_parameters() if id(parameter) in own}
            moved = [name for name in differing(before.models[other.name], after.models[other.name]) if name in names]
            if moved and other is not task and not set(moved) <= run.watch.listed.get(task.name, set()):
                faults.add(
                    f"readouts: expected learning {task.name} to leave the readout that answers {other.name}, got "
                    f"{listed(moved)} moved. Look at begin(), commit() and answering(), or list it in Training.readout."
                )


def check_ledger(run: Run, faults: Breaches) -> None:
    """Check that what no task owns has never moved."""
    strategy = run.strategy
    if strategy.ledger is None:
        return
    answering = run.last.models[run.tasks[-1]]
    theta = torch.cat([answering[f"backbone.{spec.name}"].reshape(-1) for spec in strategy.space.tensors]).cpu()
    moved = (theta != strategy.pre_trained.theta) & ~strategy.ledger.owned().mask(len(strategy.space)).cpu()
    if entries := int(moved.sum()):
        names = [strategy.space.tensors[i].name for i, *_ in strategy.space.split(moved.nonzero().flatten())]
        faults.add(
            f"ledger: expected entries that no task owns to hold θ_pre, got {entries} that do not, in {listed(names)}. Look at "
            "begin(), and at what commit() records."
        )


def check_restored(stream: Stream, pre_trained: dict[str, Tensor], run: Run, faults: Breaches) -> None:
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
                f"fresh start: expected parameters to ask for gradients again, got requires_grad = False for "
                f"{listed(frozen)}. Say what is trained by Training.trained.touched; its flags are put back."
            )


def check_loaded(
    cls: type[ContinualStrategy],
    options: Any,
    run: Run,
    stream: Stream,
    store: StateStore,
    directory: Path,
    faults: Breaches,
    where: str = "",
) -> None:
    """Check that a new strategy on a new stream answers from what was saved."""
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
    """Check what `bytes_kept` said before the first task and after each: whole numbers, and some once a task is learned."""
    whole = all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in sizes)
    if not whole or not all(sizes[1:]):
        faults.add(
            "bytes_kept: expected whole numbers, 0 or more, and above 0 once a task is learned, which is answered by what "
            f"is kept, got {', '.join(map(str, sizes))} before the first task and after each. Count in "
            "storage.bytes_kept() what storage.save() writes and what the next task needs."
        )
