"""Six tasks of Super-NaturalInstructions, as docs/results/generation.md has them from a CPU, with the loss on other texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forgetfree.benchmarks.gpu.bench import Bench
from forgetfree.benchmarks.gpu.results import Measurement, SectionResults
from forgetfree.benchmarks.gpu.units import unit

#: What is compared: a strategy, and what its options are beside the recipe.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "fine-tune": ("fine-tune", {}),
    "grafting-continual, alone": ("grafting-continual", {"composition": "alone"}),
    "grafting-continual, union": ("grafting-continual", {"composition": "union"}),
    "continual-ft": ("continual-ft", {}),
    "joint": ("joint", {}),
    "lora": ("lora", {}),
    "o-lora": ("o-lora", {}),
}
SEEDS = range(3)
#: The rates of naive training, and the seed on whose validation rows one of them is chosen.
RATES, VALIDATION_SEED = (1e-5, 3e-5, 1e-4), 10
#: No task of the stream trains its texts.
OTHER_TEXTS = "ag_news"


def measurements(bench: Bench, results: SectionResults) -> Iterator[Measurement]:
    """Yield the choice of a rate, and every strategy with every seed, seed after seed."""
    arguments: dict[str, Any] = {"readout": "generate", "upper_triangle": False, "held_aside": OTHER_TEXTS}
    if bench.tiny:
        loaded = bench.llama("tiny", "generate", "float32")
        model = {"model": loaded.model.backbone, "tokenizer": loaded.tokenizer}
        arguments |= {"stream": "generation-demo", **model}
    else:
        data = {"stream": "superni-short", "data": str(bench.directory / "data"), "model": "smollm2"}
        rows = {"shots": 160, "or_fewer": True, "steps": 20, "test_limit": 100}
        arguments |= data | rows | {"precision": "bf16", "answer_precision": "fp32"}
    chosen = {f"superni, continual-ft, rate {rate:g}": rate for rate in (RATES[:1] if bench.tiny else RATES)}
    for name, rate in chosen.items():
        settings = {"learning_rate": rate, "evaluate_on": "validation"}
        yield unit(bench, name, 45, arguments, "continual-ft", VALIDATION_SEED, **settings)
    averages = {
        rate: average for name, rate in chosen.items() if (average := results.value(name, "average")) is not None
    }
    for seed in SEEDS[:1] if bench.tiny else SEEDS:
        for name, (strategy, settings) in WAYS.items():
            if strategy == "continual-ft":
                if len(averages) < len(chosen):  # the rate is chosen when all of them are measured
                    continue
                settings = {"learning_rate": max(averages, key=averages.__getitem__)}
            yield unit(bench, f"superni, {name}, seed {seed}", 60, arguments, strategy, seed, **settings)
