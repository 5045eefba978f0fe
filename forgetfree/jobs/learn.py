"""One unit of a run: one strategy learns the stream with one seed, task by task, and is evaluated after each task.

Besides scores, it records the last answers, floors, and the loss on held-out texts.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forgetfree.data.rows import representative
from forgetfree.errors import (
    ForgetfreeError,
    LedgerError,
    MetricError,
    RunError,
    TrainingError,
    UsageError,
    first_line,
    out_of_memory,
)
from forgetfree.files import is_full
from forgetfree.jobs.checkpoints import FileCheckpoint, LearnedStream
from forgetfree.jobs.environment import circumstances, environment
from forgetfree.jobs.history import History
from forgetfree.jobs.run_directory import Unit
from forgetfree.jobs.stream_loading import StreamLoader
from forgetfree.json_file import read_json
from forgetfree.kinds.kind import kind_of
from forgetfree.models.state import ModelState
from forgetfree.options import recorded
from forgetfree.results.answers import tensors_by_task
from forgetfree.results.run_folder import (
    CHECKPOINT,
    HISTORY,
    MODELS,
    PREDICTIONS,
    size_and_sha256,
)
from forgetfree.tensor_file import TensorFile
from forgetfree.training.monitor import PHASES, Monitor

if TYPE_CHECKING:
    from forgetfree.continual.strategy import ContinualStrategy
    from forgetfree.continual.stream import Stream
    from forgetfree.core.readout_model import ReadoutModel
    from forgetfree.jobs.config import Execution, RunConfig
    from forgetfree.jobs.revision import Revision, StreamPrefix
    from forgetfree.ledger.ledger import Ledger
    from forgetfree.training.held_out_loss import HeldOutTexts

Json = dict[str, Any]
#: Errors that are no fault of the code.
_EXPECTED = (TrainingError, MetricError, LedgerError)


def learn(work: UnitWork, unit: Unit, monitor: Monitor) -> None:
    """Let one strategy learn the stream, from the start or from its checkpoint; write scores, answers and its own files.

    Raises:
        UsageError, OutOfMemoryError, OSError: see `_why_it_failed`.
    """
    loader, directory, config = work.loader, unit.directory, work.config
    name, seed = unit.key["strategy"], unit.key["seed"]
    with work.recorded(unit, monitor) as (monitor, details):
        stream, texts = loader.stream(seed), loader.held_out_texts(seed)
        loss_before = None
        if texts:
            with _pre_trained(stream, loader.device) as model:
                loss_before = texts.loss(model, config.options[name])
        checkpoint = monitor.checkpoint()
        strategy = loader.strategy(name, seed, monitor)
        unlearned = loader.answers_unlearned(strategy.model)
        carried = work.revision.carried(name, seed, unlearned) if work.revision else None
        learned = LearnedStream(strategy, unit, monitor, unlearned=unlearned)
        if carried:
            carried.hand_over(directory)
        done, answered = learned.restore()
        if answered is None:
            if carried and carried.tasks:
                done = carried.put_into(learned, directory, unlearned)
                learned.keep(done)
            else:
                learned.add_scores(0, loader.before_training(name, learned.answers))
            answered = done
            learned.keep_answers(answered)
        for number, experience in enumerate(stream.benchmark.train_stream, 1):
            if number > done:
                begin = checkpoint.clock()
                strategy.train(experience)
                learned.seconds.append(round(checkpoint.clock() - begin, 3))
                learned.keep(number)
            if number > answered:
                learned.add_scores(number, learned.answers.after(stream.task_of(experience)))
                learned.kept_bytes.append(strategy.bytes_kept())
                learned.keep_answers(number)
        strategy.save(directory)
        arrays = tensors_by_task(learned.answers.answers)
        tensors = {name: torch.tensor(each, device="cpu") for name, each in arrays.items()}
        TensorFile(RunError, "").write(directory / PREDICTIONS, tensors)
        aside = texts and {"before": loss_before, **_losses_after(strategy, texts), **texts.counts}
        details |= {**_details(learned, config.options[name], carried), **_models_of(directory, loader.store)}
        details |= {"held_out": aside} if aside else {}


def _details(learned: LearnedStream, options: Any, carried: StreamPrefix | None) -> Json:
    """Return the facts about a unit that its other files lack."""
    strategy, stream = learned.strategy, learned.strategy.stream
    updates: Json = {task.name: strategy.updates[task.name] for task in stream.tasks}
    return {
        "options": recorded(strategy.options),
        "ledger": _ledger_summary(strategy.ledger),
        "kept_bytes": learned.kept_bytes,
        "by_task": {"updates": updates | (carried.updates if carried else {})},
        "bound": _bound(stream, options),
        "extra": strategy.extra_results()
        | ({"broken_claims": learned.answers.broken} if learned.answers.broken else {}),
        "seconds": {phase: round(strategy.seconds.get(phase, 0.0), 3) for phase in PHASES},
        "seconds_per_task": learned.seconds,
    }


class UnitWork:
    """The work that all units of a run share, in any process. It is pickled without loaded data and models.

    Args:
        config: the configuration of the run.
        execution: the way in which it is run.
        revision: the finished run that it is based on.
        loader: loads the stream in this process.

    Attributes:
        config_json: SHA-256 of the run's config.json, once it is written.
    """

    def __init__(
        self,
        config: RunConfig,
        execution: Execution,
        revision: Revision | None = None,
        loader: StreamLoader | None = None,
    ) -> None:
        self.config, self.revision = config, revision
        self.loader = loader or StreamLoader(config)
        self._debug, self._log = execution.debug, tuple(execution.log)
        self.config_json = ""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "loader": StreamLoader(self.config)}

    @contextmanager
    def recorded(self, unit: Unit, monitor: Monitor) -> Iterator[tuple[Monitor, Json]]:
        """Begin a unit, and write its outcome; an error of the unit is caught here, see `_why_it_failed`.

        Yields:
            The monitor, which has the unit's checkpoint, and an empty dictionary for the facts that other files lack.
        """
        kept = FileCheckpoint(unit.directory, circumstances(self.loader.device))
        unit.empty(but=(CHECKPOINT, HISTORY) if kept.goes_on else ())
        kept.start()
        history = History(monitor, unit.directory, kept)
        details, floors, failed, error = Json(), Json(), None, None
        try:
            try:
                with self._tracked(unit, history):
                    yield history, details
            except Exception as fault:  # from a plug-in, perhaps
                failed = fault
            floors = floors_of(self.loader, unit.key)  # after learning: users wait for its losses
            if failed:
                raise failed
        except Exception as fault:
            error = _why_it_failed(fault, self._debug)
        unit.end(environment(self.loader.device), details, error, history.seconds, floors, self.config_json)
        kept.end()

    def _tracked(self, unit: Unit, history: History) -> AbstractContextManager[None]:
        """Log to the requested trackers inside the block."""
        if not self._log:
            return nullcontext()
        from forgetfree.jobs.trackers import track

        return track(self._log, unit, Path(self.config.out), self.config.section(), history)


def _ledger_summary(ledger: Ledger | None) -> Json | None:
    """Return the facts about a ledger for results.json."""
    if ledger is None:
        return None
    return {
        "tasks": ledger.tasks,
        "composition": ledger.composition,
        "parents": [record.parent for record in ledger.records],
        "region_size": [len(record.region) for record in ledger.records],
        "owned_size": [len(record.owned.region) for record in ledger.records],
        "bytes": ledger.size_in_bytes,
        "overlap": ledger.overlap(),
    }


def _bound(stream: Stream, options: Any) -> Json:
    """Return the facts that a unit's answers depend on besides its strategy's files: tasks, model and scenario."""
    from forgetfree.serve.source import bound_of

    binding = stream.loaded.binding()
    definitions = (task.definition for task in stream.tasks)
    return bound_of(definitions, binding, stream.loaded.fingerprint, stream.scenario == "class")


def _models_of(directory: Path, store: Path) -> Json:
    """Return size and SHA-256, under `MODELS`, of the models in the store that a unit's fine-tuned.json names."""
    try:
        keys = read_json(directory / "fine-tuned.json", RunError, "")
    except RunError:
        return {}
    files = [store / f"{key}.safetensors" for key in keys.values()]
    return {MODELS: {path.name: size_and_sha256(path) for path in files if path.is_file()}}


