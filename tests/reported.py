"""A run directory made by hand, with all that its page shows: answers, losses, ledgers, a configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from forgetfree.errors import RunError
from forgetfree.results.answers import LabelAnswers
from forgetfree.results.learning_matrix import summarize
from forgetfree.tensor_file import TensorFile

Json = dict[str, Any]
#: Of the tasks, the first two to four.
LABELS = ["no", "yes", "maybe", "never"]
ROWS, KINDS = 120, ("query weight", "key weight", "value weight", "output bias")


def answers(score: float, labels: int, rng: np.random.Generator) -> LabelAnswers:
    """Answers of which about the share ``score`` is right."""
    truth = rng.integers(labels, size=ROWS)
    logits = rng.normal(size=(ROWS, labels)).astype(np.float32)
    right = rng.random(ROWS) < score
    logits[np.arange(ROWS), truth] = np.where(right, logits.max(1) + 1, logits.min(1) - 1)
    return LabelAnswers(logits, truth)


def write_answers(path: Path, arrays: Json) -> None:
    """Write the file of a unit's answers, with its checksum."""
    TensorFile(RunError, "").write(path, {name: torch.tensor(array) for name, array in arrays.items()})


def make_run(
    out: Path, tasks: Sequence[str], loss: dict[str, float], seeds: Sequence[int] = (0, 1), failed: Sequence[Json] = ()
) -> Path:
    """Write a run in which the score of a task falls by ``loss`` of its strategy with each later task."""
    n, runs, floors = len(tasks), [], [0.0] * len(tasks)
    for number, (strategy, lost) in enumerate(loss.items()):
        for seed in seeds:
            rng = np.random.default_rng([number, seed])
            folder = out / strategy / f"seed-{seed}"
            folder.mkdir(parents=True)
            matrix = 0.5 + 0.03 * rng.random((n + 1, n))
            for task in range(n):
                after = np.arange(n - task)
                matrix[task + 1 :, task] = np.maximum(0.5, 0.9 - 0.1 * rng.random() - lost * after)
            found = {task: answers(matrix[-1, i], 2 + i % 3, rng) for i, task in enumerate(tasks)}
            ece = 0.3 * rng.random((n + 1, n))
            matrix[-1] = [each.score("accuracy") for each in found.values()]
            ece[-1] = [each.ece for each in found.values()]
            floors = [each.constant_score("accuracy") for each in found.values()]
            if not lost:  # not at all, to the bit
                for task in range(n):
                    matrix[task + 1 :, task], ece[task + 1 :, task] = matrix[-1, task], ece[-1, task]
            held = {f"{task}/logits": each.logits for task, each in found.items()}
            write_answers(
                folder / "predictions.safetensors",
                held | {f"{task}/labels": each.labels for task, each in found.items()},
            )
            steps = [
                {"task": task, "phase": phase, "step": step, "loss": 2.0 / step + 0.1 * rng.random(), "seconds": 0.1}
                for task in tasks
                for phase in ("fine_tune", "train")
                for step in range(1, 20)
            ]
            (folder / "history.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
            owned = rng.integers(0, 40, size=(6, len(KINDS), n))
            sizes = owned.sum((0, 1)).tolist()
            overlap = 0.2 * rng.random((n, n)) + 0.8 * np.eye(n)
            ledger = {
                "tasks": list(tasks),
                "composition": "union",
                **{"region_size": [size + 9 for size in sizes], "owned_size": sizes, "bytes": 9000 * n},
                "overlap": overlap.tolist(),
                "places": [
                    {"layer": f"layer {i}", "kind": kind, "entries": 5000, "owned": owned[i, j].tolist()}
                    for i in range(6)
                    for j, kind in enumerate(KINDS)
                ],
            }
            size = 9000 if not lost else 40_000_000
            runs.append(
                {
                    **{"strategy": strategy, "seed": seed, "metric": ["accuracy"] * n},
                    **{"matrix": matrix.tolist(), "ece": ece.tolist(), "summary": summarize(matrix, ece)},
                    **{"options": {}, "ledger": None if lost else ledger},
                    "kept_bytes": [size * (i + 1) if not lost else size for i in range(n)],
                    "seconds": {"train": 20.0 * (number + 1) + rng.random(), "evaluate": 3.0},
                }
            )
    stream = ",".join(tasks)
    asked = {
        **{"stream": stream, "strategy": list(loss), "data": "demo", "model": "minilm", "readout": "auto"},
        **{"shots": 8, "steps": 20, "sparsity": None, "seed": list(seeds), "device": "auto"},
        "set": {"precision": "bf16", "grafting-continual.final_union": False},
    }
    definitions = [
        {
            "name": task,
            "kind": "single",
            "labels": LABELS[: 2 + i % 3],
            "label_words": [],
            "template": "",
            "metric": "accuracy",
        }
        for i, task in enumerate(tasks)
    ]
    model = {"name": "minilm", "readout": "linear"}
    config = {
        **{"schema": 1, "run": asked, "versions": {"forgetfree": "0.3.0"}, "machine": {"device": "cpu", "threads": 1}},
        **{"model": model, "tasks": definitions, "data": {}},
    }
    results = {
        **{"schema": 1, "stream": stream, "tasks": list(tasks), "scenario": "task", "evaluated_on": "test"},
        **{"model": model, "floors": {"constant": floors}, "runs": runs, "unfinished": [], "failed": list(failed)},
        "data": {"shots": 8, "steps": 20, "fingerprints": {}, "test_rows": dict.fromkeys(tasks, ROWS)},
    }
    (out / "config.json").write_text(json.dumps(config))
    (out / "results.json").write_text(json.dumps(results))
    return out


def of_equal_rows(out: Path) -> None:
    """Give all runs of a directory the labels of the first: they were tested on the same rows."""
    files = sorted(out.glob("*/seed-*/predictions.safetensors"))
    first = load_file(files[0])
    results = json.loads((out / "results.json").read_text())
    for file in files:
        held = load_file(file)
        run = next(
            r for r in results["runs"] if (r["strategy"], f"seed-{r['seed']}") == (file.parts[-3], file.parts[-2])
        )
        for number, task in enumerate(results["tasks"]):
            logits, old, new = held[f"{task}/logits"], held[f"{task}/labels"], first[f"{task}/labels"]
            for row in np.flatnonzero(old != new):
                logits[row, [old[row], new[row]]] = logits[row, [new[row], old[row]]]
            held[f"{task}/labels"] = new
            answers = LabelAnswers(logits, new)
            run["matrix"][-1][number], run["ece"][-1][number] = answers.score("accuracy"), answers.ece
        write_answers(file, held)
    (out / "results.json").write_text(json.dumps(results))
