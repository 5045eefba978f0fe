"""``forgetfree run``: train strategies on a stream of tasks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from forgetfree import registry
from forgetfree.cli.job import Execution, begun, command_of
from forgetfree.cli.words import fail, print_recipe, say
from forgetfree.display import escaped
from forgetfree.errors import ReportError
from forgetfree.jobs.run_config import RunConfig


def _run(execution: Execution[RunConfig]) -> int:
    """Run it; 1 where a strategy failed."""
    from forgetfree.cli.progress import make_monitor
    from forgetfree.jobs import runner

    config = replace(execution.config, strategies=strategies_of(execution.config.strategies))
    say(f"Running {config.stream} into {config.out}")
    for name, note in registry.shadowed("strategies").items():
        if name in config.strategies:
            say(f"note: {note}")
    print_recipe(config.model, config.recipe())
    with begun(execution, config.model, _holdings):
        results = runner.run(
            config,
            resume=execution.resume,
            jobs=execution.jobs or 1,
            monitor=lambda title: make_monitor(title, sys.stderr),
            debug=execution.debug,
        )
    if results["runs"]:
        from forgetfree.results.reports import render
        from forgetfree.results.run_results import merge

        print(render(merge([results]), "rich"))
        print(escaped(f"Report: {Path(config.out) / 'report.md'}"))
    for failed in results["failed"]:
        fail(f"{failed['strategy']}, seed {failed['seed']}: {failed['error']}", 1)
    return 1 if results["failed"] else 0


command = command_of(RunConfig, _run)


def strategies_of(given: Sequence[str]) -> tuple[str, ...]:
    """Return the names given, with ``all`` for every strategy of ours."""
    return tuple(name for each in given for name in (registry.STRATEGIES if each == "all" else [each]))


def _holdings(out: Path) -> str:
    """Return what a run that was cut short has left behind."""
    from forgetfree.results.run_results import load_results

    try:
        results = load_results(out)
    except ReportError:
        return ""
    finished = [f"{run['strategy']} seed {run['seed']}" for run in results["runs"]]
    begun = [
        f"{run['strategy']} seed {run['seed']} ({max(0, len(run['matrix']) - 1)} of {len(results['tasks'])} tasks)"
        for run in results.get("unfinished", [])
    ]
    parts = [f"finished: {', '.join(finished) or 'nothing'}"]
    if begun:
        parts.append(f"cut short: {', '.join(begun)}")
    return f"{out} holds what was computed ({'; '.join(parts)}); the same command with --resume --out {out} goes on."
