"""Fixtures that every test may use: tiny models and tiny data on disk, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

ModelDirectory = Callable[[str], Path]
MakeStream = Callable[..., Any]


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
        from forgetfree.streams import load_stream

        return load_stream(
            stream, data=str(data_directory), model=str(model_directory(kind)), readout=readout, **changes
        )

    return make
