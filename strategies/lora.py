"""LoRA and O-LoRA: low-rank adapters per task, on a θ_pre that never changes, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.strategy_parts import Training, tasks_named, undo_on_error
from forgetfree.continual.stream import Stream
from forgetfree.continual.task_inference import TaskwiseOptions
from forgetfree.core.parameters import load_tensors_, persistent_buffers, tensors_of
from forgetfree.core.trained import WholeTensors
from forgetfree.errors import OptionError, RunError, TaskError
from forgetfree.ledger.switch import changed_buffers
from forgetfree.ledger.transaction import Transaction
from forgetfree.models.lora_adapters import LoraAdapters, check_shapes, linear_layers, overlap, targets
from forgetfree.options import option
from forgetfree.seeds import derive_seed
from forgetfree.strategies.adapter_file import adapter_name, load_adapters, loaded_adapters, save_adapters
from forgetfree.tensor_file import TaskTensors, grouped
from forgetfree.training.encoded_task import EncodedTask
from forgetfree.training.training_options import TrainingOptions


class AdapterOptions(TrainingOptions):
    """Options of adapters and their training."""

    rank: int = option(8, "r: rank of each adapter", at_least=1, at_most=2**16)
    lora_alpha: int = option(16, "α: the output of an adapter is scaled by α/r", at_least=1)
    lora_dropout: float = option(0.0, "dropout on the input of each adapter in training", at_least=0, at_most=1)
    target_modules: str | None = option(
        None,
        "regular expression for names of the linear layers to adapt ('.': all); none: PEFT's default for the "
        "architecture (query and value for BERT and RoBERTa, c_attn for GPT-2), or all if it has none",
    )
    lora_learning_rate: float | None = option(
        None,
        "learning rate of the adapters; none: 10·learning_rate, because adapters learn best at about ten times "
        "the learning rate of full fine-tuning",
        above=0,
    )


def adapter_training(options: AdapterOptions) -> TrainingOptions:
    """Return the options of training adapters. There is no ℓ1 penalty, because θ is not trained."""
    rates = {
        "learning_rate": options.lora_learning_rate or 10 * options.learning_rate,
        "readout_learning_rate": options.readout_learning_rate or options.learning_rate,
    }
    return options.model_copy(update={**rates, "l1": 0.0})


class AdapterStrategy(ContinualStrategy):
    """Base class of strategies with adapters. Each creates its `adapters` in `setup`."""

    resumable: ClassVar[bool] = True
    adapters: TaskAdapters

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Refuse a model without layers to adapt."""
        backbone, space = stream.model.backbone, stream.model.space()
        try:
            adapted = targets(backbone, space, options.target_modules)
        except re.error as error:
            raise OptionError(
                f"target_modules must be a regular expression, got {options.target_modules!r}: {error}."
            ) from error
        if not adapted:
            layers = linear_layers(backbone, space)
            raise OptionError(
                f"{cls.__name__} adapts linear layers, but found none to adapt in {type(backbone).__name__}"
                + (f" by target_modules={options.target_modules!r}" if layers else "")
                + f". Its linear layers that may be trained: {', '.join(layers) or 'none'}. "
                + ("Name some of them." if layers else "Use another strategy for this model.")
            )

    def commit(self, task: EncodedTask, training: Training) -> None:
        """Keep the adapters for good."""
        self.adapters.commit(task)

    def answering(self, task: EncodedTask) -> AbstractContextManager[None]:
        """Answer with the task's own adapters, or with those of all tasks so far where they act together."""
        return self.adapters.answering(task)


class LoRAOptions(AdapterOptions, TaskwiseOptions):
    """Options of adapters with one model per task."""

    adapter_start: Literal["new", "previous"] = option(
        "new",
        "initial values of a task's adapters; new: PEFT's; previous: those of the task before",
    )


class LoRA(AdapterStrategy):
    """Low-rank adapters per task: W = W_pre + (α/r)·B·A, with W_pre frozen (Hu et al., 2021, arXiv:2106.09685, eq. 3).

    The paper adapts to one task; here each task of the stream has its own adapters on θ_pre, which predict for it, so
    other tasks cannot change it. Before a task is learned, θ_pre predicts for it. A task cannot be learned twice.
    By default, PEFT's choice of layers is adapted: query and value, as in the paper. With ``adapter_start=previous``,
    adapters start from those of the task before.
    """

    Options: ClassVar[type[TrainingOptions]] = LoRAOptions
    forget_free: ClassVar[bool] = True

    def setup(self) -> None:
        """Create a set of adapters that act alone, empty so far."""
        self.adapters = TaskAdapters(self, joint=False)

    def begin(self, task: EncodedTask) -> Training:
        """Train new adapters on θ_pre, and the task's readout."""
        start = self.learned[-1].name if self.learned and self.options.adapter_start == "previous" else ""
        return self.adapters.training(task, start=start)

    def changed_by(self, learned: EncodedTask) -> list[EncodedTask] | None:
        """Return the learned task alone, where the task is known: each is answered by its own adapters."""
        return [learned] if self.stream.scenario == "task" else None


