"""Results as typed records: what a run, a graft, a sweep or an experiment wrote, checked once, when it is read.

Everything that reports, compares or draws reads these. Keys that no report reads are left alone; they stay in `Record.content`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo

from forgetfree import registry
from forgetfree.display import brief
from forgetfree.errors import MetricError, UsageError, first_line
from forgetfree.json_file import check, checked
from forgetfree.results.arguments import Floats
from forgetfree.results.option_bounds import Amount, Share, check_options
from forgetfree.results.scores import Score, scores_of_rows

#: Of every results.json.
SCHEMA = 1
#: The strategy that intransigence is measured against.
REFERENCE = "fine-tune"
Json = dict[str, Any]
#: What a validator compares with: the tasks of a run, the places of a graft's space.
Context = dict[str, Any]


class Record(BaseModel):
    """A part of results, with what the file says of it."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)
    _content: Json = PrivateAttr(default_factory=dict)
    _source: str = PrivateAttr("")

    @classmethod
    def _read(cls, content: Any, context: Context | None = None, source: str = "") -> Self:
        """Return the record of a JSON value; raise ``ValueError`` where it is not what it must be."""
        record = checked(cls, content, context)
        record._remember(content)
        return record.from_source(source)

    def _remember(self, content: Json) -> None:
        self._content = content
        for name, part in self:
            if isinstance(part, Record):
                part._remember(content[name])
            elif isinstance(part, list):
                for each, its in zip(part, content.get(name, ()), strict=False):
                    if isinstance(each, Record):
                        each._remember(its)

    @property
    def content(self) -> Json:
        """All that the file says of it, as JSON."""
        return self._content

    @property
    def source(self) -> str:
        """Where it was read; empty where it was not read from a file."""
        return self._source

    def from_source(self, source: str) -> Self:
        """Return the same, as read from a path."""
        record = self.model_copy()
        record._source = source
        return record

    def with_facts(self, **facts: Any) -> Self:
        """Return the same with facts that stand in other files, as attributes and in its content."""
        record = self.model_copy(update=facts)
        record._content = self.content | {name: _json(fact) for name, fact in facts.items()}
        return record


def _json(fact: Any) -> Any:
    """Return the content of a record, or of each in a list; all else is JSON already."""
    if isinstance(fact, list):
        return [_json(each) for each in fact]
    return fact.content if isinstance(fact, Record) else fact


def _that(right: Callable[[Any, Context], bool], expected: str) -> AfterValidator:
    """Check a value by what is known of the results; ``{n}`` and ``{tasks}`` stand for it in what is expected."""

    def check_value(value: Any, info: ValidationInfo) -> Any:
        context = info.context or {}
        if not right(value, context):
            raise ValueError(expected.format(**context))
        return value

    return AfterValidator(check_value)


Shares = Annotated[list[Share], _that(lambda v, c: len(v) == c["n"], "{n} numbers in [0, 1]")]
Amounts = Annotated[list[Amount], _that(lambda v, c: len(v) == c["n"], "{n} numbers of at least 0")]
ScoresOrNone = Annotated[list[float | None], _that(lambda v, c: len(v) == c["n"], "{n} numbers, or null")]
ByTask = Annotated[list[Amount | None], _that(lambda v, c: len(v) == c["n"], "{n} numbers of at least 0, or null")]
#: By tasks: whether numbers are within the bounds of their metric, see `RunResults.check_sense`.
Scores = Annotated[list[float], _that(lambda v, c: len(v) == c["n"], "{n} numbers")]


def _is_matrix(rows: Sequence[Sequence[float | None]], context: Context) -> bool:
    return (
        len(rows) == context["n"] + 1
        and all(len(row) == context["n"] for row in rows)
        and all(None not in row[:learned] for learned, row in enumerate(rows))
        and len({score is None for learned, row in enumerate(rows) for score in row[learned:]}) == 1
    )


def _has_such_columns(rows: Sequence[Sequence[float | None]], context: Context) -> bool:
    held = [[0.0 if all(row[i : i + 1] == [None] for row in rows) else x for i, x in enumerate(row)] for row in rows]
    return _is_matrix(held, context)


