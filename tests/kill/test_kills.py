"""A small part of ``python tests/kill``: each command is killed at a few renames and moments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.sampled(share=0.25)
def test_runs_that_are_killed_end_as_one_that_is_not(tmp_path: Path) -> None:
    given = ["--moments", "3", "--renames", "1", "--signals", "1"]
    run = subprocess.run(
        [sys.executable, str(Path(__file__).parent), *given],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(": 0 differ from what was not killed") == 7
