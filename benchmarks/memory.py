"""The memory of each phase: the most bytes that tensors held, weights included.

python -m benchmarks.memory [MODEL]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch

from benchmarks.speed.measurement import PeakMemory
from forgetfree.core.trained import RegionParameters
from forgetfree.data.sources import load_task
from forgetfree.models.loading import load_model
from forgetfree.recipes import ModelDtype
from forgetfree.training.monitor import Phase
from forgetfree.training.single_task import SingleTask
from forgetfree.training.training_options import LocalizationOptions

PHASES: tuple[Phase, ...] = ("fine_tune", "localize", "train")
WAYS: dict[str, dict[str, Any]] = {
    "mask": {"region_from": "mask"},
    "movement": {"region_from": "movement"},
    "gradient": {"region_from": "gradient"},
    "gradient, gradient checkpointing": {"region_from": "gradient", "gradient_checkpointing": True},
}
DTYPES: tuple[ModelDtype, ...] = ("float32", "bfloat16")
OPTIONS = LocalizationOptions(
    steps=2, batch_size=8, optimizer="adamw", learning_rate=1e-5, mask_steps=1, mask_batch_size=16
)


def peaks_of(bench: SingleTask, options: LocalizationOptions) -> dict[Phase, int]:
    """Return the most bytes that tensors held in each phase, weights included; on a GPU, by its allocator."""
    there = sum(each.nbytes for each in bench.model.parameters()) + bench.pre.theta.nbytes
    peaks = dict[Phase, int]()

    def peak(work: Callable[[], object]) -> tuple[Any, int]:
        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(bench.device)
            return work(), torch.cuda.max_memory_allocated(bench.device)
        with PeakMemory(bench.pre.theta, *bench.model.parameters()) as mode:
            made = work()
        return made, mode.bytes + there

    if options.needs_fine_tuned:
        tuned, peaks["fine_tune"] = peak(lambda: bench.fine_tuned(options))
        there += tuned.theta.nbytes
    else:
        tuned, peaks["fine_tune"] = peak(lambda: bench.with_readout(options))
    region, peaks["localize"] = peak(lambda: bench.region(tuned, options))

    def train() -> None:
        bench.train_(options, "train", RegionParameters(bench.model.backbone, bench.space, region), 2)

    _, peaks["train"] = peak(train)
    return peaks


def table(name: str) -> list[str]:
    """Return the rows of the table, in GB."""
    lines = [f"| {name}: γ by | fine-tune | localize | train |", "|---|---:|---:|---:|"]
    for way, dtype, options in ways():
        bench = SingleTask.of(load_model(name, dtype=dtype), load_task("sst2", "demo"), shots=32, device="cpu")
        peaks = peaks_of(bench, options)
        lines.append(f"| {way} | {' | '.join(f'{peaks[phase] / 1e9:.2f}' for phase in PHASES)} |")
    return lines


def ways() -> Iterator[tuple[str, ModelDtype, LocalizationOptions]]:
    """Yield each row of a table: its title, the dtype of the weights, and the options."""
    for dtype, (way, changes) in product(DTYPES, WAYS.items()):
        options = OPTIONS.model_copy(update=changes)
        yield way if dtype == "float32" else f"{way}, {dtype}", dtype, options


if __name__ == "__main__":
    print("\n".join(table(sys.argv[1] if len(sys.argv) > 1 else "smollm2")))
