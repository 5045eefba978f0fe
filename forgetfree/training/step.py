"""The training step, which the plain loop and Avalanche's loop share, and its batches.

A step is one update of a task's trained parameters, by the gradients of one batch. The batch may come in parts, one forward
pass each, to save memory: the update is the same.

    step = TrainingStep(model, trained, readout, options, steps)
    for batch in plan(rows.lengths, options, steps, seed):
        step.zero_grad()
        for part in parts(batch, options.accumulation):
            step.backward(loss(part.rows), part.share)
        step.update()
    step.finish()

Strategies run Avalanche's loop around it, on the same batches and seeds as the plain loop `fine_tune`, and so end with the same
bits (a test compares them).
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as checkpointed

from forgetfree.checkpoint import Checkpoint
from forgetfree.core.parameters import persistent_buffers
from forgetfree.core.readout_model import ReadoutModel, autocast, body_of
from forgetfree.core.trained import (
    OnStep,
    Reading,
    RegionParameters,
    TrainedParameters,
    WholeTensors,
    check_loss,
    in_training,
)
from forgetfree.data.examples import Examples
from forgetfree.data.rows import plan_batches
from forgetfree.errors import OptionError
from forgetfree.options import recorded
from forgetfree.seeds import derive_seed
from forgetfree.training.training_options import WORKSPACE, TrainingOptions, build_optimizer, for_model, rate_at

# -- Batches --------------------------------------------------------------------------------------------


def plan(lengths: Sequence[int], options: TrainingOptions, steps: int, seed: int) -> list[list[int]]:
    """Return the row numbers of every batch of a training phase."""
    return plan_batches(lengths, options.batch_size, steps, derive_seed(seed, "batches"))


@dataclass(frozen=True)
class Part:
    """The input of one forward pass: rows, their share of the batch, and whether they open or close an update."""

    rows: Sequence[int]
    share: float
    first: bool
    last: bool


#: The part of a batch that is not split.
WHOLE = Part((), 1.0, True, True)


def parts(batch: Sequence[int], accumulation: int, counts: Sequence[int] | None = None) -> Iterator[Part]:
    """Cut a batch into ``accumulation`` parts of nearly equal size; fewer if it has fewer rows.

    Args:
        batch: the numbers of its rows.
        accumulation: the number of parts.
        counts: the number of labels of each row of the data, which weights a part's share; default: one each.
    """
    count = min(accumulation, len(batch))
    labels = [1 if counts is None else counts[row] for row in batch]
    for i in range(count):
        begin, end = len(batch) * i // count, len(batch) * (i + 1) // count
        yield Part(batch[begin:end], sum(labels[begin:end]) / sum(labels), i == 0, i == count - 1)


def training_mode(model: nn.Module, dropout: bool) -> None:
    """Set ``model`` to training mode; without ``dropout``, only modules with statistics, such as BatchNorm."""
    model.train(dropout)
    if not dropout:
        for module in model.modules():
            if getattr(module, "track_running_stats", False):
                module.train()


# -- The step -------------------------------------------------------------------------------------------


class TrainingStep:
    """One optimizer with its schedule, penalty and precision: `backward` for each part of a batch, then `update`.

    It can be saved and resumed, see `forgetfree.checkpoint.Resumable`. Its state has the trained parameters, the optimiser,
    the schedule, the loss scale, the model's buffers and the random generators.

    Args:
        model: the model, in training.
        trained: the trained parameters of its backbone. An ℓ1 penalty pulls them towards their present values.
        readout: the trained parameters of readouts.
        options: how to train.
        steps: the number of updates, for the schedule.
        optimizer: makes an optimiser from parameter groups (the backbone's, the readout's); default: the options' optimiser.
        schedule: returns the factor on the learning rate after a number of updates; default: the options' schedule.

    On a CPU, a loss is known at once. To read it from a GPU would block, so there each loss is read after the next update, and
    the last one by `finish`.

    Attributes:
        done: the updates so far.
        on_step: called for each update once its loss is known, with its number and the loss.
        rate: the learning rate of the update for which `on_step` is called: the backbone's, if it is trained.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: TrainedParameters,
        readout: Sequence[nn.Parameter],
        options: TrainingOptions,
        steps: int,
        *,
        optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
        schedule: Callable[[int], float] | None = None,
    ) -> None:
        self.done, self.rate = 0, math.nan
        self.on_step: OnStep | None = None
        self._model, self._trained, self._options, self._steps = model, trained, options, steps
        backbone = list(trained.parameters)
        self._anchored = [(each, each.detach().clone()) for each in backbone] if options.l1 else []
        self._losses: list[Reading] = []  # of the batch, part by part
        self._untold: list[tuple[int, float, list[Reading]]] = []  # updates whose losses may not be known yet
        self._checkpoint = Checkpoint()
        rate, decay = options.learning_rate, options.weight_decay
        groups: list[dict[str, Any]] = [
            {"params": backbone, "lr": rate},
            {"params": list(readout), "lr": options.readout_learning_rate or rate},
        ]
        groups = [group for group in groups if group["params"]]
        self.optimizer: torch.optim.Optimizer
        if optimizer is not None:
            self.optimizer = optimizer(groups)
        elif callable(options.optimizer):
            self.optimizer = build_optimizer(options.optimizer, groups)
        elif options.optimizer in ("sgd", "momentum"):
            momentum = 0.9 if options.optimizer == "momentum" else 0.0
            self.optimizer = torch.optim.SGD(groups, momentum=momentum, weight_decay=decay)
        else:  # fused: one pass over memory per update, on devices that support it
            fused = all(parameter.device.type in ("cpu", "cuda") for group in groups for parameter in group["params"])
            self.optimizer = torch.optim.AdamW(groups, weight_decay=decay, fused=fused)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, schedule or (lambda done: rate_at(done, steps, options))
        )
        self._parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self._scaler = torch.amp.GradScaler(self._parameters[0].device.type, enabled=options.precision == "fp16")

    def begin(self, checkpoint: Checkpoint | None, seed: int, *about: Any) -> int:
        """Resume the training from ``checkpoint``, and return the number of updates that are done.

        Args:
            checkpoint: stores the training.
            seed: the random seed of the training.
            about: extra values mixed into the checkpoint's key, such as options and labels, so that another training is not
                resumed by mistake. Their types are those of a state.
        """
        # Other classes may have a state of their own.
        if checkpoint is not None and isinstance(self._trained, WholeTensors | RegionParameters):
            self._checkpoint = checkpoint
        self.done = self._checkpoint.begin(self._steps, self, seed, *about)
        return self.done

    def zero_grad(self) -> None:
        """Clear the gradients of the last batch."""
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor, share: float = 1.0) -> None:
        """Add the gradients of a part of a batch.

        Args:
            loss: the mean over the part.
            share: the part's share of the batch.

        Raises:
            TrainingError: the loss is known, and not finite.
        """
        loss = loss * share
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._losses.append(reading := Reading(loss))
        if reading.is_there:
            check_loss(reading, self.done + 1)

    def update(self) -> None:
        """Update the trained parameters.

        Raises:
            TrainingError: the loss of the previous update was not finite.
        """
        self._trained.collect()
        if self._options.precision == "fp16":
            self._scaler.unscale_(self.optimizer)
        self._pull()
        if self._options.max_gradient_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._options.max_gradient_norm)
        rate = float(self.optimizer.param_groups[0]["lr"])
        scale = self._scaler.get_scale()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        if self._scaler.get_scale() >= scale:  # else the gradients overflowed and the step was skipped
            self._schedule.step()
        self._trained.write()
        self.done += 1
        losses, self._losses = self._losses, []
        self._untold.append((self.done, rate, losses))
        self._tell(later=0 if all(each.is_there for each in losses) else 1)

    @torch.no_grad()
    def _pull(self) -> None:
        """Add the gradient of the ℓ1 penalty, ∂‖θ − θ_pre‖₁ = sign(θ − θ_pre)."""
        pulled = [(p, p.grad, anchor) for p, anchor in self._anchored if p.grad is not None]
        if pulled:
            values, gradients, anchors = map(list, zip(*pulled, strict=True))
            signs = torch._foreach_sub(values, anchors)
            torch._foreach_sign_(signs)
            torch._foreach_add_(gradients, signs, alpha=self._options.l1)

    def finish(self) -> None:
        """Wait for the losses that are not known yet.

        Raises:
            TrainingError: one is not finite.
        """
        self._tell(later=0)

    def _tell(self, later: int) -> None:
        """Report the updates to `on_step`, except for the last ``later`` ones."""
        while len(self._untold) > later:
            number, self.rate, losses = self._untold.pop(0)
            loss = sum(check_loss(each, number) for each in losses)
            if self.on_step:
                self.on_step(number, loss)

    def keep(self) -> None:
        """Store the state of the training from time to time."""
        self._checkpoint.after(self.done, self._steps, self)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, after all losses are reported."""
        self.finish()
        return {
            "parameters": [parameter.detach() for parameter in self._parameters],
            "optimizer": self.optimizer.state_dict(),
            "schedule": self._schedule.last_epoch,
            "scaler": self._scaler.state_dict(),
            "buffers": persistent_buffers(self._model),
            "generators": generators(self._parameters[0].device),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, and write its parameters into the model."""
        for parameter, value in zip(self._parameters, state["parameters"], strict=True):
            parameter.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self._schedule.last_epoch = state["schedule"]
        self._scaler.load_state_dict(state["scaler"])
        self._trained.write()
        for name, buffer in persistent_buffers(self._model).items():
            buffer.copy_(state["buffers"][name])
        set_generators(state["generators"], self._parameters[0].device)


