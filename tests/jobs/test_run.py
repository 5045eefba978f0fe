"""Features of a run: resume, workers, cache, signals, failures, locks, kills."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from edited import write_config
from safetensors import SafetensorError
from tiny import last_of_each

from forgetfree import cli
from forgetfree.errors import (
    OutOfMemoryError,
    RunError,
    TrainingError,
    UsageError,
    first_line,
)
from forgetfree.files import locked
from forgetfree.jobs.config import USUAL, Execution, RunConfig, prepared
from forgetfree.jobs.progress import Progress
from forgetfree.jobs.run import run as perform
from forgetfree.jobs.run_directory import LOCK, Unit
from forgetfree.jobs.stream_loading import StreamLoader
from forgetfree.results.run_folder import RECORD, read_record
from forgetfree.training.monitor import Monitor

pytestmark = pytest.mark.usefixtures("one_thread")

Json = dict[str, Any]


@dataclass
class Command:
    """A run of two units.

    Attributes:
        config: the requested configuration.
        units: folders of the units.
    """

    config: Any
    units: tuple[str, ...]

    def perform(self, config: Any, execution: Execution = USUAL) -> Json:
        """Run a configuration, and return results.json."""
        perform(prepared(config), execution)
        return results_of(Path(config.out))

    def at(self, out: Path, **changes: Any) -> Any:
        """Return the configuration with another directory, and a cache of models beside it."""
        settings = {
            **self.config.set,
            "cache": str(out.parent / f"{out.name}-models"),
            **changes.pop("set", {}),
        }
        return self.config.model_copy(update={"out": str(out), "set": settings, **changes})

    def words(self, out: Path, *more: str) -> list[str]:
        """Return the same configuration as a command line."""
        config = self.config
        words = ["run", "sst2", "--strategy", "fine-tune", "--strategy", "grafting-continual"]
        fixed = [
            "--data",
            config.data,
            "--model",
            config.model,
            "--shots",
            "4",
            "--readout",
            "linear",
        ]
        sets = [word for key, value in config.set.items() for word in ("--set", f"{key}={value}")]
        cache = ["--set", f"cache={out.parent / f'{out.name}-models'}"]
        return last_of_each([*words, *fixed, *sets, *cache, "--jobs", "1", "--out", str(out), *more], "--jobs")


@pytest.fixture(scope="module")
def command(data_directory: Path, model_directory: Any) -> Command:
    """Return a run of one task by two strategies."""
    common: Json = {"data": str(data_directory), "model": str(model_directory("bert")), "readout": "linear"}
    common["set"] = {"steps": 2, "mask_steps": 1, "mask_batch_size": 8, "threads": 1, "sparsity": 0.05}
    both = ("fine-tune", "grafting-continual")
    config: Any = RunConfig(stream="sst2", strategy=both, shots=4, **common)
    return Command(config, tuple(f"{name}/seed-0" for name in both))


@pytest.fixture(scope="module")
def whole(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of an uninterrupted run by one job; tests only read it."""
    out = tmp_path_factory.mktemp("whole") / "out"
    command.perform(command.at(out))
    return out


def results_of(out: Path) -> Any:
    return json.loads((out / "results.json").read_text())


def timeless(value: Any) -> Any:
    """Return results without the values that differ from run to run."""
    if isinstance(value, dict):
        return {key: timeless(each) for key, each in value.items() if key not in ("seconds", "seconds_per_task")}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def bytes_of(out: Path) -> dict[str, bytes]:
    """Return the files of scores and tensors of all units."""
    kept = [path for path in out.rglob("*") if path.name == "scores.csv" or path.suffix == ".safetensors"]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in kept}


def failing(command: Command, monkeypatch: pytest.MonkeyPatch, error: BaseException, unit: int = 1) -> list[str]:
    """Let one unit fail; return a list that collects the folders of all units measured from then on."""
    make, measured = StreamLoader.strategy, list[str]()

    def fails(self: StreamLoader, name: str, seed: int, monitor: Monitor) -> Any:
        measured.append(f"{name}/seed-{seed}")
        if measured[-1] == command.units[unit]:
            raise error
        return make(self, name, seed, monitor)

    monkeypatch.setattr(StreamLoader, "strategy", fails)
    return measured


def test_two_jobs_write_what_one_writes(command: Command, whole: Path, tmp_path: Path) -> None:
    two, results = tmp_path / "two", results_of(whole)
    assert timeless(command.perform(command.at(two), Execution(jobs=2))) == timeless(results)
    assert bytes_of(two) == bytes_of(whole)
    models = [sorted(path.name for path in Path(f"{out}-models").iterdir()) for out in (whole, two)]
    assert models[0] == models[1]
    assert not (two / LOCK).exists() and results["failed"] == []


