"""A ledger gives the same answers or refuses with the reason: each test changes one thing that affects an answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModel,
    AutoTokenizer,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DebertaV2Model,
    PreTrainedTokenizerFast,
)

from forgetfree import cli
from forgetfree.continual.stream import make_stream
from forgetfree.data.sources import load_tasks
from forgetfree.errors import LedgerError
from forgetfree.ledger.binding import Binding, network_differences, network_of, tokenizer_digest
from forgetfree.ledger.ledger import Ledger
from forgetfree.ledger.switch import LedgerSwitch
from forgetfree.models.loading import load_model
from forgetfree.options import build
from forgetfree.strategies.grafting_continual import GraftingContinual

Change = Callable[[Path], None]


def edited(file: str, change: Callable[[dict[str, Any]], Any]) -> Change:
    """Return a change of one JSON file in a directory."""

    def apply(directory: Path) -> None:
        content = json.loads((directory / file).read_text(encoding="utf-8"))
        change(content)
        (directory / file).write_text(json.dumps(content), encoding="utf-8")

    return apply


def swap_words(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["film"], vocabulary["story"] = vocabulary["story"], vocabulary["film"]


#: The changes of the model's directory, each with the text that the error message must contain.
MODEL_CHANGES: dict[str, tuple[Change, str]] = {
    "activation": (edited("config.json", lambda c: c.update(hidden_act="relu")), 'hidden_act (expected "gelu", got "relu")'),
    "heads": (edited("config.json", lambda c: c.update(num_attention_heads=4)), "num_attention_heads (expected 2, got 4)"),
    "epsilon": (edited("config.json", lambda c: c.update(layer_norm_eps=1e-3)), "layer_norm_eps (expected 1e-12, got 0.001)"),
    "words": (edited("tokenizer.json", swap_words), "the tokenizer (expected "),
    "case": (edited("tokenizer_config.json", lambda t: t.update(do_lower_case=False)), "the tokenizer (expected "),
    "separator": (edited("tokenizer_config.json", lambda t: t.update(sep_token="[CLS]")), "the tokenizer (expected "),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(model_directory: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT that each test may copy and change."""
    return Path(shutil.copytree(model_directory("bert"), tmp_path_factory.mktemp("models") / "bert"))


@pytest.mark.parametrize("change", MODEL_CHANGES)
def test_what_decides_an_answer_is_bound(model: Path, change: str, tmp_path: Path) -> None:
    there, (apply, named) = Path(shutil.copytree(model, tmp_path / "model")), MODEL_CHANGES[change]
    before = load_model(str(there), "linear").binding()
    apply(there)
    assert named in ", ".join(before.differences(load_model(str(there), "linear").binding()))


def grafting(model: Path, data: Path, *, max_length: int = 24, **options: Any) -> Any:
    loaded = load_model(str(model), "linear", max_length=max_length)
    chosen = build(GraftingContinual.Options, {"steps": 3, "sparsity": 0.05, "precision": "bf16"} | options, "it")
    return GraftingContinual(
        stream=make_stream("x", load_tasks(tiny.STREAM, str(data)), loaded, shots=4), options=chosen
    )


