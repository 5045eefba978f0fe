"""`forgetfree convert` takes the tasks of a run as it takes the files of grafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forgetfree import Ledger, cli

RUN = "graft-retrain"


@pytest.fixture(scope="module")
def run(model_directory: Callable[[str], Path], data_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a strategy whose grafts each stand on θ_pre, of one that keeps no ledger, and of the union."""
    out = tmp_path_factory.mktemp("grafts") / "run"
    where = ["--data", str(data_directory), "--model", str(model_directory("bert")), "--out", str(out)]
    sets = ["steps=2", "sparsity=0.05", "mask_steps=1", "learning_rate=0.5", r"graftable=(query|key|dense)\.weight"]
    strategies = [word for name in (RUN, "continual-ft", "grafting-continual") for word in ("--strategy", name)]
    words = ["run", "qnli,ag_news,sst2", *where, "--shots", "4", "--test-limit", "4", *strategies]
    assert cli.main([*words, *(word for each in sets for word in ("--set", each))]) == 0
    return out


@pytest.fixture
def files(run: Path, tmp_path: Path) -> dict[str, str]:
    """The grafts of the run as files."""
    ledger = Ledger.load(run / RUN / "seed-0" / "ledger.safetensors")
    for task in ledger.tasks:
        ledger.graft(task).save(tmp_path / f"{task}.safetensors")
    return {task: str(tmp_path / f"{task}.safetensors") for task in ledger.tasks}


def test_a_task_of_a_run_is_converted_as_its_graft_is(
    run: Path, files: dict[str, str], model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    of_run, of_file = tmp_path / "of-run", tmp_path / "of-file"
    shira = ["--to", "shira", "--out"]
    assert cli.main(["convert", str(run), "--strategy", RUN, "--task", "ag_news", *shira, str(of_run)]) == 0
    assert cli.main(["convert", files["ag_news"], "--model", str(model_directory("bert")), *shira, str(of_file)]) == 0
    for name in ("adapter_model.safetensors", "readout.safetensors", "graft_origin.json"):
        assert (of_run / name).read_bytes() == (of_file / name).read_bytes(), name


def test_what_does_not_go_together_is_refused(
    run: Path, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [str(run), "--strategy", RUN]
    for words, code, told in (
        (["convert", *own, "--to", "shira"], 2, "holds qnli, ag_news, sst2. Give one of them by --task"),
        (["convert", *own, "--to", "shira", "--task", "x"], 2, "There is no task x"),
        (["convert", *own, "--to", "graft"], 2, "are for --to shira"),
    ):
        assert cli.main([*words, "--out", str(tmp_path / "new")]) == code, words
        assert told in capsys.readouterr().err, words
        assert not (tmp_path / "new").exists()
