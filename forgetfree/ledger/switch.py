"""Switching one model between θ_pre and the tasks of a ledger, and checking that it is the ledger's model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from forgetfree.core.differences import Differences, answers_beside
from forgetfree.core.families import POOLER
from forgetfree.core.fingerprint import fingerprint_of, restored
from forgetfree.core.linear_layers import LinearLayers, dtype_of_rest, is_sharded
from forgetfree.core.parameters import (
    ParameterSpace,
    check_buffers,
    entries,
    load_tensors_,
    persistent_buffers,
    tensors_of,
)
from forgetfree.core.readout_model import in_evaluation_mode, part_named
from forgetfree.core.regions import Region
from forgetfree.errors import LedgerError, RegionError, TrainingError
from forgetfree.ledger.binding import Binding, has_other_head, network_differences, network_of
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.ledger import Ledger
from forgetfree.ledger.transaction import Transaction
from forgetfree.tasks import TaskDefinition
from forgetfree.tensor_file import checksum

#: The tasks that models answer now, by the part of a model to which its ledger belongs.
_IN_PLACE: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


class _Piece(NamedTuple):
    """The entries of one tensor that a record changes: the tensor's number; their numbers in it, θ_pre and values, ``(n,)``."""

    number: int
    local: Tensor
    pre: Tensor
    values: Tensor


class _Written:
    """Entries whose values are written into a model's tensors.

    Args:
        model: that the space is of.
        space: its parameter space.
    """

    def __init__(self, model: nn.Module, space: ParameterSpace) -> None:
        self._model, self._space = model, space
        #: The pieces of each part (see `Ledger.parts`) that was ever written.
        self._pieces: dict[int, list[_Piece]] = {}

    def change(self, undone: Sequence[int], written: Sequence[int], graft_of: Callable[[int], Graft]) -> None:
        """Write θ_pre at the entries of the parts ``undone``, and then the values of the parts ``written``."""
        for part in undone:
            self._write(part, pre=True)
        for part in written:
            if part not in self._pieces:
                self._keep(part, graft_of(part))
        for part in written:
            self._write(part)
        torch.clear_autocast_cache()  # a caller's autocast caches earlier weights in half precision

    def _keep(self, part: int, graft: Graft) -> None:
        """Keep the values of a part, and θ_pre at its entries, which the model holds now, by tensor."""
        pre, pieces = self.values(graft.region), []
        for number, local, where in self._space.split(graft.region.indices):
            tensor = self._tensor(number)
            pieces.append(
                _Piece(number, local.to(tensor.device), pre[where].to(tensor), graft.values[where].to(tensor))
            )
        self._pieces[part] = pieces

    @torch.no_grad()
    def _write(self, part: int, *, pre: bool = False) -> None:
        """Write a part's values into the model; with ``pre``, write θ_pre at its entries."""
        for piece in self._pieces[part]:
            tensor, values = self._tensor(piece.number), piece.pre if pre else piece.values
            if tensor.is_contiguous() and tensor.device == piece.local.device:
                tensor.view(-1).scatter_(0, piece.local, values.to(tensor.dtype))
            else:
                flat, at = entries(tensor, piece.local)
                flat[at] = values.to(flat)

    def _tensor(self, number: int) -> Tensor:
        """Return the model's current tensor: moving a model may replace its tensors."""
        parameters, name = self._owners[number]
        tensor = parameters[name]
        assert tensor is not None  # of a space
        return tensor

    @cached_property
    def _owners(self) -> list[tuple[dict[str, nn.Parameter | None], str]]:
        """The place of each tensor of the space in the model."""
        self._space.parameters(self._model)  # raises for a model that lacks one
        places = [spec.name.rpartition(".") for spec in self._space.tensors]
        return [(self._model.get_submodule(module)._parameters, name) for module, _, name in places]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that must not change while the model answers a task."""
        return [self._tensor(number) for number in range(len(self._space.tensors))]

    @property
    def names(self) -> set[str]:
        """The names of the tensors that are written."""
        return {spec.name for spec in self._space.tensors}

    def values(self, region: Region) -> Tensor:
        """Return the values ``(s,)`` of the model at the entries of a region."""
        return self._space.gather(self._model, region.indices)

    def put(self, region: Region, values: Tensor) -> None:
        """Write values ``(s,)`` at the entries of a region."""
        self._space.scatter_(self._model, region.indices, values)


class _Beside:
    """Entries with differences that linear layers add to their outputs: the model's tensors are only read.

    Args:
        model: that the space is of.
        space: its parameter space.
    """

    names: frozenset[str] = frozenset()

    def __init__(self, model: nn.Module, space: ParameterSpace) -> None:
        self._layers = LinearLayers(model, space)
        self._present = ExitStack()
        self._added: list[int] = []

    def change(self, undone: Sequence[int], written: Sequence[int], graft_of: Callable[[int], Graft]) -> None:
        """Let the layers add the parts ``written``, and no longer the parts ``undone``."""
        added = [part for part in self._added if part not in undone] + [*written]
        grafts, present = [graft_of(part) for part in added], ExitStack()
        if grafts:
            indices, order = torch.cat([graft.region.indices for graft in grafts]).sort()
            values = torch.cat([graft.values for graft in grafts])[order].to(self._layers.device)
            present.enter_context(Differences(self._layers, Region(indices), values).applied())
        self._present.close()  # only after the new ones are there
        self._present, self._added = present, added

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that must not change while the model answers a task."""
        model = self._layers.model
        if is_sharded(model):  # its passes gather temporary tensors
            return [each for each in model.state_dict(keep_vars=True).values() if hasattr(each, "full_tensor")]
        return list(model.parameters())

    def values(self, region: Region) -> Tensor:
        """Return the differences ``(s,)`` of a model without a task at the entries of a region: zeros."""
        return torch.zeros(len(region), device=self._layers.device)

    def put(self, region: Region, values: Tensor) -> None:
        """Do nothing: nothing was written."""