def generators(device: torch.device | None = None) -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy, PyTorch and of the device, unless it is the CPU."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys)), *rest),
        "torch": torch.get_rng_state(),
        "device": None if device is None or device.type == "cpu" else _of_device(device, "get_rng_state")(),
    }


def _of_device(device: torch.device, name: str) -> Callable[..., Any]:
    """Return a function of the torch module for a device's type, bound to the device; mps has a single device."""
    function: Callable[..., Any] = getattr(torch.get_device_module(device), name)
    return function if device.type == "mps" else partial(function, device=device)


def set_generators(states: dict[str, Any], device: torch.device | None = None) -> None:
    """Set the generators to the states that `generators` returned for the device."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(states["torch"])
    if device is not None and states["device"] is not None:
        _of_device(device, "set_rng_state")(states["device"])


# -- The same bits on a GPU -------------------------------------------------------------------------------


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Use deterministic algorithms of PyTorch inside, if ``wanted``; on a CPU, all algorithms used here are deterministic.

    Raises:
        OptionError: CUDA was initialised without the environment variable that this needs.
    """
    if not wanted:
        yield
        return
    if WORKSPACE not in os.environ and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise OptionError(
            f"deterministic_training=true needs the environment variable {WORKSPACE} to be set before CUDA is "
            f"initialised, which has already happened. Set {WORKSPACE}=:4096:8, or create the options before "
            "anything runs on the GPU."
        )
    filling: Any = torch.utils.deterministic  # filling each new tensor would take time
    before = torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=warned)
        filling.fill_uninitialized_memory = before[1]


