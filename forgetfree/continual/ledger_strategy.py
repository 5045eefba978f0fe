"""The base of strategies that keep what a task trained in a ledger, so that no later task can reach it.

Such a strategy says which region a task may train (`localize`) and from which values (`RegionToTrain`). The region minus
what earlier tasks own is trained as one small vector (`trained`) and recorded; a task is inferred with what the ledger's
`composition` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from forgetfree.continual.strategy import ContinualStrategy, TaskwiseOptions
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.core.graft import Graft
from forgetfree.core.regions import Region
from forgetfree.core.tensors import load_tensors_, tensors_of
from forgetfree.core.trained import RegionParameters, Trained
from forgetfree.errors import LedgerError, OptionError
from forgetfree.files import StrPath
from forgetfree.learning.training import TrainingOptions
from forgetfree.ledger import (
    Composition,
    Ledger,
    LedgerSwitch,
    Record,
    changed_buffers,
    check_binding,
    check_definitions,
)
from forgetfree.options import option


@dataclass(frozen=True, kw_only=True)
class RegionOptions(TaskwiseOptions):
    """How a region is trained."""

    region_steps: int | None = option(None, "updates of the region; none: as many as fine-tuning", at_least=0)
    region_optimizer: Literal["sgd", "adamw"] | None = option(None, "none: that of fine-tuning")
    region_learning_rate: float | None = option(
        None,
        "none: that of fine-tuning; with AdamW times √(N/s) for s of N entries, so that an update is as long as there",
        above=0,
    )


@dataclass(frozen=True)
class RegionToTrain:
    """What a task will train.

    Attributes:
        region: γ.
        sparsity: the share of the space γ was allowed.
        theta: where its free entries start from, flat ``(N,)``; default: as they are.
        readout: where the readout starts from; default: untrained.
    """

    region: Region
    sparsity: float
    theta: Tensor | None = None
    readout: dict[str, Tensor] | None = None


class LedgerStrategy(ContinualStrategy):
    """Base of strategies on a ledger. A subclass overrides `localize`, and sets `composition`."""

    Options: ClassVar[type[TrainingOptions]] = RegionOptions
    forget_free: ClassVar[bool] = True
    taskwise: ClassVar[bool] = True
    #: What a task is inferred with, see `forgetfree.ledger.Composition`.
    composition: ClassVar[Composition] = "union"

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """A rate is for one optimiser."""
        if options.region_optimizer not in (None, options.optimizer) and options.region_learning_rate is None:
            raise OptionError(
                f"region_optimizer={options.region_optimizer} beside optimizer={options.optimizer} needs a "
                "region_learning_rate of its own. Set it."
            )

    def localize(self, task: EncodedTask) -> RegionToTrain:
        """Choose γ; the model holds θ_pre before."""
        raise NotImplementedError

    def trained(self, task: EncodedTask) -> Trained:
        """What the main loop trains: the free entries of the region, which the model holds where they start from."""
        return RegionParameters(self.task_model.backbone, self.space, self._owned)

    def setup(self) -> None:
        """An empty ledger."""
        binding = self.stream.loaded.binding(self.options.precision)
        self.ledger: Ledger = Ledger(self.space, self.stream.loaded.fingerprint, self.composition, binding)
        self._switch = LedgerSwitch(self.ledger, self.task_model.backbone)
        self._localized: RegionToTrain | None = None
        self._region: Trained | None = None
        self._owned = Region.empty()

    def prepare(self, task: EncodedTask) -> None:
        """Choose the region, and put the model where its training starts."""
        self.ledger.check_new(task.name)
        self._switch.to(0)
        self._localized = localized = self.localize(task)
        self._switch.to(len(self.ledger.records) if self.composition == "union" else 0)
        self._owned = self.ledger.free(localized.region)
        self._switch.remember(self._owned)
        readout = self.task_model.readout_module(task.label)
        self._readout_before = readout, tensors_of(readout)
        try:
            load_tensors_(readout, localized.readout or self.pristine.readouts[task.name])
            if localized.theta is not None:
                indices = self._owned.indices
                self.space.scatter_(self.task_model.backbone, indices, localized.theta[indices])
            self._region = self.trained(task)
        except BaseException:  # an interrupt too
            self.suspend()
            raise

    def training_options(self) -> TrainingOptions:
        """Those of the region."""
        options: RegionOptions = self.options
        optimizer = options.region_optimizer or options.optimizer
        rate = options.region_learning_rate or options.learning_rate
        if options.region_learning_rate is None and optimizer == "adamw":
            # AdamW moves every entry by about its rate, so s of N entries move less far together.
            rate *= math.sqrt(len(self.space) / self.region_budget())
        return replace(
            options,
            optimizer=optimizer,
            learning_rate=rate,
            readout_learning_rate=options.readout_learning_rate or options.learning_rate,
            l1=0.0,  # a region is as sparse as it gets
        )

    def region_budget(self) -> int:
        """The s of the learning rate's √(N/s)."""
        assert self._localized is not None
        return max(1, len(self._localized.region))

    def steps(self, task: EncodedTask) -> int:
        """None where there is nothing to train."""
        steps: int | None = self.options.region_steps
        if not any(parameter.numel() for group in self.parameters(task) for parameter in group):
            return 0
        return self.full_steps(task) if steps is None else steps

    def parameters(self, task: EncodedTask) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The region's values, and the readout."""
        assert self._region is not None
        return self._region.parameters, list(self.task_model.readout_module(task.label).parameters())

    def gradients(self, task: EncodedTask) -> list[nn.Parameter]:
        """The tensors that hold the region, and the readout."""
        assert self._region is not None
        return [*self._region.touched, *self.parameters(task)[1]]

    def before_step(self) -> None:
        """Of the tensors' gradients, the region's."""
        assert self._region is not None
        self._region.collect()

    def after_step(self) -> None:
        """The region's values, into the tensors."""
        assert self._region is not None
        self._region.write()

    def commit(self, task: EncodedTask) -> None:
        """Record who owns what."""
        assert self._localized is not None
        backbone = self.task_model.backbone
        self.ledger.append(
            Record(
                task.name,
                self._localized.region,
                Graft.of(backbone, self.space, self._owned),
                self._localized.sparsity,
                readout=tensors_of(self.task_model.readout_module(task.label)),
                buffers=changed_buffers(backbone, self.pristine.buffers),
                definition=None if self.stream.loaded.tokenizer is None else task.definition,
                classes=task.classes,
            )
        )
        self._switch.committed()
        self._region = self._localized = None

    def suspend(self) -> None:
        """θ_pre where the region is being trained, and the readout as it was."""
        self._switch.revert_uncommitted()
        load_tensors_(*self._readout_before)

    def enter_evaluation(self, task: EncodedTask) -> None:
        """What the ledger says; a task not learned yet is answered by the union so far, or θ_pre where there is none."""
        if task.name in self.ledger.tasks:
            self._switch.to_task(task.name)
        else:
            self.leave_evaluation(task)

    def leave_evaluation(self, task: EncodedTask) -> None:
        """Back to what the next task starts from."""
        self._switch.to(len(self.ledger.records) if self.composition == "union" else 0)

    def save(self, directory: StrPath) -> None:
        """The ledger."""
        self.ledger.save(Path(directory) / "ledger.safetensors")

    def load(self, directory: StrPath) -> None:
        """The ledger; the next task may be learned on top of it."""
        path = Path(directory) / "ledger.safetensors"
        ledger = Ledger.load(path)
        if ledger.composition != self.composition:
            raise LedgerError(
                f"{path} has composition {ledger.composition}, and {type(self).__name__.lower()} needs {self.composition}. "
                "Load it by the strategy that wrote it."
            )
        check_binding(ledger, self.stream.loaded.binding(self.options.precision), str(path))
        tasks = {task.name: task for task in self.stream.tasks}
        check_definitions(ledger, {name: task.definition for name, task in tasks.items()}, "the stream")
        for record in ledger.records:  # all of it, before anything is changed
            if record.task not in tasks:
                raise LedgerError(
                    f"{path} holds task {record.task!r}, which this stream lacks. Load it with its stream."
                )
            readout = self.task_model.readout_module(tasks[record.task].label).state_dict()
            expected, got = ({n: tuple(t.shape) for n, t in named.items()} for named in (readout, record.readout))
            if expected != got:
                raise LedgerError(
                    f"{path}: the readout of task {record.task!r} does not fit: expected {expected}, got {got}. Load it with "
                    "the model and scenario of its stream."
                )
        self._switch.to(0)
        self._switch = LedgerSwitch(ledger, self.task_model.backbone)
        self.ledger = ledger
        for record in ledger.records:
            load_tensors_(self.task_model.readout_module(tasks[record.task].label), record.readout)
            self.note_learned(tasks[record.task], dict(record.readout))

    def bytes_kept(self) -> int:
        """The ledger's."""
        return self.ledger.size_in_bytes if self.ledger.records else 0
