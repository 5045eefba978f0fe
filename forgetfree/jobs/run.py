"""One run of the command line: a stream, some strategies, some seeds. A unit is one strategy with one seed.

OUT/report.md, OUT/report.html        the tables; the page: figures and tables
OUT/fine-tuned/                       each task's fine-tuned model, shared by the strategies
OUT/STRATEGY/seed-S/                  ledger.safetensors or checkpoint.safetensors, predictions.safetensors (the last
                                      row's logits and labels on every task's test rows), seconds-per-task.json
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree import registry
from forgetfree.core.device import find_device
from forgetfree.display import tell_note
from forgetfree.errors import ReportError, RunError
from forgetfree.files import write_atomically, write_json
from forgetfree.jobs.adapter_starts import starts_of, tell_starts
from forgetfree.jobs.config import Faults, with_precision
from forgetfree.jobs.floors_file import read_floors, write_floors
from forgetfree.jobs.in_memory import InMemory
from forgetfree.jobs.job import Job
from forgetfree.jobs.ledger_summary import ledger_summary
from forgetfree.jobs.predictions import agreement, save_predictions
from forgetfree.jobs.run_config import CheckedRun, RunConfig, RunOptions
from forgetfree.jobs.running.engine import perform
from forgetfree.jobs.running.environment import left_out_of, tell_shared_labels, tell_shared_rows
from forgetfree.jobs.running.execution import USUAL, Execution
from forgetfree.jobs.running.resume import described
from forgetfree.jobs.running.unit import Json, Unit
from forgetfree.jobs.running.workload import PlannedUnit, Workload
from forgetfree.jobs.stream_checkpoint import Learned, Row, StreamCheckpoint
from forgetfree.json_file import read_json
from forgetfree.kinds.kind import readout_for
from forgetfree.learning.monitor import PHASES, Monitor, Phase
from forgetfree.options import recorded
from forgetfree.results import metrics
from forgetfree.results.answers import constant_scores
from forgetfree.results.records import RunResults
from forgetfree.results.report.run_report import render
from forgetfree.results.run_results import SECONDS_PER_TASK, merge, with_timings
from forgetfree.results.scores import SCORES_FILE, Score, read_scores, write_scores
from forgetfree.results.stored import run_of_scores
from forgetfree.results.unit_record import MODELS
from forgetfree.results.unit_record import described as described_file
from forgetfree.serve.bound import bound_to

if TYPE_CHECKING:
    from forgetfree.continual.evaluation import StreamAnswers
    from forgetfree.continual.strategy import ContinualStrategy
    from forgetfree.continual.streams import Stream
    from forgetfree.data.rows import TaskRows
    from forgetfree.learning.training import TrainingOptions
    from forgetfree.models.adapter_start import AdapterStart
    from forgetfree.results.answers import Answers

#: Settings that say nothing of the outcome, or that results.json says elsewhere.
_OF_THE_PLACE = ("cache", "threads", "evaluate_on", "scenario")


def run(config: RunConfig, execution: Execution = USUAL) -> Json:
    """Train strategies on a stream of tasks, for each seed.

    Args:
        config: what to run.
        execution: how.

    Returns:
        The content of results.json. Units that failed stand under ``failed``.

    Raises:
        UsageError: the configuration is wrong, or the directory is not empty.
        ForgetfreeError: data or model cannot be loaded.
    """
    return perform(RunJob(config), execution)


class RunJob(Job[RunConfig]):
    """A run. Its strategies with one seed share a stream and its model, and take turns.

    Args:
        config: what was asked for.
        in_memory: objects in the place of names.
        checked: what ``config.checked()`` returned, where somebody called it already.
    """

    growing = ("strategy", "seed")
    learns_stream = True

    def __init__(self, config: RunConfig, in_memory: InMemory | None = None, checked: CheckedRun | None = None) -> None:
        config, in_memory = with_precision(config), in_memory or InMemory()
        checked = checked or config.checked(in_memory.strategies)
        self.common = checked.run
        precisions = [each.precision for each in checked.options.values()]
        super().__init__(config, checked, self.common, precisions, in_memory)
        self._streams: dict[int, Stream] = {}
        # The answers before training, by the precision and batch size they are computed in.
        self._first_rows: dict[tuple[str, int], Row] = {}

    @classmethod
    def workload(cls, config: RunConfig, checked: CheckedRun | None, faults: Faults) -> Workload:
        """Return every strategy with every seed."""
        common = checked.run if checked else RunOptions()
        workload = Workload(config.model, config.readout, config.names, common, config.starts, is_stream=True)
        if checked is not None:
            every = product(config.seeds, checked.classes)
            workload.units = [_planned(name, config.names, checked, config.shots, seed) for seed, name in every]
        return workload

    def keys(self) -> Json:
        """Return every strategy, seed after seed."""
        return {
            f"{name}/seed-{seed}": {"strategy": name, "seed": seed}
            for seed in self.config.seeds
            for name in self.config.strategies
        }

    def describe(self) -> Json:
        """Describe tasks, model and data, and check the options against the stream."""
        tell_shared_rows(self.tasks, self.common.evaluate_on)
        if self.common.scenario == "domain":
            tell_shared_labels(self.tasks)
        stream = self.stream(self.config.seeds[0])
        for name, strategy in self.checked.classes.items():
            strategy.check(self.checked.options[name], stream)
        model, unanswered = self.config.model, [task.unanswered for task in stream.tasks]
        metric, task_known = [task.definition.metric for task in stream.tasks], stream.scenario == "task"
        found, about = described(model, self.request()["model"], stream.loaded, stream.tasks)
        for note in (stream.loaded.note, *(task.note for task in stream.tasks)):
            tell_note(note)
        starts = tell_starts(stream.starts, stream.model, self.checked.classes)
        begun: Json = {"starts": starts} if starts else {}
        return {
            **found,
            **begun,
            "scenario": stream.scenario,
            "options": {name: recorded(options) for name, options in self.checked.options.items()},
            "about": {
                "stream": self.config.stream,
                "tasks": [task.name for task in stream.tasks],
                "scenario": stream.scenario,
                "evaluated_on": self.common.evaluate_on,
                "model": about,
                "data": {
                    "shots": self.config.shots,
                    "steps": _shared(options.steps for options in self.checked.options.values()),
                    "fingerprints": {task.name: task.fingerprint for task in stream.tasks},
                    "test_rows": {task.name: len(task.test) for task in stream.tasks},
                    **left_out_of(self.tasks),
                },
                "floors": {"constant": constant_scores(unanswered, metric, task_known=task_known)},
                "set": {key: value for key, value in self.config.settings.items() if key not in _OF_THE_PLACE},
                "shared_rows": {rows.task.name: rows.shared for rows in self.tasks},
                **begun,
            },
        }

    # -- A unit ----------------------------------------------------------------------------------------------

    @cached_property
    def tasks(self) -> list[TaskRows]:
        """Return the tasks of the stream with all their rows, unless these are tensors."""
        from forgetfree.data.sources import load_tasks

        if self.in_memory.reads_tensors:
            return []
        data = self.in_memory.data_or(self.config.data)
        return load_tasks(self.config.stream, data, self.common.evaluate_on, self.config.read_options)

    def stream(self, seed: int) -> Stream:
        """Return the stream of a seed, on its own model; the last stream that was asked for is kept."""
        from forgetfree.continual.streams import load_stream, make_stream
        from forgetfree.models.loading import load_model

        if seed not in self._streams:
            self._streams.clear()
            self._first_rows.clear()
            config, common, memory = self.config, self.common, self.in_memory
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
                how: Json = {"graftable": common.graftable, "max_length": common.max_length, **memory.how}
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
    ) -> Learned:
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
            device=self.device,
            monitor=monitor,
            store=StateStore(self.cache),
        )
        self.prepare(name, strategy)
        answers = StreamAnswers(strategy, upper_triangle=self.common.upper_triangle)
        learned = Learned(strategy, [], answers.broken)
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

    def begin(self, name: str, learned: Learned, answers: StreamAnswers, directory: Path | None) -> int:
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

    def measure(self, key: Mapping[str, Any], directory: Path, monitor: Monitor) -> Json:
        """Learn the stream, and write scores, predictions, and what the strategy keeps."""
        tasks, scores = self.stream(key["seed"]).tasks, self.scored(key)

        known: dict[int, list[tuple[str, float]]] = {}  # most answers stay the same objects from row to row

        def measured(answers: Answers, metric: str) -> list[tuple[str, float]]:
            if id(answers) not in known:
                known[id(answers)] = [(metric, answers.score(metric)), *answers.more_scores().items()]
            return known[id(answers)]

        def write(rows: Sequence[Row]) -> None:
            more = [
                Score(key, task.name, len(rows) - 1, metric, value, len(task.test))
                for task in tasks
                if task.name in rows[-1]
                for metric, value in measured(rows[-1][task.name], task.definition.metric)
            ]
            scores.extend(more)
            scores.sort(key=lambda score: score.after)
            write_scores(directory / SCORES_FILE, scores)
            monitor.scored(more)

        from forgetfree.jobs.diagnostics import readouts_again, temperatures

        # Floors are those of a seed, so one strategy measures them, before anything can fail.
        if key["strategy"] == self.config.strategies[0]:
            write_floors(directory, self.floors(key["seed"]))
        bound = self._bound(key)
        learned = self.learn(key["strategy"], key["seed"], monitor, directory, write)
        strategy = learned.strategy
        by_task = temperatures(strategy, learned.rows[-1]) if self.common.temperature_scaling else {}
        by_task |= {"readout_again": readouts_again(strategy)} if self.common.readout_again else {}
        save_predictions(directory, learned.rows[-1])
        write_json(directory / SECONDS_PER_TASK, learned.seconds)
        return {
            "options": recorded(strategy.options),
            "ledger": ledger_summary(strategy.ledger),
            "kept_bytes": learned.kept_bytes,
            "by_task": by_task,
            "bound": bound,
            **models_of(directory, self.cache),
            "extra": strategy.extra_results() | ({"broken_claims": learned.broken} if learned.broken else {}),
            "seconds": {phase: round(strategy.seconds.get(phase, 0.0), 3) for phase in PHASES},
        }

    def _bound(self, key: Mapping[str, Any]) -> Json:
        """Return what the answers of a unit depend on besides what its strategy keeps."""
        stream, options = self.stream(key["seed"]), self.checked.options[key["strategy"]]
        binding = stream.loaded.binding(options.precision)
        finding = "last" if stream.scenario == "task" else getattr(options, "task_inference", "last")
        return bound_to((task.definition for task in stream.tasks), binding, stream.scenario == "class", finding)

    def floors(self, seed: int) -> Json:
        """Return the scores that take no fine-tuning, beside those of a constant answer."""
        from forgetfree.jobs.diagnostics import floors

        common = self.common
        if common.floors == "constant":
            return {}
        probe = find_device(self.config.device) if common.floors == "probe" else None
        return floors(self.stream(seed), self.tasks, self.config.shots, common.or_fewer, common.test_limit, probe)

    def scored(self, key: Mapping[str, Any]) -> list[Score]:
        """Return the scores of a unit from before where it begins."""
        return []

    # -- Results ---------------------------------------------------------------------------------------------

    @classmethod
    def gather(cls, out: Path, about: Json, units: Sequence[tuple[Unit, Json | None]]) -> Json:
        """Return ``runs``, ``unfinished`` and ``failed``; runs of one seed are compared with its fine-tuned models."""
        tasks = about["tasks"]
        runs, unfinished, failed = list[Json](), list[Json](), list[Json]()
        for unit, record in units:
            if record and record["status"] == "done":
                runs.append(_entry(unit, record["details"], tasks))
            elif record:
                failed.append({**unit.key, "matrix": _rows_so_far(unit, tasks), "error": record["error"]})
            elif unit.is_begun:
                unfinished.append({**unit.key, "matrix": _rows_so_far(unit, tasks)})
        about = about | {"floors": about["floors"] | _floors([unit for unit, record in units if record], tasks)}
        references = {run["seed"]: run for run in runs if run["strategy"] == "fine-tune"}
        for run in runs:
            reference = references.get(run["seed"])
            learned = [row[task] for task, row in enumerate(reference["matrix"][1:])] if reference else None
            run["summary"] = metrics.summarize(run["matrix"], run["ece"], learned, run["metric"])
            if reference:
                own, its = (out / name / f"seed-{run['seed']}" for name in (run["strategy"], "fine-tune"))
                run["agreement"] = agreement(own, its, tasks, about["data"]["test_rows"])
        return about | {"runs": runs, "unfinished": unfinished, "failed": failed}

    @classmethod
    def report(cls, out: Path, results: Json, ended: bool) -> None:
        """Write the tables, and the page with figures."""
        comparison = merge([with_timings(RunResults.of(results, str(out)), out)])
        if results["runs"]:
            write_atomically(out / "report.md", render(comparison, "markdown", ended=ended))
        if ended:
            write_atomically(out / "report.html", render(comparison, "html"))


def _planned(name: str, tasks: tuple[str, ...], checked: CheckedRun, shots: int | None, seed: int) -> PlannedUnit:
    """Return the unit of a strategy and a seed, as far as it costs."""
    strategy, options, count = checked.classes[name], checked.options[name], len(tasks)
    phases: tuple[Phase, ...] = getattr(strategy, "phases", ("train",))
    # When it is learned; after each later task, if that may change it; before the first and until it is learned.
    changing = 0 if strategy.forget_free else (count - 1) / 2
    evaluations = 1 + changing + (1 + (count - 1) / 2 if checked.run.upper_triangle else 0)
    keeps = "ledger" if hasattr(options, "sparsity") else "models" if phases == ("fine_tune",) else "model"
    return PlannedUnit(
        f"{name}/seed-{seed}",
        tasks,
        options,
        phases,
        shots,
        seed,
        keeps,
        evaluations,
        sparsities=(options.sparsity,) if hasattr(options, "sparsity") else (),
        check=strategy.check,
    )


def models_of(directory: Path, store: Path) -> Json:
    """Return under `MODELS` size and SHA-256 of the fine-tuned models that a unit's fine-tuned.json names in the store."""
    try:
        keys = read_json(directory / "fine-tuned.json", RunError, "")
    except RunError:
        return {}
    files = [store / f"{key}.safetensors" for key in keys.values()]
    return {MODELS: {path.name: described_file(path) for path in files if path.is_file()}}


