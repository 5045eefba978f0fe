"""What results.json must hold, for a run, a graft and an experiment, so that a report can be made of it.

A field's description says what is expected there, and is what a message says. Keys that no report reads are left alone.
"""

from __future__ import annotations

from types import NoneType
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo

from forgetfree.display import brief

Json = dict[str, Any]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


def _shaped(rows: int | str, columns: str) -> AfterValidator:
    """Check that there are as many rows, each of as many values, as the context says under these names."""

    def check(value: list[Any], info: ValidationInfo) -> list[Any]:
        assert info.context is not None
        table = value if isinstance(rows, str) else [value]
        if len(table) != info.context.get(rows, 1) or any(len(row) != info.context[columns] for row in table):
            raise ValueError
        return value

    return AfterValidator(check)


def _all_tasks(value: list[str], info: ValidationInfo) -> list[str]:
    assert info.context is not None
    if value != info.context["tasks"]:
        raise ValueError
    return value


def _distinct(value: list[str]) -> list[str]:
    if not value or len(set(value)) < len(value):
        raise ValueError
    return value


def _same_places(value: dict[str, float], info: ValidationInfo) -> dict[str, float]:
    assert info.context is not None and info.field_name is not None
    if value.keys() != info.context["space"].get(info.field_name, value).keys():
        raise ValueError
    return value


Text = Annotated[str, Field(description="a string")]
Whole = Annotated[int, Field(description="an integer")]
Object = Annotated[Json, Field(description="an object")]
_Share = Annotated[float, Field(ge=0, le=1)]
_Amount = Annotated[float, Field(ge=0)]
Share = Annotated[_Share, Field(description="a number in [0, 1]")]
Seconds = Annotated[_Amount, Field(description="a number of seconds")]
Amount = Annotated[_Amount | None, Field(description="a number of at least 0, or null")]
Shares = Annotated[list[_Share], _shaped(1, "n"), Field(description="{n} numbers in [0, 1]")]
Amounts = Annotated[list[_Amount], _shaped(1, "n"), Field(description="{n} numbers of at least 0")]
Sizes = Annotated[list[_Amount], _shaped(1, "n"), Field(description="{n} sizes")]
Matrix = Annotated[
    list[list[_Share]], _shaped("stages", "n"), Field(description="{stages} rows of {n} numbers in [0, 1]")
]
Overlap = Annotated[list[list[_Amount]], _shaped("n", "n"), Field(description="{n} rows of {n} numbers")]
Places = Annotated[
    dict[str, float], AfterValidator(_same_places), Field(description="a number of entries for each of its places")
]


# -- A run -----------------------------------------------------------------------------------------------

_SUMMARY: Any = Annotated[float | None, Field(description="a number or null")]


class _Summary(_Part):
    average: _SUMMARY
    forgetting: _SUMMARY
    bwt: _SUMMARY
    fwt: _SUMMARY
    intransigence: _SUMMARY
    ece: _SUMMARY


class _Ledger(_Part):
    tasks: Annotated[list[str], AfterValidator(_all_tasks), Field(description="the tasks of the stream, {tasks}")]
    region_size: Sizes
    owned_size: Sizes
    bytes: Annotated[int, Field(ge=0, description="at least 0")]
    overlap: Overlap


class _Union(_Part):
    accuracy: Shares
    ece: Shares


class _Run(_Part):
    strategy: Text
    seed: Whole
    metric: Annotated[list[str], _shaped(1, "n"), Field(description="{n} names of metrics")]
    matrix: Matrix
    ece: Matrix
    summary: Annotated[_Summary, Field(description="an object")]
    seconds: Annotated[dict[str, Seconds], Field(description="an object")]
    options: Annotated[Json | None, Field(description="an object")] = None
    ledger: Annotated[_Ledger | None, Field(description="an object, or null for a strategy that keeps none")]
    kept_bytes: Annotated[Amounts | None, Field(description="{n} numbers of at least 0")] = None
    seconds_per_task: Annotated[Amounts | None, Field(description="{n} numbers of at least 0")] = None
    agreement: Annotated[Amounts | None, Field(description="{n} numbers of at least 0")] = None
    union: _Union | None = None


class _Unfinished(_Part):
    strategy: Text
    seed: Whole
    matrix: Annotated[list[Any], Field(description="a list")]


class _Failed(_Part):
    strategy: Text
    seed: Whole
    error: Text


class _RunFloors(_Part):
    constant: Shares


class RunResults(_Part):
    """What ``forgetfree run`` writes; the context holds ``tasks``, their number ``n``, and ``stages`` = n + 1."""

    stream: Text
    tasks: Annotated[list[str], AfterValidator(_distinct), Field(description="a list of different task names")]
    model: Object
    data: Object
    floors: _RunFloors | None = None
    runs: Annotated[list[_Run], Field(description="a list")]
    unfinished: Annotated[list[_Unfinished], Field(description="a list")] = []
    failed: Annotated[list[_Failed], Field(description="a list")] = []


