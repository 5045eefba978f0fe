"""The readout of a model, the token that it reads, and the part of an encoder-decoder that it uses."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
import transformers
from tiny import TASK
from tokenizers import processors

from forgetfree.data.rows import Rows
from forgetfree.data.sources import load_task
from forgetfree.errors import ModelError, UsageError
from forgetfree.models.fine_tuned_directory import load_fine_tuned
from forgetfree.models.loading import LoadedModel, language_model, load_model
from forgetfree.training.single_task import SingleTask
from forgetfree.training.training_options import TrainingOptions

TEXTS = ("the film was lovely and very bright", "a dull story", "the story was lovely and very bright")


def features(loaded: LoadedModel, *texts: str) -> torch.Tensor:
    """Return the input features of the readout, with each text as a separate row."""
    rows = loaded.encoder(TASK)(Rows(texts, (), (0,) * len(texts)))
    with torch.no_grad():
        return torch.cat([loaded.model.eval().features(torch.tensor([ids])) for ids in rows])


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Write a model of this class and configuration, with a tokenizer, and return its directory."""

    def write(architecture: str, config: Any, tokenizer: Any = None) -> Path:
        model = tiny.pre_trained(lambda: getattr(transformers, architecture)(config))
        model.save_pretrained(tmp_path / architecture)
        (tokenizer or tiny.wordpiece()).save_pretrained(tmp_path / architecture)
        return tmp_path / architecture

    return write


# -- The token -------------------------------------------------------------------------------------------


def test_bart_is_read_as_its_own_classifier_reads_it(tmp_path: Path) -> None:
    """It is read at the decoder's last end-of-text token."""
    directory = families.write("Bart", tmp_path)
    loaded = load_model(str(directory))
    assert loaded.readout == "linear" and type(loaded.model.backbone).__name__ == "BartModel"
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    seen: list[torch.Tensor] = []
    theirs.classification_head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    for text in TEXTS:
        theirs(torch.tensor([loaded.tokenizer(text)["input_ids"]]))
    assert torch.equal(features(loaded, *TEXTS), torch.cat(seen))


@pytest.mark.parametrize("name", ["T5", "MT5", "UMT5"])
def test_t5_is_read_by_its_encoder_at_the_last_token(tmp_path: Path, name: str) -> None:
    directory = families.write(name, tmp_path)
    loaded = load_model(str(directory))
    assert loaded.readout == "linear" and type(loaded.model.backbone).__name__ == f"{name}EncoderModel"
    encoder = transformers.AutoModelForTextEncoding.from_pretrained(directory)
    with torch.no_grad():
        rows = [torch.tensor([loaded.tokenizer(text)["input_ids"]]) for text in TEXTS]
        expected = torch.cat([encoder(x).last_hidden_state[:, -1] for x in rows])
    assert torch.equal(features(loaded, *TEXTS), expected)
    assert not [spec for spec in loaded.model.space().tensors if "decoder" in spec.name]


@pytest.mark.sampled("OPT")
@pytest.mark.parametrize("name", ["Bart", "T5", "XLNet", "OPT"])
def test_padding_changes_no_answer(tmp_path: Path, name: str, data_directory: Path) -> None:
    loaded = load_model(str(families.write(name, tmp_path)), "linear")
    bench = SingleTask.of(loaded, load_task("qnli", str(data_directory)), shots=4)
    together = torch.from_numpy(bench.answers(bench.pre).logits)
    alone = torch.from_numpy(bench.answers(bench.pre, options=TrainingOptions(evaluation_batch_size=1)).logits)
    assert len(set(bench.task.test.lengths)) > 1
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ["BertModel", "LlamaModel"])
def test_a_decoder_without_a_head_is_read_at_its_last_token(written: Any, architecture: str) -> None:
    """Its first token attends to no later token of the text."""
    decoder = tiny.bert_config(len(tiny.wordpiece()), is_decoder=True)
    directory = written(architecture, decoder if architecture == "BertModel" else families.config("Llama"))
    loaded = load_model(str(directory), "linear")
    assert loaded.model._position(torch.tensor([[5, 6, 0, 0]])).tolist() == [1]
    assert not torch.equal(*features(loaded, "the film was bright", "story film was bright"))


@pytest.mark.parametrize("end", [False, True])
def test_a_causal_model_is_read_where_the_label_word_would_follow(
    model_directory: Any, tmp_path: Path, end: bool
) -> None:
    """This holds even if its tokenizer ends texts with a token after which no word follows."""
    directory = shutil.copytree(model_directory("gpt2-lm"), tmp_path / "model")
    tokenizer = tiny.byte_level(causal=True)
    if end:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
        )
        tokenizer.save_pretrained(directory)
    loaded = load_model(str(directory))
    (ids,) = loaded.encoder(TASK)(Rows(("x film",), (), (0,)))
    words = " ".join(loaded.tokenizer.convert_ids_to_tokens(ids))
    assert words == ("<|endoftext|> " if end else "") + "x Ġfilm ĠIt Ġwas"


