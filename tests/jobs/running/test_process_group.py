"""Units trained by several processes, from the command line: the same files, refusals, and a process that is killed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import last_of_each

import forgetfree
from forgetfree import cli, device
from forgetfree.device import find_device, give_device, spread
from forgetfree.errors import UsageError
from forgetfree.jobs.running.workers import devices_of_workers

STRATEGIES = ["fine-tune", "grafting-continual", "replay"]
QUICK = {"steps": 6, "sparsity": 0.1, "mask_steps": 3, "optimizer": "adamw", "learning_rate": 0.001}


@pytest.fixture
def words(data_directory: Path, model_directory: Any) -> list[str]:
    """A run of two strategies on two tasks, tiny; dropout is on."""
    return [
        *("run", "qnli,ag_news", "--data", str(data_directory), "--model", str(model_directory("bert"))),
        *("--readout", "linear", *(word for name in STRATEGIES for word in ("--strategy", name))),
        *(word for key, value in QUICK.items() for word in ("--set", f"{key}={value}")),
    ]


def outcome(out: Path) -> dict[str, str]:
    """SHA-256 of ledgers, predictions, scores and fine-tuned models, by their names."""
    files = [path for path in sorted(out.rglob("*")) if path.suffix in (".safetensors", ".csv")]
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run(words: list[str], out: Path, *more: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(("-m", *launcher) if launcher else ()), "-m", "forgetfree"]
    return subprocess.run([*command, *words, *more, "--out", str(out)], capture_output=True, text=True, timeout=600)


@pytest.mark.sampled(share=0.2)
@pytest.mark.slow
def test_one_two_and_four_processes_write_the_same_files(words: list[str], tmp_path: Path) -> None:
    """torchrun starts two processes here; the next test starts two by ``processes=2``."""
    for processes in ("1", "4"):
        done = run(words, tmp_path / processes, "--processes", processes)
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr and "Traceback" not in done.stderr
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(words, tmp_path / "torchrun", launcher=torchrun)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Report: ") == 1  # the others are silent
    expected = outcome(tmp_path / "1")
    assert {"grafting-continual/seed-0/ledger.safetensors", "replay/seed-0/scores.csv"} <= expected.keys()
    for name in ("4", "torchrun"):
        assert outcome(tmp_path / name) == expected
    config = json.loads((tmp_path / "4" / "config.json").read_text())
    assert config["run"]["set"]["parts"] == "4"
    sent = json.loads((tmp_path / "4" / "grafting-continual" / "seed-0" / "unit.json").read_text())["sent"]
    assert sent["train"]["steps"] == 12  # of two tasks; θ_ft was fine-tune's
    assert sent["train"]["bytes"] / 12 < sent["localize"]["bytes"] / sent["localize"]["steps"] / 5
    assert "sent" not in json.loads((tmp_path / "1" / "fine-tune" / "seed-0" / "unit.json").read_text())


@pytest.mark.sampled(share=0.1)
@pytest.mark.slow
def test_a_notebook_trains_by_two_processes_what_the_command_line_trains_by_one(
    words: list[str], data_directory: Path, model_directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "no notebook can be run here: pip install 'forgetfree[dev]'"
    nbclient, nbformat = (pytest.importorskip(name, reason=reason) for name in ("nbclient", "nbformat"))
    pytest.importorskip("ipykernel", reason=reason)
    monkeypatch.setenv("PYTHONPATH", str(Path(forgetfree.__file__).parents[1]))
    given = {"data": str(data_directory), "model": str(model_directory("bert")), "readout": "linear", **QUICK}
    call = f"forgetfree.run('qnli,ag_news', strategies={STRATEGIES}, processes=2, out='two', **{given})"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(f"import forgetfree\n{call}")])
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert run(words, tmp_path / "one", "--processes", "1").returncode == 0
    assert outcome(tmp_path / "two") == outcome(tmp_path / "one")
    assert "sent" in json.loads((tmp_path / "two" / "fine-tune" / "seed-0" / "unit.json").read_text())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"processes": 0}, "processes must be at least 1, got 0"),
        ({"processes": 2, "jobs": 2}, "processes=2 trains one unit at a time, got jobs=2"),
        ({"processes": 2, "parts": 3}, "parts must be a power of two"),
        (
            {"processes": 2, "optimizer": lambda moved: torch.optim.Adam(moved)},
            "Other processes load all by name, and given are",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_python_too(
    data_directory: Path, model_directory: Any, tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    given = {"data": data_directory, "model": model_directory("bert"), "out": tmp_path / "out", "progress": False}
    with pytest.raises(UsageError, match=message):
        forgetfree.run("sst2", **given | more)
    with pytest.raises(UsageError, match=message):
        forgetfree.graft("sst2", **given | more)
    assert not (tmp_path / "out").exists()


def longer(words: list[str]) -> list[str]:
    """The run without its last strategy, in more steps."""
    at = words.index(STRATEGIES[-1])
    return last_of_each([*words[: at - 1], *words[at + 1 :], "--set", "steps=40"])


@pytest.fixture
def running(words: list[str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of two processes, in its training."""
    given = [*longer(words), "--processes", "2", "--quiet", "--out", str(tmp_path / "out")]
    started = subprocess.Popen(
        [sys.executable, "-m", "forgetfree", *given], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        history, deadline = tmp_path / "out" / "fine-tune" / "seed-0" / "history.jsonl", time.monotonic() + 200
        while not (history.is_file() and history.read_text().count("fine_tune") > 3):
            assert started.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield started
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.communicate()


def child_of(pid: int) -> int:
    """The process that trains with ``pid``: multiprocessing's tracker of resources is no such."""
    listed = subprocess.run(
        ["ps", "-ww", "--ppid", str(pid), "-o", "pid=,args="], capture_output=True, text=True
    ).stdout
    (other,) = [line.split()[0] for line in listed.splitlines() if "spawn_main" in line]
    return int(other)


@pytest.mark.sampled(share=0.1)
@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_run_and_it_resumes(
    running: subprocess.Popen[str], words: list[str], tmp_path: Path
) -> None:
    os.kill(child_of(running.pid), signal.SIGKILL)
    _, error = running.communicate(timeout=30)
    assert running.returncode == 1
    last = error.strip().splitlines()[-1]
    assert "A process was stopped from outside" in last and "the same command with --resume" in last
    assert "Traceback" not in error
    given = longer(words)
    done = run(given, tmp_path / "out", "--processes", "2", "--resume")
    assert done.returncode == 0, done.stderr
    assert run(given, tmp_path / "whole", "--processes", "1").returncode == 0
    assert outcome(tmp_path / "out") == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_the_others_end_with_the_first(running: subprocess.Popen[str]) -> None:
    other = child_of(running.pid)
    running.kill()
    for _ in range(200):
        try:
            os.kill(other, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("the other process lives on")


@pytest.mark.sampled("more3-cannot share parts=4 evenly", "more7---processes")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--processes", "0"], "--processes must be at least 1, got 0."),
        (["--processes", "3"], "--processes 3 cannot share parts=4 evenly."),
        (["--processes", "2", "--set", "parts=3"], "parts must be a power of two"),
        (["--processes", "8", "--set", "replay.parts=2"], "cannot share parts=4 evenly"),
        (["--processes", "2", "--jobs", "2"], "--processes 2 trains one unit at a time, got --jobs 2, too."),
        (["--processes", "2", "--set", "accumulation=2"], "parts=4 cuts batches already, got accumulation=2."),
        (["--processes", "2", "--set", "batch_size=2"], "at most batch_size=2, got 4"),
        (["--processes", "two"], "--processes"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert cli.main([*words, *more, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_each_process_takes_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "devices", lambda: ["cpu", "cuda:0", "cuda:1"])
    monkeypatch.setattr(device, "_own_number", None)
    assert [find_device(name) for name in ("auto", "cuda", "cuda:*", "cuda:1", "cpu")] == [
        *("cuda", "cuda", "cuda", "cuda:1", "cpu")
    ]
    give_device(1)
    assert [find_device(name) for name in ("auto", "cuda", "cuda:*", "cuda:0", "cpu")] == [
        *("cuda:1", "cuda:1", "cuda:1", "cuda:0", "cpu")
    ]


def test_workers_are_dealt_out_over_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "devices", lambda: ["cpu", "cuda:0", "cuda:1", "cuda:2"])
    assert spread("cuda:*") == [0, 1, 2]
    assert spread("cuda:1") == spread("cuda") == spread("cpu") == []
    assert devices_of_workers([0, 1, 2], 4) == [0, 1, 2, 0]
    assert devices_of_workers([], 2) == [None, None]
