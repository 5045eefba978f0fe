"""What training costs, estimated beforehand: seconds by a few real steps, or from a model's size; bytes by its size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import torch

from forgetfree.data.examples import EncodedRows
from forgetfree.data.rows import Rows
from forgetfree.device import kind_of_device
from forgetfree.learning.training import TrainingOptions, fine_tune, for_device, predict
from forgetfree.models.loading import LoadedModel
from forgetfree.tasks import TaskDefinition

#: Rows of a task by which the length of all is estimated.
SAMPLE = 64
#: Steps that are timed; the first, which prepares memory and kernels, does not count.
_TIMED = 3
#: The share of the rate of a large matrix product that training reaches, where the model cannot be timed.
_REACHED = 0.4
#: Bytes that a token leaves in a layer for back-propagation, for each number of its hidden state (Korthikanti et al., 2022,
#: eq. 2, in float32 and without the attention's own, which grows with the length).
_ACTIVATIONS = 68


@dataclass(frozen=True)
class Rates:
    """What a token costs.

    Attributes:
        train: seconds of a token, padding included, in a training step.
        evaluate: seconds of a token in a forward pass.
        source: how they were found, in words.
    """

    train: float
    evaluate: float
    source: str


def timed_rates(
    loaded: LoadedModel, definition: TaskDefinition, rows: Rows, options: TrainingOptions, device: str
) -> Rates:
    """Return the rates of a model, by a few steps of fine-tuning on rows of a task; the model is not to be used afterwards."""
    options, model = for_device(options, device), loaded.model.to(device)
    label = model.add_task(loaded.head(definition))
    sample = EncodedRows.of(loaded.encoder(definition)(rows), rows.labels, label, loaded.pad)
    clock: list[float] = []
    steps = replace(options, schedule="constant", cache_lower_layers=False)
    fine_tune(model, sample, steps, steps=_TIMED, seed=0, on_step=lambda step, loss: clock.append(time.perf_counter()))
    train = min(after - before for before, after in pairwise(clock))  # other work on the machine slows single steps
    few, times = sample.subset(range(min(16, len(sample)))), list[float]()
    for _ in range(2):
        begin = time.perf_counter()
        predict(model, few, batch_size=options.rows_at_once, precision=options.precision)
        times.append(time.perf_counter() - begin)
    length = padded(sample.lengths, options.batch_size)
    return Rates(
        train / (options.batch_size * length),
        min(times) / sum(few.lengths),
        f"by {_TIMED - 1} training steps of this model on this machine",
    )


def computed_rates(parameters: int, device: str, precision: str) -> Rates:
    """Return the rates of a model that is not here: 6 operations a parameter and token in training, 2 in a forward pass.

    (Kaplan et al., 2020, §2.1.) How many a second the device does is measured by a matrix product.
    """
    size = 1024 if device == "cpu" else 8192
    kind = torch.float32 if precision == "fp32" else torch.bfloat16
    one = torch.ones(size, size, dtype=kind, device=device)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        float((one @ one)[0, 0])  # waits for the device
        times.append(time.perf_counter() - begin)
    rate = _REACHED * 2 * size**3 / min(times)
    source = (
        f"from its {parameters:,} parameters and a matrix product on this machine; expect a factor of two either way"
    )
    return Rates(6 * parameters / rate, 2 * parameters / rate, source)


def padded(lengths: Sequence[int], batch_size: int) -> float:
    """Return the mean length of batches of rows drawn from these lengths, which are padded to their longest."""
    random = Random(0)
    return sum(max(random.choices(lengths, k=batch_size)) for _ in range(64)) / 64


def memory_bytes(config: Any, parameters: int, graftable: int, options: TrainingOptions, length: float) -> int:
    """Return about the most memory that training takes: weights, gradients, optimizer, θ_pre, θ_ft, S, and activations."""
    state = 2 if options.optimizer == "adamw" else 1 if options.momentum or callable(options.optimizer) else 0
    hidden = getattr(config, "hidden_size", 0) or 0
    layers = getattr(config, "num_hidden_layers", 0) or 0
    rows = -(-options.batch_size // options.accumulation)
    half = 1 if options.precision == "fp32" else 2
    activations = _ACTIVATIONS * rows * length * hidden * layers / half
    return round(4 * parameters + 4 * graftable * (1 + state + 3) + activations)


def device_memory(device: str) -> int:
    """Return the bytes of memory that the device has."""
    import os

    if kind_of_device(device) == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
