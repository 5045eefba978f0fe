"""Measurements, and the file of a section with its finished measurements."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forgetfree.errors import RunError, first_line
from forgetfree.files import write_json

Json = dict[str, Any]


@dataclass(frozen=True)
class Value:
    """A number of a measurement.

    Attributes:
        what: its name, such as ``region / fine-tune``.
        value: the measured value.
        unit: the unit of the value; a ratio has none. ``csv``: the scores of a run, as ``forgetfree report`` reads them.
        expected: the expectation from the documents or a calculation, in words.
        holds: whether a promise is kept; None if nothing is promised.
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
class Measurement:
    """A measurement that can run on its own.

    Attributes:
        name: its name, unique in its section.
        seconds: its approximate time on a GPU.
        measure: the function that measures.
    """

    name: str
    seconds: float
    measure: Callable[[], Iterable[Value]]


class SectionResults:
    """The finished measurements of a section, in a file.

    Args:
        path: the path of the file, which may not exist yet.
        here: the device, the size and the versions: a measurement counts as finished only for this device and size.

    Raises:
        RunError: the file is damaged.
    """

    def __init__(self, path: Path, here: Mapping[str, Any]) -> None:
        self.path, self._here = path, here
        self._all = read(path) if path.exists() else []

    @property
    def finished(self) -> dict[str, Json]:
        """The measurements that are finished here, by name."""
        here = [each for each in self._all if all(each[key] == self._here[key] for key in ("device", "size"))]
        return {each["name"]: each for each in here if "error" not in each}

    def slowness(self) -> float:
        """Return how many times longer measurements took here than was planned; 1 if none is finished."""
        took, planned = (sum(each[key] for each in self.finished.values()) for key in ("took", "planned"))
        return took / planned if planned else 1.0

    def add(self, measurement: Measurement, took: float, values: Iterable[Value], error: str = "") -> Json:
        """Write an ended measurement, in place of a failed one, and return its record."""
        record: Json = {"name": measurement.name, **self._here, "planned": measurement.seconds, "took": round(took, 3)}
        record |= {"error": error} if error else {"values": [asdict(each) for each in values]}
        same = ("name", "device", "size")
        others = [each for each in self._all if any(each[key] != record[key] for key in same)]
        self._all = [*others, record]
        write_json(self.path, {"section": self.path.stem, "measurements": self._all})
        return record


def read(path: Path) -> list[Json]:
    """Return the measurements in the file of a section.

    Raises:
        RunError: it is damaged.
    """
    try:
        records: list[Json] = json.loads(path.read_text(encoding="utf-8"))["measurements"]
        for each in records:
            _ = each["name"], each["device"], each["size"], each["took"] + each["planned"]
            _ = each["error"] if "error" in each else [Value(**value) for value in each["values"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} holds no measurements of a GPU: {type(error).__name__}, {first_line(error)}. Remove the file, and "
            "measure again."
        ) from error
    return records
