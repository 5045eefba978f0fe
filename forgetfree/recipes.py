"""Models known by name, and their recipes: the options that were measured to suit each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

#: The dtype that a model's weights are held in, by its name in torch and transformers.
ModelDtype = Literal["float32", "bfloat16"]
#: The optimisers that have a name.
OptimizerName = Literal["sgd", "momentum", "adamw"]
#: Of forward passes in training, as it is asked for; ``auto`` is what `forgetfree.core.precision.faster_precision` says.
PrecisionChoice = Literal["fp32", "bf16", "fp16", "auto"]
#: By what an entry is scored, see `forgetfree.core.selection.saliency`.
Saliency = Literal["movement", "gradient", "snip", "gallop", "fisher", "random"]
#: How γ is chosen: by learning the mask, or by a saliency.
RegionSource = Literal["mask"] | Saliency
#: What says how many updates a task gets, where no number does: see `forgetfree.training.training_options.TrainingOptions`.
StepsRule = Literal["auto", "paper"]


@dataclass(frozen=True)
class ModelEntry:
    """A model known by name.

    Attributes:
        summary: one line.
        recipe: options measured to suit the model, ``STRATEGY.OPTION`` for one strategy's alone. They stand in for
            the strategies' defaults, as a whole, unless ``optimizer`` chooses another way to train; any single one
            gives way to what is set. See `recipe_of`.
        graft_recipe: likewise, for a graft on its own, whose region is not trained after it was found.
        on_hub: whether the hub has it under this name; else it comes in a package.
    """

    summary: str
    recipe: Mapping[str, Any] = field(default_factory=dict)
    graft_recipe: Mapping[str, Any] = field(default_factory=dict)
    on_hub: bool = True


#: The strategies of ``forgetfree graft``: a task's graft, beside the fine-tuned model that it comes from.
GRAFT = ("fine-tune", "bare-graft")
#: Strategies whose regions are others than those that a recipe's options of the region were chosen for.
OTHER_REGIONS = ("packnet", "wsn", "lotto", "bitfit")
#: How a run names a model that was given as an object.
IN_MEMORY = " in memory"
MODELS: dict[str, ModelEntry] = {
    "minilm": ModelEntry(
        "all-MiniLM-L6-v2, embedded (22.6 M parameters, BERT architecture, no LM head)",
        # SGD would need the paper's thousands of steps: see docs/results/recipe.md.
        recipe={
            "optimizer": "adamw",
            "learning_rate": 1e-4,
            "readout_learning_rate": 1e-3,
            "warmup": 0.06,
            "steps": "auto",  # see docs/results/recipe.md
            "sparsity": 1e-3,
            # Chosen on validation rows: see docs/results/recipe.md.
            "region_from": "movement",
            "region_start": "pre-trained",
            "region_rate_factor": 3.0,
            "dropout": "fine-tuning",
            **{f"{name}.region_rate_factor": 1.0 for name in OTHER_REGIONS},
            **{f"{name}.dropout": True for name in OTHER_REGIONS},
            # Where the mask is searched for.
            "base_fraction": 0.0,
            "mask_steps": 4,
            "mask_batch_size": 256,
            "precision": "auto",  # see docs/results/precision.md
            # Chosen on validation rows of QNLI and AG News: see docs/results/recipe.md.
            "ewc.ewc_lambda": 1e5,
            "online-ewc.ewc_lambda": 1e5,
            "si.si_lambda": 1e3,
            "mas.lambda_reg": 100.0,
            "rwalk.ewc_lambda": 1000.0,
            # As long as its authors train.
            "gdumb.passes": 256,
        },
        # SGD's moves localize, AdamW's do not: see docs/results/paper.md.
        graft_recipe={
            "optimizer": "momentum",
            "learning_rate": 3e-2,
            "readout_learning_rate": 3e-2,
            "max_gradient_norm": 1.0,
            "warmup": 0.06,
            "sparsity": 1e-3,
            "mask_learning_rate": 1e8,
            "mask_steps": 32,
            "mask_batch_size": 64,
        },
        on_hub=False,
    ),
    "smollm2": ModelEntry(
        "SmolLM2-135M-Instruct, a chat model, downloaded by forgetfree fetch smollm2 (135 M parameters, causal)",
        recipe={
            "optimizer": "adamw",
            "learning_rate": 3e-5,
            "warmup": 0.06,
            "steps": "auto",  # as for minilm: not chosen on rows of its own
            "sparsity": 5e-4,
            # Chosen on validation rows of generation-demo: see docs/results/generation.md.
            "region_from": "gradient",
            "region_rate_factor": 3.0,
            **{f"{name}.region_rate_factor": 1.0 for name in OTHER_REGIONS},
            "grafting-continual.composition": "alone",
            # Where the mask is searched for, as in docs/results/smollm2.md.
            "base_fraction": 0.0,
            "mask_steps": 1,
            "mask_batch_size": 256,
        },
        on_hub=False,
    ),
    "roberta-base": ModelEntry("the paper's masked LM, from the hub (125 M parameters)"),
    "bert-base-uncased": ModelEntry("from the hub (110 M parameters)"),
    "gpt2": ModelEntry("the paper's causal LM, from the hub (124 M parameters)"),
}


def recipe_of(
    model: str,
    settings: Mapping[str, Any] = MappingProxyType({}),
    strategies: Sequence[str] = (),
    strategy: str | None = None,
) -> dict[str, Any]:
    """Return a model's recipe, for the options that are not set otherwise.

    Nothing is left of it where ``optimizer`` is set to another of ours, such as the paper's SGD: its rates and its way to find
    regions belong together. With an optimizer of the user's own, all else stays. This decides for run, graft and strategies
    that are made by hand.

    The options of the region belong together as well: nothing is left of them where ``region_from`` is set otherwise, or an
    option of the search for a mask is, which wants that search. Options of the search are left where there is one.

    Args:
        model: as ``--model``.
        settings: the options that are set.
        strategies: that run. Where these are `GRAFT` alone, it is the recipe for a graft whose region is not trained.
        strategy: whose; settings for others do not count. Default: for all, where settings for one alone do not count.
    """
    entry = MODELS.get(model)
    set_here = {key.removeprefix(f"{strategy}."): value for key, value in settings.items()}
    if entry is None:
        return {}
    bare = "bare-graft" in strategies and {*strategies} <= {*GRAFT}
    recipe = entry.graft_recipe if bare else entry.recipe
    if set_here.get("optimizer", recipe.get("optimizer")) in {*get_args(OptimizerName)} - {recipe.get("optimizer")}:
        return {}
    own = {key.removeprefix(f"{strategy}."): value for key, value in recipe.items()}
    if _has_other_region(own, set_here):
        own = {key: value for key, value in own.items() if not _is_of_region(key)}
    if set_here.get("region_from", own.get("region_from", "mask")) != "mask":
        own = {key: value for key, value in own.items() if not _is_of_search(key)}
    return {
        key: value
        for key, value in own.items()
        if not set_here.keys() & {key, key.rpartition(".")[2]} and key.rpartition(".")[0] in ("", *strategies)
    }


def _has_other_region(recipe: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Say whether settings choose the region in another way than the recipe."""
    named = {key: value for key, value in settings.items() if "." not in key}
    searched = "mask" if any(map(_is_of_search, named)) else recipe.get("region_from")
    return bool(named.get("region_from", searched) != recipe.get("region_from"))


def _is_of_search(key: str) -> bool:
    return key.rpartition(".")[2].startswith(("base_fraction", "mask_"))


def _is_of_region(key: str) -> bool:
    return key.rpartition(".")[2].startswith(("dropout", "region_"))
