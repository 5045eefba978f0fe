"""``forgetfree experiment``: repeat an experiment of the paper."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.cli.hub import go_offline_if_cut_off, needs_hub
from forgetfree.cli.shared import free_directory, say, settings_of
from forgetfree.display import escaped
from forgetfree.errors import UsageError
from forgetfree.jobs.environment import quiet_libraries

if TYPE_CHECKING:
    from forgetfree.cli.shared import Commands, Parser


def add(commands: Commands, common: Parser) -> None:
    """The command and its arguments."""
    experiment = commands.add_parser(
        "experiment", parents=[common], help="repeat an experiment of the paper: see 'forgetfree list experiments'"
    )
    experiment.set_defaults(command=command)
    experiment.add_argument("name", metavar="NAME", help="of 'forgetfree list experiments'")
    experiment.add_argument(
        "--preset", default="small", choices=("small", "paper"), help="small (default): two cores; paper: a GPU"
    )
    experiment.add_argument("--data", metavar="hub|demo|DIR", help="default: $FORGETFREE_DATA, else hub")
    experiment.add_argument("--model", metavar="NAME|DIR", help="another model than the preset's")
    experiment.add_argument("--readout", choices=("auto", "prompt", "linear", "causal"))
    experiment.add_argument("--task", action="append", metavar="NAME", help="other tasks; may be given several times")
    experiment.add_argument("--shots", type=int, action="append", metavar="K", help="may be given several times")
    experiment.add_argument("--seed", type=int, action="append", metavar="S", help="may be given several times")
    experiment.add_argument("--sparsity", type=float, action="append", metavar="F", help="may be given several times")
    experiment.add_argument("--set", action="append", metavar="key=value", help="an option of training or localizing")
    experiment.add_argument("--device", choices=("auto", "cpu", "cuda"))
    experiment.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="units measured at a time (default: 2 on a CPU of two cores or more, else 1)",
    )
    experiment.add_argument(
        "--cache", metavar="DIR", help="fine-tuned models, shared (default: fine-tuned beside --out)"
    )
    experiment.add_argument("--out", metavar="DIR", help="default: runs/experiment-NAME")
    experiment.add_argument("--resume", action="store_true", help="continue in --out; finished units are kept")


def command(options: argparse.Namespace) -> int:
    """Measure what is missing, then print the report."""
    from forgetfree.cli.perform import execution, perform
    from forgetfree.data.sources import default_data
    from forgetfree.jobs import experiments
    from forgetfree.jobs.environment import find_device

    if options.jobs is not None and options.jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {options.jobs}.")
    if options.resume and not options.out:
        raise UsageError("--resume needs --out DIR. Give the experiment to continue.")
    experiment = experiments.load_experiment(options.name)
    config = experiments.ExperimentConfig(
        name=options.name,
        preset=options.preset,
        model=options.model,
        data=options.data or default_data(),
        readout=options.readout,
        tasks=tuple(options.task or ()),
        shots=tuple(options.shots or ()),
        seeds=tuple(options.seed or ()),
        sparsities=tuple(options.sparsity or ()),
        settings=settings_of(options.set) | ({"cache": options.cache} if options.cache else {}),
        device=options.device or "auto",
        out=options.out or free_directory(f"experiment-{options.name}"),
    )
    checked, out = config.checked(), Path(config.out)
    jobs = options.jobs or experiments.usual_jobs(find_device(config.device))
    cache = checked.common.cache or out.parent / "fine-tuned"
    quiet_libraries()
    if needs_hub(checked.preset.model, config.data):
        go_offline_if_cut_off()
    say(f"Measuring {config.name} ({experiment.paper}) into {out}; fine-tuned models: {cache}")
    how = execution(options.resume, jobs, options.debug)
    return perform(
        lambda: experiments.run_experiment(config, **how),
        lambda results: _show(results, out),
        config.out,
        cache,
        options.debug,
    )


def _show(results: dict[str, Any], out: Path) -> None:
    from forgetfree.jobs.experiments import outcome
    from forgetfree.results.rendering import render_page

    if results["units"]:
        print(render_page(outcome(results), "rich"))
        print(escaped(f"Report: {out / 'report.md'}  Figure: {out / results['experiment']}.png"))