_MATRIX = (
    "a row before training and one after each task, each of {n} numbers%s; null for all tasks that are not learned yet, or for "
    "none"
)
Matrix = Annotated[list[list[float | None]], _that(_is_matrix, _MATRIX % "")]
#: Of a task without probabilities all are null.
MatrixOfShares = Annotated[list[list[Share | None]], _that(_has_such_columns, _MATRIX % " in [0, 1]")]
Overlap = Annotated[
    list[list[Amount]],
    _that(lambda v, c: len(v) == c["n"] and all(len(row) == c["n"] for row in v), "{n} rows of {n} numbers"),
]


#: How far a number of the summary may lie from what follows from the matrix.
_CLOSE = 1e-6


# -- A run -----------------------------------------------------------------------------------------------


class Summary(Record):
    """What follows from the matrices of a run, see `forgetfree.results.metrics`."""

    average: float | None
    forgetting: float | None
    bwt: float | None
    fwt: float | None
    intransigence: float | None
    ece: float | None


class LedgerPlace(Record):
    """A layer and a kind of parameter, with how many of its entries each task owns."""

    layer: str
    kind: str
    entries: Annotated[int, Field(ge=1)]
    owned: Amounts


class LedgerSummary(Record):
    """What a ledger holds, as results say it: sizes and overlaps of its tasks' regions."""

    tasks: Annotated[list[str], _that(lambda v, c: v == c["tasks"], "the tasks of the stream, {tasks}")]
    region_size: Amounts
    owned_size: Amounts
    bytes: Annotated[int, Field(ge=0)]
    overlap: Overlap
    composition: Any = None
    places: list[LedgerPlace] | None = None

    @property
    def may_overlap(self) -> bool:
        """Say whether several tasks may own an entry, each with its own value."""
        return self.composition in ("alone", "auto")


class FinalUnion(Record):
    """The scores under the one final union."""

    accuracy: Scores
    ece: Shares


class Run(Record):
    """One strategy with one seed; see docs/results-format.md for what its parts mean."""

    strategy: str
    seed: int
    metric: Annotated[list[str], _that(lambda v, c: len(v) == c["n"], "{n} names of metrics")]
    matrix: Matrix
    ece: MatrixOfShares
    summary: Summary
    seconds: dict[str, Amount]
    options: Json = {}
    ledger: LedgerSummary | None
    kept_bytes: Amounts | None = None
    seconds_per_task: Amounts | None = None
    agreement: Amounts | None = None
    temperature: ByTask | None = None
    ece_scaled: ByTask | None = None
    readout_again: ScoresOrNone | None = None
    union: FinalUnion | None = None
    broken_claims: list[str] = []
    trials: int | None = None
    made: Json = {}

    @property
    def learning_matrix(self) -> Floats:
        """The matrix as an array, shape (T+1, T), NaN where a task was not evaluated before it was learned."""
        return np.array(self.matrix, dtype=np.float64)

    @property
    def average(self) -> float:
        """The mean score over all tasks at the end."""
        return float(self.learning_matrix[-1].mean())

    @property
    def forgotten(self) -> list[float]:
        """By how much each task has fallen from its best, see `forgetfree.results.metrics.forgetting_per_task`."""
        from forgetfree.results.metrics import forgetting_per_task

        return forgetting_per_task(self.learning_matrix, self.metric)

    @property
    def forgetting(self) -> float:
        """The mean of `forgotten` over all tasks but the last."""
        return float(np.mean(self.forgotten[:-1])) if len(self.metric) > 1 else 0.0

    @property
    def folder(self) -> Path:
        """The folder of its unit, in the directory where it was read."""
        source = Path(self.source)
        return (source.parent if source.suffix == ".json" else source) / self.strategy / f"seed-{self.seed}"

    @property
    def memory(self) -> list[float]:
        """Bytes kept beside the pre-trained model after each task; of older results, those of the ledger at the end."""
        return self.kept_bytes or ([self.ledger.bytes] if self.ledger else [])

    @property
    def all_seconds(self) -> float:
        """The time of all phases."""
        return sum(self.seconds.values())

    @property
    def outcome(self) -> Json:
        """Its content without what differs from machine to machine."""
        return {key: value for key, value in self.content.items() if key not in _OF_THE_MACHINE}


