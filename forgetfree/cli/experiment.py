"""``forgetfree experiment``: repeat an experiment of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.cli.job import command_of, perform
from forgetfree.cli.words import say
from forgetfree.data.sources import check_one
from forgetfree.display import escaped
from forgetfree.jobs.experiment_config import ExperimentConfig

if TYPE_CHECKING:
    from forgetfree.jobs.engine import Execution


def _experiment(config: ExperimentConfig, how: Execution) -> int:
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
    return perform(config, how, experiments.run_experiment, _show, model=checked.preset.model, cache=cache)


command = command_of(ExperimentConfig, _experiment)


def _show(results: dict[str, Any], out: Path) -> None:
    from forgetfree.jobs.experiments import outcome
    from forgetfree.results.rendering import render_page

    if results["units"]:
        print(render_page(outcome(results), "rich"))
        print(escaped(f"Report: {out / 'report.md'}  Figure: {out / results['experiment']}.png"))
