"""Bad rows, which cannot be used: all are found and reported in one table, or left out and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from forgetfree.display import counted, escaped
from forgetfree.errors import BadDataError, DataError, Faults

T = TypeVar("T")
#: The most faults and the most remedies in a message, and the most characters of a file's name.
_PRINTED, _REMEDIES, _NAME = 20, 3, 40


@dataclass(frozen=True)
class BadRow:
    """Fault of one row.

    Attributes:
        file: the name of the table, for messages.
        row: its number there: files of records count from 1, jsonl and CoNLL count lines, rows in memory count from 0.
        column: the column; empty for a fault of the row itself.
        what: the fault in a few words, which are the same for all rows with this fault.
        text: an excerpt of the content.
        fault: the fault, with the expected content, as a sentence without its full stop.
        remedy: a remedy other than fixing the row, if there is one.
    """

    file: str
    row: int
    column: str
    what: str
    text: str
    fault: str
    remedy: str = ""

    @property
    def message(self) -> str:
        """One paragraph with place, fault and remedy."""
        column = f", column {self.column!r}" if self.column else ""
        fault = f"{self.file}, row {self.row}{column}: {self.fault}."
        return " ".join(filter(None, [fault, self.remedy, "Fix or remove the row."]))


class RowError(DataError):
    """A fault of a row whose place is not yet known; the arguments are as in `BadRow`."""

    def __init__(self, what: str, fault: str, remedy: str = "") -> None:
        self.what, self.fault, self.remedy = what, fault, remedy
        super().__init__(f"{fault}. {remedy}".rstrip())


class BadRows:
    """The bad rows of one table.

    Attributes:
        numbers: the numbers of the rows.
    """

    def __init__(self, faults: Iterable[BadRow] = ()) -> None:
        self._by_cell = dict[tuple[int, str], BadRow]()
        self.numbers = set[int]()
        for fault in faults:
            self.add(fault)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def faults(self) -> list[BadRow]:
        """The faults, one per cell."""
        return [*self._by_cell.values()]

    def add(self, fault: BadRow) -> None:
        """Add a fault; only the first of each cell is kept."""
        self._by_cell.setdefault((fault.row, fault.column), fault)
        self.numbers.add(fault.row)

    def attempt(self, action: Callable[..., T], *arguments: Any) -> T | None:
        """Return the result of ``action``; if it raises ``BadDataError``, add the bad rows and return ``None``."""
        try:
            return action(*arguments)
        except BadDataError as error:
            for fault in error.rows:
                self.add(fault)
            return None

    def summary(self, before: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """Return the number of rows, and of faults of each kind, for results.json; the summary ``before`` is added.

        >>> BadRows().summary({"rows": 2, "faults": {"no label": 2}})
        {'rows': 2, 'faults': {'no label': 2}}
        """
        faults = Counter(before.get("faults", {})) + _counts(self.faults)
        return {"rows": before.get("rows", 0) + len(self), "faults": dict(faults)}


def refusal(*faults: BadRow) -> BadDataError:
    """Return the error for bad rows, without a hint on an option that leaves them out."""
    return BadDataError([_message_of(faults)], faults)


class DataFaults(Faults):
    """Faults of data, reported together: bad rows, and faults of whole tables.

    Attributes:
        rest: the tasks that can be read nevertheless, without their bad rows.
    """

    def __init__(self) -> None:
        super().__init__(DataError)
        self.rest = list[Any]()

    def __bool__(self) -> bool:
        return bool(self._found or self._rows)

    def catch(self, error: DataError) -> None:
        """Add the faults of an error: its bad rows, and all others."""
        self.rest += error.rest
        self._rows += getattr(error, "rows", ())
        for fault in getattr(error, "others", (str(error),)):
            self.add(fault)

    def add_rows(self, bad: BadRows, good: int, skip_bad_rows: bool = False) -> None:
        """Add the bad rows of a table with ``good`` good rows, unless they are left out; a fault of all rows is the table's."""
        if not bad or (skip_bad_rows and good):
            return
        if not good and len({(fault.what, fault.column) for fault in bad.faults}) == 1:
            alike = "" if len(bad) == 1 else f" All {len(bad):,} rows are like this one."
            if alike and bad.faults[0].column:
                alike += " To use other columns or another kind of task, give --text-column, --label-column or --kind."
            self.add(escaped(bad.faults[0].message) + alike)
        else:
            self._rows += sorted(bad.faults, key=lambda fault: fault.row)

    def demand(self, action: Callable[..., T], *arguments: Any) -> T:
        """Return the result of ``action``; if it finds faults, raise all faults as `report` does."""
        found: T | None = self.attempt(action, *arguments)
        if found is None:
            self.report()
        assert found is not None
        return found

    def report(self) -> None:
        """Raise ``BadDataError`` with all faults, if there are any."""
        if self:
            messages = [_message_of(self._rows, "--skip-bad-rows skips such rows.")] if self._rows else []
            error = BadDataError([*messages, *self], self._rows, self)
            error.rest = tuple(self.rest)
            raise error


def _counts(faults: Iterable[BadRow]) -> Counter[str]:
    return Counter(fault.what for fault in faults)


def counts_text(counts: Mapping[str, int]) -> str:
    """Return the kinds of faults with their counts, the commonest first.

    >>> counts_text({"no label": 2, "unknown label": 1000})
    'unknown label (1,000), no label (2)'
    """
    order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{what} ({count:,})" for what, count in order)


def _message_of(bad: Sequence[BadRow], out: str = "") -> str:
    """Return one message for all bad rows: the fault of the only one, or counts and a table, whose lines are indented.

    ``out`` is a sentence on how to leave them out.
    """
    if len(bad) == 1:
        return f"{escaped(bad[0].message)} {out}".rstrip()
    head = ("file", "row", "column", "what", "text")
    lines = [(_tail(each.file), f"{each.row}", each.column[:_NAME], each.what, each.text) for each in bad[:_PRINTED]]
    cells = [tuple(map(escaped, line)) for line in (head, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    if len(bad) > len(lines):
        table.append(f"… and {counted(len(bad) - len(lines), 'more fault')}")
    rows = counted(len({(each.file, each.row) for each in bad}), "bad row")
    files = counted(len({each.file for each in bad}), "file")
    remedies = " ".join(list(dict.fromkeys(each.remedy for each in bad if each.remedy))[:_REMEDIES])
    told = f"{rows} in {files}: {counts_text(_counts(bad))}. Fix or remove them{'; ' if out else '.'}{out}"
    first = f"{told} {remedies}".rstrip()
    return "\n  ".join([first, *table])


def _tail(name: str) -> str:
    return name if len(name) <= _NAME else f"…{name[1 - _NAME :]}"


def left_out_note(bad: Iterable[tuple[str, BadRows]]) -> str:
    """Return a note on bad rows that were left out, by split."""
    return "; ".join(
        f"{counted(len(each), f'bad {split} row')} left out: {counts_text(_counts(each.faults))}"
        for split, each in bad
        if each
    )
