"""``forgetfree sweep``: choose options on validation rows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.cli.job import command_of, perform
from forgetfree.cli.words import recipe_of, say
from forgetfree.data.sources import check_stream
from forgetfree.display import counted, escaped
from forgetfree.jobs.adapter_starts import starts_of
from forgetfree.jobs.sweep_config import SweepConfig

if TYPE_CHECKING:
    from forgetfree.jobs.running.engine import Execution


def _sweep(config: SweepConfig, how: Execution, verbose: bool) -> int:
    """Try the settings, then print the trials and the report of the chosen run."""
    from forgetfree.jobs.sweep import run_sweep

    settings = config.checked()  # before anything is said
    check_stream(config.stream, config.data, config.read_options)
    starts_of(config.starts, config.model, None)
    count = len(settings) if config.trials is None else config.trials
    say(
        f"Trying {counted(count, 'setting')} of {config.strategy} on validation rows of {config.stream} into {config.out}"
    )
    say(recipe_of(config))
    show = partial(_show, verbose=verbose)
    return perform(config, how, run_sweep, show, model=config.model, cache=config.settings.get("cache"))


command = command_of(SweepConfig, _sweep)


def _show(results: dict[str, Any], out: Path, verbose: bool) -> None:
    from forgetfree.cli.run import show_run
    from forgetfree.results.records import SweepResults
    from forgetfree.results.rendering import render_page
    from forgetfree.results.sweep_report import lay_out_sweep

    print(render_page(lay_out_sweep(SweepResults.of(results)), "rich"))
    show_run(results["run"], out / "chosen", verbose)
    print(escaped(f"Trials: {out / 'report.md'}"))
