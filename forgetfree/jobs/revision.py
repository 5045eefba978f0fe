"""A run on top of a finished one: with further tasks, or without one of its tasks.

The new directory begins as a run of the other stream that was stopped where the two streams part, and goes on from there. What
is carried over is the same bit for bit; what comes after is trained as a run of that stream trains it, so the outcome is that
of a run that had the other stream from the start.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from forgetfree import registry
from forgetfree.data.columns import names_for
from forgetfree.errors import ModelError, RunError, TaskError, UsageError, nearest
from forgetfree.files import link_or_copy, write_atomically, write_json
from forgetfree.jobs.config import keys_of
from forgetfree.jobs.run import RunJob
from forgetfree.jobs.run_config import RunConfig, stream_of, without_others
from forgetfree.jobs.running.directory import as_json, merged_request, read_job_config
from forgetfree.jobs.running.engine import assemble, perform
from forgetfree.jobs.running.execution import USUAL, Execution
from forgetfree.jobs.running.unit import Json, Unit
from forgetfree.jobs.stream_learner import LearnedStream, Row, StreamLearner
from forgetfree.jobs.stream_prefix import Form, StreamPrefix
from forgetfree.json_file import sign
from forgetfree.kinds.kind import readout_for
from forgetfree.models.architecture import CAUSAL_HEAD
from forgetfree.models.loading import usual_max_length
from forgetfree.models.state import ModelState
from forgetfree.options import build
from forgetfree.output import check_begun, make_directory, refuse_content
from forgetfree.results.config_file import PLACES, load_run, located, of_each
from forgetfree.results.scores import Score
from forgetfree.results.unit_folder import HISTORY
from forgetfree.tasks import TaskDefinition
from forgetfree.training.monitor import Monitor

if TYPE_CHECKING:
    from forgetfree.continual.evaluation import StreamAnswers
    from forgetfree.continual.regions import RegionStrategy
    from forgetfree.continual.strategy import ContinualStrategy


def extension(
    run: Path,
    tasks: Sequence[str],
    out: Path,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> RevisedRun:
    """Return the run of further tasks on top of a finished one.

    Args:
        run: what ``forgetfree run`` wrote; it does not change.
        tasks: what is learned after its tasks.
        out: the new directory.
        options: in the place of those of the run, by their names in a file: ``data``, where the further tasks are;
            ``model``, if it lies elsewhere now; ``strategy`` and ``seed``; and what says how rows are read.

    Raises:
        TaskError: the run has learned one of the tasks.
        RunError: the run is not finished, or its files are damaged.
    """
    finished = _Run(run)
    if known := [task for task in tasks if task in finished.tasks]:
        raise TaskError(
            f"{run} has learned {known[0]!r}. New rows of it are a task of another name: call the file or folder "
            f"{known[0]}-2, say."
        )
    return RevisedRun(finished, [*finished.tasks, *tasks], out, finished.options(options))


def removal(run: Path, task: str, out: Path, options: Mapping[str, Any] = MappingProxyType({})) -> RevisedRun:
    """Return a run as it would be, had one of its tasks never been learned.

    Where tasks stand alone, or nothing comes after, neither data nor model are needed.

    Args:
        run: what ``forgetfree run`` wrote; it does not change.
        task: the task.
        out: the new directory.
        options: as of `extension`; ``data`` is where the other tasks are, if they lie elsewhere now.

    Raises:
        TaskError: the run did not learn the task, or learned nothing else.
        RunError: as `extension`.
    """
    finished = _Run(run)
    if task not in finished.tasks:
        raise TaskError(
            f"{run} did not learn a task {task!r}.{nearest(task, finished.tasks)} It learned: {', '.join(finished.tasks)}."
        )
    if not (tasks := [name for name in finished.tasks if name != task]):
        raise TaskError(f"{run} learned nothing but {task!r}. Delete the directory.")
    return RevisedRun(finished, tasks, out, finished.options(options))


#: Options that say how the rows of tasks are read: those of further tasks are given beside those of the run.
_OF_ROWS = ("text_column", "label_column", "kind", "metric")


class _Run:
    """A finished run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = load_run(directory) | read_job_config(directory)
        self.tasks = [str(each["name"]) for each in self.config["tasks"]]
        if objects := self.config.get("objects"):
            raise RunError(
                f"{directory} was begun from Python with {', '.join(map(str, objects))}, which no file can name. Run the other "
                "stream by the same call."
            )
        self.units = {folder: Unit(key, directory / folder) for folder, key in self.config["units"].items()}
        for unit in self.units.values():
            if not unit.is_done():
                raise RunError(
                    f"{unit.directory} is not finished, or its files are not as they were then. Go on with --resume first."
                )

    def options(self, options: Mapping[str, Any]) -> Json:
        """Return options in the place of those of the run, and where its data and model lie from here."""
        section = self.config["run"]
        places: Json = {key: of_each(located, section[key], self.directory) for key in PLACES if section.get(key)}
        # Where both have a task, the new rows are meant.
        data = [*_listed(options.get("data")), *_listed(places["data"])]
        rows = {key: [*section.get(key, ()), *options[key]] for key in _OF_ROWS if options.get(key)}
        return {**places, **options, **rows, "data": data if len(data) > 1 else data[0]}

    def config_of(self, tasks: Sequence[str], out: Path, places: Json) -> RunConfig:
        """Return the configuration of a run of some tasks with other options."""
        section = self.config["run"] | places
        definitions = {each["name"]: TaskDefinition.of_fields(each) for each in self.config["tasks"]}
        left = [definitions[name] for name in tasks if name in definitions]
        was = readout_for(section["readout"], definitions.values())
        fallen = (
            was == "auto" and self.config["model"]["readout"] == "linear" and _has_label_words(self.config["model"])
        )
        if fallen or readout_for(section["readout"], left) != was:
            section["readout"] = "linear"  # the other tasks alone may be read out otherwise
        if usual_max_length(left) != usual_max_length(definitions.values()):  # or read at another length
            section["set"] = {"max_length": self.config["model"]["max_length"]} | section["set"]
        strategies = section["strategy"]
        section = without_others(section, strategies)
        values = {
            "stream": stream_of(tasks),
            "strategies": strategies,
            "seeds": section["seed"],
            "settings": section["set"],
            "text_columns": names_for(section.get("text_column", []), tasks),
            "label_columns": names_for(section.get("label_column", []), tasks),
            "kinds": names_for(section.get("kind", []), tasks),
            "skip_bad_rows": section.get("skip_bad_rows"),
            "metrics": names_for(section.get("metric", []), tasks),
            "out": str(out),
            "held_aside": section.get("held_aside"),
            **{key: section.get(key) for key in ("model", "data", "readout", "device", "shots", "steps", "sparsity")},
        }
        return build(RunConfig, {key: value for key, value in values.items() if value is not None}, "run")


