"""Steps of minilm by two processes of one thread each, beside the same steps by one: time, CPU seconds and bytes.

python -m forgetfree.benchmarks.speed processes

Two processes need two idle cores: elsewhere the times tell of the machine's other work, and the CPU seconds still of ours.
"""

from __future__ import annotations

import time
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from forgetfree.benchmarks.speed.measurement import Figure, alternate, ratio
from forgetfree.benchmarks.speed.region_step import found_region
from forgetfree.continual.streams import load_stream
from forgetfree.core.trained import RegionParameters
from forgetfree.parallel.exchange import bytes_sent, connected, from_first, gathered, joined, meeting_point
from forgetfree.training.loop import fine_tune
from forgetfree.training.training_options import TrainingOptions

STEPS = 4
KINDS = ("fine-tuning", "region")
OPTIONS = TrainingOptions(parts=4, batch_size=8, optimizer="adamw", learning_rate=1e-5, schedule="constant")


class Steps:
    """Some steps of each kind, as the library takes them, on a model of their own."""

    def __init__(self) -> None:
        stream = load_stream("qnli,ag_news", data="demo", model="minilm", readout="linear")
        self._model, self._rows = stream.model, stream.tasks[0].train
        self._region = found_region(self._model.space())
        #: CPU seconds and bytes that all processes of a call took and sent, by kind.
        self.used: dict[str, list[tuple[float, int]]] = {kind: [] for kind in KINDS}

    def take(self, kind: str) -> None:
        """Take the steps, with the other process if this one is joined with it, and note what they used."""
        how: dict[str, Any] = {}
        if kind == "region":
            how["trained"] = RegionParameters(self._model.backbone, self._model.space(), self._region)
        begin, sent = time.process_time(), bytes_sent()
        fine_tune(self._model, self._rows, OPTIONS, steps=STEPS, seed=0, **how)
        own = time.process_time() - begin, bytes_sent() - sent
        seconds, counts = zip(*gathered([own]), strict=True)
        self.used[kind].append((sum(seconds), max(counts)))

    def take_together(self, kind: str) -> None:
        """Let the other process take them, too."""
        with joined():
            from_first(kind)
            self.take(kind)


def follow(port: int) -> None:
    """Be the second process, until there is nothing more to do."""
    torch.set_num_threads(1)
    steps = Steps()
    with connected(1, 2, meeting_point(2, port)), joined():
        while kind := from_first(""):
            steps.take(kind)


def figures(turns: int = 9) -> list[Figure]:
    """Measure on the demo task QNLI: batches of 8 rows in 4 parts, by AdamW, with dropout."""
    torch.set_num_threads(1)
    store = meeting_point(2)
    other = get_context("spawn").Process(target=follow, args=(store.port,), daemon=True)
    other.start()
    alone, both = Steps(), Steps()
    with connected(0, 2, store):
        calls = {f"{kind}, 1": partial(alone.take, kind) for kind in KINDS}
        calls |= {f"{kind}, 2": partial(both.take_together, kind) for kind in KINDS}
        seconds = alternate({name: calls[name] for name in sorted(calls)}, turns=turns)
        with joined():
            from_first("")
    other.join()
    found = []
    for kind in KINDS:
        found.append(ratio(f"time of {kind} steps, 2 processes / 1", seconds, f"{kind}, 2", f"{kind}, 1", limit=0.5))
        cpu = {
            f"{kind}, {count}": np.array([each for each, _ in steps.used[kind][-turns:]])
            for count, steps in ((1, alone), (2, both))
        }
        found.append(ratio(f"CPU seconds of {kind} steps, 2 processes / 1", cpu, f"{kind}, 2", f"{kind}, 1", limit=1))
        found.append(
            Figure(f"bytes that a process sends in a step of {kind}", both.used[kind][-1][1] / STEPS, unit="bytes")
        )
    return found
