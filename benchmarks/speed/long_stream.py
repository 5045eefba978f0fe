"""A stream of 50 tasks, run as ``forgetfree run`` does: the time of a task does not grow with the number of earlier tasks.

python -m benchmarks.speed long_stream
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.speed.evaluation import small_tasks
from benchmarks.speed.measurement import Figure
from forgetfree.jobs.config import Execution, RunConfig, prepared
from forgetfree.jobs.learn import UnitWork, learn
from forgetfree.jobs.run_directory import Unit
from forgetfree.results.run_folder import SCORES_FILE, Score, write_scores
from forgetfree.testing.tiny import tiny_model
from forgetfree.training.monitor import Monitor

TASKS, STEPS = 50, 60


@contextmanager
def small_run(strategy: str) -> Iterator[UnitWork]:
    """Yield the work of a run of 50 small tasks on a tiny BERT, in a temporary directory."""
    with tempfile.TemporaryDirectory() as out:
        settings: dict[str, Any] = {"steps": STEPS, "upper_triangle": False, "evaluation_batch_size": 32}
        if strategy == "grafting-continual":
            settings |= {"sparsity": 1e-3, "mask_steps": 4}
        config = RunConfig(stream="sst2", data="demo", strategy=(strategy,), set=settings, out=out)
        work = UnitWork(prepared(config), Execution(debug=True))
        work.loader.tasks = small_tasks(TASKS, train=64, test=256)
        with patch("forgetfree.models.loading.load_model", lambda *_, **__: tiny_model(positions=128)):
            yield work


def seconds_per_task(strategy: str) -> np.ndarray:
    """Return the seconds of each task: training, evaluation, saving, and writing its files."""
    times: list[float] = []
    with small_run(strategy) as work:
        unit = Unit({"strategy": strategy, "seed": 0}, Path(work.loader.config.out) / strategy / "seed-0")
        work.loader.stream(0)

        def written(path: Path, scores: Sequence[Score]) -> None:
            write_scores(path, scores)
            times.append(time.perf_counter())

        with patch("forgetfree.jobs.checkpoints.write_scores", written):
            learn(work, unit, Monitor())
        assert (unit.directory / SCORES_FILE).is_file()
    return np.diff(times)


def figures(turns: int = 9) -> list[Figure]:
    """Measure one stream of each strategy for three turns."""
    found = []
    for strategy in ("grafting-continual", "fine-tune"):
        ratios, first, last = [], [], []
        for _ in range(max(1, turns // 3)):
            seconds = seconds_per_task(strategy)
            first.append(float(np.median(seconds[:10])))
            last.append(float(np.median(seconds[-10:])))
            ratios.append(last[-1] / first[-1])
        low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        medians = {"first ten": float(np.median(first)), "last ten": float(np.median(last))}
        what = f"{strategy}: one of the last ten of {TASKS} tasks / one of the first ten"
        found.append(Figure(what, float(median), float(low), float(high), 1.2, 1.0, "", medians))
    return found
