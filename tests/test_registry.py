"""Registered names and their objects, ours and those of installed packages."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forgetfree import cli, registry
from forgetfree.data.sources import load_tasks
from forgetfree.errors import UnknownNameError, UsageError
from forgetfree.tasks import DEFAULT_CAUSAL_TEMPLATE, DEFAULT_TEMPLATE

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package of one module, as pip would: ``install("own-package", code, streams={"own": "OWN"})``."""
    modules = []

    def install(package: str, code: str, **groups: dict[str, str]) -> Path:
        module = package.replace("-", "_")
        folder = tmp_path / package
        information = folder / f"{module}-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        points = "".join(
            f"[forgetfree.{group}]\n" + "".join(f"{name} = {module}:{attribute}\n" for name, attribute in names.items())
            for group, names in groups.items()
        )
        (information / "entry_points.txt").write_text(points)
        (folder / f"{module}.py").write_text(code)
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
        importlib.invalidate_caches()
        modules.append(module)
        return folder

    yield install
    for module in modules:
        sys.modules.pop(module, None)


STRATEGY = """
from contextlib import nullcontext
from typing import ClassVar
from forgetfree.options import option
from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.training.training_options import TrainingOptions

class OwnOptions(TrainingOptions):
    patience: int = option(3, "how long to wait", at_least=1)

class Own(ContinualStrategy):
    "Wait and see."
    Options: ClassVar = OwnOptions

    def begin(self, task):
        return self.everything(task)

    def answering(self, task):
        return nullcontext()
"""
STREAMS = """
from forgetfree.tasks import TaskDefinition
STREAM = ["sst2", "moods"]
TASK = TaskDefinition("anything", "single", ("sad", "glad"))
"""


@pytest.mark.parametrize("name", sorted(registry.STRATEGIES))
def test_every_strategy_of_ours_loads(name: str) -> None:
    loaded = registry.strategy(name)
    assert f"{loaded.__module__}:{loaded.__name__}" == registry.STRATEGIES[name].target


def test_every_strategy_file_is_registered() -> None:
    """The folder has one further file, of adapters, which answers without a strategy."""
    home = Path(registry.__file__).parent / "strategies"
    files = {path.stem for path in home.glob("[a-z]*.py")} - {"adapter_file"}
    prefix = "forgetfree.strategies."
    assert {entry.target.split(":")[0].removeprefix(prefix) for entry in registry.STRATEGIES.values()} == files


def test_an_unknown_strategy_is_told_its_neighbour() -> None:
    with pytest.raises(UnknownNameError) as caught:
        registry.strategy("grafting-continuous")
    assert str(caught.value).startswith(
        "Unknown strategy 'grafting-continuous'. Did you mean 'grafting-continual'? Known: "
    )


# -- Installed packages ----------------------------------------------------------------------------------


def test_an_installed_package_adds_a_strategy(install: Install) -> None:
    install("own-package", STRATEGY, strategies={"own": "Own"})
    assert list(registry.strategies())[-1] == "own"
    assert registry.strategies()["own"].summary == "from own-package"
    assert "own_package" not in sys.modules  # naming it imports nothing
    assert registry.strategy("own").__name__ == "Own"
    assert registry.broken("strategies") == {}


def test_an_installed_package_adds_streams_and_tasks(install: Install) -> None:
    install("own-package", STREAMS, streams={"own": "STREAM", "moods": "TASK"})
    assert registry.streams()["own"] == ("sst2", "moods")
    task = registry.tasks()["moods"]
    assert (task.name, task.labels, task.label_words) == ("moods", ("sad", "glad"), ("sad", "glad"))
    assert (task.template, task.causal_template) == (DEFAULT_TEMPLATE["single"], DEFAULT_CAUSAL_TEMPLATE["single"])
    assert "own" not in registry.tasks() and "moods" not in registry.streams()
    assert registry.broken("streams") == {}


