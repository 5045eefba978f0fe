"""The ledger: the append-only list of records, each task's parent, and each entry's owner.

Its file is a `forgetfree.tensor_file.TaskFile`, with one record per task:

    index     the flat indices of the entries that the task owns (see `forgetfree.core.regions.stored_indices`), and
    value     their values
    shared    the indices of the entries of γ_k that earlier tasks own
    readout/… the tensors of its readout
    buffer/…  the buffers that training changed

The metadata hold the composition, the parameter space's layout, the base model's fingerprint, a language model's head, and
the binding (see `forgetfree.ledger.binding`); if values are differences beside the weights, also the effect and the weights'
dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field
from torch import Tensor, nn

from forgetfree import registry
from forgetfree.core.families import IN_OWN_BODY
from forgetfree.core.fingerprint import body_fingerprint
from forgetfree.core.linear_layers import dtype_of_rest, is_quantised, is_sharded, space_of_layers
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.readout_model import BY_WORDS, body_of
from forgetfree.core.regions import Region, entries_of, entry_tensors, region_of, stored_indices
from forgetfree.display import brief
from forgetfree.errors import LedgerError, ModelError, RegionError, TaskError, UnknownNameError, nearest
from forgetfree.files import StrPath
from forgetfree.hub_file import HubFile
from forgetfree.json_file import check, checked
from forgetfree.ledger.binding import Binding, head_digest
from forgetfree.ledger.graft import Graft, GraftOrigin
from forgetfree.ledger.owners import OwnersBelow
from forgetfree.tasks import TaskDefinition
from forgetfree.tensor_file import DTYPES, StoredTasks, TaskFile, TaskTensors, grouped, not_finite

#: The values with which a task is inferred, on top of θ_pre. ``parents``: its parent's values and its own; a task without a
#: parent stands on θ_pre. So if each task stands on the one before it, tasks are inferred with unions. ``selection``: the
#: values in its own region, including the entries that earlier tasks own.
Composition = Literal["parents", "selection"]
COMPOSITIONS: tuple[Composition, ...] = get_args(Composition)
#: How tasks take effect: their values are ``written`` into the weights; or their values are differences that linear layers add
#: to their outputs, ``beside`` the weights (see `forgetfree.core.differences`).
Effect = Literal["written", "beside"]
EFFECTS: tuple[Effect, ...] = get_args(Effect)


@dataclass(frozen=True)
class Record:
    """The entries that one task added to the ledger.

    Attributes:
        task: its name.
        region: γ_k, as localized.
        owned: γ_k without the entries of the tasks below (in a selection: of all earlier tasks), with the trained values.
        sparsity: the maximum size of γ_k, as a share of the space.
        readout: the task's own readout tensors by name.
        buffers: the model's buffers that training changed, by name.
        definition: the task's labels in order, its prompt and so on; ``None`` if its rows are not texts.
        classes: the numbers of its labels in the readout, which may have other tasks' labels, too; empty: all labels.
        parent: the earlier task that this one stands on; empty: none, it stands on θ_pre.
    """

    task: str
    region: Region
    owned: Graft
    sparsity: float
    readout: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    definition: TaskDefinition | None = None
    classes: tuple[int, ...] = ()
    parent: str = ""

    @property
    def shared(self) -> Region:
        """The entries of γ_k that other tasks own."""
        return self.region - self.owned.region if len(self.region) > len(self.owned.region) else Region.empty()

    @property
    def own_readout(self) -> dict[str, Tensor]:
        """The rows of the readout for the task's own labels."""
        return rows_of(self.readout, self.classes)


def rows_of(readout: Mapping[str, Tensor], classes: Sequence[int]) -> dict[str, Tensor]:
    """Return the rows of a readout's tensors for some classes; all rows if it has no others."""
    rows, last = list(classes), max(classes, default=-1)
    return {name: tensor[rows] if 0 <= last < len(tensor) else tensor for name, tensor in readout.items()}


# -- Its file -------------------------------------------------------------------------------------------

FORMAT = "forgetfree.ledger"
FILE = TaskFile(
    LedgerError,
    "Restore it from a copy, or run the stream again.",
    FORMAT,
    "ledger",
    keys=("composition", "layout", "fingerprint"),
    groups=("index", "value", "shared", "readout", "buffer"),
)