#: What of a run's content says nothing of its outcome.
_OF_THE_MACHINE = ("seconds", "seconds_per_task", "made", "trials")


class Unfinished(Record):
    """A run that was cut short, with the rows it had."""

    strategy: str
    seed: int
    matrix: list[Any]


class Failed(Record):
    """A run that could not go on, and why."""

    strategy: str
    seed: int
    error: str


#: What the best constant answer scores, as tables call it.
CONSTANT = "a constant answer"
#: Floors that are fitted to training rows: their names in results.json, and in tables.
LEARNED_FLOORS = {"bag_of_words": "a bag of words", "linear_probe": "a linear probe"}


class RunFloors(Record):
    """Scores that take no fine-tuning, per task; those that are fitted to training rows by seed."""

    constant: Scores
    bag_of_words: dict[str, ScoresOrNone] = {}
    linear_probe: dict[str, ScoresOrNone] = {}

    def by_place(self) -> dict[str, Sequence[float | None]]:
        """Return all of them by their places in the file."""
        learned = {"bag_of_words": self.bag_of_words, "linear_probe": self.linear_probe}
        return {
            "constant": self.constant,
            **{f"{name}.{seed}": scores for name, of_seeds in learned.items() for seed, scores in of_seeds.items()},
        }


class _OfTasks(Record):
    tasks: Annotated[list[str], _that(lambda v, _: 0 < len(v) == len(set(v)), "a list of different task names")]


class RunResults(_OfTasks):
    """What ``forgetfree run`` writes. To check it takes its ``tasks`` and their number ``n``."""

    stream: str
    model: Json
    data: Json
    starts: dict[str, str] = {}
    floors: RunFloors | None = None
    runs: list[Run]
    unfinished: list[Unfinished] = []
    failed: list[Failed] = []

    @classmethod
    def of(cls, content: Any, source: str = "") -> RunResults:
        """Read the content of results.json.

        Args:
            content: as JSON.
            source: where it was read.

        Raises:
            ValueError: no report can be made of it: the place, what is expected there, and what was found.
        """
        check_version(content)
        tasks = checked(_OfTasks, content).tasks
        return cls._read(content, {"tasks": tasks, "n": len(tasks)}, source)

    def from_source(self, source: str) -> Self:
        """Return the same with all its parts, as read from a path."""
        kinds: Mapping[str, Sequence[Record]] = {
            "runs": self.runs,
            "unfinished": self.unfinished,
            "failed": self.failed,
        }
        parts = {name: [part.from_source(source) for part in those] for name, those in kinds.items()}
        return super().from_source(source).model_copy(update=parts)

    @property
    def test_rows(self) -> Mapping[str, int]:
        """How many rows each task is scored on; empty where the results do not say it."""
        rows: Mapping[str, int] = self.data.get("test_rows", {})
        return rows

    def with_runs(self, runs: list[Run]) -> Self:
        """Return the same with other runs."""
        return self.with_facts(runs=runs)

    def scores(self) -> list[Score]:
        """Return all scores of its runs."""
        return [score for run in self.runs for score in self.scores_of(run)]

    def scores_of(self, run: Run) -> Iterator[Score]:
        """Yield the scores of one of the runs."""
        of: Mapping[str, str | int] = {"strategy": run.strategy, "seed": run.seed}
        for after, (scores, eces) in enumerate(zip(run.matrix, run.ece, strict=True)):
            for i, task in enumerate(self.tasks):
                found = {run.metric[i]: scores[i], "ece": eces[i]} if scores[i] is not None else {}
                if after == len(self.tasks):
                    found |= {"agreement": run.agreement[i]} if run.agreement else {}
                    if run.union:
                        found |= {f"{UNION}accuracy": run.union.accuracy[i], f"{UNION}ece": run.union.ece[i]}
                for metric, value in found.items():
                    if value is not None:
                        yield Score(of, task, after, metric, value, self.test_rows.get(task, 0))

    def check_sense(self) -> None:
        """Raise ``ValueError`` where a number cannot be.

        That is where an option, a score or a floor is out of its bounds, or where an average, forgetting or a transfer does not
        follow from the matrices of its run.
        """
        for number, run in enumerate(self.runs):
            check_options(f"runs[{number}].options", run.strategy, run.options)
            self._check_summary(f"runs[{number}]", run)
            if run.union is not None:
                _check_bounds(f"runs[{number}].union.accuracy", run.union.accuracy, run.metric)
            _check_bounds(f"runs[{number}].readout_again", run.readout_again or [None] * len(self.tasks), run.metric)
        if not self.runs or self.floors is None:  # without a run, no metric is known
            return
        for place, floors in self.floors.by_place().items():
            _check_bounds(f"floors.{place}", floors, self.runs[0].metric)

    def _check_summary(self, place: str, run: Run) -> None:
        from forgetfree.results.metrics import summarize

        reference = next((r for r in self.runs if r.strategy == REFERENCE and r.seed == run.seed), None)
        learned = np.diagonal(reference.learning_matrix, offset=-1) if reference else None
        try:
            summary = summarize(run.learning_matrix, np.array(run.ece, dtype=np.float64), learned, run.metric)
        except (MetricError, UsageError) as error:
            raise ValueError(f"{place}: {first_line(error)}") from error
        for key, expected in summary.items():
            got = getattr(run.summary, key)
            if key == "intransigence" and None in (expected, got):  # fine-tune may stand in another file
                continue
            right = got == expected or not (got is None or expected is None or abs(got - expected) > _CLOSE)
            check(f"{place}.summary.{key}", got, right, f"{expected}, which follows from the matrices")


