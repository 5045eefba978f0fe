"""``--log``: losses, rates and scores reach the libraries, which never cost a run anything."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from forgetfree.jobs.running import loggers

from forgetfree import cli
from forgetfree.jobs.unit import HISTORY

TASKS = ("qnli", "ag_news", "sst2")


def needs(library: str) -> Any:
    missing = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(missing, reason=f"{library} is not installed: pip install 'forgetfree[{library}]'")


@pytest.fixture
def run(data_directory: Path, model_directory: Any, tmp_path: Path) -> Any:
    """Runs continual-ft for five steps a task, two seeds, and returns the directory and the exit code."""

    def perform(*more: str) -> tuple[Path, int]:
        out = tmp_path / "out"
        given = ["--data", str(data_directory), "--model", str(model_directory("bert")), "--shots", "4", "--steps", "5"]
        given += [
            "--set",
            "upper_triangle=true",
            "--strategy",
            "continual-ft",
            "--seed",
            "0",
            "--seed",
            "1",
            "--out",
            str(out),
        ]
        return out, cli.main(["run", ",".join(TASKS), *given, *more])

    return perform


def expected(out: Path, seed: int) -> tuple[list[tuple[float, float]], list[list[float]]]:
    """Loss and rate of every step from the history, and the learning matrix from results.json."""
    lines = (out / "continual-ft" / f"seed-{seed}" / HISTORY).read_text().splitlines()
    steps = [(line["loss"], line["rate"]) for line in map(json.loads, lines)]
    (one,) = [each for each in json.loads((out / "results.json").read_text())["runs"] if each["seed"] == seed]
    return steps, one["matrix"]


@needs("tensorboard")
def test_tensorboard_has_every_step_and_all_scores(run: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, code = run("--log", "tensorboard")
    assert code == 0
    for seed in (0, 1):
        events = EventAccumulator(str(out / "continual-ft" / f"seed-{seed}"))
        events.Reload()
        steps, matrix = expected(out, seed)
        assert len(steps) == 15
        for name, column in (("loss/train", 0), ("rate/train", 1)):
            found = [(event.step, event.value) for event in events.Scalars(name)]
            assert found == [(i, pytest.approx(step[column])) for i, step in enumerate(steps, 1)]
        for i, task in enumerate(TASKS):
            found = [(event.step, event.value) for event in events.Scalars(f"accuracy/{task}")]
            assert found == [(after, pytest.approx(row[i])) for after, row in enumerate(matrix)]
        assert "continual-ft" in str(events.Tensors("configuration/text_summary"))
    assert run("--log", "tensorboard", "--resume")[1] == 0  # its files belong to the unit, which is done


@pytest.mark.sampled(share=0.2)
@pytest.mark.slow
@needs("tensorboard")
def test_workers_log_too(run: Any) -> None:
    out, code = run("--log", "tensorboard", "--jobs", "2")
    assert code == 0
    assert all(list((out / "continual-ft" / f"seed-{seed}").glob("events.out.tfevents.*")) for seed in (0, 1))


@pytest.mark.sampled(share=0.3)
@needs("wandb")
def test_wandb_works_without_a_network(run: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    out, code = run("--log", "wandb")
    assert code == 0
    assert "logging to wandb has stopped" not in capfd.readouterr().err
    assert len(list((out / "wandb").glob("offline-run-*/*.wandb"))) == 2


@needs("wandb")
def test_wandb_without_an_account_is_told_before_any_work(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    import wandb

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(type(wandb.api), "api_key", None)
    out, code = run("--log", "wandb")
    assert (code, out.exists()) == (2, False)
    assert "Run 'wandb login', or set WANDB_MODE=offline" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")  # of the libraries beneath it
@needs("mlflow")
def test_mlflow_has_every_step_and_all_scores(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    out, code = run("--log", "mlflow")
    assert code == 0
    client = MlflowClient(tracking_uri=f"sqlite:///{out / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("forgetfree")
    found = {each.info.run_name: each for each in client.search_runs([experiment.experiment_id])}
    assert found.keys() == {"out continual-ft seed 0", "out continual-ft seed 1"}
    for seed in (0, 1):
        one = found[f"out continual-ft seed {seed}"]
        steps, matrix = expected(out, seed)
        losses = [(each.step, each.value) for each in client.get_metric_history(one.info.run_id, "loss/train")]
        assert sorted(losses) == [(i, pytest.approx(loss)) for i, (loss, _) in enumerate(steps, 1)]
        assert one.data.metrics["accuracy/sst2"] == pytest.approx(matrix[-1][2])
        assert one.data.params["steps"] == "5"


@pytest.mark.filterwarnings("ignore")
@needs("trackio")
def test_trackio_takes_a_run(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    assert run("--log", "trackio")[1] == 0
    assert "logging to trackio has stopped" not in capfd.readouterr().err
    assert any((tmp_path / "trackio").rglob("forgetfree*"))


class StandIn(ModuleType):
    """What Trackio offers, as far as we use it; it writes down what it is told, and may fail."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__("trackio")
        self.runs: list[dict[str, Any]] = []
        self.logged: list[dict[str, float]] = []
        self.finished, self._fails_at = 0, fails_at

    def init(self, **given: Any) -> StandIn:
        print("Trackio says hello")
        self.runs.append(given)
        return self

    def log(self, values: dict[str, float]) -> None:
        if len(self.logged) == self._fails_at:
            raise ConnectionError("the server is gone\nand will not return")
        self.logged.append(values)

    def finish(self) -> None:
        self.finished += 1


