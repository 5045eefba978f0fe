"""Runs as they are read: all scores as one frame, and beside it what is known of each unit and of the whole.

A directory of units is read, or one CSV file: lines ``# {…}`` of JSON, the first of the whole, then one a unit, and below them
the frame with a column for each metric.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from forgetfree import registry
from forgetfree.display import brief
from forgetfree.errors import ForgetfreeError, MetricError, ReportError, UsageError, first_line
from forgetfree.json_file import check, check_fields, checked, parse_json, read_bounded, read_json
from forgetfree.results.answers import Answers, TextAnswers, json_of
from forgetfree.results.learning_matrix import forgetting_per_task, summarize
from forgetfree.results.metrics import Floats, limits_of
from forgetfree.results.scores import COLUMNS, SCORES_FILE, Score, read_scores
from forgetfree.results.unit_folder import (
    BEFORE,
    CONFIG,
    ELSEWHERE,
    HISTORY,
    PREDICTIONS,
    RECORD,
    check_config,
    check_own,
    read_record,
)
from forgetfree.tasks import TaskDefinition

if TYPE_CHECKING:
    import numpy.typing as npt

Json = dict[str, Any]
#: The strategy that intransigence and agreement are measured against.
REFERENCE = "fine-tune"
#: What the best constant answer scores, as tables call it.
CONSTANT = "a constant answer"
#: Floors that are fitted to training rows: their names in files, and in tables.
LEARNED_FLOORS = {
    "bag_of_words": "a bag of words",
    "nearest_row": "the most similar training row",
    "linear_probe": "a linear probe",
    "mean_probe": "a linear probe at the mean",
}
#: What tables call the floor of a language model that answers before training.
UNTRAINED = "the model before training"
#: What the metrics of the one final union begin with.
UNION = "union_"
#: What says which unit a score is of.
UNIT = ["strategy", "seed"]
_REMEDY = "Restore it from a copy, or go on with --resume, which makes it again."
_DIRECTORY = "Give the directory that `forgetfree run --out` wrote, or a CSV file of `forgetfree report --format csv`."
Amount = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


# ---- what is known beside the scores --------------------------------------------------------------------


class _Facts(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True, extra="allow")


class LedgerPlace(_Facts):
    """A layer and a kind of parameter, with how many of its entries each task owns."""

    layer: str
    kind: str
    entries: Annotated[int, Field(ge=1)]
    owned: list[Count]


class LedgerSummary(_Facts):
    """What a ledger holds: sizes and overlaps of its tasks' regions, in the order of the tasks."""

    region_size: list[Count]
    owned_size: list[Count]
    bytes: Count
    overlap: list[list[Amount]]
    composition: str | None = None
    places: list[LedgerPlace] | None = None

    @property
    def may_overlap(self) -> bool:
        """Say whether several tasks may own an entry, each with its own value."""
        return self.composition in ("alone", "auto")


class HeldAside(_Facts):
    """The mean loss of a token of texts that no task trains, in nats, see `forgetfree.jobs.learn`."""

    texts: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)]
    before: Amount
    after: Amount | None = None
    by_task: list[Amount] | None = None


class UnitFacts(_Facts):
    """What a unit says beside its scores; see docs/results-format.md."""

    strategy: str
    seed: int
    options: Json = Field(default_factory=dict)
    seconds: dict[str, Amount | None] = Field(default_factory=dict)
    seconds_per_task: list[Amount] | None = None
    kept_bytes: list[Count] | None = None
    ledger: LedgerSummary | None = None
    right_rows: dict[str, str] = Field(default_factory=dict)
    held_aside: HeldAside | None = None
    broken_claims: list[str] = Field(default_factory=list)
    made: Json = Field(default_factory=dict)

    @property
    def memory(self) -> list[int]:
        """Bytes kept beside the pre-trained model after each task; where they are not told, those of the ledger at the end."""
        return self.kept_bytes or ([self.ledger.bytes] if self.ledger else [])

    @property
    def all_seconds(self) -> float | None:
        """The time of all phases, with that of fine-tuned models that others made; ``None`` where that is not known."""
        known = [seconds for seconds in self.seconds.values() if seconds is not None]
        return sum(known) if len(known) == len(self.seconds) else None

    @property
    def seconds_of_fine_tuning(self) -> float:
        """The time of all fine-tuned models that the unit stands on, whoever made them, as far as it is known."""
        return sum(self.seconds.get(name) or 0.0 for name in ("fine_tune", ELSEWHERE))