def _check_bounds(place: str, scores: Sequence[float | None], metrics: Sequence[str]) -> None:
    limits = [registry.metric(name).limits for name in metrics]
    right = all(score is None or low <= score <= high for score, (low, high) in zip(scores, limits, strict=True))
    check(place, scores, right, f"{len(metrics)} numbers within the bounds of their metrics")


#: What the metrics of the one final union begin with.
UNION = "union_"


# -- A graft ---------------------------------------------------------------------------------------------


class GraftedModel(Record):
    """The model that was grafted onto."""

    name: str
    readout: str


class GraftData(Record):
    """The rows of a graft's task."""

    test_rows: int
    shots: Any = None
    or_fewer: Any = None
    steps: Any = None


class GraftFloors(Record):
    """The score of a constant answer."""

    constant: float


class FineTunedModel(Record):
    """The fine-tuned model that was taken in place of one's own."""

    architecture: str
    left_out: list[Any]


class GraftRow(Record):
    """What one model scored with one seed."""

    seed: int
    model: str
    score: float
    ece: Share | None = None
    agreement: Share
    sparsity: Amount | None
    entries: Amount | None


class EntryCounts(Record):
    """How many entries lie in each layer, and are of each kind."""

    layers: Annotated[
        dict[str, float], _that(lambda v, c: v.keys() == c["layers"], "a number of entries for each of space.layers")
    ]
    kinds: Annotated[
        dict[str, float], _that(lambda v, c: v.keys() == c["kinds"], "a number of entries for each of space.kinds")
    ]


class RegionCounts(EntryCounts):
    """Those of a region."""

    sparsity: Share


class GraftFile(Record):
    """Where a graft is, beside the results."""

    file: str
    seed: int
    sparsity: Amount