def stand_in(monkeypatch: pytest.MonkeyPatch, fails_at: int = -1) -> StandIn:
    module = StandIn(fails_at)
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.setattr(loggers, "find_spec", lambda name: object())
    return module


@pytest.mark.sampled(share=0.4)
def test_each_value_has_its_axis(run: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """With a stand-in for Trackio: runs by unit in the job's group, losses over steps, scores over learned tasks."""
    module = stand_in(monkeypatch)
    out, code = run("--log", "trackio")
    assert code == 0 and "hello" not in capsys.readouterr().out
    assert [(given["name"], given["group"]) for given in module.runs] == [
        ("out continual-ft seed 0", "out"),
        ("out continual-ft seed 1", "out"),
    ]
    assert module.finished == 2 and module.runs[0]["config"]["steps"] == 5
    of_one = module.logged[: len(module.logged) // 2]
    steps, matrix = expected(out, 0)
    logged = [(each["step"], each["loss/train"], each["rate/train"]) for each in of_one if "step" in each]
    assert logged == [(i, *step) for i, step in enumerate(steps, 1)]
    scores = {
        each["tasks_learned"]: [each[f"accuracy/{task}"] for task in TASKS] for each in of_one if "step" not in each
    }
    assert scores == dict(enumerate(matrix))


@pytest.mark.sampled("3")
@pytest.mark.parametrize("fails_at", [0, 3])
def test_a_logger_that_fails_costs_nothing(
    run: Any, fails_at: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    module = stand_in(monkeypatch, fails_at)
    out, code = run("--log", "trackio")
    told = [line for line in capsys.readouterr().err.splitlines() if "trackio" in line]
    why = "note: logging to trackio has stopped: ConnectionError: the server is gone. The rest goes on without it."
    assert (code, told) == (0, [why])  # of both units
    assert len(module.logged) == fails_at
    assert len(json.loads((out / "results.json").read_text())["runs"]) == 2


@pytest.mark.parametrize(
    ("names", "remedy"),
    [
        (
            ["trackio"],
            r"--log trackio needs the library trackio, which is not installed: pip install 'forgetfree[trackio]'",
        ),
        (["tensorbord"], "Did you mean 'tensorboard'?"),
        (["wandb", "wandb"], "--log names wandb twice"),
    ],
)
def test_what_cannot_be_logged_to_is_told_before_any_work(
    run: Any, names: Sequence[str], remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    out, code = run(*(word for name in names for word in ("--log", name)))
    assert (code, out.exists()) == (2, False)
    assert remedy in capsys.readouterr().err
