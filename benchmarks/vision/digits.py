"""All strategies on the three classic benchmarks, made from scikit-learn's digits (1,797 images of 8 × 8): no download.

    python -m benchmarks.vision.digits [--seeds 0 1 2] [--steps 150] [--strategies ewc replay …] [--out FILE]

``permuted`` (domain-incremental): 5 tasks of all 10 digits, each with its own order of pixels. ``split-task``
(task-incremental) and ``split-class`` (class-incremental): 5 tasks of 2 digits each, in order. The network is Avalanche's
SimpleMLP with 100 hidden units, with random weights as θ_pre; its weights and the batches depend on the seed.

A fifth of each digit's rows is for testing, another fifth for validation. ``--tune`` chose `CHOSEN` on validation rows, with
another seed and without test rows. Strategies that store rows store 200 in all.

What to expect (van de Ven & Tolias, 2019; Hsu et al., 2018): ``continual-ft`` forgets; if the task is known or the labels are
shared, regularisation and rehearsal forget less; in ``split-class`` regularisation is known to fail (no row ever shows labels
of two tasks side by side) and rehearsal to work. ``joint`` knows all tasks from the start, but it is no upper bound: on
``permuted`` it is below ``der`` at equal updates, because it learns all five tasks in one network, and rehearsal reads 32 rows
per update where ``joint`` reads 16. With 600 steps instead of 150 it reaches 93 %.

Without task inference, training uses all outputs of the network; with it (``router``, ``lda``), the task's own outputs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks.paper.rows import rows_to_csv
from forgetfree import registry
from forgetfree.continual.stream import Stream, benchmark_stream
from forgetfree.errors import TrainingError, UnknownNameError
from forgetfree.files import write_atomically
from forgetfree.options import build
from forgetfree.results import metrics
from forgetfree.results.runs import CONSTANT

STREAMS = ("permuted", "split-task", "split-class")
TASKS = 5

#: Every strategy that needs no linear layer below the head; baselines first, strategies with all data last.
NAMES = (
    *("continual-ft", "replay", "agem", "gem", "gdumb", "der", "ewc", "online-ewc", "si", "mas", "rwalk", "lwf"),
    *("fine-tune", "bitfit", "grafting-continual", "graft-retrain", "packnet", "wsn"),
    *("cumulative", "joint"),
)

#: Options of all strategies: plain SGD, no decay.
COMMON: dict[str, Any] = {"batch_size": 16, "learning_rate": 0.1, "weight_decay": 0.0, "schedule": "constant"}
#: Options that are not tuned, by strategy. Memories hold 200 rows in all.
FIXED: dict[str, dict[str, Any]] = {
    "replay": {"mem_size": 200, "batch_size_mem": 16},
    "der": {"mem_size": 200, "batch_size_mem": 16},
    "gdumb": {"mem_size": 200},
    "agem": {"patterns_per_experience": 40, "sample_size": 40},
    "gem": {"patterns_per_experience": 40},
}
#: The values that ``--tune`` tries, by strategy.
GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "gem": {"memory_strength": (0.0, 0.5)},
    "der": {"alpha": (0.03, 0.1, 0.3)},
    "ewc": {"ewc_lambda": (1, 10, 30, 100, 300)},
    "online-ewc": {"ewc_lambda": (1, 10, 30, 100, 300)},
    "si": {"si_lambda": (1, 10, 100, 1000)},
    "mas": {"lambda_reg": (0.03, 0.1, 0.3, 1)},
    "rwalk": {"ewc_lambda": (0.1, 0.3, 1, 3)},
    "lwf": {"alpha": (0.3, 1, 3)},
    "grafting-continual": {"sparsity": (0.1, 0.2)},
    "graft-retrain": {"sparsity": (0.1, 0.2)},
    "packnet": {"keep": (0.2, 0.5)},
    "wsn": {"capacity": (0.1, 0.3, 0.5)},
}
#: The choices of ``--tune``: strategy, stream, options.
CHOSEN: dict[str, dict[str, dict[str, Any]]] = {
    strategy: dict(zip(STREAMS, ({name: value} for value in values), strict=True))
    for strategy, name, values in (
        # strategy, option, on permuted, split-task, split-class
        ("ewc", "ewc_lambda", (30, 300, 30)),
        ("online-ewc", "ewc_lambda", (30, 300, 30)),
        ("si", "si_lambda", (100, 100, 1000)),
        ("mas", "lambda_reg", (0.3, 0.1, 0.3)),
        ("rwalk", "ewc_lambda", (3, 1, 1)),
        ("lwf", "alpha", (3, 3, 0.3)),
        ("gem", "memory_strength", (0.5, 0.5, 0.5)),
        ("der", "alpha", (0.3, 0.1, 0.3)),
        ("grafting-continual", "sparsity", (0.2, 0.1, 0.2)),
        ("graft-retrain", "sparsity", (0.1, 0.1, 0.2)),
        ("packnet", "keep", (0.2, 0.2, 0.2)),
        ("wsn", "capacity", (0.5, 0.3, 0.3)),
    )
}

#: Methods of task inference, with a line each if the task is withheld, beside the line of the last task's model.
INFERENCE = ("router", "lda")


def rows() -> dict[str, tuple[Tensor, Tensor]]:
    """Return images ``(n, 1, 8, 8)`` in [0, 1] and labels ``(n,)``, as ``train``, ``validation`` and ``test``."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    parts: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    order = np.random.default_rng(0).permutation(len(labels))
    for digit in range(10):
        for position, row in enumerate(row for row in order if labels[row] == digit):
            parts[("test", "validation", "train", "train", "train")[position % 5]].append(int(row))
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels, dtype=torch.int64)
    return {part: (x[chosen], y[chosen]) for part, chosen in parts.items()}


