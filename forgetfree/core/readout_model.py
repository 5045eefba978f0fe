"""A backbone, its body without the head, and a readout for each task, for any kind of input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from enum import Enum
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.readout import Pooling, Readout, empty_linear
from forgetfree.display import counted
from forgetfree.errors import OptionError, RegionError, TaskError
from forgetfree.seeds import derive_seed

#: ``classifier`` is a head of transformers, which a user cannot choose, see `forgetfree.models.heads.Head`.
ReadoutKind = Literal["linear", "mean", "prompt", "causal", "generate", "classifier"]
READOUTS: tuple[ReadoutKind, ...] = ("linear", "mean", "prompt", "causal", "generate")
#: Readouts by the logits of label words; ``generate`` is one if a task has labels.
BY_WORDS: tuple[ReadoutKind, ...] = ("prompt", "causal", "generate")
#: Readouts by a linear layer per task, on one hidden state or on the mean of all.
LINEAR: tuple[ReadoutKind, ...] = ("linear", "mean")
#: The precision of forward passes, see `autocast`; ``fp32`` leaves them in the dtype of the weights.
Precision = Literal["fp32", "bf16", "fp16"]
#: The logit of a label that a row's task does not have.
LOWEST = torch.finfo(torch.float32).min
#: Up to this many tokens, PyTorch's flash attention is slower on CPUs in half precision than its plain formula.
SHORT = 128


class Current(Enum):
    """Stands in for task labels: the task in training or evaluation."""

    TASK = "current"


class ReadoutModel(nn.Module):
    """A backbone and readouts; subclasses define the inputs of the readouts (`features`, `hidden_size`).

    Strategies decide what is trained and what is frozen.

    Args:
        backbone: maps inputs to features, or to the vocabulary's logits.
        readout: ``linear`` and ``mean`` add a layer per task, the others add none.
        dropout: the share dropped before the linear layer.
        graftable: regular expression; only tensors with a matching name are in `space`.
        shared_readout: use one linear layer for all tasks, as needed if the task is not known at inference.
    """

    #: The precision of forward passes; logits are float32 in any case.
    precision: str = "fp32"
    #: The label of the task in training or evaluation: the default for rows without a task label.
    current_task: int | None = None
    #: True for encoder-decoders that write texts: the encoder reads prompts, and the decoder writes.
    writes_apart: bool = False
    #: The labels among which a shared readout chooses, see `answering_with`; ``None``: all.
    answered_labels: Sequence[int] | None = None
    #: The states that linear layers read.
    pooling: Pooling = "first"
    #: For ``classifier``: the Hugging Face class of the readouts' heads.
    architecture: str = ""

    def __init__(
        self,
        backbone: nn.Module,
        readout: ReadoutKind,
        *,
        dropout: float = 0.0,
        graftable: str | None = None,
        shared_readout: bool = False,
    ) -> None:
        super().__init__()
        self._graftable = graftable or "."
        self._space: tuple[list[Any], ParameterSpace] | None = None
        self.backbone = backbone
        self.readout: ReadoutKind = readout
        self.shared_readout = shared_readout
        #: The readout of each task, by its task label.
        self.readouts = nn.ModuleList()
        self.dropout = dropout

    def prepared(self, x: Any) -> Any:
        """Return the model's inputs for ``x`` ``(B, …)``, on its device."""
        return x.to(next(self.parameters()).device)

    def on_device(self, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Any, Tensor, Tensor]:
        """Return a batch ``(x, y, t)`` prepared on the model's device; ``t`` stays, because the host reads its values."""
        x, y, t = batch
        return self.prepared(x), y.to(next(self.parameters()).device), t

    def features(self, x: Any) -> Any:
        """Return the inputs of the readouts, one row per label: see `Readout.forward`."""
        raise NotImplementedError

    def pooled(self, x: Any, layer: int | None = None) -> Tensor:
        """Return one vector per row that represents its content ``(B, H)``.

        Args:
            x: inputs ``(B, …)``.
            layer: the hidden layer to pool, if the model has several; default: the middle one.
        """
        features: Tensor = self.features(x)
        return features

    def example(self, rows: int) -> Tensor | None:
        """Return inputs ``(rows, …)`` for timing passes; ``None`` if the model does not know the form of its inputs."""
        return None

    def features_and_mean(self, x: Any) -> Tensor:
        """Return `features`, one per row, and `pooled` from the last layer ``(B, 2, H)``."""
        return torch.stack([self.features(x), self.pooled(x, -1)], 1)

    def counts(self, x: Tensor) -> Tensor:
        """Return the number of labels of each row ``(B,)``: 1, unless words are labelled."""
        return torch.ones(len(x), dtype=torch.int64, device=x.device)

    @property
    def hidden_size(self) -> int:
        """The width H of the hidden states."""
        raise NotImplementedError

    def add_task(
        self, name: str, n_labels: int, columns: Sequence[int] = (), seed: int = 0, *, yes_or_no: bool = False
    ) -> int:
        """Add a task and return its task label: 0 for the first, 1 for the second, and so on.

        Args:
            name: the task's name.
            n_labels: the number of its labels.
            columns: see `Readout`.
            seed: with the name, the seed of a linear layer's initial weights, so that these do not depend on the stream.
            yes_or_no: see `Readout`.

        Raises:
            TaskError: the model has a task of this name.
        """
        if name in self.task_names:
            raise TaskError(f"The model already reads out task {name!r}. Give the task another name.")
        if self.shared_readout and self.readouts:
            layer = self.readout_module(0)
        else:
            layer = self.make_layer("shared" if self.shared_readout else name, n_labels, seed)
        readout = Readout(name, n_labels, layer, columns, self.pooling, self.dropout, yes_or_no).train(self.training)
        self.readouts.append(readout.to(next(self.backbone.parameters()).device))
        return len(self.readouts) - 1

    def make_layer(self, name: str, n_labels: int, seed: int) -> nn.Module:
        """Return the untrained layer of a task's readout, see `Readout`."""
        if self.readout not in LINEAR:
            return nn.Module()
        linear = empty_linear(self.hidden_size, n_labels)
        generator = torch.Generator().manual_seed(derive_seed(seed, "readout", name))
        nn.init.normal_(linear.weight, std=0.02, generator=generator)
        nn.init.zeros_(linear.bias)
        return linear

    @property
    def task_names(self) -> list[str]:
        """The names of the tasks, by task label."""
        return [cast(Readout, each).task for each in self.readouts]

    def task_label(self, name: str) -> int:
        """Return the task label for a name.

        Raises:
            TaskError: there is no such task.
        """
        if name in (known := self.task_names):
            return known.index(name)
        raise TaskError(f"The model has no task {name!r}. It reads out: {', '.join(known) or 'none'}.")

    def readout_of(self, task: int) -> Readout:
        """Return the readout of a task.

        Raises:
            TaskError: there is no such task label.
        """
        if not 0 <= task < len(self.readouts):
            raise TaskError(f"The model has no task label {task}; it has {counted(len(self.readouts), 'task')}.")
        return cast(Readout, self.readouts[task])

    def readout_module(self, task: int) -> nn.Module:
        """Return the layer that reads out a task, see `Readout`; for label words, it has no parameters."""
        return self.readout_of(task).layer

    def learned_readouts(self) -> list[nn.Parameter]:
        """Return the trained parameters of all readouts, each once; a head of transformers is not trained."""
        return [] if self.readout == "classifier" else list(self.readouts.parameters())

    def forward(self, x: Any, task_labels: Tensor | int | Current | None = Current.TASK) -> Any:
        """Return the logits of the labels, float32.

        Args:
            x: inputs ``(B, …)``; token ids ``(B, L)`` for language models; or the result of `on_device`.
            task_labels: one task for all rows, or one for each label ``(B,)``; ``None``: all tasks. Default: the task in
                training or evaluation, for plugins and metrics without task labels; or the only readout.

        Returns:
            ``(B, n)`` with the label count of the task, or the largest among several; labels that a row's task
            does not have get the lowest finite logit. For ``None``, logits ``(B, n)`` by task. If words are labelled, `counts`
            gives a row's number of labels, and of lines of logits; if a row has several labels, `Readout.lines` does.

        Raises:
            TaskError: there is no such task; or no task labels are given, and no task is in training or evaluation.
        """
        x = self.prepared(x)
        with autocast(self.precision, x.device.type), attention_for_training(x if isinstance(x, Tensor) else x.x):
            features = self.features(x)
            if task_labels is None:
                tasks = [0] if self.shared_readout else range(len(self.readouts))
                return {task: self.read(features, task).float() for task in tasks}
            if self.shared_readout:
                logits = self.read(features, 0).float()
                return logits if self.answered_labels is None else among(logits, self.answered_labels)
            if isinstance(task_labels, Current):
                task_labels = self._current()
            if isinstance(task_labels, int):
                return self.read(features, task_labels).float()
            return self._read_rows(features, task_labels).float()

    @contextmanager
    def answering_with(self, labels: Sequence[int] | None) -> Iterator[None]:
        """Let a shared readout give the lowest logit to all labels but these inside the block, except in calls for all tasks.

        Args:
            labels: the numbers of the labels; ``None``: all.
        """
        before, self.answered_labels = self.answered_labels, labels
        try:
            yield
        finally:
            self.answered_labels = before

    def _current(self) -> int:
        if self.current_task is not None:
            return self.current_task
        if len(self.readouts) == 1:
            return 0
        raise TaskError(
            f"The model has {len(self.readouts)} readouts and no task is in training or evaluation: give task_labels, one of "
            f"{', '.join(f'{label} ({name})' for label, name in enumerate(self.task_names))}."
        )

    def _read_rows(self, features: Any, task_labels: Tensor) -> Tensor:
        tasks = sorted(set(task_labels.tolist()))
        if len(tasks) == 1:
            return self.read(features, tasks[0])
        readouts = {task: self.readout_of(task) for task in tasks}
        task_of_place = task_labels
        if any(readout.yes_or_no for readout in readouts.values()):
            labels, first = task_labels.tolist(), [0]
            while (after := first[-1] + readouts[labels[first[-1]]].lines) < len(labels):
                first.append(after)
            task_of_place = task_labels[first]
        read = {task: self.read(features[task_of_place == task], task) for task in tasks}
        width = max(each.shape[1] for each in read.values())
        logits = torch.full((len(task_labels), width), LOWEST, device=read[tasks[0]].device)
        for task, own in read.items():
            logits[task_labels == task, : own.shape[1]] = own.to(logits.dtype)
        return logits

    def read(self, features: Any, task: int) -> Tensor:
        """Return the logits ``(B, n)`` of one task from `features`, in lines: see `Readout.in_lines`."""
        readout = self.readout_of(task)
        return readout.in_lines(readout(features))

    def space(self) -> ParameterSpace:
        """Return the space of the backbone's graftable entries, cached while names, shapes, dtypes and ties stay the same."""
        named = self.backbone.named_parameters(remove_duplicate=False)
        layout = [(name, id(parameter), parameter.shape, parameter.dtype) for name, parameter in named]
        if self._space is None or self._space[0] != layout:
            self._space = layout, ParameterSpace.of(self.backbone, include=(self._graftable,))
        return self._space[1]


