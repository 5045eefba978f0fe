"""``--log``: losses, rates and scores reach the trackers of accelerate, whose failures never stop a run."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from forgetfree import cli
from forgetfree.results.run_folder import HISTORY

TASKS = ("qnli", "ag_news", "sst2")


def needs(library: str) -> Any:
    missing = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(missing, reason=f"{library} is not installed: pip install 'forgetfree[{library}]'")


@pytest.fixture
def run(data_directory: Path, model_directory: Any, tmp_path: Path) -> Any:
    """Return a function that runs continual-ft, five steps a task, two seeds, and returns the directory and the exit code."""

    def perform(*more: str) -> tuple[Path, int]:
        out = tmp_path / "out"
        given = ["--data", str(data_directory), "--model", str(model_directory("bert")), "--shots", "4", "--steps", "5"]
        given += ["--set", "upper_triangle=true", "--strategy", "continual-ft", "--seed", "0", "--seed", "1"]
        given += ["--out", str(out)]
        return out, cli.main(["run", ",".join(TASKS), *given, *more])

    return perform


def expected(out: Path, seed: int) -> tuple[list[tuple[float, float]], list[list[float]]]:
    """Return loss and rate of every step from the history, and the learning matrix from results.json."""
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
        folder = out / "logs" / "continual-ft" / f"seed-{seed}"
        events = EventAccumulator(str(folder))
        events.Reload()
        steps, matrix = expected(out, seed)
        assert len(steps) == 15
        for name, column in (("loss/train", 0), ("rate/train", 1)):
            found = [(event.step, event.value) for event in events.Scalars(name)]
            assert found == [(i, pytest.approx(step[column])) for i, step in enumerate(steps, 1)]
        for i, task in enumerate(TASKS):
            found = [(event.step, event.value) for event in events.Scalars(f"accuracy/{task}")]
            assert found == [(5 * after, pytest.approx(row[i])) for after, row in enumerate(matrix)]
        (file,) = folder.rglob("hparams.yml")
        assert "steps: 5" in file.read_text()
    assert run("--log", "tensorboard", "--resume")[1] == 0


@pytest.mark.sampled(share=0.15)
@needs("wandb")
def test_wandb_works_without_a_network(run: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    out, code = run("--log", "wandb")
    assert code == 0
    assert "logging to wandb has stopped" not in capfd.readouterr().err
    assert len(list((out / "wandb").glob("offline-run-*/*.wandb"))) == 2


@pytest.mark.filterwarnings("ignore")  # warnings of the libraries beneath it
@needs("mlflow")
def test_mlflow_has_every_step_and_all_scores(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    out, code = run("--log", "mlflow")
    assert code == 0
    client = MlflowClient()
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


class Own(GeneralTracker):  # type: ignore[misc]
    """A third-party tracker that counts its calls, and fails at some call."""

    name, requires_logging_directory, tracker = "own", False, None
    told, fails_at = list[int](), 0

    def start(self) -> None:
        print("hello")
        self.told.append(0)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        assert values["steps"] == 5

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        if self.told[-1] == self.fails_at:
            raise ConnectionError("the server is gone\nand will not return")
        self.told[-1] += 1


@pytest.mark.sampled("3")
@pytest.mark.parametrize("fails_at", [0, 3])
def test_a_tracker_of_somebody_else_that_fails_costs_nothing(
    run: Any, fails_at: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    own = type("Fresh", (Own,), {"told": list[int](), "fails_at": fails_at})
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "own", own)
    out, code = run("--log", "own")
    said = capsys.readouterr()
    told = [line for line in said.err.splitlines() if "logging to own" in line]
    why = "note: logging to own has stopped: ConnectionError: the server is gone. The run continues without it."
    assert (code, told) == (0, [why]) and "hello" not in said.out  # the note is printed once for both units
    assert own.told == [fails_at, fails_at]  # type: ignore[attr-defined]
    assert len(json.loads((out / "results.json").read_text())["runs"]) == 2


@pytest.mark.parametrize(
    ("names", "remedy"),
    [
        (
            ["trackio"],
            "--log trackio needs the library trackio, which is not installed. Install it with: pip install trackio",
        ),
        (["tensorbord"], "Did you mean 'tensorboard'?"),
        (["wandb", "wandb"], "--log names wandb twice"),
    ],
)
def test_a_tracker_that_is_not_there_is_told_before_any_work(
    run: Any, names: Sequence[str], remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: ["wandb"])
    out, code = run(*(word for name in names for word in ("--log", name)))
    assert (code, out.exists()) == (2, False)
    assert remedy in capsys.readouterr().err
