"""A finished run with another stream: without a task that is taken back, or with one that is met again.

The new directory begins as a run of that stream that was stopped where the two streams part, and goes on from there. What is
carried over is the same bit for bit; what comes after is trained as a run of that stream trains it. Where tasks stand alone, or
nothing comes after, neither data nor model are needed.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from safetensors import SafetensorError

from forgetfree import registry
from forgetfree.errors import RareLabelError, RunError, TaskError, UsageError, nearest
from forgetfree.files import link_or_copy, write_atomically, write_json
from forgetfree.jobs.config import keys_of
from forgetfree.jobs.run import RunJob
from forgetfree.jobs.run_config import RunConfig, fine_tunes, stream_of, without_others
from forgetfree.jobs.running.directory import as_json, merged_request, read_job_config
from forgetfree.jobs.running.engine import assemble, perform
from forgetfree.jobs.running.execution import USUAL, Execution
from forgetfree.jobs.running.unit import HISTORY, Json, Unit
from forgetfree.jobs.stream_learner import LearnedStream, Row, StreamLearner
from forgetfree.jobs.stream_prefix import StreamPrefix
from forgetfree.json_file import parse_json, sign
from forgetfree.kinds.kind import readout_for
from forgetfree.models.loading import CAUSAL_HEAD
from forgetfree.options import build
from forgetfree.output import check_begun, make_directory, refuse_content
from forgetfree.results.config_file import PLACES, load_run, located, of_each
from forgetfree.results.scores import Score
from forgetfree.serve.source import LEDGER
from forgetfree.tasks import TaskDefinition, chosen_version, next_version, usual_max_length, version_of
from forgetfree.tensor_file import metadata_of
from forgetfree.training.monitor import Monitor

if TYPE_CHECKING:
    from forgetfree.continual.evaluation import StreamAnswers
    from forgetfree.continual.regions import RegionStrategy
    from forgetfree.continual.strategy import ContinualStrategy
    from forgetfree.data.rows import TaskRows


@dataclass(frozen=True)
class Revised:
    """What became of a run.

    Attributes:
        task: the task that was taken back, or the version that was learned.
        carried: the units that were carried over without training.
        trained: the units with tasks that were trained.
        left_out: the units without a ledger, which the new directory lacks.
        shared: a directory of fine-tuned models that the run shares with others.
        results: the content of results.json.
    """

    task: str
    carried: Sequence[str]
    trained: Sequence[str]
    left_out: Sequence[str]
    shared: str | None
    results: Json


def remove(
    run: Path,
    task: str,
    out: Path,
    *,
    data: str | None = None,
    model: str | None = None,
    execution: Execution = USUAL,
) -> Revised:
    """Write a run directory as it would be, had one task of the stream never been learned.

    Args:
        run: what ``forgetfree run`` wrote; it does not change.
        task: the task to take back, with all its versions; or one version of it alone, such as ``sst2@2``.
        out: the new directory.
        data: where the other tasks' rows are, if tasks are trained again and the rows lie elsewhere now.
        model: the base model, likewise.
        execution: how what comes after is trained.

    Raises:
        TaskError: the run did not learn the task, or learned nothing else.
        RunError: the run is not finished, or its files are damaged; it keeps no ledger; or what came after the task cannot
            be trained again as it was, because data, model, versions or the machine are others.
        UsageError: ``out`` is not empty; or with ``resume``, it was begun otherwise.
    """
    finished_run = _Run(run)
    if task not in finished_run.tasks and (exact := chosen_version(task, finished_run.tasks)) in finished_run.tasks:
        taken = {exact}  # task@1
    else:
        finished_run.check_learned(task)
        taken = {name for name in finished_run.tasks if task in (name, version_of(name)[0])}
    if not (tasks := [name for name in finished_run.tasks if name not in taken]):
        raise TaskError(f"{run} learned nothing but {task!r}. Delete the directory.")
    return _revised(finished_run, "remove", task, tasks, out, finished_run.located(data, model), None, execution)


def update(
    run: Path,
    task: str,
    out: Path,
    *,
    data: str | None = None,
    model: str | None = None,
    or_fewer: bool = False,
    skip_bad_rows: bool = False,
    execution: Execution = USUAL,
) -> Revised:
    """Write a run directory in which a task was met again after all others, and has a further version.

    Args:
        run: what ``forgetfree run`` wrote; it does not change.
        task: the task.
        out: the new directory.
        data: where the rows for the new version are; default: where those of the run are.
        model: the base model, if it lies elsewhere now.
        or_fewer: take all rows of a label that has fewer than the run's shots.
        skip_bad_rows: leave out rows that cannot be used, as a run does; default: as the run did.
        execution: how what comes after is trained.

    Raises:
        TaskError: the run did not learn the task.
        RunError, UsageError: as `remove`.
    """
    finished_run = _Run(run)
    version = next_version(task, finished_run.tasks)
    if version_of(version)[1] == 1 or task != version:  # which may be named itself
        finished_run.check_learned(chosen_version(task, finished_run.tasks))
    places, section = finished_run.located(None, model), finished_run.config["run"]
    if or_fewer and section["shots"] is not None:  # else all rows are taken
        places["set"] = section["set"] | {"or_fewer": "true"}
    if skip_bad_rows:
        places["skip_bad_rows"] = True
    try:
        return _revised(finished_run, "update", version, [*finished_run.tasks, version], out, places, data, execution)
    except RareLabelError as error:  # the run has the shots
        raise UsageError(
            f"{error.fault} Give more rows of it by --data, or take all rows of such labels with --or-fewer."
        ) from error


class _Run:
    """A finished run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = read_job_config(directory) | load_run(directory)
        self.tasks = [str(each["name"]) for each in self.config["tasks"]]
        if objects := self.config.get("objects"):
            raise RunError(
                f"{directory} was begun from Python with {', '.join(map(str, objects))}, which no file can name. Run the other "
                "stream by the same call."
            )
        units = {folder: Unit(key, directory / folder) for folder, key in self.config["units"].items()}
        kept = {unit.key["strategy"] for unit in units.values() if (unit.directory / LEDGER).is_file()}
        self.units = {folder: unit for folder, unit in units.items() if unit.key["strategy"] in kept}
        self.left_out = [str(unit) for folder, unit in units.items() if folder not in self.units]
        if not self.units:
            raise RunError(f"{directory} keeps no ledger. Run the other stream.")
        for unit in self.units.values():
            if not unit.is_done():
                raise RunError(
                    f"{unit.directory} is not finished, or its files are not as they were then. Go on with --resume first."
                )

    def check_learned(self, task: str) -> None:
        """Raise ``TaskError`` unless the run learned ``task``."""
        if task not in self.tasks:
            raise TaskError(
                f"{self.directory} did not learn a task {task!r}.{nearest(task, self.tasks)} It learned: "
                f"{', '.join(self.tasks)}. Give one of them by --task."
            )

    def located(self, data: str | None, model: str | None) -> Json:
        """Return where data and model lie."""
        section = self.config["run"]
        places = {key: of_each(located, section[key], self.directory) for key in PLACES if section.get(key)}
        return places | {key: value for key, value in (("data", data), ("model", model)) if value}

    def config_of(self, tasks: Sequence[str], out: Path, places: Json) -> RunConfig:
        """Return the configuration of a run of some tasks by the strategies with a ledger."""
        section = self.config["run"] | places
        definitions = {each["name"]: TaskDefinition.of_fields(each) for each in self.config["tasks"]}
        left = [definitions[version_of(name)[0]] for name in tasks if name in definitions]
        was = readout_for(section["readout"], definitions.values())
        fallen = (
            was == "auto" and self.config["model"]["readout"] == "linear" and _has_label_words(self.config["model"])
        )
        if fallen or readout_for(section["readout"], left) != was:
            section["readout"] = "linear"  # the other tasks alone may be read out otherwise
        if usual_max_length(left) != usual_max_length(definitions.values()):  # or read at another length
            section["set"] = {"max_length": self.config["model"]["max_length"]} | section["set"]
        names = {unit.key["strategy"] for unit in self.units.values()}
        strategies = [each for each in section["strategy"] if registry.strategy_name(each) in names]
        section = without_others(section, strategies)
        used = any(fine_tunes(registry.strategy(each)) for each in strategies)
        values = {
            "stream": stream_of(tasks),
            "strategies": strategies,
            "seeds": section["seed"],
            "settings": section["set"],
            "text_columns": section.get("text_column", []),
            "label_columns": section.get("label_column", []),
            "kinds": [each for each in section.get("kind", []) if each.rpartition("=")[0] in ("", *tasks)],
            "skip_bad_rows": section.get("skip_bad_rows"),
            "metrics": [each for each in section.get("metric", []) if each.rpartition("=")[0] in ("", *tasks)],
            "starts": {task: place for task, place in section.get("start", {}).items() if task in tasks and used},
            "out": str(out),
            "held_aside": section.get("held_aside"),
            **{key: section.get(key) for key in ("model", "data", "readout", "device", "shots", "steps", "sparsity")},
        }
        return build(RunConfig, {key: value for key, value in values.items() if value is not None}, "run")


