"""The kit for a GPU is packed, unpacked, run, interrupted and continued; its measurements become a table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tiny import write_data

from benchmarks.gpu import packing, promises, running, table
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.results import Measurement, SectionResults, Value
from benchmarks.gpu.unpacking import unpack
from forgetfree.data.sources import load_task
from forgetfree.data.streams import STREAMS
from forgetfree.training.step import generators

BENCH = Bench(torch.device("cpu"), True, Path("kit"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each task of a kit: tasks with texts as answers in parquet, the others in jsonl."""
    folder = write_data(tmp_path_factory.mktemp("data"))
    for task in STREAMS["superni-short"]:
        (folder / task).mkdir()
        for split in ("train", "test"):
            rows = pd.DataFrame({"prompt": ["a", "b"], "target": [["c"], ["d", "e"]]})
            rows.to_parquet(folder / task / f"{split}.parquet")
        (folder / task / "source.json").write_text('{"kind": "generation", "metric": "rouge_l"}')
    return folder


@pytest.fixture(scope="module")
def kit(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kit")
    packing.pack(directory, data, "3.12", "2.11.0", with_wheels=False)
    return directory


# -- The kit ----------------------------------------------------------------------------------------------


@pytest.mark.sampled(share=0.15)
@pytest.mark.long
def test_what_was_packed_runs_in_a_process_of_its_own(kit: Path) -> None:
    """The packed code runs from another directory, and no promise is broken."""
    environment = os.environ | {"PYTHONPATH": str(kit / "load-1" / "code")}
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "run",
        str(kit),
        "--size",
        "tiny",
        "--only",
        "promises",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=kit, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": kept") > 20 and "BROKEN" not in done.stdout
    records = json.loads((kit / "results" / "promises.json").read_text())["measurements"]
    assert {each["name"] for each in records} >= {"later tasks, bf16", "switches, alone", "a region"}


def test_the_rows_of_a_kit_are_those_of_its_data(kit: Path, data: Path) -> None:
    unpack(kit)
    for task in packing.tasks():
        ours, theirs = (load_task(task, str(folder)) for folder in (kit / "data", data))
        assert (ours.task, ours.train, ours.test) == (theirs.task, theirs.train, theirs.test)


# -- A run ------------------------------------------------------------------------------------------------


def sections(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> list[str]:
    """Define one section with a measurement for each name and its planned seconds; return the list of begun measurements."""
    begun: list[str] = []

    def measure(name: str) -> Iterator[Value]:
        begun.append(name)
        if name.startswith("fault"):
            raise ValueError("not this time")
        if name.startswith("large"):
            raise torch.OutOfMemoryError("no")
        yield Value("a ratio", 0.5, shown=True)

    def measurements(bench: Bench, results: SectionResults) -> Iterator[Measurement]:
        for name, each in seconds.items():
            yield Measurement(name, each, partial(measure, name))

    monkeypatch.setattr(running, "SECTIONS", {"own": measurements})
    return begun


def run(kit: Path, seconds: float = 100.0) -> tuple[bool, str]:
    said: list[str] = []
    fine = running.run_sections(BENCH, kit / "results", ["own"], time.monotonic() + seconds, say=said.append)
    return fine, "\n".join(said)


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished measurements are not repeated, failed ones are; too little memory is a result."""
    begun = sections(monkeypatch, one=1, fault=1, large=1)
    fine, said = run(tmp_path)
    assert not fine and "own: fault: FAILED, ValueError: not this time. The next run tries it again." in said
    assert "own: large: memory: more than the card has" in said
    begun += ["|"]
    assert not run(tmp_path)[0]
    assert begun == ["one", "fault", "large", "|", "fault"]
    records = json.loads((tmp_path / "results" / "own.json").read_text())["measurements"]
    assert sorted(each["name"] for each in records) == ["fault", "large", "one"]
    assert {each["device"] for each in records} == {"a CPU"} and {each["size"] for each in records} == {"tiny"}


# -- Broken promises --------------------------------------------------------------------------------------


def broken(values: Iterator[Value]) -> list[str]:
    return [value.what for value in values if value.holds is False]


def test_a_later_task_that_moves_logits_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    naive = promises.registry.strategy("continual-ft")
    monkeypatch.setattr(promises.registry, "strategy", lambda name: naive)
    monkeypatch.setattr(promises, "build", lambda options, how, who: options(steps=2, learning_rate=1e-2))
    assert broken(promises.later_tasks(BENCH, "fp32")) == ["later tasks leave every logit of earlier ones as it is"]


def test_a_switch_that_leaves_entries_behind_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    to = promises.LedgerSwitch.to
    monkeypatch.setattr(promises.LedgerSwitch, "to", lambda self, stage: to(self, stage) if stage else None)
    found = broken(promises.switches(BENCH, "alone"))
    assert "θ_pre is back after nine switches, bit for bit" in found


def test_a_resume_that_loses_a_state_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(text: str, tensors: Any) -> Any:
        return kept(text, tensors) | {"generators": generators()}

    kept = promises.unpack
    monkeypatch.setattr(promises, "unpack", forgetful)
    found = broken(promises.again_and_resumed(BENCH, "fp32"))
    lost = "deterministic algorithms: resumed after step 5 to the same bits"
    assert found == [f"all weights, {lost}", f"a region, {lost}"]


def test_a_broken_promise_ends_the_run_with_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections(monkeypatch, one=1)
    monkeypatch.setattr(
        running,
        "SECTIONS",
        {"own": lambda *_: iter([Measurement("one", 1, lambda: [promises.promise("bits", False)])])},
    )
    fine, said = run(tmp_path)
    assert not fine and "own: one: bits: BROKEN (False)" in said


# -- The table --------------------------------------------------------------------------------------------


def record(name: str, device: str, *values: Value, size: str = "full") -> dict[str, Any]:
    return {
        "name": name,
        "device": device,
        "size": size,
        "planned": 1.0,
        "took": 1.0,
        "values": [vars(each) for each in values],
    }


def test_the_table_names_each_card(tmp_path: Path) -> None:
    kept, lost = Value("bits", True, holds=True), Value("a resume", False, holds=False)
    ratio = Value("region / fine-tune", 1.25, expected="as said", shown=True)
    average = [
        record(f"main-job, lora, seed {seed}", "Card B", Value("average", 80.0 + seed, "%", shown=True))
        for seed in (0, 2)
    ]
    files = {
        "promises": [record("one", "Card A", kept, lost)],
        "times": [record("steps", "Card A", ratio, Value("hidden", 1.0)), record("tiny", "Card A", ratio, size="tiny")],
        "main-job": average,
    }
    for name, records in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"measurements": records}))
    made = table.table(tmp_path)
    assert made.header == ("section", "measured", "expected", "Card A", "Card B")
    none = "not yet measured"
    assert made.rows[:3] == (
        ("promises", "promises that are kept", "all", "1 of 2", none),
        ("promises", "one: a resume", "kept", "BROKEN", none),
        ("times", "steps: region / fine-tune", "as said", "1.25", none),
    )
    assert ("main-job", "main-job, lora: average", "—", none, "81 % (1.4, 2 seeds)") in made.rows