# -- A graft ---------------------------------------------------------------------------------------------


class _GraftModel(_Part):
    name: Text
    readout: Text


class _GraftData(_Part):
    test_rows: Whole


class _GraftFloors(_Part):
    constant: Share


class _Given(_Part):
    architecture: Text
    left_out: Annotated[list[Any], Field(description="a list")]


class _GraftRow(_Part):
    seed: Whole
    model: Text
    score: Share
    ece: Share
    agreement: Share
    sparsity: Amount
    entries: Amount


class _Space(_Part):
    layers: Places
    kinds: Places


class _Region(_Space):
    sparsity: Annotated[float, Field(ge=0, le=1, description="a share")]


class GraftResults(_Part):
    """What ``forgetfree graft`` writes; the context holds its ``space``."""

    task: Text
    metric: Text
    base: Text
    model: _GraftModel
    data: _GraftData
    space: _Space
    fine_tuned: _Given | None = None
    floors: _GraftFloors | None = None
    rows: Annotated[list[_GraftRow], Field(min_length=1, description="a list of at least one row")]
    regions: Annotated[list[_Region], Field(description="a list")]


# -- An experiment ---------------------------------------------------------------------------------------


class _Setting(_Part):
    model: Text
    readout: Text
    tasks: Annotated[list[Any], Field(description="a list")]
    shots: Annotated[list[Any], Field(description="a list")]
    seeds: Annotated[list[Any], Field(description="a list")]


class _ExperimentRow(_Part):
    seed: Whole


class _Unit(_Part):
    unit: Object
    rows: Annotated[list[_ExperimentRow], Field(description="a list")]


class ExperimentResults(_Part):
    """What ``forgetfree experiment`` writes."""

    experiment: Text
    preset: Text
    model: Text
    device: Text
    setting: _Setting
    versions: Object
    data: Object
    skipped: Object
    units: Annotated[list[_Unit], Field(description="a list")]
    seconds: Seconds


# -- Checking --------------------------------------------------------------------------------------------


def check_run(results: Any) -> None:
    """Check the results of a run.

    Raises:
        ValueError: with the place, what is expected there and what was found.
    """
    check_version(results)
    tasks = results["tasks"] if isinstance(results.get("tasks"), list) else []
    _check(RunResults, results, {"tasks": tasks, "n": len(tasks), "stages": len(tasks) + 1})


def check_graft(results: Any) -> None:
    """Check the results of a graft, as `check_run` does."""
    check_version(results)
    space = results.get("space") if isinstance(results.get("space"), dict) else {}
    _check(GraftResults, results, {"space": {key: each for key, each in space.items() if isinstance(each, dict)}})


def check_experiment(results: Any) -> None:
    """Check the results of an experiment, as `check_run` does; its rows are only the experiment's to check."""
    check_version(results)
    _check(ExperimentResults, results, {})


def check_version(results: Any) -> None:
    """Raise ``ValueError`` unless the results are an object of this schema."""
    if not isinstance(results, dict):
        raise ValueError(f"the content must be an object, got {brief(results)}")
    if results.get("schema") != SCHEMA or isinstance(results["schema"], bool):
        raise ValueError(
            f"schema must be {SCHEMA}, got {brief(results.get('schema'))}: another version of forgetfree wrote it, and can "
            "report it"
        )


#: Of every results.json.
SCHEMA: Literal[1] = 1


def _check(model: type[BaseModel], value: Any, context: Json) -> None:
    try:
        model.model_validate(value, context=context)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
    else:
        return
    place, expected = _expected(model, fault["loc"])
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    expected = expected.format(**context) if "{" in expected else expected
    if fault["type"] == "missing":
        raise ValueError(f"{where} is missing, it must be {expected}")
    for part in place:
        value = value[part]
    raise ValueError(f"{where} must be {expected}, got {brief(value)}")


def _expected(kind: Any, place: tuple[int | str, ...]) -> tuple[tuple[int | str, ...], str]:
    """Find the innermost part of a place that has a description, and that."""
    found: tuple[tuple[int | str, ...], str] = (), "an object"
    for depth, part in enumerate(place, start=1):
        kind = (
            next((each for each in get_args(kind) if each is not NoneType), kind)
            if NoneType in get_args(kind)
            else kind
        )
        while hasattr(kind, "__metadata__"):
            kind = get_args(kind)[0]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields[str(part)]
            kind, description = field.annotation, field.description
        else:
            kind = get_args(kind)[-1]
            told = [each.description for each in getattr(kind, "__metadata__", ()) if hasattr(each, "description")]
            description = next(filter(None, told), None)
        if description is None and isinstance(kind, type) and issubclass(kind, BaseModel):
            description = "an object"
        if description:
            found = place[:depth], description
    return found
