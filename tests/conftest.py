"""Fixtures for all tests: tiny models and tiny data on disk, made once per session and worker.

Torch is imported inside functions: the controller process of pytest-xdist reads this file first, and does not need torch.
"""

from __future__ import annotations

import atexit
import datetime
import gc
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

# Workers of pytest-xdist share the cores: each worker and its child processes use one thread, so that bits are comparable.
# This is set before torch is imported, because torch reads it then.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a test uses two threads, a waiting thread leaves its core to others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Tests also measure which precision is faster, for tiny models: that result must not get into the user's cache.
if "FORGETFREE_TESTS_CACHE" not in os.environ:  # workers of pytest-xdist inherit it
    os.environ["FORGETFREE_TESTS_CACHE"] = tempfile.mkdtemp(prefix="forgetfree-tests-cache-")
    atexit.register(shutil.rmtree, os.environ["FORGETFREE_TESTS_CACHE"], ignore_errors=True)
os.environ["FORGETFREE_CACHE"] = os.environ["FORGETFREE_TESTS_CACHE"]
# readline sets the width of a terminal that does not exist, and reports would be laid out for that width.
os.environ.pop("COLUMNS", None)

import pytest

ModelDirectory = Callable[[str], Path]
#: The seed that draws the cases of sampled tests: today's date, or the user's value; workers of pytest-xdist inherit it.
DAY = os.environ.setdefault("FORGETFREE_TESTS_DAY", datetime.datetime.now(datetime.UTC).date().isoformat())
_fsync = os.fsync
MakeStream = Callable[..., Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-case", action="store_true", help="run all cases of sampled tests, not a share of them")
    parser.addoption(
        "--simulated-gpu", action="store_true", help="where a device is chosen by auto, it is simulated_gpu.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Simulate a GPU for the whole session if ``--simulated-gpu`` is given, except in the controller of pytest-xdist."""
    if config.getoption("simulated_gpu") and not getattr(config.option, "numprocesses", None):
        import simulated_gpu

        gpu = simulated_gpu.present()
        gpu.__enter__()
        config.add_cleanup(lambda: gpu.__exit__(None, None, None))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection while modules are imported, which saves a fifth of that time, and freeze their objects."""
    gc.disable()
    result = yield
    gc.enable()
    gc.freeze()
    return result


def pytest_report_header(config: pytest.Config) -> str:
    """Return a line with the setting that draws the same cases again."""
    if config.getoption("every_case"):
        return "sampled tests: every case"
    return f"sampled tests: a share of their cases, drawn by FORGETFREE_TESTS_DAY={DAY}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For a test marked ``sampled(*always, share=0.05)``, run the cases ``always`` and a share of the others, drawn by the day.

    Tests that are named on the command line run all cases. Each worker begins with slow and long tests, so that no worker
    waits for a single one at the end.
    """
    if not config.getoption("every_case") and not any("::" in word for word in config.args):
        cases: dict[str, list[pytest.Item]] = {}
        for item in items:
            if item.get_closest_marker("sampled"):
                cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        left_out = {item for test, each in cases.items() for item in _left_out(test, each)}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    items[:] = _by_worker(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _by_worker(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Order tests so that each of the equal parts that pytest-xdist gives its workers begins with a share of the slow ones."""
    slow = [item for item in items if any(item.get_closest_marker(name) for name in ("slow", "long"))]
    fast = [item for item in items if all(item.get_closest_marker(name) is None for name in ("slow", "long"))]
    ordered: list[pytest.Item] = []
    for left in range(workers, 0, -1):
        first = len(slow) // left
        others = (len(slow) + len(fast)) // left - first
        ordered += slow[:first] + fast[:others]
        del slow[:first], fast[:others]
    return ordered


def _left_out(test: str, cases: list[pytest.Item]) -> list[pytest.Item]:
    (mark,) = cases[0].iter_markers("sampled")
    ids = {item.name.partition("[")[2].removesuffix("]"): item for item in cases}
    if unknown := set(mark.args) - set(ids):
        raise pytest.UsageError(f"{test} has no case {sorted(unknown)}, which its mark 'sampled' names.")
    others = [item for case, item in ids.items() if case not in mark.args]
    generator = random.Random(f"{DAY} {test}")
    share = mark.kwargs.get("share", 0.05) * len(others)
    drawn = generator.sample(others, int(share + generator.random()))  # on average, the share
    return [item for item in others if item not in drawn]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out two parts that take half of a tiny run, before fixtures are made.

    The figure of report.html is drawn only in tests of results and in tests marked ``figures``; in the others it is empty.
    Files are synced only in slow tests: no test checks a power failure, and a busy machine would mostly wait for its
    disk.
    """
    import pictures

    draws = item.path.parent.name == "results" or item.get_closest_marker("figures") is not None
    pictures.make(pictures.DRAWN if draws else pictures.EMPTY)
    os.fsync = _fsync if item.get_closest_marker("slow") is not None else _not_synced


def _not_synced(handle: Any) -> None:
    """Raise for a handle that cannot be synced, as `os.fsync` does."""
    os.fstat(handle if isinstance(handle, int) else handle.fileno())


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    """Return the directory of a tiny model by its kind, see `tiny.KINDS`."""
    import tiny

    made: dict[str, Path] = {}

    def directory(kind: str) -> Path:
        if kind not in made:
            made[kind] = tiny.write_model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return directory


@pytest.fixture(scope="session")
def data_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the data directory of three tiny tasks, `tiny.STREAM`."""
    import tiny

    return tiny.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def tiny_stream(model_directory: ModelDirectory, data_directory: Path) -> MakeStream:
    """Return a new stream over the tiny tasks with a new tiny model: ``tiny_stream(kind, readout, **changes)``."""
    import tiny

    from forgetfree.continual.stream import load_stream

    def make(kind: str = "bert", readout: str = "auto", *, stream: str = tiny.STREAM, **changes: Any) -> Any:
        return load_stream(
            stream, data=str(data_directory), model=str(model_directory(kind)), readout=readout, **changes
        )

    return make


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Collect the plans that ``--check`` prints, as Python objects."""
    from forgetfree.cli import calls, run

    made: list[dict[str, Any]] = []

    def plan(config: Any, **how: Any) -> dict[str, Any]:
        made.append(calls.plan(config, **how))
        return made[-1]

    monkeypatch.setattr(run, "plan", plan)
    return made
