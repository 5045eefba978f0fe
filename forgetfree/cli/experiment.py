"""``forgetfree experiment``: repeat an experiment of the paper."""

from __future__ import annotations

import sys
from pathlib import Path

from forgetfree.cli.job import Execution, begun, command_of
from forgetfree.cli.words import say
from forgetfree.display import escaped
from forgetfree.errors import ForgetfreeError, UsageError
from forgetfree.jobs.experiment_config import ExperimentConfig


def _experiment(execution: Execution[ExperimentConfig]) -> int:
    """Measure what is missing, then print the report."""
    from forgetfree.cli.progress import make_monitor
    from forgetfree.jobs import experiments
    from forgetfree.jobs.environment import check_precision, find_device, make_directory, set_threads
    from forgetfree.results.rendering import render_page

    config, out = execution.config, Path(execution.config.out)
    experiment = experiments.load_experiment(config.name)
    checked = config.checked()
    preset, common = checked.preset, checked.common
    cache = Path(common.cache or out.parent / "fine-tuned")
    set_threads(common.threads)
    device = find_device(config.device)
    check_precision([{**preset.options, **preset.fixed}.get("precision", "fp32")], device)
    say(f"Measuring {config.name} ({experiment.paper}) into {out}; fine-tuned models: {cache}")
    with begun(execution, preset.model, _units_held, cache=cache, passed=(UsageError,)):
        make_directory(cache, "--cache" if common.cache else "--out")
        results = experiments.run_experiment(
            config.name,
            preset,
            preset_name=config.preset,
            data=config.data,
            device=device,
            out=out,
            cache=cache,
            monitor=lambda title: make_monitor(f"{config.name} · {title}", sys.stderr),
            resume=execution.resume,
            jobs=execution.jobs or experiments.usual_jobs(device),
            threads=common.threads,
        )
    print(render_page(experiments.outcome(results), "rich"))
    print(escaped(f"Report: {out / 'report.md'}  Figure: {out / config.name}.png"))
    return 0


command = command_of(ExperimentConfig, _experiment)


def _units_held(out: Path) -> str:
    """Return what an experiment that was cut short has left behind."""
    from forgetfree.jobs.experiments import load_experiment_results

    try:
        done = len(load_experiment_results(out)["units"])
    except ForgetfreeError:
        return ""
    units = "the unit that is" if done == 1 else f"the {done} units that are"
    return f"{out} holds {units} done; the same command with --resume --out {out} goes on."
