"""Results as files: a run as results.json, or as one CSV file that says the same in fewer lines.

The CSV file begins with lines ``# {…}`` of JSON: what is no score, of a run one further line for each strategy and seed. Below
stands a row for all that was measured of one thing: `Score` with a column for each metric.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from forgetfree import registry
from forgetfree.errors import ReportError, UnknownNameError, first_line
from forgetfree.files import StrPath
from forgetfree.json_file import is_number, parse_json, read_bounded, read_json, unsigned
from forgetfree.results.records import check_version
from forgetfree.results.run_results import UNION, RunResults
from forgetfree.results.scores import Score, rows_of_scores, scores_of_rows, typed
from forgetfree.results.unit_folder import MADE_OF, SECONDS_PER_TASK, check_made_of, is_own

_Results = TypeVar("_Results")
Json = dict[str, Any]
#: Metrics with a place of their own in an entry of ``runs``.
_RUN = ("ece", "agreement", f"{UNION}accuracy", f"{UNION}ece")


def task_metrics() -> tuple[str, ...]:
    """Return what a task may be scored by."""
    return tuple(registry.metrics())


def find_results(path: StrPath) -> Path:
    """Return the file of results: the path, or the results.json in it."""
    path = Path(path)
    return path / "results.json" if path.is_dir() else path


def read_stored(path: Path, read: Callable[[Json], _Results], remedy: str) -> _Results:
    """Read results from JSON or CSV.

    Args:
        path: a file.
        read: makes a record of the content, or raises ``ValueError`` where it is not what it must be.
        remedy: the last sentence of an error.

    Raises:
        ReportError: the file is missing or damaged; the message names file and place.
    """
    if path.suffix != ".csv":
        signed = read_json(path, ReportError, remedy)
        content = (
            {key: each for key, each in signed.items() if key not in _SEALS} if isinstance(signed, dict) else signed
        )
        try:
            results = read(content)
        except ValueError as error:
            raise ReportError(f"{path}: {first_line(error)}. {remedy}") from error
        check_made_of(path.parent, unsigned(signed, path, ReportError).get(MADE_OF, {}))
        return results
    try:
        return read(of_csv(read_bounded(path)))
    except UnknownNameError as error:
        raise ReportError(f"{path}: {error}") from error
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {first_line(error)}. {remedy}") from error
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        missing = f"a row or a setting lacks {error}" if isinstance(error, KeyError) else first_line(error)
        raise ReportError(f"{path}: {missing}. {remedy}") from error


#: What results.json says of itself.
_SEALS = ("checksum", MADE_OF)


def load_run_results(path: StrPath) -> RunResults:
    """Read and check the results of a run.

    Args:
        path: a run directory, the results.json in it, or a CSV file that says the same.

    Raises:
        ReportError: the file is missing, not JSON, or not of this schema; the message names file and key.
    """
    file = find_results(path)
    if not file.exists():
        raise ReportError(
            f"{file} does not exist. A run writes it when its first strategy is done: give the directory of "
            "such a run, or finish this one with `forgetfree run ... --resume`."
        )

    def read(content: Any) -> RunResults:
        results = RunResults.of(content, str(path))
        results.check_sense()
        return results

    results = read_stored(file, read, "Restore it from a copy, or run again with another --out.")
    return with_timings(results, file.parent)


def with_timings(results: RunResults, directory: Path) -> RunResults:
    """Return the results, with ``seconds_per_task`` of each run where a file beside them holds it."""
    runs = []
    for run in results.runs:
        path = directory / run.strategy / f"seed-{run.seed}" / SECONDS_PER_TASK
        try:
            seconds = read_json(path, ReportError, "")
        except ReportError:  # what can be said without it is said
            seconds = None
        whole = isinstance(seconds, list) and len(seconds) == len(results.tasks)
        right = whole and all(is_number(each, 0.0) for each in seconds) and is_own(path)
        runs.append(run.with_facts(seconds_per_task=seconds) if right else run)
    return results.with_runs(runs)


# -- Scores of a run -------------------------------------------------------------------------------------


def run_of_scores(scores: Iterable[Score], tasks: Sequence[str], metrics: Mapping[str, str] | None = None) -> Json:
    """Return ``metric``, ``matrix``, ``ece``, ``more_scores``, ``agreement`` and ``union`` of an entry of ``runs`` from scores.

    The matrices have a row before training and one after each task that was learned, and a column for each task; ``None``
    where a task was not evaluated before it was learned. Of a task without probabilities, all of ``ece`` is.

    Args:
        scores: of the run.
        tasks: their names, in order.
        metrics: of the tasks, where they are known: a kind may tell other metrics beside. Else the first that has a score.

    Raises:
        KeyError: a score of a learned task is missing.
    """
    values: dict[tuple[str, int, str], Any] = {(s.metric, s.after, s.task): s.value for s in scores}
    last, measured = max((after for _, after, _ in values), default=-1), {metric for metric, *_ in values}
    scored = {(metric, task) for metric, _, task in values}
    known, of_task = task_metrics(), metrics or {}
    metric = [of_task.get(task) or next((name for name in known if (name, task) in scored), known[0]) for task in tasks]

    def matrix(names: Sequence[str]) -> list[list[float | None]]:
        places = [(name, task, place) for place, (name, task) in enumerate(zip(names, tasks, strict=True))]
        return [
            [values[name, i, task] if place < i else values.get((name, i, task)) for name, task, place in places]
            for i in range(last + 1)
        ]

    ece = ["ece" if ("ece", task) in scored else "" for task in tasks]  # answers may have no probabilities
    values |= {("", i, task): None for task in tasks for i in range(last + 1)}

    run: Json = {"metric": metric, "matrix": matrix(metric), "ece": matrix(ece)}
    own = {*zip(metric, tasks, strict=True)}
    more = dict.fromkeys(name for name, _, task in values if name and (name, task) not in own and name not in _RUN)
    if more:
        run["more_scores"] = {
            name: matrix([name if (name, task) in scored and (name, task) not in own else "" for task in tasks])
            for name in more
        }
    if "agreement" in measured:
        run["agreement"] = [values["agreement", last, task] for task in tasks]
    if f"{UNION}ece" in measured:
        run["union"] = {name: [values[UNION + name, last, task] for task in tasks] for name in ("accuracy", "ece")}
    return run


# -- One CSV file ----------------------------------------------------------------------------------------


def to_csv(results: RunResults) -> str:
    """Return results as the text of a CSV file."""
    rows = rows_of_scores(results.scores())
    scored = ("metric", "matrix", "ece", "more_scores", "agreement", "union")
    header = {key: value for key, value in results.content.items() if key != "runs"}
    of_runs = [
        {key: value for key, value in run.content.items() if key not in scored}
        | ({"more_scores": list(run.more_scores)} if run.more_scores else {})
        for run in results.runs
    ]
    return rows_to_csv(rows, [header, *of_runs])


def of_csv(text: str) -> Json:
    """Return results from the text of a CSV file: undoes `to_csv`.

    Raises:
        ValueError, KeyError, TypeError: it is no such text.
        UnknownNameError: it has scores by a metric that no installed package has.
    """
    (results, *facts), rows = rows_of_csv(text)
    check_version(results)
    more = {name for fact in facts for name in fact.get("more_scores", ())}
    scores = scores_of_rows(rows, {*task_metrics(), *_RUN, *more})
    for column in dict.fromkeys(key for score in scores for key in score.of if key not in ("strategy", "seed")):
        registry.metric(column)  # refused: the package that has it is not installed
    results["runs"] = [
        {key: value for key, value in fact.items() if key != "more_scores"}
        | run_of_scores(
            (score for score in scores if score.of == {key: fact[key] for key in ("strategy", "seed")}),
            results["tasks"],
        )
        for fact in facts
    ]
    return results


def rows_to_csv(rows: Sequence[Mapping[str, Any]], header: Sequence[Json]) -> str:
    """Return rows as a CSV table below its header; a list has a column for each of its values."""
    flat = [{name: each for key, value in row.items() for name, each in _columns(key, value)} for row in rows]
    text = io.StringIO()
    for line in header:
        text.write(f"# {json.dumps(line, allow_nan=False)}\n")
    table = csv.DictWriter(text, list(dict.fromkeys(name for row in flat for name in row)), lineterminator="\n")
    table.writeheader()
    table.writerows(flat)
    return text.getvalue()


def _columns(key: str, value: Any) -> list[tuple[str, Any]]:
    return [(f"{key}[{i}]", each) for i, each in enumerate(value)] if isinstance(value, list) else [(key, value)]


def rows_of_csv(text: str) -> tuple[list[Json], list[Json]]:
    """Return the header and the rows of what `rows_to_csv` wrote; a row lacks the columns in which it has nothing.

    Raises:
        ValueError: it is no such text.
    """
    header = []
    while text.startswith("# "):
        line, _, text = text.removeprefix("# ").partition("\n")
        header.append(parse_json(line))
    if not header or not all(isinstance(each, dict) for each in header):
        raise ValueError("it must begin with a line `# {…}` that says what was measured")
    table = csv.DictReader(io.StringIO(text, newline=""), strict=True, restkey="", restval="")
    rows = list(table)
    columns = {name: typed([row[name] for row in rows]) for name in table.fieldnames or []}
    filled: list[Json] = [{} for _ in rows]
    for name, cells in columns.items():
        key, _, place = name.partition("[")
        for row, cell in zip(filled, cells, strict=True):
            if place and cell is not None:
                row.setdefault(key, []).append(cell)
            elif cell is not None:
                row[key] = cell
    return header, filled
