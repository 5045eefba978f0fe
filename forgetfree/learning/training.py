"""Training on one task: options, optimizer, the update, and the plain loop around it.

The Avalanche strategies run their own loop around the same `Update`, on the same batches and seeds, and so
end with the same bits (a test compares them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forgetfree import registry
from forgetfree.core.checkpoint import Checkpoint
from forgetfree.core.examples import Examples
from forgetfree.core.readout_model import PrecisionChoice, ReadoutModel, autocast, native_precision
from forgetfree.core.steps import OnStep
from forgetfree.core.trained import Trained, WholeTensors, in_training
from forgetfree.data.sampling import by_length, plan_batches
from forgetfree.errors import OptionError
from forgetfree.learning.lower_layers import lower_layers_kept
from forgetfree.learning.own_optimizers import made_by, refuse_made, sets_rates
from forgetfree.learning.training_state import TrainingState
from forgetfree.options import Function, Options, build, option, recorded
from forgetfree.parallel.exchange import every, gathered
from forgetfree.parallel.parts import BatchSum, cut
from forgetfree.seeds import derive_seed

AnyOptions = TypeVar("AnyOptions", bound="TrainingOptions")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(Options):
    """How a task is trained. The defaults are the paper's (A.2 and §3) unless something else is said."""

    optimizer: Literal["sgd", "adamw"] | Function = option(
        "sgd",
        "the paper fine-tunes by SGD: its moves localize well (§3.2, fig. 5). A class of optimisers, such as "
        "torch.optim:RMSprop, gets the learning rates; a function of parameter groups sets all itself",
    )
    learning_rate: float = option(
        1e-2, "of the backbone; the paper chooses from 1e-2, 5e-3, 1e-3", above=0, at_most=1e38
    )
    readout_learning_rate: float | None = option(
        None, "of the task's linear readout; none: the backbone's", above=0, at_most=1e38
    )
    momentum: float = option(0.0, "of SGD", at_least=0, at_most=1)
    weight_decay: float = option(1e-4, "shrinks weights towards zero", at_least=0)
    l1: float = option(
        0.0, "strength of the penalty ‖θ − θ_pre‖₁; AdamW needs 1e-3 to localize (§3.2, fig. 5)", at_least=0
    )
    schedule: Literal["constant", "linear"] | Function = option(
        "linear",
        "the learning rate over the steps: linear falls to 0; a function gives the factor after so many updates",
    )
    warmup: float = option(
        0.0, "share of the steps over which the learning rate rises to its full height", at_least=0, at_most=1
    )
    batch_size: int = option(8, "rows per update; the paper chooses from 2, 4, 8", at_least=1)
    accumulation: int = option(1, "parts a batch is cut into to save memory; the update is the same", at_least=1)
    parts: int | None = option(
        None,
        "numbered parts of a batch, a power of two: each draws dropout by its number, and their gradients are added in a fixed "
        "order, so that several processes (--processes) compute the same bits as one; none: 4 with --processes, else batches "
        "are not cut",
        at_least=1,
    )
    steps: int | None = option(
        None,
        "updates per task; none: 16·n·k for n labels and k shots, 16·n·512 from 4096 shots on and at most that many for "
        "all rows (A.2)",
        at_least=1,
    )
    max_gradient_norm: float | None = option(None, "clip the gradient to this length", above=0)
    dropout: bool = option(True, "the backbone's own dropout while training")
    cache_lower_layers: bool = option(
        False,
        "keep, for each row, what leaves the layers below all that is trained, and compute those once: rows × tokens × width "
        "numbers of memory. It needs graftable=… that names upper layers alone, and dropout=false",
    )
    precision: PrecisionChoice = option(
        "fp32",
        "of forward and backward passes; weights stay fp32. bf16 is up to twice as fast where the device has it; auto: bf16 "
        "where the device computes in it natively, else fp32",
    )
    evaluation_batch_size: int = option(64, "rows per forward pass in evaluation", at_least=1)
    deterministic: bool = option(
        False,
        "answer each row in a forward pass of its own: its logits have the same bits whatever rows are answered beside it, "
        "in any order and any batch size. Evaluation of short rows takes longer",
    )

    def __post_init__(self) -> None:
        refuse_made(self.optimizer)
        super().__post_init__()
        if self.cache_lower_layers and self.dropout:
            raise OptionError(
                "cache_lower_layers=true needs dropout=false: what leaves a layer is then the same every time."
            )
        if self.parts is not None:
            self._check_parts(self.parts)

    def _check_parts(self, parts: int) -> None:
        """Raise ``OptionError`` where a batch cannot be cut into numbered parts with the same bits for all processes."""
        if parts & (parts - 1) or parts > self.batch_size:
            raise OptionError(
                f"parts must be a power of two, and at most batch_size={self.batch_size}, got {parts}. Set parts or batch_size "
                "otherwise."
            )
        if self.accumulation > 1:
            raise OptionError(
                f"parts={parts} cuts batches already, got accumulation={self.accumulation}. Leave accumulation out, and set "
                "parts higher to save memory."
            )
        if self.cache_lower_layers:
            raise OptionError(
                f"parts={parts} needs cache_lower_layers=false: what is kept of a row depends on the rows that a process met "
                "it with."
            )

    @property
    def rows_at_once(self) -> int:
        """The rows of a forward pass in evaluation. Kernels and their rounding depend on the shapes that they are given."""
        return 1 if self.deterministic else self.evaluation_batch_size

    @classmethod
    def for_model(cls, model: str, *, strategy: str | None = None, **changes: Any) -> Self:
        """Return what the command line takes for a model: its recipe, if it is registered with one, else the defaults.

        >>> TrainingOptions.for_model("minilm", steps=100).optimizer
        'adamw'

        Args:
            model: its name, as ``--model``.
            strategy: whose own options in the recipe count, too.
            changes: options that are set otherwise. Another ``optimizer`` of ours among them drops the recipe.

        Raises:
            UnknownNameError, OptionError: see `build`.
        """
        known = cls.__dataclass_fields__
        recipe = registry.recipe_of(model, changes, strategy=strategy)
        return build(cls, {key: value for key, value in recipe.items() if key in known} | changes, cls.__name__)