def test_a_package_may_ship_the_rows_of_its_task(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    code = (
        "from pathlib import Path\n"
        "from forgetfree.tasks import HubSource, TaskDefinition\n"
        "ROWS = HubSource(str(Path(__file__).parent / 'rows'), columns=('{title}: {body}',))\n"
        "TASK = TaskDefinition('moods', 'single', ('sad', 'glad'), hub=ROWS)\n"
    )
    folder = install("own-package", code, streams={"moods": "TASK"})
    (folder / "rows").mkdir()
    for split in ("train", "test"):
        rows = [{"title": f"{split} {i}", "body": "text", "label": i % 2} for i in range(20)]
        (folder / "rows" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.disable_progress_bars()
    try:
        (loaded,) = load_tasks("moods", "hub")
    finally:
        datasets.enable_progress_bars()
    assert loaded.test.first == tuple(f"test {i}: text" for i in range(20))


def test_an_installed_package_cannot_take_a_name_of_ours(install: Install) -> None:
    """The names of our strategies, streams, tasks, metrics and other columns of scores are reserved."""
    streams = {"qnli-agnews-sst2": "STREAM", "sst2": "STREAM", "long": "TASK"}
    metrics = {"ece": "TASK", "union_own": "TASK", "own": "TASK"}
    install("own-package", STREAMS, strategies={"fine-tune": "STREAM"}, streams=streams, metrics=metrics)
    assert registry.strategies()["fine-tune"] == registry.STRATEGIES["fine-tune"]
    assert registry.streams()["qnli-agnews-sst2"] == ("qnli", "ag_news", "sst2")
    assert "sst2" not in registry.streams() and "long" not in registry.tasks()
    assert registry.metrics().keys() - registry.METRICS.keys() == {"own"}
    assert registry.broken("strategies") == {
        "fine-tune of own-package": "The plug-in 'fine-tune' of package 'own-package' (own_package:STREAM) cannot be used: "
        "that name is forgetfree's own. Give its entry point another name."
    }
    assert set(registry.broken("streams")) == {f"{name} of own-package" for name in streams}
    assert set(registry.broken("metrics")) == {"ece of own-package", "union_own of own-package", "own"}


def complaint(reason: str) -> str:
    return (
        f"The plug-in 'own' of package 'own-package' (own_package:OWN) cannot be used: {reason}. "
        "Fix or uninstall that package."
    )


SHAPE = "expected a tuple or list of task names, or a TaskDefinition, got "
STRATEGY_BASE = "from forgetfree.continual.strategy import ContinualStrategy as Base\n"
TASK = "from forgetfree.tasks import HubSource, TaskDefinition as T\n"
BROKEN: list[tuple[registry.Group, str, str]] = [
    ("strategies", "import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
    ("strategies", "raise SystemExit('two\\nlines')", "SystemExit: two lines"),
    ("strategies", "OWN = print", "expected a subclass of ContinualStrategy, got <built-in function print>"),
    (
        "strategies",
        f"{STRATEGY_BASE}class OWN(Base): Options, begin, answering = dict, None, None",
        "expected a subclass of TrainingOptions, got <class 'dict'>",
    ),
    ("streams", "OWN = 'sst2,qnli'", f"{SHAPE}'sst2,qnli'"),
    ("streams", "OWN = ['sst2', 3]", f"{SHAPE}['sst2', 3]"),
    (
        "streams",
        f"{TASK}OWN = T('x', 'single', ('a', 'a'), label_words=('b', 'c'))",
        "labels must be at least two names, all different, got ('a', 'a')",
    ),
    ("streams", f"{TASK}OWN = T('x', 'single', None)", "TypeError: 'NoneType' object is not iterable"),
]


@pytest.mark.parametrize(("group", "code", "reason"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_plug_in_is_named_with_package_and_reason(
    install: Install, group: registry.Group, code: str, reason: str
) -> None:
    install("own-package", code, **{group: {"own": "OWN"}})
    install("sound-package", STREAMS, streams={"sound": "STREAM"})
    assert registry.broken(group) == {"own": complaint(reason)}
    assert registry.streams()["sound"] == ("sst2", "moods")
    for name in ("own", "sst2,own") if group == "streams" else ("own",):
        with pytest.raises(UsageError) as caught:
            load_tasks(name, "demo") if group == "streams" else registry.strategy(name)
        assert str(caught.value) == complaint(reason)


@pytest.mark.parametrize(
    ("what", "broken", "sound"),
    [
        ("strategies", "bad", "own from own-package"),
        ("strategies --verbose", "bad", "patience = 3 (a whole number) how long to wait"),
        ("streams", "worse", "twice sst2 → moods"),
        ("tasks", "worse", "moods single: sad, glad"),
        ("kinds", "awful", "tokens a sentence, and a tag for each of its words"),
        ("metrics", "dreadful", "misses from own-package; lower is better"),
    ],
)
def test_a_broken_package_is_listed_with_its_reason_and_takes_nothing_down(
    install: Install, capsys: pytest.CaptureFixture[str], what: str, broken: str, sound: str
) -> None:
    more = {"kinds": {"awful": "Bad"}, "metrics": {"dreadful": "BAD", "f1": "BAD"}}
    install("bad-package", "import no_such_package", strategies={"bad": "Bad"}, streams={"worse": "BAD"}, **more)
    code = f"{STRATEGY}{STREAMS}from forgetfree.results.metrics import Metric\nMISSES = Metric(len, higher_is_better=False)\n"
    groups = {"streams": {"twice": "STREAM", "moods": "TASK"}, "metrics": {"misses": "MISSES"}}
    install("own-package", code, strategies={"own": "Own"}, **groups)
    assert cli.main(["list", *what.split()]) == 0
    shown, error = capsys.readouterr()
    shown = " ".join(shown.split())
    assert f"broken: The plug-in '{broken}' of package 'bad-package' (bad_package:" in shown
    assert "No module named 'no_such_package'" in shown and sound in shown
    assert ("'f1' of package 'bad-package' (bad_package:BAD) cannot be used: that name" in shown) is (what == "metrics")
    assert error == ""


NOISE = """
import logging, sys, warnings
warnings.warn("noise of a warning")
warnings.warn("noise of a deprecation", FutureWarning)
logging.getLogger("own").warning("noise of a log")
print("noise of a print")
print("noise of an error", file=sys.stderr)
"""


@pytest.mark.sampled(share=0.35)
def test_a_package_that_speaks_while_it_is_imported_is_not_heard_in_a_list(install: Install) -> None:
    """``--debug`` shows all output of a package."""
    folder = install("own-package", NOISE + STREAMS, streams={"two": "STREAM"})
    command = [sys.executable, "-W", "always", "-m", "forgetfree", "list", "streams"]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = partial(subprocess.run, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, timeout=120)
    done = run(command)
    assert (done.returncode, done.stderr) == (0, "")
    assert "noise" not in done.stdout and "two" in done.stdout
    done = run([*command, "--debug"])
    assert done.returncode == 0
    for kind in ("warning", "deprecation", "log", "error"):
        assert f"noise of a{'n' * (kind == 'error')} {kind}" in done.stderr
    assert "noise of a print" in done.stdout


def test_a_run_meets_a_broken_package_only_where_it_names_it(
    install: Install,
    data_directory: Path,
    model_directory: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install("bad-package", "import no_such_package", strategies={"bad": "Bad"}, streams={"worse": "BAD"})
    install("own-package", f"{STRATEGY}\nPAIR = ('qnli', 'sst2')", strategies={"own": "Own"}, streams={"two": "PAIR"})

    def run(stream: str, strategy: str) -> tuple[int, str]:
        places = ["--data", str(data_directory), "--model", str(model_directory("bert"))]
        places += ["--out", str(tmp_path / f"{stream}-{strategy}")]
        code = cli.main(["run", stream, "--strategy", strategy, *places, "--shots", "2", "--steps", "1"])
        return code, capsys.readouterr().err

    assert run("two", "own")[0] == 0
    results: dict[str, Any] = json.loads((tmp_path / "two-own" / "results.json").read_text())
    assert (results["tasks"], results["runs"][0]["strategy"]) == (["qnli", "sst2"], "own")
    for stream, strategy, name in (("two", "bad", "bad"), ("worse", "own", "worse")):
        code, error = run(stream, strategy)
        assert code == 2
        assert f"error: The plug-in '{name}' of package 'bad-package'" in error
        assert error.strip().endswith("Fix or uninstall that package.") and "Traceback" not in error