# -- Gradient checkpoints ---------------------------------------------------------------------------------


@contextmanager
def layer_checkpoints(model: ReadoutModel, wanted: bool) -> Iterator[None]:
    """Inside, passes with gradients store only the inputs of each layer, if ``wanted``; the backward pass recomputes the rest.

    Dropout draws the same numbers again, so gradients have the same bits (arXiv:1604.06174). Transformers' own switch works
    only in training mode, and a model without dropout is trained in evaluation mode.

    Raises:
        OptionError: the backbone has no list of layers of one class.
    """
    if not wanted:
        yield
        return
    layers = [layer for stack in stacks_of(model.backbone) for layer in stack]
    if not layers:
        raise OptionError(
            f"gradient_checkpointing needs a list of layers of one class, which {type(model.backbone).__name__} does "
            "not have. Leave it out."
        )
    with ExitStack() as undo:
        for layer in layers:
            vars(layer)["forward"] = partial(_recomputed, layer.forward)
            undo.callback(vars(layer).pop, "forward")
        config: Any = getattr(body_of(model), "config", None)
        if getattr(config, "use_cache", False):  # a layer that is computed twice would add its keys to the cache twice
            config.use_cache = False
            undo.callback(setattr, config, "use_cache", True)
        yield


def _recomputed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpointed(forward, *args, use_reentrant=False, **kwargs)


def stacks_of(backbone: nn.Module) -> list[nn.ModuleList]:
    """Return the outermost lists of at least two modules of one class."""
    if isinstance(backbone, nn.ModuleList) and len(backbone) > 1 and len({type(each) for each in backbone}) == 1:
        return [backbone]
    return [stack for child in backbone.children() for stack in stacks_of(child)]


# -- The plain loop ------------------------------------------------------------------------------------


def fine_tune(
    model: ReadoutModel,
    rows: Examples,
    options: TrainingOptions,
    *,
    steps: int,
    seed: int,
    on_step: OnStep | None = None,
    trained: TrainedParameters | None = None,
    checkpoint: Checkpoint | None = None,
    about: tuple[str, ...] = (),
) -> None:
    """Fine-tune graftable entries and the task's readout in place, from the model's current weights.

    Args:
        model: the model; its backbone and the readout of ``rows.task`` change, nothing else.
        rows: the training rows of one task.
        options: how to train.
        steps: the number of updates.
        seed: for batches and dropout.
        on_step: called for every update, see `TrainingStep`.
        trained: the trained parameters of the backbone; default: all graftable tensors.
        checkpoint: stores the state of the training.
        about: extra values mixed into the checkpoint's key, so that another training is not resumed by mistake.

    Raises:
        TrainingError: the loss is not finite.
    """
    options = for_model(options, model, rows)
    trained = trained or WholeTensors(model.space().parameters(model.backbone))
    readout = list(model.readout_module(rows.task).parameters())
    with (
        in_training(model, trained, readout),
        layer_checkpoints(model, options.gradient_checkpointing),
        deterministic(options.deterministic_training),
    ):
        step = TrainingStep(model, trained, readout, options, steps)
        step.on_step = on_step
        torch.manual_seed(derive_seed(seed, "dropout"))
        training_mode(model, bool(options.dropout))
        done = step.begin(checkpoint, seed, recorded(options), rows.labels, *about)
        for batch in plan(rows.lengths, options, steps, seed)[done:]:
            step.zero_grad()
            for part in parts(batch, options.accumulation, rows.counts):
                x, y, t = model.on_device(rows.batch(part.rows))
                with autocast(options.precision, y.device.type):
                    logits = model(x, t)
                step.backward(F.cross_entropy(logits.float(), y), part.share)
            step.update()
            step.keep()
        step.finish()