class LedgerSwitch:
    """Switches one model, bit for bit, between θ_pre and the tasks of a ledger.

    The entries of a task are disjoint from the entries of its ancestors. So a switch from an ancestor to a task writes the
    records between them, and a switch back writes θ_pre there: only the entries that must change are touched. Between tasks
    that do not stand on each other, the model goes through their last common ancestor. The ledger may grow meanwhile.

    >>> switch = LedgerSwitch(ledger, model)  # doctest: +SKIP
    >>> switch.to(1)  # the model answers the first task; 0: it is θ_pre again  # doctest: +SKIP

    Args:
        ledger: the records.
        model: the base model, or any model with its body if the ledger belongs to the body; it must hold θ_pre now.
        check: first compare layout, configuration and fingerprint with the ledger's (reads the whole model once).
        fingerprint: the model's fingerprint, if it is known already.

    Raises:
        LedgerError: the ledger belongs to another model.
    """

    def __init__(self, ledger: Ledger, model: nn.Module, *, check: bool = True, fingerprint: str | None = None) -> None:
        self.ledger = ledger
        self._model, self._backbone = model, part_named(model, ledger.space)
        backbone = self._backbone
        self._entries = (
            _Beside(backbone, ledger.space) if ledger.effect == "beside" else _Written(backbone, ledger.space)
        )
        self._buffers_pre = {name: buffer.clone() for name, buffer in persistent_buffers(backbone).items()}
        self._stage = 0
        if check:
            check_weights(ledger, model, fingerprint)

    @property
    def stage(self) -> int:
        """The record number of the task that the model answers now; 0: none."""
        return self._stage

    def to(self, stage: int) -> None:
        """Switch the model to the task of record ``stage``, counted from 1; 0 is θ_pre.

        Raises:
            LedgerError: there is no such record.
        """
        records = self.ledger.records
        if not 0 <= stage <= len(records):
            raise LedgerError(f"The ledger has {len(records)} records, there is no stage {stage}.")
        if stage != self._stage:
            undone, written = self.ledger.way(self._stage, stage)
            if undone and written:  # through the common ancestor: nothing is half applied if a record fails
                self.to(self.ledger.stage(records[written[0]].parent))
                undone = []
            self._entries.change(undone, written, self._graft)
            self._stage = stage
        if stage:
            _IN_PLACE[self._backbone] = records[stage - 1].task
        else:
            _IN_PLACE.pop(self._backbone, None)
        self._restore_buffers()

    def _graft(self, part: int) -> Graft:
        """Return the graft that a part writes."""
        record = self.ledger.records[part]
        return self.ledger.graft(record.task) if self.ledger.composition == "selection" else record.owned

    def to_task(self, task: str) -> None:
        """Switch the model to ``task``."""
        self.to(self.ledger.position(task) + 1)

    @contextmanager
    def learning(
        self,
        region: Region,
        *,
        parent: str = "",
        modules: Sequence[nn.Module] = (),
        moves_anything: bool = False,
        check: bool = True,
    ) -> Iterator[Transaction[Any]]:
        """Let a task be learned inside the block, on top of another task or of θ_pre, and be recorded in the ledger.

        At the end, with the record in the ledger or not, and after an error, the model is back in its state at the beginning of
        the block: the state of the task's parent.

        Args:
            region: the entries that are trained.
            parent: the task that it stands on; empty: θ_pre.
            modules: modules that are trained as a whole, such as a readout; they stay as trained if the task is recorded.
            moves_anything: whether training may move other entries, too; they are restored.
            check: whether to compare all entries outside of the region at the end (reads the model twice).

        Raises:
            LedgerError: an entry outside of the region has changed.
        """
        ledger, space = self.ledger, self.ledger.space
        self.to(ledger.stage(parent))
        stage, learned = self._stage, len(ledger.records)
        digests = self._digests() if check and not moves_anything else []

        def read() -> tuple[Tensor, dict[str, Tensor], list[dict[str, Tensor]]]:
            values = space.flatten(self._backbone, "cpu") if moves_anything else self._entries.values(region)
            buffers = {name: buffer.clone() for name, buffer in persistent_buffers(self._backbone).items()}
            return values, buffers, [tensors_of(module) for module in modules]

        @torch.no_grad()
        def write(state: tuple[Tensor, dict[str, Tensor], list[dict[str, Tensor]]]) -> None:
            values, buffers, tensors = state
            self.to(stage)
            put(values)
            for name, buffer in buffers.items():
                self._backbone.get_buffer(name).copy_(buffer)
            for module, own in zip(modules, tensors, strict=True):
                load_tensors_(module, own)

        def put(values: Tensor) -> None:
            if moves_anything:
                space.load_(self._backbone, values)
            else:
                self._entries.put(region, values)

        with Transaction(read, write) as change:
            yield change
            if len(ledger.records) == learned:
                return
            put(change.before[0])
            if digests:
                self._check_outside(ledger.last, digests)
            change.commit()
            self._restore_buffers()

    def _check_outside(self, task: str, digests: Sequence[str]) -> None:
        """Raise ``LedgerError`` if a tensor has changed since these digests were taken."""
        pairs = zip(self.ledger.space.tensors, digests, self._digests(), strict=True)
        if changed := [spec.name for spec, before, now in pairs if before != now]:
            raise LedgerError(
                f"Training {task!r} changed entries outside of its region, first in {changed[0]!r}; their old values are lost. "
                "Load the model again, go on with ledger.of_tasks(ledger.tasks[:-1]), and train only the parameters of "
                "forgetfree.core.trained.RegionParameters."
            )

    def _digests(self) -> list[str]:
        return [checksum({"": tensor}) for tensor in self.ledger.space.parameters(self._backbone)]

    @contextmanager
    def task(self, task: str) -> Iterator[nn.Module]:
        """Yield the model switched to ``task``, in evaluation mode; after the block it holds θ_pre and has its modes again.

        Raises:
            TrainingError: an optimiser is about to step the model inside.
            LedgerError: something has changed its weights inside.
        """
        written = self._entries.names | self._buffers_pre.keys()
        with in_evaluation_mode(self._model), refusing_steps(self._model, task), restored(self._backbone, written):
            self.to_task(task)
            versions = self._versions()
            try:
                yield self._backbone
                if self._versions() != versions:
                    raise LedgerError(
                        f"Something changed the weights by which the model answers task {task!r}, and θ_pre is lost there. "
                        "Load the model again, and train inside learning(…)."
                    )
            finally:
                self.to(0)

    def _versions(self) -> list[tuple[int, torch.dtype]]:
        """Return the tensors' versions, which PyTorch raises at changes in place, and dtypes, which may change without that."""
        return [(0 if each.is_inference() else each._version, each.dtype) for each in self._entries.tensors]

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        wanted = self.ledger.records[self._stage - 1].buffers if self._stage else {}
        # By name each time: moving a model to another device replaces its buffers.
        for name, before in self._buffers_pre.items():
            self._backbone.get_buffer(name).copy_(wanted.get(name, before))


