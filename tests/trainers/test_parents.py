"""What a task stands on in a trainer of one's own: a task by its name, or the one on which its rows are read best."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from compared import state_of
from loops import assert_same, classifier, labelled, language_model, logits, refused, train
from torch import Tensor
from transformers import BertForSequenceClassification, BertForTokenClassification, GPT2ForSequenceClassification

from forgetfree import Ledger
from forgetfree.core.regions import Region
from forgetfree.errors import UsageError
from forgetfree.testing.tiny import bert_config, pre_trained
from forgetfree.trainers.learning import answering, learning
from forgetfree.training import parents


def of_tensor(ledger: Ledger, name: str) -> Region:
    """The entries of one tensor."""
    spec = next(each for each in ledger.space.tensors if each.name == name)
    return Region.of(range(spec.offset, spec.offset + spec.size))


def move(model: Any, ledger: Ledger, task: str, name: str, by: float | Tensor) -> None:
    """Record a task that moved all entries of one tensor."""
    with learning(model, ledger, task, region=of_tensor(ledger, name), heads=[]) as skill, torch.no_grad():
        skill.values.add_(by)


# -- A task by its name ------------------------------------------------------------------------------------


@pytest.mark.parametrize("effect", ["written", "beside"])
def test_a_task_on_another_answers_with_the_entries_of_both(effect: Any, tmp_path: Path) -> None:
    """And every task keeps its bits, from memory and from the file."""
    model, x, seen = classifier(), labelled(9)[0], dict[str, Tensor]()
    ledger, before = Ledger.of_model(model, effect=effect), state_of(model)
    ways = {"one": None, "two": "one", "three": None, "four": "two", "five": "one"}
    for seed, (task, parent) in enumerate(ways.items()):
        with learning(model, ledger, task, batches=labelled(1), sparsity=0.02, parent=parent):
            with torch.no_grad():
                body = model.eval().bert(input_ids=x["input_ids"]).pooler_output
            with answering(classifier(), ledger, parent) if parent else nullcontext(classifier()) as other:
                expected = other.bert(input_ids=x["input_ids"]).pooler_output
            assert torch.equal(body, expected)  # it begins where its parent ended
            train(model, labelled(seed + 2))
            with torch.no_grad():
                learned = model.eval()(input_ids=x["input_ids"]).logits.clone()
        assert_same(model, before)
        torch.testing.assert_close(logits(model, ledger, task, x), learned)
        ledger.save(tmp_path / "skills.safetensors")
        for held in (ledger, Ledger.load(tmp_path / "skills.safetensors")):
            for each in held.tasks:
                answer = logits(model, held, each, x)
                assert torch.equal(seen.setdefault(each, answer), answer)
    assert [record.parent for record in ledger.records] == ["", "one", "", "two", "one"]
    one, two, three, four, five = (record.owned.region for record in ledger.records)
    assert ledger.taken("four") == one | two | four and ledger.taken("five") == one | five
    assert len(one & three) and len(two & five) and not len((one | two) & four)


# -- The task on which rows are read best ------------------------------------------------------------------


def rows() -> Any:
    return classifier()


def several() -> Any:
    config = bert_config(60, problem_type="multi_label_classification")
    return pre_trained(lambda: BertForSequenceClassification(config))


def tokens() -> Any:
    return pre_trained(lambda: BertForTokenClassification(bert_config(60)))


def decoder() -> Any:
    model = pre_trained(lambda: GPT2ForSequenceClassification(tiny.gpt2_config(60)))
    model.config.pad_token_id = 0
    return model


@torch.no_grad()
def features(model: Any, ids: Tensor) -> Tensor:
    """What the head reads of each row ``(n, H)`` or token ``(n, L, H)``, as the model's class is documented."""
    if isinstance(model, BertForSequenceClassification):
        return model.bert(ids).pooler_output
    if isinstance(model, BertForTokenClassification):
        return model.bert(ids).last_hidden_state
    last = (ids != 0).sum(1) - 1
    return model.transformer(ids).last_hidden_state[torch.arange(len(ids)), last]


