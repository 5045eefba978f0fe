"""Files that are read alone, beside no others that tell what they held: who reads each, what that may raise, what is sound.

What is read of a whole directory `fuzz.taken` damages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz import reading
from fuzz.reading import bits

from forgetfree.errors import DataError, ForgetfreeError, GraftError, LedgerError, ModelError, ReportError
from forgetfree.ledger import Ledger
from forgetfree.ledger.graft import Graft
from forgetfree.models.state import ModelState
from forgetfree.results.runs import read_run
from forgetfree.results.scores import read_scores


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    Attributes:
        files: patterns of the files of this kind below the folder of all samples; the first that is found is damaged.
        read: reads the file, as its user does.
        content: all that was read, to compare; of tensors the bits.
        sound: asserts that what was read is sound; the path is for scratch.
        errors: what the reader may raise.
        signed: whether the file has a checksum.
    """

    files: tuple[str, ...]
    read: Callable[[Path], Any]
    content: Callable[[Any], Any]
    sound: Callable[[Any, Path], None]
    errors: tuple[type[ForgetfreeError], ...]
    signed: bool = False


KINDS: dict[str, Kind] = {
    "ledger": Kind(
        ("run/grafting-continual/seed-0/ledger.safetensors", "run/*/seed-0/ledger.safetensors"),
        lambda path: Ledger.load(path),
        reading.ledger_content,
        reading.sound_ledger,
        (LedgerError,),
        signed=True,
    ),
    "graft": Kind(
        ("graft/bare-graft/seed-0/graft.safetensors",),
        lambda path: Graft.load(path),
        bits,
        reading.sound_graft,
        (GraftError,),
        signed=True,
    ),
    "state": Kind(
        ("graft/fine-tuned/*.safetensors", "*/fine-tuned/*.safetensors"),
        lambda path: ModelState.load(path),
        bits,
        reading.sound_state,
        (ModelError,),
        signed=True,
    ),
    "scores": Kind(
        ("scores.csv",),
        lambda path: read_scores(path),
        bits,
        reading.sound_scores,
        (ReportError,),
    ),
    "results of a run in one file": Kind(
        ("run.csv",), lambda path: read_run(path), bits, reading.sound_results, (ReportError,)
    ),
    "notes of a data directory": Kind(
        ("data/sst2/source.json", "data/*/source.json"),
        reading.read_task_notes,
        bits,
        reading.sound_notes,
        (DataError,),
    ),
}
