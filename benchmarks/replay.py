"""Repeat a unit of a published run file, and compare its scores with the published ones.

    python -m benchmarks.replay small --unit fine-tune/seed-0 --data demo

With the versions, threads and kind of processor that the file names, the scores must be equal to the bit; otherwise each score
after the last task must lie in the 95 % interval (Wilson's) of the published score, given its number of test rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from forgetfree.errors import ForgetfreeError, RunError, UnknownNameError, UsageError
from forgetfree.jobs.environment import quiet_libraries
from forgetfree.results.runs import Run, RunRecord, read_run
from forgetfree.results.table import SCORE, Results

Json = dict[str, Any]
#: The directory of files that are given by name.
RESULTS = Path(__file__).parent / "results"
Verdict = Literal["equal to the bit", "within its interval", "different"]


def replay(results: RunRecord, unit: str, data: str, out: Path, model: str | None = None) -> Verdict:
    """Run one unit again, and compare its scores with the published ones.

    Args:
        results: a run from `read_run`.
        unit: one of `units_of`.
        data: the place of the tasks, as ``--data``.
        out: a new directory.
        model: the place of the model; default: its name in the file.

    Raises:
        UnknownNameError: there is no such unit.
        RunError: data or model are not the published ones, or the unit failed.
        UsageError: an option of the published run no longer exists.
    """
    from forgetfree.jobs.config import prepared
    from forgetfree.jobs.environment import circumstances, set_threads, threads_as_before
    from forgetfree.jobs.run import run
    from forgetfree.jobs.stream_loading import StreamLoader, describe

    published = units_of(results).get(unit)
    if published is None:
        raise UnknownNameError("unit", unit, units_of(results))
    config = prepared(config_of(results, published, data, out, model))
    loader = StreamLoader(config)
    _check_same(results, describe(loader)["about"])
    with threads_as_before():
        set_threads(config.common.threads)
        made, now = published.facts.made, circumstances(loader.device)
    same_machine = made.get("versions") == now["versions"] and now["machine"].items() <= made.get("machine", {}).items()
    (found,) = run(config).records
    if found.about.failed:
        raise RunError(f"{unit} failed: {found.about.failed[0]['error']}")
    return compared(results, found, published, exactly=same_machine)


def units_of(results: RunRecord) -> dict[str, Run]:
    """Return the runs of a file by the names of their units."""
    return {f"{run.strategy}/seed-{run.seed}": run for run in results.runs}


def config_of(results: RunRecord, run: Run, data: str, out: Path, model: str | None = None) -> Any:
    """Return the configuration that repeats a run, without options that no longer exist; arguments as for `replay`."""
    from forgetfree import registry
    from forgetfree.jobs.config import RunConfig, RunOptions

    own, about = RunOptions.model_fields, results.about
    settings = {key: value for key, value in about.set.items() if key in own}
    settings.setdefault("test_limit", max(results.test_rows.values()))
    settings |= {"scenario": about.scenario, "evaluate_on": about.evaluated_on}
    settings["floors"] = "constant"  # no score depends on it
    if threads := run.facts.made.get("machine", {}).get("threads"):
        settings["threads"] = threads
    known = registry.strategy(run.strategy).Options.model_fields
    settings |= {f"{run.strategy}.{key}": value for key, value in run.facts.options.items() if key in known}
    return RunConfig(
        stream=about.stream,
        strategy=(run.strategy,),
        seed=(run.seed,),
        shots=about.data["shots"],
        model=model or about.model["name"],
        readout=about.model["readout"],
        data=data,
        set=settings,
        device=run.facts.made.get("machine", {}).get("device", "auto"),
        out=str(out),
    )


def compared(published: RunRecord, again: RunRecord, run: Run, *, exactly: bool) -> Verdict:
    """Return how the scores of a run compare with those of the same run before.

    Args:
        published: the published runs.
        again: the repeated run, alone or with others.
        run: the published run to compare.
        exactly: whether every bit must be equal.
    """
    from scipy.stats import binomtest

    before, after = (Results([replace(each, runs=(run,))]) for each in (published, again))
    pairs = [[each.values(run.strategy, run.seed, metric) for each in (before, after)] for metric in (SCORE, "ece")]
    if all(np.array_equal(a, b, equal_nan=True) for a, b in pairs):
        return "equal to the bit"
    if exactly:
        return "different"
    for score, other, n in zip(*(each[-1] for each in pairs[0]), published.test_rows.values(), strict=True):
        interval = binomtest(round(score * n), n).proportion_ci(method="wilson")
        if not interval.low <= other <= interval.high:
            return "different"
    return "within its interval"


def _check_same(results: RunRecord, about: Json) -> None:
    for what, ours, theirs in (
        ("model", about["model"]["fingerprint"], results.about.model.get("fingerprint")),
        ("data", about["data"]["fingerprints"], results.about.data.get("fingerprints")),
        ("numbers of test rows", about["data"]["test_rows"], results.about.data.get("test_rows")),
    ):
        if ours != theirs:
            raise RunError(
                f"The published {what} and these differ: expected {theirs}, got {ours}. Give the same --data and --model."
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Repeat, compare, and print both; return the exit code: 1 where scores differ."""
    known = ", ".join(sorted(path.stem for path in RESULTS.glob("*.csv")))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help=f"a run file of benchmarks/results ({known}), or the path of one")
    parser.add_argument("--unit", help="such as fine-tune/seed-0; default: list the units")
    parser.add_argument("--data", default="hub", help="as that of forgetfree run (default: hub)")
    parser.add_argument("--model", help="where the model is (default: as the file calls it)")
    parser.add_argument("--out", type=Path, help="a new directory for the run (default: a temporary one)")
    asked = parser.parse_args(arguments)
    quiet_libraries()
    try:
        path = Path(asked.name) if asked.name.endswith(".csv") else RESULTS / f"{asked.name}.csv"
        if not path.exists():
            raise UsageError(f"{path} does not exist. Give the path of a CSV file, or one of {known}.")
        results = read_run(path)
        if asked.unit is None:
            print("\n".join(units_of(results)))
            return 0
        with TemporaryDirectory() as folder:
            verdict = replay(results, asked.unit, asked.data, asked.out or Path(folder) / "out", asked.model)
    except ForgetfreeError as error:
        print(f"forgetfree: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    print(f"{path.stem}, {asked.unit}: {verdict}")
    return int(verdict == "different")


if __name__ == "__main__":
    sys.exit(main())
