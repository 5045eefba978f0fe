"""A step of fine-tuning all of minilm, compared with the same step with PyTorch's default optimizers.

python -m benchmarks.speed fine_tune_step
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks.speed.measurement import Figure, alternate, ratio
from benchmarks.speed.region_step import Batch, all_of, minilm_and_batches, our_step, plain_step, whole
from forgetfree.core.trained import WholeTensors
from forgetfree.training.training_options import TrainingOptions


def figures(turns: int = 9) -> list[Figure]:
    """Measure on the demo task QNLI, 8 rows a step, without dropout."""
    base, batches = minilm_and_batches()
    with ExitStack() as stack:
        steps: dict[str, Callable[[Batch], None]] = {}
        for optimizer in ("adamw", "sgd"):
            for precision in ("fp32", "bf16"):
                how: Any = {"optimizer": optimizer, "precision": precision}
                options = TrainingOptions(learning_rate=1e-5, schedule="constant", **how)
                model = copy.deepcopy(base)
                trained = WholeTensors(model.space().parameters(model.backbone))
                steps[f"{optimizer}, {precision}"] = our_step(stack, model, trained, options)
            model = copy.deepcopy(base)
            steps[optimizer] = plain_step(stack, model, whole(model), optimizer)
        seconds = alternate({name: partial(all_of, step, batches) for name, step in steps.items()}, turns=turns)
    what = "step of fine-tuning, {}, {} / PyTorch's {} as it comes, fp32"
    return [
        ratio(what.format("AdamW", "fp32", "AdamW"), seconds, "adamw, fp32", "adamw", at_most=0.87),
        ratio(what.format("AdamW", "bf16", "AdamW"), seconds, "adamw, bf16", "adamw", at_most=0.6),
        ratio(what.format("SGD", "fp32", "SGD"), seconds, "sgd, fp32", "sgd"),
        ratio(what.format("SGD", "bf16", "SGD"), seconds, "sgd, bf16", "sgd"),
    ]
