"""Families beside BERT, RoBERTa and GPT-2: loaded, fine-tuned, localised, grafted, and written as a model of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers

from forgetfree.apply import apply_graft
from forgetfree.data.rows import Rows
from forgetfree.data.sources import load_task
from forgetfree.grafting import Graft
from forgetfree.localization import LocalizationOptions
from forgetfree.models.loading import load_model
from forgetfree.parameters import ParameterSpace, kind_of
from forgetfree.regions import Region
from forgetfree.single_task import SingleTask
from forgetfree.training import TrainingOptions

#: BERT's names for the sizes, which most families share.
SIZES = {
    "hidden_size": tiny.HIDDEN,
    "num_hidden_layers": tiny.LAYERS,
    "num_attention_heads": tiny.HEADS,
    "intermediate_size": tiny.INNER,
    "max_position_embeddings": tiny.POSITIONS,
    "initializer_range": tiny.SPREAD,
}
DISTILBERT = {"dim": tiny.HIDDEN, "n_layers": tiny.LAYERS, "n_heads": tiny.HEADS, "hidden_dim": tiny.INNER}
OPT = {"hidden_size": tiny.HIDDEN, "num_hidden_layers": tiny.LAYERS, "num_attention_heads": tiny.HEADS}
FAMILIES: dict[str, dict[str, Any]] = {
    "DistilBert": DISTILBERT | {"max_position_embeddings": tiny.POSITIONS},
    "DebertaV2": SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    "Electra": SIZES | {"embedding_size": 8},
    "Albert": SIZES | {"embedding_size": 8},
    "MPNet": SIZES,
    "ModernBert": SIZES,
    "OPT": OPT | {"ffn_dim": tiny.INNER, "word_embed_proj_dim": tiny.HIDDEN, "max_position_embeddings": tiny.POSITIONS},
    "Llama": SIZES,
    "GPTNeoX": SIZES,
}
CAUSAL = ("OPT", "Llama", "GPTNeoX")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A family's name, and a tiny model of it with its LM head, as a directory."""
    family, directory = request.param, tmp_path_factory.mktemp(request.param)
    tokenizer = tiny.byte_level(causal=True) if family in CAUSAL else tiny.wordpiece()
    special = {
        name: getattr(tokenizer, name)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id")
    }
    config = getattr(transformers, f"{family}Config")(vocab_size=len(tokenizer), **FAMILIES[family], **special)
    head = "ForCausalLM" if family in CAUSAL else "ForMaskedLM"
    torch.manual_seed(0)
    getattr(transformers, family + head)(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return family, directory


@pytest.mark.parametrize("readout", ["linear", "auto"])
def test_a_family_is_grafted_and_written(
    model: tuple[str, Path], readout: str, data_directory: Path, tmp_path: Path
) -> None:
    family, directory = model
    loaded = load_model(str(directory), readout)
    assert loaded.readout == ("linear" if readout == "linear" else "causal" if family in CAUSAL else "prompt")
    bench = SingleTask(loaded, load_task("qnli", str(data_directory)), shots=8)
    options = LocalizationOptions(steps=3, learning_rate=0.1, sparsity=0.05, mask_steps=2, mask_batch_size=8)
    fine_tuned = bench.fine_tuned(options)
    (found,) = bench.localized(fine_tuned, options)
    assert len(found.region)
    bench.graft(fine_tuned, found.region, 0.05).save(tmp_path / "graft.safetensors")
    graft = Graft.load(tmp_path / "graft.safetensors")
    # The same bits, whatever head the model has.
    theta = bench.grafted(fine_tuned, found.region).theta
    whole = load_model(str(directory), readout).model.backbone
    graft.apply_(whole)
    assert torch.equal(ParameterSpace.of(whole).flatten(whole), theta)
    written = apply_graft(graft, str(directory), tmp_path / "out")
    again = getattr(transformers, written.loader).from_pretrained(tmp_path / "out")
    assert torch.equal(ParameterSpace.of(again).flatten(again), theta)


LONG = "the film was awful . " * 30
TEXTS = ("a lovely film .", "was it DULL ?", "[SEP] a <mask> [MASK] </s> film", LONG, "who was it")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("task", ["sst2", "ag_news", "qnli"])
def test_the_usual_call_answers_as_a_familys_linear_readout_does(
    model: tuple[str, Path], task: str, data_directory: Path, tmp_path: Path
) -> None:
    """By `pipeline("text-classification")`: labels and probabilities, or an error, never another answer."""
    family, directory = model
    bench = SingleTask(load_model(str(directory), "linear"), load_task(task, str(data_directory)))
    labels = bench.task.definition.labels
    pre = bench.pre.readouts[task]
    torch.manual_seed(1)
    readout = {"weight": torch.randn(pre["weight"].shape) / 2, "bias": torch.randn(pre["bias"].shape)}
    moved = bench.pre.theta + 0.1 * torch.randn(len(bench.space))
    state = replace(bench.pre, theta=moved, readouts={task: readout})
    region = Region.of(range(0, len(bench.space), 2))  # of every norm, too
    bench.graft(state, region, 0.5).save(tmp_path / "graft.safetensors")
    written = apply_graft(Graft.load(tmp_path / "graft.safetensors"), str(directory), tmp_path / "out")
    # A causal head has no bias, which an RMSNorm does not replace; and these tokenizers put nothing between two texts.
    assert written.usual == (family not in CAUSAL or (family != "Llama" and task != "qnli"))
    classify = transformers.pipeline("text-classification", model=str(tmp_path / "out"), truncation=True)
    pair = task == "qnli"
    given = [{"text": a, "text_pair": b} for a, b in zip(TEXTS, TEXTS[::-1], strict=True)] if pair else list(TEXTS)
    if not written.usual:
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


@pytest.mark.parametrize("readout", ["linear", "auto"])
def test_a_family_reads_rows_as_long_as_it_has_positions(
    model: tuple[str, Path], readout: str, data_directory: Path
) -> None:
    rows = load_task("sst2", str(data_directory))
    long = Rows(("film " * 200,) * 2, (), (0, 1))
    loaded = load_model(str(model[1]), readout, max_length=10_000)
    assert tiny.POSITIONS - 2 <= loaded.max_length <= tiny.POSITIONS
    bench = SingleTask(loaded, replace(rows, test=long), shots=4)
    assert bench.task.test.lengths == [loaded.max_length] * 2
    assert bench.answers(bench.pre).logits.shape == (2, 2)


def test_every_graftable_tensor_of_a_family_has_a_kind_and_no_embedding_is_graftable(model: tuple[str, Path]) -> None:
    names = [spec.name for spec in load_model(str(model[1])).model.space().tensors]
    assert names and not [name for name in names if kind_of(name).startswith("other")]
    assert not [name for name in names if "embed" in name or "relative_attention_bias" in name]
