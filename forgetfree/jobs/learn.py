"""One unit of a run: one strategy learns the stream from its first task to its last with one seed, and answers after each.

Beside its scores stands what else is measured: floors, rows that are right, the loss on held-out texts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forgetfree.data.rows import representative
from forgetfree.errors import ForgetfreeError, RunError
from forgetfree.files import link_or_copy, new_directory
from forgetfree.jobs.environment import circumstances, environment
from forgetfree.jobs.stream_loading import StreamLoader
from forgetfree.jobs.unit import PREDICTION_FILE, History, Unit, ledger_summary, why_it_failed
from forgetfree.json_file import parse_json, read_json
from forgetfree.kinds.kind import kind_of
from forgetfree.models.state import ModelState
from forgetfree.options import recorded
from forgetfree.results.answers import Answers, tensors_by_task
from forgetfree.results.unit_folder import (
    MODELS,
    PREDICTIONS,
    SCORES_FILE,
    Score,
    described_files,
    read_scores,
    size_and_sha256,
    write_scores,
)
from forgetfree.tensor_file import TensorFile
from forgetfree.training.monitor import PHASES, Monitor

if TYPE_CHECKING:
    from forgetfree.continual.strategy import ContinualStrategy
    from forgetfree.continual.stream import Stream
    from forgetfree.core.readout_model import ReadoutModel
    from forgetfree.jobs.config import Execution, RunConfig
    from forgetfree.jobs.revision import Revision, StreamPrefix
    from forgetfree.training.encoded_task import EncodedTask
    from forgetfree.training.held_out_loss import HeldOutTexts

Json = dict[str, Any]


def learn(work: UnitWork, unit: Unit, monitor: Monitor) -> None:
    """Let one strategy learn the stream, from its start or where it was cut short; write scores, answers, and what it keeps.

    Raises:
        UsageError, OutOfMemoryError, OSError: see `why_it_failed`.
    """
    loader, directory, config = work.loader, unit.directory, work.config
    name, seed = unit.key["strategy"], unit.key["seed"]
    carried = work.revision.carried(loader, unit.key) if work.revision else None
    with work.recorded(unit, monitor) as (monitor, details):
        stream, texts = loader.stream(seed), loader.held_out_texts(seed)
        loss_before = None
        if texts:
            with _pre_trained(stream, loader.device) as model:
                loss_before = texts.loss(model, config.options[name])
        checkpoint = monitor.checkpoint()
        strategy = loader.strategy(name, seed, monitor)
        unlearned = loader.answers_unlearned(strategy.model)
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
        PREDICTION_FILE.write(directory / PREDICTIONS, tensors)
        aside = texts and {"before": loss_before, **_losses_after(strategy, texts), **texts.counts}
        details |= {**_details(learned, config.options[name], carried), **_models_of(directory, loader.store)}
        details |= {"held_out": aside} if aside else {}


def _details(learned: LearnedStream, options: Any, carried: StreamPrefix | None) -> Json:
    """Return what results.json needs of a unit beside its files."""
    strategy, stream = learned.strategy, learned.strategy.stream
    updates: Json = {task.name: strategy.updates[task.name] for task in stream.tasks}
    return {
        "options": recorded(strategy.options),
        "ledger": ledger_summary(strategy.ledger),
        "kept_bytes": learned.kept_bytes,
        "by_task": {"updates": updates | (carried.updates if carried else {})},
        "bound": _bound(stream, options),
        "extra": strategy.extra_results()
        | ({"broken_claims": learned.answers.broken} if learned.answers.broken else {}),
        "seconds": {phase: round(strategy.seconds.get(phase, 0.0), 3) for phase in PHASES},
        "seconds_per_task": learned.seconds,
    }


class UnitWork:
    """Work that the units of a run share, in any process. It is pickled without what it has loaded.

    Args:
        config: of the run.
        execution: how it is run.
        revision: the finished run that it stands on top of.
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
        """Begin a unit, and write how it ended; an error of the unit ends here, see `why_it_failed`.

        Yields:
            The monitor, which has the unit's checkpoint, and what results.json needs beside the files, still empty.
        """
        kept = unit.begin(circumstances(self.loader.device))
        history = History(monitor, unit.directory, kept)
        details, floors, failed, error = Json(), Json(), None, None
        try:
            try:
                with self._tracked(unit, history):
                    yield history, details
            except Exception as fault:  # of a plug-in, perhaps
                failed = fault
            floors = floors_of(self.loader, unit.key)  # after learning, whose losses are awaited
            if failed:
                raise failed
        except Exception as fault:
            error = why_it_failed(fault, self._debug)
        unit.end(environment(self.loader.device), details, error, history.seconds, floors, self.config_json)
        kept.end()

    def _tracked(self, unit: Unit, history: History) -> AbstractContextManager[None]:
        """Log to the trackers that are asked for, inside."""
        if not self._log:
            return nullcontext()
        from forgetfree.jobs.trackers import track

        return track(self._log, unit, Path(self.config.out), self.config.section(), history)


