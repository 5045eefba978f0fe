"""``--check`` before training: it prints a plan that the job keeps to, or all faults at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import tiny

from forgetfree import cli
from forgetfree.data import sources
from forgetfree.jobs import preflight
from forgetfree.jobs.config import RunConfig

Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def usual(model_directory: Any, data_directory: Path, tmp_path: Path) -> list[str]:
    places = ["--data", str(data_directory), "--model", str(model_directory("bert")), "--out", str(tmp_path / "out")]
    return [*places, "--shots", "4", "--device", "cpu"]


@pytest.fixture
def plan(usual: list[str], tmp_path: Path, plans: list[dict[str, Any]]) -> Plan:
    """Return a function that gives the plan of a command line, and checks that no files are written."""

    def make(*words: str) -> dict[str, Any]:
        assert cli.main([*words, *usual, "--check"]) == 0
        assert not (tmp_path / "out").exists()
        return plans[-1]

    return make


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert cli.main([*words]) == 2
    return capsys.readouterr().err


# -- The plan --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("fine-tune", []),
        ("grafting-continual", ["sparsity=0.01", "mask_steps=2", "region_steps=5"]),
        ("grafting-continual", ["sparsity=0.01", "region_from=gradient"]),
        ("packnet", ["keep=0.1"]),
        ("wsn", ["capacity=0.02"]),
        ("bitfit", ["region_steps=9"]),
        ("lora", ["rank=2", "target_modules=query"]),
        ("merge-ties", ["density=0.05"]),
        ("replay", []),
    ],
)
def test_a_run_takes_the_updates_that_were_planned(
    plan: Plan, usual: list[str], tmp_path: Path, strategy: str, more: list[str]
) -> None:
    """They agree by task with results.json, though the check takes only a few steps of each phase."""
    words = ["run", "qnli,sst2", "--readout", "linear", "--strategy", strategy, "--steps", "6"]
    words += [word for setting in more for word in ("--set", setting)]
    (unit,) = (found := plan(*words))["units"]
    assert unit["unit"] == f"{strategy}/seed-0" and unit["seconds"] > 0
    assert found["total"]["memory_bytes"] > 10**7
    assert cli.main([*words, *usual]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(unit["updates"].values()) == results["runs"][0]["updates"]
    model = results["model"]
    assert (found["model"]["parameters"], found["model"]["graftable"]) == (model["parameters"], model["graftable"])


def test_seconds_are_those_of_a_step_times_the_updates(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock a step takes half a second; fine-tuned models are made once."""
    clock = count(0, 0.5)
    monkeypatch.setattr(preflight.time, "perf_counter", lambda: next(clock))
    words = ["run", "qnli,sst2", "--strategy", "continual-ft", "--strategy", "fine-tune", "--strategy", "merge-ties"]
    found = plan(*words, "--steps", "20", "--readout", "linear", "--set", "density=0.05")
    assert [unit["seconds"] for unit in found["units"]] == [20.0, 20.0, 0.0]
    assert found["total"]["seconds"] == 40.0 and found["total"]["updates"] == 3 * 40


def test_updates_follow_the_rule_of_the_paper(plan: Plan) -> None:
    """The rule is 16·n·k: two labels with 4 shots give 128 updates, four labels 256."""
    found = plan("run", "ag_news,sst2", "--strategy", "fine-tune", "--seed", "0", "--seed", "7")
    assert [unit["updates"] for unit in found["units"]] == 2 * [{"ag_news": 256, "sst2": 128}]
    assert found["total"]["updates"] == 768


def test_updates_follow_a_rule_by_its_name(plan: Plan) -> None:
    """steps=auto gives at least 100 updates for a few rows; a recipe's rule is replaced by steps=paper."""
    words = ("run", "ag_news,sst2", "--strategy", "fine-tune")
    assert plan(*words, "--steps", "auto")["total"]["updates"] == 200
    assert plan(*words, "--set", "steps=paper")["total"]["updates"] == 384
    recipe = RunConfig(stream="sst2", model="minilm")
    assert {options.steps for options in recipe.check().options.values()} == {"auto"}
    named = RunConfig(stream="sst2", model="minilm", set={"steps": "paper"})
    assert {options.steps for options in named.check().options.values()} == {"paper"} and "steps" not in named.recipe()


def test_a_graft_has_a_plan(plan: Plan) -> None:
    words = ("--steps", "12", "--sparsity", "0.01", "--set", "mask_steps=3", "--seed", "0", "--seed", "1")
    assert [(unit["unit"], unit["updates"]) for unit in plan("graft", "sst2", *words)["units"]] == [
        (f"{name}/seed-{seed}", {"sst2": 12}) for seed in (0, 1) for name in ("fine-tune", "bare-graft")
    ]


