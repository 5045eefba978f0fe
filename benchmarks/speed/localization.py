"""Localizing a whole task, compared with fine-tuning it; and the memory of the search.

python -m benchmarks.speed localization
"""

from __future__ import annotations

from benchmarks.speed.measurement import Figure, PeakMemory, alternate, ratio
from forgetfree.data.sources import load_task
from forgetfree.models.loading import load_model
from forgetfree.training.single_task import SingleTask
from forgetfree.training.training_options import LocalizationOptions

#: Steps of fine-tuning that are timed; the time is proportional to their number.
STEPS = 20
#: Steps of fine-tuning, and the largest accepted share of their time for localizing.
RATIOS = {60: None, 400: 0.25}


def figures(turns: int = 9) -> list[Figure]:
    """Measure on the demo task SST-2 with minilm and the search for a mask of its recipe."""
    options = LocalizationOptions.for_model("minilm", steps=STEPS, region_from="mask")
    bench = SingleTask.of(load_model("minilm", "linear"), load_task("sst2", "demo"))
    anew = SingleTask(bench.loaded, bench.task, pre=bench.pre, device=bench.device)  # without a store
    fine_tuned = anew.fine_tuned(options)

    contenders = {
        "localize": lambda: bench.localized(fine_tuned, options),
        f"{STEPS} steps": lambda: anew.fine_tuned(options),
    }
    seconds = alternate(contenders, turns=max(1, turns // 4), warm_up=0)
    made = []
    for steps, at_most in RATIOS.items():
        scaled = seconds | {"fine-tune": seconds[f"{STEPS} steps"] * (steps / STEPS)}
        made.append(
            ratio(f"localizing a task / {steps} steps of fine-tuning", scaled, "localize", "fine-tune", at_most=at_most)
        )
    pre = bench.pre.theta
    with PeakMemory(pre, fine_tuned.theta, *bench.model.parameters()) as peak:
        bench.localized(fine_tuned, options.model_copy(update={"mask_steps": 1}))
    vectors = peak.bytes / pre.nbytes
    return [*made, Figure("peak of a mask search beside model, θ_pre, θ_ft", vectors, at_most=3.0, limit=2.0, unit="N")]
