"""Makes all kills with one command: ``python tests/kill --moments 100``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaign import Campaign, campaign, parser_of  # isort: skip  # before torch is imported
from kill.harness import Harness, Revision, World


def main() -> int:
    """Kill runs at random moments and at every rename, and revisions of a run."""
    parser = parser_of("kill", __doc__, "of the moments")
    parser.add_argument("--moments", type=int, default=100, help="SIGKILLs at random moments; a third with two workers")
    parser.add_argument(
        "--signals", type=int, default=6, help="SIGTERMs at random moments, with one worker and with two each"
    )
    parser.add_argument("--renames", type=int, default=10**6, help="kill at renames up to this one")
    parser.add_argument(
        "--seldom", action="store_true", help="at renames of a run without checkpoints within its phases"
    )
    given = parser.parse_args()
    with campaign("kill") as here:
        for kills in (of_runs, at_renames, of_revisions):
            kills(given, here)
    for failure in here.failures:
        print(failure)
    return 1 if here.failures else 0


def of_runs(given: argparse.Namespace, here: Campaign) -> None:
    """Kill runs at random moments, with one worker and with two."""
    for jobs, count in ((1, given.moments - given.moments // 3), (2, given.moments // 3)):
        harness, places, before = Harness(World(here.folder, jobs=jobs)), Counter[str](), len(here.failures)
        for moment, delay in harness.moments(count, given.seed):
            place = attempt(here, f"moment {moment} + {delay:.4f}", harness.killed_at, moment, delay)
            places[str(place)] += 1
        tell(here, before, f"SIGKILL at {count} random moments, {jobs} at a time, {dict(places)}")
        before = len(here.failures)
        for moment, _ in harness.moments(given.signals, given.seed + 1):
            attempt(here, f"SIGTERM at {moment}", harness.killed_at, moment, 0.0, signal.SIGTERM)
        tell(here, before, f"SIGTERM at {given.signals} random moments, {jobs} at a time, each ended within 10 s")


def at_renames(given: argparse.Namespace, here: Campaign) -> None:
    """Kill a run at each rename, alternately before and after it."""
    one, number, before = Harness(World(here.folder)), 1, len(here.failures)
    killed = partial(one.killed_at_replace, often=not given.seldom)
    while number <= given.renames and attempt(here, f"rename {number}", killed, number, after=number % 2 == 0):
        number += 1
    end = "" if number > given.renames else f"; a run has {number - 1}"
    tell(here, before, f"SIGKILL at the first {number - 1} renames{end}")


def of_revisions(given: argparse.Namespace, here: Campaign) -> None:
    """Kill ``run --on`` at random moments and at its first renames."""
    for action, count in (("without", given.moments // 4), ("further", given.moments // 8)):
        revision, before = Harness(Revision(here.folder / action, action=action)), len(here.failures)
        for moment, delay in revision.moments(count, given.seed):
            attempt(here, f"run --on, {action}, moment {moment}", revision.killed_at, moment, delay)
        for number in range(1, min(given.renames, 12) + 1):
            what = f"run --on, {action}, rename {number}"
            attempt(here, what, revision.killed_at_replace, number, after=number % 2 == 0)
        tell(here, before, f"SIGKILL of run --on, {action}, at {count} random moments and its first renames")


def attempt(here: Campaign, what: str, kill: Callable[..., Any], *given: Any, **how: Any) -> Any:
    """Return the result of ``kill``; if it raises ``AssertionError``, record that and return a note."""
    try:
        return kill(*given, **how)
    except AssertionError as error:
        here.failures.append(f"{what}: {error}")
        return "differs"


def tell(here: Campaign, before: int, what: str) -> None:
    """Print the kills, and the number of failures since ``before``."""
    here.say(f"{what}: {len(here.failures) - before} differ from what was not killed")


if __name__ == "__main__":
    sys.exit(main())
