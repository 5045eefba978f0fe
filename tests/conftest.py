"""Fixtures that every test may use: tiny models and tiny data on disk, made once a session, of each worker its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Workers of pytest-xdist share the cores: one thread each, and in the processes that tests start, so that bits compare.
# Before torch is imported, which reads it then.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a test asks for two threads, one that waits leaves its core to others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# readline leaves the width of a terminal that is not there, which reports would be laid out for.
os.environ.pop("COLUMNS", None)

import pytest
import tiny

from forgetfree.results import inline

ModelDirectory = Callable[[str], Path]
_drawn, _fsync = inline._drawn, os.fsync
MakeStream = Callable[..., Any]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what takes half of a tiny run, before fixtures are made.

    The figures of report.html are drawn only in tests of results and those marked ``figures``; in the others, too, they are
    laid out, and the page has empty pictures. Files are synced only in slow tests: what is lost when the power fails is no
    test's matter, and a busy machine mostly waits for its disk.
    """
    draws = item.path.parent.name == "results" or item.get_closest_marker("figures") is not None
    inline._drawn = _drawn if draws else lambda figure: '<svg viewBox="0 0 252 180"></svg>'
    os.fsync = _fsync if item.get_closest_marker("slow") is not None else _not_synced


def _not_synced(handle: Any) -> None:
    """Refuse what cannot be synced, as `os.fsync` does."""
    os.fstat(handle if isinstance(handle, int) else handle.fileno())


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    """The directory of a tiny model by its kind, see `tiny.KINDS`."""
    made: dict[str, Path] = {}

    def directory(kind: str) -> Path:
        if kind not in made:
            made[kind] = tiny.write_model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return directory


@pytest.fixture(scope="session")
def data_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tiny tasks, `tiny.STREAM`."""
    return tiny.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def tiny_stream(model_directory: ModelDirectory, data_directory: Path) -> MakeStream:
    """A fresh stream over the tiny tasks with a fresh tiny model: ``tiny_stream(kind, readout, **changes)``."""

    def make(kind: str = "bert", readout: str = "auto", *, stream: str = tiny.STREAM, **changes: Any) -> Any:
        from forgetfree.continual.streams import load_stream

        return load_stream(
            stream, data=str(data_directory), model=str(model_directory(kind)), readout=readout, **changes
        )

    return make
