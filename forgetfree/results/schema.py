"""What results.json must hold, for a run, a graft and an experiment, so that a report can be made of it.

Keys that no report reads are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

from forgetfree import registry
from forgetfree.display import brief
from forgetfree.errors import MetricError, UsageError, first_line
from forgetfree.json_file import check, checked

#: Of every results.json.
SCHEMA = 1
#: The strategy that intransigence is measured against.
REFERENCE = "fine-tune"
Json = dict[str, Any]
#: What a validator compares with: the tasks of a run, the places of a graft's space.
Context = dict[str, Any]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


def _that(right: Callable[[Any, Context], bool], expected: str) -> AfterValidator:
    """Check a value by what is known of the results; ``{n}`` and ``{tasks}`` stand for it in what is expected."""

    def check_value(value: Any, info: ValidationInfo) -> Any:
        context = info.context or {}
        if not right(value, context):
            raise ValueError(expected.format(**context))
        return value

    return AfterValidator(check_value)


Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0)]
Shares = Annotated[list[Share], _that(lambda v, c: len(v) == c["n"], "{n} numbers in [0, 1]")]
Amounts = Annotated[list[Amount], _that(lambda v, c: len(v) == c["n"], "{n} numbers of at least 0")]
ScoresOrNone = Annotated[list[float | None], _that(lambda v, c: len(v) == c["n"], "{n} numbers, or null")]
ByTask = Annotated[list[Amount | None], _that(lambda v, c: len(v) == c["n"], "{n} numbers of at least 0, or null")]
#: By tasks: whether numbers are within the bounds of their metric, see `_check_summary`.
Scores = Annotated[list[float], _that(lambda v, c: len(v) == c["n"], "{n} numbers")]


def _is_matrix(rows: Sequence[Sequence[float | None]], context: Context) -> bool:
    return (
        len(rows) == context["n"] + 1
        and all(len(row) == context["n"] for row in rows)
        and all(None not in row[:learned] for learned, row in enumerate(rows))
        and len({score is None for learned, row in enumerate(rows) for score in row[learned:]}) == 1
    )


_MATRIX = (
    "a row before training and one after each task, each of {n} numbers%s; null for all tasks that are not learned yet, or for "
    "none"
)
Matrix = Annotated[list[list[float | None]], _that(_is_matrix, _MATRIX % "")]
MatrixOfShares = Annotated[list[list[Share | None]], _that(_is_matrix, _MATRIX % " in [0, 1]")]
Overlap = Annotated[
    list[list[Amount]],
    _that(lambda v, c: len(v) == c["n"] and all(len(row) == c["n"] for row in v), "{n} rows of {n} numbers"),
]


_Above0 = Annotated[float, Field(gt=0)]
_Rate = Annotated[float, Field(gt=0, le=1e38)]
_Fraction = Annotated[float, Field(gt=0, le=1)]
_Count = Annotated[int, Field(ge=1)]
_Number = Annotated[int, Field(ge=0)]
#: How far a number of the summary may lie from what follows from the matrix.
_CLOSE = 1e-6


# -- A run -----------------------------------------------------------------------------------------------


class _Summary(_Part):
    average: float | None
    forgetting: float | None
    bwt: float | None
    fwt: float | None
    intransigence: float | None
    ece: float | None


class _Place(_Part):
    layer: str
    kind: str
    entries: Annotated[int, Field(ge=1)]
    owned: Amounts


class _Ledger(_Part):
    tasks: Annotated[list[str], _that(lambda v, c: v == c["tasks"], "the tasks of the stream, {tasks}")]
    region_size: Amounts
    owned_size: Amounts
    bytes: Annotated[int, Field(ge=0)]
    overlap: Overlap
    places: list[_Place] | None = None


class _Union(_Part):
    accuracy: Scores
    ece: Shares


class RunOptions(_Part):
    """The bounds of the options that every strategy has."""

    model_config = ConfigDict(extra="allow")

    learning_rate: _Rate | None = None
    readout_learning_rate: _Rate | None = None
    momentum: Share | None = None
    weight_decay: Amount | None = None
    l1: Amount | None = None
    warmup: Share | None = None
    batch_size: _Count | None = None
    accumulation: _Count | None = None
    parts: _Count | None = None
    steps: _Count | None = None
    max_gradient_norm: _Above0 | None = None
    evaluation_batch_size: _Count | None = None


class OwnOptions(_Part):
    """The bounds of the options that only some of our strategies have, as their ``Options`` declare them.

    They stand here again since a report is made without torch, which strategies import; a test compares them. A plug-in's
    strategy may have an option of the same name with other bounds.
    """

    model_config = ConfigDict(extra="allow")

    alpha: Amount | None = None
    base_fraction: _Fraction | None = None
    batch_size_mem: _Count | None = None
    beta: Amount | None = None
    capacity: _Fraction | None = None
    decay_factor: Share | None = None
    delta_t: _Count | None = None
    density: _Fraction | None = None
    eps: _Above0 | None = None
    ewc_alpha: Share | None = None
    ewc_lambda: Amount | None = None
    fisher_rows: _Count | None = None
    importance_rows: _Count | None = None
    keep: _Fraction | None = None
    lambda_reg: Amount | None = None
    largest_scale: Annotated[float, Field(ge=1)] | None = None
    lda_layer: _Number | None = None
    lda_rows: _Count | None = None
    lora_alpha: _Count | None = None
    lora_dropout: Share | None = None
    lora_learning_rate: _Above0 | None = None
    mask_batch_size: _Count | None = None
    mask_evaluations: _Count | None = None
    mask_every: _Count | None = None
    mask_learning_rate: _Above0 | None = None
    mask_micro_batch_size: _Count | None = None
    mask_steps: _Number | None = None
    mem_size: _Count | None = None
    memory_strength: Amount | None = None
    orthogonality: Amount | None = None
    patterns_per_experience: _Count | None = None
    rank: Annotated[int, Field(ge=1, le=65536)] | None = None
    region_learning_rate: _Above0 | None = None
    region_steps: _Number | None = None
    sample_size: _Count | None = None
    si_lambda: Amount | None = None
    sparsity: _Fraction | None = None
    steps_factor: _Above0 | None = None
    temperature: _Above0 | None = None
    validation_rows: _Count | None = None
    weight: _Above0 | None = None


class MASOptions(OwnOptions):
    """``alpha`` is a share in MAS, and a weight elsewhere."""

    alpha: Share | None = None


class _Run(_Part):
    strategy: str
    seed: int
    metric: Annotated[list[str], _that(lambda v, c: len(v) == c["n"], "{n} names of metrics")]
    matrix: Matrix
    ece: MatrixOfShares
    summary: _Summary
    seconds: dict[str, Amount]
    options: RunOptions | None = None
    ledger: _Ledger | None
    kept_bytes: Amounts | None = None
    seconds_per_task: Amounts | None = None
    agreement: Amounts | None = None
    temperature: ByTask | None = None
    ece_scaled: ByTask | None = None
    readout_again: ScoresOrNone | None = None
    union: _Union | None = None
    broken_claims: list[str] = []
    trials: int | None = None
    made: Json = {}


class _Unfinished(_Part):
    strategy: str
    seed: int
    matrix: list[Any]


class _Failed(_Part):
    strategy: str
    seed: int
    error: str


class _RunFloors(_Part):
    constant: Scores
    bag_of_words: dict[str, ScoresOrNone] = {}
    linear_probe: dict[str, ScoresOrNone] = {}


class _OfTasks(_Part):
    tasks: Annotated[list[str], _that(lambda v, _: 0 < len(v) == len(set(v)), "a list of different task names")]


class RunResults(_OfTasks):
    """What ``forgetfree run`` writes; the context holds its ``tasks`` and their number ``n``."""

    stream: str
    model: Json
    data: Json
    starts: dict[str, str] = {}
    floors: _RunFloors | None = None
    runs: list[_Run]
    unfinished: list[_Unfinished] = []
    failed: list[_Failed] = []


# -- A graft ---------------------------------------------------------------------------------------------


class _Model(_Part):
    name: str
    readout: str


class _GraftData(_Part):
    test_rows: int


class _GraftFloors(_Part):
    constant: float


class _Given(_Part):
    architecture: str
    left_out: list[Any]


class _GraftRow(_Part):
    seed: int
    model: str
    score: float
    ece: Share
    agreement: Share
    sparsity: Amount | None
    entries: Amount | None


class _Space(_Part):
    layers: Annotated[
        dict[str, float], _that(lambda v, c: v.keys() == c["layers"], "a number of entries for each of space.layers")
    ]
    kinds: Annotated[
        dict[str, float], _that(lambda v, c: v.keys() == c["kinds"], "a number of entries for each of space.kinds")
    ]


class _Region(_Space):
    sparsity: Share


class GraftResults(_Part):
    """What ``forgetfree graft`` writes; the context holds the names of its ``layers`` and ``kinds``."""

    task: str
    metric: str
    base: str
    model: _Model
    data: _GraftData
    space: _Space
    fine_tuned: _Given | None = None
    floors: _GraftFloors | None = None
    rows: Annotated[list[_GraftRow], _that(lambda v, _: bool(v), "a list of at least one row")]
    regions: list[_Region]


# -- An experiment ---------------------------------------------------------------------------------------


class _Setting(_Part):
    model: str
    readout: str
    tasks: list[Any]
    shots: list[Any]
    seeds: list[Any]


class _ExperimentRow(_Part):
    task: str
    seed: int


class _Unit(_Part):
    unit: Json
    rows: list[_ExperimentRow]


class ExperimentResults(_Part):
    """What ``forgetfree experiment`` writes; what its rows hold is only the experiment's to check."""

    experiment: str
    preset: str
    model: str
    device: str
    setting: _Setting
    versions: Json
    data: Json
    skipped: Json
    units: list[_Unit]
    seconds: Amount


