"""Measurements and the file of a section, which keeps those that are finished."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forgetfree.errors import ReportError, first_line
from forgetfree.files import write_json

Json = dict[str, Any]


@dataclass(frozen=True)
class Value:
    """A number of a measurement.

    Attributes:
        what: what it is, such as ``region / fine-tune``.
        value: as it was measured.
        unit: of the value; a ratio has none.
        expected: what the documents or a calculation say, in words.
        holds: whether a promise is kept; None where nothing is promised.
        shown: whether docs/scaling.md shows it.
    """

    what: str
    value: float | bool | str
    unit: str = ""
    expected: str = ""
    holds: bool | None = None
    shown: bool = False


def promise(what: str, kept: bool) -> Value:
    """Return a promise and whether it is kept."""
    return Value(what, kept, holds=kept)


@dataclass(frozen=True)
class Measured:
    """A finished measurement.

    Attributes:
        values: its numbers.
        scores: of a run, as the text of a CSV file that ``forgetfree report`` reads.
    """

    values: tuple[Value, ...]
    scores: str = ""


@dataclass(frozen=True)
class Measurement:
    """What can be measured on its own.

    Attributes:
        name: tells it from the others of its section.
        seconds: that it takes on a GPU, about.
        measure: measures it.
    """

    name: str
    seconds: float
    measure: Callable[[], Measured | Iterable[Value]]


class SectionResults:
    """The measurements of a section that are finished, in a file.

    Args:
        path: of the file, which may not exist yet.
        here: the device, the size and the versions: what is measured here counts as finished on this device in this size alone.

    Raises:
        ReportError: the file is damaged.
    """

    def __init__(self, path: Path, here: Mapping[str, Any]) -> None:
        self.path, self._here = path, here
        self._all = read(path) if path.exists() else []

    def _is_here(self, record: Json) -> bool:
        return all(record[key] == self._here[key] for key in ("device", "size"))

    def finished(self, name: str) -> Json | None:
        """Return the measurement of this name, if it is finished here."""
        records = (each for each in self._all if self._is_here(each) and "error" not in each)
        return next((each for each in records if each["name"] == name), None)

    def value(self, name: str, what: str) -> float | None:
        """Return a number of a measurement that is finished here, if there is one."""
        values = (self.finished(name) or {"values": []})["values"]
        return next((each["value"] for each in values if each["what"] == what), None)

    def slowness(self) -> float:
        """Return how many times longer measurements took here than was planned; 1 where none is finished."""
        records = [each for each in self._all if self._is_here(each) and "error" not in each]
        return sum(each["took"] for each in records) / sum(each["planned"] for each in records) if records else 1.0

    def add(self, measurement: Measurement, took: float, measured: Measured | None, error: str = "") -> Json:
        """Write a measurement that ended, in the place of one that failed, and return what is written."""
        record: Json = {"name": measurement.name, **self._here, "planned": measurement.seconds, "took": round(took, 2)}
        if measured is None:
            record["error"] = error
        else:
            record["values"] = [asdict(each) for each in measured.values]
            record |= {"scores": measured.scores} if measured.scores else {}
        others = [each for each in self._all if not (self._is_here(each) and each["name"] == measurement.name)]
        self._all = [*others, record]
        write_json(self.path, {"section": self.path.stem, "measurements": self._all})
        return record


def read(path: Path) -> list[Json]:
    """Return the measurements in the file of a section.

    Raises:
        ReportError: it is damaged.
    """
    try:
        records: list[Json] = json.loads(path.read_text(encoding="utf-8"))["measurements"]
        for each in records:
            _ = each["name"], each["device"], each["size"], each["took"] / each["planned"]
            _ = each["error"] if "error" in each else [Value(**value) for value in each["values"]]
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ReportError(
            f"{path} holds no measurements of a GPU: {type(error).__name__}, {first_line(error)}. Remove the file, and "
            "measure again."
        ) from error
    return records
