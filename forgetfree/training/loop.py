"""Training on one task: the update, where the training stands, the plain loop around both, and the answers of a model.

The Avalanche strategies run their own loop around the same `Update`, on the same batches and seeds, and so
end with the same bits (a test compares them).
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forgetfree import __version__
from forgetfree.checkpoint import Checkpoint, Resumable
from forgetfree.core.batch_loss import OnStep, check_loss
from forgetfree.core.precision import decided
from forgetfree.core.readout_model import ReadoutModel, autocast, evaluating
from forgetfree.core.tensors import digest_of, persistent_buffers
from forgetfree.core.trained import RegionParameters, TrainedParameters, WholeTensors, in_training
from forgetfree.data.examples import Examples
from forgetfree.data.sampling import by_length, plan_batches
from forgetfree.models.loading import LoadedModel, config_of
from forgetfree.models.state import ModelState
from forgetfree.options import Function, name_of_function, recorded
from forgetfree.results.answers import Answers
from forgetfree.seeds import derive_seed
from forgetfree.training.accumulation import parts
from forgetfree.training.encoded_task import EncodedTask
from forgetfree.training.layers import layer_checkpoints
from forgetfree.training.training_options import TrainingOptions, build_optimizer, for_model, rate_at


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
            self.optimizer = build_optimizer(options.optimizer, groups)
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
        for parameter, value in zip(self.trained, state["parameters"], strict=True):
            parameter.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self._schedule.last_epoch = state["schedule"]
        self._scaler.load_state_dict(state["scaler"])


class TrainingState:
    """Parameters, optimiser, schedule, buffers and generators; see `forgetfree.checkpoint.Resumable`.

    Args:
        model: in training.
        trained: what is trained of its backbone.
        update: trains it.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: TrainedParameters,
        update: Resumable,
    ) -> None:
        self._model, self._trained, self._update = model, trained, update
        # Other classes may have a state of their own.
        self._can_be_kept = isinstance(trained, WholeTensors | RegionParameters)
        self._checkpoint, self._steps = Checkpoint(), 0

    def begin(self, checkpoint: Checkpoint | None, steps: int, seed: int, *about: Any) -> int:
        """Go on from where ``checkpoint`` has kept the training, and return how many of its steps are done.

        Args:
            checkpoint: keeps it.
            steps: of the training.
            seed: of its draws.
            about: what else tells it from others that start alike, as parts of a state: options, labels.
        """
        if checkpoint is not None and self._can_be_kept:
            self._checkpoint, self._steps = checkpoint, steps
        return self._checkpoint.begin(steps, self, seed, *about)

    def after(self, step: int) -> None:
        """Keep where it stands after a step, now and then."""
        self._checkpoint.after(step, self._steps, self)

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        buffers = persistent_buffers(self._model)
        return {"update": self._update.state_dict(), "buffers": buffers, "generators": generators()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; the model holds the values of its parameters."""
        self._update.load_state_dict(state["update"])
        self._trained.write()
        for name, buffer in persistent_buffers(self._model).items():
            buffer.copy_(state["buffers"][name])
        set_generators(state["generators"])


def generators() -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and PyTorch."""
    name, keys, *rest = np.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": devices,
    }