_NOTE = TensorFile(RunError, "", "forgetfree.answers")
_LEARNED, _ANSWERS = "learned.safetensors", "answers.safetensors"


class LearnedStream:
    """What a strategy made of a stream so far. If it is `resumable`, all is kept in the unit's checkpoint.

    In its folder ``learned-K`` stand

    - after K tasks were learned, what the strategy saves, and learned.safetensors: what was measured
    - after they were answered, scores.csv and answers.safetensors: the latest answers, and what was measured

    Args:
        strategy: that has learned nothing.
        unit: whose scores.csv is written.
        monitor: is told of scores, and has the unit's checkpoint.
        unlearned: whether tasks are answered before they are learned, too.

    Attributes:
        answers: of the strategy.
        scores: before training and after each task.
        kept_bytes: after each task.
        seconds: that each task took to learn.
    """

    def __init__(self, strategy: ContinualStrategy, unit: Unit, monitor: Monitor, *, unlearned: bool) -> None:
        from forgetfree.continual.strategy import StreamAnswers

        self.strategy, self._unit, self._monitor = strategy, unit, monitor
        self.answers = StreamAnswers(strategy, upper_triangle=unlearned)
        self.scores, self.kept_bytes, self.seconds = list[Score](), list[int](), list[float]()
        self._measured: dict[str, tuple[Answers, list[tuple[str, float]]]] = {}  # most answers stay the same objects
        self._directory = monitor.checkpoint().directory if strategy.resumable else None

    def add_scores(self, number: int, row: Mapping[str, Answers]) -> None:
        """Write the scores of the answers after so many tasks, 0 before training, beside the others."""
        key = self._unit.key["strategy"], self._unit.key["seed"]
        new = [
            Score(*key, task.name, number, metric, value, len(task.test))
            for task in self.strategy.stream.tasks
            if task.name in row
            for metric, value in self._scores_of(task, row[task.name])
        ]
        self.scores = sorted([*self.scores, *new], key=lambda score: score.after)
        write_scores(self._unit.directory / SCORES_FILE, self.scores)
        self._monitor.log_scores(new)

    def _scores_of(self, task: EncodedTask, answers: Answers) -> list[tuple[str, float]]:
        if task.name not in self._measured or self._measured[task.name][0] is not answers:
            metric = task.definition.metric
            self._measured[task.name] = answers, [(metric, answers.score(metric)), *answers.more_scores().items()]
        return self._measured[task.name][1]

    def keep(self, number: int) -> None:
        """Keep what was learned of so many tasks."""
        if self._directory is None:
            return
        strategy = self.strategy
        with new_directory(self._directory / f"learned-{number}") as folder:
            strategy.save(folder)
            about = {"seconds": self.seconds, "updates": strategy.updates, "phases": strategy.seconds}
            _NOTE.write(folder / _LEARNED, {}, {"about": json.dumps(about | {"files": described_files(folder)})})
        self._monitor.checkpoint().forget()

    def keep_answers(self, number: int) -> None:
        """Keep the answers after so many tasks, and the scores so far."""
        if self._directory is None:
            return
        folder = self._directory / f"learned-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        link_or_copy(self._unit.directory / SCORES_FILE, folder / SCORES_FILE)
        rows = {"answers": self.answers.answers, "samples": self.answers.sampled}
        held = [(kind, task, answers) for kind, row in rows.items() for task, answers in row.items()]
        tensors = {  # copies, for several answers may hold the labels of the rows themselves
            f"{place}/{name}": torch.tensor(array, device="cpu")
            for place, (_, _, answers) in enumerate(held)
            for name, array in answers.tensors().items()
        }
        about = {
            "held": [[kind, task] for kind, task, _ in held],
            "kept_bytes": self.kept_bytes,
            "broken": self.answers.broken,
            "phases": self.strategy.seconds,
            "files": {SCORES_FILE: size_and_sha256(folder / SCORES_FILE)},
        }
        _NOTE.write(folder / _ANSWERS, tensors, {"about": json.dumps(about)})
        shutil.rmtree(self._directory / f"learned-{number - 1}", ignore_errors=True)

    def restore(self) -> tuple[int, int | None]:
        """Bring all to where it was kept, and return how many tasks are learned, and after how many it was answered."""
        if self._directory is None:
            return 0, None
        folders = {int(path.name.removeprefix("learned-")): path for path in self._directory.glob("learned-*")}
        try:
            return self._restore(folders)
        except (ForgetfreeError, LookupError, TypeError, ValueError):  # none, or damaged: all tasks are learned again
            for folder in folders.values():
                shutil.rmtree(folder, ignore_errors=True)
            return 0, None

    def _restore(self, folders: Mapping[int, Path]) -> tuple[int, int]:
        strategy, done = self.strategy, max(folders)
        answered = max(number for number, folder in folders.items() if (folder / _ANSWERS).is_file())
        if done not in (answered, answered + 1):
            raise RunError(f"There are answers after {answered} tasks, and {done} are learned.")
        about, tensors = _read_note(folders[answered], _ANSWERS)
        tasks = {task.name: task for task in strategy.stream.tasks}
        held: dict[str, dict[str, Answers]] = {"answers": {}, "samples": {}}
        for place, (kind, task) in enumerate(about["held"]):
            arrays = {
                name.removeprefix(f"{place}/"): tensor.numpy()
                for name, tensor in tensors.items()
                if name.startswith(f"{place}/")
            }
            held[kind][task] = tasks[task].kind.kept_answers(tasks[task].definition, arrays)
        phases = about["phases"]
        if done:
            measured, _ = _read_note(folders[done], _LEARNED)
            strategy.load(folders[done])
            strategy.updates.update(measured["updates"])
            self.seconds = measured["seconds"]
            phases = measured["phases"] | phases if done == answered else phases | measured["phases"]
        strategy.seconds |= phases
        self.kept_bytes = about["kept_bytes"]
        self.answers.broken += about["broken"]
        self.answers.resume(strategy.stream.tasks[:answered], held["answers"], held["samples"])
        self.scores = read_scores(folders[answered] / SCORES_FILE)
        link_or_copy(folders[answered] / SCORES_FILE, self._unit.directory / SCORES_FILE)
        self._monitor.log_scores([score for score in self.scores if score.after == answered])
        return done, answered


