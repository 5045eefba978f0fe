"""A unit is resumed from its checkpoint; all in one process, by interrupts at chosen steps."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forgetfree.errors import UsageError
from forgetfree.jobs import checkpoints, environment
from forgetfree.jobs.checkpoints import FileCheckpoint, pack, unpack
from forgetfree.jobs.config import USUAL, Execution, RunConfig, prepared
from forgetfree.jobs.history import History
from forgetfree.jobs.run import run as perform
from forgetfree.jobs.run_directory import holdings
from forgetfree.results.run_folder import CHECKPOINT
from forgetfree.results.table import Results
from forgetfree.tensor_file import TensorFile
from forgetfree.training.step import generators, set_generators

pytestmark = pytest.mark.usefixtures("one_thread")

Json = dict[str, Any]


def run(config: RunConfig, execution: Execution = USUAL) -> Results:
    """Run a configuration."""
    return perform(prepared(config), execution)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a checkpoint after every step."""
    monkeypatch.setattr(checkpoints, "INTERVAL", 0.0)
    monkeypatch.setattr(checkpoints, "SHARE", math.inf)


# -- A state as tensors and one text ---------------------------------------------------------------------


def test_a_state_comes_back_with_its_kinds() -> None:
    state = {0: {"a": torch.arange(3), "b": None}, "c": (1, 2.5, [True, "x", {}]), "d": -math.inf, "e": torch.ones(0)}
    text, tensors = pack(state)
    back = unpack(text, tensors)
    assert torch.equal(back[0].pop("a"), torch.arange(3)) and len(back.pop("e")) == 0
    assert back == {0: {"b": None}, "c": (1, 2.5, [True, "x", {}]), "d": -math.inf}
    with pytest.raises(TypeError):
        pack({"a": object()})


def test_generators_go_on_where_they_were() -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    np.random.randn()  # the second value of a pair is stored in the generator
    held = unpack(*pack(generators()))

    def draws() -> list[float]:
        return [random.random(), np.random.randn(), np.random.rand(), float(torch.rand(())), float(torch.randn(()))]

    first = draws()
    assert draws() != first
    set_generators(held)
    assert draws() == first


# -- Times of writing ------------------------------------------------------------------------------------


class Counter:
    """The state of a phase that counts its steps."""

    def __init__(self, start: int = 0) -> None:
        self.value = torch.tensor([float(start)])

    def state_dict(self) -> Json:
        return {"value": self.value}

    def load_state_dict(self, state: Json) -> None:
        self.value.copy_(state["value"])

    def step(self) -> None:
        self.value += 1


