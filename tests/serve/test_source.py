"""What answers in a run's directory, and what is known of it before a model is read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from edited import change_outcome

from forgetfree.errors import RunError, UsageError
from forgetfree.serve.source import Source, saved_file

MakeRun = Callable[..., Path]


@pytest.fixture
def run(finished_run: MakeRun) -> Path:
    return finished_run("bert", "continual-ft", "wsn", stream="sst2")


def test_the_run_chooses_grafting_then_a_ledger(run: Path, tmp_path: Path) -> None:
    assert saved_file(run).parts[-3] == "wsn"
    assert saved_file(run, strategy="continual-ft").name == "checkpoint.safetensors"
    shutil.copytree(run, tmp_path / "run")
    shutil.move(tmp_path / "run" / "wsn", tmp_path / "run" / "grafting-continual")
    shutil.copytree(run / "wsn", tmp_path / "run" / "bitfit")
    with pytest.raises(
        RunError, match=r"unit\.json is another unit's: expected the strategy grafting-continual, got 'wsn'"
    ):
        saved_file(tmp_path / "run")


def test_a_source_says_what_its_run_says(run: Path, model_directory: Callable[[str], Path]) -> None:
    source = Source.of(run)
    assert (source.file, source.strategy, source.is_ledger) == (saved_file(run), "wsn", True)
    assert (source.model, source.run_model) == (str(model_directory("bert")), "")
    assert (source.tasks, source.task_inference) == ((), "last")  # a ledger says them itself
    moved = Source.of(run, strategy="continual-ft", model="elsewhere")
    assert (moved.model, moved.run_model, moved.is_ledger) == ("elsewhere", source.model, False)
    assert [task.name for task in moved.tasks] == ["sst2"]
    assert (moved.precision, moved.shared_labels) == ("fp32", False)


@pytest.mark.parametrize(("shared", "message"), [(None, "is missing"), (1, "must be true or false, got 1")])
def test_whether_labels_are_shared_must_be_said(shared: int | None, message: str, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    folder = tmp_path / "run" / "continual-ft" / "seed-0"

    def change(outcome: dict[str, Any]) -> None:
        outcome["details"]["bound"].pop("shared_labels")
        outcome["details"]["bound"] |= {} if shared is None else {"shared_labels": shared}

    change_outcome(folder, change)
    with pytest.raises(RunError, match=rf"details\.bound\.shared_labels {message}"):
        Source.of(tmp_path / "run", strategy="continual-ft")


def test_a_ledger_alone_needs_its_model(run: Path) -> None:
    ledger = saved_file(run)
    source = Source.of(ledger, model="minilm")
    assert (source.file, source.model, source.strategy, source.tasks) == (ledger, "minilm", "", ())
    for more in ({}, {"model": "minilm", "seed": 0}, {"model": "minilm", "strategy": "wsn"}):
        with pytest.raises(UsageError, match="Give --model, and neither --strategy nor --seed"):
            Source.of(ledger, **more)  # type: ignore[arg-type]


def test_a_strategy_or_seed_that_is_not_there_is_named(run: Path) -> None:
    with pytest.raises(
        RunError, match=r"nothing of lora to answer from\. It holds what these kept: continual-ft .*, wsn"
    ):
        Source.of(run, strategy="lora")
    with pytest.raises(RunError, match="nothing of seed 7 to answer from"):
        Source.of(run, 7)
