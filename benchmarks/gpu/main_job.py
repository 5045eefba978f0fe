"""The main job on real rows, as docs/results/main-job.md has it from a CPU: three strategies, and the paper's own search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forgetfree.benchmarks.gpu.bench import Bench
from forgetfree.benchmarks.gpu.results import Measurement, SectionResults
from forgetfree.benchmarks.gpu.units import unit

#: What is compared: a strategy, and what its options are beside the recipe.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "fine-tune": ("fine-tune", {}),
    "continual-ft": ("continual-ft", {"learning_rate": 3e-5}),
    "grafting-continual": ("grafting-continual", {"final_union": True}),
    "grafting-continual, region_from=mask": ("grafting-continual", {"final_union": True, "region_from": "mask"}),
}
SEEDS = range(5)


def measurements(bench: Bench, results: SectionResults) -> Iterator[Measurement]:
    """Yield every strategy with every seed, seed after seed."""
    arguments: dict[str, Any] = {"stream": "qnli-agnews-sst2", "readout": "linear"}
    if bench.tiny:
        loaded = bench.bert()
        arguments |= {"model": loaded.model.backbone, "tokenizer": loaded.tokenizer}
    else:
        arguments |= {"data": str(bench.directory / "data"), "shots": 1024, "steps": 400, "test_limit": 2000}
    for seed in SEEDS[:1] if bench.tiny else SEEDS:
        for name, (strategy, settings) in WAYS.items():
            yield unit(bench, f"main-job, {name}, seed {seed}", 45, arguments, strategy, seed, **settings)
