"""Units of a run as measurements: a strategy with one seed, by `forgetfree.run` in its own directory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import forgetfree
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.results import Measurement, Value
from forgetfree.results.report.run_report import render

#: The changes of a rehearsal: two steps on few rows of the embedded data.
TINY = {"data": "demo", "shots": 4, "steps": 2, "test_limit": 4, "max_length": 512, "floors": "constant"}
TINY_TRAINING = {"optimizer": "adamw", "learning_rate": 1e-4}
TINY_SEARCH = {"mask_steps": 1}

#: The compared configurations: by name, a strategy and its options besides the recipe.
Ways = Mapping[str, tuple[str, Mapping[str, Any]]]


def unit(
    bench: Bench, name: str, seconds: float, strategy: str, seed: int, arguments: Mapping[str, Any]
) -> Measurement:
    """Return a unit as a measurement.

    Args:
        bench: the device and the size.
        name: the name of the measurement, and of its directory.
        seconds: its approximate time on a GPU.
        strategy: the strategy of the unit.
        seed: the seed of the unit.
        arguments: further arguments of `forgetfree.run`.
    """
    if bench.tiny:
        search = TINY_SEARCH if strategy == "grafting-continual" else {}
        arguments = {**arguments, **TINY, **TINY_TRAINING, **search}
    return Measurement(
        name, seconds, partial(measure, bench, name, {**arguments, "strategies": strategy, "seeds": seed})
    )


def measure(bench: Bench, name: str, arguments: Mapping[str, Any]) -> Iterator[Value]:
    """Run or resume a unit, and yield its results."""
    runs = bench.directory / "runs" / bench.here["size"]
    out = runs / re.sub(r"[^\w.-]+", "-", name)
    out.mkdir(parents=True, exist_ok=True)
    how: dict[str, Any] = {"device": str(bench.device), "cache": str(runs / "fine-tuned"), "progress": False}
    forgetfree.run(**arguments, **how, out=out, resume=True, debug=True)
    results = forgetfree.load_results(out)
    (run,) = results.runs
    six = results.summary_of(run.strategy, run.seed)
    yield Value("average", 100 * (six["average"] or 0.0), "%", shown=True)
    yield Value("forgetting", 100 * (six["forgetting"] or 0.0), "points", shown=True)
    if run.facts.broken_claims:
        yield Value("nothing is forgotten", "; ".join(run.facts.broken_claims), holds=False)
    if aside := run.facts.held_out:
        after = [aside.after] if aside.after is not None else aside.by_task or []
        yield Value(
            "loss on other texts, after minus before", sum(after) / len(after) - aside.before, "nats", shown=True
        )
    yield Value("seconds of all phases", sum(filter(None, run.facts.seconds.values())), "s")
    yield Value("scores", render(results, "csv"), "csv")