class Floors(_Facts):
    """Scores that take no fine-tuning, by task; those that are fitted to training rows by seed."""

    constant: list[float]
    bag_of_words: dict[str, list[float | None]] = Field(default_factory=dict)
    nearest_row: dict[str, list[float | None]] = Field(default_factory=dict)
    linear_probe: dict[str, list[float | None]] = Field(default_factory=dict)
    mean_probe: dict[str, list[float | None]] = Field(default_factory=dict)


class About(_Facts):
    """What is known of a whole run: its tasks, in the order of learning, model, data, floors, and what was set."""

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


# ---- a unit ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitFiles:
    """What of a unit is shown beside its scores.

    Attributes:
        answers: the last ones on every task, where they are kept: labels or texts.
        before: by task, the texts before training of the rows that a report shows.
        losses: the logged steps (``task``, ``phase``, ``step``, ``loss``).
        labels: by task, the names of the labels that its answers choose among, by their numbers; none where words are
            labelled.
    """

    answers: Mapping[str, Answers] = field(default_factory=dict)
    before: Mapping[str, Sequence[str]] = field(default_factory=dict)
    losses: Sequence[Json] = ()
    labels: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @property
    def probabilities(self) -> dict[str, Any]:
        """The answers with logits and labels: of labels, and of texts that are closed."""
        return {task: each for task, each in self.answers.items() if each.choices and each.ece is not None}

    @property
    def texts(self) -> dict[str, TextAnswers]:
        """The answers that are texts."""
        return {task: cast(TextAnswers, each) for task, each in self.answers.items() if each.shown_texts()}


@dataclass(frozen=True, eq=False)
class Run:
    """A strategy with one seed: its rows of the frame, and what is known beside them.

    Attributes:
        facts: what its unit says.
        scores: its rows.
        tasks: in the order of learning.
        metric: of each task.
        source: where it was read.
        files: what its folder shows.
        reference: the fine-tuned models that intransigence is measured against; none: it is not known.
    """

    facts: UnitFacts
    scores: pd.DataFrame
    tasks: Sequence[str]
    metric: Sequence[str]
    source: str = ""
    files: UnitFiles = UnitFiles()
    reference: Run | None = None

    @property
    def strategy(self) -> str:
        """Its name."""
        return self.facts.strategy

    @property
    def seed(self) -> int:
        """That of its unit."""
        return self.facts.seed

    @cached_property
    def _values(self) -> dict[tuple[str, int, str], float]:
        columns = (self.scores[name] for name in ("metric", "after", "task", "value"))
        return {(metric, after, task): value for metric, after, task, value in zip(*columns, strict=True)}

    def values(self, metric: str | Sequence[str]) -> Floats:
        """Return the values of a metric, or of one for each task: shape (T+1, T), NaN where it was not measured."""
        of_tasks = [metric] * len(self.tasks) if isinstance(metric, str) else metric
        pairs, stages = list(zip(of_tasks, self.tasks, strict=True)), range(len(self.tasks) + 1)
        rows = [[self._values.get((name, after, task), math.nan) for name, task in pairs] for after in stages]
        return np.array(rows, dtype=np.float64)

    def end(self, metric: str) -> Floats:
        """Return the values of a metric after the last task, shape (T,)."""
        values: Floats = self.values(metric)[-1]
        return values

    def knows(self, metric: str) -> bool:
        """Say whether anything was measured by a metric."""
        return bool((self.scores["metric"] == metric).any())

    @cached_property
    def learning_matrix(self) -> Floats:
        """The scores, shape (T+1, T), NaN where a task was not evaluated before it was learned."""
        return self.values(self.metric)

    @cached_property
    def ece(self) -> Floats:
        """The calibration errors, the same shape, NaN where answers have no probabilities."""
        return self.values("ece")

    @property
    def average(self) -> float:
        """The mean score over all tasks at the end."""
        return float(self.learning_matrix[-1].mean())

    @cached_property
    def forgotten(self) -> list[float]:
        """By how much each task has fallen from its best, see `forgetfree.results.learning_matrix.forgetting_per_task`."""
        return forgetting_per_task(self.learning_matrix, self.metric)

    @property
    def forgetting(self) -> float:
        """The mean of `forgotten` over all tasks but the last."""
        return float(np.mean(self.forgotten[:-1])) if len(self.metric) > 1 else 0.0

    @cached_property
    def summary(self) -> dict[str, float | None]:
        """The six numbers of `forgetfree.results.learning_matrix.summarize`."""
        learned = np.diagonal(self.reference.learning_matrix, -1) if self.reference else None
        return summarize(self.learning_matrix, self.ece, learned, self.metric)

    @property
    def outcome(self) -> Json:
        """What is the same whenever the same command runs on the same machine."""
        facts = self.facts.model_dump(exclude={"seconds", "seconds_per_task", "made", "summary"})
        return {**facts, "scores": self._values}


