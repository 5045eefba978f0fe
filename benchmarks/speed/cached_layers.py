"""A training step of a region in the upper layers of minilm whose lower layers are kept, beside a step of the whole model.

python -m forgetfree.benchmarks.speed cached_layers
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import partial
from typing import Any

from forgetfree.benchmarks.speed.measurement import Figure, alternate, ratio
from forgetfree.benchmarks.speed.region_step import (
    SPARSITY,
    all_of,
    found_region,
    input_gradients,
    minilm_and_batches,
    plain_step,
    region_step,
    whole,
)
from forgetfree.core.regions import Region
from forgetfree.training.layers import lower_layer_cache
from forgetfree.training.training_options import TrainingOptions

#: The layers that hold the region, and the most that a step may take of a step of the whole model.
LAYERS = {"3 to 5": ("345", 0.35), "5 to 5": ("5", None)}


def figures(turns: int = 9) -> list[Figure]:
    """Measure on the demo task QNLI, 8 rows a step, without dropout, in fp32."""
    base, batches = minilm_and_batches()
    space = base.space()
    found = found_region(space)
    options = TrainingOptions(optimizer="adamw", learning_rate=1e-5, schedule="constant", dropout=False)
    with ExitStack() as stack:
        steps: dict[str, Any] = {}
        for name, (layers, _) in LAYERS.items():
            inside = [spec for spec in space.tensors if any(f"layer.{layer}." in spec.name for layer in layers)]
            first, last = inside[0].offset, inside[-1].offset + inside[-1].size
            region = Region(found.indices[(found.indices >= first) & (found.indices < last)])
            steps[f"layers {name}, computed"] = region_step(stack, copy.deepcopy(base), region, options)
            model = copy.deepcopy(base)
            steps[f"layers {name}, kept"] = region_step(stack, model, region, options)
            stack.enter_context(lower_layer_cache(model, True))
            above = copy.deepcopy(base)
            above.backbone.encoder.layer = above.backbone.encoder.layer[int(layers[0]) :]
            steps[f"layers {name}, limit"] = input_gradients(stack, above)
        model = copy.deepcopy(base)
        steps["dense"] = plain_step(stack, model, whole(model), "adamw")
        seconds = alternate({name: partial(all_of, step, batches) for name, step in steps.items()}, turns=turns)

    made = []
    for name, (_, at_most) in LAYERS.items():
        what = f"step of a region in layers {name}, s = {SPARSITY:g}, lower layers {{}} / of the whole model"
        limit = ratio("", seconds, f"layers {name}, limit", "dense").value
        made += [
            ratio(what.format("kept"), seconds, f"layers {name}, kept", "dense", at_most=at_most, limit=limit),
            ratio(what.format("computed"), seconds, f"layers {name}, computed", "dense"),
        ]
    return made
