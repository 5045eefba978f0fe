"""The ledger's file: one safetensors file without pickle.

For record ``k`` and tensor ``name``:

    owned/k/name/index     uint32 (s,)   entries within the tensor that the task owns, sorted
    owned/k/name/value     (s,)          their values, in the parameter's dtype
    shared/k/name/index    uint32 (r,)   entries of γ_k that an earlier task owns
    readout/k/name         …             the task's own readout tensors
    buffer/k/name          …             buffers that training the task changed (BatchNorm's, say)

and as metadata: schema, task names in order, sparsity per task, the parameter space's layout and its hash, the
base model's fingerprint, the composition (``union`` where it is not given), and a checksum of all of the above.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from forgetfree.errors import LedgerError, RegionError, TaskError
from forgetfree.files import checksum, read_tensors, tensor_bytes
from forgetfree.graft_file import pack, space_of, unpack, unpack_region
from forgetfree.grafting import Graft
from forgetfree.ledger.records import COMPOSITIONS, Ledger, Record
from forgetfree.parameters import ParameterSpace
from forgetfree.regions import Region

FORMAT = "forgetfree.ledger"
SCHEMA = 1
#: Of ledgers that are no unions: what reads schema 1 alone would take them for unions.
SCHEMA_OF_OTHERS = 2


def serialize(ledger: Ledger) -> bytes:
    """The bytes of the file."""
    tensors: dict[str, Tensor] = {}
    for k, record in enumerate(ledger.records):
        owned = record.owned.region
        for kind, named in (
            ("owned", pack(ledger.space, owned, record.owned.values)),
            ("shared", pack(ledger.space, record.region - owned)),
            ("readout", record.readout),
            ("buffer", record.buffers),
        ):
            tensors |= {f"{kind}/{k}/{name}": tensor for name, tensor in named.items()}
    header = {
        "schema": str(SCHEMA if ledger.composition == "union" else SCHEMA_OF_OTHERS),
        "format": FORMAT,
        "tasks": json.dumps(ledger.tasks),
        "sparsity": json.dumps([record.sparsity for record in ledger.records]),
        "layout": ledger.space.layout,
        "layout_hash": ledger.space.layout_hash,
        "fingerprint": ledger.fingerprint,
    }
    if ledger.composition != "union":
        header["composition"] = ledger.composition
    header["checksum"] = checksum(tensors, header)
    return tensor_bytes(tensors, header)


def read(path: Path) -> Ledger:
    """Read and verify; see `Ledger.load`."""
    if path.is_dir():
        raise LedgerError(f"{path} is a directory. Give the path of a ledger.safetensors in it.")
    try:
        header, tensors = read_tensors(path)
    except FileNotFoundError as error:
        raise LedgerError(f"There is no ledger at {path}. Give the path of a ledger.safetensors.") from error
    except (SafetensorError, OSError) as error:
        raise LedgerError(
            f"{path} is not a readable safetensors file ({error}). It is damaged or cut short: restore it from a copy, or "
            "run the stream again."
        ) from error
    if (found := header.get("format", FORMAT)) != FORMAT:
        raise LedgerError(
            f"{path} is no ledger: expected the format {FORMAT!r}, got {found!r}. Give the path of a ledger.safetensors."
        )
    return _Reader(path, header, tensors).ledger()


class _Reader:
    """One file being checked and read."""

    def __init__(self, path: Path, header: dict[str, str], tensors: dict[str, Tensor]) -> None:
        self.path, self.header, self.tensors = path, header, tensors

    def fail(self, what: str) -> LedgerError:
        return LedgerError(
            f"{self.path} is not a sound ledger: {what}. Restore it from a copy, or run the stream again."
        )

    def ledger(self) -> Ledger:
        missing = {"schema", "tasks", "sparsity", "layout", "layout_hash", "fingerprint", "checksum"} - set(self.header)
        if missing:
            raise self.fail(f"its metadata lacks {', '.join(sorted(missing))}")
        if self.header["schema"] not in (str(SCHEMA), str(SCHEMA_OF_OTHERS)):
            raise self.fail(
                f"it has schema {self.header['schema']!r}, and this version reads schema {SCHEMA} and {SCHEMA_OF_OTHERS}"
            )
        space = self.space()
        tasks, sparsity = self.json("tasks", str), self.json("sparsity", (int, float))
        if len(tasks) != len(sparsity):
            raise self.fail(f"it names {len(tasks)} tasks but {len(sparsity)} sparsities")
        composition: Any = self.header.get("composition", "union")
        if composition not in COMPOSITIONS:
            raise self.fail(f"its composition is {composition!r}, expected one of {', '.join(COMPOSITIONS)}")
        ledger = Ledger(space, self.header["fingerprint"], composition)
        self.check_names(space, len(tasks))
        try:
            for k, task in enumerate(tasks):
                owned, shared = self.regions(space, k, task)
                record = Record(
                    task,
                    owned.region | shared,
                    owned,
                    float(sparsity[k]),
                    self.named("readout", k),
                    self.named("buffer", k),
                )
                if not shared.isdisjoint(owned.region) or len(shared - ledger.owned()):
                    raise self.fail(f"task {task!r} shares entries that no earlier task owns")
                self.append(ledger, record)
        except RegionError as error:
            raise self.fail(str(error).rstrip(".")) from error
        # Last, because the checks above say more.
        if checksum(self.tensors, self.header) != self.header["checksum"]:
            raise self.fail("its contents do not match its checksum")
        return ledger

    def append(self, ledger: Ledger, record: Record) -> None:
        try:
            ledger.append(record)
        except (TaskError, LedgerError) as error:  # its remedy is for who trains, not for who reads
            raise self.fail(str(error).partition(". ")[0].rstrip(".")) from error

    def space(self) -> ParameterSpace:
        try:
            return space_of(self.header)
        except RegionError as error:
            raise self.fail(str(error).rstrip(".")) from error

    def json(self, key: str, kind: Any) -> list[Any]:
        try:
            values = json.loads(self.header[key])
        except ValueError as error:
            raise self.fail(f"its {key} are not valid JSON") from error
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise self.fail(f"its {key} are not a list of the expected kind")
        return values

    def check_names(self, space: ParameterSpace, records: int) -> None:
        known = {spec.name for spec in space.tensors}
        for key in self.tensors:
            kind, _, rest = key.partition("/")
            number, _, name = rest.partition("/")
            tensor, _, part = name.rpartition("/")
            fits = kind in ("readout", "buffer") or (
                tensor in known and part in {"owned": ("index", "value"), "shared": ("index",)}.get(kind, ())
            )
            if not fits or number not in map(str, range(records)):
                raise self.fail(f"it holds the unexpected tensor {key!r}")

    def named(self, kind: str, k: int) -> dict[str, Tensor]:
        prefix = f"{kind}/{k}/"
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    def regions(self, space: ParameterSpace, k: int, task: str) -> tuple[Graft, Region]:
        """What record ``k`` owns, and what it shares."""
        try:
            region, values = unpack(space, self.named("owned", k))
            return Graft(region, values), unpack_region(space, self.named("shared", k))
        except RegionError as error:
            raise self.fail(f"task {task!r}, {str(error).rstrip('.')}") from error
