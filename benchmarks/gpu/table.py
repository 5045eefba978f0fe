"""The table "on a GPU" of docs/scaling.md, from the files of the sections."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Json, read
from forgetfree.display import NULL
from forgetfree.results.report.page import Table

#: The content of each section, in the order of the table.
SECTIONS = {
    "promises": "bits after later tasks, switches and a resume",
    "times": "a step, a search, a switch and texts, as ratios",
    "trainers": "three tasks in SFTTrainer, by `learning` and by LoRA",
    "memory": "peaks of each way to choose γ",
    "main-job": "the main job, seeds 0 to 4",
    "superni": "`superni-short`, seeds 0 to 2",
}
NOT_YET = "not yet measured"
_SEED = re.compile(r", seed \d+$")

#: By section and measurement: texts by card, and the expectation.
Rows = dict[tuple[str, str], tuple[dict[str, str], str]]


def table(folder: Path) -> Table:
    """Return a row for each number that is shown, and a column for each card.

    Args:
        folder: a folder with a file for each measured section, ``SECTION.json``.
    """
    measured = {
        section: [each for each in read(path) if each["size"] == "full" and "error" not in each]
        for section in SECTIONS
        if (path := folder / f"{section}.json").is_file()
    }
    cards = sorted({each["device"] for records in measured.values() for each in records}) or ["any card"]
    lines = []
    for section, told in SECTIONS.items():
        rows: Rows = {}
        for card in cards:
            records = [each for each in measured.get(section, ()) if each["device"] == card]
            found = _promises(records) if section == "promises" else _numbers(records)
            for what, text, expected in found:
                rows.setdefault((section, what), ({}, expected))[0][card] = text
        for (name, what), (texts, expected) in (rows or {(section, told): ({}, "")}).items():
            lines.append((name, what, expected or NULL, *(texts.get(card, NOT_YET) for card in cards)))
    return Table("Measured on a GPU (times as ratios)", ("section", "measured", "expected", *cards), tuple(lines))


def _promises(records: list[Json]) -> Iterator[tuple[str, str, str]]:
    """Yield the number of kept promises, and each broken promise."""
    values = [(each["name"], value) for each in records for value in each["values"] if value["holds"] is not None]
    if values:
        kept = sum(bool(value["holds"]) for _, value in values)
        yield "promises that are kept", f"{kept} of {len(values)}", "all"
    yield from ((f"{name}: {value['what']}", "BROKEN", "kept") for name, value in values if not value["holds"])


def _numbers(records: list[Json]) -> Iterator[tuple[str, str, str]]:
    """Yield the numbers that are shown; for several seeds, mean and standard deviation."""
    seeds: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for each in records:
        for value in each["values"]:
            if value["shown"] or value["holds"] is False:
                name = _SEED.sub("", each["name"])
                seeds.setdefault((name, value["what"]), []).append(value)
    for (name, what), values in seeds.items():
        yield f"{name}: {what}", _text(values), values[0]["expected"]


def _text(values: list[Mapping[str, Any]]) -> str:
    unit, numbers = values[0]["unit"], [value["value"] for value in values]
    if len(numbers) == 1 or not all(isinstance(number, int | float) for number in numbers):
        return _number(numbers[0], unit)
    spread = f"{statistics.stdev(numbers):.2g}"
    return f"{_number(statistics.mean(numbers), unit)} ({spread}, {len(numbers)} seeds)"


def _number(number: Any, unit: str) -> str:
    if not isinstance(number, int | float):
        return str(number)
    return f"{number:.3g} {unit}".rstrip()
