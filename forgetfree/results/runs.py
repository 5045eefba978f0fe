"""Runs read from files: the frame of scores, and facts about each unit and the whole run.

A run is read from its directory, or from one table of scores in the form of scores.csv. The table may have a header of lines
``# {…}`` with JSON: first the facts about the run, then one line of facts per unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from forgetfree import registry
from forgetfree.display import brief
from forgetfree.errors import RunError, UsageError, first_line
from forgetfree.json_file import check, checked, parse_json
from forgetfree.results.answers import Answers, TextAnswers
from forgetfree.results.metrics import limits_of
from forgetfree.results.run_folder import (
    COLUMNS,
    CONFIG,
    HISTORY,
    PREDICTIONS,
    RECORD,
    SCORES_FILE,
    Score,
    check_described,
    check_own,
    is_header,
    load_run,
    read_record,
    read_scores,
)
from forgetfree.tasks import TaskDefinition

if TYPE_CHECKING:
    import numpy.typing as npt

Json = dict[str, Any]
#: The strategy that forward transfer and agreement are measured against.
REFERENCE = "fine-tune"
#: The name in tables of the best constant answer's score.
CONSTANT = "a constant answer"
#: Floors that are fitted to training rows: their names in files, and in tables.
LEARNED_FLOORS = {
    "bag_of_words": "a bag of words",
    "nearest_row": "the most similar training row",
    "linear_probe": "a linear probe",
    "mean_probe": "a linear probe at the mean",
}
#: The name in tables of the floor of an untrained language model.
UNTRAINED = "the model before training"
#: The prefix of metrics under the one final union.
UNION = "union_"
#: The columns that identify the unit of a score.
UNIT = ["strategy", "seed"]
_REMEDY = "Restore it from a copy, or continue with --resume, which writes it again."
_DIRECTORY = "Give the directory that `forgetfree run --out` wrote, or a CSV file of `forgetfree report --format csv`."
Amount = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


# ---- facts besides the scores ---------------------------------------------------------------------------


class _Facts(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True, extra="allow")


class HeldOut(_Facts):
    """Mean loss per token on held-out texts, in nats, see `forgetfree.jobs.learn`."""

    texts: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)]
    before: Amount
    after: Amount | None = None
    by_task: list[Amount] | None = None


class UnitFacts(_Facts):
    """Facts about a unit besides its scores; see docs/results-format.md."""

    strategy: str
    seed: int
    options: Json = Field(default_factory=dict)
    seconds: dict[str, Amount | None] = Field(default_factory=dict)
    seconds_per_task: list[Amount] | None = None
    kept_bytes: list[Count] = Field(default_factory=list)
    ledger: Json | None = None
    right_rows: dict[str, str] = Field(default_factory=dict)
    held_out: HeldOut | None = None
    broken_claims: list[str] = Field(default_factory=list)
    made: Json = Field(default_factory=dict)


class Floors(_Facts):
    """Scores without fine-tuning, by task; floors fitted to training rows also by seed."""

    constant: list[float]
    bag_of_words: dict[str, list[float | None]] = Field(default_factory=dict)
    nearest_row: dict[str, list[float | None]] = Field(default_factory=dict)
    linear_probe: dict[str, list[float | None]] = Field(default_factory=dict)
    mean_probe: dict[str, list[float | None]] = Field(default_factory=dict)


class About(_Facts):
    """Facts about a whole run: tasks in the order of learning, model, data, floors and options."""

    stream: str
    tasks: Annotated[list[str], Field(min_length=1)]
    metric: dict[str, str]
    scenario: str = "task"
    evaluated_on: str = "test"
    model: Json = Field(default_factory=dict)
    data: Json = Field(default_factory=dict)
    floors: Floors | None = None
    set: Json = Field(default_factory=dict)
    failed: list[Json] = Field(default_factory=list)
    unfinished: list[Json] = Field(default_factory=list)


# ---- a run ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Run:
    """A strategy with one seed, and the facts about it besides its scores.

    Attributes:
        facts: the facts of its unit.
        source: the path that it was read from.
        answers: its last answers on every task, labels or texts, if they are kept.
        labels: for each task, the label names by their numbers in the answers; missing if words are labelled.
    """

    facts: UnitFacts
    source: str = ""
    answers: Mapping[str, Answers] = field(default_factory=dict)
    labels: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @property
    def strategy(self) -> str:
        """The name of the strategy."""
        return self.facts.strategy

    @property
    def seed(self) -> int:
        """The seed of the unit."""
        return self.facts.seed

    @property
    def probabilities(self) -> dict[str, Any]:
        """The answers with logits and labels: label answers, and texts of tasks with closed answers."""
        return {task: each for task, each in self.answers.items() if each.choices and each.ece is not None}

    @property
    def texts(self) -> dict[str, TextAnswers]:
        """The answers that are texts."""
        return {task: each for task, each in self.answers.items() if isinstance(each, TextAnswers)}


@dataclass(frozen=True, eq=False)
class RunRecord:
    """Everything read from one run.

    Attributes:
        about: facts about the whole run.
        scores: one measured number a row, see `forgetfree.results.run_folder`.
        runs: its units that ended without failure.
        source: the path that it was read from; empty for scores in memory.
    """

    about: About
    scores: pd.DataFrame
    runs: tuple[Run, ...]
    source: str = ""

    def scores_of(self, run: Run) -> pd.DataFrame:
        """Return the scores of one of the runs."""
        return self.scores[(self.scores["strategy"] == run.strategy) & (self.scores["seed"] == run.seed)]

    def outcome(self, run: Run) -> Json:
        """Return the facts and scores that are equal whenever the same command runs on the same machine."""
        facts = run.facts.model_dump(exclude={"seconds", "seconds_per_task", "made", "summary"})
        numbers = self.scores_of(run)[["task", "after", "metric", "value"]]
        return {**facts, "scores": frozenset(numbers.itertuples(index=False, name=None))}

    @property
    def test_rows(self) -> dict[str, int]:
        """The number of rows that each task is scored on, if known."""
        counts = {**self.about.data.get("test_rows", {})}
        if not counts and self.runs:
            scores = self.scores_of(self.runs[0])
            counts = {task: int(rows) for task, rows in zip(scores["task"], scores["rows"], strict=True) if rows}
        return counts


# ---- reading --------------------------------------------------------------------------------------------


def read_run(path: Path) -> RunRecord:
    """Read a run.

    Args:
        path: a run directory, a CSV file of it, or a scores.csv.

    Raises:
        RunError: it is missing or damaged; the message names file and place.
    """
    if path.is_dir():
        return RunReader(path).read()
    if not path.exists():
        raise RunError(f"{path} does not exist. {_DIRECTORY}")
    if path.name == SCORES_FILE:
        check_own(path)
    scores = read_scores(path, _DIRECTORY)
    try:
        with path.open(encoding="utf-8") as file:
            header = [parse_json(line.removeprefix("# ")) for line in takewhile(is_header, file)]
    except ValueError as error:
        raise RunError(f"{path}: {first_line(error)}. {_DIRECTORY}") from error
    if not header:
        return of_scores(scores, str(path))
    about, *units = header
    return whole_run(about, frame_of(scores), units, str(path))


def of_scores(scores: Sequence[Score], source: str = "") -> RunRecord:
    """Return a run made from scores alone; the metric of a task is the first registered one among its scores.

    Raises:
        RunError: there are none, or scores of a learned task are missing.
    """
    if not scores:
        raise RunError(f"{source} contains no scores. Give scores of runs.")
    tasks = list(dict.fromkeys(each.task for each in scores))
    places = {metric: place for place, metric in enumerate(registry.metrics())}
    known = sorted((each for each in scores if each.metric in places), key=lambda each: -places[each.metric])
    about = {"stream": ",".join(tasks), "tasks": tasks, "metric": {each.task: each.metric for each in known}}
    units = dict.fromkeys((each.strategy, each.seed) for each in scores)
    return whole_run(about, frame_of(scores), [{"strategy": name, "seed": seed} for name, seed in units], source)


def frame_of(scores: Sequence[Score]) -> pd.DataFrame:
    """Return scores as a frame, with a column for each field of a score."""
    return pd.DataFrame(scores, columns=COLUMNS)


def whole_run(
    about: Json,
    frame: pd.DataFrame,
    units: Sequence[Json],
    source: str,
    files: Sequence[Json] = (),
    remedy: str = "Restore it from a copy.",
) -> RunRecord:
    """Check the parts of a run and return it: `About`, the frame, and for each unit `UnitFacts` and the data from its files.

    Raises:
        RunError: a part is invalid, or the parts do not belong together.
    """
    place = f"{source}: " if source else ""
    try:
        known = checked(About, about)
        facts = [checked(UnitFacts, each) for each in units]
        _check_frame(frame, known)
    except (ValueError, UsageError) as error:
        raise RunError(f"{place}{first_line(error)}. {remedy}") from error
    stages = {key: {*its} for key, its in frame.groupby([*UNIT, "task", "metric"], sort=False)["after"]}
    runs = []
    for each, shown in zip(facts, files or [{}] * len(facts), strict=True):
        try:
            _check_unit(each, known, stages)
        except ValueError as error:
            raise RunError(f"{place}{each.strategy} with seed {each.seed}: {first_line(error)}. {remedy}") from error
        runs.append(Run(each, source, **shown))
    return RunRecord(known, frame, tuple(runs), source)


def _check_frame(frame: pd.DataFrame, about: About) -> None:
    """Raise ``ValueError`` for an impossible score: unknown task or stage, out of bounds, or a duplicate."""
    if lacking := [task for task in about.tasks if task not in about.metric]:
        raise ValueError(f"{lacking[0]} has no score by a registered metric")
    count = len(about.tasks)
    check("tasks", about.tasks, len({*about.tasks}) == count, "different names")
    foreign = frame[~frame["task"].isin(about.tasks) | ~frame["after"].between(0, count)]
    if len(foreign):
        raise ValueError(
            "a score names a task, or a number of tasks, that the stream does not have: "
            f"{brief(foreign.to_numpy().tolist()[0])}"
        )
    for (metric, task), those in frame.groupby(["metric", "task"], sort=False):
        own = about.metric[str(task)] if metric == f"{UNION}accuracy" else str(metric)
        low, high = limits_of(own)
        if not (np.isfinite(those["value"]) & those["value"].between(low, high)).all():
            raise ValueError(f"{metric} of {task} must be in [{low:g}, {high:g}], got {those['value'].tolist()[:5]}")
    twice = frame.duplicated([*UNIT, "task", "after", "metric"])
    if twice.any():
        raise ValueError(f"a score is given twice: {brief(frame[twice].to_numpy().tolist()[0])}")
    for name, of_seeds in about.floors or ():
        for scores in [of_seeds] if name == "constant" else of_seeds.values():
            check(f"floors.{name}", scores, len(scores) == count, f"{count} numbers")


def _check_unit(facts: UnitFacts, about: About, stages: Mapping[Any, set[int]]) -> None:
    """Raise ``ValueError`` if a score of a learned task is missing, or if a list does not have one number per task.

    ``stages`` maps strategy, seed, task and metric to the numbers of learned tasks with a score. ECE may be missing entirely.
    """
    count = len(about.tasks)
    for name, metric in (("scores", about.metric), ("ece", dict.fromkeys(about.tasks, "ece"))):
        for learned, task in enumerate(about.tasks, start=1):
            there = stages.get((facts.strategy, facts.seed, task, metric[task]), set())
            if (there or name == "scores") and not there.issuperset(range(learned, count + 1)):
                raise ValueError(f"{name} of {task} are missing after a task")
    for name in ("seconds_per_task", "kept_bytes"):
        values = getattr(facts, name)
        check(name, values, not values or len(values) == count, f"{count} numbers")


# ---- a directory ----------------------------------------------------------------------------------------


class RunReader:
    """Reads a run directory, repeatedly while the run goes on; reads the files of each ended unit once.

    Args:
        out: the directory.
        running: the run has not ended: answers are not read, and a unit with a damaged record counts as not ended.

    Raises:
        RunError: ``out`` is not a run directory, or its config.json is damaged or belongs to another run.
    """

    def __init__(self, out: Path, *, running: bool = False) -> None:
        if not (out / CONFIG).exists():
            raise RunError(f"{out} contains no results: it has no {CONFIG}. {_DIRECTORY}")
        self._out, self._running, self._config = out, running, load_run(out, _REMEDY)
        here = {path.parent.relative_to(out).as_posix() for path in out.glob(f"*/seed-*/{RECORD}")}
        if foreign := sorted(here - self._config["units"].keys()):
            raise RunError(
                f"{out / CONFIG} belongs to another run: it does not name {foreign[0]}, which is in the "
                f"directory. {_REMEDY}"
            )
        self._tasks = [TaskDefinition.of_fields(each) for each in self._config["tasks"]]
        self._ended = dict[str, _Ended]()

    def read(self) -> RunRecord:
        """Return the run as it is now.

        Raises:
            RunError: a file is missing or damaged; the message names the file and the place.
        """
        config, names = self._config, [task.name for task in self._tasks]
        about: Json = {**config["about"], "unfinished": [], "failed": []}
        about["metric"] = {task.name: task.metric for task in self._tasks}
        labels, floors = _labels(self._tasks, about.get("scenario", "task")), Json(about.get("floors", {}))
        done = list[_Ended]()
        for place, key in config["units"].items():
            folder = self._out / place
            if ended := self._ended.get(place) or self._unit(folder, key):
                self._ended[place] = ended
                for name, of_tasks in ended.floors.items():
                    floors.setdefault(name, {})[str(key["seed"])] = [of_tasks.get(task) for task in names]
            if ended and ended.error is None:
                done.append(ended)
            elif ended:
                about["failed"].append({**key, "after": ended.after, "error": ended.error})
            elif (folder / HISTORY).is_file():
                about["unfinished"].append({**key, "after": _last_row(folder)})
        files = [{} if self._running else {"labels": labels, "answers": each.answers} for each in done]
        scores = frame_of([score for each in done for score in each.scores])
        facts = [each.facts for each in done]
        return whole_run({**about, "floors": floors or None}, scores, facts, str(self._out), files, _REMEDY)

    def _unit(self, folder: Path, key: Json) -> _Ended | None:
        """Read a unit; ``None`` if it has not ended."""
        if not (folder / RECORD).exists():
            return None
        try:
            record = read_record(folder, _REMEDY)
        except RunError:
            if self._running:
                return None
            raise
        if record["unit"] != key:
            raise RunError(f"{folder / RECORD} belongs to another unit, {brief(record['unit'])}. {_REMEDY}")
        if record["status"] != "done":
            return _Ended(record["floors"], error=record["error"], after=_last_row(folder))
        check_described(folder / SCORES_FILE, record)
        scores, facts = _of_unit(record, self._tasks, self._config["about"]["data"].get("test_rows", {}))
        answers = {} if self._running else read_answers(folder, self._tasks)
        return _Ended(record["floors"], [*read_scores(folder / SCORES_FILE), *scores], facts, answers)


@dataclass(frozen=True, eq=False)
class _Ended:
    """A unit that has ended; a failed unit has an ``error`` and was last scored ``after`` this many tasks."""

    floors: Json
    scores: Sequence[Score] = ()
    facts: Json = field(default_factory=dict)
    answers: Mapping[str, Answers] = field(default_factory=dict)
    error: str | None = None
    after: int = 0


def _of_unit(record: Json, tasks: Sequence[TaskDefinition], rows: Mapping[str, int]) -> tuple[list[Score], Json]:
    """Return the per-task numbers in the record of a unit, as scores after the last task, and the facts of the unit."""
    details, unit, names = record["details"], record["unit"], [task.name for task in tasks]
    by_task, extra = dict(details.get("by_task", {})), dict(details.get("extra", {}))
    by_task |= {f"{UNION}{name}": dict(zip(names, its, strict=True)) for name, its in extra.pop("union", {}).items()}
    scores = [
        Score(unit["strategy"], unit["seed"], task, len(tasks), metric, value, rows.get(task, 0))
        for metric, of_tasks in by_task.items()
        for task, value in of_tasks.items()
        if value is not None
    ]
    said = ("options", "ledger", "kept_bytes", "held_out", "seconds", "seconds_per_task")
    known = {name: details[name] for name in said if name in details}
    made: Json = {name: record[name] for name in ("versions", "code", "command") if name in record}
    # The name of the system does not affect results.
    made["machine"] = {name: its for name, its in record.get("machine", {}).items() if name != "system"}
    return scores, {**unit, **known, **extra, "made": made}


def _last_row(folder: Path) -> int:
    """Return after how many tasks an unfinished or failed unit was last scored."""
    try:
        return max((score.after for score in read_scores(folder / SCORES_FILE)), default=0)
    except RunError:
        return 0


def _labels(tasks: Sequence[TaskDefinition], scenario: str) -> dict[str, dict[int, str]]:
    """Return the label names of each task with labels of rows, by their numbers in the answers."""
    named, first = dict[str, dict[int, str]](), 0
    for task in tasks:
        names = registry.kind(task.kind).choices(task)
        if names:
            named[task.name] = dict(enumerate(names, first))
        first += len(names) if scenario == "class" else 0  # with withheld tasks, labels are numbered across tasks
    return named


def read_answers(folder: Path, tasks: Sequence[TaskDefinition]) -> dict[str, Answers]:
    """Return the last answers of a unit on every task, as the task's kind stores them.

    Args:
        folder: the folder of the unit; without a file of answers the result is empty.
        tasks: the tasks of the stream.

    Raises:
        RunError: the file is not the one that the unit wrote, or lacks answers on these tasks.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = folder / PREDICTIONS
    if not path.exists():
        return {}
    check_own(path)
    try:
        arrays: dict[str, dict[str, npt.NDArray[Any]]] = {}
        for name, array in load_file(path).items():
            place, _, part = name.rpartition("/")
            arrays.setdefault(place, {})[part] = array
        return {task.name: registry.kind(task.kind).kept_answers(task, arrays[task.name]) for task in tasks}
    except KeyError as error:
        raise RunError(f"{path} lacks the tensor {error}. {_REMEDY}") from error
    except (OSError, ValueError, TypeError, IndexError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read: {first_line(error).rstrip('.')}. {_REMEDY}") from error
