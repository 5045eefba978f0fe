"""All kills by one command: ``python tests/kill --moments 100``."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from kill.harness import Harness, Prediction, Revision, World


def main() -> int:
    """Kill runs at random moments and at every rename, revisions of a run, and what is answered from it."""
    parser = argparse.ArgumentParser(prog="python tests/kill", description=__doc__)
    parser.add_argument("--moments", type=int, default=100, help="SIGKILLs at random moments; a third with two workers")
    parser.add_argument(
        "--signals", type=int, default=6, help="SIGTERMs at random moments, with one worker and with two each"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--renames", type=int, default=10**6, help="kill at renames up to this one")
    parser.add_argument(
        "--first", type=int, default=1, metavar="N", help="begin with the N-th rename, to go on in slices"
    )
    parser.add_argument(
        "--seldom", action="store_true", help="at renames of a run without checkpoints within its phases"
    )
    given = parser.parse_args()
    folder, begin = Path(tempfile.mkdtemp(prefix="kill-")), time.monotonic()
    failures: list[str] = []

    def told(what: str, before: int) -> None:
        seconds = time.monotonic() - begin
        print(f"{what}: {len(failures) - before} differ from what was not killed ({seconds:.0f} s)", flush=True)

    try:
        for jobs, count in ((1, given.moments - given.moments // 3), (2, given.moments // 3)):
            harness, places, before = Harness(World(folder, jobs=jobs)), Counter[str](), len(failures)
            for moment, delay in harness.moments(count, given.seed):
                place = attempt(failures, f"moment {moment} + {delay:.4f}", harness.killed_at, moment, delay)
                places[str(place)] += 1
            told(f"SIGKILL at {count} random moments, {jobs} at a time, {dict(places)}", before)
            before = len(failures)
            for moment, _ in harness.moments(given.signals, given.seed + 1):
                attempt(failures, f"SIGTERM at {moment}", harness.killed_at, moment, 0.0, signal.SIGTERM)
            told(f"SIGTERM at {given.signals} random moments, {jobs} at a time, each ended within 10 s", before)
        one, number, before = Harness(World(folder)), given.first, len(failures)
        while number <= given.renames and attempt(
            failures,
            f"rename {number}",
            partial(one.killed_at_replace, after=number % 2 == 0, often=not given.seldom),
            number,
        ):
            number += 1
        end = "" if number > given.renames else f"; a run has {number - 1}"
        told(f"SIGKILL at {number - given.first} renames from the {given.first}. on{end}", before)
        for action, count in (("remove", given.moments // 4), ("update", given.moments // 8)):
            revision, before = Harness(Revision(folder / action, action=action)), len(failures)
            for moment, delay in revision.moments(count, given.seed):
                attempt(failures, f"ledger {action}, moment {moment}", revision.killed_at, moment, delay)
            for number in range(1, min(given.renames, 12) + 1):
                what = f"ledger {action}, rename {number}"
                attempt(failures, what, revision.killed_at_replace, number, after=number % 2 == 0)
            told(f"SIGKILL of ledger {action} at {count} random moments and its first renames", before)
        few = max(1, given.moments // 10)
        group, before = Harness(World(folder, ("grafting-continual",), processes=2)), len(failures)
        for moment, delay in group.moments(few, given.seed):
            attempt(failures, f"two processes, moment {moment} + {delay:.4f}", group.killed_at, moment, delay)
        told(f"SIGKILL at {few} random moments, one unit by two processes", before)
        reading, draw, before = Prediction(World(folder)), random.Random(given.seed), len(failures)
        printed = [
            attempt(failures, f"predict, {seconds:.2f} s", reading.killed_after, seconds)
            for seconds in (draw.uniform(0.0, reading.seconds) for _ in range(few))
        ]
        told(f"SIGKILL of predict at {few} random moments, after {printed} of {len(reading.expected)} bytes", before)
    finally:
        if not failures:
            shutil.rmtree(folder, ignore_errors=True)
    for failure in failures:
        print(failure)
    return 1 if failures else 0


def attempt(failures: list[str], what: str, kill: Callable[..., Any], *given: Any, **how: Any) -> Any:
    """Return what ``kill`` returns; where it raises, put that down and return a note."""
    try:
        return kill(*given, **how)
    except AssertionError as error:
        failures.append(f"{what}: {error}")
        return "differs"


if __name__ == "__main__":
    sys.exit(main())