# ---- reading --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RunRecord:
    """All that was read of one run.

    Attributes:
        about: what is known of the whole.
        runs: those of its units that have ended well.
        source: where it was read; empty where it was read from nowhere.
        config: its config.json; empty where there is none.
    """

    about: About
    runs: tuple[Run, ...]
    source: str = ""
    config: Json = field(default_factory=dict)

    @property
    def test_rows(self) -> dict[str, int]:
        """How many rows each task is scored on, as far as it is known."""
        counts = {**self.about.data.get("test_rows", {})}
        for run in self.runs[:1] if not counts else ():
            counts = {
                task: int(rows) for task, rows in zip(run.scores["task"], run.scores["rows"], strict=True) if rows
            }
        return counts


def frame_of(scores: Sequence[Score]) -> pd.DataFrame:
    """Return scores as a frame: strategy, seed, and the columns of a score."""
    rows = [(*(each.of.get(name) for name in UNIT), *(getattr(each, name) for name in COLUMNS)) for each in scores]
    return pd.DataFrame(rows, columns=[*UNIT, *COLUMNS])


def read_run(path: Path, *, running: bool = False) -> RunRecord:
    """Read a run.

    Args:
        path: a run directory, a CSV file of it, or a scores.csv.
        running: it is not over: answers and losses are left aside, and a unit whose record is damaged has not ended.

    Raises:
        ReportError: it is missing or damaged; the message names file and place.
    """
    if path.is_dir():
        return _of_directory(path, running)
    if not path.exists():
        raise ReportError(f"{path} does not exist. {_DIRECTORY}")
    try:
        if path.suffix != ".csv":
            raise ValueError("it is no CSV file")
        if path.name != SCORES_FILE:
            return of_csv(read_bounded(path), str(path))
    except ForgetfreeError as error:
        raise ReportError(f"{path}: {error}") from error
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {first_line(error)}. {_DIRECTORY}") from error
    except (ValueError, KeyError, TypeError) as error:
        missing = f"a row or a setting lacks {error}" if isinstance(error, KeyError) else first_line(error)
        raise ReportError(f"{path}: {missing}. {_DIRECTORY}") from error
    scores = read_scores(path)
    check_own(path, ReportError)
    return of_scores(scores, str(path))


def of_scores(scores: Sequence[Score], source: str = "") -> RunRecord:
    """Return what is known of scores alone, such as those of one scores.csv.

    Raises:
        ReportError: they do not say strategy and seed, or scores of a learned task are missing.
    """
    if not all(each.of.keys() >= set(UNIT) for each in scores):
        raise ReportError(f"{source or 'A table of scores'} lacks the columns strategy and seed. Give scores of runs.")
    frame = frame_of(scores)
    tasks = list(dict.fromkeys(frame["task"]))
    about = {"stream": ",".join(tasks), "tasks": tasks, "metric": metrics_of(frame)} if tasks else None
    if about is None:
        raise ReportError(f"{source or 'A table of scores'} holds no scores. Give scores of runs.")
    units = [{"strategy": strategy, "seed": int(seed)} for strategy, seed in frame[UNIT].drop_duplicates().values]
    return whole_run(about, frame, units, source)


def metrics_of(frame: pd.DataFrame) -> dict[str, str]:
    """Return what each task of a frame is scored by: the first registered metric of its scores."""
    known = {metric: place for place, metric in enumerate(registry.metrics())}
    scored = frame[frame["metric"].isin(known)].drop_duplicates(["task", "metric"])
    pairs = sorted(zip(scored["task"], scored["metric"], strict=True), key=lambda pair: -known[pair[1]])
    return dict(pairs)


