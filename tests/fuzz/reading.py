"""Files that are read alone: the reader of each kind, its error, and a check that the content is sound.

The checks are independent of the readers' own checks. Files that are read as part of a directory are in `fuzz.taken`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from forgetfree import registry
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.readout_model import ReadoutKind
from forgetfree.core.regions import Region
from forgetfree.data.folders import read_source
from forgetfree.errors import DataError, ForgetfreeError, GraftError, LedgerError, RunError
from forgetfree.kinds.classification import with_source
from forgetfree.ledger.binding import Binding
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.ledger import Ledger
from forgetfree.results.report.run_report import render
from forgetfree.results.runs import RunRecord, read_run
from forgetfree.results.table import Results
from forgetfree.tasks import TaskDefinition


def bits(value: Any) -> Any:
    """Return content that compares by ``==``, with tensors as dtype, shape and bytes."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Region):
        return bits(value.indices)
    if isinstance(value, ParameterSpace):
        return value.layout
    if isinstance(value, Mapping):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [bits(each) for each in value]
    if isinstance(value, RunRecord):
        return bits([value.about.model_dump(), *map(value.outcome, value.runs)])
    if isinstance(value, Graft):
        return bits(vars(value))
    if hasattr(value, "__dataclass_fields__"):
        return bits({name: getattr(value, name) for name in value.__dataclass_fields__})
    if isinstance(value, float):
        return value.hex()
    return value


def finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(each.double()).all()) for each in tensors if each.is_floating_point())


def within(indices: Tensor, size: int) -> bool:
    """Return whether the indices are sorted, without repeats and in range."""
    listed = indices.tolist()
    return listed == sorted(set(listed)) and all(0 <= index < size for index in listed)


def is_definition(task: TaskDefinition) -> bool:
    """Accept a kind of any name: packages add kinds, and an unknown one is refused only when the task is requested."""
    labels = task.labels
    return bool(task.kind) and all(isinstance(each, str) for each in labels) and len(set(labels)) > 1


def sound_binding(binding: Binding) -> None:
    assert Binding.of_json(binding.json) == binding
    assert binding.max_length >= 0 and binding.readout in get_args(ReadoutKind)
    assert isinstance(json.loads(binding.network), dict)


def sound_space(space: ParameterSpace) -> None:
    names = [spec.name for spec in space.tensors]
    assert len(set(names)) == len(names) and len(space) < 2**41
    assert all(type(side) is int and side >= 0 for spec in space.tensors for side in spec.shape)
    assert all(spec.dtype.is_floating_point for spec in space.tensors)
    assert ParameterSpace.of_layout(space.layout) == space


# -- Ledgers and grafts ----------------------------------------------------------------------------------


def ledger_content(ledger: Ledger) -> Any:
    return bits([ledger.space, ledger.fingerprint, ledger.composition, ledger.binding, ledger.records])


def sound_ledger(ledger: Ledger, path: Path) -> None:
    sound_space(ledger.space)
    taken: set[int] = set()
    answered = {"": set[int]()}  # for each task, the entries of its model
    assert len(set(ledger.tasks)) == len(ledger.records)
    for record in ledger.records:
        region, owned = record.region.indices.tolist(), record.owned.region.indices.tolist()
        assert within(record.region.indices, len(ledger.space)) and within(
            record.owned.region.indices, len(ledger.space)
        )
        below = taken if ledger.composition == "selection" else answered[record.parent]
        assert set(owned) == set(region) - below
        answered[record.task] = below | set(owned)
        taken |= set(owned)
        assert len(record.owned.values) == len(owned) and 0 <= record.sparsity <= 1
        assert finite([record.owned.values, *record.readout.values(), *record.buffers.values()])
        assert len(set(record.classes)) == len(record.classes) and all(0 <= label < 2**31 for label in record.classes)
        if record.definition:
            assert is_definition(record.definition) and record.definition.name == record.task
            assert len(record.definition.labels) == len(record.classes)
    if ledger.binding:
        sound_binding(ledger.binding)
    ledger.save(path)
    assert ledger_content(Ledger.load(path)) == ledger_content(ledger)


def sound_graft(graft: Graft, path: Path) -> None:
    assert graft.space is not None
    sound_space(graft.space)
    assert within(graft.region.indices, len(graft.space)) and len(graft.values) == len(graft.region)
    assert finite([graft.values, *graft.readout.values(), *graft.buffers.values()])
    if graft.origin is not None:
        origin = graft.origin
        assert is_definition(origin.task) and 0 <= origin.sparsity <= 1
        assert all(isinstance(each, str) for each in (origin.model, origin.fingerprint, origin.head))
        assert sorted(origin.classes) == list(range(len(origin.classes)))
        if origin.binding.network:
            sound_binding(origin.binding)
    graft.save(path)
    assert bits(Graft.load(path)) == bits(graft)


# -- Others ----------------------------------------------------------------------------------------------


def sound_results(results: Any, path: Path) -> None:
    table = Results([results])
    assert render(table, "markdown") and json.loads(render(table, "json"))
    for run in results.runs:
        matrix = table.values(run.strategy, run.seed)
        assert matrix.shape == (len(table.tasks) + 1, len(table.tasks))
        assert not ((matrix < 0) | (matrix > 1)).any()


def read_task_notes(path: Path) -> Any:
    notes = read_source(path.parent)
    return notes, with_source(registry.tasks()["sst2"], notes, path.parent)


def sound_notes(found: Any, path: Path) -> None:
    _, task = found
    assert registry.faults_of(task) == [] and all(label.strip() for label in task.labels)


# -- Kinds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    Attributes:
        file: pattern of the files of this kind below the folder of all samples; the first match is damaged.
        read: reads the file, as its user does.
        sound: asserts that the content is sound; the path is a temporary file.
        error: the only exception that the reader may raise.
        signed: whether the file has a checksum.
        content: returns the whole content to compare, tensors as bits.
    """

    file: str
    read: Callable[[Path], Any]
    sound: Callable[[Any, Path], None]
    error: type[ForgetfreeError]
    signed: bool = False
    content: Callable[[Any], Any] = bits


KINDS: dict[str, Kind] = {
    "ledger": Kind(
        "run/grafting-continual/seed-0/ledger.safetensors", Ledger.load, sound_ledger, LedgerError, True, ledger_content
    ),
    "graft": Kind("graft/bare-graft/seed-0/graft.safetensors", Graft.load, sound_graft, GraftError, True),
    "results of a run in one file": Kind("run.csv", read_run, sound_results, RunError),
    "notes of a data directory": Kind("data/sst2/source.json", read_task_notes, sound_notes, DataError),
}