@dataclass(frozen=True)
class RecordFields:
    """The fields of a record in the file, besides its tensors: see `Record`."""

    sparsity: Annotated[float, Field(ge=0, le=1)]
    definition: TaskDefinition | None
    classes: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...]
    parent: str

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  # pydantic's name


def tensors_of_record(space: ParameterSpace, record: Record) -> TaskTensors:
    """Return a record as the file holds it."""
    tensors = entry_tensors(space, record.owned.region, record.owned.values)
    if len(shared := record.shared):
        tensors["shared"] = stored_indices(space, shared)
    tensors |= grouped(readout=record.readout, buffer=record.buffers)
    fields = {"sparsity": record.sparsity, "classes": record.classes, "parent": record.parent}
    return TaskTensors(record.task, tensors, fields | {"definition": record.definition and record.definition.fields})


def record_of(space: ParameterSpace, stored: TaskTensors) -> Record:
    """Return the record that the file holds.

    Raises:
        ValueError: it is not sound, or does not fit the space.
    """
    task = stored.task
    try:
        fields = checked(RecordFields, stored.fields)
        _check_definition(fields, task)
    except ValueError as error:
        raise ValueError(f"the fields of task {task!r} cannot be read ({error})") from error
    try:
        region, values = entries_of(space, stored.tensors)
        gamma = region
        if "shared" in stored.tensors:
            shared = region_of(space, stored.tensors, "shared")
            gamma = Region(torch.cat([region.indices, shared.indices]).sort().values)
    except (RegionError, ValueError) as error:
        raise ValueError(f"task {task!r}: {error}") from error
    return Record(
        task,
        gamma,
        Graft(region, values),
        fields.sparsity,
        stored.group("readout"),
        stored.group("buffer"),
        fields.definition,
        fields.classes,
        fields.parent,
    )


def _check_definition(fields: RecordFields, task: str) -> None:
    """Check a task's definition and the numbers of its labels."""
    classes, definition = fields.classes, fields.definition
    check("classes", classes, len(set(classes)) == len(classes), "different numbers")
    if definition is not None:
        registry.check_stored(TaskDefinition.of_fields(definition.fields))
        own = definition.name == task and len(classes) in (0, len(definition.labels))
        check("definition", definition.name, own, f"that of task {task!r} with a class for each label, or none")


