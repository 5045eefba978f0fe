"""Fixtures of tests of models."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def copy(model_directory: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A model directory that a test may change."""
    return lambda kind: Path(shutil.copytree(model_directory(kind), tmp_path / kind))
