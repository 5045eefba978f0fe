"""A ledger in tables: who owns what, how they overlap, and where in the model it lies."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from forgetfree.core.regions import distribution, kind_of, layer_of
from forgetfree.display import counted, escaped
from forgetfree.files import StrPath
from forgetfree.ledger import Composition, Ledger

#: What a task is inferred with.
_COMPOSITIONS: dict[Composition, str] = {
    "union": "all regions up to its own",
    "selection": "its own region, in which earlier tasks own what it shares",
    "alone": "its own region alone, which may overlap with others",
    "auto": "all regions of the union up to its own, or its own region alone where that is said",
}


def describe_ledger(ledger: Ledger, path: StrPath) -> dict[str, Any]:
    """Return what the tables say, for programs; the lists of overlaps, layers and kinds are in the order of the tasks."""
    tasks = [
        {
            "task": record.task,
            "region": len(record.region),
            "owned": len(record.owned.region),
            "alone": ledger.stands_alone(record.task),
        }
        for record in ledger.records
    ]
    return {
        "file": str(path),
        "bytes": Path(path).stat().st_size,
        "fingerprint": ledger.fingerprint,
        "composition": ledger.composition,
        "graftable": len(ledger.space),
        "owned": len(ledger.owned()),
        "tasks": tasks,
        "overlap": ledger.overlap(),
        "layers": [distribution(record.region, ledger.space, layer_of) for record in ledger.records],
        "kinds": [distribution(record.region, ledger.space, kind_of) for record in ledger.records],
    }


def render_ledger(ledger: Ledger, path: StrPath) -> str:
    """Return the tables as text."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 120
    console = Console(file=io.StringIO(), width=width, markup=False, emoji=False)  # names are shown as they are
    tasks = [escaped(task) for task in ledger.tasks]
    total, size = len(ledger.space), Path(path).stat().st_size
    console.print(f"{escaped(str(path))}: {counted(len(ledger.records), 'task')}, {size:,} bytes")
    console.print(
        f"base model {escaped(ledger.fingerprint[:12])}, {total:,} graftable entries in {len(ledger.space.tensors)} tensors"
    )

    console.print(f"composition {ledger.composition}: a task is inferred with {_COMPOSITIONS[ledger.composition]}")

    owners = Table("task", "region", "owned", "shared", "share of model", "readout values", title="Who owns what")
    for task, record in zip(tasks, ledger.records, strict=True):
        region, owned = len(record.region), len(record.owned.region)
        readout = sum(tensor.numel() for tensor in record.readout.values())
        owners.add_row(
            f"{task} (alone)" if record.alone else task,
            f"{region:,}",
            f"{owned:,}",
            f"{region - owned:,}",
            f"{region / total:.4%}",
            f"{readout:,}",
        )
    union = len(ledger.owned())
    together = "the union" if ledger.composition == "auto" else "all"
    owners.add_row(together, "", f"{union:,}", "", f"{union / total:.4%}", "", end_section=True)
    console.print(owners)

    overlaps = Table("overlap with", *tasks, title="Share of the column's region that lies in the row's")
    for task, row in zip(tasks, ledger.overlap(), strict=True):
        overlaps.add_row(task, *(f"{share:.3f}" for share in row))
    console.print(overlaps)

    for title, by in (("Regions by layer", layer_of), ("Regions by kind of parameter", kind_of)):
        counts = [distribution(record.region, ledger.space, by) for record in ledger.records]
        table = Table("", *tasks, title=title)
        for group in distribution(ledger.owned(), ledger.space, by):
            table.add_row(group, *(f"{count[group]:,}" for count in counts))
        console.print(table)
    text = console.file.getvalue() if isinstance(console.file, io.StringIO) else ""
    return text.rstrip()
