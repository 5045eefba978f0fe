"""``forgetfree experiment``: repeat an experiment of the paper."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.cli.job import command_of, perform
from forgetfree.cli.words import say
from forgetfree.data.sources import check_one
from forgetfree.display import escaped
from forgetfree.jobs.experiment_config import ExperimentConfig

if TYPE_CHECKING:
    from forgetfree.jobs.running.engine import Execution


def _experiment(config: ExperimentConfig, how: Execution, verbose: bool) -> int:
    """Measure what is missing, then print the report."""
    from forgetfree.core.device import find_device
    from forgetfree.jobs import experiments

    paper, checked = experiments.load_experiment(config.name).paper, config.checked()
    for task in config.tasks:  # before anything is said
        check_one(task, config.data, config.read_options)
    if "cluster" not in how:
        how.setdefault("jobs", experiments.usual_jobs(find_device(config.device)))
    cache = checked.common.cache or Path(config.out).parent / "fine-tuned"
    say(f"Measuring {config.name} ({paper}) into {config.out}; fine-tuned models: {cache}")
    show = partial(_show, verbose=verbose)
    return perform(config, how, experiments.run_experiment, show, model=checked.preset.model, cache=cache)


command = command_of(ExperimentConfig, _experiment)


def _show(results: dict[str, Any], out: Path, verbose: bool) -> None:
    from forgetfree.jobs.experiments import outcome
    from forgetfree.results.records import ExperimentResults
    from forgetfree.results.rendering import brief_page, render_page

    if results["units"]:
        page = outcome(ExperimentResults.of(results))
        print(render_page(page if verbose else brief_page(page), "rich"))
        print(escaped(f"Report: {out / 'report.md'} (all tables)  Figure: {out / results['experiment']}.png"))
