"""``forgetfree list``: what there is by name."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from typing import Annotated, Literal

from cyclopts import Parameter

from forgetfree import registry
from forgetfree.cli.usage import Debug
from forgetfree.display import escaped
from forgetfree.errors import UsageError

Kind = Literal["strategies", "streams", "tasks", "models", "experiments"]


def command(
    what: Annotated[Kind, Parameter(name="WHAT", help="what to list")],
    /,
    *,
    verbose: Annotated[bool, Parameter(help="strategies: with their options")] = False,
    debug: Debug = False,
) -> None:
    """Print the names, each with what it is."""
    if verbose:
        if what != "strategies":
            raise UsageError(f"--verbose goes with 'list strategies', got 'list {what}'. Leave it out.")
        _list_strategies_in_full(debug)
        return
    group: registry.Group = "strategies" if what == "strategies" else "streams"
    with _imports_unheard(debug):
        rows = _rows(what)
        broken = {} if what in ("models", "experiments") else registry.broken(group)
    rows |= {name: f"broken: {reason}" for name, reason in broken.items()}
    notes = registry.shadowed(group).values() if what not in ("models", "experiments") else ()
    width = max(map(len, rows))
    for name, summary in rows.items():
        print(escaped(f"{name:{width}}  {summary}".rstrip()))
    for note in notes:
        print(escaped(f"note: {note}"))


def _rows(what: str) -> dict[str, str]:
    """Return the names with a summary of each."""
    if what == "streams":
        return {name: " → ".join(tasks) for name, tasks in registry.streams().items()}
    if what == "tasks":
        return {name: f"{task.kind}: {', '.join(task.labels)}" for name, task in registry.tasks().items()}
    if what == "models":
        return {name: entry.summary for name, entry in registry.MODELS.items()}
    entries = registry.strategies() if what == "strategies" else registry.EXPERIMENTS
    return {name: entry.summary for name, entry in entries.items()}


@contextmanager
def _imports_unheard(debug: bool) -> Iterator[None]:
    """Silence what packages print, log or warn of while they are imported; ``--debug`` lets it through."""
    with ExitStack() as stack:
        if not debug:
            stack.enter_context(redirect_stdout(StringIO()))
            stack.enter_context(redirect_stderr(StringIO()))
        yield


def _list_strategies_in_full(debug: bool) -> None:
    """List every strategy with its own options, then the options that all of them take, within 80 columns."""
    from forgetfree.jobs.run_config import RunOptions
    from forgetfree.learning.training import TrainingOptions
    from forgetfree.options import Description, describe

    def write(text: str, indent: int) -> None:
        if text:
            print(textwrap.fill(escaped(text), 80, initial_indent=" " * indent, subsequent_indent=" " * indent))

    def write_options(options: list[Description]) -> None:
        for option in options:
            write(f"{option.name} = {option.default} ({option.type})", 4)
            write(option.help, 8)

    shared = describe(TrainingOptions)
    with _imports_unheard(debug):
        broken = registry.broken("strategies")
        classes = {name: registry.strategy(name) for name in registry.strategies() if name not in broken}
    for name, entry in registry.strategies().items():
        write(f"{name}: {entry.summary}", 0)
        if name in broken:
            write(f"broken: {broken[name]}", 2)
        else:
            cls = classes[name]
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
