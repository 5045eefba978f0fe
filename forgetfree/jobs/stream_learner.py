"""A stream learned from its first task to its last by one strategy, and answered after each: what a run and a sweep do."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from forgetfree import registry
from forgetfree.device import find_device
from forgetfree.jobs.adapter_starts import starts_of
from forgetfree.jobs.in_memory import InMemory
from forgetfree.jobs.run_config import CheckedRun, RunConfig
from forgetfree.jobs.running.unit import Json
from forgetfree.jobs.stream_checkpoint import LearnedStream, Row, StreamCheckpoint
from forgetfree.kinds.kind import readout_for
from forgetfree.learning.monitor import Monitor

if TYPE_CHECKING:
    from forgetfree.continual.evaluation import StreamAnswers
    from forgetfree.continual.strategy import ContinualStrategy
    from forgetfree.continual.streams import Stream
    from forgetfree.data.rows import TaskRows
    from forgetfree.learning.training_options import TrainingOptions
    from forgetfree.models.peft_adapter import AdapterStart


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
        # The answers before training, by the precision and batch size they are computed in.
        self._first_rows: dict[tuple[str, int], Row] = {}

    @cached_property
    def tasks(self) -> list[TaskRows]:
        """Return the tasks of the stream with all their rows, unless these are tensors."""
        from forgetfree.data.sources import load_tasks

        if self.in_memory.reads_tensors:
            return []
        data = self.in_memory.data_or(self.config.data)
        return load_tasks(self.config.stream, data, self.checked.run.evaluate_on, self.config.read_options)

    def stream(self, seed: int) -> Stream:
        """Return the stream of a seed, on its own model; the last stream that was asked for is kept."""
        from forgetfree.continual.streams import load_stream, make_stream
        from forgetfree.models.loading import load_model

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
                drawn |= {"graftable": common.graftable, "evaluate_on": common.evaluate_on}
                self._streams[seed] = load_stream(config.stream, data=memory.data, model=memory.model, **drawn)
            else:
                how: Json = {"graftable": common.graftable, "max_length": common.max_length, **memory.model_arguments}
                tasks = [rows.task for rows in self.tasks]
                readout = readout_for(config.readout, tasks)
                model = load_model(memory.model_or(config.model), readout, tasks=tasks, **how)
                self._streams[seed] = make_stream(config.stream, self.tasks, model, **drawn)
            self._streams[seed] = replace(self._streams[seed], starts=self._starts)
        return self._streams[seed]

    @cached_property
    def _starts(self) -> Mapping[str, AdapterStart]:
        return starts_of(self.config.starts, self.config.model, self.in_memory.model)

    def learn(
        self,
        name: str,
        seed: int,
        monitor: Monitor,
        directory: Path | None = None,
        on_row: Callable[[Sequence[Row]], None] = lambda rows: None,
        options: TrainingOptions | None = None,
    ) -> LearnedStream:
        """Let one strategy learn the whole stream.

        Args:
            name: of the strategy.
            seed: of sample and training.
            monitor: hears of it.
            directory: where it keeps what it needs to answer later; default: nowhere.
            on_row: told of all rows so far, whenever there is one more.
            options: in place of those that were asked for.
        """
        from forgetfree.continual.evaluation import StreamAnswers
        from forgetfree.models.state import StateStore

        stream = self.stream(seed)
        strategy = self.checked.classes[name](
            stream=stream,
            options=options or self.checked.options[name],
            seed=seed,
            device=find_device(self.config.device),
            monitor=monitor,
            store=StateStore(self.store),
        )
        self.prepare(name, strategy)
        answers = StreamAnswers(strategy, upper_triangle=self.checked.run.upper_triangle)
        learned = LearnedStream(strategy, [], answers.broken)
        kept = StreamCheckpoint(monitor.checkpoint(), name, learned, answers)
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
                begin = time.perf_counter()
                strategy.train(experience)
                learned.seconds.append(round(time.perf_counter() - begin, 3))
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

    def begin(self, name: str, learned: LearnedStream, answers: StreamAnswers, directory: Path | None) -> int:
        """Measure the strategy where it begins, and return after how many tasks that is: before the first one."""
        learned.rows.append(self._before_training(name, answers))
        return 0

    def _before_training(self, name: str, answers: StreamAnswers) -> Row:
        """Return the answers before training. Built-in strategies all answer with θ_pre then, so one evaluation serves them."""
        if name not in registry.STRATEGIES:
            return answers.before()
        options = self.checked.options[name]
        how = options.precision, options.rows_at_once
        self._first_rows[how] = answers.before(self._first_rows.get(how))
        return dict(self._first_rows[how])
