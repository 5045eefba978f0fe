"""``forgetfree graft``: find a task's region, and write it as one small file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from forgetfree.cli.job import Begun, job_command
from forgetfree.cli.words import recipe_of, say
from forgetfree.data.sources import check_one
from forgetfree.display import escaped
from forgetfree.jobs.graft_config import GraftConfig


def _begin(config: GraftConfig) -> Begun:
    """Begin a graft."""
    from forgetfree.jobs.graft import GraftJob
    from forgetfree.jobs.running.engine import perform

    job = GraftJob(config)
    check_one(config.task, config.data, config.read_options)
    say(f"Grafting {config.task} into {config.out}")
    say(recipe_of(config))
    return Begun(partial(perform, job), _show, config.model, config.settings.get("cache"))


def _show(results: dict[str, Any], out: Path, verbose: bool) -> None:
    """Print the report, or its first table, and the files."""
    from forgetfree.results.records import GraftResults
    from forgetfree.results.report.graft_tables import lay_out_graft
    from forgetfree.results.report.page import brief_page, render_page

    if results["rows"]:
        page = lay_out_graft(GraftResults.of(results))
        print(render_page(page if verbose else brief_page(page), "rich"))
        for graft in results["grafts"]:
            print(escaped(f"Graft: {out / graft['file']} ({graft['bytes']:,} bytes)"))
        print(escaped(f"Report: {out / 'report.md'} (all tables)"))


command = job_command(GraftConfig, _begin)
