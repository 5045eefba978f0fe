"""A model's recipe is the same on the command line, in Python, for a single graft and in the experiments of the paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forgetfree import recipes, registry
from forgetfree.continual.strategy import _say_once
from forgetfree.errors import OptionError, UnknownNameError
from forgetfree.jobs.config import RunConfig
from forgetfree.recipes import ModelEntry
from forgetfree.training.training_options import TrainingOptions

RECIPE = {"optimizer": "adamw", "learning_rate": 0.5, "sparsity": 0.25, "ewc.ewc_lambda": 7.0}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, model_directory: Any) -> str:
    """Register the tiny model with a recipe, and return its name."""
    name = str(model_directory("bert"))
    monkeypatch.setitem(recipes.MODELS, name, ModelEntry("a toy", RECIPE))
    _say_once.cache_clear()
    return name


@pytest.mark.sampled("ewc", "grafting-continual")
@pytest.mark.parametrize("name", ["grafting-continual", "ewc", "continual-ft", "lora"])
def test_a_strategy_made_by_hand_has_the_options_of_the_command_line(
    name: str, toy: str, tiny_stream: Any, capsys: Any
) -> None:
    cls, stream = registry.strategy(name), tiny_stream(stream="sst2")
    by_hand = cls(stream=stream)
    assert by_hand.options == RunConfig(stream="sst2", strategy=(name,), model=toy).check().options[name]
    assert by_hand.options.learning_rate == 0.5 and by_hand.options.optimizer == "adamw"
    told = capsys.readouterr().err
    assert told.startswith(f"Recipe of {toy} for {name}: optimizer=adamw learning_rate=0.5")
    assert ("sparsity=0.25" in told) == hasattr(by_hand.options, "sparsity")
    assert ("ewc_lambda=7.0" in told) == (name == "ewc")
    cls(stream=tiny_stream(stream="sst2"))
    assert capsys.readouterr().err == ""  # the recipe is printed once
    given = cls.Options(sparsity=0.05) if "sparsity" in cls.Options.model_fields else cls.Options()
    explicit = cls(stream=tiny_stream(stream="sst2"), options=given)
    assert explicit.options == given and capsys.readouterr().err == ""


def test_a_model_without_a_recipe_is_trained_by_the_defaults(tiny_stream: Any, capsys: Any) -> None:
    cls = registry.strategy("continual-ft")
    assert cls(stream=tiny_stream()).options == TrainingOptions()
    assert capsys.readouterr().err == ""


def test_a_strategy_runs_on_a_gpu_where_there_is_one(tiny_stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from forgetfree.continual import strategy

    cls, asked = registry.strategy("continual-ft"), []
    monkeypatch.setattr(strategy, "find_device", lambda name: asked.append(name) or "cpu")
    assert cls(stream=tiny_stream()).device == torch.device("cpu") and asked == ["auto"]
    assert cls(stream=tiny_stream(), device="cpu").device == torch.device("cpu") and asked == ["auto"]


def test_options_may_start_from_the_recipe() -> None:
    cls = registry.strategy("grafting-continual").Options
    recipe = RunConfig(stream="sst2", strategy=("grafting-continual",), set={"steps": 7, "weight_decay": 0.5}).check()
    assert cls.for_model("minilm", steps=7, weight_decay=0.5) == recipe.options["grafting-continual"]
    assert cls.for_model("minilm", optimizer="sgd") == cls(optimizer="sgd")
    assert cls.for_model("smollm2", region_from="mask").mask_batch_size == 256
    texts = cls.for_model("smollm2", strategy="grafting-continual")
    assert (texts.region_from, texts.region_rate_factor, texts.composition) == ("gradient", 3, "alone")
    assert cls.for_model("smollm2", region_from="mask").region_rate_factor == 1
    assert cls.for_model("roberta-base") == cls()
    ewc = registry.strategy("ewc").Options
    assert ewc.for_model("minilm", strategy="ewc").ewc_lambda == 1e5
    with pytest.raises(UnknownNameError, match="Did you mean 'warmup'"):
        cls.for_model("minilm", warmupp=0.5)


def test_an_optimiser_that_is_made_already_is_refused(tiny_stream: Any) -> None:
    """A function is needed, though Avalanche's templates take an optimiser."""
    cls, stream = registry.strategy("continual-ft"), tiny_stream()
    made = torch.optim.RMSprop(stream.model.parameters(), lr=0.1)
    with pytest.raises(OptionError) as refused:
        cls.Options(optimizer=made)
    assert "optimizer=RMSprop(…) holds the parameters of one model" in str(refused.value)
    assert "Options(optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=0.01))" in str(refused.value)


def test_an_optimizer_of_ones_own_keeps_the_rest_of_the_recipe_and_another_of_ours_drops_it() -> None:
    recipe = recipes.recipe_of("minilm")
    rest = {key: value for key, value in recipe.items() if key != "optimizer"}
    assert recipes.recipe_of("minilm", {"optimizer": recipe["optimizer"]}) == rest  # the recipe's own value
    assert recipes.recipe_of("minilm", {"optimizer": "torch.optim:RMSprop"}) == rest
    assert recipes.recipe_of("minilm", {"optimizer": lambda parameters: None}) == rest
    assert recipes.recipe_of("minilm", {"optimizer": "sgd"}) == {}


def test_the_options_of_a_region_belong_together() -> None:
    """If the user sets the region's source or the options of its search, the recipe's tuning for another region is dropped."""
    strategies = ("grafting-continual",)

    def of_region(**settings: Any) -> set[str]:
        its = recipes.recipe_of("minilm", settings, strategies, "grafting-continual")
        return {key for key in its if key == "dropout" or key.startswith("region_")}

    whole = {"region_from", "region_start", "region_rate_factor", "dropout"}
    assert of_region() == of_region(learning_rate=1e-5) == whole
    assert of_region(region_rate_factor=1.0) == whole - {"region_rate_factor"}
    assert of_region(region_from="movement") == whole - {"region_from"}
    for others in ({"region_from": "gradient"}, {"mask_steps": 1}, {"grafting-continual.base_fraction": 0.1}):
        assert of_region(**others) == set()
    assert of_region(**{"packnet.mask_steps": 1}) == whole  # an option of another strategy


def test_a_strategy_that_searches_keeps_the_recipe_of_the_search_where_the_others_do_not() -> None:
    settings = {"region_from": "snip", "grafting-continual.region_from": "mask"}
    strategies = ("grafting-continual", "graft-retrain")
    assert recipes.recipe_of("minilm", settings, strategies, "grafting-continual")["mask_steps"] == 4
    assert "mask_steps" not in recipes.recipe_of("minilm", settings, strategies, "graft-retrain")


@pytest.mark.parametrize("model", ["minilm", "smollm2"])
def test_a_recipe_says_for_strategies_with_other_regions_what_it_says_for_all_otherwise(model: str) -> None:
    others = ("packnet", "wsn", "lotto", "bitfit")
    config = RunConfig(stream="sst2", strategy=("grafting-continual", *others), model=model).check()
    assert config.options["grafting-continual"].region_rate_factor == 3.0
    for name in others:
        by_hand = registry.strategy(name).Options.for_model(model, strategy=name)
        for options in (config.options[name], by_hand):
            assert (options.region_rate_factor, options.dropout) == (1.0, True)
