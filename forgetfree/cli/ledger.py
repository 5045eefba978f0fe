"""``forgetfree ledger show`` and ``verify``: print the entries that each task owns, and check that a file is sound."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from forgetfree.cli.arguments import AsJson, Debug, check_there
from forgetfree.cli.hub import reach_hub
from forgetfree.display import counted, escaped, json_text
from forgetfree.errors import LedgerError
from forgetfree.files import StrPath

if TYPE_CHECKING:
    from forgetfree.ledger.ledger import Ledger

FileOrRun = Annotated[
    Path,
    Parameter(
        name="FILE|DIR",
        validator=check_there,
        help="a ledger.safetensors file, or a run directory (the ledger of its first seed)",
    ),
]
Model = Annotated[
    str | None,
    Parameter(metavar="NAME|DIR", help="model to compare with the ledger: weights, configuration and tokenizer"),
]

command = App(
    name="ledger",
    usage="Usage: forgetfree ledger ACTION FILE|DIR [OPTIONS]",
    help="Show and verify ledgers.",
    help_epilogue="Example: forgetfree ledger show runs/first",
)


@command.command
def show(file: FileOrRun, /, *, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show who owns what."""
    file, ledger = _load(file)
    print(json_text(describe_ledger(ledger, file), indent=2).rstrip() if as_json else render_ledger(ledger, file))


@command.command(help_epilogue="Example: forgetfree ledger verify ledger.safetensors --model minilm")
def verify(file: FileOrRun, /, *, model: Model = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Check everything about it."""
    file, ledger = _load(file)
    checked = ["layout, bounds, order, disjointness along parents, dtypes, finiteness, checksum"]
    if model:
        from forgetfree.ledger.switch import check_binding, check_weights
        from forgetfree.models.loading import load_bound

        reach_hub(model)
        loaded = load_bound(model, ledger)
        check_weights(ledger, loaded.model.backbone, loaded.fingerprint)
        if ledger.binding:
            check_binding(ledger, loaded.binding(), str(file))
        parts = ", configuration, tokenizer, readout and maximum length" if ledger.binding else ""
        checked.append(f"weights{parts} of {model}")
    if as_json:
        counts = {"tasks": len(ledger.records), "entries": len(ledger.owned())}
        is_bound = {"binding": bool(ledger.binding)}
        print(json_text({"file": str(file), "sound": True, **counts, "checked": checked, **is_bound}, indent=2), end="")
        return
    what = f"{counted(len(ledger.records), 'task')}, {counted(len(ledger.owned()), 'entry')}"
    print(escaped(f"{file}: sound. {what}; checked: {', and the '.join(checked)}."))
    if not ledger.binding:
        print("note: the ledger does not record which configuration, tokenizer, labels and prompts it needs.")


def _load(path: Path) -> tuple[Path, Ledger]:
    """Return the file at a path, or of the run there, and its ledger; in a unit's folder, check that the unit wrote it."""
    from forgetfree.ledger.ledger import Ledger
    from forgetfree.results.run_folder import LEDGER, check_own
    from forgetfree.serve.source import saved_file

    file = saved_file(path) if path.is_dir() else path
    if path.is_dir() and file.name != LEDGER:
        raise LedgerError(f"{path} has no ledger; its predictions come from {file.name}. Give a run with a ledger.")
    ledger = Ledger.load(file)
    check_own(file)
    return file, ledger


# -- Tables ----------------------------------------------------------------------------------------------


def describe_ledger(ledger: Ledger, path: StrPath) -> dict[str, Any]:
    """Return the tables' contents for programs, and regions by layer and role of a tensor; lists have the tasks' order."""
    from forgetfree.core.families import layer_of, role_of
    from forgetfree.core.regions import distribution

    tasks = [
        {
            "task": record.task,
            "region": len(record.region),
            "owned": len(record.owned.region),
            "parent": record.parent,
            "readout": sum(tensor.numel() for tensor in record.readout.values()),
        }
        for record in ledger.records
    ]
    return {
        "file": str(path),
        "bytes": Path(path).stat().st_size,
        "fingerprint": ledger.fingerprint,
        "composition": ledger.composition,
        "effect": ledger.effect,
        "graftable": len(ledger.space),
        "tensors": len(ledger.space.tensors),
        "owned": len(ledger.owned()),
        "tasks": tasks,
        "overlap": ledger.overlap(),
        "layers": [distribution(record.region, ledger.space, layer_of) for record in ledger.records],
        "roles": [distribution(record.region, ledger.space, role_of) for record in ledger.records],
    }


def render_ledger(ledger: Ledger, path: StrPath) -> str:
    """Return the tables as text."""
    from forgetfree.results.report.page import Page, Table, render_page

    told, has_parents = describe_ledger(ledger, path), ledger.composition == "parents"
    tasks, total = told["tasks"], told["graftable"]
    owners = [
        (
            task["task"],
            *([task["parent"] or "θ_pre"] if has_parents else []),
            f"{task['region']:,}",
            f"{task['owned']:,}",
            f"{task['region'] - task['owned']:,}",
            f"{task['region'] / total:.4%}",
            f"{task['readout']:,}",
        )
        for task in tasks
    ]
    share = f"{told['owned'] / total:.4%}"
    every = ("all", *([""] if has_parents else []), "", f"{told['owned']:,}", "", share, "")
    stands_on = ("stands on",) if has_parents else ()
    columns = ("task", *stands_on, "region", "owned", "shared", "share of model", "readout values")
    overlaps = [
        (task["task"], *(f"{share:.3f}" for share in row)) for task, row in zip(tasks, told["overlap"], strict=True)
    ]
    tables = [
        Table("Owners", columns, (*owners, every)),
        Table(
            "Share of the column's region that is also in the row's region",
            ("overlap with", *ledger.tasks),
            tuple(overlaps),
        ),
    ]
    title = f"{path}: {counted(len(tasks), 'task')}, {told['bytes']:,} bytes"
    notes = (
        f"base model {ledger.fingerprint[:12]}, {total:,} graftable entries in {told['tensors']} tensors",
        *([] if has_parents else ["a selection: tasks share the values of earlier ones"]),
        *(["stored beside the weights"] if ledger.effect == "beside" else []),
    )
    return render_page(Page(title, notes, tuple(tables)), "rich").rstrip()
