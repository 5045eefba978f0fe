"""`forgetfree merge` takes the tasks of a run as it takes the files of grafts."""

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


@pytest.mark.sampled(share=0.4)
def test_tasks_of_a_run_are_merged_as_their_grafts_are(
    run: Path, files: dict[str, str], model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    model = ["--model", str(model_directory("bert"))]
    by, out = ["--by", "ties", "--density", "0.04"], tmp_path / "of-run.safetensors"
    chosen = ["--task", "qnli", "--task", "sst2"]
    assert cli.main(["merge", str(run), "--strategy", RUN, *chosen, *by, "--out", str(out)]) == 0
    assert cli.main(["merge", files["qnli"], files["sst2"], *model, *by, "--out", str(tmp_path / "of-files")]) == 0
    assert out.read_bytes() == (tmp_path / "of-files").read_bytes()
    assert Ledger.load(out).tasks == ["qnli", "sst2"]

    ledger = str(run / RUN / "seed-0" / "ledger.safetensors")
    every = tmp_path / "every.safetensors"
    assert cli.main(["merge", ledger, *model, "--out", str(every)]) == 0
    assert Ledger.load(every).tasks == ["qnli", "ag_news", "sst2"]
    mixed = ["merge", str(run), files["ag_news"], "--strategy", RUN, "--task", "qnli"]
    assert cli.main([*mixed, "--out", str(tmp_path / "mixed.safetensors")]) == 0
    assert Ledger.load(tmp_path / "mixed.safetensors").tasks == ["qnli", "ag_news"]


def test_the_union_is_merged_and_what_that_means_is_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "merged.safetensors"
    assert cli.main(["merge", str(run), "--by", "union", "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert "Taking the grafts from" in said and "grafting-continual/seed-0" in said
    assert "each task has the entries of the tasks before it, too" in said
    kept = Ledger.load(run / "grafting-continual" / "seed-0" / "ledger.safetensors")
    assert Ledger.load(out).owned() == kept.owned()


def test_what_does_not_go_together_is_refused(
    run: Path, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [str(run), "--strategy", RUN]
    for words, code, told in (
        (
            ["merge", *own, "--task", "qnli", "--task", "nli"],
            2,
            "There is no task nli. Give one of these: qnli, ag_news",
        ),
        (["merge", *own, "--task", "qnli"], 2, "Merging takes two different grafts or more, got 1"),
        (["merge", *own, files["sst2"]], 2, "are both of task 'sst2'"),
        (["merge", str(run), "--strategy", "continual-ft"], 2, "continual-ft kept no ledger"),
        (["merge", str(run), "--seed", "7"], 1, "holds nothing of seed 7"),
        (["merge", files["qnli"], files["sst2"], "--task", "qnli"], 2, "a graft is of one task. Leave it out"),
        (["merge", files["qnli"], files["sst2"], "--seed", "0"], 2, "are for the directory of a run"),
    ):
        assert cli.main([*words, "--out", str(tmp_path / "new")]) == code, words
        assert told in capsys.readouterr().err, words
        assert not (tmp_path / "new").exists()
