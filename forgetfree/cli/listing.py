"""``forgetfree list``: what there is by name."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict
from io import StringIO
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from forgetfree import recipes, registry
from forgetfree.cli.usage import AsJson, Debug
from forgetfree.data.tables import NO_TASK
from forgetfree.display import escaped, json_text
from forgetfree.errors import UsageError
from forgetfree.registry import Group

if TYPE_CHECKING:
    from forgetfree.results.metrics import Metric

Kind = Literal["strategies", "streams", "tasks", "kinds", "metrics", "models"]
#: Where plug-ins may add to what is listed; to the rest they add nothing.
_GROUPS: dict[str, Group] = {
    "strategies": "strategies",
    "streams": "streams",
    "tasks": "streams",
    "kinds": "kinds",
    "metrics": "metrics",
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
    if verbose:
        if what != "strategies":
            raise UsageError(f"--verbose goes with 'list strategies', got 'list {what}'. Leave it out.")
        if not as_json:
            _list_strategies_in_full(debug)
            return
    group = _GROUPS.get(what)
    with _imports_unheard(debug):
        rows = _rows(what)
        entries = _entries(what, verbose) if as_json else []
        broken = registry.broken(group) if group else {}
    if as_json:
        entries = [each for each in entries if each["name"] not in broken]
        print(
            json_text([*entries, *({"name": name, "broken": reason} for name, reason in broken.items())], indent=2),
            end="",
        )
        return
    rows |= {name: f"broken: {reason}" for name, reason in broken.items()}
    notes = registry.shadowed(group).values() if group else ()
    width = max(map(len, rows))
    for name, summary in rows.items():
        print(escaped(f"{name:{width}}  {summary}".rstrip()))
    more = {
        "tasks": "'forgetfree list kinds' prints what a task of your own can be",
        "kinds": f"these are no tasks yet, and are refused: {NO_TASK}",
    }
    for note in (*notes, *filter(None, [more.get(what)])):
        print(escaped(f"note: {note}"))


def _rows(what: str) -> dict[str, str]:
    """Return the names with a summary of each."""
    if what == "streams":
        return {name: " → ".join(tasks) for name, tasks in registry.streams().items()}
    if what == "tasks":
        return {
            name: f"{task.kind}: {', '.join(task.labels) or task.instruction or task.metric}"
            for name, task in registry.tasks().items()
        }
    if what == "kinds":
        return {name: f"{row}; columns {', '.join(columns)}" for name, (row, columns) in _forms().items()}
    if what == "metrics":
        return {
            name: registry.metrics()[name].summary + "; lower is better" * (not metric.higher_is_better)
            for name, metric in _metrics().items()
        }
    if what == "models":
        return {name: entry.summary for name, entry in recipes.MODELS.items()}
    entries = registry.strategies()
    return {name: entry.summary for name, entry in entries.items()}


def _forms() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return what a row is, and its columns, by what ``kind`` of a task may say."""
    broken = registry.broken("kinds")
    kinds = (registry.kind(name) for name in registry.kinds() if name not in broken)
    return {form: each for kind in kinds for form, each in kind.forms.items()}


def _metrics() -> dict[str, Metric]:
    """Return the metrics that can be used."""
    broken = registry.broken("metrics")
    return {name: registry.metric(name) for name in registry.metrics() if name not in broken}


def _entries(what: str, verbose: bool) -> list[dict[str, Any]]:
    """Return all names with what is known of each, for programs."""
    if what == "streams":
        return [{"name": name, "tasks": list(tasks)} for name, tasks in registry.streams().items()]
    if what == "tasks":
        return [{"name": name, "kind": t.kind, "labels": list(t.labels)} for name, t in registry.tasks().items()]
    if what == "kinds":
        return [{"name": name, "row": row, "columns": list(columns)} for name, (row, columns) in _forms().items()]
    if what == "metrics":
        return [
            {
                "name": name,
                "summary": registry.metrics()[name].summary,
                "higher_is_better": metric.higher_is_better,
                "bounds": list(metric.bounds),
            }
            for name, metric in _metrics().items()
        ]
    if what == "models":
        models = recipes.MODELS.items()
        return [{"name": name, "summary": model.summary, "recipe": dict(model.recipe)} for name, model in models]
    entries = registry.strategies()
    rows: list[dict[str, Any]] = [{"name": name, "summary": entry.summary} for name, entry in entries.items()]
    if verbose:
        from forgetfree.options import describe

        broken = registry.broken("strategies")
        for each in rows:
            if each["name"] not in broken:
                cls = registry.strategy(each["name"])
                options = [asdict(option) for option in describe(cls.Options)]
                each |= {"forget_free": cls.forget_free, "options": options}
    return rows


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
    from forgetfree.jobs.config import RunOptions
    from forgetfree.options import Description, describe
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