class Ledger(HubFile, tags=["forgetfree", "ledger"]):
    """The records of a stream on one base model.

    A task owns the entries of its region that no task below it owns. The tasks below are its parent and all further ancestors.
    So tasks that do not stand on each other may own the same entry; removing a task changes only the tasks that stand on it.

    >>> ledger = Ledger.of_model(torch.nn.Linear(4, 3))
    >>> len(ledger.space), ledger.tasks
    (15, [])

    Args:
        space: the parameter space of the base model.
        fingerprint: the base model's fingerprint, see `forgetfree.core.fingerprint.fingerprint_of`.
        composition: the values with which a task is inferred, see `Composition`.
        binding: the other dependencies of answers; ``None`` if they are not known, as for rows that are not texts.
        head: if the space belongs to a language model's body: the digest of the head, see
            `forgetfree.ledger.binding.head_digest`; empty if no task had one.
        effect: how the tasks take effect.
        dtype: the dtype of the weights if tasks take effect beside them; empty if tasks are written: the space has it.
    """

    noun = "ledger"
    use = (
        "from forgetfree import Ledger, Predictor\n\n"
        'ledger = Ledger.from_pretrained("OWNER/NAME")\n'
        'predictor = Predictor.of_ledger(ledger, "BASE MODEL")\n'
        'print(predictor.answer(ledger.tasks[0], ["a text"]))'
    )

    def __init__(
        self,
        space: ParameterSpace,
        fingerprint: str,
        composition: Composition = "parents",
        binding: Binding | None = None,
        head: str = "",
        effect: Effect = "written",
        dtype: str = "",
    ) -> None:
        self.space = space
        self.fingerprint = fingerprint
        self.composition: Composition = composition
        self.binding = binding
        self.head = head
        self.effect: Effect = effect
        self.dtype = dtype
        self._records: list[Record] = []
        self._frozen: tuple[Record, ...] | None = ()  # the same records, or ``None`` after an append
        self._stored: list[TaskTensors] = []  # records in the form of the file, made on demand
        self._positions: dict[str, int] = {}
        self._parents: list[int] = [0]  # by stage: the stage of its parent
        self._owners = OwnersBelow()

    @classmethod
    def of_model(
        cls, model: nn.Module, *, graftable: str | None = None, effect: Effect | Literal["auto"] = "auto"
    ) -> Ledger:
        """Return an empty ledger for a model that holds θ_pre, for tasks that are learned inside `forgetfree.learning`.

        Tensors are named as in the model's body, so that the ledger is the same with any head.

        >>> ledger = Ledger.of_model(AutoModelForCausalLM.from_pretrained(DIR))  # doctest: +SKIP

        Args:
            model: a model of transformers, with a head or without; or any module.
            graftable: regular expression; only tensors with a matching name may be trained.
            effect: ``written``: tasks are written into the weights, exactly and without cost when they answer. ``beside``:
                weights and biases of linear layers have differences beside them, in float32, and the weights are only read.
                ``auto``: ``beside`` if weights are quantised or sharded, and else ``written``.

        Raises:
            RegionError: no tensor is left.
            ModelError: ``effect`` is ``written`` and weights are quantised or sharded; or a module reads a weight without
                calling the layer's ``forward``, so that nothing can take effect beside it.
        """
        if effect not in (*EFFECTS, "auto"):
            raise UnknownNameError("effect", effect, (*EFFECTS, "auto"))
        body = body_of(model)
        apart = is_quantised(body) or is_sharded(body)
        if apart and effect == "written":
            raise ModelError(
                f"The weights of this {type(body).__name__} are quantised or sharded, so nothing is written into them. Let "
                "tasks take effect beside them: effect='beside', the default here."
            )
        if apart or effect == "beside":
            effect = "beside"
            space = space_of_layers(body, graftable or ".")
        else:
            effect = "written"
            space = ParameterSpace.of(body, include=(graftable or ".",))
        dtype = str(dtype_of_rest(body)).removeprefix("torch.") if effect == "beside" else ""
        return cls(space, body_fingerprint(model), head=head_digest(model), effect=effect, dtype=dtype)

    @property
    def records(self) -> tuple[Record, ...]:
        """All records, in the order in which the tasks were learned."""
        if self._frozen is None:
            self._frozen = tuple(self._records)
        return self._frozen

    @property
    def tasks(self) -> list[str]:
        """The names of the learned tasks, in order."""
        return list(self._positions)

    def position(self, task: str) -> int:
        """Return the position of a task in the order, from 0.

        Raises:
            TaskError: the ledger does not hold it.
        """
        if task not in self._positions:
            known = ", ".join(self.tasks) or "none"
            raise TaskError(
                f"The ledger holds no task {task!r}.{nearest(task, self.tasks)} It holds: {known}. Train the task first."
            )
        return self._positions[task]

    def stage(self, task: str) -> int:
        """Return the number of a task's record, from 1; 0 for the empty name, which is θ_pre.

        Raises:
            TaskError: the ledger does not hold it.
        """
        return self.position(task) + 1 if task else 0

    @property
    def last(self) -> str:
        """The task that was learned last; empty if there is none."""
        return self._records[-1].task if self._records else ""

    def owned(self) -> Region:
        """Return the entries that any task owns; `taken` returns the entries of one task and its ancestors."""
        owned = [record.owned.region.indices for record in self._records]
        return Region(torch.unique(torch.cat([Region.empty().indices, *owned])))

    def owners(self, region: Region, parent: str = "") -> Tensor:
        """Return for each entry of ``region`` the position of the task at or below ``parent`` that owns it, or −1: ``(s,)``.

        In a selection, where tasks have no parent, all tasks count.

        Raises:
            RegionError: the region does not fit the space.
        """
        self.space.check(region.indices)
        return self._owners.among(region.indices, self._below(parent))

    def free(self, region: Region, parent: str = "") -> Region:
        """Return the entries of ``region`` that the next task would own: no task at or below its parent owns them.

        Args:
            region: γ.
            parent: the next task's parent; empty: θ_pre.
        """
        return Region(region.indices[self.owners(region, parent) < 0])

    def taken(self, parent: str = "") -> Region:
        """Return the entries that are not free for the next task, see `free`: ``parent`` or its ancestors own them."""
        return Region(self._owners.owned(self._below(parent)))

    def _below(self, parent: str) -> int:
        """Return the stage at and below which entries are not free for a task that stands on ``parent``."""
        stage = self.stage(parent)
        return len(self._records) if self.composition == "selection" else stage

    def way(self, old: int, new: int) -> tuple[list[int], list[int]]:
        """Return the positions of the records to undo and of the records to write, in this order, from one stage to another.

        >>> ledger = Ledger.of_model(torch.nn.Linear(4, 3))
        >>> ledger.way(0, 0)
        ([], [])
        """
        undone, written = [], []
        while old != new:  # parents come before their children
            if old > new:
                undone.append(old - 1)
                old = self._parents[old]
            else:
                written.append(new - 1)
                new = self._parents[new]
        return undone, written[::-1]

    def common(self, one: int, other: int) -> int:
        """Return the last stage that both stages have as an ancestor, or are themselves."""
        while one != other:
            one, other = (self._parents[one], other) if one > other else (one, self._parents[other])
        return one

    def parts(self, stage: int) -> list[int]:
        """Return the positions of the records that together hold a task's entries on top of θ_pre.

        Args:
            stage: the number of the task's record, from 1; 0: no task.

        Returns:
            The task's ancestors, the first of which stands on θ_pre, and itself. In a ledger of composition ``selection``,
            where records share values, a task is one part.
        """
        return self.way(0, stage)[1]

    def stands_on(self, task: str, other: str) -> bool:
        """Return whether a task depends on ``other``: it stands on it or, in a selection, may share its values."""
        if self.composition == "selection":
            return self.position(task) > self.position(other)
        return task != other and self.position(other) in self.parts(self.stage(task))

    def graft(self, task: str) -> Graft:
        """Return a copy of the values with which ``task`` is inferred on top of θ_pre, to be saved and applied.

        If the ledger has no binding with a tokenizer, or the record no definition, it has only region and values.
        """
        last = self.position(task)
        if self.effect == "beside":
            raise LedgerError(
                "A graft has values that are written into weights, and this ledger has differences beside them. Answer by "
                "forgetfree.answering, TaskSwitch or Predictor; forgetfree export writes a model of a task."
            )
        record = self._records[last]
        if self.composition == "selection":
            graft = self._selected(record.region)
        else:
            records = [self._records[part] for part in self.parts(last + 1)]
            indices, order = torch.cat([each.owned.region.indices for each in records]).sort()
            graft = Graft(Region(indices), torch.cat([each.owned.values for each in records])[order])
        return replace(graft, **self._graft_attributes(record, len(graft.region)))

    def _graft_attributes(self, record: Record, entries: int) -> dict[str, Any]:
        """Return the attributes of a record's graft besides region and values."""
        binding, space, cut = self.binding, self.space, 0
        if binding is None or record.definition is None or not binding.tokenizer:
            return {}
        first = {spec.name.partition(".")[0] for spec in space.tensors}
        # A run's language model has its body as an attribute; T5 and models without such an attribute are their own bodies.
        if binding.readout in BY_WORDS and not binding.architecture and len(first) == 1 and not first <= IN_OWN_BODY:
            cut = len(min(first)) + 1
            space = ParameterSpace(tuple(replace(spec, name=spec.name[cut:]) for spec in space.tensors))
        share = entries / len(space)
        origin = GraftOrigin(record.definition, "", self.fingerprint, share, binding, head=self.head)
        buffers = {name[cut:]: buffer for name, buffer in record.buffers.items()}
        return {"space": space, "readout": record.own_readout, "buffers": buffers, "origin": origin}

    def _selected(self, region: Region) -> Graft:
        """Return a region with the values from the owners of its entries."""
        values, owners = torch.empty(len(region), dtype=self.space.dtype, device="cpu"), self.owners(region)
        for owner in sorted(set(owners.tolist())):
            mine, owned = owners == owner, self._records[owner].owned
            values[mine] = owned.values[torch.searchsorted(owned.region.indices, region.indices[mine])]
        return Graft(region, values)

    def overlap(self) -> list[list[float]]:
        """Return ``|γ_i ∩ γ_j| / |γ_j|`` for all pairs of localized regions: ``T × T`` (paper, fig. 8)."""
        regions = [record.region for record in self._records]
        return [[len(one & other) / max(1, len(other)) for other in regions] for one in regions]

    def append(self, record: Record) -> None:
        """Append the record of a task. Records never change afterwards.

        Raises:
            TaskError: the task is already in it.
            LedgerError: the record takes an entry that is owned, omits a free one of its region, or does not fit the
                space.
        """
        try:
            owners = self.owners(record.region, record.parent)
        except (RegionError, TaskError) as error:
            raise LedgerError(f"Record of task {record.task!r}: {error}") from error
        below = self._below(record.parent)
        self._append(record, owners)
        self._owners.add(record.owned.region.indices, below)

    def _append(self, record: Record, owners: Tensor) -> None:
        """Append a record, given the present owners of the entries of γ_k."""
        self.check_new(record.task)
        record = _own(record, self.space.dtype)
        where = f"Record of task {record.task!r}"
        if record.parent and self.composition == "selection":
            raise LedgerError(
                f"{where} stands on {record.parent!r}, but in a ledger of selections no task has a parent."
            )
        expected = Region(record.region.indices[owners < 0])
        if record.owned.region != expected:
            if len(record.owned.region & Region(record.region.indices[owners >= 0])):
                raise LedgerError(f"{where} takes entries that tasks below it own. Commit ledger.free(γ, parent).")
            raise LedgerError(
                f"{where} must own the entries of its region that no task below it owns: expected {len(expected)} entries, "
                f"got {len(record.owned.region)}."
            )
        if record.owned.values.shape != (len(record.owned.region),):
            raise LedgerError(
                f"{where} needs one value an entry: expected shape ({len(record.owned.region)},), got "
                f"{tuple(record.owned.values.shape)}."
            )
        defined = record.definition
        classes = len(record.classes)
        if defined is not None and (defined.name != record.task or classes not in (0, len(defined.labels))):
            raise LedgerError(
                f"{where} needs its own definition, and a class for each label or none: expected {record.task!r} with "
                f"{classes} labels, got {defined.name!r} with {len(defined.labels)}."
            )
        if damaged := not_finite({"values": record.owned.values, **record.readout, **record.buffers}):
            raise LedgerError(
                f"{where}: tensor {damaged!r} holds NaN or infinity. Train the task again, with a lower rate."
            )
        self._parents.append(self.stage(record.parent))
        self._positions[record.task] = len(self._records)
        self._records.append(record)
        self._frozen = None

    def check_new(self, task: str) -> None:
        """Raise ``TaskError`` if the ledger already holds ``task``, or it has no name."""
        if not task:
            raise TaskError("A task needs a name: the empty one is that of θ_pre.")
        if task in self._positions:
            raise TaskError(
                f"Task {task!r} is already in the ledger (record {self.position(task)}), and recorded tasks are frozen. "
                "Train it under another name."
            )

    def of_tasks(self, tasks: Collection[str]) -> Ledger:
        """Return a ledger with the records of some tasks alone, in their order.

        Raises:
            TaskError: the ledger does not hold one of them.
            LedgerError: one of them stands on a task that is left out, or shares its entries.
        """
        ledger = Ledger(
            self.space, self.fingerprint, self.composition, self.binding, self.head, self.effect, self.dtype
        )
        for position in sorted(map(self.position, tasks)):
            ledger.append(self._records[position])
        return ledger

    def __repr__(self) -> str:
        owned = {record.task: len(record.owned.region) for record in self.records}
        kind = "" if self.composition == "parents" else f"composition={self.composition!r}, "
        effect = "" if self.effect == "written" else f"effect={self.effect!r}, "
        parents = {record.task: record.parent for record in self.records if record.parent}
        return f"Ledger({kind}{effect}owned_entries={owned}{f', parents={parents}' if parents else ''})"

    @property
    def sizes(self) -> list[int]:
        """The size of each task's tensors in the file, in bytes."""
        return [each.size_in_bytes for each in self._tensors()]

    @property
    def size_in_bytes(self) -> int:
        """The size of all tensors in the file, in bytes."""
        return sum(self.sizes)

    def _tensors(self) -> list[TaskTensors]:
        self._stored += [tensors_of_record(self.space, record) for record in self._records[len(self._stored) :]]
        return self._stored

    def save(self, path: StrPath) -> None:
        """Write the ledger atomically: the file is the old one or the new one, never a part."""
        about = {"composition": self.composition, "layout": self.space.layout, "fingerprint": self.fingerprint}
        known = {"binding": self.binding.json if self.binding else "", "head": self.head}
        known |= {"effect": self.effect, "dtype": self.dtype} if self.effect != "written" else {}
        FILE.write_tasks(Path(path), self._tensors(), about | {key: value for key, value in known.items() if value})

    @classmethod
    def load(cls, path: StrPath) -> Ledger:
        """Read a ledger and check all of it: layout, bounds, order, disjointness, dtypes, checksums.

        Raises:
            LedgerError: the file is missing or not valid; the message gives the reason. It is never half-read.
        """
        path = Path(path)
        return FILE.load(path, cls._of)

    def facts(self) -> list[dict[str, Any]]:
        """Return fingerprint, tasks and labels, for the card on the hub."""
        of_tasks = [
            {
                "task": record.task,
                "labels": record.definition.labels if record.definition else (),
                "entries": len(record.owned.region),
                **({"parent": record.parent} if record.parent else {}),
            }
            for record in self.records
        ]
        return [{"fingerprint": self.fingerprint, "graftable": len(self.space)}, *of_tasks]

    @classmethod
    def _of(cls, stored: StoredTasks) -> Ledger:
        """Return the ledger that a file holds; raise ``ValueError`` if its records do not fit together."""
        about, composition = stored.metadata, stored.metadata["composition"]
        if composition not in COMPOSITIONS:
            raise ValueError(f"its composition is {brief(composition)}, expected one of {', '.join(COMPOSITIONS)}")
        try:
            binding = Binding.of_json(about["binding"]) if "binding" in about else None
        except ValueError as error:
            raise ValueError(f"its binding cannot be read ({error})") from error
        if (effect := about.get("effect", "written")) not in EFFECTS:
            raise ValueError(f"its effect is {brief(effect)}, expected one of {', '.join(EFFECTS)}")
        space, dtype = ParameterSpace.of_layout(about["layout"]), about.get("dtype", "")
        if dtype not in (("",) if effect == "written" else DTYPES):
            raise ValueError(f"the dtype of its weights is {brief(dtype)}, expected one such as float32")
        ledger = cls(space, about["fingerprint"], composition, binding, about.get("head", ""), effect, dtype)
        records, stages = [record_of(space, each) for each in stored], {"": 0}
        for stage, record in enumerate(records, 1):
            if record.parent not in stages:
                raise ValueError(f"task {record.task!r} stands on {brief(record.parent)}, which is not before it")
            stages.setdefault(record.task, stage)
        shares = composition == "selection"  # all earlier tasks are below
        parents = range(len(records)) if shares else [stages[record.parent] for record in records]
        ledger._owners, below = OwnersBelow.of([record.region for record in records], parents)
        for record, owners in zip(records, below, strict=True):
            try:
                ledger._append(record, owners)
            except (TaskError, LedgerError) as error:
                reason = str(error).partition(". ")[0]  # without its remedy, which is about training
                if int((owners < 0).sum()) > len(record.owned.region):
                    reason = f"task {record.task!r} shares entries that no task below it owns"
                raise ValueError(reason) from error
        return ledger


def _own(record: Record, dtype: torch.dtype) -> Record:
    """Return a record with copies on the CPU, which later changes cannot reach; its values are in the space's dtype."""

    def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

    owned = Graft(record.owned.region, record.owned.values.detach().to("cpu", dtype, copy=True))
    return replace(record, owned=owned, readout=copies(record.readout), buffers=copies(record.buffers))