def _listed(data: Any) -> list[str]:
    """Return the places that ``--data`` names; none where it is not given."""
    return [data] if isinstance(data, str) else list(data or ())


def _has_label_words(model: Json) -> bool:
    """Return whether a model that config.json describes has a language model's head, which may read label words."""
    architectures = " ".join(model.get("config", {}).get("architectures") or ())
    return bool(re.search(rf"{CAUSAL_HEAD}|ForMaskedLM|ForPreTraining", architectures))


def _check_same(out: Path, config: Json) -> None:
    """Raise ``UsageError`` unless a directory was begun with this configuration, from a run of the same rows and model."""
    before = read_job_config(out)
    merged_request(out, before.get("run", {}), config["run"], (), keys_of(RunConfig))
    rows_before = {task: before["data"].get(task) for task in config["data"]}
    if rows_before != config["data"] or before["model"]["fingerprint"] != config["model"]["fingerprint"]:
        raise UsageError(f"{out} was begun from another run. Give that run, or another directory.")


class _RevisedLearner(StreamLearner):
    """Learns another stream, whose units begin with what is carried over.

    Args:
        job: the run of that stream.
        run: the run that is carried over.
        tasks: those of the stream.
    """

    def __init__(self, job: RunJob, run: _Run, tasks: Sequence[str]) -> None:
        super().__init__(job.config, job.checked, job.in_memory, job.cache)
        self._of, self._stream_tasks = run, tasks
        self._prefixes: dict[str, StreamPrefix | None] = {}
        self._reused: set[str] = set()

    def prefix(self, key: Mapping[str, Any]) -> StreamPrefix | None:
        """Return what is carried over from a unit; ``None`` where the run does not have it."""
        folder = f"{key['strategy']}/seed-{key['seed']}"
        if folder not in self._prefixes:
            unit = self._of.units.get(folder)
            carried = unit and StreamPrefix(unit, self._of.tasks, self._stream_tasks, self._form(key))
            self._prefixes[folder] = carried or None
        return self._prefixes[folder]

    def _form(self, key: Mapping[str, Any]) -> Form | None:
        """Return what a unit's folder has of each task: what only the built-in strategies promise."""
        from forgetfree.continual.regions import RegionStrategy

        strategy = self.checked.classes[key["strategy"]]
        if key["strategy"] not in registry.STRATEGIES or self.checked.run.scenario != "task":
            return None
        if issubclass(strategy, RegionStrategy):
            return "ledger"
        # What it would have answered to a further task while it learned the others is not kept.
        grows = self._stream_tasks[: len(self._of.tasks)] == self._of.tasks
        return (
            "state"
            if grows and strategy.resumable and not self.answers_unlearned(self.stream(key["seed"]).model)
            else None
        )

    def prepare(self, name: str, strategy: ContinualStrategy) -> None:
        """Hand over what was found for later tasks and depends on no other task."""
        prefix = self.prefix({"strategy": name, "seed": strategy.seed})
        found = prefix and prefix.full_ledger
        self._reused = cast("RegionStrategy", strategy).reuse(found) if found else set()

    def texts_before(self, key: Mapping[str, Any], learned: LearnedStream) -> dict[str, Sequence[str]]:
        """Return what was answered before training; of the tasks that the other run had, by that run."""
        prefix = self.prefix(key)
        return (prefix.texts_before if prefix else {}) | super().texts_before(key, learned)

    def begin(self, name: str, learned: LearnedStream, answers: StreamAnswers, directory: Path | None) -> int:
        """Put in place what is carried over, measure it, and return of how many tasks that is."""
        strategy = learned.strategy
        prefix = self.prefix({"strategy": name, "seed": strategy.seed})
        if prefix and directory is not None and not (directory / HISTORY).stat().st_size:
            write_atomically(directory / HISTORY, prefix.history(self._reused))
        if not prefix or not prefix.tasks or directory is None:
            return super().begin(name, learned, answers, directory)
        tasks = strategy.stream.tasks[: len(prefix.tasks)]
        rows: list[Row] = [{} for _ in tasks]
        new = [task for task in strategy.stream.tasks if task.name not in self._of.tasks]
        if new and self.answers_unlearned(strategy.model):  # what the others left was not asked about it yet
            for count in range(len(tasks)):
                prefix.put(strategy, count, directory)
                rows[count] = strategy.evaluate(new)
        prefix.put(strategy, len(tasks), directory)
        rows.append(answers.begun(tasks))
        for task in tasks:
            now = rows[-1][task.name].tensors()
            if not all(
                np.array_equal(array, prefix.predictions[f"{task.name}/{name}"].numpy()) for name, array in now.items()
            ):
                raise RunError(
                    f"This machine does not answer {task.name} bit for bit as {prefix.unit.directory} did, so later "
                    "tasks would not be trained as they were. Use as many threads, the same machine and the same versions."
                )
        learned.kept_bytes = prefix.kept_bytes(strategy.bytes_kept())
        learned.rows, learned.seconds = rows, prefix.seconds
        return len(tasks)