class Clock:
    """A clock set by hand, and the times at which files were written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds_a_write: float) -> None:
        self.now, self.written, write = 1000.0, list[float](), TensorFile.write

        def slow(*args: Any) -> None:
            self.written.append(self.now)
            self.now += seconds_a_write
            write(*args)

        monkeypatch.setattr(checkpoints.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(TensorFile, "write", slow)


@pytest.mark.parametrize(("seconds", "between"), [(0.125, 60.0), (3.0, 150.0)])
def test_a_phase_is_written_once_a_minute_and_for_two_percent_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, between: float
) -> None:
    clock, kept, state = Clock(monkeypatch, seconds), FileCheckpoint(tmp_path, {}), Counter()
    kept.start()
    assert kept.begin(2000, state) == 0
    for step in range(1, 1000):
        clock.now += 1.0
        kept.after(step, 2000, state)
    gaps = [later - sooner - seconds for sooner, later in zip(clock.written, clock.written[1:], strict=False)]
    assert min(gaps) >= between and max(gaps) <= between + 1
    assert seconds * len(clock.written) <= 0.02 * 1000 + seconds


def test_a_phase_that_ended_is_passed_over_and_another_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, kept = Clock(monkeypatch, 0.01), FileCheckpoint(tmp_path, {"threads": 1})
    kept.start()
    state = Counter()
    for step in range(kept.begin(5, state) + 1, 6):
        state.step()
        clock.now += 1.0
        kept.after(step, 5, state)
    assert clock.written == [1005.0]  # at the end of the phase: it was shorter than a minute
    again = FileCheckpoint(tmp_path, {"threads": 1})
    assert again.goes_on and not FileCheckpoint(tmp_path, {"threads": 2}).goes_on
    later = Counter()
    assert again.begin(5, later) == 5 and later.value == 5
    assert again.begin(6, Counter()) == again.begin(5, Counter(1)) == again.begin(5, Counter(), "other") == 0
    again.forget()
    assert again.begin(5, Counter()) == 0


def test_a_damaged_file_of_a_phase_counts_as_none(tmp_path: Path, often: None) -> None:
    kept, state = FileCheckpoint(tmp_path, {}), Counter()
    kept.start()
    kept.begin(5, state)
    state.step()
    kept.after(1, 5, state)
    (path,) = kept.directory.glob("*.safetensors")
    assert kept.begin(5, Counter()) == 1
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    fresh = Counter()
    assert kept.begin(5, fresh) == 0 and fresh.value == 0


def test_an_optimiser_whose_state_no_file_holds_is_not_kept(tmp_path: Path) -> None:
    class Odd(Counter):
        def state_dict(self) -> Json:
            return {"value": object()}

    kept = FileCheckpoint(tmp_path, {})
    kept.start()
    assert kept.begin(5, Odd()) == 0
    kept.after(1, 5, Odd())
    assert not list(kept.directory.glob("*.safetensors"))


# -- Runs ------------------------------------------------------------------------------------------------


@pytest.fixture
def config(data_directory: Path, model_directory: Any, tmp_path: Path) -> Callable[..., RunConfig]:
    """Return a function that makes the configuration of one strategy on two tasks."""

    def make(strategy: str, out: str, **settings: Any) -> RunConfig:
        usual = {"steps": 6, "threads": 1, "optimizer": "adamw"}
        if strategy in ("grafting-continual", "graft-retrain", "merge-stitch"):
            usual |= {"mask_steps": 4, "mask_batch_size": 8, "sparsity": 0.05}
        return RunConfig(
            stream="sst2,qnli",
            data=str(data_directory),
            model=str(model_directory("bert")),
            strategy=(strategy,),
            shots=4,
            readout="linear",
            set={**usual, **settings},
            out=str(tmp_path / out),
        )

    return make


def outcome(out: Path) -> Json:
    """Return the scores, tensors and losses of a run."""
    found: Json = {p.relative_to(out): p.read_bytes() for p in out.rglob("*.safetensors")}
    for path in out.rglob("scores.csv"):
        found[path.relative_to(out)] = path.read_text()
    for path in out.rglob("history.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.relative_to(out)] = [{**line, "seconds": 0} for line in lines]
    return found


class Cut:
    """Interrupts a run after a checkpoint at this step of a phase of a task, and records all steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, task: str = "", phase: str = "", step: int = 0) -> None:
        self.steps: list[tuple[str, str, int]] = []
        log_step, after = History.log_step, FileCheckpoint.after

        def logs(history: Any, at: str, name: Any, number: int, *args: Any) -> None:
            log_step(history, at, name, number, *args)
            self.steps.append((at, name, number))

        def keeps(kept: Any, *args: Any) -> None:
            after(kept, *args)
            if (task, phase, step) in self.steps:
                raise KeyboardInterrupt

        monkeypatch.setattr(History, "log_step", logs)
        monkeypatch.setattr(FileCheckpoint, "after", keeps)
        if task:
            monkeypatch.setattr(checkpoints, "INTERVAL", 0.0)
            monkeypatch.setattr(checkpoints, "SHARE", math.inf)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a clock on which a step of training takes a second, and anything else no time."""
    now, log_step = [0.0], History.log_step

    def logs(history: Any, task: str, phase: Any, *args: Any) -> None:
        now[0] += phase != "evaluate"
        log_step(history, task, phase, *args)

    monkeypatch.setattr(History, "log_step", logs)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])


def seconds(results: Results) -> float:
    """Return the seconds of a run's only unit."""
    return float(sum(results.runs[0].facts.seconds.values()))


