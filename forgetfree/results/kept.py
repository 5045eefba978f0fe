"""What a job made beside its scores: the ledgers of a run, the grafts of a graft."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

from forgetfree.errors import ReportError
from forgetfree.ledger import Ledger
from forgetfree.ledger.graft import Graft
from forgetfree.results.unit_record import check_own


class Kept:
    """Ledgers by strategy and seed, grafts by seed and sparsity: read from files when asked for, or held in memory."""

    def __init__(self) -> None:
        self._files: dict[tuple[Hashable, ...], Path] = {}
        self._held: dict[tuple[Hashable, ...], Any] = {}

    def add(self, path: Path, *key: Hashable) -> None:
        """Note where something may be found."""
        self._files[key] = path

    def hold(self) -> None:
        """Read all that is there into memory, because the files will be removed."""
        self._held = {key: _read(path) for key, path in self._files.items() if path.is_file()}
        self._files.clear()

    def get(self, what: str, *key: Hashable) -> Any:
        """Return a ledger or a graft.

        Args:
            what: its name in a message.
            key: as it was added.

        Raises:
            ReportError: there is none, or its file is that of another seed or run.
            LedgerError, GraftError: its file is damaged.
        """
        if key in self._held:
            return self._held[key]
        if key in self._files and self._files[key].is_file():
            check_own(self._files[key], ReportError)
            return _read(self._files[key])
        known = [*self._held, *(other for other, path in self._files.items() if path.is_file())]
        listed = "; ".join(" ".join(map(str, each)) for each in known) or "none"
        raise ReportError(f"There is no {what}. There are: {listed}.")


def _read(path: Path) -> Ledger | Graft:
    return Ledger.load(path) if path.name.startswith("ledger") else Graft.load(path)