class RevisedRun(RunJob):
    """The run of another stream, whose units begin with what is carried over.

    Args:
        run: the run that is carried over.
        tasks: those of the other stream.
        out: the new directory.
        options: in the place of those of the run.
    """

    def __init__(self, run: _Run, tasks: Sequence[str], out: Path, options: Json) -> None:
        super().__init__(run.config_of(tasks, out, options))
        self._of, self._tasks, self._options = run, tasks, options
        self.learner = self.revised = _RevisedLearner(self, run, tasks)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._of, self._tasks, self.out, self._options)

    def write(self, execution: Execution = USUAL) -> Json:
        """Write the directory, and return the content of results.json.

        Args:
            execution: how what comes after is trained.

        Raises:
            UsageError: the directory is not empty; or with ``resume``, it was begun otherwise.
            RunError: data, model, versions or the machine are not those of the run.
        """
        run, out = self._of, self.out
        if execution.resume:
            check_begun(out)
        else:
            make_directory(out)
            refuse_content(out, "Give a new directory, or --resume to go on with what was cut short.")
        units = self.keys()
        prefixes = [prefix for key in units.values() if (prefix := self.revised.prefix(key))]
        begun = os.path.lexists(out / "config.json")
        trains = len(prefixes) < len(units) or not all(each.is_complete for each in prefixes)
        if not begun and trains:
            self.learner.stream(self.config.seeds[0])  # before anything is written
        known = run.config["options"]
        config = _without(run.config, [name for name in run.tasks if name not in self._tasks]) | {
            "run": as_json(self.request()),
            "command": " ".join(["forgetfree", *sys.argv[1:]]),
            "units": {folder: key for folder, key in units.items() if folder in run.units},
            "options": {name: known[name] for name in self.config.strategy_names if name in known},
        }
        if begun:
            _check_same(out, config)
        else:
            make_directory(out)
            write_json(out / "config.json", sign(config))
        if self.common.cache is None and self.common.scenario != "class":  # where readouts know all labels
            _take_models(run.directory / "fine-tuned", out / "fine-tuned", set(self._tasks))
        for each in prefixes:
            if each.is_complete and not each.unit_in(out).is_done():
                each.write(out, config["command"])
        try:
            return perform(self, replace(execution, resume=True)) if trains else assemble(out, ended=True)
        except (RunError, UsageError):  # data, model or versions are not those of the run
            if not begun and not any(each.unit_in(out).is_begun for each in prefixes if not each.is_complete):
                shutil.rmtree(out)
            raise

    def scored(self, key: Mapping[str, Any]) -> list[Score]:
        """Return the scores from before the last task that is carried over."""
        prefix = self.revised.prefix(key)
        return [score for score in prefix.scores if score.after < len(prefix.tasks)] if prefix else []

    def measure(self, key: Mapping[str, Any], directory: Path, monitor: Monitor) -> Json:
        """Learn what comes after, beside what is carried over."""
        details, prefix = super().measure(key, directory, monitor), self.revised.prefix(key)
        details["by_task"]["updates"] |= prefix.updates if prefix else {}
        return details


