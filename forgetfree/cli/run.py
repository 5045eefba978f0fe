"""``forgetfree run``: train strategies on a stream of tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree import registry
from forgetfree.cli.job import command_of, perform
from forgetfree.cli.words import print_recipe, say
from forgetfree.data.sources import check_stream
from forgetfree.display import escaped
from forgetfree.jobs.run_config import RunConfig, strategies_of
from forgetfree.jobs.starts import starts_of

if TYPE_CHECKING:
    from forgetfree.jobs.engine import Execution


def _run(config: RunConfig, how: Execution) -> int:
    """Run it; 1 where a strategy failed."""
    from forgetfree.jobs.runner import run

    config = replace(config, strategies=strategies_of(config.strategies))
    config.checked()  # before anything is said
    check_stream(config.stream, config.data, config.read_options)
    starts_of(config.starts, config.model, None)
    say(f"Running {config.stream} into {config.out}")
    for name, note in registry.shadowed("strategies").items():
        if name in config.strategies:
            say(f"note: {note}")
    print_recipe(config.model, config.recipe())
    return perform(config, how, run, _show, model=config.model, cache=config.settings.get("cache"))


command = command_of(RunConfig, _run)


def _show(results: dict[str, Any], out: Path) -> None:
    from forgetfree.results.reports import render
    from forgetfree.results.run_results import merge

    if results["runs"]:
        print(render(merge([results]), "rich"))
        print(escaped(f"Report: {out / 'report.html'} (figures), {out / 'report.md'} (tables)"))
