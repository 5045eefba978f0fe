"""All errors that forgetfree raises.

A message is one paragraph: what happened, what was expected, what was found, and the remedy. It shows users' texts as
`forgetfree.display.escaped` returns them, and uses the option names of the command line; in Python, ``--held-out`` is
``held_out``.
"""

from __future__ import annotations

import copyreg
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from forgetfree.display import brief, escaped, escaped_lines


class ForgetfreeError(Exception):
    """The base class of all errors that forgetfree raises on purpose."""

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(escaped(message))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error by its message and attributes, so that it returns unchanged from another process."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class UsageError(ForgetfreeError):
    """The caller asks for something that cannot be done."""

    exit_code = 2


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return a sentence that suggests the nearest known name; empty if `difflib`'s ratio is too low for all names."""
    names = sorted(known)
    begun = [each for each in names if len(name) > 2 and each.startswith(name)]
    near = begun[:1] or difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


class FieldError(UsageError):
    """A field of a request, or an argument, asks for something that a task does not support; ``field`` is its name."""

    def __init__(self, message: str, field: str = "") -> None:
        self.field = field
        super().__init__(message)


class UnknownNameError(UsageError):
    """There is no such name; the message suggests ``same`` or the nearest known name, and lists all.

    ``same`` is the known name of the same object. The nearest name may also be among ``others``.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        known: Iterable[str],
        hint: str = "",
        others: Iterable[str] = (),
        same: str = "",
    ) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        listing = ", ".join(self.known) or "none"
        suggestion = f" Did you mean {same!r}?" if same else nearest(name, {*self.known, *others})
        super().__init__(f"Unknown {kind} {brief(name)}.{suggestion} Known: {listing}.{' ' + hint if hint else ''}")


class OptionError(UsageError):
    """An option's value is of the wrong type or out of range; ``parts`` has each fault if several are reported together."""

    def __init__(self, message: str, parts: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.parts = tuple(parts)


class SeveralFaultsError(UsageError):
    """A request has one or several faults.

    Args:
        faults: a paragraph for each fault.
        rows: the bad rows of data among them, see `BadDataError`.
    """

    def __init__(self, faults: Iterable[str], rows: Iterable[Any] = ()) -> None:
        self.faults, self.rows = tuple(faults), tuple(rows)
        Exception.__init__(self, _listed(self.faults))


class Faults:
    """Collects all faults of a request, to report them together.

    Args:
        caught: the class of errors that count as faults.
    """

    def __init__(self, caught: type[ForgetfreeError] = UsageError) -> None:
        self._caught = caught
        self._found: dict[str, None] = {}
        self._rows: list[Any] = []

    def add(self, fault: str) -> None:
        """Add a fault, as a sentence."""
        self._found[fault] = None

    def attempt(self, action: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of ``action``; ``None`` if it raises a fault, which is added."""
        try:
            return action(*arguments)
        except self._caught as error:
            self.catch(error)
            return None

    def catch(self, error: Any) -> None:
        """Add the faults of an error."""
        for fault in getattr(error, "faults", (str(error),)):
            self.add(fault)
        self._rows += getattr(error, "rows", ())

    def report(self) -> None:
        """Raise `SeveralFaultsError` with all faults, if there is one."""
        if self._found:
            raise SeveralFaultsError(self._found, self._rows)

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)


class DataError(ForgetfreeError):
    """A data file lacks something that a task needs.

    Attributes:
        rest: the tasks that can be loaded in spite of it, each a `forgetfree.data.rows.TaskRows`, to find further faults.
    """

    rest: tuple[Any, ...] = ()


class NoDataError(DataError):
    """There is no data for a task."""


class BadDataError(DataError):
    """Data with faults, which are reported together.

    Args:
        faults: a paragraph for each fault; all bad rows share one paragraph, with a table in indented lines.
        rows: the bad rows, each a `forgetfree.data.bad_rows.BadRow`.
        others: the paragraphs that are not about rows.
    """

    def __init__(self, faults: Iterable[str], rows: Iterable[Any] = (), others: Iterable[str] = ()) -> None:
        self.faults, self.rows, self.others = tuple(faults), tuple(rows), tuple(others)
        Exception.__init__(self, _listed(self.faults))


def _listed(faults: Sequence[str]) -> str:
    """Return the only fault, or a list of all."""
    if len(faults) == 1:
        return escaped_lines(*faults)
    return "\n- ".join([f"{len(faults)} faults:", *map(escaped_lines, faults)])


class ModelError(ForgetfreeError):
    """A model cannot be loaded, or lacks something that the readout needs."""


class RegionError(ForgetfreeError):
    """Indices do not fit their parameter space."""


class GraftError(ForgetfreeError):
    """A graft is damaged, incomplete, or does not belong to this model."""


class LedgerError(ForgetfreeError):
    """A ledger is damaged, or does not belong to this model."""


class TaskError(ForgetfreeError):
    """A task is unknown, or appears where it must not."""


class TrainingError(ForgetfreeError):
    """Training cannot continue."""


class OutOfMemoryError(ForgetfreeError):
    """There is not enough memory; the message includes the original error."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"There is not enough memory: {'. '.join(reason.split('. ')[:3])}. To train with less, set in this order a smaller "
            "batch_size, or accumulation, which keeps the update; a smaller max_length; gradient_checkpointing=true; "
            "region_from=gradient, and with it dtype=bfloat16. Fewer --jobs or a smaller --model take less, too, and other "
            "programs may use the same memory."
        )


class MetricError(ForgetfreeError):
    """A metric cannot be computed from this input."""


class HubError(ForgetfreeError):
    """The Hugging Face hub cannot be reached, or refuses."""


class RunError(ForgetfreeError):
    """A run directory cannot be read, written or continued, or its results cannot be merged with others."""


class ConformanceError(ForgetfreeError):
    """A strategy or a stream breaks its contract; ``faults`` has a paragraph for each breach."""

    def __init__(self, subject: str, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        count = f"{len(self.faults)} fault{'s' if len(self.faults) > 1 else ''}"
        lines = [f"{subject} ({count}):", *(f"- {fault}" for fault in self.faults)]
        Exception.__init__(self, "\n".join(map(escaped, lines)))


#: Messages of torch and its libraries when memory is short and they raise no dedicated error, as on CPUs and on mps.
_NO_MEMORY = re.compile(r"out of memory|(can't|cannot) allocate memory|not enough memory|_ALLOC_FAILED", re.IGNORECASE)


def out_of_memory(error: BaseException) -> OutOfMemoryError | None:
    """Return an `OutOfMemoryError` for an error caused by a lack of memory; ``None`` for any other error."""
    if isinstance(error, ForgetfreeError):
        return error if isinstance(error, OutOfMemoryError) else None
    named = any(each.__name__ == "OutOfMemoryError" for each in type(error).__mro__)  # torch's, without importing it
    said = isinstance(error, RuntimeError | OSError) and _NO_MEMORY.search(str(error))
    return OutOfMemoryError(first_line(error)) if named or said or isinstance(error, MemoryError) else None


def first_line(error: BaseException) -> str:
    """Return an error's message, shortened to fit into another message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". ")
