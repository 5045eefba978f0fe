"""``forgetfree sweep``: choose options on validation rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forgetfree.cli.job import Begun, job_command
from forgetfree.cli.words import recipe_of, say
from forgetfree.data.sources import check_stream
from forgetfree.display import counted, escaped
from forgetfree.jobs.adapter_starts import starts_of
from forgetfree.jobs.sweep_config import SweepConfig


def _begin(config: SweepConfig) -> Begun:
    """Begin a sweep."""
    from forgetfree.jobs.sweep import Sweep

    sweep = Sweep(config)
    check_stream(config.stream, config.data, config.read_options)
    starts_of(config.starts, config.model, None)
    settings = counted(sweep.settings, "setting")
    say(f"Trying {settings} of {config.strategy} on validation rows of {config.stream} into {config.out}")
    say(recipe_of(config))
    return Begun(sweep.perform, _show, config.model, config.settings.get("cache"))


def _show(results: dict[str, Any], out: Path, verbose: bool) -> None:
    """Print the trials, and the report of the chosen run."""
    from forgetfree.cli.run import show_run
    from forgetfree.results.records import SweepResults
    from forgetfree.results.report.page import render_page
    from forgetfree.results.report.sweep_tables import lay_out_sweep

    print(render_page(lay_out_sweep(SweepResults.of(results)), "rich"))
    show_run(results["run"], out / "chosen", verbose)
    print(escaped(f"Trials: {out / 'report.md'}"))


command = job_command(SweepConfig, _begin)