def test_a_unit_says_how_it_ended_and_what_it_wrote(command: Command, whole: Path) -> None:
    for folder in command.units:
        record = read_record(whole / folder)
        assert (record["status"], record["error"]) == ("done", None) and record["seconds"] >= 0
        assert {"torch", "forgetfree"} <= set(record["versions"]) and record["machine"]["device"] == "cpu"
        written = {path.name: path.stat().st_size for path in (whole / folder).iterdir() if path.name != RECORD}
        assert {name: file["bytes"] for name, file in record["files"].items()} == written
        history = [json.loads(line) for line in (whole / folder / "history.jsonl").read_text().splitlines()]
        assert all(set(line) == {"task", "phase", "step", "loss", "rate", "seconds"} for line in history) and history


def test_an_interrupted_job_goes_on_to_the_same_bytes(
    command: Command, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        failing(command, patch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            command.perform(command.at(out))
    kept = (out / command.units[0] / RECORD).read_bytes()
    assert timeless(command.perform(command.at(out), Execution(resume=True))) == timeless(results_of(whole))
    assert (out / command.units[0] / RECORD).read_bytes() == kept
    assert bytes_of(out) == bytes_of(whole)


@pytest.mark.sampled("error0")
@pytest.mark.parametrize("error", [TrainingError("The loss became nan."), ZeroDivisionError("oh")])
def test_a_failing_unit_stands_under_failed_and_is_run_again_alone(
    command: Command, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        failing(command, patch, error, unit=0)
        (failed,) = command.perform(command.at(out))["failed"]
    assert first_line(error) in failed["error"] and "\n" not in failed["error"]
    assert Unit(json.loads((out / command.units[1] / RECORD).read_text())["unit"], out / command.units[1]).is_done()
    with monkeypatch.context() as patch:
        again = failing(command, patch, error, unit=0)
        assert command.perform(command.at(out), Execution(resume=True))["failed"] and again == [command.units[0]]
    assert command.perform(command.at(out), Execution(resume=True))["failed"] == []
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        failing(command, patch, ZeroDivisionError("oh"), unit=0)
        command.perform(command.at(tmp_path / "debug"), Execution(debug=True))


def test_a_unit_with_a_damaged_file_is_told_and_run_again_alone(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command.perform(command.at(out))
    whole = bytes_of(out)
    history = out / command.units[1] / "history.jsonl"
    history.write_bytes(history.read_bytes().replace(b"1", b"2"))
    with monkeypatch.context() as patch:
        again = failing(command, patch, TrainingError(""), unit=0)
        command.perform(command.at(out), Execution(resume=True))
    assert again == [command.units[1]] and bytes_of(out) == whole
    assert "note: files of grafting-continual seed 0 are missing or have changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_stops_all_units(
    error: Exception, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(command, monkeypatch, error, unit=0)
    with pytest.raises(OSError, match="No space"):
        command.perform(command.at(tmp_path / "out"))
    assert not (tmp_path / "out" / command.units[0] / RECORD).exists()


def test_where_memory_is_short_all_units_stop_and_the_remedies_are_told(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(command, monkeypatch, torch.OutOfMemoryError("CUDA out of memory."), unit=0)
    with pytest.raises(OutOfMemoryError):
        command.perform(command.at(tmp_path / "called"))
    out = tmp_path / "out"
    assert cli.main(command.words(out)) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("forgetfree: error: There is not enough memory: CUDA out of memory. ")
    assert "a smaller batch_size, or accumulation" in said and f"--resume --out {out}." in said
    assert not any((out / unit / RECORD).exists() for unit in command.units)


def test_a_check_of_what_is_resumed_answers_as_resuming_does(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(command.words(out)) == 0
    config, begun = json.loads((out / "config.json").read_text()), out / "config.json"
    version = config | {"versions": config["versions"] | {"torch": "1.0"}}
    other = config | {"model": config["model"] | {"fingerprint": "0" * 64}}
    cases: list[tuple[Json, list[str], int, str]] = [
        (config, [], 0, ""),
        (config, ["--set", "momentum=0.5"], 2, "momentum"),
        (other, [], 1, "the weights of the model changed since it was started"),
        (version, [], 0, ""),
        ({}, [], 1, "config.json is not valid JSON"),
    ]
    for before, more, code, told in cases:
        answers = []
        for check in (["--check"], []):
            write_config(out, before) if before else begun.write_text("{")
            capsys.readouterr()
            assert cli.main(command.words(out, "--resume", *more, *check)) == code, told
            answers.append([line for line in capsys.readouterr().err.splitlines() if "error: " in line])
        assert answers[0] == answers[1] and told in "".join(answers[0])


def test_fine_tuned_models_are_taken_from_a_cache(command: Command, tmp_path: Path) -> None:
    phases: list[str] = []

    class Heard(Monitor):
        def phase(self, task: str, phase: Any, steps: int) -> Any:
            phases.append(phase)
            return super().phase(task, phase, steps)

    class Listening(Progress):
        def monitor(self, unit: str) -> Monitor:
            return Heard()

    shared: Json = {"set": {"cache": str(tmp_path / "models")}}
    first = command.perform(command.at(tmp_path / "first", **shared), Execution(progress=Listening()))
    assert "fine_tune" in phases
    phases.clear()
    shared["strategy"] = ("grafting-continual",)  # fine-tune would report that it has no step to take
    second = command.perform(command.at(tmp_path / "second", **shared), Execution(progress=Listening()))
    assert "fine_tune" not in phases
    assert timeless(first)["tasks"] == timeless(second)["tasks"]


def test_a_second_process_is_refused_and_nothing_is_lost(command: Command, whole: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with (
        locked(out / LOCK),
        pytest.raises(
            RunError, match=rf"Another process is working in {out}\. Wait until it ends, or give another --out"
        ),
    ):
        command.perform(command.at(out), Execution(resume=True))
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_more_seeds_are_more_units(command: Command, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    results = command.perform(command.at(whole, seed=(0, 1)))
    command.perform(command.at(out, seed=(0,)))
    assert timeless(command.perform(command.at(out, seed=(0, 1)), Execution(resume=True))) == timeless(results)
    assert bytes_of(out) == bytes_of(whole)


@pytest.mark.parametrize("jobs", [0, 2.5])
def test_jobs_must_be_a_whole_number_of_at_least_one(jobs: Any, command: Command, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"--jobs must be auto, ray or at least 1, got {jobs}\."):
        command.perform(command.at(tmp_path / "out"), Execution(jobs=jobs))


# -- Signals and kills -----------------------------------------------------------------------------------


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Yield a function that starts a command in its own process group, which is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def starts(words: list[str]) -> subprocess.Popen[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "forgetfree", *words],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield starts
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(process: subprocess.Popen[str], *paths: Path) -> None:
    deadline = time.monotonic() + 300
    while not any(path.is_file() and path.stat().st_size for path in paths):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


#: More steps than any test waits for.
ENDLESS = ("--set", "steps=1000000")


@pytest.mark.sampled(share=0.15)
@pytest.mark.slow
@pytest.mark.parametrize(("number", "jobs"), [(signal.SIGINT, "1"), (signal.SIGTERM, "2")])
def test_a_signal_ends_a_command_as_ctrl_c_does(
    command: Command, number: int, jobs: str, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    out = tmp_path / "out"
    process = start(command.words(out, *ENDLESS, "--jobs", jobs))
    # Units that share a fine-tuned model wait until one of them has made it.
    wait_for(process, *(out / unit / "history.jsonl" for unit in command.units))
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in error
    last = error.strip().splitlines()[-1]
    assert last.startswith(f"forgetfree: error: Interrupted. 0 of 2 units finished in {out}. ")
    assert last.endswith(f"To resume, repeat the command with --resume --out {out}.")
    assert not (out / LOCK).exists()
    with pytest.raises(ProcessLookupError):  # no worker is left within twenty seconds
        for _ in range(200):
            os.killpg(process.pid, 0)
            time.sleep(0.1)


@pytest.mark.sampled(share=0.15)
def test_two_units_that_need_one_model_make_it_once(data_directory: Path, model_directory: Any, tmp_path: Path) -> None:
    """They run at the same time: whichever comes second waits."""
    settings = {"mask_steps": 1, "threads": 1, "steps": 400, "sparsity": 0.05}
    both = ("fine-tune", "grafting-continual")
    common: Json = {
        "data": str(data_directory),
        "model": str(model_directory("bert")),
        "set": settings,
        "shots": 4,
    }
    config = RunConfig(stream="sst2", strategy=both, out=str(tmp_path / "out"), **common)
    perform(prepared(config), Execution(jobs=2))
    made = [
        name
        for name in both
        if '"fine_tune"' in (tmp_path / "out" / name / "seed-0" / "history.jsonl").read_text(encoding="utf-8")
    ]
    assert len(made) == 1
    assert sorted(path.suffix for path in (tmp_path / "out" / "fine-tuned").iterdir()) == [".safetensors"]