def whole_run(
    about: Json, frame: pd.DataFrame, units: Sequence[Json], source: str, files: Sequence[UnitFiles] = (), **more: Any
) -> RunRecord:
    """Return a run whose parts are checked, and fit one another.

    Raises:
        ReportError: they do not.
    """
    place = f"{source}: " if source else ""
    try:
        known = checked(About, about)
        facts = [checked(UnitFacts, each) for each in units]
        _check_frame(frame, known)
    except (ValueError, UsageError) as error:
        raise ReportError(f"{place}{first_line(error)}. {_REMEDY}") from error
    metric = [known.metric[task] for task in known.tasks]
    groups = {key: rows for key, rows in frame.groupby(UNIT, sort=False)}
    runs = []
    for each, shown in zip(facts, files or [UnitFiles()] * len(facts), strict=True):
        rows = groups.get((each.strategy, each.seed), frame.iloc[:0])
        run = Run(each, rows, tuple(known.tasks), metric, source, shown)
        for name, values in (("scores", run.learning_matrix), ("ece", run.ece)):
            lacking = np.tril(np.isnan(values), -1).any(axis=0)
            if name == "ece":  # answers may have no probabilities
                lacking &= ~np.isnan(values).all(axis=0)
            if lacking.any():
                raise ReportError(
                    f"{place}{name} of {known.tasks[int(np.argmax(lacking))]} by {each.strategy} with seed {each.seed} are "
                    f"missing after a task. {_REMEDY}"
                )
        try:
            _ = run.summary
            _check_facts(each, known)
        except (MetricError, ValueError) as error:
            raise ReportError(
                f"{place}{each.strategy} with seed {each.seed}: {first_line(error)}. {_REMEDY}"
            ) from error
        runs.append(run)
    return RunRecord(known, tuple(runs), source, **more)


def _check_frame(frame: pd.DataFrame, about: About) -> None:
    """Raise ``ValueError`` where a score cannot be: of no task, after none, beyond the bounds of its metric, or twice."""
    if lacking := [task for task in about.tasks if task not in about.metric]:
        raise ValueError(f"{lacking[0]} has no score by a registered metric")
    check("tasks", about.tasks, len({*about.tasks}) == len(about.tasks), "different names")
    foreign = frame[~frame["task"].isin(about.tasks) | ~frame["after"].between(0, len(about.tasks))]
    if len(foreign):
        raise ValueError(f"a score is of no task of the stream, or after none: {brief(list(foreign.iloc[0]))}")
    for (metric, task), those in frame.groupby(["metric", "task"], sort=False):
        own = about.metric[str(task)] if metric == f"{UNION}accuracy" else str(metric)
        low, high = limits_of(own)
        if not (np.isfinite(those["value"]) & those["value"].between(low, high)).all():
            raise ValueError(f"{metric} of {task} must be in [{low:g}, {high:g}], got {those['value'].tolist()[:5]}")
    twice = frame.duplicated([*UNIT, "task", "after", "metric"])
    if twice.any():
        raise ValueError(f"a score stands twice: {brief(list(frame[twice].iloc[0]))}")
    count = len(about.tasks)
    for name, of_seeds in about.floors or ():
        lists = [of_seeds] if name == "constant" else list(of_seeds.values())
        for scores in lists:
            check(f"floors.{name}", scores, len(scores) == count, f"{count} numbers")
            for score, task in zip(scores, about.tasks, strict=True):
                low, high = limits_of(about.metric[task])
                check(
                    f"floors.{name} of {task}", score, score is None or low <= score <= high, f"in [{low:g}, {high:g}]"
                )


def _check_facts(facts: UnitFacts, about: About) -> None:
    """Raise ``ValueError`` where lists are not of the tasks of the stream."""
    ledger, count = facts.ledger, len(about.tasks)
    lists: list[tuple[str, Sequence[Any] | None]] = [(n, getattr(facts, n)) for n in ("seconds_per_task", "kept_bytes")]
    if ledger:
        lists += [("region_size", ledger.region_size), ("owned_size", ledger.owned_size), ("overlap", ledger.overlap)]
        lists += [("overlap", row) for row in ledger.overlap] + [("owned", each.owned) for each in ledger.places or ()]
    for name, values in lists:
        check(name, values, values is None or len(values) == count, f"{count} numbers")


# ---- a directory ----------------------------------------------------------------------------------------