def _why_it_failed(fault: Exception, debug: bool) -> str:
    """Return the error message for outcome.json if other units can go on: after a diverging loss, or a bug in a strategy.

    Args:
        fault: the exception.
        debug: raise it, unless it is an error of training, metrics or ledgers.

    Raises:
        UsageError, OutOfMemoryError, OSError: the request is wrong, memory is exhausted, or the disk is full or cannot be
            written: the other units would fail, too.
    """
    if told := out_of_memory(fault):
        raise told from fault
    if is_full(fault) and not isinstance(fault, ForgetfreeError | OSError):  # safetensors raises its own error
        raise OSError(errno.ENOSPC, first_line(fault)) from fault
    full = isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EROFS, errno.EDQUOT)
    if full or isinstance(fault, UsageError) or (debug and not isinstance(fault, _EXPECTED)):
        raise fault
    if isinstance(fault, ForgetfreeError):
        return " ".join(str(fault).split("\n"))
    return (
        f"It stopped with {type(fault).__name__}: {first_line(fault)}. Run it alone with --debug to see the traceback."
    )


# -- The loss on held-out texts --------------------------------------------------------------------------


@contextmanager
def _pre_trained(stream: Stream, device: str) -> Iterator[ReadoutModel]:
    """Yield the stream's model on a device with θ_pre loaded; afterwards, restore its state."""
    model = stream.model.to(torch.device(device))
    before = ModelState.of(model)
    try:
        stream.pre_trained.load_(model)
        yield model
    finally:
        before.load_(model)


