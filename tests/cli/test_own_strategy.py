"""``--strategy MODULE:CLASS``: a class in a file of the working directory, from the first run to its use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forgetfree import cli

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "my_strategy" / "my_strategy.py"
NAME = "my_strategy:MyStrategy"
HALF = """
from forgetfree.continual.strategy import ContinualStrategy

NUMBER = 3

class Half(ContinualStrategy):
    def begin(self, task): ...
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the example's file, which is not on the path of Python."""
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


@pytest.mark.sampled(share=0.4)
def test_a_class_of_a_file_runs_is_resumed_and_used(
    here: Path, run: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *run, "--strategy", "continual-ft", "--out", "out"]) == 0
    given = ["--strategy", NAME, "--strategy", "continual-ft", "--set", f"{NAME}.pull=0.5", "--out", "out"]
    assert cli.main(["run", *run, *given, "--resume"]) == 0  # it joins, with options of its own
    results = json.loads(Path("out/results.json").read_text())
    pulls = {each["strategy"]: each["options"].get("pull") for each in results["runs"]}
    assert pulls == {NAME: 0.5, "continual-ft": None}
    assert f"{NAME}.pull=0.5" in Path("out/report.html").read_text()

    (Path("out") / NAME / "seed-0" / "unit.json").unlink()
    assert cli.main(["run", *run, *given, "--resume"]) == 0
    again = json.loads(Path("out/results.json").read_text())
    assert [each["matrix"] for each in again["runs"]] == [each["matrix"] for each in results["runs"]]
    capsys.readouterr()
    assert cli.main(["run", *run, *given, "--set", "continual-ft.momentum=0.5", "--resume"]) == 2
    assert "--set continual-ft.momentum (was not given, now 0.5)" in capsys.readouterr().err

    sys.modules.pop("my_strategy")
    Path("my_strategy.py").unlink()  # what follows needs only what was kept
    capsys.readouterr()
    assert cli.main(["predict", "out", "--strategy", NAME, "--task", "sst2", "a joy"]) == 0
    assert capsys.readouterr().out.endswith("\ta joy\n")
    assert cli.main(["export", "out", "--strategy", NAME, "--task", "sst2", "--out", "model"]) == 0
    assert cli.main(["report", "out", "--format", "markdown"]) == 0
    assert NAME in capsys.readouterr().out


def test_a_sweep_tries_the_options_of_a_class_of_a_file(here: Path, run: list[str]) -> None:
    assert cli.main(["sweep", *run, "--strategy", NAME, "--set", "pull=0.1,0.9", "--out", "swept"]) == 0
    results = json.loads(Path("swept/results.json").read_text())
    assert [each["values"] for each in results["trials"]] == [{"pull": "0.1"}, {"pull": "0.9"}]


@pytest.mark.sampled(share=0.2)
@pytest.mark.slow
def test_workers_find_the_file_too(here: Path, run: list[str]) -> None:
    """As the installed command, whose path does not begin with the working directory."""
    script = f"import sys; sys.path[0] = {str(ROOT)!r}\nfrom forgetfree.cli import main\n"
    (here / "bin").mkdir()
    command = here / "bin" / "forgetfree"
    command.write_text(f"{script}if __name__ == '__main__':\n    sys.exit(main())\n")
    environment = {key: each for key, each in os.environ.items() if not key.startswith("PYTHON")}
    asked = ["run", *run, "--strategy", NAME, "--seed", "0", "--seed", "1", "--jobs", "2", "--out", "out"]
    done = subprocess.run([sys.executable, command, *asked], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert {each["seed"] for each in json.loads(Path("out/results.json").read_text())["runs"]} == {0, 1}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("my_strateg:MyStrategy", "no module my_strateg is installed or lies in"),
        ("my_strategy:MyStrateg", "Unknown class of the module my_strategy: 'MyStrateg'. Did you mean 'MyStrategy'?"),
        ("my_strategy:MyOptions", "my_strategy:MyOptions is no strategy: expected a subclass of ContinualStrategy"),
        ("unfinished:NUMBER", "expected a subclass of ContinualStrategy, got 3"),
        ("unfinished:Half", "unfinished:Half is no strategy: Half has no answering()"),
        ("broken:Mine", "cannot be imported: ModuleNotFoundError: No module named 'there_is_no_such_module'"),
        ("my_strategy.py:MyStrategy", "Write my_strategy:MyStrategy for the class MyStrategy in the file"),
        ("./my_strategy:MyStrategy", "is named MODULE:CLASS, got './my_strategy:MyStrategy'"),
        ("my_strategy:", "is named MODULE:CLASS, got 'my_strategy:'"),
    ],
)
@pytest.mark.parametrize("command", ["run", "sweep"])
def test_what_is_no_strategy_is_refused(
    here: Path, run: list[str], capsys: pytest.CaptureFixture[str], command: str, name: str, told: str
) -> None:
    tried = ["--set", "learning_rate=1e-3,1e-2"] if command == "sweep" else []
    assert cli.main([command, *run, "--strategy", name, *tried, "--out", "out"]) == 2
    assert told in capsys.readouterr().err
    assert not Path("out").exists()
