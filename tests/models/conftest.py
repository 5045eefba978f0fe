"""Fixtures for the tests of models."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def copy(model_directory: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies a model directory, so that a test may change it."""
    return lambda kind: Path(shutil.copytree(model_directory(kind), tmp_path / kind))
