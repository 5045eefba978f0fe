"""Results of runs made by hand: two tasks, and what a strategy knew of them at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forgetfree.results.comparison import Comparison, merge
from forgetfree.results.learning_matrix import summarize
from forgetfree.results.run_results import RunResults

Json = dict[str, Any]
TASKS = ["qnli", "mrpc"]


def run_of(strategy: str, seed: int, last: list[float], **more: Any) -> Json:
    """A run that knew 0.5 of both tasks before, 0.8 of qnli after it, and `last` at the end."""
    matrix = [[0.5, 0.5], [0.8, 0.5], last]
    ece = [[0.2, 0.2], [0.2, 0.2], [0.1, 0.3]]
    return {
        "strategy": strategy,
        "seed": seed,
        "metric": ["accuracy", "f1"],
        "matrix": matrix,
        "ece": ece,
        "summary": summarize(matrix, ece),
        "ledger": None,
        "seconds": {"fine_tune": 1.5, "evaluate": 0.25},
        **more,
    }


def ledger_of(region: list[int], owned: list[int], overlap: list[list[float]]) -> Json:
    return {"tasks": TASKS, "region_size": region, "owned_size": owned, "bytes": 12000, "overlap": overlap}


def results_of(*runs: Json, **more: Any) -> Json:
    return {
        "schema": 1,
        "stream": "qnli-mrpc",
        "tasks": TASKS,
        "model": {"name": "minilm", "fingerprint": "m1"},
        "data": {"fingerprints": {"qnli": "q1", "mrpc": "p1"}, "shots": 16},
        "readout": "prompt",
        "runs": list(runs),
        **more,
    }


def record_of(results: Json) -> RunResults:
    """The record of results, with where they were read under ``source``."""
    return RunResults.of(results, results.get("source", ""))


def together(results: Sequence[Json]) -> Comparison:
    return merge([record_of(each) for each in results])


def write(folder: Path, results: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return folder
