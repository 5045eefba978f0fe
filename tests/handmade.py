"""Handmade results of runs: two tasks, and the scores of a strategy on them at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from forgetfree.results.report.run_report import to_csv
from forgetfree.results.run_folder import Score
from forgetfree.results.runs import RunRecord, frame_of, whole_run
from forgetfree.results.table import Results

Json = dict[str, Any]
TASKS = ["qnli", "mrpc"]
#: Further scores of `run_of` by task, beside the matrices.
BY_TASK = ("agreement", "updates", "union_accuracy", "union_ece")


def run_of(strategy: str, seed: int, last: list[float], **more: Any) -> Json:
    """Return a run with 0.5 on both tasks before training, 0.8 on qnli after qnli, and ``last`` at the end."""
    return {
        "strategy": strategy,
        "seed": seed,
        "metric": ["accuracy", "f1"],
        "matrix": [[0.5, 0.5], [0.8, 0.5], last],
        "ece": [[0.2, 0.2], [0.2, 0.2], [0.1, 0.3]],
        "ledger": None,
        "seconds": {"fine_tune": 1.5, "evaluate": 0.25},
        **more,
    }


def results_of(*runs: Json, **more: Any) -> Json:
    return {
        "stream": "qnli-mrpc",
        "tasks": TASKS,
        "model": {"name": "minilm", "fingerprint": "m1", "readout": "prompt"},
        "data": {"fingerprints": {"qnli": "q1", "mrpc": "p1"}, "shots": 16},
        "runs": list(runs),
        **more,
    }


def scores_of(run: Json, tasks: Sequence[str], rows: Json) -> Iterator[Score]:
    """Yield the scores of a run, from its matrices and its further scores by task."""
    unit = run["strategy"], run["seed"]
    matrices = {"": run["matrix"], "ece": run["ece"], **run.get("more_scores", {})}
    for name, matrix in matrices.items():
        for after, row in enumerate(matrix):
            for i, task in enumerate(tasks):
                if row[i] is not None:
                    yield Score(*unit, task, after, name or run["metric"][i], row[i], rows.get(task, 0))
    for name in BY_TASK:
        for task, value in zip(tasks, run.get(name) or [], strict=False):
            if value is not None:
                yield Score(*unit, task, len(tasks), name, value, rows.get(task, 0))


def record_of(results: Json) -> RunRecord:
    """Return the record of results; ``source`` names the file that they were read from."""
    about = {key: value for key, value in results.items() if key not in ("runs", "source")}
    tasks, rows = results["tasks"], results["data"].get("test_rows", {})
    metric = results["runs"][0]["metric"] if results["runs"] else ["accuracy"] * len(tasks)
    scores = [score for run in results["runs"] for score in scores_of(run, tasks, rows)]
    apart = {"metric", "matrix", "ece", "more_scores", *BY_TASK}
    units = [{key: value for key, value in run.items() if key not in apart} for run in results["runs"]]
    about["metric"] = dict(zip(tasks, metric, strict=True))
    return whole_run(about, frame_of(scores), units, results.get("source", ""))


def together(results: Sequence[Json]) -> Results:
    return Results([record_of(each) for each in results])


def write(path: Path, results: Json) -> Path:
    """Write results as one CSV file."""
    path = path.with_suffix(".csv")
    path.write_text(to_csv(together([results])), encoding="utf-8")
    return path
