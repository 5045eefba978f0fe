"""Checks that a change of the code changes no bit of the results: ``python tests/golden BASE`` runs BASE and the working tree.

Both run the configurations of `side.py` on the same tiny models and data, one thread each, side by side. Scores, ledgers and
saved answers are compared; seconds, versions and paths are not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
#: The most differences that are printed for one configuration.
SHOWN = 20


def main() -> int:
    """Run both, print the differences, and return the exit status: 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python tests/golden", description=__doc__)
    parser.add_argument("base", metavar="BASE", help="a commit, a branch or a tag")
    base = parser.parse_args().base
    with tempfile.TemporaryDirectory(prefix="golden-") as name, checkout(base, Path(name) / "code") as tree:
        folder = Path(name)
        write_models(folder)
        outs = {f"{base} (BASE)": folder / "base", "the working tree": folder / "tree"}
        sides = [start(code, folder, out) for code, out in zip((tree, ROOT), outs.values(), strict=True)]
        failed = [side for side, process in zip(outs, sides, strict=True) if process.wait()]
        if failed:
            print(f"The runs failed of {' and of '.join(failed)}.")
            return 1
        differ, compared = differences(*outs.values())
    for line in differ:
        print(line)
    print(f"{compared:,} values: {'not equal' if differ else 'all equal'}")
    return 1 if differ else 0


@contextmanager
def checkout(commit: str, tree: Path) -> Iterator[Path]:
    """Check out a commit beside the working tree, and remove it at the end."""
    if status := subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT).returncode:
        sys.exit(status)  # git has printed the error
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def write_models(folder: Path) -> None:
    """Write the tiny models and data for both sides."""
    import prompted
    import tiny
    from transformers.utils import logging

    logging.disable_progress_bar()
    tiny.write_model("bert-mlm", folder / "bert")
    tiny.write_data(folder / "labels")
    prompted.write_model("GPT2", folder / "gpt2", chats=True)
    prompted.write_model("T5", folder / "t5")
    prompted.write_data(folder / "texts")


def start(code: Path, folder: Path, out: Path) -> subprocess.Popen[bytes]:
    """Start the configurations with the package in ``code``."""
    out.mkdir()
    own = {"PYTHONPATH": str(code), "FORGETFREE_CACHE": str(out / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    alone = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, Path(__file__).with_name("side.py"), code, folder, out],
        env=os.environ | own | alone,
        stdout=subprocess.DEVNULL,
    )


def differences(base: Path, tree: Path) -> tuple[list[str], int]:
    """Return a line for each value that differs between two directories of measured values, and the number of values."""
    lines, compared = [], 0
    for name in sorted({path.name for side in (base, tree) for path in side.glob("*.json")}):
        before, after = (json.loads(path.read_text()) if path.exists() else {} for path in (base / name, tree / name))
        places = {**before, **after}
        differ = [place for place in places if before.get(place) != after.get(place)]
        for place in differ[:SHOWN]:
            values = (each.get(place, "nothing") for each in (before, after))
            lines.append(f"{name.removesuffix('.json')}: {place}: {' became '.join(values)}")
        if len(differ) > SHOWN:
            lines.append(f"{name.removesuffix('.json')}: {len(differ) - SHOWN} more values differ")
        compared += len(places)
    return lines, compared


if __name__ == "__main__":
    sys.exit(main())
