"""Taking a task back: the run that would have been, had the task never been learned.

The new directory begins as a run without the task that was stopped before the task's turn, and goes on from there. What the
task could not have changed is taken over; what came after it is trained again. Where tasks stand alone, or nothing came
after it, all is taken over, and neither data nor model are needed.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from safetensors import SafetensorError, safe_open

from forgetfree import registry
from forgetfree.errors import RunError, TaskError, nearest
from forgetfree.files import read_signed, signed_bytes, write_atomically, write_json
from forgetfree.jobs.audit import AUDIT, note
from forgetfree.jobs.engine import Execution, assemble
from forgetfree.jobs.environment import make_directory, refuse_held
from forgetfree.jobs.predictions import PREDICTIONS
from forgetfree.jobs.resuming import as_json, read_config
from forgetfree.jobs.run_config import RunConfig
from forgetfree.jobs.runner import Learned, RunJob, ledger_summary
from forgetfree.jobs.unit import HISTORY, Json, Unit, described_files
from forgetfree.json_file import parse_json, read_json
from forgetfree.learning.monitor import PHASES, Monitor
from forgetfree.ledger import Ledger
from forgetfree.options import build
from forgetfree.results.config_file import PLACES, load_run, located
from forgetfree.results.run_results import SECONDS_PER_TASK
from forgetfree.results.scores import SCORES_FILE, Score, read_scores, write_scores
from forgetfree.serve.kept import LEDGER
from forgetfree.tasks import TaskDefinition, readout_for

if TYPE_CHECKING:
    from forgetfree.continual.evaluation import StreamAnswers
    from forgetfree.continual.strategy import ContinualStrategy

_REMEDY = "Restore it from a copy, or run the stream without the task."


@dataclass(frozen=True)
class Removed:
    """What became of a run without one of its tasks.

    Attributes:
        at_once: the units that were taken over without training.
        again: the units with tasks that were trained again.
        left_out: the units without a ledger, which the new directory lacks.
        shared: a directory of fine-tuned models that the run shared with others, and which may still hold the task's.
        results: the content of results.json.
    """

    at_once: Sequence[str]
    again: Sequence[str]
    left_out: Sequence[str]
    shared: str | None
    results: Json


def remove(
    run: Path, task: str, out: Path, *, data: str | None = None, model: str | None = None, **how: Unpack[Execution]
) -> Removed:
    """Write a run directory as it would be, had one task of the stream never been learned.

    Args:
        run: what ``forgetfree run`` wrote; it does not change.
        task: the task to take back.
        out: the new directory.
        data: where the other tasks' rows are, if tasks are trained again and the rows lie elsewhere now.
        model: the base model, likewise.
        how: see `Execution`.

    Raises:
        TaskError: the run did not learn the task, or learned nothing else.
        RunError: the run is not finished, or its files are damaged; it keeps no ledger; or what came after the task cannot
            be trained again as it was, because data, model, versions or the machine are others.
        UsageError: ``out`` is not empty.
    """
    removal = _Removal(run, task, out, data, model)
    refuse_held(out, make_directory(out), "Give a new directory.")
    return removal.perform(**how)


class _Removal:
    """The steps of `remove`."""

    def __init__(self, run: Path, task: str, out: Path, data: str | None, model: str | None) -> None:
        self._run, self._task, self._out = run, task, out
        self._config = load_run(run) | {key: value for key, value in read_config(run, None).items() if key != "run"}
        self._tasks = [str(each["name"]) for each in self._config["tasks"]]
        self._check_task()
        if objects := self._config.get("objects"):
            raise RunError(
                f"{run} was begun from Python with {', '.join(map(str, objects))}, which no file can name. Run the stream "
                f"without {task!r} by the same call."
            )
        units = [Unit(key, run / folder) for folder, key in self._config["units"].items()]
        kept = {unit.key["strategy"] for unit in units if (unit.directory / LEDGER).is_file()}
        self._units = [unit for unit in units if unit.key["strategy"] in kept]
        self._left_out = [str(unit) for unit in units if unit not in self._units]
        if not self._units:
            raise RunError(f"{run} keeps no ledger. Run the stream without {task!r}.")
        for unit in self._units:
            if not unit.is_done():
                raise RunError(
                    f"{unit.directory} is not finished, or its files are not as they were then. Go on with --resume "
                    "first."
                )
        section = {key: value for key, value in self._config["run"].items() if key not in PLACES}
        places = {key: located(self._config["run"][key], run) for key in PLACES if self._config["run"].get(key)}
        given = {key: value for key, value in (("data", data), ("model", model)) if value}
        self._settings = self._section(section | places | given)

    def _check_task(self) -> None:
        if self._task not in self._tasks:
            raise TaskError(
                f"{self._run} did not learn a task {self._task!r}.{nearest(self._task, self._tasks)} It learned: "
                f"{', '.join(self._tasks)}."
            )
        if len(self._tasks) == 1:
            raise TaskError(f"{self._run} learned nothing but {self._task!r}. Delete the directory.")

    def _section(self, section: Json) -> RunConfig:
        """Return the configuration of the run without the task."""
        definitions = [TaskDefinition.of_fields(fields) for fields in self._config["tasks"]]
        others = [each for each in definitions if each.name != self._task]
        asked, strategies = section["readout"], {unit.key["strategy"] for unit in self._units}
        if readout_for(asked, others) != (was := readout_for(asked, definitions)):
            section = section | {"readout": was}  # the other tasks alone would be read out otherwise
        values = {
            "stream": ",".join(each.name for each in others),
            "strategies": [name for name in section["strategy"] if name in strategies],
            "seeds": section["seed"],
            "settings": section["set"],
            "text_columns": section.get("text_column", []),
            "out": str(self._out),
            **{key: section.get(key) for key in ("model", "data", "readout", "device", "shots", "steps", "sparsity")},
            "label_column": section.get("label_column"),
        }
        return build(RunConfig, {key: value for key, value in values.items() if value is not None}, "run")

    def perform(self, **how: Unpack[Execution]) -> Removed:
        """Write the directory."""
        job = _Shortened(self._settings, self._task, self._run, self._tasks)
        units = {str(unit): unit for unit in self._units}
        at_once = [name for name, unit in units.items() if job.left(unit.key).is_complete]
        config = _without(self._config, self._task) | {
            "run": as_json(job.asked()),
            "command": " ".join(["forgetfree", *sys.argv[1:]]),
            "units": {
                folder: key for folder, key in self._config["units"].items() if str(Unit(key, self._run)) in units
            },
        }
        config["options"] = {name: config["options"][name] for name in job.config.strategies}
        write_json(self._out / "config.json", config)
        for name in at_once:
            job.left(units[name].key).write(units[name], self._out, config["command"])
        again = [name for name in units if name not in at_once]
        if (
            not self._settings.settings.get("cache") and job.common.scenario != "class"
        ):  # where readouts know all labels
            _take_models(self._run / "fine-tuned", self._out / "fine-tuned", set(self._tasks) - {self._task})
        results = job.perform(**how | {"resume": True}) if again else assemble(self._out, ended=True)
        shared = self._settings.settings.get("cache")
        return Removed(at_once, again, self._left_out, str(shared) if shared else None, results)


class _Shortened(RunJob):
    """The run without the task; each of its units begins with what the task could not have changed."""

    def __init__(self, config: RunConfig, task: str, run: Path, tasks: Sequence[str]) -> None:
        super().__init__(config)
        self._task, self._source, self._tasks = task, run, tasks
        self._left: dict[tuple[Any, ...], _Left] = {}

    def left(self, key: Mapping[str, Any]) -> _Left:
        """Return what is left of a unit."""
        name, seed = key["strategy"], key["seed"]
        if (name, seed) not in self._left:
            from forgetfree.continual.regions import RegionStrategy

            unit = Unit(key, self._source / name / f"seed-{seed}")
            ours = name in registry.STRATEGIES and issubclass(self.checked.classes[name], RegionStrategy)
            knows_task = self.common.scenario == "task"
            self._left[name, seed] = _Left(unit, self._task, self._tasks, on_ledger=ours and knows_task)
        return self._left[name, seed]

    def begun(self, name: str, strategy: ContinualStrategy, answers: StreamAnswers, directory: Path | None) -> Learned:
        """Put in place what was learned before the task, and return that."""
        left = self.left({"strategy": name, "seed": strategy.seed})
        if not left.begins or directory is None:
            return super().begun(name, strategy, answers, directory)
        left.ledger.save(directory / LEDGER)
        write_atomically(directory / HISTORY, left.history)
        strategy.load(directory)
        tasks = strategy.stream.tasks[: left.begins]
        row = answers.begun(tasks)
        for task in tasks:
            if not torch.equal(torch.from_numpy(row[task.name].logits), left.logits(task.name)):
                raise RunError(
                    f"This machine does not answer {task.name} bit for bit as {left.unit.directory} did, so the tasks after "
                    f"{self._task} would not be trained as they were. Use as many threads, the same machine and versions."
                )
        rows = [*({} for _ in tasks), row]
        return Learned(strategy, rows, answers.broken, left.kept_bytes[: left.begins], left.seconds[: left.begins])

    def scored(self, key: Mapping[str, Any]) -> list[Score]:
        """Return the scores from before the last task that was taken over."""
        left = self.left(key)
        return [score for score in left.scores if score.after < left.begins]

    def measure(self, key: Mapping[str, Any], directory: Path, monitor: Monitor) -> Json:
        """Learn what came after the task, and note it."""
        left = self.left(key)
        details = super().measure(key, directory, monitor)
        left.note(directory, trained_again=left.others[left.begins :])
        return details


class _Left:
    """What is left of a finished unit without one task.

    Args:
        unit: the unit.
        task: the task.
        tasks: all tasks, in order.
        on_ledger: whether the ledger is all that tasks leave to later ones, and each is answered by its own records.

    Attributes:
        others: the other tasks, in order.
        begins: how many of them the task could not have changed, counted from the first.
        is_complete: whether these are all.
    """

    def __init__(self, unit: Unit, task: str, tasks: Sequence[str], *, on_ledger: bool) -> None:
        self.unit, self._task = unit, task
        self.others = [each for each in tasks if each != task]
        self._record: Json = unit.record() or {}
        self._place = tasks.index(task)
        held = Ledger.load(unit.directory / LEDGER)
        alone = on_ledger and held.composition == "alone"
        self.begins = 0 if not on_ledger else len(self.others) if alone else self._place
        self.ledger = held.of_tasks(self.others[: self.begins])
        # What is said of the whole stream is not of the stream without the task.
        self.is_complete = self.begins == len(self.others) and not self._record["details"]["extra"]

    @property
    def scores(self) -> list[Score]:
        """The scores on the other tasks, in all rows but the one after the task."""
        scores, row = read_scores(self.unit.directory / SCORES_FILE), self._place + 1
        kept = [score for score in scores if score.task != self._task and score.after != row]
        return [replace(score, after=score.after - (score.after > row)) for score in kept]

    @property
    def history(self) -> str:
        """The logged steps on the tasks that are taken over."""
        lines = (self.unit.directory / HISTORY).read_text(encoding="utf-8").splitlines(keepends=True)
        held = set(self.others[: self.begins])
        return "".join(line for line in lines if parse_json(line)["task"] in held)

    @cached_property
    def predictions(self) -> dict[str, torch.Tensor]:
        """The last answers on the other tasks, as the file has them."""
        tensors = read_signed(self.unit.directory / PREDICTIONS, RunError, _REMEDY, unsigned=())[1]
        return {name: tensor for name, tensor in tensors.items() if name.rpartition("/")[0] != self._task}

    def logits(self, task: str) -> torch.Tensor:
        """Return the last answers on a task."""
        return self.predictions[f"{task}/logits"]

    @property
    def kept_bytes(self) -> list[int]:
        """What was kept after each of the tasks that are taken over."""
        names = self.others[: self.begins]
        return [self.ledger.of_tasks(names[: count + 1]).size_in_bytes for count in range(self.begins)]

    @property
    def seconds(self) -> list[float]:
        """How long each of the other tasks took."""
        seconds = read_json(self.unit.directory / SECONDS_PER_TASK, RunError, _REMEDY)
        return [each for place, each in enumerate(seconds) if place != self._place]

    def write(self, unit: Unit, out: Path, command: str) -> None:
        """Write the unit, which nothing of has to be trained again, into another run."""
        directory = out / unit.directory.relative_to(unit.directory.parents[1])
        make_directory(directory)
        self.ledger.save(directory / LEDGER)
        write_scores(directory / SCORES_FILE, self.scores)
        write_atomically(directory / HISTORY, self.history)
        write_atomically(directory / PREDICTIONS, signed_bytes(self.predictions, {}))
        write_json(directory / SECONDS_PER_TASK, self.seconds)
        self.note(directory, trained_again=[])
        details = self._record["details"] | {
            "ledger": ledger_summary(self.ledger),
            "kept_bytes": self.kept_bytes,
            "seconds": dict.fromkeys(PHASES, 0.0),
        }
        made = {key: self._record[key] for key in ("versions", "machine")} | {"command": command}
        Unit(unit.key, directory).end(made, details)

    def note(self, directory: Path, trained_again: Sequence[str]) -> None:
        """Write the audit record beside the new ledger, after the lines of the old one."""
        held = self.unit.directory / AUDIT
        if held.is_file():
            shutil.copyfile(held, directory / AUDIT)
        before, after = (described_files(each) for each in (self.unit.directory, directory))
        how = {"unit": dict(self.unit.key), "task": self._task, "trained_again": list(trained_again)}
        note(directory / LEDGER, "remove", before, after, **how)


def _without(config: Json, task: str) -> Json:
    """Return the config.json of a run without one of its tasks; of streams that tell the task."""
    about, place = config["about"], config["about"]["tasks"].index(task)

    def rest(named: Mapping[str, Any]) -> Json:
        return {name: value for name, value in named.items() if name != task}

    tasks = [name for name in about["tasks"] if name != task]
    floors = {name: [*values[:place], *values[place + 1 :]] for name, values in about["floors"].items()}
    rows = about["data"] | {key: rest(about["data"][key]) for key in ("fingerprints", "test_rows")}
    about |= {"stream": ",".join(tasks), "tasks": tasks, "floors": floors, "data": rows}
    about["shared_rows"] = rest(about["shared_rows"])
    definitions = [each for each in config["tasks"] if each["name"] != task]
    return config | {"about": about, "tasks": definitions, "data": rest(config["data"])}


def _take_models(store: Path, new: Path, tasks: set[str]) -> None:
    """Take over the fine-tuned models of some tasks: by links where the disk has them, else as copies."""
    for path in sorted(store.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                held = set(parse_json(file.metadata()["tasks"]))
        except (OSError, SafetensorError, LookupError, TypeError, ValueError):  # a damaged one is made again
            continue
        if held <= tasks:
            make_directory(new)
            try:
                os.link(path, new / path.name)
            except OSError:
                shutil.copyfile(path, new / path.name)
