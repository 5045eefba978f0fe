"""Streams with labelled words: training, retention bit by bit, refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tagged import PEOPLE, TOPICS, tagged_stream, tagged_task
from torch.nn import functional as F

from forgetfree import registry
from forgetfree.continual.stream import Stream, make_stream
from forgetfree.core.selection import PlainTensors, each_mean_gradient
from forgetfree.core.trained import CrossEntropy
from forgetfree.data.rows import Rows, TaskRows
from forgetfree.errors import UsageError
from forgetfree.models.loading import load_model
from forgetfree.results.answers import LabelAnswers
from forgetfree.testing.tiny import tiny_model, tiny_task
from forgetfree.training.encoded_task import predict
from forgetfree.training.step import fine_tune
from forgetfree.training.training_options import TrainingOptions


def options_of(name: str, **more: Any) -> Any:
    options = registry.strategy(name).Options
    given: dict[str, Any] = {"steps": 12, "batch_size": 4, "optimizer": "adamw", "learning_rate": 5e-3}
    if "mask_steps" in options.model_fields:
        given |= {"sparsity": 0.05, "mask_steps": 4, "mask_batch_size": 8}
    return options(**given | more)


def learned(name: str, stream: Stream, **more: Any) -> tuple[Any, list[dict[str, LabelAnswers]]]:
    """Return the strategy, and its answers after each task."""
    strategy = registry.strategy(name)(stream=stream, options=options_of(name, **more))
    rows = []
    for experience in stream.benchmark.train_stream:
        strategy.train(experience)
        rows.append(strategy.evaluate())
    return strategy, rows


def same(one: LabelAnswers, other: LabelAnswers) -> bool:
    return torch.equal(torch.from_numpy(one.logits), torch.from_numpy(other.logits))


@pytest.mark.parametrize("name", ["fine-tune", "grafting-continual", "lora"])
def test_what_claims_to_forget_nothing_forgets_nothing(name: str, tmp_path) -> None:
    """Tasks label words and texts in turn; a saved and loaded strategy answers with the same bits."""
    strategy, rows = learned(name, tagged_stream())
    assert strategy.forget_free
    for place, task in enumerate(strategy.stream.tasks):
        assert all(same(rows[place][task.name], later[task.name]) for later in rows[place:])
        assert rows[place][task.name].logits.shape == (len(task.test.labels), len(task.classes))
    strategy.save(tmp_path)
    again = registry.strategy(name)(stream=tagged_stream(), options=strategy.options)
    again.load(tmp_path)
    assert all(same(rows[-1][task], answers) for task, answers in again.evaluate().items())


@pytest.mark.parametrize("name", ["gem", "der", "lwf"])
def test_what_needs_one_label_a_row_is_refused_before_any_work(name: str) -> None:
    with pytest.raises(UsageError, match=f"^{name} .*task 'people' has one for each word.*grafting-continual"):
        registry.strategy(name)(stream=tagged_stream())


@pytest.mark.parametrize("name", ["agem", "gdumb", "joint", "mas"])
def test_the_other_baselines_learn_such_streams(name: str) -> None:
    strategy, rows = learned(name, tagged_stream())
    assert all(np.isfinite(answers.logits).all() for answers in rows[-1].values()) and strategy.bytes_kept() > 0


def domains(scenario: Any = "domain") -> Stream:
    """Return two domains with the same kinds of entities in other words, and one readout for both."""
    kinds = {"PER": TOPICS["TOPIC"], "LOC": TOPICS["SPORT"]}
    tasks = [tagged_task("people", PEOPLE), tagged_task("others", kinds, seed=1)]
    return make_stream("domains", tasks, tiny_model(), scenario=scenario)


@pytest.mark.parametrize("name", ["grafting-continual", "replay"])
def test_domains_with_the_same_entities_share_one_readout(name: str) -> None:
    strategy, rows = learned(name, domains())
    assert strategy.model.readout_module(0) is strategy.model.readout_module(1)
    for task in strategy.stream.tasks:
        assert rows[-1][task.name].logits.shape == (len(task.test.labels), 5)
        assert 0 <= rows[-1][task.name].score("f1") <= 1
    assert not same(rows[0]["people"], rows[-1]["people"])  # the last model answers for all tasks


def alone(strategy: Any, task: Any) -> list[torch.Tensor]:
    """Return the logits of ``task``'s test rows under each of the strategy's models, as if it had learned that one alone."""
    found, learned_before = [], strategy.learned
    for learner in strategy.stream.tasks:
        strategy.learned = [learner]
        found.append(torch.from_numpy(strategy.evaluate([task])[task.name].logits))
    strategy.learned = learned_before
    return found


@pytest.mark.parametrize("inference", ["router", "lda"])
def test_one_task_is_chosen_for_all_words_of_a_sentence(inference: str) -> None:
    """The choice is by mean entropy or by features, and the logits are those of the chosen model, sentence by sentence."""
    strategy, rows = learned("fine-tune", domains(), task_inference=inference)
    chosen = []
    for task in strategy.stream.tasks:
        own = alone(strategy, task)
        routed, begin = torch.from_numpy(rows[-1][task.name].logits), 0
        for row, count in enumerate(task.test.counts):
            words = slice(begin, begin := begin + count)
            shares = [torch.special.entr(each[words].softmax(1)).sum(1).mean() for each in own]
            number = int(shares[1] < shares[0])
            if inference == "lda":
                number = int(strategy.task_features.nearest([task.test.batch([row])[0]], ["people", "others"])[0])
            chosen.append(number)
            assert torch.allclose(routed[words], own[number][words], atol=1e-5)
    assert set(chosen) == {0, 1}


def test_the_task_must_be_known_where_labels_differ() -> None:
    with pytest.raises(
        UsageError, match=r"scenario=class.*'people' O means none.*Use scenario=task; or scenario=domain"
    ):
        domains("class")
    for other in (tiny_task("sst2"), tagged_task("topics", TOPICS), tagged_task("mixed", {"LOC": ["a"], "PER": ["b"]})):
        tasks = [tagged_task("people", PEOPLE), other]
        with pytest.raises(
            UsageError, match=r"the same kinds of entities in the same order|tasks that share their labels"
        ):
            make_stream("x", tasks, tiny_model(), scenario="domain")
    tasks = [tagged_task("people", PEOPLE), tiny_task("sst2")]
    with pytest.raises(UsageError, match=r"Task 'people' labels words.*Use --readout linear"):
        make_stream("x", tasks, tiny_model(readout="prompt"))


# -- Batches ---------------------------------------------------------------------------------------------


def test_logits_stand_at_the_first_token_of_each_word() -> None:
    """The reference reads one row at a time, without padding or marks."""
    stream = tagged_stream()
    model = stream.model.eval()
    people, topics = stream.tasks[0].train, stream.tasks[1].train
    x, y, t = people.collate([(*people[3], 0), (*topics[0], 1), (*people[0], 0)])
    assert len(y) == len(t) == people.counts[3] + 1 + people.counts[0] and model.counts(x).tolist()[1] == 1
    logits, at = model(x, t), 0
    for rows, i, task in ((people, 3, 0), (topics, 0, 1), (people, 0, 0)):
        ids = rows[i][0]
        hidden = model.backbone(torch.where(ids < 0, ~ids, ids)[None]).last_hidden_state[0]
        places = [p for p, token in enumerate(ids.tolist()) if token < 0] or [0]
        expected = model.readout_module(task)(hidden[places])
        got = logits[at : at + len(places)]
        torch.testing.assert_close(got[:, : expected.shape[1]], expected)
        at += len(places)


def test_answers_come_back_in_the_order_of_sentences_whatever_the_batches() -> None:
    stream = tagged_stream()
    rows = stream.tasks[0].test
    one, many = (predict(stream.model, rows, batch_size=size) for size in (1, 5))
    torch.testing.assert_close(one, many)
    alone = predict(stream.model, rows.subset([2]))
    begin = sum(rows.counts[:2])
    torch.testing.assert_close(one[begin : begin + rows.counts[2]], alone)


def test_words_that_are_cut_off_are_answered_by_o() -> None:
    task = tagged_task("people", PEOPLE).task
    long = Rows((" ".join(["film"] * 60 + ["lovely"]), "lovely film"), (), ((0,) * 60 + (1,), (1, 0)))
    stream = make_stream("long", [TaskRows(task, long, long, long)], replace(tiny_model(), max_length=20))
    assert stream.tasks[0].test.counts == [18, 2]
    strategy = registry.strategy("fine-tune")(stream=stream, options=options_of("fine-tune", steps=1))
    answers = strategy.evaluate()["people"]
    assert answers.logits.shape == (63, 5) and answers.labels.tolist() == [0] * 60 + [1, 1, 0]
    unread = answers.logits[18:61]
    assert (unread.argmax(1) == 0).all() and (unread[:, 0] == 0).all() and np.isfinite(answers.ece)
    assert (answers.logits[:18, 0] != 0).all() and (answers.logits[61:, 0] != 0).all()
    assert answers.lengths.tolist() == [61, 2]


def test_accumulated_parts_weigh_words_alike(model_directory) -> None:
    """The loss is the mean over the words of the whole batch, not over its sentences, with or without accumulation."""
    losses: dict[int, list[float]] = {1: [], 3: []}

    def note(accumulation: int, step: int, loss: float) -> None:
        losses[accumulation].append(loss)

    for accumulation in (1, 3):
        loaded = load_model(str(model_directory("bert")), "linear")  # its layers do not depend on the rest of the batch
        stream = make_stream("people", [tagged_task("people", PEOPLE)], loaded)
        options = TrainingOptions(batch_size=6, accumulation=accumulation, dropout=False, learning_rate=0.1)
        fine_tune(stream.model, stream.tasks[0].train, options, steps=4, seed=0, on_step=partial(note, accumulation))
    assert losses[1] == pytest.approx(losses[3], rel=1e-4)


def test_fisher_information_is_that_of_a_whole_sentence() -> None:
    stream = tagged_stream()
    model, rows = stream.model.eval(), stream.tasks[0].train.subset([0, 3])
    space, got = model.space(), torch.zeros(len(model.space()))
    loss = CrossEntropy(model, torch.device("cpu"), summed=True)
    batches, views = [rows.batch([row]) for row in range(2)], space.views(got)
    each_mean_gradient(
        PlainTensors(model.backbone, space),
        batches,
        loss,
        lambda number, squares: views[number].copy_(squares),
        squared=True,
    )
    expected = torch.zeros(len(model.space()))
    for i in range(2):
        x, y, t = rows.batch([i])
        model.zero_grad()
        sum(F.cross_entropy(line[None], label[None]) for line, label in zip(model(x, t), y, strict=True)).backward()
        gradients = [p.grad.reshape(-1) for p in model.space().parameters(model.backbone)]
        expected += torch.cat(gradients).square() / 2
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-8)
