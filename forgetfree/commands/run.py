"""``forgetfree run``: train strategies on a stream of tasks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree import registry
from forgetfree.commands.shared import (
    fail,
    free_directory,
    go_offline_if_cut_off,
    needs_hub,
    no_empty_directory,
    print_recipe,
    settings_of,
)
from forgetfree.environment import quiet_libraries
from forgetfree.errors import ForgetfreeError, ReportError, RunError, UsageError

if TYPE_CHECKING:
    from forgetfree.commands.shared import Commands
    from forgetfree.run_config import RunConfig


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
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
    run.add_argument("--resume", action="store_true", help="continue in --out; finished runs are kept")


def command(options: argparse.Namespace) -> int:
    """Run it; 1 where a strategy failed."""
    from forgetfree import runner
    from forgetfree.progress import make_monitor

    config = _config(options)
    quiet_libraries()
    if needs_hub(config.model, config.data):
        go_offline_if_cut_off()
    print(f"Running {config.stream} into {config.out}", file=sys.stderr)
    for name, note in registry.shadowed("strategies").items():
        if name in config.strategies:
            print(f"note: {note}", file=sys.stderr)
    print_recipe(config.model, config.recipe())
    try:
        with no_empty_directory(Path(config.out)):
            results = runner.run(
                config,
                resume=options.resume,
                monitor=lambda title: make_monitor(title, sys.stderr),
                debug=options.debug,
            )
    except KeyboardInterrupt:
        return fail(f"Interrupted. {_holdings(Path(config.out))}", 1)
    except (UsageError, RunError, ReportError):  # of what cannot be begun or resumed: they say themselves what to do
        raise
    except (ForgetfreeError, OSError) as error:
        held = _holdings(Path(config.out))
        if options.debug or not held:
            raise
        raise RunError(f"{error} {held}") from error
    if results["runs"]:
        from forgetfree.reports import render
        from forgetfree.run_results import merge

        print(render(merge([results]), "rich"))
        print(f"Report: {Path(config.out) / 'report.md'}")
    for failed in results["failed"]:
        fail(f"{failed['strategy']}, seed {failed['seed']}: {failed['error']}", 1)
    return 1 if results["failed"] else 0


def _config(options: argparse.Namespace) -> RunConfig:
    """The configuration: file first, then the command line over it."""
    from forgetfree.data.sources import default_data
    from forgetfree.registry import DEFAULT_STRATEGIES
    from forgetfree.run_config import RunConfig

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
        raise UsageError(f"No stream is given. Known: {', '.join(registry.streams())}, or task names with commas.")
    settings = dict(values.get("set") or {}) | settings_of(options.set)
    seeds = tuple(values.get("seed") or (0,))
    if options.resume and not options.out:
        raise UsageError("--resume needs --out DIR: the run directory to continue.")
    out = options.out or free_directory(values["stream"])
    return RunConfig(
        stream=values["stream"],
        strategies=strategies_of(values.get("strategy") or DEFAULT_STRATEGIES),
        model=values.get("model") or "minilm",
        data=values.get("data") or default_data(),
        readout=values.get("readout") or "auto",
        shots=values.get("shots"),
        steps=values.get("steps"),
        seeds=seeds,
        sparsity=values.get("sparsity"),
        settings=settings,
        device=values.get("device") or "auto",
        out=out,
    )


def strategies_of(given: Sequence[str]) -> tuple[str, ...]:
    """The names given, with ``all`` for every strategy of ours."""
    return tuple(name for each in given for name in (registry.STRATEGIES if each == "all" else [each]))


_CONFIG_TYPES: dict[str, tuple[type, ...]] = {
    "stream": (str,),
    "strategy": (str,),
    "model": (str,),
    "data": (str,),
    "readout": (str,),
    "shots": (int,),
    "steps": (int,),
    "seed": (int,),
    "sparsity": (int, float),
    "set": (dict,),
    "device": (str,),
}


def _config_file(path: Path) -> dict[str, Any]:
    """The options in a TOML or JSON file, under their names on the command line; or the config.json of a run."""
    import json
    import tomllib

    from forgetfree.errors import UnknownNameError

    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"--config {path} cannot be read: {error}. Give a TOML or JSON file.") from error
    values = values.get("run", values) if isinstance(values, dict) else values
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold a table of options, got a {type(values).__name__}.")
    for key, value in values.items():
        if key not in _CONFIG_TYPES:
            raise UnknownNameError(f"key in {path}:", key, _CONFIG_TYPES)
        types, listed = _CONFIG_TYPES[key], key in ("strategy", "seed")
        if listed and not isinstance(value, list):
            value = values[key] = [value]
        for item in value if listed else [value]:
            if item is not None and (not isinstance(item, types) or isinstance(item, bool)):
                expected = " or ".join(kind.__name__ for kind in types)
                raise UsageError(f"{path}: {key} must be {expected}, got {item!r}.")
    return values


def _holdings(out: Path) -> str:
    """What a run that was cut short has left behind."""
    import json

    try:
        results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    finished = [f"{run['strategy']} seed {run['seed']}" for run in results["runs"]]
    begun = [
        f"{run['strategy']} seed {run['seed']} ({max(0, len(run['matrix']) - 1)} of {len(results['tasks'])} tasks)"
        for run in results["unfinished"]
    ]
    parts = [f"finished: {', '.join(finished) or 'nothing'}"]
    if begun:
        parts.append(f"cut short: {', '.join(begun)}")
    return f"{out} holds what was computed ({'; '.join(parts)}); the same command with --resume --out {out} goes on."
