"""``--jobs auto``: units side by side on the cores and in the memory that there are, with the bits of one thread."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from forgetfree import cli
from forgetfree.jobs import workers
from forgetfree.jobs.workers import units_at_a_time


@pytest.mark.parametrize(
    ("units", "cores", "gigabytes", "entries", "at_a_time"),
    [
        (6, 8, 64, 10_000_000, 6),  # as many as there are
        (6, 2, 64, 10_000_000, 2),
        (6, 8, 9, 10_000_000, 4),  # 2.2 GB each
        (6, 8, 64, 1_000_000_000, 2),  # 22 GB each
        (6, 8, 16, 1_000_000_000, 1),  # which at least is tried
    ],
)
def test_as_many_as_cores_and_memory_allow(
    monkeypatch: pytest.MonkeyPatch, units: int, cores: int, gigabytes: int, entries: int, at_a_time: int
) -> None:
    pages = {"SC_PHYS_PAGES": gigabytes * 10**6, "SC_PAGE_SIZE": 1000}
    monkeypatch.setattr(os, "sysconf", lambda name: pages[name])
    monkeypatch.setattr(workers, "cores", lambda: cores)
    assert units_at_a_time(units, entries) == at_a_time


@pytest.mark.slow
def test_they_have_the_bits_of_one_thread(data_directory: Path, model_directory: Any, tmp_path: Path) -> None:
    fixed = ["run", "sst2", "--data", str(data_directory), "--model", str(model_directory("bert")), "--quiet"]
    fixed += ["--shots", "4", "--steps", "3", "--strategy", "fine-tune", "--strategy", "continual-ft"]
    for out, how in (("auto", ["--jobs", "auto"]), ("one", ["--jobs", "1", "--threads", "1"])):
        assert cli.main([*fixed, *how, "--out", str(tmp_path / out)]) == 0
    for strategy in ("fine-tune", "continual-ft"):
        auto, one = (tmp_path / out / strategy / "seed-0" / "predictions.safetensors" for out in ("auto", "one"))
        assert auto.read_bytes() == one.read_bytes()
    assert json.loads((tmp_path / "auto" / "config.json").read_text())["machine"]["threads"] == 1
