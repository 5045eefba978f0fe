"""A fleet of 1,024 grafts of one model in memory: requests of random tasks, compared with requests of a single task.

python -m benchmarks.speed fleet
"""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.speed.measurement import Figure, alternate, ratio
from benchmarks.speed.mixed_batch import demo_rows, mixed_model
from forgetfree.models.loading import load_model

FLEET = 1024
ROWS = 8


def resident() -> float:
    """Return the memory that the process holds, in megabytes; NaN if the system does not report it."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 / 1e6 if status.exists() else float("nan")


def figures(turns: int = 9) -> list[Figure]:
    """Measure batches of eight requests with minilm and grafts of 1e-4."""
    loaded = load_model("minilm", "linear")
    loaded.model.eval()
    rows = demo_rows(loaded, ROWS)
    # Before memory is measured: the first passes, which also move the tensors of θ_pre for the switch.
    mixed_model(loaded, ROWS, "alone", "first ").answer(rows, [f"first {i}" for i in range(ROWS)])
    before = resident()
    mixed = mixed_model(loaded, FLEET, "alone")
    every = [str(task) for task in range(FLEET)]
    for first in range(0, FLEET, 64):  # the tensors of a task are made at its first request
        mixed.answer([row[:4] for row in rows] * 8, every[first : first + 64])
    held = resident() - before
    took: dict[int, list[float]] = {}
    drawn = random.Random(0)

    def requests(known: int) -> None:
        """Answer two batches of requests of random tasks among the first ``known``."""
        for _ in range(2):
            tasks = [every[drawn.randrange(known)] for _ in rows]
            start = time.perf_counter()
            mixed.answer(rows, tasks)
            took.setdefault(known, []).append(time.perf_counter() - start)

    counts = (1, 8, 33, FLEET)
    contenders = {f"{known} tasks": partial(requests, known) for known in counts}
    seconds = alternate(contenders, turns=turns)
    found = [
        ratio(f"time of requests of {known:,} tasks / of one", seconds, f"{known} tasks", "1 tasks", at_most=1.2)
        for known in counts[1:]
    ]
    for known in (1, FLEET):
        late = 1000 * float(np.quantile(took[known], 0.95))
        found.append(Figure(f"95th percentile of a batch of {ROWS} requests of {known:,} tasks", late, unit="ms"))
    return [*found, Figure(f"memory of {FLEET:,} grafts beside the model", held, at_most=60, unit="MB")]
