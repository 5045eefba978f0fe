"""The command line. Exit codes: 0 done, 1 failed, 2 wrong usage. Errors: one paragraph on stderr."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree import __version__, registry
from forgetfree.errors import ForgetfreeError, LedgerError, ReportError, RunError, UsageError

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
    if _needs_hub(config.model, config.data):
        _go_offline_if_cut_off()
    print(f"Running {config.stream} into {config.out}", file=sys.stderr)
    for name, note in registry.shadowed("strategies").items():
        if name in config.strategies:
            print(f"note: {note}", file=sys.stderr)
    _print_recipe(config.model, config.recipe())
    try:
        with _no_empty_directory(Path(config.out)):
            results = runner.run(
                config,
                resume=options.resume,
                monitor=lambda title: make_monitor(title, sys.stderr),
                debug=options.debug,
            )
    except KeyboardInterrupt:
        return _fail(f"Interrupted. {_holdings(Path(config.out))}", 1)
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
        _fail(f"{failed['strategy']}, seed {failed['seed']}: {failed['error']}", 1)
    return 1 if results["failed"] else 0


def _needs_hub(model: str, data: str) -> bool:
    return data == "hub" or not (model == "minilm" or Path(model).is_dir())


def _print_recipe(model: str, recipe: Mapping[str, Any]) -> None:
    if recipe:
        chosen = " ".join(f"{key}={value}" for key, value in recipe.items())
        print(f"Recipe of {model}: {chosen} (each gives way to --set)", file=sys.stderr)


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
    settings = dict(values.get("set") or {}) | _settings(options.set)
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


def _settings(given: Sequence[str] | None) -> dict[str, str]:
    """What ``--set key=value`` says."""
    settings = {}
    for setting in given or ():
        key, separator, value = setting.partition("=")
        if not separator or not key:
            raise UsageError(f"--set needs key=value, got {setting!r}.")
        settings[key.strip()] = value.strip()
    return settings


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


@contextmanager
def _no_empty_directory(out: Path) -> Iterator[None]:
    """What is refused leaves nothing behind: ``out``, if it was made inside and holds nothing, is gone after an error."""
    there = out.exists()
    try:
        yield
    except BaseException:
        if not there and out.is_dir() and not any(out.iterdir()):
            out.rmdir()
        raise


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


# -- experiment ------------------------------------------------------------------------------------------


def _experiment(options: argparse.Namespace) -> int:
    from forgetfree import experiments
    from forgetfree.data.sources import default_data
    from forgetfree.environment import find_device, set_threads
    from forgetfree.options import build
    from forgetfree.pages import render_page
    from forgetfree.progress import make_monitor
    from forgetfree.run_config import CommonOptions

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
    settings = _settings(options.set)
    here = build(CommonOptions, {k: settings.pop(k) for k in ("cache", "threads") if k in settings}, "the experiment")
    if options.resume and not options.out:
        raise UsageError("--resume needs --out DIR: the experiment to continue.")
    preset = experiments.adjusted(experiment.presets[options.preset], changes, settings)
    out = Path(options.out or _free_directory(f"experiment-{options.name}"))
    cache = Path(options.cache or here.cache or out.parent / "fine-tuned")
    set_threads(here.threads)
    data = options.data or default_data()
    _quiet_libraries()
    if _needs_hub(preset.model, data):
        _go_offline_if_cut_off()
    print(f"Measuring {options.name} ({experiment.paper}) into {out}; fine-tuned models: {cache}", file=sys.stderr)
    try:
        with _no_empty_directory(out):
            results = experiments.run_experiment(
                options.name,
                preset,
                preset_name=options.preset,
                data=data,
                device=find_device(options.device or "auto"),
                out=out,
                cache=cache,
                monitor=lambda title: make_monitor(f"{options.name} · {title}", sys.stderr),
                resume=options.resume,
            )
    except KeyboardInterrupt:
        return _fail(f"Interrupted. {_units_held(out)}".strip(), 1)
    except (ForgetfreeError, OSError) as error:
        held = _units_held(out)
        if options.debug or not held or isinstance(error, UsageError):
            raise
        raise RunError(f"{error} {held}") from error
    print(render_page(experiments.outcome(results), "rich"))
    print(f"Report: {out / 'report.md'}  Figure: {out / options.name}.png")
    return 0


def _units_held(out: Path) -> str:
    """What an experiment that was cut short has left behind."""
    import json

    try:
        done = len(json.loads((out / "results.json").read_text(encoding="utf-8"))["units"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    units = "the unit that is" if done == 1 else f"the {done} units that are"
    return f"{out} holds {units} done; the same command with --resume --out {out} goes on."


# -- report, ledger, predict, apply, list ----------------------------------------------------------------


def _report(options: argparse.Namespace) -> int:
    from forgetfree.reports import render, what_wrote
    from forgetfree.run_results import load_results, merge

    paths = [Path(directory) for directory in options.directories]
    for path in paths:
        if not path.exists():
            raise ReportError(f"{path} does not exist. Give what forgetfree run, graft or experiment wrote.")
    wrote = {what_wrote(path) for path in paths}
    if len(wrote) > 1:
        raise UsageError(f"Results of {' and '.join(sorted(wrote))} have no table in common. Report them one by one.")
    if "experiment" in wrote:
        return _report_experiments(paths, options)
    if options.draw:
        raise UsageError("--draw is for the results of experiments: others have no figure. Leave it out.")
    if "graft" in wrote:
        return _report_grafts(paths, options)
    print(render(merge([load_results(path) for path in paths]), options.format))
    return 0


def _report_experiments(paths: Sequence[Path], options: argparse.Namespace) -> int:
    from forgetfree.experiments import draw_outcome, load_experiment_results, outcome
    from forgetfree.pages import render_page

    all_results = [load_experiment_results(path) for path in paths]
    if options.format == "json":
        raise UsageError("--format json is for runs of strategies: an experiment's results.json is JSON already.")
    for results in all_results:
        print(render_page(outcome(results), options.format))
        if options.draw:
            draw_outcome(results, Path(options.draw))
    return 0


def _report_grafts(paths: Sequence[Path], options: argparse.Namespace) -> int:
    import json

    from forgetfree.graft_report import lay_out_graft
    from forgetfree.pages import render_page

    if options.format == "json":
        raise UsageError("--format json is for runs of strategies: a graft's results.json is JSON already.")
    for path in paths:
        file = path / "results.json" if path.is_dir() else path
        print(render_page(lay_out_graft(json.loads(file.read_text(encoding="utf-8"))), options.format))
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


def _graft(options: argparse.Namespace) -> int:
    from forgetfree.data.sources import default_data
    from forgetfree.graft_config import GraftConfig
    from forgetfree.progress import make_monitor

    config = GraftConfig(
        task=options.task,
        model=options.model,
        data=options.data or default_data(),
        readout=options.readout,
        shots=options.shots,
        steps=options.steps,
        seeds=tuple(options.seed or (0,)),
        sparsities=tuple(options.sparsity or ()),
        base=options.base,
        fine_tuned=options.fine_tuned,
        settings=_settings(options.set),
        device=options.device,
        out=options.out or _free_directory(f"graft-{options.task}"),
    )
    _quiet_libraries()
    if _needs_hub(config.model, config.data):
        _go_offline_if_cut_off()
    from forgetfree.graft_report import lay_out_graft
    from forgetfree.graft_run import run_graft
    from forgetfree.pages import render_page

    print(f"Grafting {config.task} into {config.out}", file=sys.stderr)
    _print_recipe(config.model, config.recipe())
    out = Path(config.out)
    try:
        with _no_empty_directory(out):
            results = run_graft(config, monitor=lambda title: make_monitor(title, sys.stderr))
    except KeyboardInterrupt:
        return _fail(f"Interrupted. {_held_grafts(out)}", 1)
    print(render_page(lay_out_graft(results), "rich"))
    for graft in results["grafts"]:
        print(f"Graft: {out / graft['file']} ({graft['bytes']:,} bytes)")
    print(f"Report: {out / 'report.md'}")
    return 0


def _held_grafts(out: Path) -> str:
    """What a graft that was cut short has left behind."""
    names = ", ".join(sorted(path.name for path in out.glob("*.safetensors")))
    return f"{out} holds {names or 'no graft yet'}; --set cache={out / 'fine-tuned'} takes up the models fine-tuned so far."


def _apply(options: argparse.Namespace) -> int:
    _quiet_libraries()
    from forgetfree.apply import apply_graft
    from forgetfree.graft_file import find_graft
    from forgetfree.grafting import Graft

    graft = Graft.load(find_graft(Path(options.graft)))
    model = options.model or (graft.origin.model if graft.origin else "minilm")
    if not (model == "minilm" or Path(model).is_dir()):
        _go_offline_if_cut_off()
    written = apply_graft(graft, model, Path(options.out))
    print(
        f"{written.directory}: {written.architecture} with {len(graft.region)} grafted entries. It loads by "
        f"transformers.{written.loader}.from_pretrained({str(written.directory)!r}); its README.md shows how it classifies."
    )
    if written.note:
        print(f"note: {written.note}")
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
    elif options.what == "experiments":
        rows = {name: entry.summary for name, entry in registry.EXPERIMENTS.items()}
    else:
        rows = {name: entry.summary for name, entry in registry.MODELS.items()}
    rows |= {name: f"broken: {reason}" for name, reason in broken.items()}
    group: registry.Group = "strategies" if options.what == "strategies" else "streams"
    notes = registry.shadowed(group).values() if options.what not in ("models", "experiments") else ()
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
    report.add_argument("directories", nargs="+", metavar="DIR", help="what run, graft or experiment wrote")
    report.add_argument("--draw", metavar="DIR", help="of experiments: also draw their figures into DIR")
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

    experiment = commands.add_parser(
        "experiment", parents=[common], help="repeat an experiment of the paper: see 'forgetfree list experiments'"
    )
    experiment.set_defaults(command=_experiment)
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
    experiment.add_argument("--set", action="append", metavar="key=value", help="an option of training or localising")
    experiment.add_argument("--device", choices=("auto", "cpu", "cuda"))
    experiment.add_argument(
        "--cache", metavar="DIR", help="fine-tuned models, shared (default: fine-tuned beside --out)"
    )
    experiment.add_argument("--out", metavar="DIR", help="default: runs/experiment-NAME")
    experiment.add_argument("--resume", action="store_true", help="continue in --out; finished units are kept")

    graft = commands.add_parser("graft", parents=[common], help="find a task's region, and write it as one small file")
    graft.set_defaults(command=_graft)
    graft.add_argument("task", metavar="TASK", help="a registered task, or one under --data DIR")
    graft.add_argument(
        "--model", default="minilm", metavar="NAME|DIR", help="minilm (default), a directory, or a hub name"
    )
    graft.add_argument("--data", metavar="hub|demo|DIR", help="default: $FORGETFREE_DATA, else hub")
    graft.add_argument("--readout", default="auto", choices=("auto", "prompt", "linear", "causal"))
    graft.add_argument("--shots", type=int, metavar="K", help="training rows per label (default: all)")
    graft.add_argument("--steps", type=int, metavar="N", help="updates of fine-tuning (default: the paper's 16·n·k)")
    graft.add_argument(
        "--sparsity",
        type=float,
        action="append",
        metavar="F",
        help="share of parameters the region may have; may be given several times",
    )
    graft.add_argument(
        "--base",
        metavar="movement|empty|random|fisher|bias|FILE",
        help="γ_base of eq. 4, or a graft whose region it is; --set mask_steps=0 grafts it as it is",
    )
    graft.add_argument(
        "--fine-tuned",
        metavar="DIR",
        help="a model fine-tuned from --model, in Hugging Face layout; none is trained then",
    )
    graft.add_argument("--seed", type=int, action="append", metavar="S", help="may be given several times (default: 0)")
    graft.add_argument(
        "--set",
        action="append",
        metavar="key=value",
        help="any option of fine-tuning and localising: see grafting-continual in 'forgetfree list strategies --verbose'",
    )
    graft.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    graft.add_argument("--out", metavar="DIR", help="where to write (default: runs/graft-TASK)")

    apply = commands.add_parser(
        "apply", parents=[common], help="put a graft into its base model: an ordinary Hugging Face model"
    )
    apply.set_defaults(command=_apply)
    apply.add_argument("graft", metavar="GRAFT", help="a graft.safetensors, or the directory that holds it")
    apply.add_argument("--model", metavar="NAME|DIR", help="the base model (default: by the name the graft has for it)")
    apply.add_argument("--out", required=True, metavar="DIR", help="where to write the model; must be new or empty")

    lists = commands.add_parser("list", parents=[common], help="what there is by name")
    lists.set_defaults(command=_list)
    lists.add_argument("what", choices=("strategies", "streams", "tasks", "models", "experiments"))
    lists.add_argument("--verbose", action="store_true", help="strategies: with their options")
    return parser