# -- The readout -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "readout"),
    [
        ("BertLMHeadModel", {}, None),
        ("BertLMHeadModel", {"is_decoder": True}, "causal"),
        ("RobertaForCausalLM", {}, None),
        ("XLMWithLMHeadModel", {}, "prompt"),
        ("XLMWithLMHeadModel", {"causal": True}, "causal"),
        ("XLNetLMHeadModel", {}, None),
        ("GPT2LMHeadModel", {}, "causal"),
        ("BartForConditionalGeneration", {}, None),
        ("ElectraForPreTraining", {}, None),
    ],
)
def test_a_language_model_is_causal_if_tokens_see_only_those_before(
    kind: str, changes: dict[str, Any], readout: str | None
) -> None:
    config = getattr(transformers, kind).config_class(architectures=[kind], **changes)
    assert language_model(config) == readout


def test_the_causal_readout_of_a_model_that_looks_ahead_is_refused(written: Any) -> None:
    directory = written("BertLMHeadModel", families.config("Bert"), families.tokenizer("Bert"))
    assert load_model(str(directory)).readout == "linear"
    with pytest.raises(
        ModelError, match=r"is BertLMHeadModel, in which a token also attends to later tokens\. Give one, or another"
    ):
        load_model(str(directory), "causal")


# -- Other models -----------------------------------------------------------------------------------------


def test_a_model_that_reads_no_token_ids_is_refused(written: Any) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    directory = written("ViTModel", transformers.ViTConfig(**sizes, image_size=32, patch_size=16))
    with pytest.raises(ModelError, match=r"is ViTModel, which has no table of token embeddings, and .*Give a"):
        load_model(str(directory))


def test_bigbird_answers_alike_before_and_after_a_short_row(written: Any) -> None:
    """With block-sparse attention, BigBird would answer differently after a short row."""
    sizes = families.SIZES | {"max_position_embeddings": 1024, "block_size": 16, "num_random_blocks": 1}
    directory = written("BigBirdModel", transformers.BigBirdConfig(vocab_size=len(tiny.wordpiece()), **sizes))
    loaded = load_model(str(directory), max_length=1024)
    before = features(loaded, "the film " * 400)
    features(loaded, "a dull story")
    assert torch.equal(features(loaded, "the film " * 400), before)


# -- Unsupported encoder-decoders ------------------------------------------------------------------------


@pytest.mark.parametrize("readout", ["auto", "linear", "prompt", "causal"])
def test_other_encoder_decoders_are_refused_at_once(tmp_path: Path, readout: str) -> None:
    transformers.PegasusConfig(architectures=["PegasusForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        load_model(str(tmp_path), readout)
    assert str(caught.value) == (
        f"Model {str(tmp_path)!r} is an encoder-decoder of the type 'pegasus', and of these only bart, t5, mt5, umt5 are read. "
        "Give one of them, an encoder, or a causal model."
    )


def test_a_fine_tuned_classifier_of_barts_is_read_by_its_head(tmp_path: Path, data_directory: Path) -> None:
    base, given = families.write("Bart", tmp_path / "base"), tmp_path / "given"
    rows = load_task("sst2", str(data_directory))
    labels = dict(enumerate(rows.task.labels))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, id2label=labels)
    with torch.no_grad():
        model.model.decoder.layers[1].fc2.weight.add_(0.1)
    model.save_pretrained(given)
    found = load_fine_tuned(str(given), str(base), rows.task)
    bench = SingleTask.of(found.loaded, rows, shots=4)
    x = bench.task.test.batch(range(4))[0]
    with torch.no_grad(), bench.holding(replace(bench.pre, theta=found.theta)):
        expected = model.eval()(x, attention_mask=x.ne(model.config.pad_token_id).long()).logits
        torch.testing.assert_close(bench.model.eval()(x, 0), expected)


def test_a_fine_tuned_classifier_of_t5s_is_refused(tmp_path: Path) -> None:
    base, given = families.write("T5", tmp_path / "base"), tmp_path / "given"
    transformers.AutoModelForSequenceClassification.from_pretrained(base).save_pretrained(given)
    with pytest.raises(UsageError) as caught:
        load_fine_tuned(str(given), str(base), TASK)
    assert str(caught.value) == (
        f"--fine-tuned {str(given)!r} is T5ForSequenceClassification, whose head reads the decoder, and of the type 't5' the "
        "encoder alone is read. Save it as …ForTokenClassification."
    )
