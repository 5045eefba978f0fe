"""``forgetfree run``: train strategies on a stream of tasks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree import registry
from forgetfree.cli.hub import go_offline_if_cut_off, needs_hub
from forgetfree.cli.shared import free_directory, print_recipe, say, settings_of
from forgetfree.display import escaped
from forgetfree.errors import UsageError, first_line
from forgetfree.jobs.environment import quiet_libraries

if TYPE_CHECKING:
    from forgetfree.cli.shared import Commands, Parser
    from forgetfree.jobs.run_config import RunConfig


def add(commands: Commands, common: Parser) -> None:
    """The command and its arguments."""
    run = commands.add_parser("run", parents=[common], help="train strategies on a stream of tasks")
    run.set_defaults(command=command)
    run.add_argument("stream", nargs="?", help="a registered stream, or task names with commas")
    run.add_argument(
        "--strategy",
        action="append",
        metavar="NAME",
        help="may be given several times; all: every one of 'forgetfree list strategies' that comes with forgetfree",
    )
    run.add_argument("--model", metavar="NAME|DIR", help="minilm (default), a directory, or a hub name")
    run.add_argument(
        "--data", metavar="hub|demo|DIR", help="default: $FORGETFREE_DATA, else hub; demo: qnli, ag_news, sst2"
    )
    run.add_argument("--readout", choices=("auto", "prompt", "linear", "causal"))
    run.add_argument("--shots", type=int, metavar="K", help="training rows per label (default: all)")
    run.add_argument("--steps", type=int, metavar="N", help="updates per task (default: the paper's 16·n·k)")
    run.add_argument("--seed", type=int, action="append", metavar="S", help="may be given several times (default: 0)")
    run.add_argument("--sparsity", type=float, metavar="F", help="share of parameters a region may have")
    run.add_argument(
        "--set",
        action="append",
        metavar="key=value",
        help="any option of a strategy or of the run: see 'forgetfree list strategies --verbose'",
    )
    run.add_argument("--config", metavar="FILE", help="TOML or JSON with these options, or a run's config.json")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"))
    run.add_argument("--out", metavar="DIR", help="run directory (default: runs/STREAM)")
    run.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs at a time, each with its share of the threads (default: 1)",
    )
    run.add_argument("--resume", action="store_true", help="continue in --out; finished runs are kept")


def command(options: argparse.Namespace) -> int:
    """Run it; 1 where a strategy failed."""
    from forgetfree.cli.perform import execution, perform
    from forgetfree.jobs.runner import run

    config = _config(options)
    quiet_libraries()
    if needs_hub(config.model, config.data):
        go_offline_if_cut_off()
    say(f"Running {config.stream} into {config.out}")
    for name, note in registry.shadowed("strategies").items():
        if name in config.strategies:
            say(f"note: {note}")
    print_recipe(config.model, config.recipe())
    how = execution(options.resume, options.jobs, options.debug)
    return perform(
        lambda: run(config, **how),
        lambda results: _show(results, Path(config.out)),
        config.out,
        config.settings.get("cache"),
        options.debug,
    )


def _show(results: dict[str, Any], out: Path) -> None:
    from forgetfree.results.reports import render
    from forgetfree.results.run_results import merge

    if results["runs"]:
        print(render(merge([results]), "rich"))
        print(escaped(f"Report: {out / 'report.md'}"))


def _config(options: argparse.Namespace) -> RunConfig:
    """The configuration: file first, then the command line over it."""
    from forgetfree.data.sources import default_data
    from forgetfree.jobs.run_config import RunConfig
    from forgetfree.registry import DEFAULT_STRATEGIES

    values = _config_file(Path(options.config)) if options.config else {}
    for name in (
        "stream",
        "strategy",
        "model",
        "data",
        "readout",
        "shots",
        "steps",
        "seed",
        "sparsity",
        "device",
    ):
        given = getattr(options, name)
        if given is not None:
            values[name] = given
    if not values.get("stream"):
        begun = Path(options.out or "") / "config.json"
        if options.resume and options.out and begun.is_file():
            raise UsageError(f"No stream is given. To continue that run, give --config {begun}, too.")
        raise UsageError(f"No stream is given. Known: {', '.join(registry.streams())}, or task names with commas.")
    settings = dict(values.get("set", {})) | settings_of(options.set)
    seeds = tuple(values.get("seed") or (0,))
    if options.resume and not options.out:
        raise UsageError("--resume needs --out DIR. Give the run directory to continue.")
    out = options.out or free_directory(values["stream"])
    return RunConfig(
        stream=values["stream"],
        strategies=strategies_of(values.get("strategy") or DEFAULT_STRATEGIES),
        model=values.get("model", "minilm"),
        data=values.get("data", default_data()),
        readout=values.get("readout", "auto"),
        shots=values.get("shots"),
        steps=values.get("steps"),
        seeds=seeds,
        sparsity=values.get("sparsity"),
        settings=settings,
        device=values.get("device", "auto"),
        out=out,
    )


def strategies_of(given: Sequence[str]) -> tuple[str, ...]:
    """The names given, with ``all`` for every strategy of ours."""
    return tuple(name for each in given for name in (registry.STRATEGIES if each == "all" else [each]))


def _config_file(path: Path) -> dict[str, Any]:
    """The options in a TOML or JSON file, under their names on the command line; or the config.json of a run."""
    import tomllib

    from forgetfree.json_file import read_bounded, read_json
    from forgetfree.results.config_file import PLACES, located, read_section

    remedy = "Give a TOML or JSON file of options, or the config.json of a run."
    if path.suffix == ".json":
        values = read_json(path, UsageError, remedy)
    else:
        try:
            values = tomllib.loads(read_bounded(path))
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{path} cannot be read: {first_line(error)}. {remedy}") from error
    of_run = isinstance(values, dict) and "run" in values
    try:
        section = read_section(values["run"] if of_run else values)
    except ValueError as error:
        raise UsageError(f"{path}: {error}. {remedy}") from error
    if of_run:
        section |= {key: located(section[key], path.parent) for key in PLACES if key in section}
    return section
