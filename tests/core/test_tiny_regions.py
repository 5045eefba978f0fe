"""A hint where the share of the entries that is asked for is hardly any of a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forgetfree import cli
from forgetfree.core.selection import tiny_region_note


def test_a_tiny_region_is_told_with_a_larger_sparsity() -> None:
    note = tiny_region_note(67_000, [0.5, 1e-4])
    assert note.startswith("sparsity 0.0001 of 67,000 graftable entries is a region of 6 entries,")
    assert note.endswith("For 100 entries or more, set the sparsity to 0.002.")


@pytest.mark.parametrize(("size", "sparsities"), [(85_000_000, [1e-4]), (67_000, [1e-3]), (67_000, []), (50, [0.1])])
def test_other_regions_are_not(size: int, sparsities: list[float]) -> None:
    assert tiny_region_note(size, sparsities) == ""


def test_a_run_and_its_plan_tell_it(
    model_directory: Any, data_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "sst2", "--data", str(data_directory), "--model", str(model_directory("bert")), "--shots", "4"]
    words += ["--steps", "1", "--strategy", "grafting-continual", "--out", str(tmp_path / "out"), "--sparsity", "0.001"]
    assert cli.main([*words, "--check"]) == 0
    assert "is a region of 4 entries" in "".join(capsys.readouterr())
    assert cli.main(words) == 0
    assert capsys.readouterr().err.count("is a region of 4 entries") == 1
