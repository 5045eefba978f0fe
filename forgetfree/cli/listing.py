"""``forgetfree list``: what there is by name."""

from __future__ import annotations

import textwrap
from collections.abc import Container, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict
from io import StringIO
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from forgetfree import recipes, registry
from forgetfree.cli.arguments import AsJson, Debug
from forgetfree.display import escaped, json_text
from forgetfree.errors import UsageError
from forgetfree.options import Description, describe
from forgetfree.registry import Group

Kind = Literal["strategies", "streams", "tasks", "kinds", "metrics", "models"]
#: Where plug-ins may add to what is listed; to models they add nothing.
_GROUPS: dict[str, Group] = {
    "strategies": "strategies",
    "streams": "streams",
    "tasks": "streams",
    "kinds": "kinds",
    "metrics": "metrics",
}
#: What is said below a list.
_NOTES = {
    "tasks": "'forgetfree list kinds' prints what a task of your own can be",
    "kinds": "these are no tasks yet, and are refused: several labels a row, or a number to predict",
}


def command(
    what: Annotated[Kind, Parameter(name="WHAT", help="what to list")],
    /,
    *,
    verbose: Annotated[bool, Parameter(help="strategies: with their options")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Print the names, each with what it is."""
    if verbose and what != "strategies":
        raise UsageError(f"--verbose goes with 'list strategies', got 'list {what}'. Leave it out.")
    if verbose and not as_json:
        _list_strategies_in_full(debug)
        return
    group = _GROUPS.get(what)
    with _imports_unheard(debug):
        broken = registry.broken(group) if group else {}
        entries = _entries(what, verbose, broken)
    if as_json:
        reasons = [{"name": name, "broken": reason} for name, reason in broken.items()]
        print(
            json_text([{"name": name, **fields} for name, (_, fields) in entries.items()] + reasons, indent=2), end=""
        )
        return
    rows = {name: text for name, (text, _) in entries.items()}
    rows |= {name: f"broken: {reason}" for name, reason in broken.items()}
    width = max(map(len, rows))
    for name, text in rows.items():
        print(escaped(f"{name:{width}}  {text}".rstrip()))
    if note := _NOTES.get(what):
        print(escaped(f"note: {note}"))


def _entries(what: str, verbose: bool, broken: Container[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return every name that can be used with what it is, for people, and what is known of it, for programs."""
    if what == "streams":
        return {name: (" → ".join(tasks), {"tasks": list(tasks)}) for name, tasks in registry.streams().items()}
    if what == "tasks":
        return {
            name: (
                f"{task.kind}: {', '.join(task.labels) or task.instruction or task.metric}",
                {"kind": task.kind, "labels": list(task.labels)},
            )
            for name, task in registry.tasks().items()
        }
    if what == "models":
        return {
            name: (model.summary, {"summary": model.summary, "recipe": dict(model.recipe)})
            for name, model in recipes.MODELS.items()
        }
    if what == "kinds":
        forms = [registry.kind(name).forms for name in registry.kinds() if name not in broken]
        return {
            name: (f"{row}; columns {', '.join(columns)}", {"row": row, "columns": list(columns)})
            for each in forms
            for name, (row, columns) in each.items()
        }
    known = registry.metrics() if what == "metrics" else registry.strategies()
    summaries = {name: entry.summary for name, entry in known.items() if name not in broken}
    if what == "strategies":
        return {
            name: (summary, {"summary": summary, **(_about(name) if verbose else {})})
            for name, summary in summaries.items()
        }
    metrics = {name: registry.metric(name) for name in summaries}
    return {
        name: (
            summaries[name] + "; lower is better" * (not metric.higher_is_better),
            {
                "summary": summaries[name],
                "higher_is_better": metric.higher_is_better,
                "bounds": list(metric.bounds),
            },
        )
        for name, metric in metrics.items()
    }


def _about(strategy: str) -> dict[str, Any]:
    """Return whether a strategy is forget-free, and its options."""
    cls = registry.strategy(strategy)
    return {"forget_free": cls.forget_free, "options": [asdict(option) for option in describe(cls.Options)]}


@contextmanager
def _imports_unheard(debug: bool) -> Iterator[None]:
    """Silence what packages print, log or warn of while they are imported; ``--debug`` lets it through."""
    if debug:
        yield
        return
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        yield


def _list_strategies_in_full(debug: bool) -> None:
    """List every strategy with its own options, then the options that all of them take, within 80 columns."""
    from forgetfree.jobs.config import RunOptions
    from forgetfree.training.training_options import TrainingOptions

    def write(text: str, indent: int) -> None:
        margin = " " * indent
        if text:
            print(
                textwrap.fill(
                    escaped(text), 80, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
                )
            )

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
    for name, model in recipes.MODELS.items():
        if model.recipe:
            write(f"{name}: " + " ".join(f"{key}={value}" for key, value in model.recipe.items()), 2)