# -- Checking --------------------------------------------------------------------------------------------


def check_version(results: Any) -> None:
    """Raise ``ValueError`` unless the results are an object of this schema."""
    check("the content", results, isinstance(results, dict), "an object")
    found = results.get("schema")
    if found != SCHEMA or isinstance(found, bool):
        raise ValueError(
            f"schema must be {SCHEMA}, got {brief(found)}: another version of forgetfree wrote it, and can report it"
        )


def check_run(results: Any) -> None:
    """Raise ``ValueError`` unless a report can be made of the results of a run: place, what is expected, what was found."""
    check_version(results)
    tasks = checked(_OfTasks, results).tasks
    checked(RunResults, results, {"tasks": tasks, "n": len(tasks)})
    for number, run in enumerate(results["runs"]):
        _check_own_options(f"runs[{number}].options", run)
        _check_summary(f"runs[{number}].summary", run, results["runs"])
    if results["runs"] and results.get("floors"):
        limits = [registry.metric(name).limits for name in results["runs"][0]["metric"]]
        for place, floors in _floors_of(results["floors"]):
            right = all(
                score is None or low <= score <= high for score, (low, high) in zip(floors, limits, strict=True)
            )
            check(f"floors.{place}", floors, right, f"{len(tasks)} numbers within the bounds of their metrics")