@pytest.fixture(scope="module")
def saved(model: Path, data_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved strategy that has learned one task in bf16."""
    strategy, directory = grafting(model, data_directory), tmp_path_factory.mktemp("saved")
    strategy.train(strategy.stream.benchmark.train_stream[0])
    strategy.save(directory)
    return directory


@pytest.mark.parametrize("change", ["heads", "words"])
def test_every_use_reports_a_changed_model(
    saved: Path, model: Path, change: str, capsys: pytest.CaptureFixture[str], data_directory: Path, tmp_path: Path
) -> None:
    """The weights stay the same, and so does their fingerprint."""
    there, (apply, named) = Path(shutil.copytree(model, tmp_path / "model")), MODEL_CHANGES[change]
    file = saved / "ledger.safetensors"
    assert cli.main(["ledger", "verify", str(file), "--model", str(there)]) == 0
    said = capsys.readouterr().out
    assert f"and the weights, configuration, tokenizer, readout and maximum length of {there}" in said
    apply(there)
    assert cli.main(["ledger", "verify", str(file), "--model", str(there)]) == 1
    assert named in capsys.readouterr().err
    with pytest.raises(LedgerError) as caught:
        grafting(there, data_directory).load(saved)
    assert named in str(caught.value)
    if change == "heads":  # the change is visible in the body alone
        with pytest.raises(LedgerError) as caught:
            LedgerSwitch(Ledger.load(file), load_model(str(there), "linear").model.backbone)
        assert named in str(caught.value)


def test_a_strategy_that_would_answer_differently_does_not_load(saved: Path, model: Path, data_directory: Path) -> None:
    """A strategy with a longer maximum length does not load. The precision may differ: answers use the dtype of the weights."""
    with pytest.raises(LedgerError, match=r"max_length \(expected 24, got 32\)"):
        grafting(model, data_directory, max_length=32).load(saved)
    for precision in ("bf16", "fp32"):
        grafting(model, data_directory, precision=precision).load(str(saved))


# -- What a tokenizer does -------------------------------------------------------------------------------


def test_where_texts_are_written_the_chat_template_counts() -> None:
    one, other = tiny.byte_level(causal=True), tiny.byte_level(causal=True)
    other.chat_template = "{{ messages[0]['content'] }}"
    assert tokenizer_digest(one) == tokenizer_digest(other)
    assert tokenizer_digest(one, chats=True) != tokenizer_digest(other, chats=True)


def test_a_tokenizer_is_known_by_what_it_does_not_by_its_files(model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    digest = tokenizer_digest(tokenizer)
    tokenizer("state that a call leaves behind", truncation=True, max_length=3, padding="max_length")
    assert tokenizer_digest(tokenizer) == digest
    tokenizer.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content, indent=3, sort_keys=True))
    assert tokenizer_digest(AutoTokenizer.from_pretrained(tmp_path)) == digest


def fast(content: dict[str, Any]) -> Any:
    end = "<|endoftext|>"
    backend = Tokenizer.from_str(json.dumps(content))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=end, eos_token=end, unk_token=end)


def merges(content: dict[str, Any]) -> None:
    """Swap the last two merges; none of the probe texts shows the difference."""
    held = content["model"]["merges"]
    held[-1], held[-2] = held[-2], held[-1]


def replaces(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "lovely"}, "content": "awful"}


def splits(content: dict[str, Any]) -> None:
    split = {"type": "Split", "pattern": {"String": "lov"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}


def adds(content: dict[str, Any]) -> None:
    (known, *_) = content["added_tokens"]
    name = next(piece for piece in content["model"]["vocab"] if len(piece) == 2 and piece.isalpha())
    number = content["model"]["vocab"][name]
    content["added_tokens"].append(known | {"id": number, "content": name, "special": False})


def closes_pairs(content: dict[str, Any]) -> None:
    template = [{"Sequence": {"id": part, "type_id": 0}} for part in "AB"]
    end = {"id": "<|endoftext|>", "ids": [content["model"]["vocab"]["<|endoftext|>"]], "tokens": ["<|endoftext|>"]}
    between = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": template[:1],
        "pair": [template[0], between, template[1]],
        "special_tokens": {"<|endoftext|>": end},
    }


@pytest.mark.parametrize("change", [merges, replaces, splits, adds, closes_pairs])
def test_a_rule_that_few_texts_show_matters(change: Any) -> None:
    one = tiny.byte_level(causal=True)
    content = json.loads(one.backend_tokenizer.to_str())
    same, other = fast(content), json.loads(one.backend_tokenizer.to_str())
    change(other)
    changed = fast(other)
    assert changed.get_vocab() == same.get_vocab()
    assert same("a film that the")["input_ids"] == changed("a film that the")["input_ids"]
    assert tokenizer_digest(same) == tokenizer_digest(fast(content))
    assert tokenizer_digest(changed) != tokenizer_digest(same)


# -- What a network computes -----------------------------------------------------------------------------


def test_settings_that_decide_no_answer_do_not_matter(model_directory: Any) -> None:
    body = AutoModel.from_pretrained(model_directory("bert"))
    before = network_of(body)
    inert = {"id2label": {0: "a"}, "hidden_dropout_prob": 0.9, "architectures": ["X"], "use_cache": False}
    inert |= {"return_dict": False, "torchscript": True, "chunk_size_feed_forward": 4, "pad_token_id": 3}
    for key, value in inert.items():
        setattr(body.config, key, value)
    body.embeddings.word_embeddings.padding_idx = 3  # BERT sets it from pad_token_id; it matters in training only
    assert network_differences(before, network_of(body)) == []
    body.config.hidden_act = "tanh"
    assert network_differences(before, network_of(body)) == ['the model\'s hidden_act (expected "gelu", got "tanh")']


def test_another_kind_of_network_is_recognized_by_its_printed_form() -> None:
    def network(activation: torch.nn.Module) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(2, 2), activation)

    assert network_of(network(torch.nn.ReLU())) == network_of(network(torch.nn.ReLU()))
    assert network_differences(network_of(network(torch.nn.ReLU())), network_of(network(torch.nn.Tanh())))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"network": 1}', Binding("[]").json, Binding("x").json, "null", "[" * 99999]
)
def test_an_invalid_binding_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        Binding.of_json(text)
    assert Binding.of_json(Binding("{}", "t", "prompt", 5).json) == Binding("{}", "t", "prompt", 5)


# -- Grafts ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graft(model: Path, data_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("grafts") / "graft"
    given = ["graft", "sst2", "--data", str(data_directory), "--model", str(model), "--shots", "4", "--steps", "3"]
    assert cli.main([*given, "--sparsity", "0.05", "--out", str(out)]) == 0
    return out / "bare-graft/seed-0/graft.safetensors"


@pytest.mark.parametrize("change", ["activation", "separator"])
def test_a_graft_refuses_a_model_that_computes_or_reads_differently(
    graft: Path, model: Path, change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, (apply, named) = Path(shutil.copytree(model, tmp_path / "model")), MODEL_CHANGES[change]
    apply(there)
    capsys.readouterr()
    assert cli.main(["apply", str(graft), "--model", str(there), "--out", str(tmp_path / "out")]) == 1
    expected = "The graft was made with another tokenizer" if "tokenizer" in named else named
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_classifiers_head_is_written_like_the_fine_tuned_models(tmp_path: Path, data_directory: Path) -> None:
    """Only config.json defines what DeBERTa's head computes, and the base model's config.json may differ."""
    config: dict[str, Any] = {"vocab_size": 200, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config |= {"intermediate_size": 32, "max_position_embeddings": 48, "id2label": {0: "negative", 1: "positive"}}
    tokenizer = tiny.build("bert")[1]
    base = DebertaV2Config(**config | {"vocab_size": len(tokenizer), "pooler_hidden_act": "gelu"})
    tuned = DebertaV2Config(**config | {"vocab_size": len(tokenizer), "pooler_hidden_act": "tanh"})
    torch.manual_seed(0)
    body = DebertaV2Model(base).eval()
    classifier = DebertaV2ForSequenceClassification(tuned).eval()
    classifier.deberta.load_state_dict(body.state_dict())
    with torch.no_grad():
        for parameter in classifier.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
        classifier.deberta.embeddings.load_state_dict(body.embeddings.state_dict())
    for name, network in (("base", body), ("tuned", classifier)):
        network.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    given = ["graft", "sst2", "--data", str(data_directory), "--model", str(tmp_path / "base")]
    given += ["--fine-tuned", str(tmp_path / "tuned"), "--sparsity", "1", "--set", "mask_steps=0"]
    assert cli.main([*given, "--out", str(tmp_path / "graft")]) == 0
    command = ["apply", str(tmp_path / "graft"), "--model", str(tmp_path / "base"), "--out", str(tmp_path / "out")]
    assert cli.main(command) == 0
    written = DebertaV2ForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert written.config.pooler_hidden_act == "tanh"
    ids = torch.tensor([tokenizer("a lovely film")["input_ids"]])
    with torch.no_grad():
        assert torch.allclose(written(ids).logits, classifier(ids).logits, atol=1e-5)
