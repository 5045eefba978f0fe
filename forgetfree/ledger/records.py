"""The record of a task in a ledger, and a ledger's file: a `forgetfree.tensor_file.TaskFile`, with a record a task.

    index     the flat indices of the entries that the task owns, and
    value     their values
    shared    the flat indices of those entries of γ_k that earlier tasks own
    readout/… the tensors of its readout
    buffer/…  the buffers that training changed

The metadata name the composition, the parameter space's layout, the base model's fingerprint and the binding (see
`forgetfree.ledger.binding`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

import torch
from pydantic import Field
from torch import Tensor

from forgetfree import registry
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region, entries_of, entry_tensors, index_dtype, region_of
from forgetfree.errors import LedgerError, RegionError
from forgetfree.json_file import check, checked
from forgetfree.ledger.graft import Graft
from forgetfree.tasks import TaskDefinition
from forgetfree.tensor_file import TaskFile, TaskTensors, grouped

#: What a task is inferred with on top of θ_pre: the ``union`` of all regions up to its own; its own region with the
#: entries in it that earlier tasks own (``selection``); or its own values ``alone``, so that regions may overlap. In ``auto``
#: some tasks stand alone, and each of the others is inferred with the union of theirs up to its own.
Composition = Literal["union", "selection", "alone", "auto"]
COMPOSITIONS: tuple[Composition, ...] = get_args(Composition)


@dataclass(frozen=True)
class Record:
    """What one task added to the ledger.

    Attributes:
        task: its name.
        region: γ_k, as localized.
        owned: γ_k without what earlier tasks own, with the trained values; all of γ_k where the task stands alone.
        sparsity: the share of the space that γ_k was allowed.
        readout: the task's own readout tensors by name.
        buffers: the model's buffers that training changed, by name.
        definition: the task's labels in order, its prompt and so on; ``None`` if its rows are no texts.
        classes: the numbers of its labels in the readout, which may have other tasks' labels, too; empty: all of them.
        alone: in a ledger of composition ``auto``: whether the task stands on θ_pre alone, apart from the union.
    """

    task: str
    region: Region
    owned: Graft
    sparsity: float
    readout: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    definition: TaskDefinition | None = None
    classes: tuple[int, ...] = ()
    alone: bool = False

    @property
    def shared(self) -> Region:
        """The entries of γ_k that earlier tasks own."""
        return self.region - self.owned.region if len(self.region) > len(self.owned.region) else Region.empty()

    @property
    def own_readout(self) -> dict[str, Tensor]:
        """The rows of the readout that are the task's own labels."""
        return rows_of(self.readout, self.classes)


def rows_of(readout: Mapping[str, Tensor], classes: Sequence[int]) -> dict[str, Tensor]:
    """Return the rows of a readout's tensors that are of some classes; all rows where it has no others."""
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
    """What the file says of a record besides its tensors: see `Record`."""

    sparsity: Annotated[float, Field(ge=0, le=1)]
    definition: TaskDefinition | None
    classes: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...]
    alone: bool

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  # pydantic's name


def tensors_of_record(space: ParameterSpace, record: Record) -> TaskTensors:
    """Return a record as the file holds it."""
    tensors = entry_tensors(space, record.owned.region, record.owned.values)
    if len(shared := record.shared):
        tensors["shared"] = shared.indices.to(index_dtype(space))
    tensors |= grouped(readout=record.readout, buffer=record.buffers)
    fields = {"sparsity": record.sparsity, "classes": record.classes, "alone": record.alone}
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
        raise ValueError(f"what it says of task {task!r} cannot be read ({error})") from error
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
        fields.alone,
    )


def _check_definition(fields: RecordFields, task: str) -> None:
    """Check a task's definition and the numbers of its labels."""
    classes, definition = fields.classes, fields.definition
    check("classes", classes, len(set(classes)) == len(classes), "different numbers")
    if definition is not None:
        registry.check_stored(TaskDefinition.of_fields(definition.fields))
        own = definition.name == task and len(classes) in (0, len(definition.labels))
        check("definition", definition.name, own, f"that of task {task!r} with a class for each label, or none")
