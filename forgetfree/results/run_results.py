"""The results of a run as typed records: what ``forgetfree run`` wrote, checked once, when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self, get_args

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from forgetfree import registry
from forgetfree.errors import MetricError, UsageError, first_line
from forgetfree.json_file import check, checked
from forgetfree.recipes import StepsRule
from forgetfree.results.answers import unpack_rows
from forgetfree.results.learning_matrix import forgetting_per_task, summarize
from forgetfree.results.metrics import Floats
from forgetfree.results.records import Amount, Context, Json, Record, Share, check_version, checked_by
from forgetfree.results.scores import Score

#: The strategy that intransigence is measured against.
REFERENCE = "fine-tune"
Shares = Annotated[list[Share], checked_by(lambda v, c: len(v) == c["n"], "{n} numbers in [0, 1]")]
Amounts = Annotated[list[Amount], checked_by(lambda v, c: len(v) == c["n"], "{n} numbers of at least 0")]
ScoresOrNone = Annotated[list[float | None], checked_by(lambda v, c: len(v) == c["n"], "{n} numbers, or null")]
ByTask = Annotated[list[Amount | None], checked_by(lambda v, c: len(v) == c["n"], "{n} numbers of at least 0, or null")]
TextsOrNone = Annotated[list[str | None], checked_by(lambda v, c: len(v) == c["n"], "{n} texts, or null")]
#: By tasks: whether numbers are within the bounds of their metric, see `RunResults.check_sense`.
Scores = Annotated[list[float], checked_by(lambda v, c: len(v) == c["n"], "{n} numbers")]


def _is_matrix(rows: Sequence[Sequence[float | None]], context: Context, some_columns: bool = False) -> bool:
    """Return whether rows are a learning matrix; with ``some_columns``, all of a task's numbers may be null."""
    count = context["n"]
    if len(rows) != count + 1 or any(len(row) != count for row in rows):
        return False
    columns = [i for i in range(count) if not some_columns or any(row[i] is not None for row in rows)]
    missing = {(i < learned, row[i] is None) for learned, row in enumerate(rows) for i in columns}
    return (True, True) not in missing and not {(False, True), (False, False)} <= missing


_MATRIX = (
    "a row before training and one after each task, each of {n} numbers%s; null for all tasks that are not learned yet, or for "
    "none"
)
Matrix = Annotated[list[list[float | None]], checked_by(_is_matrix, _MATRIX % "")]
#: Of a task without probabilities all are null.
MatrixOfShares = Annotated[
    list[list[Share | None]], checked_by(partial(_is_matrix, some_columns=True), _MATRIX % " in [0, 1]")
]
#: Of a task without such scores all are null.
MatrixOfSome = Annotated[list[list[float | None]], checked_by(partial(_is_matrix, some_columns=True), _MATRIX % "")]
Overlap = Annotated[
    list[list[Amount]],
    checked_by(lambda v, c: len(v) == c["n"] and all(len(row) == c["n"] for row in v), "{n} rows of {n} numbers"),
]


#: How far a number of the summary may lie from what follows from the matrix.
_CLOSE = 1e-6


class Summary(Record):
    """What follows from the matrices of a run, see `forgetfree.results.learning_matrix`."""

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

    tasks: Annotated[list[str], checked_by(lambda v, c: v == c["tasks"], "the tasks of the stream, {tasks}")]
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


class HeldAside(Record):
    """The mean loss of a token of texts that no task trains, in nats, see `forgetfree.jobs.diagnostics.losses_after`."""

    texts: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)]
    before: Amount
    after: Amount | None = None
    by_task: Amounts | None = None


