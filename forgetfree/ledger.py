"""The ledger: which task owns which parameter, and its value. Task-indexed, append-only.

Owned regions are pairwise disjoint and their union is the union of the γ_i (paper, §5.2 and C.3). Task t_k is
inferred with θ_pre under the union of the records of t_1 … t_k: later records cannot touch it.

The file is one safetensors file without pickle. For record ``k`` and tensor ``name``:

    owned/k/name/index     uint32 (s,)   entries within the tensor that the task owns, sorted
    owned/k/name/value     (s,)          their values, in the parameter's dtype
    shared/k/name/index    uint32 (r,)   entries of γ_k that an earlier task owns
    readout/k/name         …             the task's own readout tensors
    buffer/k/name          …             buffers that training the task changed (BatchNorm's, say)

and as metadata: schema, task names in order, sparsity per task, the parameter space's layout and its hash, the
base model's fingerprint, and a checksum of all of the above.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from forgetfree.errors import LedgerError, RegionError, TaskError
from forgetfree.files import write_atomically
from forgetfree.grafting import Graft
from forgetfree.models.state import persistent_buffers
from forgetfree.parameters import ParameterSpace, TensorSpec
from forgetfree.regions import Region, overlap

SCHEMA = 1


@dataclass(frozen=True)
class Record:
    """What one task put into the ledger.

    Attributes:
        task: its name.
        region: γ_k, as localised.
        owned: γ_k minus all that earlier tasks own, with the trained values.
        sparsity: the share of the space that γ_k was allowed.
        readout: the task's own readout tensors by name.
        buffers: the model's buffers that training changed, by name.
    """

    task: str
    region: Region
    owned: Graft
    sparsity: float
    readout: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


class Ledger:
    """The records of a stream over one base model.

    Args:
        space: the parameter space of the base model.
        fingerprint: of the base model, see `forgetfree.models.loading.fingerprint_of`.
    """

    def __init__(self, space: ParameterSpace, fingerprint: str) -> None:
        self.space = space
        self.fingerprint = fingerprint
        self._records: list[Record] = []

    @property
    def records(self) -> tuple[Record, ...]:
        """All records, in the order of learning."""
        return tuple(self._records)

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks learned, in order."""
        return [record.task for record in self._records]

    def position(self, task: str) -> int:
        """Where a task stands in the order, from 0.

        Raises:
            TaskError: the ledger does not hold it.
        """
        if task not in self.tasks:
            raise TaskError(
                f"The ledger holds no task {task!r}. It holds: {', '.join(self.tasks) or 'none'}. Train the task first."
            )
        return self.tasks.index(task)

    def owned(self, upto: str | None = None) -> Region:
        """The union of all regions up to and including task ``upto``; of all of them if ``None``."""
        last = len(self._records) if upto is None else self.position(upto) + 1
        union = Region.empty()
        for record in self._records[:last]:
            union = union | record.owned.region
        return union

    def free(self, region: Region) -> Region:
        """What of ``region`` no task owns yet."""
        return region - self.owned()

    def owner(self, index: int) -> str | None:
        """The task that owns the entry of flat index ``index``, or ``None``."""
        self.space.check(torch.tensor([index]))
        return next((record.task for record in self._records if index in record.owned.region), None)

    def overlap(self) -> list[list[float]]:
        """``|γ_i ∩ γ_j| / |γ_j|`` for all pairs of localised regions: ``T × T`` (paper, fig. 8)."""
        return [[overlap(a.region, b.region) for b in self._records] for a in self._records]

    def append(self, record: Record) -> None:
        """Commit a task. Nothing in a ledger changes afterwards.

        Raises:
            TaskError: the task is already in it.
            LedgerError: the record takes an entry that is owned, leaves a free one of its region out, or does not fit the
                space.
        """
        self.check_new(record.task)
        where = f"Record of task {record.task!r}"
        try:
            self.space.check(record.region.indices)
        except RegionError as error:
            raise LedgerError(f"{where}: {error}") from error
        if not self.owned().isdisjoint(record.owned.region):
            raise LedgerError(f"{where} takes entries that earlier tasks own. Commit γ minus ledger.owned().")
        if record.owned.region != self.free(record.region):
            raise LedgerError(
                f"{where} must own its region minus what earlier tasks own: expected {len(self.free(record.region))} entries, "
                f"got {len(record.owned.region)}."
            )
        if record.owned.values.shape != (len(record.owned.region),):
            raise LedgerError(
                f"{where} needs one value an entry: expected shape ({len(record.owned.region)},), got "
                f"{tuple(record.owned.values.shape)}."
            )
        _check_finite(where, {"values": record.owned.values, **record.readout, **record.buffers})
        self._records.append(_frozen(record))

    def check_new(self, task: str) -> None:
        """Raise ``TaskError`` where the ledger holds ``task`` already."""
        if task in self.tasks:
            raise TaskError(
                f"Task {task!r} is already in the ledger (record {self.position(task)}), and what a task owns is frozen. "
                "To learn more of it, train it under another name."
            )

    @property
    def size_in_bytes(self) -> int:
        """Size of the file this ledger is saved as."""
        return len(self._serialize())

    def save(self, path: Path) -> None:
        """Write the ledger atomically: the file is the old one or the new one, never a part."""
        write_atomically(path, self._serialize())

    # -- The file ------------------------------------------------------------------------------------------

    def _serialize(self) -> bytes:
        tensors: dict[str, Tensor] = {}
        for k, record in enumerate(self._records):
            for i, local, where in self.space.split(record.owned.region.indices):
                spec = self.space.tensors[i]
                tensors[f"owned/{k}/{spec.name}/index"] = local.to(torch.uint32)
                tensors[f"owned/{k}/{spec.name}/value"] = record.owned.values[where].to(spec.dtype)
            shared = record.region - record.owned.region
            for i, local, _ in self.space.split(shared.indices):
                tensors[f"shared/{k}/{self.space.tensors[i].name}/index"] = local.to(torch.uint32)
            for kind, named in (("readout", record.readout), ("buffer", record.buffers)):
                for name, tensor in named.items():
                    tensors[f"{kind}/{k}/{name}"] = tensor
        header = {
            "schema": str(SCHEMA),
            "format": "forgetfree.ledger",
            "tasks": json.dumps(self.tasks),
            "sparsity": json.dumps([record.sparsity for record in self._records]),
            "layout": self.space.layout,
            "layout_hash": self.space.layout_hash,
            "fingerprint": self.fingerprint,
        }
        header["checksum"] = _checksum(tensors, header)
        return save({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, header)

    @classmethod
    def load(cls, path: Path) -> Ledger:
        """Read a ledger and verify everything about it: layout, bounds, order, disjointness, dtypes, checksum.

        Raises:
            LedgerError: with the reason; a damaged file is never half-read.
        """
        try:
            with safe_open(path, "pt") as file:
                header = dict(file.metadata() or {})
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
        except FileNotFoundError as error:
            raise LedgerError(f"There is no ledger at {path}. Give the path of a ledger.safetensors.") from error
        except (SafetensorError, OSError) as error:
            raise LedgerError(
                f"{path} is not a readable safetensors file ({error}). It is damaged or cut short: restore it from a copy, or "
                "run the stream again."
            ) from error
        return _Reader(path, header, tensors).ledger()


def _checksum(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for key in sorted(header):
        if key != "checksum":
            digest.update(f"{key}={header[key]}\n".encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_finite(where: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise LedgerError(
                f"{where}: tensor {name!r} holds NaN or infinity. Train the task again, with a lower rate."
            )


def _frozen(record: Record) -> Record:
    """A record with copies of its own on the CPU: what the caller does to the originals cannot reach it."""

    def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

    owned = Graft(record.owned.region, record.owned.values.detach().cpu().clone())
    return Record(record.task, record.region, owned, record.sparsity, copies(record.readout), copies(record.buffers))


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
        if self.header["schema"] != str(SCHEMA):
            raise self.fail(f"it has schema {self.header['schema']!r}, and this version reads schema {SCHEMA}")
        space = self.space()
        tasks, sparsity = self.json("tasks", str), self.json("sparsity", (int, float))
        if len(tasks) != len(sparsity):
            raise self.fail(f"it names {len(tasks)} tasks but {len(sparsity)} sparsities")
        ledger = Ledger(space, self.header["fingerprint"])
        self.check_names(space, len(tasks))
        try:
            for k, task in enumerate(tasks):
                owned, values = self.owned(space, k, task)
                shared = self.shared(space, k, task)
                record = Record(
                    task,
                    owned | shared,
                    Graft(owned, values),
                    float(sparsity[k]),
                    self.named("readout", k),
                    self.named("buffer", k),
                )
                if not shared.isdisjoint(owned) or len(shared - ledger.owned()):
                    raise self.fail(f"task {task!r} shares entries that no earlier task owns")
                ledger.append(record)
        except (TaskError, RegionError) as error:
            raise self.fail(str(error).rstrip(".")) from error
        # Last, because the checks above say more.
        if _checksum(self.tensors, self.header) != self.header["checksum"]:
            raise self.fail("its contents do not match its checksum")
        return ledger

    def space(self) -> ParameterSpace:
        try:
            specs, offset = [], 0
            for name, shape, dtype in json.loads(self.header["layout"]):
                spec = TensorSpec(name, tuple(map(int, shape)), getattr(torch, dtype), offset)
                specs.append(spec)
                offset += spec.size
            space = ParameterSpace(tuple(specs))
        except Exception as error:
            raise self.fail(f"its layout cannot be read ({error})") from error
        if not specs or space.layout_hash != self.header["layout_hash"]:
            raise self.fail("its layout does not match its layout hash")
        return space

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
            if not fits or not number.isdigit() or int(number) >= records:
                raise self.fail(f"it holds the unexpected tensor {key!r}")

    def named(self, kind: str, k: int) -> dict[str, Tensor]:
        prefix = f"{kind}/{k}/"
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    def index(self, key: str, spec: TensorSpec, task: str) -> Tensor:
        index = self.tensors[key]
        if index.dtype != torch.uint32 or index.dim() != 1:
            raise self.fail(
                f"task {task!r}, tensor {spec.name!r}: expected uint32 indices of shape (s,), got {index.dtype} of shape "
                f"{tuple(index.shape)}"
            )
        local = index.to(torch.int64)
        if len(local) and int(local.max()) >= spec.size:
            raise self.fail(
                f"task {task!r}, tensor {spec.name!r}: index {int(local.max())} is out of bounds for shape {spec.shape}"
            )
        if not bool((local[1:] > local[:-1]).all()):
            raise self.fail(f"task {task!r}, tensor {spec.name!r}: its indices are not sorted without repeats")
        return local + spec.offset

    def owned(self, space: ParameterSpace, k: int, task: str) -> tuple[Region, Tensor]:
        indices, values = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=space.tensors[0].dtype)]
        for spec in space.tensors:
            key = f"owned/{k}/{spec.name}"
            if (f"{key}/index" in self.tensors) != (f"{key}/value" in self.tensors):
                raise self.fail(f"task {task!r}, tensor {spec.name!r}: indices and values do not come in pairs")
            if f"{key}/index" not in self.tensors:
                continue
            index, value = self.index(f"{key}/index", spec, task), self.tensors[f"{key}/value"]
            if value.dtype != spec.dtype or value.shape != index.shape:
                raise self.fail(
                    f"task {task!r}, tensor {spec.name!r}: expected {spec.dtype} values of shape {tuple(index.shape)}, got "
                    f"{value.dtype} of shape {tuple(value.shape)}"
                )
            indices.append(index)
            values.append(value)
        return Region(torch.cat(indices)), torch.cat(values)

    def shared(self, space: ParameterSpace, k: int, task: str) -> Region:
        found = [
            self.index(key, spec, task)
            for spec in space.tensors
            if (key := f"shared/{k}/{spec.name}/index") in self.tensors
        ]
        return Region(torch.cat([torch.empty(0, dtype=torch.int64), *found]))


# -- Applying it -----------------------------------------------------------------------------------------


class LedgerSwitch:
    """Moves one model between θ_pre and the union grafts of a ledger, bit for bit.

    Owned regions are disjoint, so going from one task to a later one writes the records between them, and going back
    writes θ_pre there: a switch touches the entries it must change and nothing else. The ledger may grow meanwhile.

    Args:
        ledger: the records.
        backbone: the base model; it must hold θ_pre now.
        check: compare layout and fingerprint with the ledger's first (reads the whole model once).

    Raises:
        LedgerError: the ledger belongs to another model.
    """

    def __init__(self, ledger: Ledger, backbone: nn.Module, *, check: bool = True) -> None:
        self.ledger = ledger
        self._backbone = backbone
        self._pre: list[Graft] = []
        self._buffers_pre = {name: buffer.clone() for name, buffer in persistent_buffers(backbone).items()}
        self._stage = 0
        if check:
            _check_belongs(ledger, backbone)

    @property
    def stage(self) -> int:
        """How many records the model carries now."""
        return self._stage

    def to(self, stage: int) -> None:
        """Make the model carry the first ``stage`` records: 0 is θ_pre, ``len(ledger.records)`` the union of all."""
        space, records = self.ledger.space, self.ledger.records
        if not 0 <= stage <= len(records):
            raise LedgerError(f"The ledger has {len(records)} records, there is no stage {stage}.")
        while self._stage < stage:
            record = records[self._stage]
            if len(self._pre) == self._stage:
                self._pre.append(Graft.of(self._backbone, space, record.owned.region))
            record.owned.apply_(self._backbone, space)
            self._stage += 1
        while self._stage > stage:
            self._stage -= 1
            self._pre[self._stage].apply_(self._backbone, space)
        self._set_buffers(records[stage - 1].buffers if stage else {})

    def to_task(self, task: str) -> None:
        """Make the model the one that infers ``task``: the union of all regions up to its own."""
        self.to(self.ledger.position(task) + 1)

    def committed(self) -> None:
        """Take note that the model already carries the record just appended, with ``θ_pre`` known from `remember`."""
        self._stage = len(self.ledger.records)

    def remember(self, region: Region) -> None:
        """Keep θ_pre at ``region``, which is about to be trained as the next record's owned region."""
        del self._pre[len(self.ledger.records) :]
        self._pre.append(Graft.of(self._backbone, self.ledger.space, region))

    def revert_uncommitted(self) -> None:
        """Write θ_pre at the region last given to `remember`, whose training is not committed."""
        self._pre[len(self.ledger.records)].apply_(self._backbone, self.ledger.space)

    @contextmanager
    def task(self, task: str) -> Iterator[nn.Module]:
        """The model as it infers ``task``, inside; θ_pre after."""
        self.to_task(task)
        try:
            yield self._backbone
        finally:
            self.to(0)

    @torch.no_grad()
    def _set_buffers(self, wanted: Mapping[str, Tensor]) -> None:
        for name, buffer in persistent_buffers(self._backbone).items():
            buffer.copy_(wanted.get(name, self._buffers_pre[name]))


def changed_buffers(backbone: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The persistent buffers that are not what they were."""
    return {
        name: buffer for name, buffer in persistent_buffers(backbone).items() if not torch.equal(buffer, before[name])
    }


def _check_belongs(ledger: Ledger, backbone: nn.Module) -> None:
    from forgetfree.models.loading import fingerprint_of

    layout_hash = ParameterSpace.of(backbone).layout_hash
    if layout_hash != ledger.space.layout_hash:
        raise LedgerError(
            f"The ledger belongs to a model of another layout: expected layout hash {ledger.space.layout_hash[:12]}, the "
            f"model's is {layout_hash[:12]}. Load the model the stream was trained on."
        )
    fingerprint = fingerprint_of(backbone)
    if fingerprint != ledger.fingerprint:
        raise LedgerError(
            f"The ledger belongs to other weights: expected fingerprint {ledger.fingerprint[:12]}, the model's is "
            f"{fingerprint[:12]}. Load the very weights the stream was trained from."
        )
