"""config.json: relative paths are found from any directory, paths that nobody typed are not stored, damage is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forgetfree import cli
from forgetfree.errors import RunError, UsageError
from forgetfree.jobs.config import RunConfig
from forgetfree.jobs.option_file import read_options
from forgetfree.results.run_folder import load_run, located, portable

QUICK = ["--shots", "4", "--steps", "1", "--strategy", "grafting-continual", "--sparsity", "0.01"]


@pytest.fixture
def project(tmp_path: Path, data_directory: Path, model_directory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory that contains a model and data."""
    monkeypatch.delenv("FORGETFREE_DATA", raising=False)
    folder = tmp_path / "project"
    shutil.copytree(data_directory, folder / "data")
    shutil.copytree(model_directory("bert"), folder / "models" / "bert")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["forgetfree", "run"])  # `command` is the typed command line
    return folder


def run(*more: str, model: str = "models/bert", data: str = "data") -> int:
    return cli.main(["run", "sst2", "--model", model, "--data", data, *QUICK, *more])


def predicts(directory: Path | str, *more: str) -> bool:
    return cli.main(["predict", str(directory), "--task", "sst2", *more, "a lovely film"]) == 0


def section_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "config.json").read_text(encoding="utf-8"))["run"]


# -- Places ----------------------------------------------------------------------------------------------


@pytest.mark.figures
def test_nothing_that_a_command_writes_tells_the_place_it_ran_in(project: Path) -> None:
    assert run("--out", "runs/out", "--set", "cache=cache") == 0
    graft = ["graft", "sst2", "--model", "models/bert", "--data", "data", "--shots", "4", "--steps", "1"]
    assert cli.main([*graft, "--sparsity", "0.01", "--out", "runs/graft"]) == 0
    for path in (*project.glob("runs/**/*.json"), *project.glob("runs/**/*.md")):
        assert str(project.parent) not in path.read_text(encoding="utf-8"), path
    config = json.loads((project / "runs" / "graft" / "config.json").read_text())
    assert (config["run"]["model"], config["run"]["data"]) == ("../../models/bert", "../../data")


