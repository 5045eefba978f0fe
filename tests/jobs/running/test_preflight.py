"""What ``--check`` says before anything is trained: a plan that the job keeps to, or all that is wrong with it at once."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import transformers

import forgetfree
from forgetfree import cli
from forgetfree.jobs.config import InMemory
from forgetfree.jobs.run_config import RunConfig
from forgetfree.jobs.running import costs
from forgetfree.jobs.running.preflight import plan_of
from forgetfree.jobs.running.unit import Unit
from forgetfree.models.loading import load_model, sized
from forgetfree.training.cost import ledger_bytes

Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def usual(model_directory: Any, data_directory: Path, tmp_path: Path) -> list[str]:
    places = ["--data", str(data_directory), "--model", str(model_directory("bert")), "--out", str(tmp_path / "out")]
    return [*places, "--shots", "4", "--device", "cpu"]


@pytest.fixture
def plan(usual: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Plan:
    """The plan of a command line, which must leave nothing behind."""

    def make(*words: str) -> dict[str, Any]:
        capsys.readouterr()
        assert cli.main([*words, *usual, "--check", "--json"]) == 0
        assert not (tmp_path / "out").exists()
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return make


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert cli.main([*words]) == 2
    return capsys.readouterr().err


# -- The plan --------------------------------------------------------------------------------------------


def test_a_run_takes_the_steps_that_were_planned(
    plan: Plan, usual: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Phase by phase and step by step, as the run itself logs them; a shared fine-tuned model is made once."""
    words = [
        "run",
        "qnli,sst2",
        "--strategy",
        "grafting-continual",
        "--strategy",
        "fine-tune",
        "--strategy",
        "continual-ft",
    ]
    words += ["--steps", "3", "--sparsity", "0.01", "--set", "mask_steps=2", "--set", "region_steps=5"]
    found = plan(*words)
    assert [unit["unit"] for unit in found["units"]] == [
        "grafting-continual/seed-0", "fine-tune/seed-0", "continual-ft/seed-0",
    ]  # fmt: skip
    assert cli.main([*words, *usual]) == 0
    for unit in found["units"]:
        lines = (tmp_path / "out" / unit["unit"] / "history.jsonl").read_text().splitlines()
        taken: dict[tuple[str, str], int] = {}
        for line in map(json.loads, lines):
            if "step" in line and line["phase"] != "evaluate":
                key = line["task"], line["phase"]
                taken[key] = max(taken.get(key, 0), line["step"])
        phases = [phase for phase in unit["phases"] if phase["phase"] != "evaluate" and phase["steps"]]
        assert {(phase["task"], phase["phase"]): phase["steps"] for phase in phases} == taken
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    model = results["model"]
    assert (found["model"]["parameters"], found["model"]["graftable"]) == (model["parameters"], model["graftable"])
    written = sum(file.stat().st_size for file in (tmp_path / "out").rglob("*.safetensors"))
    assert written / 3 < found["total"]["disk_bytes"] < 3 * written


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("packnet", ["keep=0.1"]),
        ("wsn", ["capacity=0.02"]),
        ("bitfit", []),
        ("lora", ["rank=2", "target_modules=query"]),
        ("merge-ties", ["density=0.05"]),
        ("grafting-continual", ["composition=auto", "localize_at=union", "mask_steps=2", "sparsity=0.01"]),
    ],
)
def test_a_strategy_says_its_phases_and_what_it_keeps(
    plan: Plan, usual: list[str], tmp_path: Path, strategy: str, more: list[str]
) -> None:
    """As the run logs them and writes it; beside the fine-tuned models, far less than a whole model."""
    words = ["run", "qnli,sst2", "--strategy", strategy, "--steps", "4"]
    words += [word for setting in more for word in ("--set", setting)]
    found = plan(*words)
    assert cli.main([*words, *usual]) == 0
    folder = tmp_path / "out" / strategy / "seed-0"
    logged = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    taken: dict[tuple[str, str], int] = {}
    for line in logged:
        if line.get("phase") not in ("evaluate", None):
            key = line["task"], line["phase"]
            taken[key] = max(taken.get(key, 0), line["step"])
    phases = [phase for unit in found["units"] for phase in unit["phases"] if phase["phase"] != "evaluate"]
    planned = {(phase["task"], phase["phase"]): phase["steps"] for phase in phases}
    if strategy == "grafting-continual":  # both ways count from 1 in turn
        assert planned.keys() == taken.keys()
    else:
        assert planned == taken
    whole = 4 * found["model"]["graftable"]
    kept = found["total"]["disk_bytes"] - whole * (2 if strategy in ("merge-ties", "grafting-continual") else 0)
    written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert kept < 3 * written and written < 3 * kept + 8_000  # headers
    assert kept < whole / 2