class _Labelled(TensorDataset):
    """Tensors with the ``targets`` that Avalanche's generators read."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y)
        self.targets = y.tolist()


def benchmark(name: str, evaluate_on: str = "test") -> Any:
    """Make one of `STREAMS` with Avalanche's generators; its test stream has the ``test`` or the ``validation`` rows."""
    # Not at the top: forgetfree.continual imports Avalanche in half the time.
    from avalanche.benchmarks import CLScenario, EagerCLStream, dataset_benchmark, nc_benchmark

    labelled = rows()
    if name == "permuted":
        draw = np.random.default_rng(1)
        orders = [np.arange(64), *(draw.permutation(64) for _ in range(TASKS - 1))]

        def permuted(part: str) -> list[_Labelled]:
            x, y = labelled[part]
            return [_Labelled(x.flatten(1)[:, order].reshape(x.shape), y) for order in orders]

        return dataset_benchmark(
            permuted("train"), permuted(evaluate_on), other_streams_datasets={"valid": permuted("validation")}
        )

    def split(part: str) -> Any:
        task = name == "split-task"
        return nc_benchmark(
            _Labelled(*labelled["train"]),
            _Labelled(*labelled[part]),
            n_experiences=TASKS,
            task_labels=task,
            shuffle=False,
            class_ids_from_zero_in_each_exp=task,
        )

    made, chosen_on = split(evaluate_on), split("validation")
    parts = {"train": made.train_stream, "valid": chosen_on.test_stream, "test": made.test_stream}
    return CLScenario([EagerCLStream(part, list(stream)) for part, stream in parts.items()])


def make_stream(name: str, seed: int, evaluate_on: str = "test") -> Stream:
    """Make one of `STREAMS`, with a new network."""
    from avalanche.models import SimpleMLP

    torch.manual_seed(seed)
    network = SimpleMLP(num_classes=2 if name == "split-task" else 10, input_size=64, hidden_size=100, drop_rate=0.0)
    return benchmark_stream(benchmark(name, evaluate_on), network, seed=seed, name=name)


def learn(strategy: str, stream: Stream, seed: int, steps: int, options: dict[str, Any]) -> list[list[float]]:
    """Return the learning matrix of one run: accuracies before training and after each task."""
    cls = registry.strategy(strategy)
    learner = cls(stream=stream, options=build(cls.Options, COMMON | {"steps": steps} | options, strategy), seed=seed)
    answers = learner.evaluate()
    matrix = [[answers[task.name].score("accuracy") for task in stream.tasks]]
    for task, experience in zip(stream.tasks, stream.benchmark.train_stream, strict=True):
        learner.train(experience)
        answers |= learner.evaluate(learner.changed_by(task))
        matrix.append([answers[task.name].score("accuracy") for task in stream.tasks])
    return matrix


