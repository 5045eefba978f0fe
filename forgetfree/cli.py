"""The command line. Exit codes: 0 done, 1 failed, 2 wrong usage. Errors: one paragraph on stderr."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree import __version__, registry
from forgetfree.errors import ForgetfreeError, LedgerError, RunError, UsageError

if TYPE_CHECKING:
    from forgetfree.ledger import Ledger
    from forgetfree.run_config import RunConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = _parser()
    try:
        options, more = parser.parse_known_args(arguments)
        # argparse lets texts follow DIR, but not `DIR --task NAME`.
        if more and (options.command is not _predict or any(text.startswith("--") for text in more)):
            parser.error(f"unrecognized arguments: {' '.join(more)}")
    except SystemExit as stop:  # argparse has said what is wrong, or has printed the help
        return int(stop.code or 0)
    if more:
        options.texts += more
    try:
        code: int = options.command(options)
        return code
    except ForgetfreeError as error:
        if options.debug:
            raise
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("Interrupted.", 1)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if options.debug:
            raise
        return _fail(f"{error}. Check the disk and the permissions.", 1)
    except Exception as error:
        if options.debug:
            raise
        reason = (str(error).strip().splitlines() or [""])[0]
        return _fail(
            f"Unexpected {type(error).__name__}: {reason.rstrip('.')}. This is a fault of forgetfree, or of a plug-in: run "
            "again with --debug, and report the traceback. A strategy of your own is checked by "
            "forgetfree.testing.check_strategy.",
            1,
        )


def _fail(message: str, code: int) -> int:
    print(f"forgetfree: error: {message}", file=sys.stderr)
    return code


# -- run -------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from forgetfree import runner
    from forgetfree.progress import make_monitor

    config = _config(options)
    _quiet_libraries()
    if config.data == "hub" or not (config.model == "minilm" or Path(config.model).is_dir()):
        _go_offline_if_cut_off()
    print(f"Running {config.stream} into {config.out}", file=sys.stderr)
    for name, note in registry.shadowed("strategies").items():
        if name in config.strategies:
            print(f"note: {note}", file=sys.stderr)
    if recipe := config.recipe():
        chosen = " ".join(f"{key}={value}" for key, value in recipe.items())
        print(f"Recipe of {config.model}: {chosen} (each gives way to --set)", file=sys.stderr)
    try:
        results = runner.run(config, resume=options.resume, monitor=lambda title: make_monitor(title, sys.stderr))
    except KeyboardInterrupt:
        return _fail(f"Interrupted. {_holdings(Path(config.out))}", 1)
    except (ForgetfreeError, OSError) as error:
        held = _holdings(Path(config.out))
        if options.debug or not held or isinstance(error, UsageError):
            raise
        raise RunError(f"{error} {held}") from error
    if results["runs"]:
        from forgetfree.reports import merge, render

        print(render(merge([results]), "rich"))
        print(f"Report: {Path(config.out) / 'report.md'}")
    for failed in results["failed"]:
        _fail(f"{failed['strategy']}, seed {failed['seed']}: {failed['error']}", 1)
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
    settings = dict(values.get("set") or {})
    for setting in options.set or ():
        key, separator, value = setting.partition("=")
        if not separator or not key:
            raise UsageError(f"--set needs key=value, got {setting!r}.")
        settings[key.strip()] = value.strip()
    seeds = tuple(values.get("seed") or (0,))
    if options.resume and not options.out:
        raise UsageError("--resume needs --out DIR: the run directory to continue.")
    out = options.out or _free_directory(values["stream"])
    return RunConfig(
        stream=values["stream"],
        strategies=_strategies(values.get("strategy") or DEFAULT_STRATEGIES),
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


def _strategies(given: Sequence[str]) -> tuple[str, ...]:
    """The names given, with ``all`` for every strategy of ours."""
    return tuple(name for each in given for name in (registry.STRATEGIES if each == "all" else [each]))


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


def _free_directory(stream: str) -> str:
    """``runs/STREAM``, or with the first number that is free."""
    name = stream.replace(",", "-").replace("/", "-")[:60]
    path, number = Path("runs") / name, 2
    while path.exists():
        path, number = Path("runs") / f"{name}-{number}", number + 1
    return str(path)


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


def _quiet_libraries() -> None:
    """Third-party warnings and bars would break up the progress display; errors still come through."""
    import logging
    import warnings

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    logging.getLogger("datasets").setLevel(logging.ERROR)
    warnings.filterwarnings(
        "ignore", module=r"(avalanche|torch|torchvision|transformers|datasets|GPUtil|qpsolvers)(\..*)?$"
    )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _go_offline_if_cut_off() -> None:
    """Where the hub's name cannot be resolved, its client would retry for half a minute.

    Offline it answers at once, from its cache if it can.
    """
    import socket
    from urllib.parse import urlsplit

    proxied = any(name.lower() in ("https_proxy", "all_proxy") for name in os.environ)
    if "HF_HUB_OFFLINE" not in os.environ and not proxied:
        try:
            socket.getaddrinfo(urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname, 443)
        except OSError:
            os.environ["HF_HUB_OFFLINE"] = "1"


# -- report, ledger, predict, list -----------------------------------------------------------------------


def _report(options: argparse.Namespace) -> int:
    from forgetfree.reports import load_results, merge, render

    print(render(merge([load_results(Path(directory)) for directory in options.directories]), options.format))
    return 0


def _ledger(options: argparse.Namespace) -> int:
    from forgetfree.ledger import Ledger
    from forgetfree.ledger.view import render_ledger

    path = Path(options.file)
    ledger = Ledger.load(path)
    if options.action == "show":
        print(render_ledger(ledger, path))
        return 0
    disjointness = "" if ledger.composition == "alone" else "disjointness, "  # those that stand alone may overlap
    checked = f"layout, bounds, order, {disjointness}dtypes, finiteness, checksum"
    if options.model:
        _verify_model(ledger, options.model)
        checked += f", and the fingerprint of {options.model}"
    print(f"{path}: sound. {len(ledger.records)} tasks, {len(ledger.owned())} entries; checked: {checked}.")
    return 0


def _verify_model(ledger: Ledger, name: str) -> None:
    """Raise ``LedgerError`` unless the ledger belongs to the model, loaded with its LM head or without."""
    from forgetfree.ledger import LedgerSwitch
    from forgetfree.models.loading import load_model

    try:
        LedgerSwitch(ledger, load_model(name).model.backbone)
    except LedgerError:
        LedgerSwitch(ledger, load_model(name, "linear").model.backbone)


def _predict(options: argparse.Namespace) -> int:
    _quiet_libraries()
    from forgetfree.inference import Predictor

    predictor = Predictor.of_run(Path(options.directory), options.seed, options.strategy)
    pair = len(predictor.definition(options.task).text_columns) == 2
    if not options.texts and sys.stdin.isatty():
        print("Reading texts from the terminal, one a line; end with Ctrl-D.", file=sys.stderr)
    lines = options.texts or [line.rstrip("\n") for line in sys.stdin]
    if pair and options.texts and not any("\t" in line for line in lines) and len(lines) % 2 == 0:
        texts = [(lines[i], lines[i + 1]) for i in range(0, len(lines), 2)]
    else:
        texts = [tuple(line.split("\t")) if pair else (line,) for line in lines]
    for text, answer in zip(texts, predictor.answer(options.task, texts), strict=True):
        print(f"{answer.label}\t{answer.probability:.3f}\t{' | '.join(text)}")
    return 0


def _list(options: argparse.Namespace) -> int:
    if options.verbose:
        if options.what != "strategies":
            raise UsageError(f"--verbose goes with 'list strategies', got 'list {options.what}'. Leave it out.")
        _list_strategies_in_full()
        return 0
    rows: dict[str, str] = {}
    broken: dict[str, str] = {}
    if options.what == "strategies":
        rows = {name: entry.summary for name, entry in registry.strategies().items()}
        broken = registry.broken("strategies")
    elif options.what == "streams":
        rows = {name: " → ".join(tasks) for name, tasks in registry.streams().items()}
        broken = registry.broken("streams")
    elif options.what == "tasks":
        rows = {name: f"{task.kind}: {', '.join(task.labels)}" for name, task in registry.tasks().items()}
        broken = registry.broken("streams")
    else:
        rows = {name: entry.summary for name, entry in registry.MODELS.items()}
    rows |= {name: f"broken: {reason}" for name, reason in broken.items()}
    group: registry.Group = "strategies" if options.what == "strategies" else "streams"
    notes = registry.shadowed(group).values() if options.what != "models" else ()
    width = max(map(len, rows))
    for name, summary in rows.items():
        print(f"{name:{width}}  {summary}".rstrip())
    for note in notes:
        print(f"note: {note}")
    return 0


def _list_strategies_in_full() -> None:
    """Every strategy with its own options, then the options that all of them take; within 80 columns."""
    from forgetfree.options import Description, describe
    from forgetfree.run_config import RunOptions
    from forgetfree.training import TrainingOptions

    def write(text: str, indent: int) -> None:
        if text:
            print(textwrap.fill(text, 80, initial_indent=" " * indent, subsequent_indent=" " * indent))

    def write_options(options: list[Description]) -> None:
        for option in options:
            write(f"{option.name} = {option.default} ({option.type})", 4)
            write(option.help, 8)

    shared = describe(TrainingOptions)
    for name, entry in registry.strategies().items():
        write(f"{name}: {entry.summary}", 0)
        try:
            cls = registry.strategy(name)
        except UsageError as error:
            write(f"broken: {error}", 2)
        else:
            write("forget-free" if cls.forget_free else "may forget", 2)
            write((cls.__doc__ or "").strip().partition("\n")[0], 2)
            own = [option for option in describe(cls.Options) if option not in shared]
            print("  options of its own:" if own else "  no options of its own")
            write_options(own)
        print()
    print("what all strategies take:")
    write_options(shared)
    print("\nwhat a run takes:")
    write_options(describe(RunOptions))
    print()
    write(
        "Each is set by --set NAME=VALUE, for one strategy by --set STRATEGY.NAME=VALUE. A model may bring a recipe:", 0
    )
    for name, model in registry.MODELS.items():
        if model.recipe:
            write(f"{name}: " + " ".join(f"{key}={value}" for key, value in model.recipe.items()), 2)


# -- Arguments -------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks")
    parser = argparse.ArgumentParser(
        prog="forgetfree", description="Continual learning for pre-trained language models."
    )
    parser.add_argument("--version", action="version", version=f"forgetfree {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    run = commands.add_parser("run", parents=[common], help="train strategies on a stream of tasks")
    run.set_defaults(command=_run)
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

    report = commands.add_parser("report", parents=[common], help="tables over runs")
    report.set_defaults(command=_report)
    report.add_argument("directories", nargs="+", metavar="DIR")
    report.add_argument("--format", default="rich", choices=("rich", "markdown", "json", "html", "latex"))

    ledger = commands.add_parser("ledger", help="look into a ledger, or check it")
    actions = ledger.add_subparsers(metavar="ACTION", required=True)
    for action, text in (("show", "who owns what"), ("verify", "check everything about it")):
        sub = actions.add_parser(action, parents=[common], help=text)
        sub.set_defaults(command=_ledger, action=action, model=None)
        sub.add_argument("file", metavar="FILE")
        if action == "verify":
            sub.add_argument("--model", metavar="NAME|DIR", help="also compare the fingerprint with this model's")

    predict = commands.add_parser(
        "predict", parents=[common], help="answer from a finished run of a strategy with a ledger"
    )
    predict.set_defaults(command=_predict)
    predict.add_argument("directory", metavar="DIR")
    predict.add_argument("--task", required=True, metavar="NAME")
    predict.add_argument("--seed", type=int, metavar="S", help="whose ledger (default: the first)")
    predict.add_argument(
        "--strategy", metavar="NAME", help="whose ledger (default: grafting-continual's, else the first)"
    )
    predict.add_argument("texts", nargs="*", metavar="TEXT", help="default: lines of stdin; pairs with a tab between")

    lists = commands.add_parser("list", parents=[common], help="what there is by name")
    lists.set_defaults(command=_list)
    lists.add_argument("what", choices=("strategies", "streams", "tasks", "models"))
    lists.add_argument("--verbose", action="store_true", help="strategies: with their options")
    return parser