def among(logits: Tensor, labels: Sequence[int]) -> Tensor:
    """Return logits ``(n, labels)`` with the lowest value at all labels but ``labels``."""
    hidden = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
    hidden[list(labels)] = False
    return logits.masked_fill(hidden, LOWEST)


def autocast(precision: str, device: str) -> AbstractContextManager[object]:
    """Compute forward passes in mixed precision on ``device``, for fp32 in the dtype of the weights; losses in float32.

    Raises:
        OptionError: the precision is ``auto``, which is decided for a model and not for a pass.
    """
    if precision == "auto":
        raise OptionError(
            "precision=auto is decided once for a model, before its first pass. Give fp32, bf16 or fp16 here; "
            "forgetfree.core.precision.faster_precision(model) says which of the first two auto is."
        )
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device, dtype=torch.float16 if precision == "fp16" else torch.bfloat16)


@contextmanager
def keeping_mode(model: nn.Module) -> Iterator[None]:
    """Restore the mode of each module (training or evaluation) after the block."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the block, and restore the mode of each module afterwards."""
    with keeping_mode(model):
        model.eval()
        yield


@contextmanager
def evaluating(model: ReadoutModel, precision: str) -> Iterator[None]:
    """Put a model into evaluation mode, and into a precision, inside the block."""
    before = model.precision
    with in_evaluation_mode(model):
        model.precision = precision
        try:
            yield
        finally:
            model.precision = before