class Run(Record):
    """One strategy with one seed; see docs/results-format.md for what its parts mean."""

    strategy: str
    seed: int
    metric: Annotated[list[str], checked_by(lambda v, c: len(v) == c["n"], "{n} names of metrics")]
    matrix: Matrix
    ece: MatrixOfShares
    more_scores: dict[str, MatrixOfSome] = Field(default_factory=dict)
    summary: Summary
    seconds: dict[str, Amount | None]
    options: Json = Field(default_factory=dict)
    ledger: LedgerSummary | None
    kept_bytes: Amounts | None = None
    seconds_per_task: Amounts | None = None
    updates: ByTask | None = None
    agreement: Amounts | None = None
    temperature: ByTask | None = None
    ece_scaled: ByTask | None = None
    readout_again: ScoresOrNone | None = None
    right_rows: TextsOrNone | None = None
    union: FinalUnion | None = None
    held_aside: HeldAside | None = None
    broken_claims: list[str] = Field(default_factory=list)
    made: Json = Field(default_factory=dict)

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
        """By how much each task has fallen from its best, see `forgetfree.results.learning_matrix.forgetting_per_task`."""
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
    def all_updates(self) -> float | None:
        """The updates of all tasks; ``None`` where those of one are not known."""
        known = [updates for updates in self.updates or [None] if updates is not None]
        return sum(known) if len(known) == len(self.metric) else None

    @property
    def all_seconds(self) -> float | None:
        """The time of all phases, with that of fine-tuned models that others made; ``None`` where that is not known."""
        known = [seconds for seconds in self.seconds.values() if seconds is not None]
        return sum(known) if len(known) == len(self.seconds) else None

    @property
    def outcome(self) -> Json:
        """Its content without what differs from machine to machine."""
        return {key: value for key, value in self.content.items() if key not in _OF_THE_MACHINE}


#: What of a run's content says nothing of its outcome.
_OF_THE_MACHINE = ("seconds", "seconds_per_task", "made")


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


#: Floors that are fitted to training rows: their names in results.json, and in tables.
LEARNED_FLOORS = {
    "bag_of_words": "a bag of words",
    "nearest_row": "the most similar training row",
    "linear_probe": "a linear probe",
    "mean_probe": "a linear probe at the mean",
}


#: What tables call the floor of a language model that answers before training.
UNTRAINED = "the model before training"


class RunFloors(Record):
    """Scores that take no fine-tuning, per task; those that are fitted to training rows by seed."""

    constant: Scores
    bag_of_words: dict[str, ScoresOrNone] = Field(default_factory=dict)
    nearest_row: dict[str, ScoresOrNone] = Field(default_factory=dict)
    linear_probe: dict[str, ScoresOrNone] = Field(default_factory=dict)
    mean_probe: dict[str, ScoresOrNone] = Field(default_factory=dict)

    def by_place(self) -> dict[str, Sequence[float | None]]:
        """Return all of them by their places in the file."""
        learned: dict[str, dict[str, Any]] = {name: getattr(self, name) for name in LEARNED_FLOORS}
        return {
            "constant": self.constant,
            **{f"{name}.{seed}": scores for name, of_seeds in learned.items() for seed, scores in of_seeds.items()},
        }


class _OfTasks(Record):
    tasks: Annotated[list[str], checked_by(lambda v, _: 0 < len(v) == len(set(v)), "a list of different task names")]


class RunResults(_OfTasks):
    """What ``forgetfree run`` writes. To check it takes its ``tasks`` and their number ``n``."""

    stream: str
    model: Json
    data: Json
    floors: RunFloors | None = None
    runs: list[Run]
    unfinished: list[Unfinished] = Field(default_factory=list)
    failed: list[Failed] = Field(default_factory=list)

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
                values = {run.metric[i]: scores[i], "ece": eces[i]} if scores[i] is not None else {}
                values |= {name: matrix[after][i] for name, matrix in run.more_scores.items()} if values else {}
                if after == len(self.tasks):
                    values |= {"agreement": run.agreement[i]} if run.agreement else {}
                    if run.union:
                        values |= {f"{UNION}accuracy": run.union.accuracy[i], f"{UNION}ece": run.union.ece[i]}
                for metric, value in values.items():
                    if value is not None:
                        yield Score(of, task, after, metric, value, self.test_rows.get(task, 0))

    def check_sense(self) -> None:
        """Raise ``ValueError`` where a number cannot be.

        That is where an option, a score or a floor is out of its bounds, or where an average, forgetting or a transfer does not
        follow from the matrices of its run.
        """
        counts = self.test_rows
        right = isinstance(counts, dict) and all(type(count) is int and count >= 0 for count in counts.values())
        check("data.test_rows", counts, right, "a number of rows for each task")
        for number, run in enumerate(self.runs):
            _check_options(f"runs[{number}].options", run.strategy, run.options)
            self._check_summary(f"runs[{number}]", run)
            if run.union is not None:
                _check_bounds(f"runs[{number}].union.accuracy", run.union.accuracy, run.metric)
            self._check_right_rows(f"runs[{number}].right_rows", run)
            _check_bounds(f"runs[{number}].readout_again", run.readout_again or [None] * len(self.tasks), run.metric)
        if not self.runs or self.floors is None:  # without a run, no metric is known
            return
        for place, floors in self.floors.by_place().items():
            _check_bounds(f"floors.{place}", floors, self.runs[0].metric)

    def _check_right_rows(self, place: str, run: Run) -> None:
        for task, text, score in zip(
            self.tasks, run.right_rows or [None] * len(self.tasks), run.matrix[-1], strict=True
        ):
            if text is not None:
                try:
                    share = float(unpack_rows(text, self.data.get("test_rows", {}).get(task, 0)).mean())
                except ValueError as error:
                    raise ValueError(f"{place}: {error}") from error
                agrees = score is not None and abs(share - score) <= _CLOSE
                check(f"{place} of {task}", share, agrees, f"a share of right rows of {score}, which is the score")

    def _check_summary(self, place: str, run: Run) -> None:
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


