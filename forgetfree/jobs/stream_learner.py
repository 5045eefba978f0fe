"""A stream learned from its first task to its last by one strategy, and answered after each: what a run does.

What a unit has learned is kept, task by task, in a folder of its checkpoints: no finished task is learned again.

learned-K/                what the strategy keeps after K tasks, by its `save`: of the newest K alone
learned-K/measured.json   what was measured, and the SHA-256 of each file beside it
answers-K.safetensors     the answers that are new after K tasks, and what was measured beside them
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forgetfree import registry
from forgetfree.checkpoint import Checkpoint
from forgetfree.data.encoding import fitting
from forgetfree.device import find_device
from forgetfree.errors import ForgetfreeError, RunError
from forgetfree.files import new_directory, write_json
from forgetfree.jobs.config import InMemory
from forgetfree.jobs.run_config import CheckedRun, RunConfig
from forgetfree.jobs.running.unit import Json, described_files
from forgetfree.json_file import parse_json, read_json, sign
from forgetfree.kinds.kind import kind_of, readout_for
from forgetfree.results.answers import Answers
from forgetfree.tasks import seeded
from forgetfree.tensor_file import TensorFile
from forgetfree.training.monitor import Monitor

if TYPE_CHECKING:
    from forgetfree.continual.evaluation import StreamAnswers
    from forgetfree.continual.strategy import ContinualStrategy
    from forgetfree.continual.streams import Stream
    from forgetfree.core.readout_model import ReadoutModel
    from forgetfree.data.rows import TaskRows
    from forgetfree.models.fine_tuned_directory import FineTunedModel
    from forgetfree.models.loading import LoadedModel
    from forgetfree.tasks import TaskDefinition
    from forgetfree.training.texts_aside import TextsAside


_FILE, _MEASURED = TensorFile(RunError, "", "forgetfree.answers"), "measured.json"
#: The answers on every task's test rows.
Row = dict[str, Answers]


@dataclass
class LearnedStream:
    """What a strategy made of a stream so far.

    Attributes:
        strategy: after the last task.
        rows: its answers before training, and after each task.
        broken: see `StreamAnswers`.
        kept_bytes: after each task.
        seconds: that each task took to learn.
    """

    strategy: ContinualStrategy
    rows: list[Row]
    broken: list[str]
    kept_bytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class StreamLearner:
    """The stream of a run, and its strategies, which learn it one after the other on one model.

    Args:
        config: what was asked for.
        checked: the strategies and their options.
        in_memory: objects in the place of names.
        store: the directory of fine-tuned models that strategies share.
    """

    def __init__(self, config: RunConfig, checked: CheckedRun, in_memory: InMemory, store: Path) -> None:
        self.config, self.checked, self.in_memory, self.store = config, checked, in_memory, store
        self._streams: dict[int, Stream] = {}
        self.fine_tuned: FineTunedModel | None = None
        self._fresh: LoadedModel | None = None  # the model that rows were measured by, for the first stream
        # The answers before training, by the precision and batch size they are computed in.
        self._first_rows: dict[tuple[str, int], Row] = {}

    @cached_property
    def tasks(self) -> list[TaskRows]:
        """Return the tasks of the stream with all their rows, unless these are tensors; the run says how texts are written."""
        if self.in_memory.reads_tensors:
            return []
        decoding, tasks = self.checked.run.decoding, self.read()
        tasks = [replace(rows, task=kind_of(rows.task).with_decoding(rows.task, decoding)) for rows in tasks]
        if any(kind_of(rows.task).depends_on_model for rows in tasks):
            self._fresh = fresh = self._load([rows.task for rows in tasks])
            tasks = [fitting(rows, fresh.encoder(rows.task), self.config.skip_bad_rows) for rows in tasks]
        return tasks

    def read(self) -> list[TaskRows]:
        """Read the tasks of the stream."""
        from forgetfree.data.sources import load_tasks

        data = self.in_memory.data_or(self.config.data)
        return load_tasks(self.config.stream, data, self.checked.run.evaluate_on, self.config.read_options)

    def _load(self, tasks: Sequence[TaskDefinition]) -> LoadedModel:
        """Load the model for tasks; where one is fine-tuned already, with its readout."""
        from forgetfree.models.loading import load_model

        config, common, memory = self.config, self.checked.run, self.in_memory
        arguments: Json = {"graftable": common.graftable, "max_length": common.max_length}
        if config.fine_tuned is not None:
            from forgetfree.models.fine_tuned_directory import load_fine_tuned

            arguments |= {"readout": config.readout}
            self.fine_tuned = load_fine_tuned(config.fine_tuned, config.model, tasks[0], **arguments)
            return self.fine_tuned.loaded
        arguments |= {"dtype": common.dtype, **memory.model_arguments}
        return load_model(memory.model_or(config.model), readout_for(config.readout, tasks), tasks=tasks, **arguments)

    def stream(self, seed: int) -> Stream:
        """Return the stream of a seed, on its own model; the last stream that was asked for is kept."""
        from forgetfree.continual.streams import load_stream, make_stream

        if seed not in self._streams:
            self._streams.clear()
            self._first_rows.clear()
            config, common, memory = self.config, self.checked.run, self.in_memory
            drawn: Json = {
                "shots": config.shots,
                "or_fewer": common.or_fewer,
                "seed": seed,
                "test_limit": common.test_limit,
                "scenario": common.scenario,
            }
            if memory.reads_tensors:
                drawn |= {"graftable": common.graftable, "evaluate_on": common.evaluate_on, "dtype": common.dtype}
                self._streams[seed] = load_stream(config.stream, data=memory.data, model=memory.model, **drawn)
            else:
                tasks = [replace(rows, task=seeded(rows.task, seed, common.sampling_seed)) for rows in self.tasks]
                model, self._fresh = self._fresh or self._load([rows.task for rows in tasks]), None
                self._streams[seed] = make_stream(config.stream, tasks, model, **drawn)
        return self._streams[seed]

    def texts_aside(self, seed: int) -> TextsAside | None:
        """Return the texts that no task trains, encoded for the stream of a seed; ``None`` where none are named."""
        from forgetfree.training.texts_aside import TextsAside

        place, stream = self.config.held_aside, self.stream(seed)
        if place is None:
            return None
        data = self.in_memory.data_or(self.config.data)
        return TextsAside.of(place, data, stream.loaded, self.checked.run.test_limit, self.config.read_options)

    def learn(
        self,
        name: str,
        seed: int,
        monitor: Monitor,
        directory: Path | None = None,
        on_row: Callable[[Sequence[Row]], None] = lambda rows: None,
    ) -> LearnedStream:
        """Let one strategy learn the whole stream.

        Args:
            name: of the strategy.
            seed: of sample and training.
            monitor: hears of it.
            directory: where it keeps what it needs to answer later; default: nowhere.
            on_row: told of all rows so far, whenever there is one more.
        """
        from forgetfree.continual.evaluation import StreamAnswers
        from forgetfree.models.state import StateStore

        stream = self.stream(seed)
        strategy = self.checked.classes[name](
            stream=stream,
            options=self.checked.options[name],
            seed=seed,
            device=find_device(self.config.device),
            monitor=monitor,
            store=StateStore(self.store),
        )
        self.prepare(name, strategy)
        if self.fine_tuned is not None:  # it stands where the one would that is trained
            self.fine_tuned.put_into(
                strategy.store, strategy.bench(stream.tasks[0]).key(strategy.options), stream.pre_trained
            )
        answers = StreamAnswers(strategy, upper_triangle=self.answers_unlearned(strategy.model))
        learned = LearnedStream(strategy, [], answers.broken)
        checkpoint = monitor.checkpoint()
        kept = StreamCheckpoint(checkpoint, name, learned, answers)
        done = kept.restore()
        new = not learned.rows
        if new:
            done = self.begin(name, learned, answers, directory)
            if done:
                kept.learn(done)
        for count in range(1, len(learned.rows) + 1):
            on_row(learned.rows[:count])
        if new:
            kept.answer(*range(len(learned.rows)))
        for number, experience in enumerate(stream.benchmark.train_stream, 1):
            if number > done:
                begin = checkpoint.clock()
                strategy.train(experience)
                learned.seconds.append(round(checkpoint.clock() - begin, 3))
                kept.learn(number)
            if directory is not None and number >= done:
                strategy.save(directory)
            if number == len(learned.rows):
                learned.rows.append(answers.after(stream.task_of(experience)))
                learned.kept_bytes.append(strategy.bytes_kept())
                on_row(learned.rows)
                kept.answer(number)
        return learned

    def prepare(self, name: str, strategy: ContinualStrategy) -> None:
        """Hand a new strategy what it need not find again: nothing."""

    def answers_unlearned(self, model: ReadoutModel) -> bool:
        """Return whether tasks are answered before they are learned: where no readout of theirs has to be learned first."""
        upper = self.checked.run.upper_triangle
        return not model.readouts() if upper is None else upper

    def texts_before(self, key: Mapping[str, Any], learned: LearnedStream) -> dict[str, Sequence[str]]:
        """Return what a unit answered before training, by task, of the rows that a report shows."""
        return {task: texts for task, each in learned.rows[0].items() if (texts := each.shown_texts())}

    def begin(self, name: str, learned: LearnedStream, answers: StreamAnswers, directory: Path | None) -> int:
        """Measure the strategy where it begins, and return after how many tasks that is: before the first one."""
        learned.rows.append(self._before_training(name, answers))
        return 0

    def _before_training(self, name: str, answers: StreamAnswers) -> Row:
        """Return the answers before training. Built-in strategies all answer with θ_pre then, so one evaluation serves them."""
        if name not in registry.STRATEGIES:
            return answers.before()
        options = self.checked.options[name]
        passes = options.answering["precision"], options.answering["batch_size"]
        self._first_rows[passes] = answers.before(self._first_rows.get(passes))
        return dict(self._first_rows[passes])


# -- Checkpoints ---------------------------------------------------------------------------------------


class StreamCheckpoint:
    """Keeps what a strategy has learned, if it is `resumable`, and what it notes for the end.

    Args:
        checkpoint: that of the unit.
        name: of the strategy.
        learned: what is kept; the strategy is new, and has no row.
        answers: that bring the rows up to date.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, learned: LearnedStream, answers: StreamAnswers) -> None:
        self._phases, self._learned, self._answers = checkpoint, learned, answers
        kept = checkpoint.directory if learned.strategy.resumable else None
        self._directory = kept and kept / name
        self._sampled: Row = {}

    def restore(self) -> int:
        """Bring all to where it was kept, and return the number of tasks that are learned.

        That may be one more than there are rows after the first: it is to be answered.
        """
        if self._directory is None:
            return 0
        try:
            return self._restore(self._directory)
        except (ForgetfreeError, LookupError, TypeError, ValueError):  # damaged: all tasks are learned again
            shutil.rmtree(self._directory, ignore_errors=True)
            return 0

    def _restore(self, directory: Path) -> int:
        learned, strategy = self._learned, self._learned.strategy
        done = tasks_learned(directory)
        rows, sampled, about = list[Row](), Row(), dict[str, Any]()
        while (path := directory / f"answers-{len(rows)}.safetensors").exists():
            header, tensors = _FILE.read(path)
            tasks = {task.name: task for task in strategy.stream.tasks}
            new, about = {"answers": Row(), "samples": Row()}, parse_json(header["about"])
            if about["tasks"] != len(rows):
                raise RunError(f"{path} has the answers after {about['tasks']} tasks.")
            for kind, task, number in about["held"]:
                arrays = {
                    name.removeprefix(f"{number}/"): tensor.numpy()
                    for name, tensor in tensors.items()
                    if name.startswith(f"{number}/")
                }
                new[kind][task] = tasks[task].kind.kept_answers(tasks[task].definition, arrays)
            rows.append((rows[-1] if rows else {}) | new["answers"])
            sampled |= new["samples"]
        if done not in (len(rows) - 1, len(rows)) or not rows:
            raise RunError(f"{directory} has answers after {len(rows) - 1} tasks, and {done} are learned.")
        if done:
            folder = directory / f"learned-{done}"
            measured = read_json(folder / _MEASURED, RunError, "", signed=True)
            if measured["files"] != {name: each for name, each in described_files(folder).items() if name != _MEASURED}:
                raise RunError(f"{folder} has changed since it was written.")
            strategy.load(folder)
            strategy.seconds |= about["phases"] | measured["phases"]
            learned.seconds += measured["seconds"]
            strategy.updates.update(measured["updates"])
        learned.rows += rows
        learned.kept_bytes += about["kept_bytes"]
        learned.broken += about["broken"]
        self._sampled = dict(sampled)
        experiences = strategy.stream.benchmark.train_stream[: len(rows) - 1]
        self._answers.resume([strategy.stream.task_of(each) for each in experiences], rows[-1], sampled)
        return done

    def learn(self, done: int) -> None:
        """Keep what the strategy has learned from so many tasks."""
        if self._directory is None:
            return
        with new_directory(self._directory / f"learned-{done}") as directory:
            strategy = self._learned.strategy
            strategy.save(directory)
            measured = {
                "seconds": self._learned.seconds,
                "phases": strategy.seconds,
                "updates": strategy.updates,
            }
            write_json(directory / _MEASURED, sign(measured | {"files": described_files(directory)}))
        shutil.rmtree(self._directory / f"learned-{done - 1}", ignore_errors=True)
        self._phases.forget()

    def answer(self, *numbers: int) -> None:
        """Keep the rows of these numbers, the newest last; the one before training is 0."""
        if self._directory is None:
            return
        for number in numbers:
            self._answer(number, self._directory / f"answers-{number}.safetensors")

    def _answer(self, number: int, path: Path) -> None:
        rows, sampled, learned = self._learned.rows, self._answers.sampled, self._learned
        new_answers = _new("answers", rows[number], rows[number - 1] if number else {})
        new_answers += _new("samples", sampled, self._sampled)
        self._sampled = dict(sampled)
        about = {
            "tasks": number,
            "held": [[kind, task, number] for number, (kind, task, _) in enumerate(new_answers)],
            "kept_bytes": learned.kept_bytes,
            "broken": learned.broken,
            "phases": learned.strategy.seconds,
        }
        tensors = {  # copies, for several answers may hold the labels of the rows themselves
            f"{number}/{name}": torch.tensor(array, device="cpu")
            for number, (_, _, answers) in enumerate(new_answers)
            for name, array in answers.tensors().items()
        }
        _FILE.write(path, tensors, {"about": json.dumps(about)})


def tasks_learned(directory: Path) -> int:
    """Return how many tasks of a stream a folder of `StreamCheckpoint` says are learned."""
    return max((int(path.name.removeprefix("learned-")) for path in directory.glob("learned-*")), default=0)


def _new(kind: str, now: Mapping[str, Answers], before: Mapping[str, Answers]) -> list[tuple[str, str, Answers]]:
    return [(kind, task, answers) for task, answers in now.items() if before.get(task) is not answers]
