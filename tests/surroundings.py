"""The work of a unit in a test, in a module of its own, so that a worker can import it."""

from __future__ import annotations

import os

from forgetfree.jobs.run_directory import Unit
from forgetfree.training.monitor import Monitor


def tell_surroundings(unit: Unit, monitor: Monitor) -> None:
    """Write an environment variable and the working directory of the process."""
    told = f"{os.environ.get('FORGETFREE_TOLD')} {os.getcwd()}"
    unit.directory.with_suffix(".txt").write_text(told)