# -- The bounds of a strategy's options, beyond which no run could have gone ------------------------------

_Above0 = Annotated[float, Field(gt=0)]
_Rate = Annotated[float, Field(gt=0, le=1e38)]
_Fraction = Annotated[float, Field(gt=0, le=1)]
_Count = Annotated[int, Field(ge=1)]
#: A number, or the name of a rule.
_Steps = Annotated[int, Field(ge=1), BeforeValidator(lambda steps: 1 if steps in get_args(StepsRule) else steps)]
_Rank = Annotated[int, Field(ge=1, le=65536)]
_Number = Annotated[int, Field(ge=0)]


class _Options(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")


def _options(name: str, *bounds: tuple[Any, str], base: type[_Options] = _Options) -> type[_Options]:
    """Return what checks options, each of which may be none: bounds, and the names of the options that have them."""
    fields: dict[str, Any] = {each: (kind | None, None) for kind, names in bounds for each in names.split()}
    return create_model(name, __base__=base, **fields)


#: The options that every strategy has.
RunOptions = _options(
    "RunOptions",
    (_Rate, "learning_rate readout_learning_rate"),
    (Share, "momentum warmup"),
    (Amount, "weight_decay l1"),
    (_Count, "batch_size accumulation evaluation_batch_size"),
    (_Steps, "steps"),
    (_Above0, "max_gradient_norm"),
)
#: Those that only some of our strategies have, as their ``Options`` declare them. They stand here again since a report is made
#: without torch, which strategies import; a test compares them. A plug-in's strategy may have other bounds under such a name.
OwnOptions = _options(
    "OwnOptions",
    (Amount, "alpha beta ewc_lambda lambda_reg memory_strength orthogonality si_lambda"),
    (_Fraction, "base_fraction capacity density keep sparsity"),
    (
        _Count,
        "batch_size_mem choice_rows delta_t fisher_rows gradient_rows importance_rows lda_rows "
        "lora_alpha mask_batch_size mask_evaluations mask_every mask_micro_batch_size mem_size "
        "patterns_per_experience sample_size validation_rows",
    ),
    (Share, "decay_factor ewc_alpha lora_dropout"),
    (
        _Above0,
        "eps lora_learning_rate mask_learning_rate region_learning_rate region_rate_factor "
        "steps_factor temperature weight",
    ),
    (_Number, "lda_layer mask_steps passes readout_steps region_steps"),
    (_Rank, "rank"),
)
#: ``alpha`` is a share in MAS, and a weight elsewhere.
MASOptions = _options("MASOptions", (Share, "alpha"), base=OwnOptions)


def _check_options(place: str, strategy: str, options: Any) -> None:
    """Raise ``ValueError`` where an option is out of its bounds; of a plug-in's strategy, one that every strategy has.

    Args:
        place: of the options, for the message.
        strategy: whose they are.
        options: by name.
    """
    kinds: list[type[_Options]] = [RunOptions]
    if strategy in registry.STRATEGIES:
        kinds.append(MASOptions if strategy == "mas" else OwnOptions)
    for kind in kinds:
        try:
            checked(kind, options)
        except ValueError as error:
            raise ValueError(f"{place}.{error}") from error