@pytest.mark.sampled(share=0.15)
def test_it_is_printed_for_people_with_the_recipe(usual: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = tiny.last_of_each(["run", "sst2", *usual, "--strategy", "fine-tune", "--model", "minilm"], "--model")
    assert cli.main([*words, "--steps", "2", "--check"]) == 0
    said = capsys.readouterr().out
    for line in (
        "Model: ",
        "Task: sst2, ",
        "Unit: fine-tune/seed-0, 2 updates, about ",
        "Training: about ",
        "Memory: ",
    ):
        assert f"\n{line}" in f"\n{said}"
    assert "test examples, labels negative, positive\n" in said
    assert said.index("Memory: ") < said.index("Recipe of minilm: ") < said.index("Nothing was written")


# -- Missing or large models -----------------------------------------------------------------------------


def test_a_model_that_is_not_here_is_not_downloaded(
    usual: list[str], monkeypatch: pytest.MonkeyPatch, plans: list[dict[str, Any]]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = [word if word != usual[3] else "somebody/some-model" for word in usual]
    assert cli.main(["run", "sst2", *words, "--strategy", "fine-tune", "--check"]) == 0
    (found,) = plans
    assert not found["model"]["local"] and found["total"]["seconds"] is None
    assert "come from the hub" in found["notes"][0]


def test_a_model_of_which_a_step_takes_more_than_there_is_is_not_loaded(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "machine_memory", lambda: 1)
    found = plan("run", "sst2", "--strategy", "fine-tune")
    assert found["model"]["parameters"] is None and found["total"]["seconds"] is None
    assert "a training step may need more memory than there is" in found["notes"][0]


@pytest.mark.parametrize(("optimizer", "more"), [("sgd", 4), ("adamw", 12)])
def test_what_does_not_fit_on_the_device_is_told_before_it_is_tried(
    optimizer: str, more: int, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights take 4 bytes an entry; if all are trained, a gradient and Adam's moments take more."""
    words, small = ("run", "sst2", "--set", f"optimizer={optimizer}", "--strategy"), ("--sparsity", "0.05", "--set")
    model = plan(*words, "fine-tune")["model"]
    least = 4 * model["parameters"] + more * model["graftable"]
    for free in (least + 1000, least):  # the readout takes memory, too
        monkeypatch.setattr(preflight, "free_memory", lambda device, free=free: free)
        for strategy, trains_all in (
            (("fine-tune",), True),
            (("grafting-continual", *small, "region_from=movement"), True),
            (("grafting-continual", *small, "region_from=snip"), False),
            (("lora",), False),
        ):
            found = plan(*words, *strategy)
            told = any("for weights and optimizer alone" in note for note in found["notes"])
            assert (found["total"]["free_bytes"], told) == (free, trains_all and free == least), strategy


def test_data_are_read_once_where_a_run_is_refused(
    usual: list[str], data_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, read = shutil.copytree(data_directory, tmp_path / "data"), list[str]()
    with (data / "sst2" / "train.jsonl").open("a") as file:
        file.write("{}\n")
    read_tasks = sources.read_tasks
    monkeypatch.setattr(sources, "read_tasks", lambda stream, *more: read.append(stream) or read_tasks(stream, *more))
    assert cli.main(["run", "sst2", *usual[2:], "--data", str(data), "--strategy", "fine-tune"]) == 1
    assert read == ["sst2"]


# -- Faults ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [["--check"], []])
def test_all_faults_are_told_at_once(
    usual: list[str], data_directory: Path, tmp_path: Path, check: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """There is one fault per line: an option, the place, the rows of two tasks, the model; with --check and without."""
    data = shutil.copytree(data_directory, tmp_path / "data")
    for task in ("qnli", "sst2"):
        with (data / task / "train.jsonl").open("a") as file:
            file.write("{}\n")
    (tmp_path / "file").touch()
    places = ["--data", str(data), "--model", str(tmp_path / "nowhere"), "--out", str(tmp_path / "file" / "out")]
    wrong = ["--set", "batch_size=0"]
    said = refused(capsys, "run", "qnli,ag_news,sst2", *places, "--strategy", "fine-tune", *wrong, *check)
    lines = [line for line in said.splitlines() if line.startswith(("- ", "forgetfree: error"))]
    assert lines[0] == "forgetfree: error: 4 faults:" and len(lines) == 5
    for part in ("batch_size must be at least 1", "cannot be written", "qnli", "sst2", "The model directory"):
        assert part in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "file"]


@pytest.mark.parametrize("check", [["--check"], []], ids=["check", "job"])
@pytest.mark.parametrize(
    ("strategy", "setting", "message"),
    [
        ("lora", "target_modules=(", "target_modules must be a regular expression, got '('"),
        ("bitfit", "graftable=query.weight", "bias"),
        ("packnet", "graftable=bias", "weight"),
    ],
)
def test_what_a_strategy_refuses_hides_no_other_fault(
    usual: list[str], strategy: str, setting: str, message: str, check: list[str], capsys: Any
) -> None:
    words = ["run", "qnli,sst2", *usual, "--strategy", strategy, "--set", setting, "--held-out", "nowhere", *check]
    said = refused(capsys, *words)
    assert message in said and "--held-out measures a causal language model's loss" in said


def test_one_fault_is_told_as_ever(usual: list[str], data_directory: Path, tmp_path: Path, capsys: Any) -> None:
    """Wrong data have their own exit code, because they are not wrong usage; with --check the code is 2."""
    data = shutil.copytree(data_directory, tmp_path / "data")
    with (data / "sst2" / "train.jsonl").open("a") as file:
        file.write("{}\n")
    words = ["run", "sst2", *usual[2:], "--data", str(data), "--strategy", "fine-tune"]
    assert cli.main(words) == 1
    _, start, alone = capsys.readouterr().err.partition("forgetfree: error: ")
    assert refused(capsys, *words, "--check") == start + alone


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--sparsity", "1e-9"], "leaves no entry of the"),
        (["--shots", "0"], "--shots must be at least 1, got 0"),
        (["--readout", "causal"], "needs a causal language model"),
        (["--set", "scenario=x"], "scenario must be"),
    ],
)
def test_what_keeps_a_run_from_beginning(usual: list[str], more: list[str], message: str, capsys: Any) -> None:
    flags = dict(zip(usual[::2], usual[1::2], strict=True)) | dict(zip(more[::2], more[1::2], strict=False))
    words = [word for pair in flags.items() for word in pair]
    assert message in refused(capsys, "run", "sst2", *words, "--check")


def test_a_directory_in_use_is_a_fault(usual: list[str], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").touch()
    words = ["run", "sst2", *usual, "--steps", "1", "--strategy", "fine-tune", "--check"]
    assert "is not empty" in refused(capsys, *words)
