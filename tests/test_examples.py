"""The example package in use as by its author, and the document that quotes it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "my_strategy"


@pytest.mark.parametrize(
    ("file", "language"),
    [("my_strategy.py", "python"), ("pyproject.toml", "toml"), ("tests/test_my_strategy.py", "py")],
)
def test_the_document_quotes_the_example(file: str, language: str) -> None:
    document = (ROOT / "docs" / "plug-in.md").read_text(encoding="utf-8")
    assert f"```{language}\n{(EXAMPLE / file).read_text(encoding='utf-8')}```\n" in document


def test_the_contract_table_names_hooks_that_there_are() -> None:
    from forgetfree.continual.strategy import ContinualStrategy
    from forgetfree.continual.strategy_parts import Training
    from forgetfree.training.encoded_task import EncodedTask

    document = (ROOT / "docs" / "plug-in.md").read_text(encoding="utf-8")
    contract = document.partition("\n## The contract\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in contract.splitlines() if line.startswith("| `")]
    hooks = [hook for row in rows for hook in re.findall(r"`(\w+)(?:\([\w, ]*\))?`", row)]
    assert len(hooks) > 18
    known = {*vars(ContinualStrategy), *ContinualStrategy.__annotations__, *Training.__dataclass_fields__, "Training"}
    known |= {*vars(EncodedTask), *EncodedTask.__dataclass_fields__}
    assert [hook for hook in hooks if hook not in known] == []


@pytest.mark.slow
def test_the_example_is_a_package_that_works(tmp_path: Path, data_directory: Path, model_directory: Any) -> None:
    """A wheel is installed into a new environment that borrows this one's packages; its tests, `list`, `run`, `report` work."""
    source = Path(shutil.copytree(EXAMPLE, tmp_path / "source", ignore=shutil.ignore_patterns("build", "*.egg-info")))
    environment = tmp_path / "environment"
    python = environment / "bin" / "python"

    def call(*command: str | Path, cwd: Path = tmp_path) -> str:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=cwd, env=clean, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "dist", source)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    call(sys.executable, "-m", "venv", "--without-pip", environment)
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    (packages,) = (environment / "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{ROOT}\n")

    shutil.rmtree(source / "build", ignore_errors=True)
    (source / "my_strategy.py").unlink()  # its tests must find the installed module
    assert "2 passed" in call(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=source)

    assert "sst2 → qnli" in call(python, "-m", "forgetfree", "list", "streams")
    out = tmp_path / "out"
    small = ["--shots", "4", "--steps", "2", "--set", "pull=0.5", "--out", str(out)]
    where = ["--data", str(data_directory), "--model", str(model_directory("bert"))]
    commands = [
        ["list", "strategies"],
        ["run", "my-stream", "--strategy", "my-strategy", *where, *small],
        ["report", str(out), "--format", "markdown"],
    ]
    code = f"from forgetfree import cli\nfor words in {commands!r}:\n    assert cli.main(words) == 0\n    print('\\f')"
    listed, _, report = call(python, "-c", code).split("\f")[:3]  # one process, because importing takes seconds
    assert "my-strategy  " in listed and "my-strategy" in report
    (run,) = json.loads((out / "results.json").read_text())["runs"]
    assert (run["strategy"], run["options"]["pull"], len(run["matrix"])) == ("my-strategy", 0.5, 3)


@pytest.mark.sampled(share=0.25)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["trl_sft", "qlora_like", "trainer"])
def test_grafting_in_trainers_of_others(name: str, tmp_path: Path) -> None:
    """The example trainers learn task after task, and the output for the first task stays as it was."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "skills.safetensors").is_file()
    if name == "trainer":
        assert re.search(r"trainer\s+—\s+—\s+0\.0\s+0\.0\s+0\.0\n", done.stdout), done.stdout
    else:
        said = re.findall(r"after \w+, capitals says: (.*)", done.stdout)
        assert len(said) == 2 and said[0] == said[1]