def test_steps_follow_the_rule_of_the_paper(plan: Plan) -> None:
    """16·n·k: two labels of 4 shots are 128 updates, four are 256."""
    found = plan("run", "ag_news,sst2", "--strategy", "fine-tune", "--seed", "0", "--seed", "7")
    steps = [(phase["task"], phase["steps"]) for unit in found["units"] for phase in unit["phases"]]
    assert [each for each in steps if each[1] in (128, 256)] == 2 * [("ag_news", 256), ("sst2", 128)]
    assert found["total"]["steps"]["fine_tune"] == 768
    assert found["total"]["seconds"] == pytest.approx(
        sum(phase["seconds"] for unit in found["units"] for phase in unit["phases"]), abs=0.2
    )


def test_steps_follow_a_rule_by_its_name(plan: Plan) -> None:
    """A plan has what is trained: at least 100 updates for a few rows; the recipe's rule gives way to the paper's by name."""
    words = ("run", "ag_news,sst2", "--strategy", "fine-tune")
    assert plan(*words, "--steps", "auto")["total"]["steps"]["fine_tune"] == 200
    assert plan(*words, "--set", "steps=paper")["total"]["steps"]["fine_tune"] == 384
    recipe = RunConfig(stream="sst2", model="minilm")
    assert {options.steps for options in recipe.checked().options.values()} == {"auto"}
    named = RunConfig(stream="sst2", model="minilm", steps="paper")
    assert {options.steps for options in named.checked().options.values()} == {
        "paper"
    } and "steps" not in named.recipe()


def test_a_graft_has_a_plan(plan: Plan) -> None:
    graft = plan("graft", "sst2", "--steps", "2", "--sparsity", "0.01", "--sparsity", "0.1", "--set", "mask_steps=3")
    assert [(phase["phase"], phase["steps"]) for phase in graft["units"][0]["phases"]][:2] == [
        ("fine_tune", 2),
        ("localize", 3),
    ]


def test_it_is_printed_for_people(usual: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "sst2", *usual, "--steps", "2", "--sparsity", "0.01", "--check"]) == 0
    said = capsys.readouterr().out
    for word in ("Model: ", "Task: sst2, ", "Unit: grafting-continual/seed-0", "sst2: localize, ", "Time: ", "Disk: "):
        assert word in said
    assert "an estimate by 2 training steps of this model" in said


