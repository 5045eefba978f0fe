"""Layers below all that is trained: kept and computed, training ends with the same values; what cannot be kept is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import families
import pytest
import tiny
import torch
import transformers
from families import FAMILIES
from torch import nn

from forgetfree.core.readout_model import TaskHead
from forgetfree.core.regions import Region
from forgetfree.core.trained import RegionParameters
from forgetfree.data.examples import EncodedRows
from forgetfree.errors import OptionError
from forgetfree.models.module_model import ModuleModel
from forgetfree.models.task_model import TaskModel, TokenLayout
from forgetfree.strategies.grafting_continual import GraftingContinual
from forgetfree.training.layers import lower_layer_cache
from forgetfree.training.loop import fine_tune
from forgetfree.training.training_options import TrainingOptions

pytestmark = pytest.mark.long

OPTIONS = TrainingOptions(
    learning_rate=0.05, momentum=0.9, batch_size=4, accumulation=2, dropout=False, cache_lower_layers=True
)
#: Names of tensors in the uppermost of three layers, whatever a family calls them.
TOP = r"(layers?|h|blocks?)\.2\."


def build(name: str = "Bert", graftable: str = TOP, **settings: Any) -> TaskModel:
    """A tiny model of three layers."""
    torch.manual_seed(0)
    config = families.config(name, layers=3)
    for key, value in settings.items():
        setattr(config, key, value)
    loader: Any = transformers.AutoModelForTextEncoding if name.endswith("T5") else transformers.AutoModel
    backbone = tiny.pre_trained(lambda: loader.from_config(config))
    model = TaskModel(backbone, TokenLayout(pad=0), "linear", graftable=graftable)
    model.add_task(TaskHead("task", 3))
    return model


def rows(count: int = 10) -> EncodedRows:
    """Rows of 3 to 12 ids."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 13, (count,), generator=generator).tolist()
    ids = [torch.randint(10, 60, (length,), generator=generator).tolist() for length in lengths]
    return EncodedRows.of(ids, [i % 3 for i in range(count)], 0, 0)


def train(
    model: TaskModel, options: TrainingOptions, *, region: bool = False, steps: int = 9
) -> dict[str, torch.Tensor]:
    """The tensors of a trained copy."""
    model, space = copy.deepcopy(model), model.space()
    trained = RegionParameters(model.backbone, space, Region.of(range(0, len(space), 7))) if region else None
    fine_tune(model, rows(), options, steps=steps, seed=0, trained=trained)
    assert "features" not in vars(model)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.sampled("Bert", "GPT2", "Llama", "T5", "Albert", share=0.2)
@pytest.mark.parametrize("name", FAMILIES)
def test_kept_layers_give_what_computed_ones_give_or_are_refused(name: str) -> None:
    """Of a region, in rows that are cut into parts of different lengths, over more than one pass over all rows.

    Which families can be kept is for the installed transformers to say; those of the next test can.
    """
    try:
        assert_same_values(build(name, "." if name == "Albert" else TOP), region=True)  # Albert's layers are one
    except OptionError as error:
        assert re.fullmatch(
            r"cache_lower_layers needs .*, and .* (has none|do not|are not)\. Leave it out\.", str(error)
        )


@pytest.mark.sampled("Bert")
@pytest.mark.parametrize("name", ["Bert", "Roberta", "GPT2", "Llama"])
def test_whole_tensors_may_be_trained(name: str) -> None:
    assert_same_values(build(name), region=False)


def assert_same_values(model: TaskModel, *, region: bool) -> None:
    """Up to rounding, and the same tensors stay as they were."""
    kept = train(model, OPTIONS, region=region)
    computed = train(model, replace(OPTIONS, cache_lower_layers=False), region=region)
    before = model.state_dict()
    assert any(not torch.equal(kept[name], before[name]) for name in kept if name.startswith("backbone"))
    for name in computed:
        torch.testing.assert_close(kept[name], computed[name], rtol=1e-5, atol=1e-5)
        assert torch.equal(kept[name], before[name]) == torch.equal(computed[name], before[name])


# -- What is computed ------------------------------------------------------------------------------------


def test_a_row_goes_through_the_lower_layers_once() -> None:
    """And three times in the first batch, in which there is one row more; evaluation goes through all layers."""
    model, data = build(), rows()
    layers: Any = model.backbone.encoder.layer
    seen = [0, 0, 0]
    for i, layer in enumerate(layers):

        def count(_: nn.Module, args: Any, output: Any, i: int = i) -> None:
            seen[i] += len(args[0])

        layer.attention.self.query.register_forward_hook(count)
    model.train(False)
    for parameter in model.parameters():
        parameter.requires_grad_(".layer.2." in str(next(n for n, p in model.named_parameters() if p is parameter)))
    with lower_layer_cache(model, True):
        for batch in ([0, 1, 2], [3, 4], [4, 2, 0], [1], [3, 0]):
            x, _, t = data.batch(batch)
            model(x, t).sum().backward()
        first = 3 + 4 + 4  # by itself, row by row, and compared
        assert seen == [first + 2] * 2 + [first + 4 + 2 + 3 + 1 + 2]
        with torch.no_grad():
            model(*data.batch([0, 1])[::2])
        assert seen[0] == first + 2 + 2
    model(*data.batch([0])[::2])
    assert seen[0] == first + 2 + 2 + 1