def _of_directory(out: Path, running: bool) -> RunRecord:
    if not (out / CONFIG).exists():
        raise ReportError(_without_results(out))
    config = read_json(out / CONFIG, ReportError, _REMEDY, _check_config)
    check_config(out, ReportError)
    here = {path.parent.relative_to(out).as_posix() for path in out.glob(f"*/seed-*/{RECORD}")}
    if foreign := sorted(here - config["units"].keys()):
        raise ReportError(
            f"{out / CONFIG} is that of another run: it does not name {foreign[0]}, which is here. {_REMEDY}"
        )
    definitions = [TaskDefinition.of_fields(each) for each in config["tasks"]]
    for task in definitions:
        if unknown := registry.unknown_names(task):
            raise ReportError(f"{out / CONFIG}: {'; '.join(unknown)}. Install the package that has it.")
    metric = {task.name: task.metric for task in definitions}
    about: Json = {**config["about"], "metric": metric, "unfinished": [], "failed": []}
    rows, labels = about["data"].get("test_rows", {}), _labels(definitions, about.get("scenario", "task"))
    floors: Json = {**about.get("floors", {})}
    scores, units, files = list[Score](), list[Json](), list[UnitFiles]()
    for place, key in config["units"].items():
        folder = out / place
        record = _record(folder, key, running)
        if record and record["status"] == "done":
            own, facts = _of_unit(folder, record, definitions, rows)
            scores += own
            units.append(facts)
            files.append(
                UnitFiles()
                if running
                else UnitFiles(*read_answers(folder, definitions), _losses(folder / HISTORY), labels)
            )
        elif record or (folder / HISTORY).is_file():
            cut = {**key, "after": _last_row(folder, definitions)}
            (about["failed"] if record else about["unfinished"]).append(
                {**cut, "error": record["error"]} if record else cut
            )
        for name, of_tasks in record["floors"].items() if record else ():
            floors.setdefault(name, {})[str(key["seed"])] = [of_tasks.get(task.name) for task in definitions]
    frame = frame_of(scores)
    return whole_run({**about, "floors": floors or None}, frame, units, str(out), files, config=config)


def _check_config(config: Any) -> None:
    check_fields("", config, {"about": dict, "tasks": list, "units": dict})
    check_fields("about", config["about"], {"data": dict})
    for each in config["tasks"]:
        TaskDefinition.of_fields(each)
    for place, key in config["units"].items():
        check_fields(f"units.{place}", key, {"strategy": str, "seed": int})


def _without_results(path: Path) -> str:
    """Say that a directory is not one of a run, and which directories below it are."""
    runs = sorted({file.parent for pattern in ("*/config.json", "*/*/config.json") for file in path.glob(pattern)})
    if not runs:
        return f"{path} holds no results: it has no {CONFIG}. {_DIRECTORY}"
    named = ", ".join(map(str, runs[:3])) + (", …" if len(runs) > 3 else "")
    return f"{path} holds no results of its own, but directories below it do: {named}. Give them one by one."


def _record(folder: Path, key: Json, running: bool) -> Json | None:
    if not (folder / RECORD).exists():
        return None
    try:
        record = read_record(folder, ReportError, _REMEDY)
        if record["unit"] != key:
            raise ReportError(f"{folder / RECORD} is that of another unit, {brief(record['unit'])}. {_REMEDY}")
    except ValueError as error:
        raise ReportError(f"{folder / RECORD}: {first_line(error)}. {_REMEDY}") from error
    except ReportError:
        if running:
            return None
        raise
    return record


def _of_unit(
    folder: Path, record: Json, tasks: Sequence[TaskDefinition], rows: Mapping[str, int]
) -> tuple[list[Score], Json]:
    """Return the scores of a unit and its facts; what its record says by task are scores after the last one."""
    path = folder / SCORES_FILE
    check_own(path, ReportError)
    scores, details = read_scores(path), record["details"]
    by_task, extra = dict(details.get("by_task", {})), dict(details.get("extra", {}))
    right = by_task.pop("right_rows", {})
    names = [task.name for task in tasks]
    by_task |= {f"{UNION}{name}": dict(zip(names, its, strict=True)) for name, its in extra.pop("union", {}).items()}
    key = record["unit"]
    scores += [
        Score(key, task, len(tasks), metric, value, rows.get(task, 0))
        for metric, of_tasks in by_task.items()
        for task, value in of_tasks.items()
        if value is not None
    ]
    known = {
        name: details[name]
        for name in ("options", "ledger", "kept_bytes", "held_aside", "seconds", "seconds_per_task")
        if name in details
    }
    made: Json = {name: record[name] for name in ("versions", "code", "command") if name in record}
    made["machine"] = {
        name: its for name, its in record.get("machine", {}).items() if name != "system"
    }  # it tells no bit
    return scores, {**key, **known, "right_rows": right, **extra, "made": made}