def _losses_after(strategy: ContinualStrategy, texts: HeldOutTexts) -> dict[str, Any]:
    """Return the loss on held-out texts at the end of a stream.

    ``after``: the loss of the model with no task active, which is θ_pre for ledger strategies and the one model otherwise;
    absent if every task has its own model. ``by_task``: the loss of the model that answers for each task, if these differ.
    """
    from forgetfree.continual.region_strategy import RegionStrategy

    model, options, tasks = strategy.model, strategy.options, strategy.stream.tasks

    def loss(as_held: AbstractContextManager[object]) -> float:
        with as_held:
            return texts.loss(model, options)

    if not strategy.taskwise:
        return {"after": loss(strategy.answering(tasks[-1]))}
    by_task = [loss(strategy.answering(task)) for task in tasks]
    if not isinstance(strategy, RegionStrategy):
        return {"by_task": by_task}
    # No weight is restored outside of regions, so that damage by the strategy shows.
    return {"after": loss(strategy.ledger_model.standing_on("")), "by_task": by_task}


# -- Floors ----------------------------------------------------------------------------------------------


def floors_of(loader: StreamLoader, key: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return the floors of a seed by name and task; they are measured with the first strategy only, because all share them.

    Floors are a bag of words, the nearest row, and linear probes on θ_pre, at its readout and at the mean of tokens.
    """
    from forgetfree.training.encoded_task import sampled
    from forgetfree.training.floors import bag_of_words, linear_probes, nearest_rows

    config, common = loader.config, loader.config.common
    if key["strategy"] != config.strategy_names[0] or common.floors == "constant":
        return {}
    stream = loader.stream(key["seed"])
    tasks, known, scores = stream.tasks, stream.scenario == "task", dict[str, Sequence[float | None]]()
    if loader.tasks:
        train = [sampled(each, config.shots, stream.seed) for each in loader.tasks]
        test = [
            each.test.take(representative(kind_of(each.task).groups(each.test.labels), common.test_limit))
            for each in loader.tasks
        ]
        scores["bag_of_words"] = bag_of_words(tasks, train, test, task_known=known)
        if any("nearest_row" in task.kind.floors for task in tasks):
            scores["nearest_row"] = nearest_rows(tasks, train, test)
    if common.floors == "probe":
        with _pre_trained(stream, loader.device) as model:
            probes = linear_probes(tasks, model, task_known=known, precision="auto")
        scores["linear_probe"] = probes["linear_probe"]
        if any(score is not None for score in probes["mean_probe"]):
            scores["mean_probe"] = probes["mean_probe"]
    names = [task.name for task in tasks]
    return {floor: dict(zip(names, of_tasks, strict=True)) for floor, of_tasks in scores.items()}