@contextmanager
def refusing_steps(model: nn.Module, task: str) -> Iterator[None]:
    """Raise ``TrainingError`` if, inside the block, an optimiser is about to change a model that answers a task."""
    known = ref(model)  # the hook is global, and outlives a switch that is never undone

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        own = {id(each) for each in model.parameters()} if (model := known()) is not None else set()
        if any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
            raise TrainingError(
                f"An optimiser would change the weights by which the model answers task {task!r}, and θ_pre would be lost. End "
                "the block of answering(…), or switch to no task, and train inside learning(…)."
            )

    hook = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def changed_buffers(backbone: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the persistent buffers that differ from ``before``."""
    return {
        name: buffer
        for name, buffer in persistent_buffers(backbone).items()
        if not torch.equal(buffer, before[name].to(buffer.device))
    }


# -- Checks that a ledger belongs to a model. Each raises ``LedgerError`` and names the difference. -------


def check_weights(ledger: Ledger, model: nn.Module, fingerprint: str | None = None, *, anew: bool = False) -> None:
    """Check that ``model`` has the layout, the configuration and the weights of the ledger's base model.

    Args:
        ledger: the ledger to check.
        model: the base model, or any model with its body if the ledger belongs to the body. It may have a pooler that the
            ledger's model lacks, because no pooler is grafted.
        fingerprint: the model's fingerprint, if it is known already.
        anew: see `fingerprint_of`.
    """
    backbone = part_named(model, ledger.space)
    try:
        if ledger.effect == "beside":
            LinearLayers(backbone, ledger.space)
        else:
            ledger.space.check_dtypes(backbone)
        buffers = persistent_buffers(backbone)
        for record in ledger.records:
            check_buffers(buffers, record.buffers)
    except RegionError as error:
        raise LedgerError(
            f"The ledger belongs to a model of another layout: {error} Load the model the stream was trained on."
        ) from error
    if ledger.binding and (differ := network_differences(ledger.binding.network, network_of(backbone))):
        raise LedgerError(
            f"The ledger belongs to a model that computes otherwise: {'; '.join(differ)}. Load it with the config.json that "
            "the stream was trained with."
        )
    is_same = has_weights(ledger, backbone, fingerprint if backbone is model else None, anew=anew)
    task = _IN_PLACE.get(backbone)
    if answers_beside(backbone) or (task is not None and not is_same):
        named = f"task {task!r}" if task else "a task, as the model did that it is a copy of"
        raise LedgerError(
            f"The model answers {named} now, expected θ_pre. End the block of answering(…) first, or switch to no task: "
            "TaskSwitch.to(None). A copy that was made meanwhile cannot be switched."
        )
    if not is_same:
        dtype = str(dtype_of_rest(backbone)).removeprefix("torch.")
        cast = f" It is in {dtype} now, expected {ledger.dtype}." if ledger.dtype not in ("", dtype) else ""
        raise LedgerError(
            f"The ledger belongs to other weights: expected fingerprint {ledger.fingerprint[:12]}, the model's is "
            f"{fingerprint_of(backbone)[:12]}.{cast} Load the very weights its tasks were learned from, in the same dtype."
        )
    if has_other_head(model, ledger.head):
        raise LedgerError(
            "The ledger belongs to a language model with another head: its body's weights are the same, and those of the head "
            "are not. Load the very weights the tasks were learned from."
        )


def has_weights(ledger: Ledger, backbone: nn.Module, fingerprint: str | None = None, *, anew: bool = False) -> bool:
    """Return whether a model has the ledger's weights, with or without a pooler, which no graft touches."""
    return fingerprint == ledger.fingerprint or any(
        fingerprint_of(backbone, without=names, anew=anew) == ledger.fingerprint for names in (POOLER, None)
    )


def check_binding(ledger: Ledger, now: Binding, where: str) -> None:
    """Check the ledger's binding against ``now``, the binding of the model that will answer.

    Ledgers of rows that are not texts have no binding, and pass; ``where`` is the ledger's file, for the message.
    """
    if ledger.binding and (differ := ledger.binding.differences(now)):
        raise LedgerError(
            f"{where} would not answer as it did: {'; '.join(differ)}. Use the model as it was when the stream was "
            "trained."
        )


def check_definitions(ledger: Ledger, tasks: Mapping[str, TaskDefinition], where: str) -> None:
    """Check that tasks are defined as in the ledger: kind, labels in order, prompts, and all other fields.

    Args:
        ledger: the ledger to check.
        tasks: definitions by name.
        where: the place of these definitions, for the message.
    """
    for record in ledger.records:
        if record.definition is None or record.task not in tasks:
            continue
        theirs = tasks[record.task].fields
        for key, expected in record.definition.fields.items():
            if theirs[key] != expected:
                raise LedgerError(
                    f"The ledger and {where} have different {key} of task {record.task!r}: expected {_shown(expected)}, got "
                    f"{_shown(theirs[key])}. Use the definition that the stream was trained with."
                )


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else repr(value)
