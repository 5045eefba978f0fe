"""``forgetfree experiment``: repeat an experiment of the paper."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from forgetfree.cli.hub import go_offline_if_cut_off, needs_hub
from forgetfree.cli.shared import fail, free_directory, no_empty_directories, say, settings_of
from forgetfree.display import escaped
from forgetfree.errors import ForgetfreeError, RunError, UsageError
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
    from forgetfree.cli.progress import make_monitor
    from forgetfree.data.sources import default_data
    from forgetfree.jobs import experiments
    from forgetfree.jobs.environment import check_precision, find_device, make_directory, set_threads
    from forgetfree.jobs.run_config import CommonOptions
    from forgetfree.options import build
    from forgetfree.results.rendering import render_page

    experiment = experiments.load_experiment(options.name)
    given = {
        "model": options.model,
        "readout": options.readout,
        "tasks": tuple(options.task or ()),
        "shots": tuple(options.shots or ()),
        "seeds": tuple(options.seed or ()),
        "sparsities": tuple(options.sparsity or ()),
    }
    changes = {key: value for key, value in given.items() if value}
    settings = settings_of(options.set)
    here = build(CommonOptions, {k: settings.pop(k) for k in ("cache", "threads") if k in settings}, "the experiment")
    if options.jobs is not None and options.jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {options.jobs}.")
    if options.resume and not options.out:
        raise UsageError("--resume needs --out DIR. Give the experiment to continue.")
    preset = experiments.adjusted(experiment.presets[options.preset], changes, settings)
    out = Path(options.out or free_directory(f"experiment-{options.name}"))
    cache = Path(options.cache or here.cache or out.parent / "fine-tuned")
    set_threads(here.threads)
    device = find_device(options.device or "auto")
    check_precision([{**preset.options, **preset.fixed}.get("precision", "fp32")], device)
    data = options.data or default_data()
    quiet_libraries()
    if needs_hub(preset.model, data):
        go_offline_if_cut_off()
    say(f"Measuring {options.name} ({experiment.paper}) into {out}; fine-tuned models: {cache}")
    try:
        with no_empty_directories(out, cache):
            make_directory(cache, "--cache" if options.cache else "--set cache" if here.cache else "--out")
            results = experiments.run_experiment(
                options.name,
                preset,
                preset_name=options.preset,
                data=data,
                device=device,
                out=out,
                cache=cache,
                monitor=lambda title: make_monitor(f"{options.name} · {title}", sys.stderr),
                resume=options.resume,
                jobs=options.jobs or experiments.usual_jobs(device),
                threads=here.threads,
            )
    except KeyboardInterrupt:
        return fail(f"Interrupted. {_units_held(out)}".strip(), 1)
    except (ForgetfreeError, OSError) as error:
        held = _units_held(out)
        if options.debug or not held or isinstance(error, UsageError):
            raise
        raise RunError(f"{error} {held}") from error
    print(render_page(experiments.outcome(results), "rich"))
    print(escaped(f"Report: {out / 'report.md'}  Figure: {out / options.name}.png"))
    return 0


def _units_held(out: Path) -> str:
    """What an experiment that was cut short has left behind."""
    from forgetfree.jobs.experiments import load_experiment_results

    try:
        done = len(load_experiment_results(out)["units"])
    except ForgetfreeError:
        return ""
    units = "the unit that is" if done == 1 else f"the {done} units that are"
    return f"{out} holds {units} done; the same command with --resume --out {out} goes on."