#: A strategy, and the task, phase and step at which it is interrupted.
CUTS = [
    ("grafting-continual", "sst2", "fine_tune", 3),
    ("grafting-continual", "qnli", "localize", 2),
    ("grafting-continual", "qnli", "train", 5),
    ("fine-tune", "qnli", "fine_tune", 2),
    ("continual-ft", "qnli", "train", 1),
    ("packnet", "qnli", "fine_tune", 4),
    ("packnet", "qnli", "train", 2),
    ("lora", "qnli", "train", 4),
    ("o-lora", "qnli", "train", 4),
    ("bitfit", "qnli", "train", 4),
    ("graft-retrain", "qnli", "train", 3),
    ("merge-ties", "qnli", "fine_tune", 3),
    ("merge-stitch", "qnli", "localize", 3),
]


@pytest.mark.sampled(
    "fine-tune-qnli-fine_tune-2",
    "grafting-continual-sst2-fine_tune-3",
    "merge-stitch-qnli-localize-3",
    "merge-ties-qnli-fine_tune-3",
)
@pytest.mark.parametrize(("strategy", "task", "phase", "step"), CUTS)
def test_a_run_goes_on_in_the_midst_of_a_phase(
    strategy: str,
    task: str,
    phase: str,
    step: int,
    config: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ticking: None,
) -> None:
    whole = run(config(strategy, "whole"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        Cut(patch, task, phase, step)
        run(config(strategy, "cut"))
    assert holdings(tmp_path / "cut").startswith("0 of 1 unit finished in ")
    with monkeypatch.context() as patch:
        done = Cut(patch).steps
        again = run(config(strategy, "cut"), Execution(resume=True))
    assert done[0] == (task, phase, step + 1)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
    localizing = strategy in ("grafting-continual", "graft-retrain", "merge-stitch") and phase != "fine_tune"
    assert seconds(again) == seconds(whole) - 6.0 * localizing  # its model was fine-tuned before the interrupt
    assert not list(tmp_path.rglob(CHECKPOINT))


@pytest.mark.sampled("changes2-another")
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"dropout": True, "optimizer": "momentum", "dtype": "bfloat16"}, "sgd"),
        ({"l1": 1e-4, "warmup": 0.5, "max_gradient_norm": 1.0, "precision": "bf16"}, "penalty"),
        ({"optimizer": "torch.optim:Adagrad", "schedule": "constant"}, "another"),
    ],
)
def test_all_ways_of_training_go_on(
    changes: Json, name: str, config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(config("continual-ft", "whole", **changes))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        Cut(patch, "sst2", "train", 4)
        run(config("continual-ft", "cut", **changes))
    with monkeypatch.context() as patch:
        done = Cut(patch).steps
        run(config("continual-ft", "cut", **changes), Execution(resume=True))
    assert done[0] == ("sst2", "train", 5)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


@pytest.mark.sampled(share=0.15)
@pytest.mark.parametrize(
    ("strategy", "first"),
    [
        ("wsn", ("qnli", "train", 1)),
        ("ewc", ("sst2", "train", 1)),
    ],
)
def test_what_cannot_be_kept_in_a_phase_goes_on_after_a_task_or_starts_again(
    strategy: str,
    first: Any,
    config: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(config(strategy, "whole"))

    log_step = History.log_step

    def stop(history: Any, task: str, phase: Any, step: int, *args: Any) -> None:
        log_step(history, task, phase, step, *args)
        if (task, phase, step) == ("qnli", "train", 3):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(History, "log_step", stop)
        run(config(strategy, "cut"))
    with monkeypatch.context() as patch:
        done = Cut(patch).steps
        run(config(strategy, "cut"), Execution(resume=True))
    assert next(step for step in done if step[1] != "evaluate") == first
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


# -- The directory ---------------------------------------------------------------------------------------


def test_a_kill_during_the_first_write_leaves_a_directory_that_starts_anew(
    config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    for number, resumed in enumerate((False, True)):
        out = tmp_path / f"out-{number}"
        (out / "bitfit" / "seed-0").mkdir(parents=True)
        for name in (".lock", ".config.json.abcd1234.unfinished"):
            (out / name).touch()
        run(config("bitfit", out.name), Execution(resume=resumed))
        assert not [path for path in out.rglob(".*")]
    assert outcome(tmp_path / "out-0") == outcome(tmp_path / "out-1")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / ".notes.txt.abcd1234.unfinished").touch()
    (tmp_path / "theirs" / "notes.txt").touch()
    with pytest.raises(UsageError, match="is not empty"):
        run(config("bitfit", "theirs"))
    assert (tmp_path / "theirs" / ".notes.txt.abcd1234.unfinished").exists()


def test_a_kill_between_the_end_of_a_unit_and_that_of_its_checkpoint_leaves_nothing(
    config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: None
) -> None:
    run(config("fine-tune", "whole"))

    def killed(kept: FileCheckpoint) -> None:
        next(path for path in kept.directory.rglob("*") if path.is_file()).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(FileCheckpoint, "end", killed)
        run(config("fine-tune", "cut"))
    assert list((tmp_path / "cut").rglob(CHECKPOINT))
    done = Cut(monkeypatch).steps
    run(config("fine-tune", "cut"), Execution(resume=True))
    assert not done and not list((tmp_path / "cut").rglob(CHECKPOINT))
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")

    (tmp_path / "cut" / "fine-tune" / "seed-0" / CHECKPOINT).mkdir()
    run(
        config("fine-tune", "cut").model_copy(update={"seed": (1,)}), Execution(resume=True)
    )  # it is removed also if another seed is requested
    assert not list((tmp_path / "cut").rglob(CHECKPOINT))


def test_a_full_disk_leaves_the_last_checkpoint_and_nothing_half_written(
    config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: None
) -> None:
    run(config("continual-ft", "whole"))
    fsync, left = os.fsync, 30

    def full(handle: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "fsync", full)
        run(config("continual-ft", "cut"))
    out = tmp_path / "cut"
    assert not [path for path in out.rglob(".*") if path.is_file()] and holdings(out)
    run(config("continual-ft", "cut"), Execution(resume=True))
    assert outcome(out) == outcome(tmp_path / "whole")


# -- Other versions and threads --------------------------------------------------------------------------


def test_other_versions_are_recorded_and_no_unit_is_computed_in_two_ways(
    config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = config("bitfit", "out").model_copy(update={"strategy": ("bitfit", "continual-ft")})
    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        log_step, count = History.log_step, 0

        def stop(history: Any, task: str, phase: Any, step: int, *args: Any) -> None:
            nonlocal count
            log_step(history, task, phase, step, *args)
            count += (task, phase, step) == ("qnli", "train", 3)
            if count == 2:
                raise KeyboardInterrupt

        patch.setattr(History, "log_step", stop)
        run(both)
    finished = (out / "bitfit" / "seed-0" / "outcome.json").read_bytes()
    versions = environment.versions()
    monkeypatch.setattr(environment, "versions", lambda: versions | {"torch": "9.9"})
    done = Cut(monkeypatch).steps
    run(both, Execution(resume=True))
    assert next(step for step in done if step[1] == "train") == ("sst2", "train", 1)
    assert (out / "bitfit" / "seed-0" / "outcome.json").read_bytes() == finished
    record = json.loads((out / "continual-ft" / "seed-0" / "outcome.json").read_text())
    assert record["versions"]["torch"] == "9.9"
    (changed,) = json.loads((out / "config.json").read_text())["changed"]
    assert changed.startswith("torch (was ") and changed.endswith("is 9.9)")


def test_units_have_as_many_threads_as_the_first(config: Callable[..., RunConfig], tmp_path: Path) -> None:
    torch.set_num_threads(2)
    usual = config("bitfit", "out")
    settings = {key: value for key, value in usual.set.items() if key != "threads"}
    run(usual.model_copy(update={"set": settings}))
    torch.set_num_threads(1)
    run(usual.model_copy(update={"set": settings, "seed": (0, 1)}), Execution(resume=True))
    assert torch.get_num_threads() == 1
    records = [json.loads(path.read_text()) for path in (tmp_path / "out").rglob("outcome.json")]
    assert [record["machine"]["threads"] for record in records] == [2, 2]
