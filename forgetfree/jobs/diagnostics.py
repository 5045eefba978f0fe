"""What a run measures beside the scores of its strategies: floors, rows that are right, and the loss on texts aside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forgetfree.data.sampling import representative
from forgetfree.files import write_json
from forgetfree.kinds.kind import kind_of
from forgetfree.models.state import ModelState
from forgetfree.results.answers import label_answers, pack_rows
from forgetfree.results.unit_folder import FLOORS
from forgetfree.training.encoded_task import EncodedTask, sampled
from forgetfree.training.floors import bag_of_words, linear_probes, nearest_rows

if TYPE_CHECKING:
    from forgetfree.continual.strategy import ContinualStrategy
    from forgetfree.continual.streams import Stream
    from forgetfree.core.readout_model import ReadoutModel
    from forgetfree.data.rows import TaskRows
    from forgetfree.jobs.stream_loading import Row
    from forgetfree.training.held_out_loss import HeldOutTexts
    from forgetfree.training.training_options import TrainingOptions

#: By task.
Numbers = dict[str, float | None]


def floors(
    stream: Stream,
    rows: Sequence[TaskRows],
    shots: int | None,
    or_fewer: bool,
    test_limit: int | None,
    probe: str | None,
) -> dict[str, Numbers]:
    """Return the scores of a bag of words, and of linear probes on θ_pre, at its readout and at the mean, on every task.

    Args:
        stream: whose rows, with the seed of its samples.
        rows: of its tasks, as texts; none where it reads tensors.
        shots: training rows per label, as the stream was made with.
        or_fewer: whether a label with fewer rows keeps all of them, as in the stream.
        test_limit: test rows, likewise.
        probe: the device on which θ_pre reads the rows, once; ``None``: there is none.
    """
    tasks, known, floor_scores = stream.tasks, stream.scenario == "task", dict[str, Sequence[float | None]]()
    if rows:
        train = [sampled(each, shots, stream.seed, or_fewer) for each in rows]
        test = [
            each.test.take(representative(kind_of(each.task).groups(each.test.labels), test_limit)) for each in rows
        ]
        floor_scores["bag_of_words"] = bag_of_words(tasks, train, test, task_known=known)
        if any("nearest_row" in task.kind.floors for task in tasks):
            floor_scores["nearest_row"] = nearest_rows(tasks, train, test)
    if probe is not None:
        with _pre_trained(stream, probe) as model:
            probes = linear_probes(tasks, model, task_known=known, precision="auto")
        floor_scores["linear_probe"] = probes["linear_probe"]
        if any(score is not None for score in probes["mean_probe"]):
            floor_scores["mean_probe"] = probes["mean_probe"]
    names = [task.name for task in tasks]
    return {floor: dict(zip(names, scores, strict=True)) for floor, scores in floor_scores.items()}


def right_rows(tasks: Sequence[EncodedTask], answers: Row) -> dict[str, dict[str, str]]:
    """Return which test rows of each task are right, packed, where its score is their share.

    Intervals of a CSV file need them.
    """
    packed: dict[str, str] = {}
    for task in tasks:
        if task.definition.metric == "accuracy" and answers[task.name].are_labels:
            right = label_answers(answers[task.name]).right
            packed |= {task.name: pack_rows(right)} if len(right) == len(task.test) else {}
    return {"right_rows": packed} if packed else {}


def loss_before(stream: Stream, texts: HeldOutTexts, options: TrainingOptions, device: str) -> float:
    """Return the loss of θ_pre on texts that no task trains."""
    with _pre_trained(stream, device) as model:
        return texts.loss(model, options)


@contextmanager
def _pre_trained(stream: Stream, device: str) -> Iterator[ReadoutModel]:
    """Give the stream's model on a device, with θ_pre in it; afterwards it is as it was before."""
    model = stream.model.to(torch.device(device))
    before = ModelState.of(model)
    try:
        stream.pre_trained.load_(model)
        yield model
    finally:
        before.load_(model)


def losses_after(strategy: ContinualStrategy, texts: HeldOutTexts) -> dict[str, Any]:
    """Return the loss on texts that no task trains at the end of a stream.

    ``after`` is without a task: by the model as the ledger takes all regions out of it, where there is a ledger; else by the
    one model. Where each task has a model of its own there is none without a task, and no ``after``.
    ``by_task`` is by the model that answers for each task, where these differ.
    """
    from forgetfree.continual.regions import RegionStrategy

    model, options, tasks = strategy.model, strategy.options, strategy.stream.tasks

    def loss(as_held: AbstractContextManager[object]) -> float:
        with as_held:
            return texts.loss(model, options)

    if not strategy.taskwise:
        return {"after": loss(strategy.answering(tasks[-1]))}
    by_task = [loss(strategy.answering(task)) for task in tasks]
    if not isinstance(strategy, RegionStrategy):
        return {"by_task": by_task}
    # Nothing is put back here: what a strategy spoilt outside of its regions shows.
    return {"after": loss(strategy.ledger_model.base(union=False)), "by_task": by_task}


def write_floors(directory: Path, floors: dict[str, Any]) -> None:
    """Write the floors of a seed into a unit's folder, if there are any: also where the unit failed later."""
    if floors:
        write_json(directory / FLOORS, floors)
