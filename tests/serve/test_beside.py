"""Tasks beside quantised weights: a saved ledger gives the same predictions as `answering`, by every command and class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from forgetfree import Ledger, Predictor, TaskSwitch, cli
from forgetfree.core.linear_layers import is_quantised
from forgetfree.errors import LedgerError, UsageError
from forgetfree.ledger import mixed_batch
from forgetfree.serve.apply import export_task
from forgetfree.testing.tiny import pre_trained
from forgetfree.trainers.learning import answering, learning

pytestmark = pytest.mark.filterwarnings("default")  # warnings of libraries about each other
LABELS = {"colour": ["red", "blue"], "mood": ["bad", "good"]}
TEXTS = ["it was great", "the film was terrible", "great and terrible and great again"]
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}


def base(kind: Any, place: Path, **options: Any) -> tuple[Any, Any]:
    """Return a model in 4 bits, saved as users save it, with its tokenizer."""
    tokenizer: Any = tiny.byte_level(causal=True)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes)
    pre_trained(lambda: kind(config)).save_pretrained(place / "whole")
    quantised = BitsAndBytesConfig(**NF4, **options)
    model = kind.from_pretrained(place / "whole", quantization_config=quantised, dtype=torch.float32)
    model.save_pretrained(place / "base")
    for name in ("whole", "base"):
        tokenizer.save_pretrained(place / name)
    return model, tokenizer


def learn(model: Any, ledger: Ledger, task: str, batch: Any, **arguments: Any) -> None:
    with learning(model, ledger, task, **{"batches": [batch], "sparsity": 0.05} | arguments):
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=3e-2)
        for _ in range(5):
            model.train()(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any, dict[str, Tensor]]:
    place = tmp_path_factory.mktemp("classifiers")
    model, tokenizer = base(LlamaForSequenceClassification, place, llm_int8_skip_modules=["score"])
    ledger, seen, texts = Ledger.of_model(model), {}, tokenizer(TEXTS, padding=True, return_tensors="pt")
    for number, (task, labels) in enumerate(LABELS.items()):
        batch = {**texts, "labels": torch.tensor([0, 1, number])}
        learn(model, ledger, task, batch, labels=labels, tokenizer=tokenizer)
    for task in LABELS:
        with answering(model, ledger, task), torch.no_grad():
            seen[task] = model(**texts).logits
    ledger.save(place / "skills.safetensors")
    return place, model, tokenizer, seen


def test_classifiers_answer_from_the_file(
    classifiers: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place, model, tokenizer, seen = classifiers
    ledger, directory = Ledger.load(place / "skills.safetensors"), str(place / "base")
    predictor = Predictor.of_ledger(ledger, directory)
    monkeypatch.setattr(mixed_batch, "_MOST", 1)  # this share must allow corrections here: the model has few entries
    assert is_quantised(predictor.loaded.model.backbone)
    switch = TaskSwitch(ledger, model)
    assert not torch.equal(seen["colour"], seen["mood"])
    for task, expected in seen.items():
        assert torch.equal(predictor.logits(task, TEXTS), expected)
        with switch.task(task), torch.no_grad():
            assert torch.equal(model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits, expected)
    mixed = predictor.answer_mixed(["mood", "colour", "mood"], TEXTS)
    for task, text, answer in zip(["mood", "colour", "mood"], TEXTS, mixed, strict=True):
        assert answer.task == task
        assert predictor.answer(task, [text])[0].probability == pytest.approx(answer.probability, abs=1e-4)
    assert predictor._mixed is not None and predictor._mixed._proven  # the rows were answered in one corrected batch
    file = str(place / "skills.safetensors")
    assert cli.main(["ledger", "verify", file, "--model", directory]) == 0
    assert cli.main(["ledger", "show", file]) == 0
    assert "stored beside the weights" in capsys.readouterr().out
    assert cli.main(["predict", file, "--model", directory, "--task", "mood", "--json", *TEXTS]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = [json.loads(line)["label"] for line in lines if line.startswith("{")]
    assert said == [LABELS["mood"][i] for i in seen["mood"].argmax(1).tolist()]
    assert cli.main(["predict", file, "--model", str(place / "whole"), "x"]) == 1
    assert "computes otherwise" in (said := capsys.readouterr().err) and "quantization_config" in said


def test_exports(classifiers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The base with the ledger has the same logits to the bit; a plain model has them up to rounding."""
    place, _, tokenizer, seen = classifiers
    texts = tokenizer(TEXTS, padding=True, return_tensors="pt")
    where = [str(place / "skills.safetensors"), "--model", str(place / "base"), "--task", "mood"]
    assert cli.main(["export", *where, "--out", str(tmp_path / "beside")]) == 0
    assert "--merge writes a plain model" in capsys.readouterr().out
    card = (tmp_path / "beside" / "README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0].replace("DIRECTORY", str(tmp_path / "beside"))
    names: dict[str, Any] = {"texts": texts}
    exec(code.replace("...", "found = model.eval()(**texts).logits.detach()"), names)  # the code of the model card
    again = Predictor.of_ledger(Ledger.load(tmp_path / "beside" / "ledger.safetensors"), str(tmp_path / "beside"))
    assert torch.equal(again.logits("mood", TEXTS), seen["mood"]) and "bitsandbytes" in card
    directory = [str(tmp_path / "beside"), "--task", "mood"]  # the directory has everything that predict needs
    assert cli.main(["predict", *directory, TEXTS[0]]) == 0
    assert cli.main(["export", *directory, "--out", str(tmp_path / "plain"), "--merge"]) == 0
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain").eval()
    assert not is_quantised(plain) and "dequantised to float32" in (tmp_path / "plain" / "README.md").read_text()
    with torch.no_grad():
        torch.testing.assert_close(plain(**texts).logits, seen["mood"], rtol=1e-3, atol=1e-4)
    assert [*plain.config.id2label.values()] == LABELS["mood"]


def test_texts_are_written_from_the_file(tmp_path: Path) -> None:
    model, tokenizer = base(LlamaForCausalLM, tmp_path)
    ids = tokenizer("it was great and terrible", return_tensors="pt")["input_ids"]
    ledger, seen = Ledger.of_model(model), {}
    say = {"kind": "generation", "tokenizer": tokenizer, "template": "{prompt}", "max_new_tokens": 4}
    for task, labels in (("one", ids), ("two", ids.flip(1))):
        learn(model, ledger, task, {"input_ids": labels, "labels": labels}, **say)
    for task in ("one", "two"):
        with answering(model, ledger, task):
            written = model.generate(**tokenizer("it was", return_tensors="pt"), max_new_tokens=4, do_sample=False)
            seen[task] = tokenizer.decode(written[0, -4:]).strip()
    ledger.save(tmp_path / "skills.safetensors")
    predictor = Predictor.of_ledger(Ledger.load(tmp_path / "skills.safetensors"), str(tmp_path / "base"))
    assert {task: predictor.answer(task, ["it was"])[0].text for task in seen} == seen and seen["one"] != seen["two"]
    export_task(predictor, "two", tmp_path / "plain", merge=True)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    written = plain.generate(**tokenizer("it was", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(written[0, -4:]).strip() == seen["two"]


@pytest.mark.parametrize("bits", [{"load_in_4bit": True}, {"load_in_8bit": True}])
def test_a_pooler_is_of_the_head(bits: Any, tmp_path: Path) -> None:
    """With labels=, the ledger keeps BERT's trained pooler, so the pooler must not be quantised."""
    tokenizer: Any = tiny.wordpiece()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = BertConfig(vocab_size=len(tokenizer), **sizes)
    pre_trained(lambda: BertForSequenceClassification(config)).save_pretrained(tmp_path)
    batch = {**tokenizer(TEXTS, padding=True, return_tensors="pt"), "labels": torch.tensor([0, 1, 1])}
    for kept in (["classifier"], ["classifier", "bert.pooler.dense"]):
        how = BitsAndBytesConfig(**bits, llm_int8_skip_modules=kept)
        model = BertForSequenceClassification.from_pretrained(tmp_path, quantization_config=how, dtype=torch.float32)
        ledger, said = Ledger.of_model(model), {"labels": ["no", "yes"], "tokenizer": tokenizer}
        if len(kept) == 1:
            with pytest.raises(UsageError, match=r"llm_int8_skip_modules=\['bert.pooler.dense'\]"):
                learn(model, ledger, "one", batch, **said)
        else:
            learn(model, ledger, "one", batch, **said)
            assert ledger.records[0].definition is not None


def test_what_is_refused(classifiers: Any, tmp_path: Path) -> None:
    place, _, tokenizer, _ = classifiers
    quantised, _ = base(LlamaForSequenceClassification, tmp_path, llm_int8_skip_modules=["lm_head"])
    batch = {**tokenizer(TEXTS, padding=True, return_tensors="pt"), "labels": torch.tensor([0, 1, 1])}
    for heads in (None, ["score"]):
        with pytest.raises(UsageError, match=r"'score' is quantised.* llm_int8_skip_modules=\['score'\]"):
            learn(quantised, Ledger.of_model(quantised), "one", batch, heads=heads)
    with pytest.raises(LedgerError, match="differences beside them"):
        Ledger.load(place / "skills.safetensors").graft("mood")
