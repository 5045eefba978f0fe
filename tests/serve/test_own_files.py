"""A unit's files answer only where they are those that the unit made: files of another seed or run are refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forgetfree import Predictor, TaskSwitch, cli, load_results
from forgetfree.errors import ReportError, RunError

MakeRun = Callable[..., Path]
#: What each strategy keeps in the folder of a unit.
KEPT = {
    "grafting-continual": "ledger.safetensors",
    "lora": "adapters.safetensors",
    "continual-ft": "checkpoint.safetensors",
    "fine-tune": "fine-tuned.json",
}


@pytest.fixture
def run(finished_run: MakeRun, tmp_path: Path) -> Path:
    made = finished_run("bert", *KEPT, stream="qnli,sst2", more=("--seed", "0", "--seed", "1"))
    return Path(shutil.copytree(made, tmp_path / "run"))


def exchange(run: Path, strategy: str, name: str) -> Path:
    """Put seed 1's file in place of seed 0's."""
    path = run / strategy / "seed-0" / name
    shutil.copy(run / strategy / "seed-1" / name, path)
    return path


@pytest.mark.parametrize("strategy", KEPT)
def test_what_another_seed_kept_answers_nothing(run: Path, strategy: str, tmp_path: Path, capsys: Any) -> None:
    asked = ("--task", "sst2", "--strategy", strategy, "--seed", "0")
    assert cli.main(["predict", str(run), *asked, "a film"]) == 0
    path = exchange(run, strategy, KEPT[strategy])
    capsys.readouterr()
    assert cli.main(["predict", str(run), *asked, "a film"]) == 1
    assert "is not the file that its unit made" in capsys.readouterr().err
    assert cli.main(["export", str(run), *asked, "--out", str(tmp_path / "model")]) == 1
    with pytest.raises(RunError, match=f"{path.name} is not the file that its unit made: .*Restore it from a copy"):
        Predictor.of_run(run, 0, strategy)


def test_a_ledger_of_another_seed_is_refused_wherever_it_is_read(
    run: Path, model_directory: Callable[[str], Path], tmp_path: Path, capsys: Any
) -> None:
    path, other = exchange(run, "grafting-continual", "ledger.safetensors"), str(model_directory("bert"))
    alone = str(shutil.copy(path, tmp_path / "ledger.safetensors"))
    for command in (
        ("ledger", "show", str(path)),
        ("ledger", "verify", str(path)),
        ("predict", str(path), "--model", other, "--task", "sst2", "a film"),
    ):
        assert cli.main(list(command)) == 1, command
        assert "is not the file that its unit made" in capsys.readouterr().err
    with pytest.raises(RunError, match="its unit made"):
        TaskSwitch(path, object())
    with pytest.raises(ReportError, match="its unit made"):
        load_results(run).ledger("grafting-continual", 0)
    assert cli.main(["ledger", "show", alone]) == 0  # which was taken out of its run


def test_the_folder_of_another_seed_answers_nothing(run: Path) -> None:
    shutil.rmtree(run / "lora" / "seed-0")
    shutil.copytree(run / "lora" / "seed-1", run / "lora" / "seed-0")
    with pytest.raises(RunError, match=r"unit.json is another unit's: expected the seed 0, got 1\."):
        Predictor.of_run(run, 0, "lora")


def test_a_damaged_record_answers_nothing(run: Path) -> None:
    path = run / "lora" / "seed-0" / "unit.json"
    path.write_text(path.read_text().replace('"bytes": ', '"bytes": 1'))
    with pytest.raises(RunError, match="is not the file that its unit made"):
        Predictor.of_run(run, 0, "lora")


def test_a_fine_tuned_model_under_another_name_answers_nothing(run: Path) -> None:
    first, second = sorted((run / "fine-tuned").glob("sst2-*.safetensors"))
    first.rename(first.with_name("taken"))
    shutil.copy(second, first)
    answered = 0
    for seed in (0, 1):
        predictor = Predictor.of_run(run, seed, "fine-tune")
        try:
            answered += len(predictor.answer("sst2", ["a film"]))
        except RunError as error:
            assert "another one has its name" in str(error)
    assert answered == 1


# -- A report --------------------------------------------------------------------------------------------


def refusal_of_report(run: Path, capsys: Any) -> str:
    capsys.readouterr()
    assert cli.main(["report", str(run)]) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["predictions.safetensors", "history.jsonl", "scores.csv"])
def test_what_another_seed_measured_is_in_no_report(name: str, run: Path, capsys: Any) -> None:
    exchange(run, "lora", name)
    assert f"{name} is not the file that its unit made" in refusal_of_report(run, capsys)


def test_a_report_on_a_pipe_ends(run: Path, capsys: Any) -> None:
    path = run / "lora" / "seed-0" / "predictions.safetensors"
    path.unlink()
    os.mkfifo(path)
    assert "it is a pipe or a device" in refusal_of_report(run, capsys)