def for_device(options: AnyOptions, device: str | torch.device) -> AnyOptions:
    """Return the options with what ``precision=auto`` means on a device."""
    if options.precision != "auto":
        return options
    return replace(options, precision=native_precision(torch.device(device).type))


#: The number of shots that determines the number of updates if there are thousands.
MOST_SHOTS = 512


def paper_steps(n_labels: int, shots: int) -> int:
    """Return the paper's number of updates: 16·n·k for k shots, 16·n·512 from 4096 shots on (A.2).

    >>> paper_steps(2, 64), paper_steps(2, 4096)
    (2048, 16384)
    """
    return 16 * n_labels * (shots if shots < 4096 else MOST_SHOTS)


def rate_at(done: int, steps: int, options: TrainingOptions) -> float:
    """Return the factor on the learning rate after ``done`` of ``steps`` updates: warm-up, then the schedule."""
    rising = round(options.warmup * steps)
    if done < rising:
        return (done + 1) / rising * (float(options.schedule(done)) if callable(options.schedule) else 1.0)
    if callable(options.schedule):
        return float(options.schedule(done))
    return 1.0 if options.schedule == "constant" else max(0.0, (steps - done) / max(1, steps - rising))


def scheduled_rate(options: TrainingOptions, steps: int) -> Callable[[int], float]:
    """Return what tells the backbone's learning rate in a step of `fine_tune`, by its number from 1; NaN if unknown."""
    if sets_rates(options.optimizer):
        return lambda step: math.nan
    return lambda step: options.learning_rate * rate_at(step - 1, steps, options)


