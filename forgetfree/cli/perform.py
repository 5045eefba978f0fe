"""What run, graft and experiment have in common: a job is performed, and what is left of one that is cut short is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forgetfree.cli.shared import fail, no_empty_directories
from forgetfree.errors import ForgetfreeError, ReportError, RunError, UsageError
from forgetfree.jobs.engine import Execution, failures, holdings


def perform(
    action: Callable[[], Any], show: Callable[[Any], None], out: str, cache: object = None, debug: bool = False
) -> int:
    """Perform a job, show what it made, and tell what failed.

    Args:
        action: performs it, and returns the content of results.json.
        show: shows it.
        out: the directory.
        cache: another one that it may make.
        debug: let errors through as they are.

    Returns:
        The exit code.
    """
    try:
        with no_empty_directories(out, cache):
            results = action()
    except KeyboardInterrupt:
        return fail(f"Interrupted. {holdings(Path(out))}".strip(), 1)
    except (UsageError, RunError, ReportError):  # of what cannot be begun or resumed: they say themselves what to do
        raise
    except (ForgetfreeError, OSError) as error:
        held = holdings(Path(out))
        if debug or not held:
            raise
        raise RunError(f"{error} {held}") from error
    show(results)
    failed = failures(results)
    for message in failed[:-1]:
        fail(message, 1)
    return fail(f"{failed[-1]} {holdings(Path(out))}", 1) if failed else 0


def execution(resume: bool, jobs: int, debug: bool) -> Execution:
    """How a job of the command line is run.

    Args:
        resume: as ``--resume``.
        jobs: as ``--jobs``.
        debug: as ``--debug``.
    """
    from forgetfree.cli.progress import make_monitor

    return Execution(resume=resume, jobs=jobs, debug=debug, monitor=lambda title: make_monitor(title, sys.stderr))