def _last_row(folder: Path, tasks: Sequence[TaskDefinition]) -> int:
    """Return after how many tasks a unit that did not end well was scored last."""
    try:
        return max((score.after for score in read_scores(folder / SCORES_FILE)), default=0)
    except ReportError:
        return 0


def _labels(tasks: Sequence[TaskDefinition], scenario: str) -> dict[str, dict[int, str]]:
    """Return the names of the labels of each task whose rows have one, as its answers number them."""
    named, first = dict[str, dict[int, str]](), 0
    for task in tasks:
        names = registry.kind(task.kind).choices(task)
        if names:
            named[task.name] = dict(enumerate(names, first))
        first += len(names) if scenario == "class" else 0  # of all tasks, each has its own numbers
    return named


def read_answers(folder: Path, tasks: Sequence[TaskDefinition]) -> tuple[dict[str, Answers], dict[str, Sequence[str]]]:
    """Return the last answers of a unit on every task, as its kind keeps them, and the texts before training, by task.

    Args:
        folder: of the unit; where it keeps no answers there are none.
        tasks: of the stream.

    Raises:
        ReportError: the file is not the one that the unit made, or holds no answers on these tasks.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path, answers, before = folder / PREDICTIONS, dict[str, Answers](), dict[str, Sequence[str]]()
    if not path.exists():
        return answers, before
    check_own(path, ReportError)
    try:
        arrays: dict[str, dict[str, npt.NDArray[Any]]] = {}
        for name, array in load_file(path).items():
            place, _, part = name.rpartition("/")
            arrays.setdefault(place, {})[part] = array
        for task in tasks:
            first = arrays[task.name].pop(BEFORE, None)
            before |= {} if first is None else {task.name: json_of(first)}
            answers[task.name] = registry.kind(task.kind).kept_answers(task, arrays[task.name])
    except KeyError as error:
        raise ReportError(f"{path} lacks the tensor {error}. {_REMEDY}") from error
    except (OSError, ValueError, TypeError, IndexError, SafetensorError) as error:
        raise ReportError(f"{path} cannot be read: {first_line(error).rstrip('.')}. {_REMEDY}") from error
    return answers, before


def _losses(path: Path) -> list[Json]:
    if not path.exists():
        return []
    check_own(path, ReportError)
    steps = map(parse_json, read_bounded(path).splitlines())
    return [step for step in steps if step.keys() >= {"task", "phase", "step", "loss"}]


# ---- one CSV file ---------------------------------------------------------------------------------------


def to_csv(record: RunRecord) -> str:
    """Return a run as the text of a CSV file."""
    lines = [record.about.model_dump(exclude_unset=True)]
    lines += [run.facts.model_dump(exclude_unset=True) | {"summary": run.summary} for run in record.runs]
    text = "".join(f"# {json.dumps(line, allow_nan=False)}\n" for line in lines)
    frame = pd.concat([run.scores for run in record.runs]) if record.runs else frame_of([])
    index = [*UNIT, "task", "after", "rows"]
    return text + frame.pivot_table("value", index, "metric", sort=False).reset_index().to_csv(index=False)


def of_csv(text: str, source: str = "") -> RunRecord:
    """Return a run from the text of a CSV file: undoes `to_csv`.

    Raises:
        ValueError: it is no such text.
        ReportError: its parts do not fit one another.
    """
    header = list[Json]()
    while text.startswith("# "):
        line, _, text = text.removeprefix("# ").partition("\n")
        header.append(parse_json(line))
    if not header or not all(isinstance(each, dict) for each in header):
        raise ValueError("it must begin with a line `# {…}` that says what was measured")
    about, *units = header
    index = [*UNIT, "task", "after", "rows"]
    wide = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)
    frame = wide.melt(index, var_name="metric")
    frame = frame[frame["value"] != ""].astype({"seed": int, "after": int, "rows": int, "value": float})
    return whole_run(about, frame[[*UNIT, *COLUMNS]], units, source)
