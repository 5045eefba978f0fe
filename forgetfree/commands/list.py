"""``forgetfree list``: what there is by name."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING

from forgetfree import registry
from forgetfree.display import escaped
from forgetfree.errors import UsageError

if TYPE_CHECKING:
    from forgetfree.commands.shared import Commands, Parser


def add(commands: Commands, common: Parser) -> None:
    """The command and its arguments."""
    lists = commands.add_parser("list", parents=[common], help="what there is by name")
    lists.set_defaults(command=command)
    lists.add_argument("what", choices=("strategies", "streams", "tasks", "models", "experiments"))
    lists.add_argument("--verbose", action="store_true", help="strategies: with their options")


def command(options: argparse.Namespace) -> int:
    """Print the names, each with what it is."""
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
        print(escaped(f"{name:{width}}  {summary}".rstrip()))
    for note in notes:
        print(escaped(f"note: {note}"))
    return 0


def _list_strategies_in_full() -> None:
    """Every strategy with its own options, then the options that all of them take; within 80 columns."""
    from forgetfree.options import Description, describe
    from forgetfree.run_config import RunOptions
    from forgetfree.training import TrainingOptions

    def write(text: str, indent: int) -> None:
        if text:
            print(textwrap.fill(escaped(text), 80, initial_indent=" " * indent, subsequent_indent=" " * indent))

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
