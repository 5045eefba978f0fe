"""The base of strategies that learn each task by LoRA adapters and leave θ_pre as it is, bit for bit.

A subclass is `taskwise` where each task is answered by its own adapters alone; else those of all tasks so far act together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.core.tensors import load_tensors_, persistent_buffers, tensors_of
from forgetfree.display import brief
from forgetfree.errors import OptionError, RunError, TaskError
from forgetfree.files import StrPath
from forgetfree.learning.training import TrainingOptions
from forgetfree.ledger import changed_buffers
from forgetfree.models.lora import (
    LoraAdapters,
    LoraRecord,
    check_shapes,
    config_of,
    linear_layers,
    load_records,
    lora_config,
    save_records,
    targets,
)
from forgetfree.options import option
from forgetfree.seeds import derive_seed


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(TrainingOptions):
    """How adapters are made and trained."""

    rank: int = option(8, "r of every adapter", at_least=1)
    lora_alpha: int = option(16, "α: an adapter acts with weight α/r", at_least=1)
    lora_dropout: float = option(0.0, "before every adapter, while training", at_least=0, at_most=1)
    target_modules: str | None = option(
        None,
        "regular expression over names of linear layers to adapt ('.': all); none: as PEFT for the architecture (query and "
        "value of BERT and RoBERTa, c_attn of GPT-2), else all",
    )
    lora_learning_rate: float | None = option(
        None,
        "of the adapters; none: 10·learning_rate, since adapters learn best at about ten times the rate of full fine-tuning",
        above=0,
    )


class LoraStrategy(ContinualStrategy):
    """Base of strategies by adapters. ℓ1 has no part in it: what is trained is not θ."""

    Options: ClassVar[type[TrainingOptions]] = AdapterOptions

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """There must be layers to adapt."""
        backbone, space = stream.model.backbone, stream.model.space()
        try:
            found = targets(backbone, space, options.target_modules)
        except re.error as error:
            raise OptionError(
                f"target_modules must be a regular expression, got {options.target_modules!r}: {error}."
            ) from error
        if not found:
            layers = linear_layers(backbone, space)
            raise OptionError(
                f"{cls.__name__} adapts linear layers, and finds none to adapt in {type(backbone).__name__}"
                + (f" by target_modules={options.target_modules!r}" if layers else "")
                + f". Its linear layers that may be trained: {', '.join(layers) or 'none'}. "
                + ("Name some of them." if layers else "Use another strategy for this model.")
            )

    def setup(self) -> None:
        """No adapters yet."""
        self._original = self.task_model.backbone
        self.adapters = LoraAdapters(self._original)
        #: What is kept of the learned tasks, by the names of their adapters.
        self.records: dict[str, LoraRecord] = {}
        self._readout_before: dict[str, Tensor] = {}

    # -- Training ------------------------------------------------------------------------------------------

    def prepare(self, task: EncodedTask) -> None:
        """New adapters; under those of all earlier tasks, unless each acts alone."""
        if any(record.task == task.name for record in self.records.values()):
            raise TaskError(
                f"Task {task.name!r} has adapters already, and they are frozen. Give the same data under another name to "
                "learn it again."
            )
        layers = targets(self._original, self.space, self.options.target_modules)
        options: AdapterOptions = self.options
        config = lora_config(
            rank=options.rank,
            alpha=options.lora_alpha,
            dropout=options.lora_dropout,
            pattern="|".join(map(re.escape, layers)),
        )
        self.adapters.add(self.newest, config, derive_seed(self.seed, "adapters", task.name))
        readout = self.task_model.readout_module(task.label)
        self._readout_before = tensors_of(readout)
        if self.taskwise:
            load_tensors_(readout, self.pristine.readouts[task.name])
        self._become([*self.earlier, self.newest])

    def training_options(self) -> TrainingOptions:
        """Those of the adapters."""
        options: AdapterOptions = self.options
        return replace(
            options,
            learning_rate=options.lora_learning_rate or 10 * options.learning_rate,
            readout_learning_rate=options.readout_learning_rate or options.learning_rate,
            l1=0.0,
        )

    def parameters(self, task: EncodedTask) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The new adapters, and the readout."""
        readout = self.task_model.readout_module(task.label)
        return self.adapters.parameters(self.newest), list(readout.parameters())

    def commit(self, task: EncodedTask) -> None:
        """Keep the adapters for good; the model holds θ_pre again."""
        changed = changed_buffers(self._original, self.pristine.buffers)
        record = LoraRecord(
            task.name,
            self.adapters.config(self.newest),
            self.adapters.tensors(self.newest),
            tensors_of(self.task_model.readout_module(task.label)),
            {name: buffer.cpu().clone() for name, buffer in changed.items()},
        )
        if not self.taskwise:  # one model for all: of what all tasks train on, the newest state counts
            shared = self.task_model.shared_readout
            self.records = {
                name: replace(each, readout={} if shared else each.readout, buffers={})
                for name, each in self.records.items()
            }
        self.records[self.newest] = record
        self._become([])

    def snapshot(self) -> Any:
        """The readout and the buffers; the adapters in training stay where they are."""
        assert self._in_training is not None
        readout = self.task_model.readout_module(self._in_training.label)
        return tensors_of(readout), {name: b.clone() for name, b in persistent_buffers(self._original).items()}

    def suspend(self) -> None:
        """θ_pre, and the readout as it was."""
        assert self._in_training is not None
        load_tensors_(self.task_model.readout_module(self._in_training.label), self._readout_before)
        self._become([])

    def resume(self, snapshot: Any) -> None:
        """The model in training."""
        assert self._in_training is not None
        readout, buffers = snapshot
        load_tensors_(self.task_model.readout_module(self._in_training.label), readout)
        self._become([*self.earlier, self.newest])
        self._load_buffers(buffers)

    # -- Evaluation ----------------------------------------------------------------------------------------

    def enter_evaluation(self, task: EncodedTask) -> None:
        """The task's own adapters, or those of all tasks; θ_pre where there are none."""
        own = [name for name, record in self.records.items() if record.task == task.name]
        self._become(own if self.taskwise else self.earlier)

    def leave_evaluation(self, task: EncodedTask) -> None:
        """θ_pre."""
        self._become([])

    # -- What is kept --------------------------------------------------------------------------------------

    def save(self, directory: StrPath) -> None:
        """The adapters of all tasks, and their readouts."""
        path = Path(directory) / "adapters.safetensors"
        save_records(path, list(self.records.values()), together=not self.taskwise, **self._belonging())

    def load(self, directory: StrPath) -> None:
        """The adapters; the next task may be learned beside them."""
        path = Path(directory) / "adapters.safetensors"
        records = load_records(path, together=not self.taskwise, **self._belonging())
        tasks = {task.name: task for task in self.stream.tasks}
        for record in records:
            if record.task not in tasks:
                raise RunError(
                    f"{path} has adapters of task {brief(record.task)}, which this stream lacks. Load that stream."
                )
            if record.readout:
                readout = self.task_model.readout_module(tasks[record.task].label)
                check_shapes(f"the readout of {record.task!r}", readout.state_dict(), record.readout)
        adapters = LoraAdapters(self._original)
        for k, record in enumerate(records):
            adapters.add(_name(k), config_of(record.config), seed=0)
            adapters.load_(_name(k), record.adapter)
        self.adapters = adapters
        self.records = {_name(k): replace(r, adapter=adapters.tensors(_name(k))) for k, r in enumerate(records)}
        for record in records:
            task = tasks[record.task]
            if record.readout:
                load_tensors_(self.task_model.readout_module(task.label), record.readout)
            self.note_learned(task, dict(record.readout))

    def _belonging(self) -> dict[str, Any]:
        loaded = self.stream.loaded
        return {"fingerprint": loaded.fingerprint, "binding": loaded.binding(self.options.precision)}

    def bytes_kept(self) -> int:
        """Adapters and readouts."""
        return sum(record.size_in_bytes for record in self.records.values())

    # -- The model -----------------------------------------------------------------------------------------

    @property
    def newest(self) -> str:
        """The name of the adapters in training."""
        return _name(len(self.records))

    @property
    def earlier(self) -> list[str]:
        """The names of the adapters that act beside the newest."""
        return [] if self.taskwise else list(self.records)

    def _become(self, names: Sequence[str]) -> None:
        """Give the model these adapters, and the buffers that go with them; without any it is the stream's own."""
        backbone = self.adapters.activate(names) if names else self._original
        backbone.train(self.task_model.backbone.training)
        self.task_model.backbone = backbone
        changed = [self.records[name].buffers for name in names if name in self.records]
        self._load_buffers({**self.pristine.buffers, **(changed[-1] if changed else {})})

    @torch.no_grad()
    def _load_buffers(self, buffers: dict[str, Tensor]) -> None:
        for name, buffer in persistent_buffers(self._original).items():
            buffer.copy_(buffers[name])


def _name(k: int) -> str:
    return f"task-{k}"
