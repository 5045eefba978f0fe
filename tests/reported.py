"""A handmade run directory with everything that its page shows: answers, losses, ledgers, a configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forgetfree.errors import RunError
from forgetfree.jobs.config import RunConfig
from forgetfree.jobs.run_directory import Unit
from forgetfree.results.answers import LabelAnswers
from forgetfree.results.run_folder import (
    HISTORY,
    OUTCOME,
    PREDICTIONS,
    RECORD,
    SCORES_FILE,
    Score,
    read_record,
    write_scores,
)
from forgetfree.tensor_file import TensorFile

Json = dict[str, Any]
#: Labels of the tasks; each task has the first two to four.
LABELS = ["no", "yes", "maybe", "never"]
ROWS = 120


def answers(score: float, truth: Any, rng: np.random.Generator) -> LabelAnswers:
    """Return answers to rows with these labels; about the share ``score`` of them is right."""
    logits = rng.normal(size=(ROWS, int(truth.max()) + 1)).astype(np.float32)
    right = rng.random(ROWS) < score
    logits[np.arange(ROWS), truth] = np.where(right, logits.max(1) + 1, logits.min(1) - 1)
    return LabelAnswers(logits, truth)


def write_answers(path: Path, arrays: Json) -> None:
    """Write the file of a unit's answers."""
    TensorFile(RunError, "").write(path, {name: torch.tensor(array) for name, array in arrays.items()})


def make_run(
    out: Path, tasks: Sequence[str], loss: dict[str, float], seeds: Sequence[int] = (0, 1), failed: Sequence[Json] = ()
) -> Path:
    """Write a run in which each later task costs earlier tasks ``loss`` of their score, by strategy, on the same rows."""
    n, units, floors = len(tasks), dict[str, Json](), dict[str, float]()
    truth = {task: np.random.default_rng(i).integers(2 + i % 3, size=ROWS) for i, task in enumerate(tasks)}
    for number, (strategy, lost) in enumerate(loss.items()):
        for seed in seeds:
            key, rng = {"strategy": strategy, "seed": seed}, np.random.default_rng([number, seed])
            unit = Unit(key, out / strategy / f"seed-{seed}")
            unit.directory.mkdir(parents=True)
            units[f"{strategy}/seed-{seed}"] = key
            matrix = 0.5 + 0.03 * rng.random((n + 1, n))
            for task in range(n):
                after = np.arange(n - task)
                matrix[task + 1 :, task] = np.maximum(0.5, 0.9 - 0.1 * rng.random() - lost * after)
            found = {task: answers(matrix[-1, i], truth[task], rng) for i, task in enumerate(tasks)}
            ece = 0.3 * rng.random((n + 1, n))
            matrix[-1] = [each.score("accuracy") for each in found.values()]
            ece[-1] = [each.ece for each in found.values()]
            floors = {task: each.constant_score("accuracy") for task, each in found.items()}
            if not lost:  # no loss: equal to the bit
                for task in range(n):
                    matrix[task + 1 :, task], ece[task + 1 :, task] = matrix[-1, task], ece[-1, task]
            save(unit.directory, matrix, ece, found)
            (unit.directory / HISTORY).touch()
            size = 9000 if not lost else 40_000_000
            details = {
                "ledger": None if lost else {"composition": "parents", "bytes": 9000 * n},
                "kept_bytes": [size * (i + 1) if not lost else size for i in range(n)],
                "seconds": {"train": 20.0 * (number + 1) + rng.random(), "evaluate": 3.0},
            }
            unit.end({}, details)
    for each in failed:
        unit = Unit({key: each[key] for key in ("strategy", "seed")}, out / each["strategy"] / f"seed-{each['seed']}")
        unit.directory.mkdir(parents=True)
        units[f"{each['strategy']}/seed-{each['seed']}"] = dict(unit.key)
        unit.end({}, {}, each["error"])
    stream = ",".join(tasks)
    asked = {
        **RunConfig(stream=stream, strategy=tuple(loss), data="demo", shots=8, seed=tuple(seeds)).section(),
        "set": {"steps": 20, "precision": "bf16", "grafting-continual.final_union": False},
    }
    definitions = [
        {
            **{"name": task, "kind": "single", "labels": LABELS[: 2 + i % 3]},
            **{"label_words": [], "template": "", "metric": "accuracy"},
        }
        for i, task in enumerate(tasks)
    ]
    model = {"name": "minilm", "readout": "linear"}
    about = {
        **{"stream": stream, "tasks": list(tasks), "scenario": "task", "evaluated_on": "test", "model": model},
        "floors": {"constant": [floors[task] for task in tasks]},
        "data": {"shots": 8, "steps": 20, "fingerprints": {}, "test_rows": dict.fromkeys(tasks, ROWS)},
    }
    config = {
        **{"schema": 1, "run": asked, "versions": {"forgetfree": "0.3.0"}, "machine": {"device": "cpu", "threads": 1}},
        **{"model": model, "tasks": definitions, "data": {}, "about": about, "units": units},
    }
    (out / "config.json").write_text(json.dumps(config))
    return out


def save(folder: Path, matrix: Any, ece: Any, found: dict[str, LabelAnswers], rows: int = ROWS) -> None:
    """Write scores and answers of a unit, and update its record if it has one."""
    strategy, seed = folder.parent.name, int(folder.name.removeprefix("seed-"))
    scores = [
        Score(strategy, seed, task, after, metric, float(values[after][i]), rows)
        for after in range(len(matrix))
        for i, task in enumerate(found)
        for metric, values in (("accuracy", matrix), ("ece", ece))
    ]
    write_scores(folder / SCORES_FILE, scores)
    arrays = {f"{task}/logits": each.logits for task, each in found.items()}
    write_answers(folder / PREDICTIONS, arrays | {f"{task}/labels": each.labels for task, each in found.items()})
    if (folder / RECORD).exists():
        outcome = json.loads((folder / OUTCOME).read_text())
        Unit({"strategy": strategy, "seed": seed}, folder).end({}, outcome["details"], floors=outcome["floors"])


def edit(out: Path, strategy: str | None = None, **details: Any) -> None:
    """Change details in the records of one strategy's units, or of all units."""
    for path in sorted(out.glob(f"{strategy or '*'}/seed-*/{RECORD}")):
        record = read_record(path.parent)
        Unit(record["unit"], path.parent).end({}, record["details"] | details, floors=record["floors"])


def edit_about(out: Path, **about: Any) -> None:
    """Change entries of config.json about the whole run."""
    config = json.loads((out / "config.json").read_text())
    config["about"] |= about
    (out / "config.json").write_text(json.dumps(config))
