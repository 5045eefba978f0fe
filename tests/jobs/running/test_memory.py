"""The memory of each phase, worked by hand: 1,000 parameters, of which 600 may be grafted, in 2 layers of width 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forgetfree.jobs.running.costs import ModelSize, memory_of_phases
from forgetfree.training.localization import LocalizationOptions
from forgetfree.training.training_options import TrainingOptions

SIZE, PHASES = ModelSize(1000, 600, 4, 2), ("fine_tune", "localize", "train", "evaluate")
#: Weights and θ_pre; a vector of the graftable entries; what 8 rows of 5 tokens keep.
THERE, VECTOR, KEPT = 4000 + 2400, 2400, 68 * 8 * 5 * 4 * 2


def of(options: TrainingOptions, phase: Any) -> int:
    return memory_of_phases(SIZE, options, 5, PHASES)[phase]  # type: ignore[arg-type]


def localization(**changes: Any) -> LocalizationOptions:
    return LocalizationOptions(optimizer="adamw", **changes)


def test_the_paper_needs_whole_vectors() -> None:
    """Fine-tuning: a gradient and two moments. The search: θ_ft, S, a gradient, and at most 240 tokens at once."""
    options = localization()
    assert of(options, "fine_tune") == THERE + 3 * VECTOR + KEPT
    assert of(options, "localize") == THERE + VECTOR + 2 * VECTOR + 68 * 240 * 4 * 2
    assert of(options, "train") == THERE + VECTOR + KEPT
    assert of(options, "evaluate") == THERE + VECTOR + 32 * 64 * 5 * 4


def test_gradients_at_theta_pre_need_one() -> None:
    options = localization(region_from="gradient")
    assert of(options, "fine_tune") == THERE + KEPT  # a readout alone
    assert of(options, "localize") == THERE + VECTOR + 68 * 240 * 4 * 2
    assert of(options, "train") == THERE + KEPT


def test_movement_reads_no_row() -> None:
    assert of(localization(region_from="movement"), "localize") == THERE + 2 * VECTOR


def test_weights_in_bfloat16_take_half_and_what_is_trained_does_not() -> None:
    """A region: half of all that is there. A whole model: AdamW's moments, a wide copy and its gradient beside that."""

    def narrow(options: TrainingOptions, phase: Any) -> int:
        return memory_of_phases(replace(SIZE, width=2), options, 5, PHASES)[phase]  # type: ignore[arg-type]

    region = localization(region_from="gradient")
    assert narrow(region, "train") == of(region, "train") / 2 == (THERE + KEPT) / 2
    assert narrow(region, "localize") == THERE / 2 + VECTOR + 68 * 240 * 4  # scores are wide
    assert narrow(TrainingOptions(optimizer="adamw"), "train") == THERE / 2 + 3 * VECTOR + VECTOR / 2 + KEPT / 2
    assert narrow(localization(), "localize") == THERE / 2 + VECTOR / 2 + 1.5 * VECTOR + 68 * 240 * 4


def test_a_whole_model_in_training() -> None:
    assert of(TrainingOptions(), "train") == THERE + VECTOR + KEPT  # SGD without momentum
    assert of(TrainingOptions(momentum=0.9), "train") == THERE + 2 * VECTOR + KEPT
    assert memory_of_phases(SIZE, TrainingOptions(), 5, ["evaluate"]).keys() == {"evaluate"}


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"precision": "bf16"}, KEPT / 2),
        ({"accumulation": 4}, KEPT / 4),
        ({"gradient_checkpointing": True}, KEPT / 2 + 4 * 8 * 5 * 4 * 2),  # one layer, and what enters each
    ],
)
def test_what_a_pass_keeps(changes: dict[str, Any], kept: float) -> None:
    assert of(TrainingOptions(**changes), "train") == THERE + VECTOR + kept
