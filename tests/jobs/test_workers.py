"""Units measured in parallel: the results are the same, and no worker is left after an error."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from surroundings import tell_surroundings
from tiny import last_of_each

from forgetfree import cli
from forgetfree.errors import RunError
from forgetfree.files import write_json
from forgetfree.jobs import workers
from forgetfree.jobs.config import Execution, RunConfig, prepared
from forgetfree.jobs.run import run as perform
from forgetfree.jobs.run_directory import Unit
from forgetfree.jobs.workers import WorkerProcesses, units_at_a_time

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def grafts(data_directory: Path, model_directory: Any) -> list[str]:
    """Return the words of tiny grafts with four seeds."""
    seeds = [part for seed in "0123" for part in ("--seed", seed)]
    quick = ["--shots", "4", "--sparsity", "0.1", "--readout", "linear", "--set", "steps=2", "--set", "mask_steps=1"]
    return [
        "graft", "sst2", "--data", str(data_directory), "--model", str(model_directory("bert")), *seeds, *quick,
        "--set", "threads=1",
    ]  # fmt: skip


def none_is_left() -> bool:
    """Return whether all workers end within ten seconds."""
    for _ in range(100):
        if not multiprocessing.active_children():
            return True
        time.sleep(0.1)
    return False


def test_an_error_of_a_worker_is_told_as_one_paragraph(
    grafts: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = last_of_each([*grafts, "--set", "learning_rate=1e30", "--set", "optimizer=sgd", "--set", "steps=5"])
    assert cli.main([*given, "--jobs", "2", "--out", str(tmp_path / "out")]) == 1
    error = capfd.readouterr().err
    assert "The loss became" in error.strip().splitlines()[-1] and "Traceback" not in error
    assert none_is_left()


def test_a_worker_that_is_killed_is_told(data_directory: Path, model_directory: Any, tmp_path: Path) -> None:
    config = RunConfig(
        stream="sst2",
        strategy=("bare-graft",),
        model=str(model_directory("bert")),
        data=str(data_directory),
        shots=4,
        seed=(0, 1, 2, 3),
        set={"steps": 100_000, "mask_steps": 1, "sparsity": 0.1, "threads": 1},
        out=str(tmp_path / "out"),
    )

    def kill() -> None:
        while not (children := multiprocessing.active_children()):
            time.sleep(0.1)
        children[0].kill()

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(
        RunError, match=r"(?s)process was killed, .*0 of 4 units finished.* --resume --out .*\. Add --jobs 1"
    ):
        perform(prepared(config), Execution(jobs=2))
    assert none_is_left()


@pytest.fixture
def busy(grafts: list[str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a run in its own process group, with both workers busy; it is killed at the end."""
    given = last_of_each([*grafts, "--set", "mask_steps=100000", "--jobs", "2", "--out", str(tmp_path / "out")])
    running = subprocess.Popen(
        [sys.executable, "-m", "forgetfree", *given],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Background jobs of a shell ignore interrupts, and their children would, too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 120
        while len(list((tmp_path / "out" / "fine-tuned").glob("*.safetensors"))) < 2:
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.1)
        yield running
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.communicate()


def group_is_gone(running: subprocess.Popen[str]) -> bool:
    """Return whether all processes of the group end within twenty seconds."""
    for _ in range(200):
        try:
            os.killpg(running.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
@pytest.mark.sampled(share=0.15)
def test_workers_end_with_their_parent_even_if_it_is_killed(busy: subprocess.Popen[str]) -> None:
    busy.kill()
    busy.wait(timeout=20)
    assert group_is_gone(busy)


@pytest.mark.sampled(share=0.15)
def test_an_error_of_the_parent_stops_the_workers(
    grafts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the disk is full, for example, the remaining units are not measured."""

    def full(path: Path, content: Any) -> None:
        if any((tmp_path / "out").rglob("unit.json")):
            raise OSError(28, "No space left on device")
        write_json(path, content)

    monkeypatch.setattr("forgetfree.results.report.run_report.write_json", full)
    many = [part for seed in range(4, 20) for part in ("--seed", str(seed))]
    with pytest.raises(OSError, match="No space left"):
        more = ["--set", "steps=100", "--debug", "--jobs", "2", "--out", str(tmp_path / "out")]
        cli.main(last_of_each([*grafts, *many, *more]))
    assert none_is_left()
    assert len(list((tmp_path / "out" / "fine-tuned").glob("*.safetensors"))) < 20


def test_workers_have_the_environment_and_the_directory_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds also for workers forked from a process that started with others."""
    units = [Unit({"strategy": "mine", "seed": seed}, tmp_path / f"seed-{seed}") for seed in (0, 1)]
    for value in ("once", "later"):
        (tmp_path / value).mkdir()
        monkeypatch.chdir(tmp_path / value)
        monkeypatch.setenv("FORGETFREE_TOLD", value)
        assert len(list(WorkerProcesses(2).run(tell_surroundings, units))) == 2
        for unit in units:
            assert unit.directory.with_suffix(".txt").read_text() == f"{value} {tmp_path / value}"


@pytest.mark.slow
@pytest.mark.sampled(share=0.15)
def test_no_module_of_the_working_directory_takes_the_place_of_ours(tmp_path: Path) -> None:
    """A file named transformers.py in the working directory is not imported by the worker."""
    (tmp_path / "transformers.py").write_text("open('wrong', 'w')")
    code = f"""
import sys
sys.path.remove("")
from pathlib import Path
from forgetfree.jobs.run_directory import Unit
from forgetfree.jobs.workers import WorkerProcesses
from surroundings import tell_surroundings
units = [Unit({{"strategy": "mine", "seed": 0}}, Path({str(tmp_path)!r}) / "seed-0")]
print(len(list(WorkerProcesses(1).run(tell_surroundings, units))))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300
    )
    assert done.stdout == "1\n", done.stderr
    assert not (tmp_path / "wrong").exists()


# -- The number of workers -------------------------------------------------------------------------------


def test_as_many_as_cores_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit of a billion entries takes 22 GB; at least one unit is tried."""
    machine = {"cores": 8, "gigabytes": 64}
    monkeypatch.setattr(workers, "machine_memory", lambda: machine["gigabytes"] * 10**9)
    monkeypatch.setattr(workers, "cores", lambda: machine["cores"])
    assert (units_at_a_time(6, 10_000_000), units_at_a_time(6, 1_000_000_000)) == (6, 2)
    machine |= {"cores": 2, "gigabytes": 16}
    assert (units_at_a_time(6, 10_000_000), units_at_a_time(6, 1_000_000_000)) == (2, 1)


@pytest.mark.slow
def test_they_have_the_bits_of_one_thread(data_directory: Path, model_directory: Any, tmp_path: Path) -> None:
    fixed = ["run", "sst2", "--data", str(data_directory), "--model", str(model_directory("bert"))]
    fixed += ["--shots", "4", "--steps", "3", "--strategy", "fine-tune", "--strategy", "continual-ft"]
    for out, how in (("auto", ["--jobs", "auto"]), ("one", ["--jobs", "1", "--threads", "1"])):
        assert cli.main([*fixed, *how, "--out", str(tmp_path / out)]) == 0
    for strategy in ("fine-tune", "continual-ft"):
        auto, one = (tmp_path / out / strategy / "seed-0" / "predictions.safetensors" for out in ("auto", "one"))
        assert auto.read_bytes() == one.read_bytes()
    assert json.loads((tmp_path / "auto" / "config.json").read_text())["machine"]["threads"] == 1
