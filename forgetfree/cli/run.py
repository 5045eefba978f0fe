"""``forgetfree run``: train strategies on a stream of tasks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from forgetfree import registry
from forgetfree.cli.job import Begun, job_command
from forgetfree.cli.words import recipe_of, say
from forgetfree.data.sources import check_stream
from forgetfree.display import escaped
from forgetfree.jobs.adapter_starts import starts_of
from forgetfree.jobs.run_config import RunConfig


def _begin(config: RunConfig) -> Begun:
    """Begin a run."""
    from forgetfree.jobs.run import RunJob
    from forgetfree.jobs.running.engine import perform

    job = RunJob(config)
    check_stream(config.stream, config.data, config.read_options)
    starts_of(config.starts, config.model, None)
    say(f"Running {config.stream} into {config.out}")
    for name, note in registry.shadowed("strategies").items():
        if name in config.strategies:
            say(f"note: {note}")
    say(recipe_of(config))
    return Begun(partial(perform, job), show_run, config.model, config.settings.get("cache"))


def show_run(results: dict[str, Any], out: Path, verbose: bool) -> None:
    """Print the outcome of a run: its headline and first table, or all, and where the report is."""
    from forgetfree.results.records import RunResults
    from forgetfree.results.report.page import brief_page, render_page
    from forgetfree.results.report.run_report import lay_out
    from forgetfree.results.run_results import merge

    if results["runs"]:
        page = lay_out(merge([RunResults.of(results)]), ended=verbose)
        print(render_page(page if verbose else brief_page(page), "rich"))
        print(escaped(f"Report: {out / 'report.html'} (figures), {out / 'report.md'} (all tables)"))


command = job_command(RunConfig, _begin)