def _has_label_words(model: Json) -> bool:
    """Return whether a model that config.json describes has a language model's head, which may read label words."""
    architectures = " ".join(model.get("config", {}).get("architectures") or ())
    return bool(re.search(rf"{CAUSAL_HEAD}|ForMaskedLM|ForPreTraining", architectures))


def _revised(
    run: _Run,
    action: str,
    task: str,
    tasks: Sequence[str],
    out: Path,
    places: Json,
    rows: str | None,
    execution: Execution,
) -> Revised:
    """Write the directory of a run of ``tasks``; ``rows`` is where those of a new version are."""
    job = _RevisedRun(run.config_of(tasks, out, places), run, action, task, tasks, rows)
    if execution.resume:
        check_begun(out)
    else:
        make_directory(out)
        refuse_content(out, f"Give a new directory, or --resume to go on with a cut {action}.")
    prefixes = [job.revised.prefix(unit.key) for unit in run.units.values()]
    begun = os.path.lexists(out / "config.json")
    if not begun and not all(each.is_complete for each in prefixes):
        job.learner.stream(job.config.seeds[0])  # before anything is written
    config = _without(run.config, [name for name in run.tasks if name not in tasks], job.config.starts) | {
        "run": as_json(job.request()),
        "command": " ".join(["forgetfree", *sys.argv[1:]]),
        "units": {folder: dict(unit.key) for folder, unit in run.units.items()},
        "options": {name: run.config["options"][name] for name in job.config.strategy_names},
    }
    if begun:
        _check_same(out, config)
    else:
        make_directory(out)
        write_json(out / "config.json", sign(config))
    shared = job.common.cache
    if shared is None and job.common.scenario != "class":  # where readouts know all labels
        _take_models(run.directory / "fine-tuned", out / "fine-tuned", set(tasks))
    for each in prefixes:
        if each.is_complete and not each.unit_in(out).is_done():
            each.write(out, config["command"], action, task)
    done = [str(each.unit) for each in prefixes if each.is_complete]
    trained = [str(each.unit) for each in prefixes if not each.is_complete]
    try:
        again = replace(execution, resume=True)
        results = perform(job, again) if trained else assemble(RunJob, out, ended=True)
    except (RunError, UsageError):  # data, model or versions are not those of the run
        if not begun and not any(each.unit_in(out).is_begun for each in prefixes if not each.is_complete):
            shutil.rmtree(out)
        raise
    return Revised(task, done, trained, run.left_out, shared, results)


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
        task: the one that is taken back or met again.
        rows: where the rows of a new version are; ``None``: where those of the run are.
    """

    def __init__(self, job: RunJob, run: _Run, tasks: Sequence[str], task: str, rows: str | None) -> None:
        super().__init__(job.config, job.checked, job.in_memory, job.cache)
        self._of, self._stream_tasks, self._task, self._rows = run, tasks, task, rows
        self._prefixes: dict[str, StreamPrefix] = {}
        self._reused: set[str] = set()

    def read(self) -> list[TaskRows]:
        """Read the tasks; those of a new version may lie elsewhere."""
        from forgetfree.data.sources import check_versions, load_tasks

        data, place = self.config.data, self.checked.run.evaluate_on
        if self._rows is None:
            return load_tasks(self.config.stream, data, place, self.config.read_options)
        old = load_tasks(list(self._of.tasks), data, place, self.config.read_options)
        (new,) = load_tasks([self._task], self._rows, place, self.config.read_options)
        check_versions([rows.task for rows in (*old, new)])
        return [*old, new]

    def prefix(self, key: Mapping[str, Any]) -> StreamPrefix:
        """Return what is carried over from a unit."""
        from forgetfree.continual.regions import RegionStrategy

        name, folder = key["strategy"], f"{key['strategy']}/seed-{key['seed']}"
        if folder not in self._prefixes:
            ours = name in registry.STRATEGIES and issubclass(self.checked.classes[name], RegionStrategy)
            on_ledger = ours and self.checked.run.scenario == "task"
            unit = self._of.units[folder]
            self._prefixes[folder] = StreamPrefix(unit, self._of.tasks, self._stream_tasks, on_ledger=on_ledger)
        return self._prefixes[folder]

    def prepare(self, name: str, strategy: ContinualStrategy) -> None:
        """Hand over what was found for later tasks and depends on no other task."""
        prefix = self.prefix({"strategy": name, "seed": strategy.seed})
        self._reused = cast("RegionStrategy", strategy).reuse(prefix.full_ledger) if prefix.on_ledger else set()

    def texts_before(self, key: Mapping[str, Any], learned: LearnedStream) -> dict[str, Sequence[str]]:
        """Return what was answered before training; of the tasks that the other run had, by that run."""
        return self.prefix(key).texts_before | super().texts_before(key, learned)

    def begin(self, name: str, learned: LearnedStream, answers: StreamAnswers, directory: Path | None) -> int:
        """Put in place what is carried over, measure it, and return of how many tasks that is."""
        strategy = learned.strategy
        prefix = self.prefix({"strategy": name, "seed": strategy.seed})
        if directory is not None and not (directory / HISTORY).stat().st_size:
            write_atomically(directory / HISTORY, prefix.history(self._reused))
        if not prefix.tasks or directory is None:
            return super().begin(name, learned, answers, directory)
        strategy.notes.update(prefix.scales)
        tasks = strategy.stream.tasks[: len(prefix.tasks)]
        rows: list[Row] = [{} for _ in tasks]
        new = [task for task in strategy.stream.tasks if task.name not in self._of.tasks]
        if new and self.answers_unlearned(strategy):  # what the others left was not asked about it yet
            for count in range(len(tasks)):
                self._stand(strategy, prefix, count, directory)
                rows[count] = strategy.evaluate(new)
        self._stand(strategy, prefix, len(tasks), directory)
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
        learned.rows, learned.kept_bytes, learned.seconds = rows, prefix.kept_bytes, prefix.seconds
        return len(tasks)

    @staticmethod
    def _stand(strategy: ContinualStrategy, prefix: StreamPrefix, count: int, directory: Path) -> None:
        """Put the strategy where it stood after some of the tasks."""
        prefix.ledger.of_tasks(prefix.tasks[:count]).save(directory / LEDGER)
        strategy.load(directory)


class _RevisedRun(RunJob):
    """The run of another stream, whose units begin with what is carried over."""

    def __init__(
        self, config: RunConfig, run: _Run, action: str, task: str, tasks: Sequence[str], rows: str | None
    ) -> None:
        super().__init__(config)
        self.learner = self.revised = _RevisedLearner(self, run, tasks, task, rows)
        self._action, self._task = action, task

    def scored(self, key: Mapping[str, Any]) -> list[Score]:
        """Return the scores from before the last task that is carried over."""
        prefix = self.revised.prefix(key)
        return [score for score in prefix.scores if score.after < len(prefix.tasks)]

    def measure(self, key: Mapping[str, Any], directory: Path, monitor: Monitor) -> Json:
        """Learn what comes after, and note it."""
        details, prefix = super().measure(key, directory, monitor), self.revised.prefix(key)
        details["by_task"]["updates"] |= prefix.updates
        prefix.note(directory, self._action, self._task)
        return details


def _without(config: Json, tasks: Sequence[str], begun: Collection[str]) -> Json:
    """Return the config.json of a run without some of its tasks, of which ``begun`` have a start; the stream tells the task."""

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
    whole = config | {"about": about, "tasks": definitions, "data": rest(config["data"])}
    for place in (whole, about):
        if starts := {task: digest for task, digest in place.pop("starts", {}).items() if task in begun}:
            place["starts"] = starts
    return whole


def _take_models(store: Path, new: Path, tasks: set[str]) -> None:
    """Take over the fine-tuned models of some tasks: by links where the disk has them, else as copies."""
    for path in sorted(store.glob("*.safetensors")):
        try:
            own_tasks = set(parse_json(metadata_of(path)["tasks"]))
        except (OSError, SafetensorError, LookupError, TypeError, ValueError):  # a damaged one is made again
            continue
        if own_tasks <= tasks:
            make_directory(new)
            for each in (path, path.with_suffix(".json")):  # the model, and how long it took
                if each.is_file():
                    link_or_copy(each, new / each.name)  # also where a command was cut short: a copy may lack its end
