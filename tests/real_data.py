"""The real data that some tests read, if present."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DIRECTORY = Path(os.environ.get("FORGETFREE_DATA") or Path(__file__).parents[2] / "shared" / "data").resolve()


def needs(task: str) -> pytest.MarkDecorator:
    """Skip the test with a reason if this task's folder is missing."""
    return pytest.mark.skipif(
        not (DIRECTORY / task).is_dir(),
        reason=f"no real data at {DIRECTORY / task}; set FORGETFREE_DATA to have it tested",
    )