def attention_for_training(x: Tensor) -> AbstractContextManager[object]:
    """Compute attention by the plain formula inside the block, if this makes training on rows ``x`` faster.

    It does on a CPU under autocast, for token ids ``(B, L)`` of short rows: flash attention's backward pass takes 2 to 10 times
    as long there. In float32, for longer rows and in evaluation, flash attention stays.
    """
    device = x.device.type
    if (
        device == "cpu"
        and x.dim() == 2
        and x.shape[1] <= SHORT
        and torch.is_grad_enabled()
        and torch.is_autocast_enabled(device)
    ):
        return sdpa_kernel(SDPBackend.MATH)
    return nullcontext()


# -- The body: a Hugging Face model without its head, the same for every class that loads it -----------


def body_of(model: nn.Module) -> nn.Module:
    """Return the body of one of our models or of a Hugging Face model; any other module is its own body."""
    backbone = model.backbone if isinstance(model, ReadoutModel) else model
    body = getattr(backbone, "base_model", backbone)
    return body if isinstance(body, nn.Module) else backbone


def part_named(model: nn.Module, space: ParameterSpace) -> nn.Module:
    """Return the part of a model to which a space's names refer: its body, or else the model with its head."""
    backbone = model.backbone if isinstance(model, ReadoutModel) else model
    body, name = body_of(model), space.tensors[0].name
    return body if name in dict(body.named_parameters(remove_duplicate=False)) else backbone


def body_prefix(backbone: nn.Module, body: nn.Module | None = None) -> str:
    """Return the prefix of the body's tensor names in ``backbone``, such as ``bert.``; empty if there is none."""
    body = body_of(backbone) if body is None else body
    name = next(name for name, module in backbone.named_modules() if module is body)
    return f"{name}." if name else ""


def body_space(backbone: nn.Module, space: ParameterSpace) -> ParameterSpace:
    """Return the space of ``backbone`` with tensors named as in the body; indices stay.

    Raises:
        RegionError: a tensor of the space lies outside the body.
    """
    prefix = body_prefix(backbone)
    if outside := [spec.name for spec in space.tensors if not spec.name.startswith(prefix)]:
        raise RegionError(
            f"A graft in a file of its own can only change the body of the model ({prefix!r}…), got the tensor {outside[0]!r}. "
            "Leave it out of the parameter space."
        )
    return ParameterSpace(tuple(replace(spec, name=spec.name.removeprefix(prefix)) for spec in space.tensors))