def set_generators(states: dict[str, Any]) -> None:
    """Set the generators to what `generators` returned."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])


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
    trained: TrainedParameters | None = None,
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
    options = for_model(options, model, rows)
    trained = trained or WholeTensors(model.space().parameters(model.backbone))
    readout = list(model.readout_module(rows.task).parameters())
    anchors = [parameter.detach().clone() for parameter in trained.parameters] if options.l1 else []
    device = next(model.parameters()).device
    with (
        in_training(model, trained, readout),
        layer_checkpoints(model, options.gradient_checkpointing),
    ):
        update = Update(trained.parameters, readout, options, steps, anchors)
        torch.manual_seed(derive_seed(seed, "dropout"))
        training_mode(model, options.dropout)
        state = TrainingState(model, trained, update)
        done = state.begin(checkpoint, steps, seed, recorded(options), rows.labels, *about)
        for step, batch in enumerate(plan(rows.lengths, options, steps, seed)[done:], done + 1):
            update.optimizer.zero_grad()
            total = 0.0
            for part in parts(batch, options.accumulation, rows.counts):
                x, y, t = (tensor.to(device) for tensor in rows.batch(part.rows))
                with autocast(options.precision, device.type):
                    logits = model(x, t)
                loss = F.cross_entropy(logits.float(), y) * part.share
                update.backward(loss)
                total += check_loss(loss, step)
            trained.collect()
            update.before_step()
            update.step()
            trained.write()
            if on_step:
                on_step(step, total)
            state.after(step)


def fine_tuned_key(
    loaded: LoadedModel,
    task: EncodedTask,
    pre: ModelState,
    options: TrainingOptions,
    seed: int,
    device: torch.device,
) -> str:
    """Return the start of the task's name and a digest of everything that determines its fine-tuned model.

    Args:
        loaded: the model.
        task: the task, its sample drawn.
        pre: θ_pre, with the task's untrained readout.
        options: how to train; only training options count.
        seed: that of the run, from which the seeds of batches and dropout are derived.
        device: where the model is trained.
    """
    model = loaded.model
    options = for_model(options, model, task.train)
    fields = TrainingOptions.__dataclass_fields__.keys() - {"deterministic", "answer_precision"}  # of evaluation
    training = {field: getattr(options, field) for field in fields}
    if not options.gradient_checkpointing:  # older keys have no word of it
        del training["gradient_checkpointing"]
    content = {
        "model": loaded.fingerprint,
        "readout": model.readout,
        "label words": model.heads[task.label].label_words,
        "tokens": repr(getattr(model, "tokens", None)),
        "head": {name: digest_of(tensor) for name, tensor in pre.readouts[task.name].items()},
        "rows": task.train.digest,
        "task": {name: value for name, value in asdict(task.definition).items() if name != "decoding"} | {"hub": None},
        "options": training | {"steps": task.full_steps(options), "evaluation_batch_size": None},
        "seed": seed,
        "config": config_of(model.backbone),
        "graftable": model.space().layout_hash,
        "versions": [__version__, torch.__version__, version("transformers")],
        "device": device.type,
        "threads": torch.get_num_threads(),
    }
    if model.answered_labels is not None:
        content["labels"] = list(model.answered_labels)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=_identity).encode()).hexdigest()
    return f"{task.name[:40]}-{digest[:16]}"  # it becomes a file's name, whose length is limited


@cache
def _identity(function: Function) -> str:
    """Return what tells a function from any other; of one that may change, another text in every process."""
    name = name_of_function(function)
    return name if name.startswith("torch.") else f"{name} {uuid.uuid4()}"  # torch's version is in the key


def answers_of(model: ReadoutModel, task: EncodedTask, rows: Examples, options: TrainingOptions) -> Answers:
    """Return what a model answers to rows of a task, in batches and in the precision that the options say."""
    kind = task.kind
    logits = predict(model, rows, **options.answering, collected=kind.collected)
    answers = kind.answers(task.definition, logits, rows.labels, rows)
    return kind.with_texts(answers, task.definition, model, rows, **options.answering)


def quality_of(model: ReadoutModel, task: EncodedTask, rows: Examples, options: TrainingOptions) -> tuple[float, float]:
    """Return how well a model answers rows of a task, larger is better; of equal ones the second number decides.

    Labels have their score by the task's metric, and minus their loss; texts minus their loss.

    Args:
        model: answers as it is.
        task: the task.
        rows: of the task.
        options: precision and batch size of the forward passes.
    """
    logits = _finite_logits(model, task, rows, options)
    return (-math.inf, -math.inf) if logits is None else task.kind.quality(task.definition, logits, rows)


def loss_of(model: ReadoutModel, task: EncodedTask, rows: Examples, options: TrainingOptions) -> float:
    """Return the mean loss on rows of a task; infinite where it answers no numbers. Arguments as those of `quality_of`."""
    logits = _finite_logits(model, task, rows, options)
    return math.inf if logits is None else task.kind.loss(task.definition, logits, rows)


def _finite_logits(model: ReadoutModel, task: EncodedTask, rows: Examples, options: TrainingOptions) -> Tensor | None:
    """Return what the task's kind collects of the logits; nothing where one is not finite: the weights moved too far."""
    logits = predict(model, rows, **options.answering, collected=task.kind.collected)
    return logits if bool(logits.isfinite().all()) else None


def predict(
    model: ReadoutModel,
    rows: Examples,
    *,
    batch_size: int = 64,
    precision: str = "fp32",
    collected: Callable[[Tensor, Tensor], Tensor] = lambda logits, labels: logits,
) -> Tensor:
    """Return the logits of every row in the rows' order: float32 ``(n, n_labels)`` on the CPU, in evaluation mode.

    Where words are labelled, those of all words that are read.

    Args:
        model: answers as it is.
        rows: the rows.
        batch_size: rows in a forward pass.
        precision: of forward passes.
        collected: what is returned in place of the logits of a batch, from these and its labels.
    """
    return _of_all_rows(model, lambda x, y, t: collected(model(x, t), y), rows, batch_size, precision)


def features_of(
    model: ReadoutModel,
    rows: Examples,
    read: Callable[[Tensor], Tensor],
    *,
    batch_size: int = 64,
    precision: str = "fp32",
) -> Tensor:
    """Return what a method of the model reads of every row, as `predict` returns logits: float32 ``(n, H)``."""
    return _of_all_rows(model, lambda x, y, t: read(x), rows, batch_size, precision)


def token_losses(model: ReadoutModel, rows: Examples, *, batch_size: int = 64, precision: str = "fp32") -> Tensor:
    """Return the cross-entropy of every token that is to be predicted, in nats: float32 ``(n,)``."""

    def read(x: Tensor, y: Tensor, _: Tensor) -> Tensor:
        return F.cross_entropy(model.features(x).float(), y, reduction="none")

    return _of_all_rows(model, read, rows, batch_size, precision)


@torch.no_grad()
def _of_all_rows(
    model: ReadoutModel,
    read: Callable[[Tensor, Tensor, Tensor], Tensor],
    rows: Examples,
    batch_size: int,
    precision: str,
) -> Tensor:
    device = next(model.parameters()).device
    precision = decided(precision, model, rows)
    pieces: list[tuple[Tensor, Tensor]] = []  # what is read, and the row of each
    with evaluating(model, precision):
        for batch in by_length(rows.lengths, batch_size):
            x, y, t = rows.batch(batch)
            with autocast(precision, device.type):
                outputs = read(x.to(device), y.to(device), t.to(device)).float().cpu()
            pieces.append((outputs, torch.tensor(batch, device="cpu").repeat_interleave(model.counts(x))))
    outputs, order = map(torch.cat, zip(*pieces, strict=True))
    return outputs[torch.argsort(order, stable=True)]