def labels_of(model: Any, read: Tensor, *, told_apart: bool) -> Tensor:
    """Labels that a plane tells apart in what is read, or that a coin has drawn; four of five tokens have none."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(*read.shape[:-1], 2, generator=generator)
    above = read @ torch.randn(read.shape[-1], 2, generator=generator) if told_apart else drawn
    above = above > above.flatten(0, -2).median(0).values
    if model.config.problem_type:
        return above.float()
    labels = above[..., 0].long()
    return labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.8, -100) if labels.dim() > 1 else labels


@pytest.mark.parametrize("told_apart", [True, False])
@pytest.mark.parametrize("make", [rows, several, tokens, decoder])
def test_a_head_stands_on_the_task_that_tells_its_labels_apart(
    make: Callable[[], Any], told_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """θ_pre reads nothing of a row, since its last norm multiplies by 0; one task lets all through, and another nothing."""
    model = make()
    norm = "ln_f" if make is decoder else "encoder.layer.1.output.LayerNorm"
    with torch.no_grad():
        model.base_model.get_parameter(f"{norm}.weight").zero_()
    ledger, before = Ledger.of_model(model), state_of(model)
    move(model, ledger, "all", f"{norm}.weight", 1.0)
    move(model, ledger, "nothing", f"{norm}.bias", 1.0)
    ids = torch.randint(5, 60, (128, 9), generator=torch.Generator().manual_seed(0))
    ids[::3, 6:] = 0  # padding, to a decoder
    with answering(model, ledger, "all"):
        read = features(model, ids)
    labels = labels_of(model, read, told_apart=told_apart)
    batches = [{"input_ids": ids[i : i + 32], "labels": labels[i : i + 32]} for i in range(0, 128, 32)]
    probed, probe = [], parents.cross_validation
    monkeypatch.setattr(parents, "cross_validation", lambda x, y: probed.append((x, y)) or probe(x, y))
    with learning(model, ledger, "new", batches=iter(batches), parent="auto", sparsity=0.02) as skill:
        train(model, batches)
    assert skill.parent == ledger.records[-1].parent == ("all" if told_apart else "")
    assert_same(model, before)
    probed = [(x, y) for x, y in probed if y.ndim == 1 + (make is several)]  # without those of each label
    assert len(probed) == 3
    is_labelled = labels != -100 if make is tokens else torch.ones(len(ids), dtype=torch.bool)
    torch.testing.assert_close(torch.from_numpy(probed[1][0]), read[is_labelled])
    assert torch.equal(torch.from_numpy(probed[1][1]), labels[is_labelled].long())
    with learning(model, ledger, "named", batches=batches, parent=ledger.records[-1].parent, sparsity=0.02) as named:
        train(model, batches)
    assert named.region == skill.region  # chosen by the same rows


@pytest.mark.parametrize("effect", ["written", "beside"])
@pytest.mark.parametrize(("word", "parent"), [(7, "seven"), (9, "nine"), (8, "")])
def test_a_language_model_stands_on_the_task_with_the_lowest_loss(effect: Any, word: int, parent: str) -> None:
    """Of two tasks, each of which writes one word and no other."""
    model = language_model()
    ledger, before = Ledger.of_model(model, effect=effect), state_of(model)
    for task, written in (("seven", 7), ("nine", 9)):
        embedding = model.transformer.wte.weight[written].detach()
        move(model, ledger, task, "h.1.mlp.c_proj.bias", 100 * (embedding - embedding.mean()))
    ids = torch.full((4, 9), word)
    batches = [{"input_ids": ids, "labels": ids}]
    with learning(model, ledger, "new", batches=batches, parent="auto", sparsity=0.02):
        train(model, batches * 2)
    assert ledger.records[-1].parent == parent
    assert_same(model, before)


def test_what_cannot_be_chosen_is_told_the_remedy() -> None:
    """And nothing has changed."""
    model, causal = classifier(), language_model()
    fractions = [{**batch, "labels": batch["labels"] / 3} for batch in labelled(1)]
    unlabelled = [{"input_ids": batch["input_ids"]} for batch in labelled(1)]
    of_pairs = [{**batch, "labels": batch["labels"][:2]} for batch in labelled(1)]
    for on, batches, words in (
        (model, None, ("none are given", "batches=…", "the parent's name")),
        (model, [], ("hold no row",)),
        (model, unlabelled, ("expected dictionaries with 'labels'", "Give the parent's name")),
        (model, fractions, ("these labels are fractions", "leave parent= out")),
        (model, of_pairs, ("none reads one vector a row", "Give the parent's name")),
        (causal, unlabelled, ("give no loss", "trainer.compute_loss(model, batch)")),
    ):
        ledger, before = Ledger.of_model(on), state_of(on)
        move(on, ledger, "one", ledger.space.tensors[-1].name, 1.0)
        how: dict[str, Any] = {"batches": batches, "parent": "auto"}
        if batches is of_pairs:
            how["loss"] = lambda m, b: m(b["input_ids"]).logits.square().mean()
        refused(learning(on, ledger, "new", **how).__enter__, UsageError, *words)
        assert_same(on, before)
        assert ledger.tasks == ["one"]