class OLoRAOptions(AdapterOptions):
    """Options of adapters with an orthogonality penalty."""

    orthogonality: float = option(
        0.5, "λ₁: weight of the orthogonality penalty; the paper: 0.5 for most tasks", at_least=0
    )


class OLoRA(AdapterStrategy):
    """Orthogonal low-rank adaptation: loss + λ₁ Σ_{i<t} L_orth(A_i, A_t) (Wang et al., 2023, arXiv:2310.14152, eqs. 6 to 8).

    L_orth is the sum of the squared entries of A_iᵀ·A_t, layer by layer (eq. 8; the authors' code takes their absolute
    values, and adds an ℓ2 norm of the new adapters that the paper does not mention: weight_decay has its place here).
    Earlier adapters are frozen and used together with the new ones; all tasks are predicted with W_pre + (α/r) Σ_i B_i·A_i and
    all adapters so far (eq. 9, without merging them into W_pre). Later adapters affect earlier tasks, so O-LoRA forgets
    little, but not nothing. Each task has its own readout; the paper generates label words instead.

    The penalty's curvature is 2·λ₁·σ², with σ the largest singular value of the earlier A_i of a layer, stacked: SGD follows it
    only while the adapters' rate · λ₁ · σ² is below 1 (docs/baselines.md).
    """

    Options: ClassVar[type[TrainingOptions]] = OLoRAOptions

    def setup(self) -> None:
        """Create a set of adapters that act together, empty so far."""
        self.adapters = TaskAdapters(self, joint=True)

    def begin(self, task: EncodedTask) -> Training:
        """Train new adapters on top of the earlier ones, and keep out of their subspaces."""
        return self.adapters.training(task, self._penalized())

    def _penalized(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Return cross-entropy with the penalty; ``None`` where there is none."""
        frozen: dict[str, list[Tensor]] = {}
        adapters, strength = self.adapters, self.options.orthogonality
        for earlier in adapters.earlier:
            for layer, projection in adapters.adapters.projections(earlier).items():
                frozen.setdefault(layer, []).append(projection.detach())
        subspaces = {layer: torch.cat(projections) for layer, projections in frozen.items()}

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            newest = adapters.adapters.projections(adapters.newest)
            penalty: Tensor = strength * overlap(subspaces, newest)
            return cross_entropy(logits, labels) + penalty

        return loss if subspaces and strength else None


class TaskAdapters:
    """The adapters of a strategy's tasks, and its model, which holds θ_pre between tasks.

    Args:
        strategy: a `ContinualStrategy`; this object becomes its `storage`.
        joint: whether the adapters of all tasks so far act together, instead of each task's alone.

    Attributes:
        adapters: the adapters of all tasks, by name.
        records: the stored tensors of the learned tasks, by the names of their adapters.
    """

    def __init__(self, strategy: ContinualStrategy, *, joint: bool) -> None:
        self._strategy, self._joint = strategy, joint
        self._original: nn.Module = strategy.model.backbone
        self.adapters = LoraAdapters(self._original)
        self.records: dict[str, TaskTensors] = {}
        self._settings: dict[str, Any] = {}  # of the newest adapters
        #: The names of the adapters that act in the model now.
        self._acting: list[str] = []
        #: The changes of a task's training; none before the first.
        self._change: Transaction[Any] | None = None
        strategy.storage = self

    @property
    def newest(self) -> str:
        """Return the name of the adapters in training."""
        return adapter_name(len(self.records))

    @property
    def earlier(self) -> list[str]:
        """Return the names of the adapters that act beside the newest."""
        return list(self.records) if self._joint else []

    # -- Learning a task -------------------------------------------------------------------------------------

    def training(
        self, task: EncodedTask, loss: Callable[[Tensor, Tensor], Tensor] | None = None, start: str = ""
    ) -> Training:
        """Return the training of new adapters, together with those of all earlier tasks unless each acts alone.

        Args:
            task: the task.
            loss: maps logits and labels to the loss; default: cross-entropy.
            start: the learned task whose adapters they start from; empty: PEFT's initial values.

        Raises:
            TaskError: the task has adapters already.
        """
        if any(record.task == task.name for record in self.records.values()):
            raise TaskError(
                f"Task {task.name!r} already has adapters, which are frozen. To learn it again, give the same data "
                "under another name."
            )
        strategy, options = self._strategy, self._strategy.options
        layers = targets(self._original, strategy.space, options.target_modules)
        self._settings = {
            "r": options.rank,
            "lora_alpha": options.lora_alpha,
            "lora_dropout": options.lora_dropout,
            "target_modules": "|".join(map(re.escape, layers)),  # PEFT adapts layers whose whole name matches
        }
        self.adapters.add(self.newest, LoraConfig(**self._settings), derive_seed(strategy.seed, "adapters", task.name))
        for record in self.records.values():
            if record.task == start:
                self.adapters.load_(self.newest, record.group("adapter"))
        readout = strategy.model.readout_module(task.label)
        self._change = Transaction(partial(self._read, readout), partial(self._write, readout))
        strategy.scope.enter_context(undo_on_error(self._change.roll_back))
        if not self._joint:
            load_tensors_(readout, strategy.pre_trained.readouts[task.name])
        self._become([*self.earlier, self.newest])
        return Training(
            task,
            WholeTensors(self.adapters.parameters(self.newest)),
            list(readout.parameters()),
            task.full_steps(options),
            adapter_training(options),
            loss=loss,
        )

    def commit(self, task: EncodedTask) -> None:
        """Keep the newest adapters for good; the model holds θ_pre again."""
        model = self._strategy.model
        changed = changed_buffers(self._original, self._strategy.pre_trained.buffers)
        tensors = grouped(
            adapter=self.adapters.tensors(self.newest),
            readout=tensors_of(model.readout_module(task.label)),
            buffer={name: buffer.clone() for name, buffer in changed.items()},
        )
        if self._joint:  # one model for all: only the newest state of the tensors that all tasks train is needed
            dropped = ("buffer/", "readout/") if model.shared_readout else ("buffer/",)
            self.records = {name: _without(each, dropped) for name, each in self.records.items()}
        self.records[self.newest] = TaskTensors(task.name, tensors, self._settings)
        if self._change is not None:
            self._change.commit()
        self._become([])

    def _read(self, readout: nn.Module) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
        """Return the state that training changes: the acting adapters, a readout, and the buffers of the backbone."""
        buffers = {name: buffer.clone() for name, buffer in persistent_buffers(self._original).items()}
        return self._acting, tensors_of(readout), buffers

    def _write(self, readout: nn.Module, state: tuple[list[str], dict[str, Tensor], dict[str, Tensor]]) -> None:
        acting, tensors, buffers = state
        load_tensors_(readout, tensors)
        self._become(acting)
        self._load_buffers(buffers)

    # -- Answering -------------------------------------------------------------------------------------------

    @contextmanager
    def answering(self, task: EncodedTask) -> Iterator[None]:
        """Inside, the model has the task's own adapters, or those of all tasks; θ_pre where there are none."""
        with self._change.suspended() if self._change else nullcontext():
            own = [name for name, record in self.records.items() if record.task == task.name]
            self._become(self.earlier if self._joint else own)
            try:
                yield
            finally:
                self._become([])

    def _become(self, names: Sequence[str]) -> None:
        """Put these adapters and their buffers into the model; with none, restore the stream's own backbone."""
        self._acting = list(names)
        model = self._strategy.model
        backbone = self.adapters.activate(names) if names else self._original
        backbone.train(model.backbone.training)
        model.backbone = backbone
        changed = [self.records[name].group("buffer") for name in names if name in self.records]
        self._load_buffers({**self._strategy.pre_trained.buffers, **(changed[-1] if changed else {})})

    @torch.no_grad()
    def _load_buffers(self, buffers: dict[str, Tensor]) -> None:
        for name, buffer in persistent_buffers(self._original).items():
            buffer.copy_(buffers[name])

    # -- Keeping ---------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write the adapters of all tasks, and their readouts."""
        path = directory / "adapters.safetensors"
        save_adapters(path, list(self.records.values()), self._strategy.stream.loaded, joint=self._joint)

    def load(self, directory: Path) -> None:
        """Load the adapters; the next task may be learned in addition."""
        strategy, path = self._strategy, directory / "adapters.safetensors"
        records, joint = load_adapters(path, strategy.stream.loaded)
        if joint != self._joint:
            ways = {True: "all together (o-lora)", False: "each alone (lora)"}
            raise RunError(
                f"The adapters in {path} are used {ways[joint]}, but this strategy uses them {ways[self._joint]}. "
                "Load them with the strategy that saved them."
            )
        tasks = tasks_named(strategy.stream, (record.task for record in records), path)
        for task, record in zip(tasks, records, strict=True):
            if readout := record.group("readout"):
                module = strategy.model.readout_module(task.label)
                check_shapes(f"the readout of {record.task!r}", module.state_dict(), readout)
        self.adapters = loaded_adapters(self._original, records)
        self.records = {adapter_name(k): record for k, record in enumerate(records)}
        for task, record in zip(tasks, records, strict=True):
            if readout := record.group("readout"):
                load_tensors_(strategy.model.readout_module(task.label), readout)
            strategy.note_learned(task, readout)

    def bytes_kept(self) -> int:
        """Count adapters and readouts."""
        return sum(record.size_in_bytes for record in self.records.values())


def _without(record: TaskTensors, starts: tuple[str, ...]) -> TaskTensors:
    """Return a record without the tensors whose names begin with ``starts``."""
    kept = {name: tensor for name, tensor in record.tensors.items() if not name.startswith(starts)}
    return replace(record, tensors=kept)
