"""``forgetfree ledger merge`` as a user calls it: two runs that were made apart answer from one file."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forgetfree import Ledger, Predictor, cli
from forgetfree.data.sources import load_tasks

OPTIONS = ("--steps", "3", "--set", "learning_rate=0.3", "--sparsity", "0.05", "--set", "mask_steps=1", "--quiet")


@pytest.fixture(scope="module")
def runs(
    model_directory: Callable[[str], Path], data_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """One of QNLI, one of AG News and QNLI, with other rows."""
    made = []
    for stream, shots in (("qnli", "4"), ("ag_news,qnli", "5")):
        out = tmp_path_factory.mktemp("run") / "out"
        places = ["--data", str(data_directory), "--model", str(model_directory("bert")), "--out", str(out)]
        how = ["--strategy", "grafting-continual", "--shots", shots, *OPTIONS]
        with redirect_stdout(io.StringIO()):
            assert cli.main(["run", stream, *places, *how]) == 0
        made.append(out)
    return made


def merge(*words: object) -> int:
    return cli.main(["ledger", "merge", *map(str, words)])


def test_two_runs_become_one(
    runs: list[Path],
    data_directory: Path,
    model_directory: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, model = tmp_path / "both.safetensors", str(model_directory("bert"))
    assert merge(*runs, "--out", out, "--as-versions", "--data", data_directory, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert [each["task"] for each in said["tasks"]] == Ledger.load(out).tasks == ["qnli", "ag_news", "qnli@2"]
    ledgers = [Ledger.load(run / "grafting-continual/seed-0/ledger.safetensors") for run in runs]
    first, _, last = said["tasks"]
    assert first["overlap"] == 0 and first["before"] == first["after"]
    assert last["overlap"] == len(ledgers[0].owned() & ledgers[1].owned()) > 0

    # The first run's task is answered bit for bit; so are the other's but for the entries that both own.
    merged, rows = Predictor.of_run(out, model=model), load_tasks("qnli,ag_news", str(data_directory))
    stored = load_file(runs[0] / "grafting-continual/seed-0/predictions.safetensors")
    assert torch.equal(merged.logits("qnli@1", rows[0].test), stored["qnli/logits"])
    score = float((merged.logits("qnli", rows[0].test).argmax(1).numpy() == rows[0].test.labels).mean())
    assert score == last["after"]
    line = json.loads((tmp_path / "audit.jsonl").read_text())
    assert (line["action"], line["tasks"]) == ("merge", said["tasks"])
    assert cli.main(["ledger", "verify", str(out), "--model", model]) == 0


def test_what_a_killed_merge_leaves_is_removed_by_the_next(runs: list[Path], tmp_path: Path) -> None:
    words = ["ledger", "merge", *map(str, runs), "--as-versions", "--out", str(tmp_path / "both.safetensors")]
    program = (
        "import os, signal, sys; from forgetfree import cli; "
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL); cli.main(sys.argv[1:])"
    )
    assert subprocess.run([sys.executable, "-c", program, *words], check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".both.safetensors.")
    assert merge(*runs, "--as-versions", "--out", tmp_path / "other.safetensors") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit.jsonl", "other.safetensors"]


def test_the_cost_is_said(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "both.safetensors"
    assert merge(*runs, "--out", out, "--as-versions") == 0
    first, second, third, last = capsys.readouterr().out.splitlines()
    assert first.startswith("qnli of ") and "owned by earlier" not in first
    assert second.startswith("ag_news of ") and "owned by earlier ledgers" in second
    assert third.startswith("qnli@2 (was qnli) of ")
    assert last.startswith(f"{out}: 3 tasks, ")


def test_wrong_input(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "both.safetensors"
    files = [run / "grafting-continual/seed-0/ledger.safetensors" for run in runs]
    for words, code, message in (
        ((*runs, "--out", out), 1, "Add --as-versions to have it as 'qnli@2'"),
        ((runs[0], runs[0], "--out", out), 2, "takes two different ledgers or more, got 1"),
        ((*files, "--out", files[0]), 2, "exists. Give a new name"),
        ((*files, "--out", out, "--as-versions", "--data", "demo"), 2, "Give --model, too"),
        ((files[0], tmp_path / "none", "--out", out), 1, "none"),
    ):
        assert merge(*words) == code, words
        assert message in capsys.readouterr().err
        assert not out.exists()