class Update:
    """One optimizer with its schedule, penalty and precision: `backward` per mini-batch, `step` per update.

    Args:
        backbone: graftable tensors (or a region's values) to train.
        readout: the task's own tensors.
        options: how to train.
        steps: the number of updates, for the schedule.
        anchors: θ_pre of ``backbone``, tensor by tensor, towards which the ℓ1 penalty pulls.
        optimizer: makes an optimiser from parameter groups (the backbone's, the readout's); default: that of the options.
        schedule: gives the factor on the learning rate after a number of updates; default: that of the options.

    Attributes:
        rate: the learning rate of the last update: the backbone's, if it is trained.
    """

    rate = math.nan

    def __init__(
        self,
        backbone: Sequence[nn.Parameter],
        readout: Sequence[nn.Parameter],
        options: TrainingOptions,
        steps: int,
        anchors: Sequence[Tensor] = (),
        *,
        optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
        schedule: Callable[[int], float] | None = None,
    ) -> None:
        self._options = options
        self._backbone = list(backbone)
        self._anchors = list(anchors) if options.l1 else []
        rate, decay = options.learning_rate, options.weight_decay
        groups: list[dict[str, Any]] = [
            {"params": list(backbone), "lr": rate},
            {"params": list(readout), "lr": options.readout_learning_rate or rate},
        ]
        groups = [group for group in groups if group["params"]]
        self.optimizer: torch.optim.Optimizer
        if optimizer is not None:
            self.optimizer = optimizer(groups)
        elif callable(options.optimizer):
            self.optimizer = made_by(options.optimizer, groups)
        elif options.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(groups, momentum=options.momentum, weight_decay=decay)
        else:  # one pass over memory an update, where the device has it
            fused = all(parameter.device.type in ("cpu", "cuda") for group in groups for parameter in group["params"])
            self.optimizer = torch.optim.AdamW(groups, weight_decay=decay, fused=fused)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, schedule or (lambda done: rate_at(done, steps, options))
        )
        self.trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self._device = self.trained[0].device.type
        self._scaler = torch.amp.GradScaler(self._device, enabled=options.precision == "fp16")

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of one mini-batch's (already weighted) loss."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def before_step(self) -> None:
        """Unscale the gradients, add the penalty's, and clip them."""
        if self._options.precision == "fp16":
            self._scaler.unscale_(self.optimizer)
        for parameter, anchor in zip(self._backbone, self._anchors, strict=False):
            if parameter.grad is not None:  # ∂‖θ − θ_pre‖₁ = sign(θ − θ_pre)
                parameter.grad.add_((parameter.detach() - anchor).sign_(), alpha=self._options.l1)
        if self._options.max_gradient_norm is not None:
            nn.utils.clip_grad_norm_(self.trained, self._options.max_gradient_norm)

    def step(self) -> None:
        """Update the weights."""
        self.rate = float(self.optimizer.param_groups[0]["lr"])
        scale = self._scaler.get_scale()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        if self._scaler.get_scale() >= scale:  # else the gradients overflowed and the step was skipped
            self._schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters in training, and what the optimiser, the schedule and the scale of losses remember."""
        return {
            "parameters": [parameter.detach() for parameter in self.trained],
            "optimizer": self.optimizer.state_dict(),
            "schedule": self._schedule.last_epoch,
            "scaler": self._scaler.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        for parameter, held in zip(self.trained, state["parameters"], strict=True):
            parameter.copy_(held)
        self.optimizer.load_state_dict(state["optimizer"])
        self._schedule.last_epoch = state["schedule"]
        self._scaler.load_state_dict(state["scaler"])


def plan(lengths: Sequence[int], options: TrainingOptions, steps: int, seed: int) -> list[list[int]]:
    """Return the row numbers of every batch of a training phase."""
    return plan_batches(lengths, options.batch_size, steps, derive_seed(seed, "batches"))


def training_mode(model: nn.Module, dropout: bool) -> None:
    """Set ``model`` to training mode; without ``dropout``, only modules with statistics, such as BatchNorm."""
    model.train(dropout)
    if not dropout:
        for module in model.modules():
            if getattr(module, "track_running_stats", False):
                module.train()


def fine_tune(
    model: ReadoutModel,
    rows: Examples,
    options: TrainingOptions,
    *,
    steps: int,
    seed: int,
    on_step: OnStep | None = None,
    trained: Trained | None = None,
    checkpoint: Checkpoint | None = None,
    about: tuple[str, ...] = (),
) -> None:
    """Fine-tune graftable entries and the task's readout in place, from the weights that the model has.

    Args:
        model: the model; its backbone and the readout of ``rows.task`` change, nothing else.
        rows: the training rows of one task.
        options: how to train.
        steps: the number of updates.
        seed: for batches and dropout.
        on_step: called after every update.
        trained: what is trained of the backbone; default: all graftable tensors.
        checkpoint: keeps where the training stands.
        about: what tells it there from another training that starts alike.

    Raises:
        TrainingError: the loss is not finite.
    """
    trained = trained or WholeTensors(model.space().parameters(model.backbone))
    readout = list(model.readout_module(rows.task).parameters())
    anchors = [parameter.detach().clone() for parameter in trained.parameters] if options.l1 else []
    device = next(model.parameters()).device
    with in_training(model, trained, readout), lower_layers_kept(model, options.cache_lower_layers):
        update = Update(trained.parameters, readout, options, steps, anchors)
        batch_sum = BatchSum(model, trained, update.trained, options)
        torch.manual_seed(derive_seed(seed, "dropout"))
        training_mode(model, options.dropout)
        state = TrainingState(model, trained, update, options.cache_lower_layers)
        done = state.begin(checkpoint, steps, seed, recorded(options), rows.labels, *about)
        for step, batch in enumerate(plan(rows.lengths, options, steps, seed)[done:], done + 1):
            update.optimizer.zero_grad()
            for part in cut(batch, options, rows.counts):
                part.seed_(seed, step)
                x, y, t = (tensor.to(device) for tensor in rows.batch(part.rows))
                with autocast(options.precision, device.type):
                    logits = model(x, t)
                loss = F.cross_entropy(logits.float(), y) * part.share
                update.backward(loss)
                batch_sum.add(loss, step)
            total = batch_sum.finish(step)
            update.before_step()
            update.step()
            trained.write()
            if on_step:
                on_step(step, total)
            state.after(step)


def predict(
    model: ReadoutModel,
    rows: Examples,
    *,
    batch_size: int = 64,
    precision: str = "fp32",
    collected: Callable[[Tensor, Tensor], Tensor] = lambda logits, labels: logits,
) -> Tensor:
    """Return the logits of every row in the rows' order: float32 ``(n, n_labels)`` on the CPU, in evaluation mode.

    Where words are labelled, those of all words that are read. Several processes answer different batches.

    Args:
        model: answers as it is.
        rows: the rows.
        batch_size: rows in a forward pass.
        precision: of forward passes.
        collected: what is returned in place of the logits of a batch, from these and its labels.
    """
    return _of_all_rows(model, lambda x, y, t: collected(model(x, t), y), rows, batch_size, precision)


def features_of(model: ReadoutModel, rows: Examples, *, batch_size: int = 64, precision: str = "fp32") -> Tensor:
    """Return what the readouts read of every row, as `predict` returns logits: float32 ``(n, H)``."""
    return _of_all_rows(model, lambda x, y, t: model.features(x), rows, batch_size, precision)


@torch.no_grad()
def _of_all_rows(
    model: ReadoutModel,
    read: Callable[[Tensor, Tensor, Tensor], Tensor],
    rows: Examples,
    batch_size: int,
    precision: str,
) -> Tensor:
    device = next(model.parameters()).device
    mode = model.training
    model.eval()
    found: list[tuple[Tensor, Tensor]] = []  # what is read, and the row of each
    for batch in every(by_length(rows.lengths, batch_size)):
        x, y, t = rows.batch(batch)
        with autocast(precision, device.type):
            outputs = read(x.to(device), y.to(device), t.to(device)).float().cpu()
        found.append((outputs, torch.tensor(batch).repeat_interleave(model.counts(x))))
    model.train(mode)
    outputs, order = map(torch.cat, zip(*gathered(found), strict=True))
    return outputs[torch.argsort(order, stable=True)]