def _read_note(folder: Path, name: str) -> tuple[Json, dict[str, torch.Tensor]]:
    """Return what stands in a note of `LearnedStream`; raise ``RunError`` where it, or a file that it names, is damaged."""
    header, tensors = _NOTE.read(folder / name)
    about, files = parse_json(header["about"]), described_files(folder)
    if any(files.get(file) != entry for file, entry in about["files"].items()):
        raise RunError(f"{folder} has changed since it was written.")
    return about, tensors


def _bound(stream: Stream, options: Any) -> Json:
    """Return what the answers of a unit depend on besides what its strategy keeps."""
    from forgetfree.serve.source import bound_of

    binding = stream.loaded.binding()
    definitions = (task.definition for task in stream.tasks)
    return bound_of(definitions, binding, stream.loaded.fingerprint, stream.scenario == "class")


def _models_of(directory: Path, store: Path) -> Json:
    """Return under `MODELS` size and SHA-256 of the fine-tuned models that a unit's fine-tuned.json names in the store."""
    try:
        keys = read_json(directory / "fine-tuned.json", RunError, "")
    except RunError:
        return {}
    files = [store / f"{key}.safetensors" for key in keys.values()]
    return {MODELS: {path.name: size_and_sha256(path) for path in files if path.is_file()}}


# -- The loss on texts that no task trains ---------------------------------------------------------------


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


def _losses_after(strategy: ContinualStrategy, texts: HeldOutTexts) -> dict[str, Any]:
    """Return the loss on texts that no task trains at the end of a stream.

    ``after`` is without a task: by the model as the ledger takes all regions out of it, where there is a ledger; else by the
    one model. Where each task has a model of its own there is none without a task, and no ``after``.
    ``by_task`` is by the model that answers for each task, where these differ.
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
    # Nothing is put back here: what a strategy spoilt outside of its regions shows.
    return {"after": loss(strategy.ledger_model.base(union=False)), "by_task": by_task}


# -- Floors ----------------------------------------------------------------------------------------------


def floors_of(loader: StreamLoader, key: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return the scores of a seed that take no fine-tuning, by name and task: beside the first strategy, for they are alike.

    They are a bag of words, the nearest row, and linear probes on θ_pre, at its readout and at the mean of tokens.
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
