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
    with pytest.raises(RunError, match="checksum must be that of the content"):
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


# -- Answers in a report ---------------------------------------------------------------------------------


def left_out(run: Path, capsys: Any) -> str:
    capsys.readouterr()
    assert cli.main(["report", str(run), "--format", "markdown"]) == 0
    shown = capsys.readouterr().out
    return "".join(line for line in shown.splitlines() if "are left out" in line)


def test_answers_of_another_seed_are_left_out_of_a_report(run: Path, capsys: Any) -> None:
    assert left_out(run, capsys) == ""
    exchange(run, "lora", "predictions.safetensors")
    found = left_out(run, capsys)
    assert "Answers of lora, seed 0, are left out" in found and "is not the file that its unit made" in found
    exchange(run, "lora", "history.jsonl")
    seconds = run / "lora" / "seed-0" / "seconds-per-task.json"  # two seeds may take as long as each other
    seconds.write_bytes(seconds.read_bytes() + b" ")
    found = left_out(run, capsys)
    assert "Losses of lora, seed 0, are left out" in found and "Seconds per task of lora, seed 0, are left out" in found


def test_a_report_on_a_pipe_ends(run: Path, tmp_path: Path, capsys: Any) -> None:
    for name in ("predictions.safetensors", "history.jsonl", "seconds-per-task.json"):
        path = run / "lora" / "seed-0" / name
        path.unlink()
        os.mkfifo(path)
    assert "it is a pipe or a device" in left_out(run, capsys)
    (run / "lora" / "seed-0" / "unit.json").unlink()
    assert "it is a pipe or a device" in left_out(run, capsys)
    os.mkfifo(tmp_path / "results.json")
    for path in (tmp_path, tmp_path / "results.json"):
        assert cli.main(["report", str(path)]) == 1
        assert "pipe or a device" in capsys.readouterr().err


def test_a_flipped_bit_of_an_answer_is_seen_without_a_record(run: Path, capsys: Any) -> None:
    folder = run / "lora" / "seed-0"
    (folder / "unit.json").unlink()
    assert left_out(run, capsys) == ""
    path = folder / "predictions.safetensors"
    content = bytearray(path.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1  # the lowest bit of the first number
    path.write_bytes(content)
    assert "its contents do not match its checksum" in left_out(run, capsys)


def test_answers_of_another_type_are_named(run: Path, capsys: Any) -> None:
    import numpy as np
    import torch
    from safetensors.torch import load_file

    from forgetfree.jobs.predictions import PREDICTION_FILE

    folder = run / "lora" / "seed-0"
    (folder / "unit.json").unlink()
    path = folder / "predictions.safetensors"
    tensors = {name: each.bfloat16() if "logits" in name else each for name, each in load_file(path).items()}
    assert torch.bfloat16 in {each.dtype for each in tensors.values()}
    path.write_bytes(PREDICTION_FILE.content(tensors))
    found = left_out(run, capsys)
    try:
        np.dtype("bfloat16")
    except TypeError:
        reason = "data type 'bfloat16' not understood"
    else:  # an installed package teaches NumPy the type: they are read, and do not have the ECE of the results
        reason = "as in the results"
    assert "Answers of lora, seed 0, are left out" in found and reason in found