@pytest.mark.sampled(share=0.3)
def test_a_fine_tuned_model_is_shared_and_a_recipe_stands_after_the_plan(
    usual: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--strategy", "fine-tune", "--strategy", "grafting-continual", "--check"]
    own = {"--model": "minilm", "--out": str(tmp_path / "out")}
    places = [own.get(usual[i - 1], word) if i else word for i, word in enumerate(usual)]
    assert cli.main(["run", "sst2", *words, *places, "--steps", "2"]) == 0
    said = capsys.readouterr().out
    assert "sst2: fine-tune, 2 steps" in said and "sst2: fine-tune, shared with fine-tune\n" in said
    assert ", 0 steps" not in said
    assert said.index("Disk: ") < said.index("Recipe of minilm: ") < said.index("Nothing was written")


def test_a_readout_without_weights_has_no_phase_of_its_own(plan: Plan, usual: list[str], model_directory: Any) -> None:
    words = ["run", "sst2", "--strategy", "grafting-continual", "--steps", "2", "--sparsity", "0.1"]
    words += ["--set", "region_from=gradient", "--set", "readout_steps=7"]
    assert plan(*words, "--readout", "linear")["total"]["steps"]["fine_tune"] == 7
    usual[usual.index("--model") + 1] = str(model_directory("roberta-mlm"))
    steps = plan(*words, "--readout", "prompt")["total"]["steps"]
    assert "fine_tune" not in steps and steps["train"] == 2


def test_regions_that_take_more_than_there_is_are_noted(plan: Plan) -> None:
    words = ["run", "qnli,ag_news,sst2", "--strategy", "grafting-continual", "--steps", "1"]
    assert plan(*words, "--sparsity", "0.3")["notes"] == []
    assert "are more than there are" in plan(*words, "--sparsity", "0.4")["notes"][0]


def test_the_rows_that_linear_probes_read_are_counted_once_a_seed(plan: Plan) -> None:
    words = ["run", "sst2", "--strategy", "fine-tune", "--strategy", "continual-ft", "--seed", "0", "--seed", "1"]
    probed, bare = (plan(*words, "--set", f"floors={floors}") for floors in ("probe", "constant"))
    (task,) = probed["tasks"]
    more = probed["total"]["steps"]["evaluate"] - bare["total"]["steps"]["evaluate"]
    assert more == 2 * (2 * 4 + task["test"])


# -- What is not here ------------------------------------------------------------------------------------


def test_a_model_that_is_not_here_is_not_downloaded(
    plan: Plan, usual: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = [word if word != usual[3] else "somebody/some-model" for word in usual]
    assert cli.main(["run", "sst2", *words, "--strategy", "fine-tune", "--check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["model"]["local"] and found["total"]["seconds"] is None
    assert "come from the hub" in found["notes"][0]
    assert found["total"]["steps"] == {"fine_tune": 128, "evaluate": found["total"]["steps"]["evaluate"]}


def test_a_large_model_is_sized_by_its_configuration_alone(tmp_path: Path) -> None:
    """GPT-2 XL: 1.5 billion parameters, of which no number is made."""
    config = transformers.GPT2Config(n_embd=1600, n_layer=48, n_head=25, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(tmp_path)
    readout, _, parameters, space = sized(str(tmp_path), "xl", "auto")
    graftable = len(space)
    assert readout == "causal"
    layer = 12 * 1600**2 + 13 * 1600  # by hand: attention 4d² + 4d, feed-forward 8d² + 5d, two norms 4d
    assert graftable == 48 * layer + 2 * 1600
    assert parameters == graftable + (50257 + 1024) * 1600
    rates = costs.computed_rates(parameters, "cpu", "fp32")
    assert rates.train == pytest.approx(3 * rates.evaluate) and "expect a factor" in rates.source


def test_a_model_is_sized_as_it_is_loaded(model_directory: Any) -> None:
    for kind, readout in (("bert", "linear"), ("bert-mlm", "prompt"), ("gpt2-lm", "causal")):
        path = str(model_directory(kind))
        loaded = load_model(path, readout)
        size = sum(parameter.numel() for parameter in loaded.model.backbone.parameters())
        found, _, parameters, space = sized(path, path, readout)
        assert (found, parameters, space.layout_hash) == (readout, size, loaded.model.space().layout_hash)


# -- Faults ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [["--check"], []])
def test_all_faults_are_told_at_once(
    usual: list[str], data_directory: Path, tmp_path: Path, check: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One a line: an option, the place, the rows of two tasks, the model; with --check and without."""
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
def test_what_a_strategy_cannot_price_hides_no_other_fault(
    usual: list[str], strategy: str, setting: str, message: str, check: list[str], capsys: Any
) -> None:
    words = ["run", "qnli,sst2", *usual, "--strategy", strategy, "--set", setting, *check]
    words[words.index("--shots") + 1] = "4000"
    said = refused(capsys, *words)
    assert message in said and "fewer than --shots 4000" in said


def test_one_fault_is_told_as_ever(usual: list[str], data_directory: Path, tmp_path: Path, capsys: Any) -> None:
    """With its own exit code: data that are wrong are no wrong usage. As the answer of --check they are."""
    data = shutil.copytree(data_directory, tmp_path / "data")
    with (data / "sst2" / "train.jsonl").open("a") as file:
        file.write("{}\n")
    words = ["run", "sst2", *usual[2:], "--data", str(data), "--strategy", "fine-tune"]
    assert cli.main(words) == 1
    _, start, alone = capsys.readouterr().err.partition("forgetfree: error: ")
    assert refused(capsys, *words, "--check") == start + alone


@pytest.mark.sampled("more4-")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--sparsity", "1e-9"], "leaves no entry of the"),
        (["--shots", "4000"], "fewer than --shots 4000"),
        (["--readout", "causal"], "needs a causal language model"),
        (["--set", "scenario=x"], "scenario must be"),
        (["--json"], ""),
    ],
)
def test_what_keeps_a_run_from_beginning(usual: list[str], more: list[str], message: str, capsys: Any) -> None:
    flags = dict(zip(usual[::2], usual[1::2], strict=True)) | dict(zip(more[::2], more[1::2], strict=False))
    words = [word for pair in flags.items() for word in pair]
    if more == ["--json"]:
        assert "--json prints the plan of --check" in refused(capsys, "run", "sst2", *usual, "--json")
    else:
        assert message in refused(capsys, "run", "sst2", *words, "--check")


@pytest.mark.sampled("graft-check")
@pytest.mark.parametrize("check", [["--check"], []], ids=["check", "job"])
@pytest.mark.parametrize(
    "words",
    [
        ("run", "sst2", "--strategy", "fine-tune"),
        ("graft", "sst2", "--sparsity", "0.1"),
    ],
    ids=lambda words: words[0],
)
def test_the_disk_is_too_small(
    usual: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    words: tuple[str, ...],
    check: list[str],
) -> None:
    """Before anything is trained, whatever the job is, and nothing is left behind."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    monkeypatch.setattr(Unit, "run", lambda *_: pytest.fail("something is trained"))
    said = refused(capsys, *words, *usual, *check).splitlines()[-1]
    assert f"--out {tmp_path / 'out'} needs about " in said and "and 1,000 are free there" in said
    assert not (tmp_path / "out").exists()


def test_room_is_wanted_where_models_are_kept_and_for_what_is_not_there_yet(
    usual: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = ["run", "sst2", *usual, "--strategy", "fine-tune", "--steps", "1", "--cache", str(tmp_path / "cache")]
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "another-task.safetensors").write_bytes(bytes(10**6))  # which this job does not write
    with monkeypatch.context() as full:  # the cache is on a disk of its own
        disks = {
            name: SimpleNamespace(stat=lambda name=name: SimpleNamespace(st_dev=name)) for name in ("out", "cache")
        }
        full.setattr(costs, "existing", lambda path: disks[path.name])
        full.setattr(shutil, "disk_usage", lambda disk: SimpleNamespace(free=1000 if disk is disks["cache"] else 10**9))
        assert f"--cache {tmp_path / 'cache'} needs about " in refused(capsys, *words)
    assert cli.main(words) == 0
    (tmp_path / "out" / "fine-tune" / "seed-0" / "unit.json").unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert cli.main([*words, "--resume"]) == 0  # the models are there, and are counted


def test_directories_on_one_disk_share_its_room(
    usual: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = ["run", "sst2", *usual, "--strategy", "fine-tune", "--steps", "1", "--cache", str(tmp_path / "cache")]

    def wanted(free: int) -> list[int]:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        said = refused(capsys, *words, "--check")
        assert f"--out {tmp_path / 'out'} and --cache {tmp_path / 'cache'} need about " in said
        return [int(number.replace(",", "")) for number in re.findall(r"about ([\d,]+) more bytes", said)]

    (both,) = wanted(0)
    assert wanted(both - 1) == [both]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=both))
    assert cli.main([*words, "--check"]) == 0


def test_a_directory_in_use_is_a_fault(usual: list[str], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").touch()
    words = ["run", "sst2", *usual, "--steps", "1", "--strategy", "fine-tune", "--check"]
    assert "is not empty" in refused(capsys, *words)


# -- Costs -----------------------------------------------------------------------------------------------


def test_bytes_of_a_ledger_are_about_those_of_its_file(tmp_path: Path) -> None:
    from forgetfree.core.parameters import ParameterSpace
    from forgetfree.core.regions import Region
    from forgetfree.ledger import Ledger, Record
    from forgetfree.ledger.graft import Graft

    model = torch.nn.Linear(1000, 300)
    space = ParameterSpace.of(model)
    region = Region.of(torch.randperm(len(space), generator=torch.Generator().manual_seed(0))[:3000])
    ledger = Ledger(space, "x", "union")
    ledger.append(Record("a", region, Graft(region, torch.randn(3000)), 0.01))
    ledger.save(tmp_path / "ledger.safetensors")
    estimated, written = ledger_bytes(space, 3000), (tmp_path / "ledger.safetensors").stat().st_size
    assert 0.7 * written < estimated < 1.3 * written


def test_padding_is_to_the_longest_row_of_a_batch() -> None:
    assert costs.padded([5], 8) == 5
    assert costs.padded([4, 12], 1) == pytest.approx(8, abs=1.5)
    assert costs.padded([4, 12], 16) == pytest.approx(12, abs=0.01)
    assert tiny.HIDDEN  # the models above are the tiny ones


class TwoLayers(torch.nn.Module):
    """A network whose names are those of parts that are grafted in no language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(4, 8)
        self.classifier = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.classifier(self.embed(x).relu())


def test_room_is_wanted_for_the_tensors_of_the_model_that_trains(tmp_path: Path) -> None:
    """Of a network in memory all but the readout is grafted, whatever it is called; the plan says so, too."""
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    data = {"a": (x, (x[:, 0] > 0).long()), "b": (x, (x[:, 1] > 0).long())}
    how: Any = {"data": data, "model": TwoLayers(), "strategies": ["continual-ft"], "steps": 2, "progress": False}
    forgetfree.run("a,b", out=tmp_path / "out", **how)
    about = json.loads((tmp_path / "out" / "config.json").read_text())["about"]["model"]
    assert about["graftable"] == 4 * 8 + 8
    config = RunConfig(stream="a,b", strategies=("continual-ft",), out=str(tmp_path / "planned"), settings={"steps": 2})
    plan = plan_of(config, InMemory(data=data, model=how["model"]))
    assert plan["model"]["graftable"] == 4 * 8 + 8
