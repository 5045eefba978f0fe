"""Whatever a strategy keeps answers only for the labels, the prompts, the tokenizer and the network of its run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forgetfree import Predictor, cli
from forgetfree.errors import LedgerError, RunError
from forgetfree.json_file import sign

MakeRun = Callable[..., Path]
STRATEGIES = ("grafting-continual", "lora", "continual-ft", "fine-tune")
each = pytest.mark.parametrize("strategy", STRATEGIES)
of_run = pytest.mark.parametrize("strategy", STRATEGIES[1:])  # whose labels stand in config.json


@pytest.fixture
def run(finished_run: MakeRun, tmp_path: Path) -> Path:
    made = finished_run("bert", *STRATEGIES, stream="qnli,sst2", more=("--seed", "0", "--seed", "1"))
    return Path(shutil.copytree(made, tmp_path / "run"))


def change(run: Path, changes: Callable[[Any], object]) -> None:
    """Change config.json, and its checksum: what binds answers is not that alone."""
    path = run / "config.json"
    config = json.loads(path.read_text())
    changes(config)
    path.write_text(json.dumps(sign(config)))


def test_a_ledger_says_itself_what_its_labels_are(run: Path) -> None:
    expected = Predictor.of_run(run).answer("sst2", ["a film"])
    change(run, lambda config: config["tasks"][1]["labels"].reverse())
    change(run, lambda config: config["tasks"].reverse())
    assert Predictor.of_run(run).answer("sst2", ["a film"]) == expected


@of_run
def test_labels_that_are_turned_round_answer_nothing(run: Path, strategy: str, tmp_path: Path, capsys: Any) -> None:
    asked = ("--task", "sst2", "--strategy", strategy)
    assert cli.main(["predict", str(run), *asked, "a film"]) == 0
    change(run, lambda config: config["tasks"][1]["labels"].reverse())
    capsys.readouterr()
    assert cli.main(["predict", str(run), *asked, "a film"]) == 1
    said = capsys.readouterr().err
    assert "labels of task 'sst2': expected negative, positive, got positive, negative. Put back" in said
    assert cli.main(["export", str(run), *asked, "--out", str(tmp_path / "model")]) == 1
    assert not (tmp_path / "model").exists()


def test_another_way_to_find_the_task_answers_nothing(finished_run: MakeRun, tmp_path: Path) -> None:
    """It stands in config.json alone, and each way gives other answers."""
    made = finished_run("bert", "fine-tune", stream="qnli,sst2", more=("--set", "scenario=class"))
    run = Path(shutil.copytree(made, tmp_path / "run"))
    Predictor.of_run(run)
    change(run, lambda config: config["options"]["fine-tune"].update(task_inference="router"))
    with pytest.raises(RunError, match="differ in the task_inference: expected 'last', got 'router'"):
        Predictor.of_run(run)


@of_run
def test_tasks_in_another_order_answer_nothing(run: Path, strategy: str) -> None:
    change(run, lambda config: config["tasks"].reverse())
    with pytest.raises(RunError, match="differ in the order of tasks: expected qnli, sst2, got sst2, qnli"):
        Predictor.of_run(run, 0, strategy)


def test_a_config_that_was_changed_answers_nothing(run: Path) -> None:
    path = run / "config.json"
    path.write_text(path.read_text().replace('"precision": "fp32"', '"precision": "bf16"'))
    with pytest.raises(RunError, match=r"config\.json: checksum must be that of the content.* restore it from a copy"):
        Predictor.of_run(run, 0, "lora")


def test_one_readout_for_all_labels_is_not_made_of_several(run: Path) -> None:
    change(run, lambda config: config.update(scenario="class"))
    with pytest.raises(RunError, match="readout of all tasks' labels together: expected False, got True"):
        Predictor.of_run(run, 0, "lora")


@each
def test_another_tokenizer_answers_nothing(
    run: Path, strategy: str, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(model_directory("bert"), tmp_path / "model"))
    path = model / "tokenizer.json"
    described = json.loads(path.read_text())
    words = described["model"]["vocab"]
    first, second = list(words)[-2:]
    words[first], words[second] = words[second], words[first]
    path.write_text(json.dumps(described))
    with pytest.raises((RunError, LedgerError), match=r"would not answer as .*: the tokenizer"):
        Predictor.of_run(run, 0, strategy, str(model))


def test_a_unit_that_does_not_say_it_answers_nothing(run: Path) -> None:
    from forgetfree.results.unit_folder import read_record

    folder = run / "lora" / "seed-0"
    record = read_record(folder)
    del record["details"]["bound"], record["checksum"]
    (folder / "unit.json").write_text(json.dumps(sign(record)))
    with pytest.raises(
        RunError, match=r"unit\.json: details\.bound .*missing.* Restore it from a copy, or run the stream"
    ):
        Predictor.of_run(run, 0, "lora")


def test_a_file_outside_its_run_answers(run: Path) -> None:
    (run / "lora" / "seed-0" / "unit.json").unlink()
    assert Predictor.of_run(run, 0, "lora").answer("sst2", ["a film"])
