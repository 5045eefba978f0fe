"""The main job on real rows, as in docs/results/main-job.md on a CPU: three strategies, and a short mask search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.results import Measurement, SectionResults
from benchmarks.gpu.units import Ways, unit

WAYS: Ways = {
    "fine-tune": ("fine-tune", {}),
    "continual-ft": ("continual-ft", {"learning_rate": 3e-5}),
    "grafting-continual": ("grafting-continual", {"final_union": True}),
    "grafting-continual, region_from=mask": ("grafting-continual", {"final_union": True, "region_from": "mask"}),
}


def measurements(bench: Bench, results: SectionResults) -> Iterator[Measurement]:
    """Yield every strategy with every seed, seed after seed."""
    job: dict[str, Any] = {"stream": "qnli-agnews-sst2", "readout": "linear"}
    if bench.tiny:
        loaded = bench.bert()
        job |= {"model": loaded.model.backbone, "tokenizer": loaded.tokenizer}
    else:
        job |= {"data": str(bench.directory / "data"), "shots": 1024, "steps": 400, "test_limit": 2000}
        job["precision"] = "bf16"
    for seed in range(1 if bench.tiny else 5):
        for name, (strategy, options) in WAYS.items():
            yield unit(bench, f"main-job, {name}, seed {seed}", 45, strategy, seed, {**job, **options})
