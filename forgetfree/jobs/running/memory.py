"""The most memory that each phase of a unit takes, by sizes: whole vectors of the model, and activations of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forgetfree.core.saliency import is_saliency
from forgetfree.core.tensors import DTYPES
from forgetfree.device import kind_of_device
from forgetfree.learning.localization import LocalizationOptions
from forgetfree.learning.monitor import Phase
from forgetfree.learning.training_options import TrainingOptions
from forgetfree.recipes import ModelDtype

#: Bytes that a token leaves in a layer for back-propagation, for each number of its hidden state (Korthikanti et al., 2022,
#: eq. 2, in float32 and without the attention's own, which grows with the length).
_ACTIVATIONS = 68
#: The same of a pass without gradients, whose layers' memory is used again.
_PASSING = 32
#: Tokens, and rows, of a pass with gradients for all entries while γ is chosen: see `in_pieces`.
_PIECE_TOKENS, _PIECE_ROWS = 240, 64


@dataclass(frozen=True)
class ModelSize:
    """What memory depends on.

    Attributes:
        parameters: all of them.
        graftable: those that may be grafted, N.
        hidden: the width of hidden states; 0: not known.
        layers: how many; 0: not known.
        width: bytes of a weight.
    """

    parameters: int
    graftable: int
    hidden: int = 0
    layers: int = 0
    width: int = 4

    @classmethod
    def of(cls, config: Any, parameters: int, graftable: int, dtype: ModelDtype = "float32") -> ModelSize:
        """Return the size of a model with a configuration of transformers, or none."""
        hidden, layers = (getattr(config, name, 0) or 0 for name in ("hidden_size", "num_hidden_layers"))
        return cls(parameters, graftable, hidden, layers, DTYPES[dtype].itemsize)


def memory_of_phases(
    model: ModelSize, options: TrainingOptions, length: float, phases: Iterable[Phase], device: str = "cpu"
) -> dict[Phase, int]:
    """Return the most bytes that tensors take in each phase; what is trained and its optimiser are in float32.

    Args:
        model: of what size.
        options: how it is trained.
        length: tokens of a row.
        phases: which.
        device: on a CPU a choice of γ reads fewer rows at once.
    """
    vector, wide = model.width * model.graftable, 4 * model.graftable
    there = model.width * model.parameters + vector  # weights and θ_pre
    rows = -(-options.batch_size // options.accumulation)
    whole = wide * _moments(options) + vector + _kept(model, options, rows * length)
    if vector < wide:  # the optimiser has a wider copy, whose gradients take the place of what a pass keeps
        whole = wide * (1 + _moments(options)) + max(wide, vector + _kept(model, options, rows * length))
    skill = isinstance(options, LocalizationOptions)
    tuned = vector if skill and options.needs_fine_tuned else 0  # type: ignore[attr-defined]
    peaks: Mapping[Phase, float] = {
        "fine_tune": there + (whole if not skill or tuned else _kept(model, options, rows * length)),
        "localize": there + tuned + _choice(model, options, length, device),
        "train": there + (tuned + _kept(model, options, rows * length) if skill else whole),
        "evaluate": there + tuned + _PASSING * model.width // 4 * options.rows_at_once * length * model.hidden,
    }
    return {phase: round(peaks[phase]) for phase in peaks if phase in set(phases)}


def _moments(options: TrainingOptions) -> int:
    """Return how many vectors an optimiser keeps."""
    return 2 if options.optimizer == "adamw" else 1 if options.momentum or callable(options.optimizer) else 0


def _kept(model: ModelSize, options: TrainingOptions, tokens: float) -> float:
    """Return the bytes that a pass over so many tokens keeps for its backward pass."""
    states, narrow = tokens * model.hidden, options.precision != "fp32" or model.width < 4
    layer = _ACTIVATIONS * states / (2 if narrow else 1)
    return layer + model.width * states * model.layers if options.gradient_checkpointing else layer * model.layers


def _choice(model: ModelSize, options: TrainingOptions, length: float, device: str) -> float:
    """Return what the choice of γ takes: S, a whole gradient, and a pass; or scores without a search."""
    if not isinstance(options, LocalizationOptions):
        return 0
    rows = options.mask_micro_batch_size or _PIECE_ROWS
    tokens = min(rows * length, max(length, _PIECE_TOKENS)) if device == "cpu" else rows * length
    source, vector = options.region_from, 4 * model.graftable  # S, or scores
    if not is_saliency(source):
        return vector + model.width * model.graftable + _kept(model, options, tokens)
    scored = {"movement": 1, "taylor": 2, "gallop": 2, "random": 2}.get(source, 1) * vector
    return scored + (0 if source in ("movement", "random") else _kept(model, options, tokens))


def device_memory(device: str) -> int:
    """Return the bytes of memory that the device has."""
    import os

    if kind_of_device(device) == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
