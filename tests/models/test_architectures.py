"""Models of many families are loaded, fine-tuned, localized, grafted, and written as models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers

from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region
from forgetfree.data.rows import Rows
from forgetfree.data.sources import load_task
from forgetfree.ledger.graft import Graft
from forgetfree.models.loading import load_model
from forgetfree.serve.apply import apply_graft
from forgetfree.training.single_task import SingleTask
from forgetfree.training.training_options import LocalizationOptions, TrainingOptions

ENCODERS = ("Bert", "Roberta", "DistilBert", "DebertaV2", "Electra", "Albert", "MPNet", "ModernBert", "XLNet")
GRAFTED = (*ENCODERS, "GPT2", "OPT", "Bloom", "Llama", "GPTNeoX", "T5", "Bart")


@pytest.fixture(scope="module", params=GRAFTED)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return a family's name and the directory of its tiny model with an LM head."""
    return request.param, families.write(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.sampled("Bloom-auto")
@pytest.mark.parametrize("readout", ["linear", "auto"])
def test_a_family_is_grafted_and_written(
    model: tuple[str, Path], readout: str, data_directory: Path, tmp_path: Path
) -> None:
    family, directory = model
    loaded = load_model(str(directory), readout)
    assert loaded.readout == (readout if readout == "linear" else families.FAMILIES[family].readout)
    bench = SingleTask.of(loaded, load_task("qnli", str(data_directory)), shots=8)
    options = LocalizationOptions(steps=3, learning_rate=0.1, sparsity=0.05, mask_steps=2, mask_batch_size=8)
    fine_tuned = bench.fine_tuned(options)
    found = bench.localized(fine_tuned, options)
    assert len(found.region)
    bench.graft(fine_tuned, found.region, 0.05).save(tmp_path / "graft.safetensors")
    graft = Graft.load(tmp_path / "graft.safetensors")
    # The weights have the same bits under any head.
    theta = bench.grafted(fine_tuned, found.region).theta
    whole = load_model(str(directory), readout).model.backbone
    graft.apply_(whole)
    assert torch.equal(ParameterSpace.of(whole).flatten(whole), theta)
    written = apply_graft(graft, str(directory), str(tmp_path / "out"))
    again = getattr(transformers, written.loader).from_pretrained(tmp_path / "out")
    assert torch.equal(ParameterSpace.of(again).flatten(again), theta)


#: Families without a fitting classifier: T5's head reads its decoder, and a causal head has no bias.
NO_SUCH_HEAD = ("T5", "GPT2", "OPT", "Bloom", "Llama", "GPTNeoX")
LONG = "the film was awful . " * 30
TEXTS = ("a lovely film .", "was it DULL ?", "[SEP] a <mask> [MASK] </s> film", LONG, "who was it")


@pytest.mark.sampled("Bloom-qnli", "Electra-ag_news", "XLNet-ag_news")
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("task", ["sst2", "ag_news", "qnli"])
def test_pipeline_answers_as_a_familys_linear_readout_does(
    model: tuple[str, Path], task: str, data_directory: Path, tmp_path: Path
) -> None:
    """`pipeline("text-classification")` gives the same labels and probabilities, or an error, never another answer."""
    family, directory = model
    bench = SingleTask.of(load_model(str(directory), "linear"), load_task(task, str(data_directory)))
    labels = bench.task.definition.labels
    pre = bench.pre.readouts[task]
    torch.manual_seed(1)
    readout = {"weight": torch.randn(pre["weight"].shape) / 2, "bias": torch.randn(pre["bias"].shape)}
    moved = bench.pre.theta + 0.1 * torch.randn(len(bench.space))
    state = replace(bench.pre, theta=moved, readouts={task: readout})
    region = Region.of(range(0, len(bench.space), 2))  # entries of all tensors, norms included
    bench.graft(state, region, 0.5).save(tmp_path / "graft.safetensors")
    written = apply_graft(Graft.load(tmp_path / "graft.safetensors"), str(directory), tmp_path / "out")
    assert bool(written.call) == (family not in NO_SUCH_HEAD)
    classify = transformers.pipeline("text-classification", model=str(tmp_path / "out"), truncation=True)
    pair = task == "qnli"
    given = [{"text": a, "text_pair": b} for a, b in zip(TEXTS, TEXTS[::-1], strict=True)] if pair else list(TEXTS)
    if not written.call:
        with pytest.raises(ValueError, match="empty sequence"):
            classify(given[0])
        return
    rows = Rows(TEXTS, TEXTS[::-1] if pair else (), (0,) * len(TEXTS))
    grafted = bench.grafted(state, region)
    logits = bench.answers(grafted, bench.encode(rows), TrainingOptions(evaluation_batch_size=1)).logits
    expected = torch.from_numpy(logits).softmax(1)
    for one, row in zip(given, expected, strict=True):
        got = {answer["label"]: answer["score"] for answer in classify(one, top_k=None)}
        assert list(got) == [labels[int(i)] for i in row.argsort(descending=True)]
        assert torch.allclose(torch.tensor([got[label] for label in labels]), row, rtol=0, atol=2e-5)
    together = classify(given, top_k=None, batch_size=len(given))
    assert [len(answers) for answers in together] == [len(labels)] * len(given)


@pytest.mark.sampled("Albert-auto")
@pytest.mark.parametrize("readout", ["linear", "auto"])
def test_what_tells_tasks_apart_is_the_mean_of_a_hidden_layer(model: tuple[str, Path], readout: str) -> None:
    """For an encoder-decoder, the layer is the encoder's; neither an LM head nor a decoder runs."""
    loaded = load_model(str(model[1]), readout)
    network, ids = loaded.model.eval(), torch.arange(30, 42).view(1, 12)
    short = torch.cat([ids[:, :9], torch.full((1, 3), loaded.pad)], 1)
    with torch.no_grad():
        whole = network.backbone(**network.inputs(ids), output_hidden_states=True)
        states = whole.encoder_hidden_states if "encoder_hidden_states" in whole else whole.hidden_states

        def refuse(module: torch.nn.Module, *_: object) -> None:
            raise AssertionError(f"{type(module).__name__} is asked")

        backbone: Any = network.backbone
        if "logits" in whole:
            (backbone.get_output_embeddings() or network).register_forward_hook(refuse)
        if backbone.config.is_encoder_decoder:
            backbone.get_decoder().register_forward_hook(refuse)
        for layer, expected in ((0, states[0]), (None, states[len(states) // 2]), (1, states[1])):
            found = network.pooled(torch.cat([ids, short]), layer)
            torch.testing.assert_close(found[:1], expected.mean(1))
            torch.testing.assert_close(found[1:], network.pooled(ids[:, :9], layer), atol=1e-5, rtol=1e-4)