def _floors_of(floors: Json) -> Iterator[tuple[str, list[float | None]]]:
    """Yield the place of each row of floors, and what it holds."""
    yield "constant", floors["constant"]
    for name in ("bag_of_words", "linear_probe"):
        for seed, scores in floors.get(name, {}).items():
            yield f"{name}.{seed}", scores


def _check_own_options(place: str, run: Json) -> None:
    """Raise ``ValueError`` where an option that is a strategy's own is out of its bounds."""
    if run["strategy"] in registry.STRATEGIES:
        try:
            checked(MASOptions if run["strategy"] == "mas" else OwnOptions, run.get("options") or {})
        except ValueError as error:
            raise ValueError(f"{place}.{error}") from error


def _check_summary(place: str, run: Json, runs: Sequence[Json]) -> None:
    """Raise ``ValueError`` where an average, forgetting or a transfer does not follow from the matrices of a run."""
    from forgetfree.results.metrics import summarize

    reference = next((other for other in runs if other["strategy"] == REFERENCE and other["seed"] == run["seed"]), None)
    learned = [row[task] for task, row in enumerate(reference["matrix"][1:])] if reference else None
    try:
        derived, held = summarize(run["matrix"], run["ece"], learned, run["metric"]), run["summary"]
    except (MetricError, UsageError) as error:
        raise ValueError(f"{place.removesuffix('.summary')}: {first_line(error)}") from error
    for key, expected in derived.items():
        if key == "intransigence" and None in (expected, held[key]):  # fine-tune may stand in another file
            continue
        got = held[key]
        right = got == expected or not (got is None or expected is None or abs(got - expected) > _CLOSE)
        check(f"{place}.{key}", got, right, f"{expected}, which follows from the matrices")


def check_graft(results: Any) -> None:
    """Raise ``ValueError`` unless a report can be made of the results of a graft, as `check_run` does."""
    check_version(results)
    space = results.get("space")
    places = {name: space.get(name) if isinstance(space, dict) else None for name in ("layers", "kinds")}
    checked(
        GraftResults, results, {name: (held if isinstance(held, dict) else {}).keys() for name, held in places.items()}
    )
    try:
        low, high = registry.metric(results["metric"]).limits
    except UsageError as error:
        raise ValueError(f"metric: {first_line(error)}") from error
    for number, row in enumerate(results["rows"]):
        check(f"rows[{number}].score", row["score"], low <= row["score"] <= high, f"a number in [{low:g}, {high:g}]")


def check_experiment(results: Any) -> None:
    """Raise ``ValueError`` unless they are results of an experiment, as `check_run` does."""
    check_version(results)
    checked(ExperimentResults, results)
    name = results["experiment"]
    check("experiment", name, name in registry.EXPERIMENTS, f"one of {', '.join(sorted(registry.EXPERIMENTS))}")
