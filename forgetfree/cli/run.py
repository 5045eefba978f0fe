"""``forgetfree run``: train strategies on a stream of tasks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree import registry
from forgetfree.cli.job import command_of, perform
from forgetfree.cli.words import recipe_of, say
from forgetfree.data.sources import check_stream
from forgetfree.display import escaped
from forgetfree.jobs.adapter_starts import starts_of
from forgetfree.jobs.run_config import RunConfig, strategies_of

if TYPE_CHECKING:
    from forgetfree.jobs.running.engine import Execution


def _run(config: RunConfig, how: Execution, verbose: bool) -> int:
    """Run it; 1 where a strategy failed."""
    from forgetfree.jobs.run import run

    config = replace(config, strategies=strategies_of(config.strategies))
    config.checked()  # before anything is said
    check_stream(config.stream, config.data, config.read_options)
    starts_of(config.starts, config.model, None)
    say(f"Running {config.stream} into {config.out}")
    for name, note in registry.shadowed("strategies").items():
        if name in config.strategies:
            say(f"note: {note}")
    say(recipe_of(config))
    show = partial(show_run, verbose=verbose)
    return perform(config, how, run, show, model=config.model, cache=config.settings.get("cache"))


def show_run(results: dict[str, Any], out: Path, verbose: bool) -> None:
    """Print the outcome of a run: its headline and first table, or all, and where the report is."""
    from forgetfree.results.records import RunResults
    from forgetfree.results.rendering import brief_page, render_page
    from forgetfree.results.reports import lay_out
    from forgetfree.results.run_results import merge

    if results["runs"]:
        page = lay_out(merge([RunResults.of(results)]), ended=verbose)
        print(render_page(page if verbose else brief_page(page), "rich"))
        print(escaped(f"Report: {out / 'report.html'} (figures), {out / 'report.md'} (all tables)"))


command = command_of(RunConfig, _run)