def variants(strategy: str, stream: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the lines of the table that a strategy has for a stream, with its options."""
    options = FIXED.get(strategy, {}) | CHOSEN.get(strategy, {}).get(stream, {})
    yield strategy, options
    if stream != "split-task" and registry.strategy(strategy).taskwise:
        for inference in INFERENCE:
            yield f"{strategy}, {inference}", options | {"task_inference": inference}


def measure(
    strategies: Sequence[str], seeds: Sequence[int], steps: int, streams: Sequence[str]
) -> list[dict[str, Any]]:
    """Return one row for each line of the table, stream and seed, with average accuracy and forgetting."""
    rows = []
    for stream in streams:
        tasks = make_stream(stream, seeds[0]).tasks
        constant = round(statistics.fmean(task.unanswered.constant_score("accuracy") for task in tasks), 4)
        for strategy in strategies:
            for line, options in variants(strategy, stream):
                found: list[dict[str, Any]] = []
                for seed in seeds:
                    start = time.perf_counter()
                    matrix = learn(strategy, make_stream(stream, seed), seed, steps, options)
                    found.append(
                        {
                            "stream": stream,
                            "strategy": line,
                            "seed": seed,
                            "average": round(metrics.mean_of(matrix[-1]), 4),
                            "forgetting": round(metrics.mean_of(metrics.forgetting_per_task(matrix)[:-1]), 4),
                            "constant": constant,
                            "seconds": round(time.perf_counter() - start, 2),
                            "options": " ".join(f"{key}={value}" for key, value in options.items()),
                        }
                    )
                shown = (_shown([row[key] for row in found]) for key in ("average", "forgetting"))
                print(f"{stream:12} {line:32} {' '.join(shown)}", flush=True)
                rows += found
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return average accuracy and forgetting in percent, mean (standard deviation) over seeds, as markdown."""
    found = pandas.DataFrame(rows)
    cells = found.groupby(["strategy", "stream"], sort=False)[["average", "forgetting"]].agg(list)
    streams = list(found["stream"].unique())
    heads = [f"{stream}: {column}" for stream in streams for column in ("accuracy", "forgetting")]
    lines = ["| strategy | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for strategy in found["strategy"].unique():
        shown = [
            _shown(cells.loc[strategy, stream][column]) if (strategy, stream) in cells.index else "–"
            for stream in streams
            for column in ("average", "forgetting")
        ]
        lines.append(f"| {strategy} | " + " | ".join(shown) + " |")
    if "constant" in found:  # results of older versions lack it
        floors = found.groupby("stream")["constant"].first()
        shown = [cell for stream in streams for cell in (f"{100 * floors[stream]:.1f}", "–")]
        lines.append(f"| {CONSTANT} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _shown(values: Sequence[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.fmean(values):.1f} ({100 * spread:.1f})"


def tune(strategies: Sequence[str], steps: int, streams: Sequence[str], seed: int = 100) -> dict[str, Any]:
    """Find the options with the best average accuracy on validation rows; a run that diverges is the worst."""
    chosen: dict[str, Any] = {}
    for strategy in strategies:
        for stream in streams if strategy in GRIDS else ():
            ((name, values),) = GRIDS[strategy].items()
            scores = []
            for value in values:
                options = FIXED.get(strategy, {}) | {name: value}
                try:
                    matrix = learn(strategy, make_stream(stream, seed, "validation"), seed, steps, options)
                    scores.append(metrics.mean_of(matrix[-1]))
                except TrainingError:
                    scores.append(0.0)
            best = values[scores.index(max(scores))]
            chosen.setdefault(strategy, {})[stream] = {name: best}
            shown = ", ".join(f"{value:g}: {100 * score:.1f}" for value, score in zip(values, scores, strict=True))
            print(f"{strategy} {stream} {name}={best:g} ({shown})", flush=True)
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write."""
    known = [name for name in NAMES if name in registry.strategies()]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150, help="updates per task")
    parser.add_argument("--strategies", nargs="+", default=known)
    parser.add_argument("--streams", nargs="+", default=STREAMS, choices=STREAMS)
    parser.add_argument("--out", type=Path, help="CSV file; the table goes to standard output")
    parser.add_argument("--tune", action="store_true", help="choose options on validation rows, and print them")
    options = parser.parse_args(arguments)
    for name in options.strategies:
        if name not in registry.strategies():
            raise UnknownNameError("strategy", name, known)
    if options.tune:
        print(json.dumps(tune(options.strategies, options.steps, options.streams), indent=1))
        return
    rows = measure(options.strategies, options.seeds, options.steps, options.streams)
    print(f"\n{table(rows)}")
    if options.out:
        write_atomically(options.out, rows_to_csv(rows, {"steps": options.steps, "common": COMMON}))


if __name__ == "__main__":
    main()