class GraftResults(Record):
    """What ``forgetfree graft`` writes. To check it takes the names of its ``layers`` and ``kinds``."""

    task: str
    metric: str
    base: str
    model: GraftedModel
    data: GraftData
    space: EntryCounts
    fine_tuned: FineTunedModel | None = None
    floors: GraftFloors | None = None
    evaluated_on: Any = "test"
    rows: Annotated[list[GraftRow], _that(lambda v, _: bool(v), "a list of at least one row")]
    regions: list[RegionCounts]
    grafts: list[GraftFile] = []

    @classmethod
    def of(cls, content: Any, source: str = "") -> GraftResults:
        """Read the content of results.json, see `RunResults.of`."""
        check_version(content)
        space = content.get("space")
        places = {name: space.get(name) if isinstance(space, dict) else None for name in ("layers", "kinds")}
        context = {name: (each if isinstance(each, dict) else {}).keys() for name, each in places.items()}
        results = cls._read(content, context, source)
        try:
            low, high = registry.metric(results.metric).limits
        except UsageError as error:
            raise ValueError(f"metric: {first_line(error)}") from error
        for number, row in enumerate(results.rows):
            check(f"rows[{number}].score", row.score, low <= row.score <= high, f"a number in [{low:g}, {high:g}]")
        if (floor := results.floors and results.floors.constant) is not None:
            check("floors.constant", floor, low <= floor <= high, f"a number in [{low:g}, {high:g}]")
        return results

    @property
    def seeds(self) -> int:
        """How many there are."""
        return len({row.seed for row in self.rows})

    def scores(self) -> list[Score]:
        """Return all scores; that of the task's own metric has its name."""
        known = {"task": self.task, "test_rows": self.data.test_rows}
        scores = scores_of_rows(({**known, **row.content} for row in self.rows), ("score", "ece", "agreement"))
        names = {"score": self.metric}
        return [replace(score, metric=names.get(score.metric, score.metric)) for score in scores]


# -- A sweep ---------------------------------------------------------------------------------------------


class Trial(Record):
    """One setting of a sweep, and what it scored on validation rows."""

    trial: int
    setting: str
    scores: list[Any]
    mean: float | None = None
    std: float | None = None
    rows: int | float | None = None
    errors: list[Any]


#: In the directory of a sweep: the run with the chosen setting.
CHOSEN = "chosen"


class SweepResults(Record):
    """What ``forgetfree sweep`` writes."""

    stream: str
    metric: list[str] = []
    strategy: str
    trials: list[Trial]
    chosen: int | None = None

    @classmethod
    def of(cls, content: Any, source: str = "") -> SweepResults:
        """Read the content of results.json, see `RunResults.of`."""
        results = cls._read(content, source=source)
        for number, trial in enumerate(results.trials):
            check(f"trials[{number}].trial", trial.trial, trial.trial == number, "its place in the list")
        chosen = results.chosen
        check("chosen", chosen, chosen is None or 0 <= chosen < len(results.trials), "the number of a trial or null")
        return results


# -- An experiment ---------------------------------------------------------------------------------------


class ExperimentSetting(Record):
    """What an experiment was run with."""

    model: str
    readout: str
    tasks: list[Any]
    shots: list[Any]
    seeds: list[Any]
    fixed: Json = {}
    evaluate_on: Any = "test"


class ExperimentRow(Record):
    """What was measured of a task with a seed: numbers that only the experiment knows."""

    task: str
    seed: int


class ExperimentUnit(Record):
    """A unit of an experiment, with its rows."""

    unit: Json
    rows: list[ExperimentRow]


class ExperimentResults(Record):
    """What ``forgetfree experiment`` writes; what its rows hold is only the experiment's to check."""

    experiment: str
    preset: str
    model: str
    device: str
    setting: ExperimentSetting
    versions: Json
    data: Json
    skipped: Json
    units: list[ExperimentUnit]
    seconds: Amount
    complete: Any = None

    @classmethod
    def of(cls, content: Any, source: str = "") -> ExperimentResults:
        """Read the content of results.json, see `RunResults.of`."""
        check_version(content)
        results = cls._read(content, source=source)
        name = results.experiment
        check("experiment", name, name in registry.EXPERIMENTS, f"one of {', '.join(sorted(registry.EXPERIMENTS))}")
        return results

    @property
    def rows(self) -> list[Json]:
        """All rows, unit after unit."""
        return [row.content for unit in self.units for row in unit.rows]

    def scores(self) -> list[Score]:
        """Return all scores.

        Raises:
            TypeError, ValueError: a row holds no number where one was measured.
        """
        return scores_of_rows(self.rows, registry.EXPERIMENTS[self.experiment].load().measured)


# -- Checking --------------------------------------------------------------------------------------------


def check_version(results: Any) -> None:
    """Raise ``ValueError`` unless the results are an object of this schema."""
    check("the content", results, isinstance(results, dict), "an object")
    found = results.get("schema")
    if found != SCHEMA or isinstance(found, bool):
        raise ValueError(
            f"schema must be {SCHEMA}, got {brief(found)}: another version of forgetfree wrote it, and can report it"
        )
