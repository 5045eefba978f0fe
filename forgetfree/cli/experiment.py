"""``forgetfree experiment``: repeat an experiment of the paper."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from forgetfree.cli.job import Begun, job_command
from forgetfree.cli.words import say
from forgetfree.data.sources import check_data, check_one
from forgetfree.display import escaped
from forgetfree.jobs.experiment_config import ExperimentConfig
from forgetfree.jobs.running.execution import Execution


def _begin(config: ExperimentConfig) -> Begun:
    """Begin an experiment, or what is missing of it."""
    from forgetfree.jobs.experiments.job import ExperimentJob
    from forgetfree.jobs.running.engine import perform
    from forgetfree.jobs.running.workers import usual_jobs

    job = ExperimentJob(config)
    check_data(config.data, config.read_options)
    for task in config.tasks:
        check_one(task, config.data, config.read_options)
    say(f"Measuring {config.name} ({job.experiment.paper}) into {config.out}; fine-tuned models: {job.cache}")

    def measure(execution: Execution) -> dict[str, Any]:
        if execution.jobs is None and execution.cluster is None:
            execution = replace(execution, jobs=usual_jobs(job.device))
        return perform(job, execution)

    return Begun(measure, _show, job.preset.model, job.cache)


def _show(results: dict[str, Any], out: Path, verbose: bool) -> None:
    """Print the report, or its first table."""
    from forgetfree.jobs.experiments import outcome
    from forgetfree.results.records import ExperimentResults
    from forgetfree.results.report.page import brief_page, render_page

    if results["units"]:
        page = outcome(ExperimentResults.of(results))
        print(render_page(page if verbose else brief_page(page), "rich"))
        print(escaped(f"Report: {out / 'report.md'} (all tables)  Figure: {out / results['experiment']}.png"))


command = job_command(ExperimentConfig, _begin)
