"""A ledger from a custom trainer: its saved file gives the answers of `answering` in predictors, commands and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from forgetfree import Ledger, Predictor, TaskSwitch, cli
from forgetfree.core.regions import Region
from forgetfree.errors import ForgetfreeError, LedgerError, ModelError, UsageError
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.ledger import Record
from forgetfree.models.loading import load_model
from forgetfree.serve.apply import apply_graft, export_task
from forgetfree.tasks import TaskDefinition
from forgetfree.trainers.learning import answering, learning

pytestmark = pytest.mark.filterwarnings("default")  # libraries warn about each other
LABELS = {"colour": ["red", "blue"], "size": ["big", "small", "tiny"]}
#: In the order in which a predictor sorts them, shortest first: rows in the same places get the same bits.
TEXTS = ["it looks big", "the thing is red", "tiny and small and blue"]


def base(kind: str, tmp_path: Path) -> tuple[str, Any]:
    """Write a pre-trained body, and return its directory and its tokenizer."""
    place = str(tiny.write_model(kind, tmp_path / kind))
    return place, AutoTokenizer.from_pretrained(place)


def learn(model: Any, ledger: Ledger, task: str, batch: dict[str, Tensor], **arguments: Any) -> None:
    with learning(model, ledger, task, **{"batches": [batch], "sparsity": 0.02} | arguments):
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=3e-2)
        for _ in range(5):
            model.train()(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def logits(model: Any, tokenizer: Any) -> Tensor:
    return model.eval()(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits.clone()


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, dict[str, Tensor]]:
    """Two tasks from transformers' Trainer with heads of two sizes and a pooler that the base lacks, and their logits."""
    out = tmp_path_factory.mktemp("classifiers")
    place, tokenizer = base("bert", out)
    seen, ledger = {}, None
    for task, labels in LABELS.items():
        model = AutoModelForSequenceClassification.from_pretrained(place, num_labels=len(labels))
        ledger = ledger or Ledger.of_model(model)
        rows = [{**tokenizer(f"it is {label}"), "labels": i} for i, label in enumerate(labels)] * 4
        trainer = Trainer(
            model,
            TrainingArguments(str(out), max_steps=4, learning_rate=3e-2, report_to=[], use_cpu=True, disable_tqdm=True),
            train_dataset=Dataset.from_list(rows),
            data_collator=DataCollatorWithPadding(tokenizer),
        )
        loader = trainer.get_train_dataloader()
        with learning(model, ledger, task, batches=loader, sparsity=0.02, labels=labels, tokenizer=tokenizer):
            trainer.train()
        with answering(model, ledger, task):
            seen[task] = logits(model, tokenizer)
    assert ledger is not None
    ledger.save(out / "skills.safetensors")
    return place, out / "skills.safetensors", seen


def test_classifiers_answer_from_the_file(classifiers: tuple[str, Path, dict[str, Tensor]], tmp_path: Path) -> None:
    place, file, seen = classifiers
    ledger, tokenizer = Ledger.load(file), AutoTokenizer.from_pretrained(place)
    predictor, body = Predictor.of_ledger(ledger, place), AutoModel.from_pretrained(place)
    switch = TaskSwitch(ledger, body)
    for task, expected in seen.items():
        assert torch.equal(predictor.logits(task, TEXTS), expected)
        with switch.task(task):
            assert torch.equal(body.eval()(**tokenizer(TEXTS, padding=True, return_tensors="pt"))["logits"], expected)
        export_task(predictor, task, tmp_path / f"exported {task}")
        apply_graft(ledger.graft(task), place, tmp_path / f"applied {task}")
        for way in ("exported", "applied"):
            written = AutoModelForSequenceClassification.from_pretrained(tmp_path / f"{way} {task}")
            assert torch.allclose(logits(written, tokenizer), expected, atol=1e-6)
            assert [*written.config.id2label.values()] == LABELS[task]
    mixed = predictor.answer_mixed(["size", "colour", "size"], TEXTS)
    assert [answer.task for answer in mixed] == ["size", "colour", "size"]
    for text, answer in zip(TEXTS, mixed, strict=True):
        assert predictor.answer(answer.task, [text])[0].probability == pytest.approx(answer.probability, abs=1e-4)


