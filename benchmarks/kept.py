"""Recompute the bytes of the ledgers of published runs: ``python -m benchmarks.kept``.

``make results`` calls it. A CSV file has the number of entries that each task owns, by layer and kind of parameter. As many
random entries of these places are stored in today's ledger format, and their bytes are counted. So pages show the bytes of
today's code, also for older runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.claims import RESULTS
from forgetfree.core.parameters import ParameterSpace, TensorSpec
from forgetfree.core.regions import Region, entry_tensors, stored_indices
from forgetfree.json_file import parse_json
from forgetfree.tensor_file import TaskTensors

Json = dict[str, Any]


def files() -> list[Path]:
    """Return the files of published runs that have a ledger."""
    return [path for path in sorted(RESULTS.rglob("*.csv")) if '"places"' in path.read_text(encoding="utf-8")]


def readouts(paths: Sequence[Path]) -> dict[tuple[str, str], int]:
    """Return the bytes of each task's readout, by model and task: a fine-tuned model's bytes minus its parameters'.

    Args:
        paths: files of runs, some of them with ``fine-tune``.
    """
    found: dict[tuple[str, str], int] = {}
    for path in paths:
        about, *runs = heads(path) or [{}]
        for run in runs:
            if run.get("strategy") == "fine-tune" and "kept_bytes" in run:
                whole = [size - before for before, size in pairwise([0, *run["kept_bytes"]])]
                bare = 4 * about["model"]["graftable"]
                found |= {
                    (about["model"]["name"], task): n - bare for task, n in zip(about["tasks"], whole, strict=True)
                }
    return found


def weighed(ledger: Json, readout: Sequence[int]) -> list[int]:
    """Return the bytes of each task's tensors in a ledger with as many entries, in float32.

    Args:
        ledger: its entry in a file of runs.
        readout: the bytes of each task's readout.
    """
    places, sizes, draw = ledger["places"], [], np.random.default_rng(0)
    offsets = list(accumulate((each["entries"] for each in places), initial=0))
    space = ParameterSpace((TensorSpec("all", (offsets[-1],), torch.float32, 0),))
    earlier = Region.empty()
    for k, beside in enumerate(readout):
        parts = [
            first + draw.choice(each["entries"], each["owned"][k], replace=False, shuffle=False)
            for first, each in zip(offsets[:-1], places, strict=True)
        ]
        owned = Region.of(torch.from_numpy(np.concatenate(parts)))
        tensors = entry_tensors(space, owned, torch.zeros(len(owned)))
        if taken := ledger["region_size"][k] - ledger["owned_size"][k]:
            shared = draw.choice((earlier - owned).indices.numpy(), taken, replace=False, shuffle=False)
            tensors["shared"] = stored_indices(space, Region.of(torch.from_numpy(shared)))
        earlier = earlier | owned
        sizes.append(TaskTensors("", tensors).size_in_bytes + beside)
    return sizes


def written(path: Path, readout: Mapping[tuple[str, str], int]) -> str:
    """Return the text of a file of runs with the bytes of each ledger in today's format."""
    about, *_ = heads(path)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines):
        run = parse_json(line[2:]) if line.startswith("# {") else {}
        if ledger := run.get("ledger"):
            beside = [readout[about["model"]["name"], task] for task in about["tasks"]]
            if about["scenario"] != "task":  # each readout has the labels of all tasks
                beside = [sum(beside)] * len(beside)
            before, kept = ledger["bytes"], run["kept_bytes"]
            sums = list(accumulate(weighed(ledger, beside)))
            ledger["bytes"] = sums[-1]
            # If the task is inferred, features are stored beside the ledger.
            more = [(sums[-1] - before) * (k + 1) // len(kept) for k in range(len(kept))]
            run["kept_bytes"] = sums if kept[-1] == before else [a + b for a, b in zip(kept, more, strict=True)]
            lines[number] = f"# {json.dumps(run)}\n"
    return "".join(lines)


def heads(path: Path) -> list[Json]:
    """Return the header of a file: facts about all its runs, then about each run."""
    return [parse_json(line[2:]) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# {")]


def main() -> None:
    """Write the files."""
    readout = readouts(sorted(RESULTS.rglob("*.csv")))
    for path in files():
        path.write_text(written(path, readout), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
