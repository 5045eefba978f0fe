"""``python tests/golden`` reports one different bit of a score, a ledger or an answer; it ignores seconds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from golden.__main__ import differences
from golden.side import measured
from safetensors.torch import save_file

from forgetfree import Graft, Ledger, Region
from forgetfree.ledger.ledger import Record

UNIT = "grafting-continual/seed-0"


def write_run(run: Path, *, score: float = 0.75, seconds: float = 1.0, value: float = 0.5, logit: float = 0.25) -> None:
    folder = run / UNIT
    folder.mkdir(parents=True)
    rows = f"grafting-continual,0,sst2,1,accuracy,{score!r},16,{seconds}"
    (folder / "scores.csv").write_text(f"strategy,seed,task,after,metric,value,rows,seconds\n{rows}\n")
    ledger, region = Ledger.of_model(torch.nn.Linear(3, 2)), Region.of([1, 4])
    ledger.append(Record("sst2", region, Graft(region, torch.tensor([1.0, value])), 0.25))
    ledger.save(folder / "ledger.safetensors")
    logits = torch.tensor([[1.0, 2.0], [logit, -1.0]])
    save_file({"sst2/logits": logits}, folder / "predictions.safetensors")


def compare(folder: Path, **changes: float) -> tuple[list[str], int]:
    for side, values in (("base", {}), ("tree", changes)):
        write_run(folder / side / "run", **values)
        (folder / side / "main.json").write_text(json.dumps(measured(folder / side / "run")))
    return differences(folder / "base", folder / "tree")


def one_bit(value: float) -> float:
    """Return the next float32 value."""
    return float(torch.nextafter(torch.tensor(value), torch.tensor(math.inf)))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"score": math.nextafter(0.75, 1)},
            "scores.csv, grafting-continual 0 sst2 1 accuracy, value: 0.75 became 0.75",
        ),
        ({"value": one_bit(0.5)}, "ledger.safetensors, sst2, values: 2 entries, "),
        ({"logit": one_bit(0.25)}, "predictions.safetensors, sst2/logits, row 1: [0.25, -1.0] became [0.25000"),
    ],
)
def test_a_bit_is_a_difference_and_is_told_with_its_place(
    changed: dict[str, float], expected: str, tmp_path: Path
) -> None:
    (line,), _ = compare(tmp_path, **changed)
    assert line.startswith(f"main: {UNIT}/{expected}")


def test_seconds_are_no_difference(tmp_path: Path) -> None:
    # Compared are value and rows of a score, region and values of a graft, and the shape and two rows of the answers.
    assert compare(tmp_path, seconds=2.0) == ([], 7)


def test_what_one_side_lacks_is_a_difference(tmp_path: Path) -> None:
    compare(tmp_path)
    (tmp_path / "tree" / "main.json").unlink()
    lines, _ = differences(tmp_path / "base", tmp_path / "tree")
    assert len(lines) == 7 and lines[0].endswith("became nothing")