def test_the_commands_answer_from_the_file(
    classifiers: tuple[str, Path, dict[str, Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, file, seen = classifiers
    assert cli.main(["ledger", "verify", str(file), "--model", place]) == 0
    assert "configuration, tokenizer, readout and maximum length" in capsys.readouterr().out
    assert cli.main(["predict", str(file), "--model", place, "--task", "size", "--json", *TEXTS]) == 0
    said = [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()]
    assert said == [LABELS["size"][i] for i in seen["size"].argmax(1).tolist()]
    other, tokenizer = base("bert-pooler", tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(other)
    ledger = Ledger.of_model(model)
    batch = {**tokenizer(TEXTS, padding=True, return_tensors="pt"), "labels": torch.tensor([0, 1, 1])}
    learn(model, ledger, "unsaid", batch)
    ledger.save(tmp_path / "unsaid.safetensors")
    assert cli.main(["predict", str(tmp_path / "unsaid.safetensors"), "--model", other, "x"]) == 1
    assert (
        "The ledger has no definition of task 'unsaid': it was learned without labels= and tokenizer="
        in capsys.readouterr().err
    )
    learn(model, ledger, "said", batch, labels=["no", "yes"], tokenizer=tokenizer, kind="pair")
    predictor = Predictor.of_ledger(ledger, other)
    assert predictor.answer("said", [("one text", "another")])[0].label in ("no", "yes")
    with pytest.raises(LedgerError, match="no definition of task 'unsaid'"):
        predictor.answer("unsaid", ["x"])


def written_by(model: Any, tokenizer: Any, text: str, count: int) -> list[int]:
    inputs = tokenizer(text, return_tensors="pt")
    ids: Tensor = model.eval().generate(**inputs, max_new_tokens=count, do_sample=False)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


def texts_of(tokenizer: Any) -> dict[str, Tensor]:
    ids = tokenizer("say: it is red and blue", return_tensors="pt")["input_ids"]
    return {"input_ids": ids, "labels": ids}


def test_texts_are_written_from_the_file(tmp_path: Path) -> None:
    place, tokenizer = base("gpt2-lm", tmp_path)
    tokenizer.pad_token = tokenizer.eos_token  # scripts set it, and the directory lacks it
    model = AutoModelForCausalLM.from_pretrained(place)
    ledger, seen = Ledger.of_model(model), {}
    say = {"kind": "generation", "tokenizer": tokenizer, "template": "{prompt}"}
    for task, count in (("short", 2), ("long", 5)):
        learn(model, ledger, task, texts_of(tokenizer), max_new_tokens=count, **say)
    for task, count in (("short", 2), ("long", 5)):
        with answering(model, ledger, task):
            seen[task] = written_by(model, tokenizer, "say:", count)
    ledger.save(tmp_path / "skills.safetensors")
    ledger = Ledger.load(tmp_path / "skills.safetensors")
    predictor = Predictor.of_ledger(ledger, place)
    for task, ids in seen.items():
        (answer,) = predictor.answer(task, ["say:"])
        assert (answer.text, answer.tokens) == (tokenizer.decode(ids).strip(), len(ids))
        apply_graft(ledger.graft(task), place, tmp_path / task)
        assert written_by(AutoModelForCausalLM.from_pretrained(tmp_path / task), tokenizer, "say:", len(ids)) == ids


def test_another_head_of_a_language_model_is_refused(tmp_path: Path) -> None:
    """The head's weights are not part of the body, whose fingerprint the ledger has."""
    model_directory, tokenizer = base("gpt2-lm", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(model_directory, tie_word_embeddings=False)
    tokenizer.pad_token = tokenizer.eos_token
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 0.5)
    ledger = Ledger.of_model(model)
    learn(model, ledger, "say", texts_of(tokenizer), kind="generation", tokenizer=tokenizer, template="{prompt}")
    for place, factor in (("same", 1.0), ("other", 2.0)):
        with torch.no_grad():
            model.lm_head.weight.mul_(factor)
        model.save_pretrained(tmp_path / place)
        tokenizer.save_pretrained(tmp_path / place)
    assert Predictor.of_ledger(ledger, str(tmp_path / "same")).answer("say", ["say:"])
    for use in (
        lambda: Predictor.of_ledger(ledger, str(tmp_path / "other")),
        lambda: answering(model, ledger, "say").__enter__(),
    ):
        with pytest.raises(LedgerError, match="language model with another head"):
            use()


def test_words_are_labelled_from_the_file(tmp_path: Path) -> None:
    place, tokenizer = base("bert", tmp_path)
    model = AutoModelForTokenClassification.from_pretrained(place, num_labels=3)
    ledger, tags = Ledger.of_model(model), ["O", "B-PER", "I-PER"]
    inputs = tokenizer([["Jane", "is", "here"]], is_split_into_words=True, return_tensors="pt")
    batch = {**inputs, "labels": inputs["input_ids"] % 3}
    learn(model, ledger, "people", batch, labels=tags, kind="tagging", tokenizer=tokenizer)
    with answering(model, ledger, "people"), torch.no_grad():
        expected = model(**inputs).logits[0]
    ledger.save(tmp_path / "skills.safetensors")
    ledger = Ledger.load(tmp_path / "skills.safetensors")
    with answering(model, ledger, "people"), torch.no_grad():
        assert torch.equal(model(**inputs).logits[0], expected)
    predictor = Predictor.of_ledger(ledger, place)
    words = [inputs.word_ids(0).index(word) for word in range(3)]
    got = predictor.logits("people", ["Jane is here"])
    # The predictor's head gets three words, and the model's five tokens: processors round other shapes differently.
    assert torch.allclose(got, expected[words], rtol=1e-5, atol=1e-5)
    assert not torch.equal(got, predictor.logits("people", ["here is Jane"]))


# -- Runs and scripts --------------------------------------------------------------------------------------


def ledger_of_a_run(place: str, readout: str, definition: TaskDefinition, head: dict[str, Tensor]) -> Ledger:
    """Return the ledger of a run with one task that moved a few entries."""
    loaded = load_model(place, readout)
    space, region = loaded.model.space(), Region.of(range(0, 900, 9))
    ledger = Ledger(space, loaded.fingerprint, binding=loaded.binding())
    moved = Graft(region, space.gather(loaded.model.backbone, region.indices) + 0.5)
    ledger.append(Record(definition.name, region, moved, 0.1, head, definition=definition))
    return ledger


def test_a_script_goes_on_with_a_run(tmp_path: Path) -> None:
    place, tokenizer = base("gpt2-lm", tmp_path)
    first = TaskDefinition("first", "generation", (), "{prompt}", metric="rouge_l", max_new_tokens=4)
    ledger, model = ledger_of_a_run(place, "generate", first, {}), AutoModelForCausalLM.from_pretrained(place)
    (before,) = Predictor.of_ledger(ledger, place).answer("first", ["say:"])
    settings = {"template": "{prompt}", "max_new_tokens": 4}
    learn(model, ledger, "second", texts_of(tokenizer), kind="generation", tokenizer=tokenizer, **settings)
    assert not ledger.graft("second").region.indices.equal(ledger.graft("first").region.indices)
    predictor = Predictor.of_ledger(ledger, place)
    assert predictor.answer("first", ["say:"])[0] == before
    for task in ("first", "second"):
        with answering(model, ledger, task):
            ids = written_by(model, tokenizer, "say:", 4)
        assert predictor.answer(task, ["say:"])[0].text == tokenizer.decode(ids).strip()


def test_a_linear_readout_of_a_run_has_no_place_in_a_classifier(tmp_path: Path) -> None:
    place, tokenizer = base("bert", tmp_path)
    head = {"weight": torch.ones(2, 16), "bias": torch.zeros(2)}
    ledger = ledger_of_a_run(place, "linear", TaskDefinition("first", "single", ("no", "yes")), head)
    model = AutoModelForSequenceClassification.from_pretrained(place)
    with pytest.raises(LedgerError, match=r"Predict with forgetfree\.TaskSwitch"), answering(model, ledger, "first"):
        pass
    with TaskSwitch(ledger, model).task("first"):
        assert logits(model, tokenizer).shape == (3, 2)
    with pytest.raises(LedgerError, match="by the readout linear, and not classifier"):
        learning(model, ledger, "second", labels=["a", "b"], tokenizer=tokenizer).__enter__()


# -- Bad input ---------------------------------------------------------------------------------------------


def test_what_does_not_say_what_a_task_is(tmp_path: Path) -> None:
    place, tokenizer = base("bert", tmp_path)
    causal, larger = base("gpt2-lm", tmp_path)
    writer = AutoModelForCausalLM.from_pretrained(causal, tie_word_embeddings=False)
    model = AutoModelForSequenceClassification.from_pretrained(place)
    before, two = {name: tensor.clone() for name, tensor in model.state_dict().items()}, ["no", "yes"]
    ledgers = {id(each): Ledger.of_model(each) for each in (model, writer)}

    def told(error: type[ForgetfreeError], *words: str, on: Any = model, **arguments: Any) -> None:
        with pytest.raises(error) as raised:
            learning(on, ledgers[id(on)], "new", **{"tokenizer": tokenizer} | arguments).__enter__()
        text = str(raised.value)
        assert "\n" not in text and all(word in text for word in words), text

    told(UsageError, "names 3 labels, and the head has 2 outputs", "num_labels=3", labels=["a", "b", "c"])
    told(UsageError, "got tokenizer=NoneType", "tokenizer=…", labels=two, tokenizer=None)
    told(UsageError, "Unknown kind of task 'taging'. Did you mean 'tagging'?", kind="taging", labels=two)
    told(
        UsageError, "no argument 'template' for a task of kind 'single'", "metric, max_length", template="x", labels=two
    )
    told(UsageError, "outputs of a …ForTokenClassification", kind="tagging", labels=["O", "B-X", "I-X"])
    told(UsageError, "the model is GPT2LMHeadModel", on=writer, labels=two)
    told(UsageError, "heads=['lm_head']", on=writer, kind="generation", heads=["lm_head"], tokenizer=larger)
    told(ModelError, "has ids up to", "embeddings for", labels=two, tokenizer=larger)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [ledger.tasks for ledger in ledgers.values()] == [[], []]


def test_a_head_of_another_size_does_not_answer(classifiers: tuple[str, Path, Any]) -> None:
    place, file, _ = classifiers
    ledger, model = Ledger.load(file), AutoModelForSequenceClassification.from_pretrained(place, num_labels=2)
    with pytest.raises(LedgerError, match="num_labels=3"), answering(model, ledger, "size"):
        pass