def _entry(unit: Unit, details: Json, tasks: Sequence[str]) -> Json:
    """Return an entry of ``runs`` in results.json."""
    return {
        **unit.key,
        "options": details["options"],
        **_scored(unit, tasks),
        "summary": {},
        "ledger": details["ledger"],
        "kept_bytes": details["kept_bytes"],
        **{name: [held.get(task) for task in tasks] for name, held in details.get("by_task", {}).items()},
        **details["extra"],
        "seconds": details["seconds"],
    }


def _floors(units: Sequence[Unit], tasks: Sequence[str]) -> Json:
    """Return the floors that units measured, also those that failed later: by name and seed, those of each task."""
    found: Json = {}
    for unit in units:
        for name, scores in read_floors(unit.directory).items():
            found.setdefault(name, {})[str(unit.key["seed"])] = [scores.get(task) for task in tasks]
    return found


def _scored(unit: Unit, tasks: Sequence[str]) -> Json:
    """Return ``metric``, ``matrix`` and ``ece`` of a unit, as far as it has come."""
    path = unit.directory / SCORES_FILE
    try:
        return run_of_scores(read_scores(path), tasks)
    except KeyError as error:
        raise ReportError(
            f"{path} lacks scores of a task, expected {', '.join(tasks)}. Go on with --resume."
        ) from error


def _rows_so_far(unit: Unit, tasks: Sequence[str]) -> list[list[float]]:
    """Return the matrix of a unit that did not end well."""
    try:
        matrix: list[list[float]] = _scored(unit, tasks)["matrix"]
    except ReportError:
        return []
    return matrix


def _shared(values: Iterable[Any]) -> Any:
    """Return the value that all have; ``None`` where they differ."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


__all__ = ["RunConfig", "run"]
