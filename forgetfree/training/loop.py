"""Training on one task by the plain loop, and the answers of a model.

Strategies run Avalanche's loop around the same `TrainingStep`, on the same batches and seeds, and so end with the same bits (a
test compares them).
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from importlib.metadata import version

import torch
from torch import Tensor
from torch.nn import functional as F

from forgetfree import __version__
from forgetfree.checkpoint import Checkpoint
from forgetfree.core.parameters import digest_of
from forgetfree.core.precision import decided
from forgetfree.core.readout_model import ReadoutModel, autocast, evaluating
from forgetfree.core.trained import OnStep, TrainedParameters, WholeTensors, in_training
from forgetfree.data.examples import Examples
from forgetfree.data.sampling import by_length
from forgetfree.models.loading import LoadedModel, config_of
from forgetfree.models.state import ModelState
from forgetfree.options import Function, name_of_function, recorded
from forgetfree.results.answers import Answers
from forgetfree.seeds import derive_seed
from forgetfree.training.encoded_task import EncodedTask
from forgetfree.training.step import TrainingStep, layer_checkpoints, parts, plan, training_mode
from forgetfree.training.training_options import TrainingOptions, for_model


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
    device = next(model.parameters()).device
    with in_training(model, trained, readout), layer_checkpoints(model, options.gradient_checkpointing):
        step = TrainingStep(model, trained, readout, options, steps)
        torch.manual_seed(derive_seed(seed, "dropout"))
        training_mode(model, bool(options.dropout))
        done = step.begin(checkpoint, seed, recorded(options), rows.labels, *about)
        for batch in plan(rows.lengths, options, steps, seed)[done:]:
            step.zero_grad()
            for part in parts(batch, options.accumulation, rows.counts):
                x, y, t = (tensor.to(device) for tensor in rows.batch(part.rows))
                with autocast(options.precision, device.type):
                    logits = model(x, t)
                step.backward(F.cross_entropy(logits.float(), y), part.share)
            loss = step.update()
            if on_step:
                on_step(step.done, loss)
            step.keep()


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
    training = {field: getattr(options, field) for field in TrainingOptions.__dataclass_fields__}
    training |= {"steps": task.full_steps(options), "dropout": bool(options.dropout), "evaluation_batch_size": None}
    content = {
        "model": loaded.fingerprint,
        "readout": model.readout,
        "label words": model.heads[task.label].label_words,
        "tokens": repr(getattr(model, "tokens", None)),
        "head": {name: digest_of(tensor) for name, tensor in pre.readouts[task.name].items()},
        "rows": task.train.digest,
        "task": asdict(task.definition) | {"hub": None},
        "options": training,
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
    """Return what a model answers to rows of a task, in batches as large as the options say."""
    kind = task.kind
    size = options.evaluation_batch_size
    logits = predict(model, rows, batch_size=size, collected=kind.collected)
    answers = kind.answers(task.definition, logits, rows.labels, rows)
    return kind.with_texts(answers, task.definition, model, rows, batch_size=size, precision="fp32")


def quality_of(model: ReadoutModel, task: EncodedTask, rows: Examples, options: TrainingOptions) -> tuple[float, float]:
    """Return how well a model answers rows of a task, larger is better; of equal ones the second number decides.

    Labels have their score by the task's metric, and minus their loss; texts minus their loss.

    Args:
        model: answers as it is.
        task: the task.
        rows: of the task.
        options: batch size of the forward passes.
    """
    logits = _finite_logits(model, task, rows, options)
    return (-math.inf, -math.inf) if logits is None else task.kind.quality(task.definition, logits, rows)


def loss_of(model: ReadoutModel, task: EncodedTask, rows: Examples, options: TrainingOptions) -> float:
    """Return the mean loss on rows of a task; infinite where it answers no numbers. Arguments as those of `quality_of`."""
    logits = _finite_logits(model, task, rows, options)
    return math.inf if logits is None else task.kind.loss(task.definition, logits, rows)


def _finite_logits(model: ReadoutModel, task: EncodedTask, rows: Examples, options: TrainingOptions) -> Tensor | None:
    """Return what the task's kind collects of the logits; nothing where one is not finite: the weights moved too far."""
    logits = predict(model, rows, batch_size=options.evaluation_batch_size, collected=task.kind.collected)
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


def token_losses(model: ReadoutModel, rows: Examples, batch_size: int) -> Tensor:
    """Return the cross-entropy of every token that is to be predicted, in nats: float32 ``(n,)``."""

    def read(x: Tensor, y: Tensor, _: Tensor) -> Tensor:
        return F.cross_entropy(model.features(x).float(), y, reduction="none")

    return _of_all_rows(model, read, rows, batch_size, "fp32")


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