def test_where_nothing_but_a_readout_is_trained_no_layer_is_computed_again() -> None:
    model = build()
    empty = RegionParameters(model.backbone, model.space(), Region.empty())
    fine_tune(model, rows(), OPTIONS, steps=9, seed=0, trained=empty)


def test_a_last_norm_lies_above_all_layers() -> None:
    """What is trained is found by gradients, not by names."""
    assert_same_values(build("Llama", r"^norm\."), region=False)


def test_training_in_half_precision() -> None:
    train(build(), replace(OPTIONS, precision="bf16"), region=True)


@pytest.mark.sampled("gpt2-lm-causal")
@pytest.mark.parametrize(("kind", "readout"), [("bert", "linear"), ("roberta-mlm", "prompt"), ("gpt2-lm", "causal")])
def test_a_stream_of_tasks(kind: str, readout: str, tiny_stream: Callable[..., Any]) -> None:
    """Fine-tuning and regions, beside the search for the mask, where tasks are evaluated in the middle of training too."""
    answers = []
    for keep in (False, True):
        stream = tiny_stream(kind, readout, graftable=r"(layer|h)\.1\.")
        how: dict[str, Any] = {"steps": 30, "batch_size": 4, "sparsity": 0.05, "mask_steps": 3, "mask_batch_size": 12}
        options = GraftingContinual.Options(**how, dropout=False, cache_lower_layers=keep, learning_rate=0.02)
        strategy = GraftingContinual(stream=stream, options=options, eval_every=7, peval_mode="iteration")
        for experience in stream.benchmark.train_stream:
            strategy.train(experience, eval_streams=[stream.benchmark.test_stream])
        answers.append({name: torch.from_numpy(each.logits) for name, each in strategy.evaluate().items()})
    for name, logits in answers[0].items():
        torch.testing.assert_close(answers[1][name], logits, rtol=1e-4, atol=1e-4)


# -- What is refused -------------------------------------------------------------------------------------


def test_dropout_is_refused() -> None:
    with pytest.raises(OptionError, match="cache_lower_layers=true needs dropout=false"):
        TrainingOptions(cache_lower_layers=True)
    model = build()
    with lower_layer_cache(model, True), pytest.raises(OptionError, match="not in training mode"):
        model.train()(*rows().batch([0])[::2])


@pytest.mark.parametrize("region", [False, True])
@pytest.mark.parametrize("graftable", [".", r"layer\.[02]\."])
def test_a_region_in_the_first_layer_is_refused(graftable: str, region: bool) -> None:
    model = build(graftable=graftable)
    with pytest.raises(OptionError, match="a first layer in which, and before which, nothing is trained"):
        train(model, OPTIONS, region=region)


def test_rows_that_are_no_token_ids_are_refused() -> None:
    model = ModuleModel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    with (
        pytest.raises(OptionError, match="rows of token ids, and ModuleModel reads others"),
        lower_layer_cache(model, True),
    ):
        pass


class Repeated(nn.Module):
    """Two layers whose order of calls, and whose answer, a test chooses."""

    def __init__(self, forward: Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 8)
        self.config = transformers.BertConfig(hidden_size=8)
        self._forward = forward

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        hidden = self._forward(self.layers, self.embeddings(input_ids).detach())
        return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=self.last(hidden))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda layers, x: layers[2](layers[0](layers[1](x))), "called in turn, each once"),
        (lambda layers, x: layers[2](layers[1](layers[0](layers[0](x)))), "called in turn, each once"),
        (lambda layers, x: layers[2](layers[1](layers[0](x.transpose(0, 1)))).transpose(0, 1), "nothing else"),
        (lambda layers, x: layers[2](layers[1](layers[0](x.mean(1)))).unsqueeze(1), "nothing else"),
        (lambda layers, x: layers[2](layers[1](layers[0](x - x.mean((0, 1))))), "the first batch is off by"),
        (lambda layers, x: layers[2](layers[1](layers[0](x))) + x.sum((0, 1)), None),
        (lambda layers, x: layers[2](layers[1](layers[0](x))) + x, None),
    ],
)
def test_other_ways_through_layers_are_refused(forward: Any, message: str | None) -> None:
    """What depends on the batch is refused where it enters layers that are kept, not beside them."""
    model = TaskModel(Repeated(forward), TokenLayout(pad=0), "linear", graftable="last")
    model.add_task(TaskHead("task", 3))
    if message is None:
        assert_same_values(model, region=False)
        return
    with pytest.raises(OptionError, match=message):
        train(model, OPTIONS)