@pytest.mark.sampled(share=0.3)
def test_a_run_is_read_from_any_working_directory(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--out", "runs/out") == 0
    results = (project / "runs" / "out" / "results.json").read_bytes()
    for folder in (project / "runs" / "out", project / "data", project.parent):
        monkeypatch.chdir(folder)
        assert predicts(project / "runs" / "out")
    config = str(project / "runs" / "out" / "config.json")
    assert cli.main(["run", "--config", config, "--out", str(project / "runs" / "out"), "--resume"]) == 0
    assert (project / "runs" / "out" / "results.json").read_bytes() == results
    assert cli.main(["run", "--config", config, "--out", str(project / "again")]) == 0
    assert located(section_of(project / "again")["model"], project / "again") == "project/models/bert"


def test_a_run_that_is_moved_alone_is_told_where_its_model_is(
    project: Path, tmp_path: Path, model_directory: Callable[[str], Path], capsys: pytest.CaptureFixture
) -> None:
    assert run("--out", "runs/out") == 0
    moved = (project / "runs" / "out").rename(tmp_path / "moved")
    assert not predicts(moved)
    assert "The model directory '../../models/bert' does not exist." in (error := capsys.readouterr().err)
    assert "to --model" in error
    assert predicts(moved, "--model", "models/bert")
    assert not predicts(moved, "--model", str(model_directory("bert-mlm")))  # other weights are refused


def test_what_is_typed_as_an_absolute_path_stays_one(project: Path, tmp_path: Path) -> None:
    assert run("--out", "runs/out", model=str(project / "models" / "bert")) == 0
    assert section_of(project / "runs" / "out")["model"] == str(project / "models" / "bert")
    assert predicts((project / "runs" / "out").rename(tmp_path / "moved"))


def test_the_data_of_the_environment_are_named_by_its_variable(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("FORGETFREE_DATA", str(project / "data"))
    assert cli.main(["run", "sst2", "--model", "models/bert", *QUICK, "--out", "out"]) == 0
    assert section_of(project / "out")["data"] == "$FORGETFREE_DATA"
    assert str(project) not in (project / "out" / "config.json").read_text()
    monkeypatch.setenv("FORGETFREE_DATA", str((project / "data").rename(project / "moved")))
    assert cli.main(["run", "--config", "out/config.json", "--out", "again"]) == 0
    monkeypatch.delenv("FORGETFREE_DATA")
    capsys.readouterr()
    assert cli.main(["run", "--config", "out/config.json", "--out", "third"]) == 2
    assert "The data directory '$FORGETFREE_DATA' does not exist" in capsys.readouterr().err


def test_places_within_the_run_directory_and_behind_links(project: Path, tmp_path: Path) -> None:
    (project / "out" / "model").mkdir(parents=True)
    assert portable("out/model", Path("out")) == "./model"
    assert located("./model", Path("out")) == "out/model"
    assert portable("out", Path("out")) == "."
    disk = tmp_path / "disk"
    (disk / "run").mkdir(parents=True)
    Path("runs").symlink_to(disk)
    name = portable("data", Path("runs/run"))
    assert name == "../../project/data"
    assert located(name, Path("runs/run")) == located(name, disk / "run") == "data"


# -- A job is repeated from its config.json ---------------------------------------------------------------

JOBS = {
    "run": ["sst2", *QUICK],
    "graft": ["sst2", "--shots", "4", "--steps", "1", "--sparsity", "0.01", "--set", "base_fraction=0"],
}


@pytest.mark.sampled("graft")
@pytest.mark.parametrize("command", JOBS)
def test_config_json_repeats_a_job(project: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ["--learning-rate", "0.01", "--batch-size", "2", "--test-limit", "6", "--cache", "cache", "--threads", "1"]
    given = ["--model", "models/bert", "--data", "data", *JOBS[command], *plain]
    assert cli.main([command, *given, "--out", "first"]) == 0
    section = json.loads((project / "first" / "config.json").read_text())["run"]
    assert section["set"]["learning_rate"] == 0.01 and section["model"] == "../models/bert"
    monkeypatch.chdir(project / "data")
    assert cli.main([command, "--config", "../first/config.json", "--out", "../second", "--set", "cache=../cache"]) == 0
    again = json.loads((project / "second" / "config.json").read_text())["run"]
    assert again["set"].pop("cache") == "../cache" and section["set"].pop("cache") == "cache"
    assert again == section
    first, second = (json.loads((project / name / "results.json").read_text()) for name in ("first", "second"))
    for key in ("rows", "units"):
        assert first.get(key) == second.get(key)
    assert [run["matrix"] for run in first.get("runs", [])] == [run["matrix"] for run in second.get("runs", [])]


def test_a_file_has_the_plain_flags_too_and_flags_override_it(project: Path) -> None:
    options = (
        'model = "models/bert"\ndata = "data"\nshots = 4\nlearning_rate = 0.5\nbatch_size = 2\n[set]\nmax_length = 9'
    )
    Path("x.toml").write_text(options)
    assert cli.main(["run", "sst2", "--config", "x.toml", *QUICK[2:], "--batch-size", "4", "--out", "out"]) == 0
    assert section_of(project / "out")["set"] == {
        "max_length": 9,
        "steps": 1,
        "sparsity": 0.01,
        "learning_rate": 0.5,
        "batch_size": 4,
    }


# -- Damage ----------------------------------------------------------------------------------------------


def test_a_lone_value_of_a_list_is_a_list(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('seed = 5\nstrategy = "lora"\nsteps = 3')
    assert read_options(tmp_path / "x.toml") == {"seed": (5,), "strategy": ("lora",), "set": {"steps": 3}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the options and their set must be tables, got []"),
        ({"set": 5}, "the options and their set must be tables"),
        ({"seed": [None]}, "seed must be a whole number, got None"),
        ({"shots": "x", "stream": 5}, "stream must be a text, got 5; shots must be a whole number or none, got 'x'"),
        ({"run": {"data": [5]}}, "data must be a text"),
    ],
)
def test_options_of_other_types_are_refused(options: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(options))
    with pytest.raises(UsageError) as caught:
        read_options(tmp_path / "x.json")
    assert message in str(caught.value)


def of_task(**fields: Any) -> Callable[[dict], None]:
    return lambda config: config["tasks"][0].update(fields)


DAMAGE: dict[str, tuple[Callable[[dict], Any], str]] = {
    "no model": (lambda config: config.pop("model"), "model is missing, it must be an object"),
    "a model without a name": (lambda config: config["model"].pop("name"), "model.name is missing"),
    "a task of another type": (
        lambda config: config.update(tasks=[5]),
        "tasks[0]: the content must be an object, got 5",
    ),
    "a kind that is none": (
        of_task(kind="triple"),
        "tasks[0]: kind must be one of single, pair, tokens, generation, messages, classification, tagging, multi-label, "
        "got 'triple'",
    ),
    "a run without options": (lambda config: config["run"].pop("set"), "run.set is missing"),
    "data of another type": (lambda config: config.update(data=[]), "data must be an object, got []"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_config_is_refused_with_the_place_in_it(name: str, written: Path, tmp_path: Path) -> None:
    change, message = DAMAGE[name]
    config = json.loads(written.read_text())
    load_run(written.parent)
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError) as caught:
        load_run(tmp_path, "Start again.")
    assert str(caught.value).startswith(f"{tmp_path}/config.json: {message}")
    assert str(caught.value).endswith(". Start again.")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, data_directory: Path, model_directory) -> Path:
    """Return the config.json of a run."""
    out = tmp_path_factory.mktemp("run") / "out"
    model, data = str(model_directory("bert")), str(data_directory)
    assert cli.main(["run", "sst2", "--model", model, "--data", data, *QUICK, "--out", str(out)]) == 0
    return out / "config.json"


@pytest.mark.parametrize(
    ("file", "line", "steps"),
    [
        ("steps = 5", {"set": {"steps": "3"}}, 3),
        ("[set]\nsteps = 5", {"steps": "3"}, 3),
        ("steps = 5", {}, 5),
    ],
)
def test_the_command_line_wins_over_the_file_whichever_way_it_is_said(
    file: str, line: dict[str, Any], steps: Any, tmp_path: Path
) -> None:
    (tmp_path / "options.toml").write_text(file)
    assert RunConfig.of(read_options(tmp_path / "options.toml"), line).set == {"steps": steps}
