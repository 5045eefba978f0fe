"""Units of a run as measurements: a strategy with one seed, by `forgetfree.run` in a directory of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import forgetfree
from forgetfree.benchmarks.gpu.bench import Bench
from forgetfree.benchmarks.gpu.results import Measured, Measurement, Value
from forgetfree.errors import RunError
from forgetfree.results.stored import load_run_results, to_csv

#: What a rehearsal changes: two steps on few rows of the embedded data.
TINY = {
    "data": "demo",
    "shots": 4,
    "steps": 2,
    "test_limit": 4,
    "optimizer": "adamw",
    "learning_rate": 1e-4,
    "mask_steps": 1,
    "mask_evaluations": 1,
    "floors": "constant",
    "max_length": 512,
}


def unit(
    bench: Bench, name: str, seconds: float, arguments: Mapping[str, Any], strategy: str, seed: int, **settings: Any
) -> Measurement:
    """Return a unit as a measurement.

    Args:
        bench: where.
        name: of the measurement, and of its directory.
        seconds: that it takes on a GPU, about.
        arguments: of `forgetfree.run`, the same for all units of a section.
        strategy: of the unit.
        seed: of the unit.
        settings: options of the strategy.
    """
    whole = {**arguments, **settings}
    if bench.tiny:
        unused = {"mask_steps", "mask_evaluations"} if strategy != "grafting-continual" else set()
        whole |= {key: value for key, value in TINY.items() if key not in unused}
    return Measurement(name, seconds, partial(measure, bench, name, {**whole, "strategies": strategy, "seeds": seed}))


def measure(bench: Bench, name: str, arguments: Mapping[str, Any]) -> Measured:
    """Run a unit, or go on with it, and read what it measured.

    Raises:
        RunError: it failed.
    """
    out = bench.directory / "runs" / bench.here["size"] / re.sub(r"[^\w.-]+", "-", name)
    out.mkdir(parents=True, exist_ok=True)
    cache = bench.directory / "runs" / "fine-tuned"
    forgetfree.run(
        **arguments, device=str(bench.device), out=out, resume=True, cache=str(cache), progress=False, debug=True
    )
    results = load_run_results(str(out))
    if not results.runs:
        raise RunError(f"{out} holds no finished run. Read its report, mend what failed, and call this again.")
    (run,) = results.runs
    values = [
        Value("average", 100 * run.average, "%", shown=True),
        Value("forgetting", 100 * run.forgetting, "points", shown=True),
        Value("seconds of training", sum(filter(None, run.seconds.values())), "s"),
    ]
    if run.broken_claims:
        values.append(Value("nothing is forgotten", "; ".join(run.broken_claims), holds=False))
    if run.held_aside:
        after = [run.held_aside.after] if run.held_aside.after is not None else run.held_aside.by_task or []
        lost = sum(after) / max(1, len(after)) - run.held_aside.before
        values.append(Value("loss on other texts, after minus before", lost, "nats", shown=True))
    return Measured(tuple(values), to_csv(results))