def _without(config: Json, tasks: Sequence[str]) -> Json:
    """Return the config.json of a run without some of its tasks; the stream tells the task."""

    def rest(named: Mapping[str, Any]) -> Json:
        return {name: value for name, value in named.items() if name not in tasks}

    about = config["about"]
    kept = [name not in tasks for name in about["tasks"]]
    names = [name for name, keep in zip(about["tasks"], kept, strict=True) if keep]
    floors = {
        name: [value for value, keep in zip(values, kept, strict=True) if keep]
        for name, values in about["floors"].items()
    }
    by_task = {key: rest(about["data"].get(key, {})) for key in ("fingerprints", "test_rows", "left_out")}
    rows = {key: value for key, value in about["data"].items() if key != "left_out"}
    rows |= {key: value for key, value in by_task.items() if value or key != "left_out"}
    about |= {"stream": ",".join(names), "tasks": names, "floors": floors, "data": rows}
    about["shared_rows"] = rest(about["shared_rows"])
    definitions = [each for each in config["tasks"] if each["name"] not in tasks]
    return config | {"about": about, "tasks": definitions, "data": rest(config["data"])}


def _take_models(store: Path, new: Path, tasks: set[str]) -> None:
    """Take over the fine-tuned models of some tasks: by links where the disk has them, else as copies."""
    for path in sorted(store.glob("*.safetensors")):
        try:
            own_tasks = set(ModelState.load(path).readouts)
        except ModelError:  # a damaged one is made again
            continue
        if own_tasks <= tasks:
            make_directory(new)
            for each in (path, path.with_suffix(".json")):  # the model, and how long it took
                if each.is_file():
                    link_or_copy(each, new / each.name)  # also where a command was cut short: a copy may lack its end
