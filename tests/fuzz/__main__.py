"""Damages thousands of files with one command: ``python tests/fuzz --files 4000 --seed 0``."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import faulthandler

from campaign import campaign, parser_of  # isort: skip  # before torch is imported
from fuzz.taken import PATIENCE, Fuzz, make_world, plain_figures


def main() -> int:
    """Damage one file after the other, and count the outcomes of its readers."""
    parser = parser_of("fuzz", __doc__, "of the first file; each has the next seed, to go on in parts")
    parser.add_argument("--files", type=int, default=4000, help="how many files are damaged, one at a time")
    given = parser.parse_args()
    counts = Counter[str]()
    with campaign("fuzz") as here:
        fuzz = Fuzz(make_world(here.folder / "world"))
        with plain_figures():
            for seed in range(given.seed, given.seed + given.files):
                faulthandler.dump_traceback_later(10 * PATIENCE, exit=True)  # for code that handles no signal
                verdict = fuzz.judge(seed)
                counts[verdict.outcome] += 1
                if verdict.outcome in ("wrongly taken", "fault"):
                    print(
                        f"{seed}: {verdict.outcome}: {verdict.file} ({verdict.damage}): {verdict.reader}: {verdict.why}",
                        flush=True,
                    )
        faulthandler.cancel_dump_traceback_later()
        shown = ", ".join(f"{counts[name]} {name}" for name in ("refused", "told", "same", "wrongly taken", "fault"))
        here.say(f"{given.files} damaged files of {len(fuzz.kinds)} kinds: {shown}")
    return 1 if counts["wrongly taken"] or counts["fault"] else 0


if __name__ == "__main__":
    sys.exit(main())
