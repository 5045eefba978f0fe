"""Models known by name, and their recipes: options that proved suitable for each model in measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

#: The dtype of a model's weights, by its name in torch and transformers.
ModelDtype = Literal["float32", "bfloat16"]
#: The optimisers that have a name.
OptimizerName = Literal["sgd", "momentum", "adamw"]
#: The requested precision of forward passes in training; for ``auto`` see `forgetfree.core.precision.faster_precision`.
PrecisionChoice = Literal["fp32", "bf16", "fp16", "auto"]
#: The score of an entry, see `forgetfree.core.selection.saliency`.
Saliency = Literal["movement", "gradient", "snip", "gallop", "fisher", "random"]
#: How γ is chosen: by learning the mask, or by a saliency.
RegionSource = Literal["mask"] | Saliency
#: The rule for the number of updates of a task, if none is set: see `forgetfree.training.training_options.TrainingOptions`.
StepsRule = Literal["auto", "paper"]


@dataclass(frozen=True)
class ModelEntry:
    """A model known by name.

    Attributes:
        summary: one line.
        recipe: options that suit the model by measurements, ``STRATEGY.OPTION`` for a single strategy. They replace the
            strategies' defaults as a whole, unless ``optimizer`` is set to another one; options that are set override them.
            See `recipe_of`.
        graft_recipe: likewise, for a graft alone, whose region is not trained after it was found.
        on_hub: whether the hub has the model under this name; else it comes in a package.
    """

    summary: str
    recipe: Mapping[str, Any] = field(default_factory=dict)
    graft_recipe: Mapping[str, Any] = field(default_factory=dict)
    on_hub: bool = True


#: The strategies of ``forgetfree graft``: a task's graft, beside the fine-tuned model that it comes from.
GRAFT = ("fine-tune", "bare-graft")
#: Strategies with other regions than those for which a recipe's options of the region were chosen.
OTHER_REGIONS = ("packnet", "wsn", "lotto", "bitfit")
#: The suffix in a run of the name of a model that was given as an object.
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
            # For the search of the mask.
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
            # As in the authors' training.
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
            # For the search of the mask, as in docs/results/smollm2.md.
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
    """Return a model's recipe, for the options that are not set in ``settings``.

    The whole recipe is dropped if ``optimizer`` is set to another named one, such as the paper's SGD: the recipe's rates and
    its way to find regions belong to its optimizer. With a custom optimizer, all other options stay. The same rule holds for
    run, graft and strategies that are created in Python.

    The options of the region also belong together: they are dropped if ``region_from`` is set to another value, or if an option
    of the search for a mask is set, which requests this search. Options of the search stay only if the mask is searched for.

    Args:
        model: as ``--model``.
        settings: the options that are set.
        strategies: the strategies to run. If these are `GRAFT` alone, the result is based on the ``graft_recipe``.
        strategy: the strategy of the recipe; settings for others do not count. Default: all strategies, where settings for a
            single one do not count.
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
    """Return whether settings choose the region in another way than the recipe."""
    named = {key: value for key, value in settings.items() if "." not in key}
    searched = "mask" if any(map(_is_of_search, named)) else recipe.get("region_from")
    return bool(named.get("region_from", searched) != recipe.get("region_from"))


def _is_of_search(key: str) -> bool:
    return key.rpartition(".")[2].startswith(("base_fraction", "mask_"))


def _is_of_region(key: str) -> bool:
    return key.rpartition(".")[2].startswith(("dropout", "region_"))
