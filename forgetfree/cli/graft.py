"""``forgetfree graft``: find a task's region, and write it as one small file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.cli.job import command_of, perform
from forgetfree.cli.words import recipe_of, say
from forgetfree.data.sources import check_one
from forgetfree.display import escaped
from forgetfree.jobs.graft_config import GraftConfig

if TYPE_CHECKING:
    from forgetfree.jobs.running.engine import Execution


def _graft(config: GraftConfig, how: Execution, verbose: bool) -> int:
    """Graft, then print the report and the files."""
    from forgetfree.jobs.graft import run_graft

    config.checked()  # before anything is said
    check_one(config.task, config.data, config.read_options)
    say(f"Grafting {config.task} into {config.out}")
    say(recipe_of(config))
    show = partial(_show, verbose=verbose)
    return perform(config, how, run_graft, show, model=config.model, cache=config.settings.get("cache"))


command = command_of(GraftConfig, _graft)


def _show(results: dict[str, Any], out: Path, verbose: bool) -> None:
    from forgetfree.results.graft_report import lay_out_graft
    from forgetfree.results.records import GraftResults
    from forgetfree.results.rendering import brief_page, render_page

    if results["rows"]:
        page = lay_out_graft(GraftResults.of(results))
        print(render_page(page if verbose else brief_page(page), "rich"))
        for graft in results["grafts"]:
            print(escaped(f"Graft: {out / graft['file']} ({graft['bytes']:,} bytes)"))
        print(escaped(f"Report: {out / 'report.md'} (all tables)"))
