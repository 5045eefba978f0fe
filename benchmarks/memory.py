"""The memory of each phase: predicted as --check does, beside what tensors held at most; computed for larger models.

python -m forgetfree.benchmarks.memory [MODEL]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from forgetfree.benchmarks.speed.measurement import PeakMemory
from forgetfree.core.tensors import DTYPES as TORCH_DTYPES
from forgetfree.core.trained import RegionParameters
from forgetfree.data.sources import load_task
from forgetfree.jobs.running.costs import ModelSize, memory_of_phases
from forgetfree.models.loading import load_model
from forgetfree.recipes import ModelDtype
from forgetfree.training.localization import LocalizationOptions
from forgetfree.training.monitor import Phase
from forgetfree.training.single_task import SingleTask

#: Parameters, graftable ones (layers and last norm), width and layers of the Llama models 3.2 and 3.1.
LARGER = {
    "1 billion": ModelSize(1_235_814_400, 973_146_112, 2048, 16),
    "3 billion": ModelSize(3_212_749_824, 2_818_747_392, 3072, 28),
    "8 billion": ModelSize(8_030_261_248, 6_979_588_096, 4096, 32),
}
PHASES: tuple[Phase, ...] = ("fine_tune", "localize", "train")
WAYS = {
    "mask": {"region_from": "mask"},
    "movement": {"region_from": "movement"},
    "gradient": {"region_from": "gradient"},
    "gradient, gradient checkpointing": {"region_from": "gradient", "gradient_checkpointing": True},
}
DTYPES: tuple[ModelDtype, ...] = ("float32", "bfloat16")
OPTIONS = LocalizationOptions(
    steps=2, batch_size=8, optimizer="adamw", learning_rate=1e-5, mask_steps=1, mask_batch_size=16, gradient_rows=16
)


def measured(name: str, options: LocalizationOptions, dtype: ModelDtype) -> tuple[ModelSize, float, dict[Phase, int]]:
    """Return a model's size, the longest row, and the most bytes that tensors held in each phase, weights included."""
    bench = SingleTask.of(load_model(name, dtype=dtype), load_task("sst2", "demo"), shots=32, device="cpu")
    parameters = sum(each.numel() for each in bench.model.parameters())
    backbone: Any = bench.model.backbone
    size = ModelSize.of(backbone.config, parameters, len(bench.space), dtype)
    return size, float(max(bench.task.train.lengths)), peaks_of(bench, options)


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
        tuned, peaks["fine_tune"] = peak(lambda: bench.with_readout(options, 2))
    regions, peaks["localize"] = peak(lambda: bench.regions(tuned, options))

    def train() -> None:
        bench.train_(options, "train", RegionParameters(bench.model.backbone, bench.space, regions[0]), 2)

    _, peaks["train"] = peak(train)
    return peaks


def table(name: str) -> list[str]:
    """Return the rows of both tables, in GB."""
    lines = [
        f"| {name}: γ by | fine-tune | localize | train |",
        "|---|---:|---:|---:|",
    ]
    for way, dtype, options in ways():
        size, length, peaks = measured(name, options, dtype)
        expected = memory_of_phases(size, options, length, PHASES)
        cells = [f"{peaks[phase] / 1e9:.2f} ({expected[phase] / 1e9:.2f})" for phase in PHASES]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    lines += ["", "| computed, rows of 512 tokens: γ by | 1 billion | 3 billion | 8 billion |", "|---|---:|---:|---:|"]
    for way, dtype, options in ways():
        sizes = [replace(size, width=TORCH_DTYPES[dtype].itemsize) for size in LARGER.values()]
        most = [max(memory_of_phases(size, options, 512, PHASES).values()) / 1e9 for size in sizes]
        lines.append(f"| {way} | {' | '.join(f'{each:.0f}' for each in most)} |")
    return lines


def ways() -> Iterator[tuple[str, ModelDtype, LocalizationOptions]]:
    """Yield each row of a table: what it is called, the dtype of the weights, and the options."""
    for dtype, (way, changes) in product(DTYPES, WAYS.items()):
        options = replace(OPTIONS, **changes)  # type: ignore[arg-type]
        yield way if dtype == "float32" else f"{way}, {dtype}", dtype, options


if __name__ == "__main__":
    print("\n".join(table(sys.argv[1] if len(sys.argv) > 1 else "smollm2")))
