"""The bytes of published runs are those of today's ledgers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forgetfree.benchmarks import kept
from forgetfree.core.parameters import ParameterSpace, TensorSpec
from forgetfree.core.regions import Region
from forgetfree.ledger import Ledger, Record
from forgetfree.ledger.graft import Graft


@pytest.fixture(scope="module")
def readouts() -> dict[tuple[str, str], int]:
    return kept.readouts(sorted(kept.RESULTS.rglob("*.csv")))


@pytest.mark.sampled("movement", "movement-mask", share=0.2)
@pytest.mark.parametrize("path", kept.files(), ids=lambda path: path.stem)
def test_the_bytes_of_published_runs_are_those_of_todays_ledgers(
    path: Path, readouts: dict[tuple[str, str], int]
) -> None:
    """``make results`` would change no file."""
    assert kept.written(path, readouts) == path.read_text(encoding="utf-8")


def test_a_ledger_of_11_000_entries_takes_66_kilobytes(tmp_path: Path) -> None:
    """0.1 % of MiniLM's graftable entries; what is weighed of it is what a file on disk has, but for its header."""
    places = [{"entries": 5_500_000, "owned": [6_000]}, {"entries": 5_100_000, "owned": [5_000]}]
    (weighed,) = kept.weighed({"places": places, "region_size": [11_000], "owned_size": [11_000]}, [3_080])
    space = ParameterSpace((TensorSpec("weight", (10_600_000,), torch.float32, 0),))
    region = Region.of(torch.randperm(10_600_000, generator=torch.Generator().manual_seed(0))[:11_000])
    ledger = Ledger(space, "f" * 64)
    readout = {"weight": torch.zeros(2, 384), "bias": torch.zeros(2)}
    ledger.append(Record("one", region, Graft(region, torch.zeros(11_000)), 1e-3, readout))
    ledger.save(tmp_path / "ledger")
    assert 11_000 * (4 + 2) + 3_080 == ledger.size_in_bytes == weighed
    assert 0 < (tmp_path / "ledger").stat().st_size - weighed < 2_000
