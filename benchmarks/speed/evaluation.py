"""The evaluation of a stream: answers that are proved unchanged are reused, in place of T² whole evaluations.

python -m benchmarks.speed evaluation
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.speed.measurement import Figure, ratio
from forgetfree import registry
from forgetfree.continual.strategy import StreamAnswers
from forgetfree.continual.stream import Stream, make_stream
from forgetfree.data.rows import TaskRows
from forgetfree.data.sources import load_tasks
from forgetfree.options import build
from forgetfree.testing.tiny import tiny_model

TASKS, SHOTS, TEST_ROWS = 10, 4, 640


def small_tasks(count: int, train: int, test: int) -> list[TaskRows]:
    """Return tasks of two labels with ``train`` training and ``test`` test rows each, from the embedded data."""
    (source,) = load_tasks("sst2", "demo")

    def part(number: int) -> TaskRows:
        kept = {"train": train, "validation": 8, "test": test}
        rows = {
            split: getattr(source, split).take([(number * size + i) % len(getattr(source, split)) for i in range(size)])
            for split, size in kept.items()
        }
        return TaskRows(replace(source.task, name=f"task-{number}"), **rows)

    return [part(number) for number in range(count)]


def stream_of(count: int) -> Stream:
    """Return a stream of small tasks on a tiny BERT."""
    return make_stream("small", small_tasks(count, 4 * SHOTS, TEST_ROWS), tiny_model(positions=128))


def evaluate_stream() -> dict[str, np.ndarray]:
    """Learn a stream in a few steps, and return the seconds of evaluation after each task, in three ways."""
    cls = registry.strategy("grafting-continual")
    how = {"steps": 1, "sparsity": 1e-3, "region_from": "random"}
    strategy = cls(stream=stream_of(TASKS), options=build(cls.Options, how, "the script"))
    lower, upper = StreamAnswers(strategy, upper_triangle=False), StreamAnswers(strategy)
    upper.before()
    seconds: dict[str, list[float]] = {"learned tasks": [], "all tasks": [], "every task anew": []}

    def measure(name: str, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        seconds[name].append(time.perf_counter() - start)

    for task, experience in zip(strategy.stream.tasks, strategy.stream.benchmark.train_stream, strict=True):
        strategy.train(experience)
        measure("learned tasks", lambda task=task: lower.after(task))  # type: ignore[misc]
        measure("all tasks", lambda task=task: upper.after(task))  # type: ignore[misc]
        measure("every task anew", strategy.evaluate)
    assert not lower.broken and not upper.broken
    return {name: np.array(each) for name, each in seconds.items()}


def figures(turns: int = 9) -> list[Figure]:
    """Measure GraftingContinual with unions, so that answers on tasks not learned yet change with every task."""
    evaluate_stream()
    rows = [evaluate_stream() for _ in range(turns)]
    whole = {name: np.array([each[name].sum() for each in rows]) for name in rows[0]}
    half = np.array([each["learned tasks"][: TASKS // 2].sum() for each in rows])
    grown = {f"T = {TASKS}": whole["learned tasks"], f"T = {TASKS // 2}": half}
    what = f"evaluation of {TASKS} tasks / every task anew"
    return [
        ratio(f"{what}, upper_triangle=false", whole, "learned tasks", "every task anew", at_most=0.3, limit=1 / TASKS),
        ratio(f"{what}, with tasks not learned yet", whole, "all tasks", "every task anew", at_most=0.7, limit=0.55),
        ratio(
            f"T = {TASKS} / T = {TASKS // 2} (linear: 2, squared: 4), upper_triangle=false",
            grown,
            *grown,
            at_most=2.6,
            limit=2.0,
        ),
    ]
