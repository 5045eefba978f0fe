"""``--strategy [NAME=]MODULE:CLASS``: a class in a file of the working directory is run, resumed and used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forgetfree
from forgetfree import cli
from forgetfree.errors import UsageError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "my_strategy" / "my_strategy.py"
CLASS, NAME = "my_strategy:MyStrategy", "MyStrategy"
HALF = """
from forgetfree.continual.strategy import ContinualStrategy

NUMBER = 3

class Half(ContinualStrategy):
    def begin(self, task): ...
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a working directory with the example's file; the directory is not on Python's path."""
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "unfinished.py").write_text(HALF)
    (tmp_path / "broken.py").write_text("import there_is_no_such_module")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    yield tmp_path
    for module in ("my_strategy", "unfinished", "broken"):
        sys.modules.pop(module, None)


@pytest.fixture
def run(data_directory: Path, model_directory: Callable[[str], Path]) -> list[str]:
    small = ["--shots", "4", "--steps", "2", "--test-limit", "8"]
    return ["sst2,qnli", "--data", str(data_directory), "--model", str(model_directory("bert")), *small]


@pytest.mark.sampled("pull-pull=my_strategy:MyStrategy", share=0.3)
@pytest.mark.parametrize(("name", "written"), [(NAME, CLASS), ("pull", f"pull={CLASS}")])
def test_a_class_of_a_file_runs_is_resumed_and_used(
    here: Path, run: list[str], capsys: pytest.CaptureFixture[str], name: str, written: str
) -> None:
    assert cli.main(["run", *run, "--strategy", "continual-ft", "--out", "out"]) == 0
    given = ["--strategy", written, "--strategy", "continual-ft", "--set", f"{name}.pull=0.5", "--out", "out"]
    assert cli.main(["run", *run, *given, "--resume"]) == 0  # the strategy joins the run, with its own options
    results = json.loads(Path("out/results.json").read_text())
    pulls = {each["strategy"]: each["options"].get("pull") for each in results["runs"]}
    assert pulls == {name: 0.5, "continual-ft": None}
    asked = json.loads(Path("out/config.json").read_text())["run"]
    assert written in asked["strategy"] and float(asked["set"][f"{name}.pull"]) == 0.5

    (Path("out") / name / "seed-0" / "unit.json").unlink()
    assert cli.main(["run", *run, *given, "--resume"]) == 0
    again = json.loads(Path("out/results.json").read_text())
    assert [each["matrix"] for each in again["runs"]] == [each["matrix"] for each in results["runs"]]
    capsys.readouterr()
    assert cli.main(["run", *run, *given, "--set", "continual-ft.weight_decay=0.5", "--resume"]) == 2
    assert "--set continual-ft.weight_decay (was not given, now 0.5)" in capsys.readouterr().err

    sys.modules.pop("my_strategy")
    Path("my_strategy.py").unlink()  # the rest needs only the saved files
    capsys.readouterr()
    assert cli.main(["predict", "out", "--strategy", name, "--task", "sst2", "a joy"]) == 0
    assert capsys.readouterr().out.endswith("\ta joy\n")
    assert cli.main(["export", "out", "--strategy", name, "--task", "sst2", "--out", "model"]) == 0
    assert cli.main(["report", "out", "--format", "markdown"]) == 0
    assert name in capsys.readouterr().out


@pytest.mark.sampled(share=0.15)
@pytest.mark.slow
def test_workers_find_the_file_too(here: Path, run: list[str]) -> None:
    """The script stands for the installed command, whose path does not begin with the working directory."""
    script = f"import sys; sys.path[0] = {str(ROOT)!r}\nfrom forgetfree.cli import main\n"
    (here / "bin").mkdir()
    command = here / "bin" / "forgetfree"
    command.write_text(f"{script}if __name__ == '__main__':\n    sys.exit(main())\n")
    environment = {key: each for key, each in os.environ.items() if not key.startswith("PYTHON")}
    asked = ["run", *run, "--strategy", CLASS, "--seed", "0", "--seed", "1", "--jobs", "2", "--out", "out"]
    done = subprocess.run([sys.executable, command, *asked], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert {each["seed"] for each in json.loads(Path("out/results.json").read_text())["runs"]} == {0, 1}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "my_strateg:MyStrategy",
            "ModuleNotFoundError: No module named 'my_strateg'. Correct it (docs/plug-in.md), or start forgetfree in",
        ),
        ("unfinished:NUMBER", "expected a subclass of ContinualStrategy, got 3"),
        (
            "unfinished:Half",
            "The strategy (unfinished:Half) cannot be used: Half has no answering(). Correct it (docs/plug-in.md)",
        ),
        ("broken:Mine", "ModuleNotFoundError: No module named 'there_is_no_such_module'. Correct it"),
        ("my_strategy.py:MyStrategy", "Write my_strategy:MyStrategy for the class MyStrategy in the file"),
        ("mine=ewc", "A strategy of your own is named MODULE:CLASS, got 'ewc'. Write my_strategy:MyStrategy"),
        (
            f"ewc={CLASS}",
            f"'ewc' is the name of a registered strategy. Give your class another: --strategy NAME={CLASS}",
        ),
        (f"a/b={CLASS}", "have no other use as a folder, got 'a/b'"),
    ],
)
def test_what_is_no_strategy_is_refused(
    here: Path, run: list[str], capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    assert cli.main(["run", *run, "--strategy", name, "--out", "out"]) == 2
    assert told in capsys.readouterr().err
    assert not Path("out").exists()


def test_two_classes_of_one_name_are_refused(here: Path, run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(EXAMPLE, "other.py")
    two = ["--strategy", CLASS, "--strategy", "mystrategy=other:MyStrategy"]  # one folder if case does not count
    assert cli.main(["run", *run, *two, "--out", "out"]) == 2
    assert f"--strategy {CLASS} and mystrategy=other:MyStrategy have the same name" in capsys.readouterr().err
    one = ["run", *run, "--strategy", "continual-ft", "--strategy"]
    assert cli.main([*one, f"mine={CLASS}", "--out", "out"]) == 0
    assert cli.main([*one, "mine=other:MyStrategy", "--out", "out", "--resume"]) == 2
    assert f"--strategy mine=other:MyStrategy (was mine={CLASS})" in capsys.readouterr().err


def test_a_class_has_another_name_in_python(here: Path, run: list[str]) -> None:
    sys.path.append(str(here))
    from my_strategy import MyStrategy

    stream, data, model = run[0], run[2], run[4]
    few: dict[str, Any] = {"data": data, "model": model, "shots": 4, "steps": 1, "test_limit": 4, "progress": False}
    named = {"mine": MyStrategy, "written": CLASS, "fine-tune": "fine-tune"}
    results = forgetfree.run(stream, strategies=named, options={"mine": {"pull": 0.5}}, **few)
    assert results.strategies == ["mine", "written", "fine-tune"]
    for wrong in ({"ewc": MyStrategy}, {"a:b": MyStrategy}):
        with pytest.raises(UsageError):
            forgetfree.run(stream, strategies=wrong, **few)
