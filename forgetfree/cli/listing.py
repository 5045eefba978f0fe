"""``forgetfree list``: print the names of strategies, streams, tasks, kinds, metrics or models."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from io import StringIO
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from forgetfree import recipes, registry
from forgetfree.cli.arguments import AsJson, Debug
from forgetfree.display import escaped, json_text
from forgetfree.errors import UsageError

Kind = Literal["strategies", "streams", "tasks", "kinds", "metrics", "models"]


def command(
    what: Annotated[Kind, Parameter(name="WHAT", help="names to list")],
    /,
    *,
    verbose: Annotated[bool, Parameter(help="show the options of strategies")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Print the names, each with what it is."""
    if verbose and what != "strategies":
        raise UsageError(f"--verbose goes with 'list strategies', got 'list {what}'. Leave it out.")
    with ExitStack() as stack:
        if not debug:  # hide output and warnings of packages during their import
            stack.enter_context(redirect_stdout(StringIO()))
            stack.enter_context(redirect_stderr(StringIO()))
        broken = registry.broken("streams" if what == "tasks" else what) if what != "models" else {}
        entries = _entries(what, verbose, {*broken}) | {name: {"broken": reason} for name, reason in broken.items()}
    if as_json:
        print(json_text([{"name": name, **fields} for name, fields in entries.items()], indent=2), end="")
    elif verbose:
        _print_in_full(entries)
    else:
        width = max(map(len, entries))
        for name, fields in entries.items():
            print(escaped(f"{name:{width}}  {_text(fields)}".rstrip()))


def _entries(what: str, verbose: bool, broken: set[str]) -> dict[str, dict[str, Any]]:
    """Return the facts about every name that can be used."""
    if what == "streams":
        return {name: {"tasks": list(tasks)} for name, tasks in registry.streams().items()}
    if what == "tasks":
        return {name: {"kind": task.kind, "labels": list(task.labels)} for name, task in registry.tasks().items()}
    if what == "models":
        return {
            name: {"summary": model.summary, "recipe": dict(model.recipe)} for name, model in recipes.MODELS.items()
        }
    if what == "kinds":
        forms = [registry.kind(name).forms for name in registry.kinds() if name not in broken]
        return {name: {"row": row, "columns": list(columns)} for each in forms for name, (row, columns) in each.items()}
    from forgetfree.options import describe

    known = registry.metrics() if what == "metrics" else registry.strategies()
    entries: dict[str, dict[str, Any]] = {
        name: {"summary": entry.summary} for name, entry in known.items() if name not in broken
    }
    for name, fields in entries.items():
        if what == "metrics":
            metric = registry.metric(name)
            fields |= {"higher_is_better": metric.higher_is_better, "bounds": list(metric.bounds)}
        elif verbose:
            cls = registry.strategy(name)
            fields |= {"forget_free": cls.forget_free, "options": describe(cls.Options)}
    return entries


def _text(fields: Mapping[str, Any]) -> str:
    """Return the text of the line about a name."""
    match fields:
        case {"broken": reason}:
            return f"broken: {reason}"
        case {"tasks": tasks}:
            return " → ".join(tasks)
        case {"kind": kind, "labels": labels}:
            return ": ".join([kind, *([", ".join(labels)] if labels else [])])
        case {"row": row, "columns": columns}:
            return f"{row}; columns {', '.join(columns)}"
    return str(fields["summary"]) + "; lower is better" * (not fields.get("higher_is_better", True))


def _print_in_full(strategies: Mapping[str, Mapping[str, Any]]) -> None:
    """List every strategy with its own options, then the options that all of them take, within 80 columns."""
    from forgetfree.jobs.config import RunOptions
    from forgetfree.options import describe
    from forgetfree.training.training_options import TrainingOptions

    def write(text: str, indent: int) -> None:
        margin = " " * indent
        lines = textwrap.wrap(
            escaped(text), 80, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
        )
        print("\n".join(lines))

    def write_options(options: Iterable[Mapping[str, Any]]) -> None:
        for option in options:
            write(f"{option['name']} = {option['default']} ({option['type']})", 4)
            write(option["help"], 8)

    shared = describe(TrainingOptions)
    for name, fields in strategies.items():
        write(f"{name}: {_text(fields)}", 0)
        if "options" in fields:
            write("forget-free" if fields["forget_free"] else "may forget", 2)
            own = [option for option in fields["options"] if option not in shared]
            print("  options of its own:" if own else "  no options of its own")
            write_options(own)
        print()
    print("options of all strategies:")
    write_options(shared)
    print("\noptions of a run:")
    write_options(describe(RunOptions))
    print()
    write("Set an option with --set NAME=VALUE, or for one strategy with --set STRATEGY.NAME=VALUE.", 0)
