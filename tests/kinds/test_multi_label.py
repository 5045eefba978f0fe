"""Tasks with any number of labels per row: reading, learning, exact retention, metrics, use."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from fastapi.testclient import TestClient
from task_files import refusal, write_rows
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForSequenceClassification, pipeline

from forgetfree import Ledger, Predictor, answering, cli, learning, load_results, registry
from forgetfree.continual.stream import Stream, make_stream
from forgetfree.data.columns import ReadOptions
from forgetfree.data.rows import Rows, TaskRows, few_rows_note, k_shot
from forgetfree.data.sources import load_task, load_tasks
from forgetfree.errors import DataError, RunError, UsageError
from forgetfree.kinds.kind import kind_of
from forgetfree.kinds.multi_label import LabelSetAnswers
from forgetfree.serve.server import application
from forgetfree.tasks import TaskDefinition
from forgetfree.testing import check_stream
from forgetfree.testing.tiny import FILLER, KEYWORDS, bert_config, pre_trained, tiny_model, tiny_task, wordpiece
from forgetfree.training.encoded_task import predict, quality_of
from forgetfree.training.floors import bag_of_words, linear_probes
from forgetfree.training.training_options import TrainingOptions

MOODS = {"joy": KEYWORDS["sst2"][1], "sad": KEYWORDS["sst2"][0]}
TOPICS = dict(zip(("world", "sports", "trade"), KEYWORDS["ag_news"], strict=False))
ROWS = [
    {"text": "a walk", "labels": "joy"},
    {"text": "a film", "labels": "joy|sad"},
    {"text": "a soup", "labels": " sad | joy "},
    {"text": "a train", "labels": ""},
    {"text": "a book", "labels": "sad"},
]


def examples(words: dict[str, list[str]], count: int, seed: int = 0) -> list[tuple[str, tuple[int, ...]]]:
    """Return texts with a keyword for each of their labels; successive texts have different label sets."""
    draw, rows = random.Random(seed), []
    for i in range(count):
        own = tuple(i >> place & 1 for place in range(len(words)))
        text = draw.choices(FILLER, k=draw.randint(2, 6)) + [
            draw.choice(each) for each, has in zip(words.values(), own, strict=True) if has
        ]
        rows.append((" ".join(draw.sample(text, len(text))), own))
    return rows


def task_of(name: str, words: dict[str, list[str]], train: int = 24) -> TaskRows:
    def part(count: int, seed: int) -> Rows:
        texts, labels = zip(*examples(words, count, seed), strict=True)
        return Rows(texts, (), labels)

    task = TaskDefinition(name, "multi-label", tuple(words), metric="micro_f1")
    return TaskRows(task, part(train, 0), part(10, 1), part(17, 2))


def stream_of() -> Stream:
    """Return a stream of two multi-label tasks (two and three labels) with a single-label task between them."""
    tasks = [task_of("moods", MOODS), tiny_task("ag_news"), task_of("topics", TOPICS)]
    return make_stream("sets", tasks, tiny_model())


def learned(name: str, **more: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Return a strategy and its answers after each task."""
    options = registry.strategy(name).Options
    given: dict[str, Any] = {"steps": 12, "batch_size": 4, "optimizer": "adamw", "learning_rate": 5e-3}
    if "mask_steps" in options.model_fields:
        given |= {"sparsity": 0.05, "mask_steps": 4, "mask_batch_size": 8}
    strategy = registry.strategy(name)(stream=stream_of(), options=options(**given | more))
    rows = []
    for experience in strategy.stream.benchmark.train_stream:
        strategy.train(experience)
        rows.append(strategy.evaluate())
    return strategy, rows


# -- Rows ------------------------------------------------------------------------------------------------


SETS = ((1, 0), (1, 1), (1, 1), (0, 0), (0, 1))


@pytest.mark.parametrize(
    ("ending", "labels", "kind"),
    [
        ("csv", ["joy", "joy|sad", " sad | joy ", "", "sad"], None),
        ("csv", ["['joy']", '["joy", "sad"]', "['sad', 'joy']", "[]", "['sad']"], None),
        ("csv", ["joy", "joy; sad", "sad;joy", "", "sad"], "multi-label"),
        ("jsonl", [["joy"], ["joy", "sad"], ["sad", "joy"], [], ["sad"]], None),
        ("json", [["joy"], ["joy", "sad"], ["sad", "joy"], None, ["sad"]], None),
        ("parquet", [["joy"], ["joy", "sad"], ["sad", "joy"], [], ["sad"]], None),
    ],
)
def test_labels_of_a_column_are_read(tmp_path: Path, ending: str, labels: Any, kind: str | None) -> None:
    rows = [{**row, "labels": cell} for row, cell in zip(ROWS, labels, strict=True)]
    for split in ("train", "validation", "test"):
        write_rows(tmp_path / "mood" / f"{split}.{ending}", rows)
    if kind:
        (tmp_path / "mood" / "source.json").write_text(json.dumps({"kind": kind}))
    read = load_task("mood", str(tmp_path))
    assert (read.task.kind, read.task.labels, read.task.metric) == ("multi-label", ("joy", "sad"), "micro_f1")
    assert read.train.labels == SETS and read.task.text_columns == ("text",)
    assert "any number of labels a row, in this order: joy, sad" in read.notes[0]


def test_each_label_may_have_a_column(tmp_path: Path) -> None:
    """This holds for pairs, too; an id column is no label, and label_names select among the labels."""
    frame = pandas.DataFrame(
        {
            "id": range(40),
            "text_a": [f"one {i}" for i in range(40)],
            "text_b": "other",
            "joy": [0, 1] * 20,
            "sad": [1.0, 0] * 20,
        }
    )
    (read,) = load_tasks(None, {"mood": frame.assign(loud=True)})
    assert (read.task.labels, read.task.text_columns) == (("joy", "sad", "loud"), ("text_a", "text_b"))
    assert {*read.train.labels} == {(0, 1, 1), (1, 0, 1)}
    for split in ("train", "validation", "test"):
        write_rows(tmp_path / "mood" / f"{split}.csv", frame.assign(loud=1).to_dict("records"))
    (tmp_path / "mood" / "source.json").write_text('{"kind": "multi-label", "label_names": ["sad", "joy"]}')
    assert {*load_task("mood", str(tmp_path)).train.labels} == {(0, 1), (1, 0)}


def test_numbers_have_the_names_of_the_data(tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "labels": Sequence(ClassLabel(names=["none", "joy", "sad"]))})
    rows = {"text": [f"text {i}" for i in range(30)], "labels": [[1], [2, 1], []] * 10}
    (read,) = load_tasks(None, {"mood": Dataset.from_dict(rows, features=features)})
    assert read.task.labels == ("joy", "sad") and {*read.train.labels} == {(1, 0), (1, 1), (0, 0)}
    for split in ("train", "validation", "test"):  # the numbers of labels, as in GoEmotions
        write_rows(tmp_path / "mood" / f"{split}.csv", [{"text": "a", "labels": "0,2"}, {"text": "b", "labels": "1"}])
    (tmp_path / "mood" / "source.json").write_text('{"kind": "multi-label", "label_names": ["joy", "fear", "sad"]}')
    assert load_task("mood", str(tmp_path)).train.labels == ((1, 0, 1), (0, 1, 0))


@pytest.mark.parametrize(
    ("cells", "labels", "sets"),
    [
        (["a|b", "b|c", "c|a"], "abc", [(1, 1, 0), (0, 1, 1), (1, 0, 1)]),
        (["['joy', 'sad']", "['joy']", "[]"], ["joy", "sad"], [(1, 1), (1, 0), (0, 0)]),
        (['["joy"]', "{'sad', 'joy'}", "('joy',)"], ["joy", "sad"], [(1, 0), (1, 1), (1, 0)]),
        (["[0 3]", "[27]"], ["0", "3", "27"], [(1, 1, 0), (0, 0, 1)]),
        (["['joy' 'sad']", '["it\'s"]'], ["it's", "joy", "sad"], [(0, 1, 1), (1, 0, 0)]),
    ],
)
def test_a_column_of_lists_alone_is_recognised_by_any_name(cells: Any, labels: Any, sets: Any) -> None:
    rows = [{"text": f"text {i}", "label": cells[i % len(cells)]} for i in range(60)]
    (read,) = load_tasks(None, {"mood": rows})
    assert read.task.labels == tuple(labels) and {*read.train.labels} == {*sets}


@pytest.mark.parametrize("labels", [["joy", "sad"], ["joy", "joy|sad"]])
def test_one_label_a_row_is_classification_as_before(labels: list[str]) -> None:
    """In a column other than ``labels``, vertical bars belong to the names of labels."""
    rows = [{"text": f"text {i}", "emotion": labels[i % 2]} for i in range(30)]
    (read,) = load_tasks(None, {"mood": rows})
    assert read.task.kind == "single" and len(read.task.labels) == 2


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"text": "a", "labels": "joy|sad"}, {"text": "", "labels": "sad|joy"}], "expected a text"),
        (
            [{"text": "a", "labels": ["joy"]}, {"text": "b", "labels": ["joy"]}],
            "has 1 different label, and a task needs two",
        ),
        ([{"text": "a", "labels": ["Joy"]}, {"text": "b", "labels": ["joy", "sad"]}], "which look alike"),
        ([{"text": "a", "labels": ["sad", 0.5]}, {"text": "b", "labels": ["joy", "sad"]}], "or a list of them"),
        ([{"text": "a", "labels": []}, {"text": "b", "labels": []}], "has 0 different labels"),
        ([{"text": "a", "joy": 1, "sad": 0}, {"text": "b", "joy": 0, "sad": 2}], "has no column 'label'"),
        (
            [{"text": t, "joy": 1, "sad": sad} for t, sad in zip("abc", (0, 1, None), strict=True)],
            "column 'sad': expected 0 or 1, got nothing",
        ),
    ],
)
def test_rows_that_cannot_be_read_are_told(rows: Any, said: str) -> None:
    assert said in refusal({"mood": {split: rows for split in ("train", "validation", "test")}})


def test_a_label_without_training_rows_is_told_unless_it_is_read_as_another() -> None:
    data = {"mood": {"train": ROWS, "validation": ROWS, "test": [{"text": "x", "labels": "joy|fear"}]}}
    assert "expected labels of joy, sad, got" in refusal(data)
    (read,) = load_tasks(None, data, options=ReadOptions.of(None, None, label_map="fear=sad"))
    assert read.test.labels == ((1, 1),) and read.mapped == ("fear",)


def test_shots_are_of_each_label_the_rarest_first() -> None:
    """Of four rows with joy, one also has the rare label fear, and is drawn for both."""
    task = TaskDefinition("mood", "multi-label", ("joy", "fear"), metric="micro_f1")
    labels = ((1, 0), (1, 1), (1, 0), (0, 0), (1, 0))
    kind = kind_of(task)
    assert kind.groups(labels) == [1, 2, 1, 0, 1]
    assert [*kind.members(labels).items()] == [(0, [3]), (2, [1]), (1, [0, 1, 2, 4])]
    rows = Rows(tuple("abcde"), (), labels)
    assert {(1, 1), (0, 0)} == {*k_shot(rows, task, 1, seed=0).labels}
    assert "1 training row with label 'fear', fewer than --shots 2" in few_rows_note(rows, task, 2)


# -- Learning --------------------------------------------------------------------------------------------


def test_the_loss_is_binary_cross_entropy() -> None:
    """The loss equals PyTorch's on the readout's logits, also where a batch holds rows of several tasks."""
    stream = stream_of()
    moods, news, topics = (task.train for task in stream.tasks)
    model = stream.model.eval()
    parts = [(topics, 3, 2), (news, 0, 1), (moods, 1, 0), (topics, 5, 2)]
    x, _, t = moods.collate([(*rows[i], task) for rows, i, task in parts])
    logits, at = model(x, t), 0
    assert t.tolist() == [2, 2, 2, 1, 0, 0, 2, 2, 2] and logits.shape == (9, 4)
    for rows, i, task in parts:
        own, labels, _ = rows.batch([i])
        z = model.readout_module(task)(model.features(own))
        if task == 1:
            expected = F.cross_entropy(z, labels, reduction="sum")
        else:
            expected = F.binary_cross_entropy_with_logits(z[0], labels.float(), reduction="sum")
        got = F.cross_entropy(logits[at : at + len(labels)], labels, reduction="sum")
        torch.testing.assert_close(got, expected)
        at += len(labels)
    z = torch.cat([model.readout_module(0)(model.features(moods.batch([i])[0])) for i in range(len(moods))])
    expected = F.binary_cross_entropy_with_logits(z, moods.labels.reshape(z.shape).float())
    assert -quality_of(model, stream.tasks[0], moods, TrainingOptions())[1] == pytest.approx(expected.item(), rel=1e-5)
    one, many = (predict(model, moods, batch_size=size) for size in (1, 5))
    torch.testing.assert_close(one, many)


@pytest.mark.sampled("fine-tune", "grafting-continual")
@pytest.mark.parametrize(
    "name", ["fine-tune", "grafting-continual", "graft-retrain", "bare-graft", "packnet", "wsn", "bitfit", "lora"]
)
def test_what_claims_to_forget_nothing_forgets_nothing(name: str, tmp_path: Path) -> None:
    strategy, rows = learned(name)
    assert strategy.forget_free
    for place, task in enumerate(strategy.stream.tasks):
        assert all(rows[place][task.name].same_as(later[task.name]) for later in rows[place:])
    strategy.save(tmp_path)
    again = registry.strategy(name)(stream=stream_of(), options=strategy.options)
    again.load(tmp_path)
    assert all(rows[-1][task].same_as(answers) for task, answers in again.evaluate().items())


@pytest.mark.sampled("replay", "joint")
@pytest.mark.parametrize(
    "name",
    [
        *("continual-ft", "o-lora", "lotto", "replay", "agem", "gdumb", "ewc", "online-ewc", "si", "mas", "rwalk"),
        *("cumulative", "joint", "merge-task-arithmetic", "merge-ties", "merge-stitch"),
    ],
)
def test_the_other_strategies_learn_such_streams(name: str) -> None:
    _, rows = learned(name, **({"optimizer": "sgd"} if name == "si" else {}))
    for answers in rows[-1].values():
        assert np.isfinite(answers.logits).all()
    assert rows[-1]["topics"].logits.shape == (17 * 3, 2)


@pytest.mark.parametrize("name", ["gem", "der", "lwf"])
def test_what_needs_one_label_a_row_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"^{name} .*task 'moods' has one for each of its labels"):
        registry.strategy(name)(stream=stream_of())


def test_it_is_learned_by_a_region() -> None:
    stream = make_stream("moods", [task_of("moods", MOODS, train=200)], tiny_model())
    given = {"steps": 150, "batch_size": 16, "optimizer": "adamw", "learning_rate": 1e-2, "dropout": False}
    options = registry.strategy("grafting-continual").Options(region_from="movement", sparsity=0.3, **given)
    strategy = registry.strategy("grafting-continual")(stream=stream, options=options)
    strategy.train(stream.benchmark.train_stream[0])
    answers = strategy.evaluate()["moods"]
    assert answers.score("micro_f1") > answers.constant_score("micro_f1") + 0.1
    assert {"ece", "micro_f1", "macro_f1", "exact_match"} == answers.more_scores().keys()


def test_it_is_learned_in_any_trainer(tmp_path: Path) -> None:
    """Training uses transformers' multi-label loss; the ledger then answers as the model does, with a sigmoid above 0.5."""
    tokenizer = wordpiece()
    config = bert_config(len(tokenizer), num_labels=2, problem_type="multi_label_classification")
    pre_trained(lambda: BertForSequenceClassification(config)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = BertForSequenceClassification.from_pretrained(tmp_path)
    texts, labels = zip(*examples(MOODS, 32), strict=True)
    batch = dict(tokenizer(list(texts), return_tensors="pt", padding=True)) | {"labels": torch.tensor(labels).float()}
    ledger, given = Ledger.of_model(model), {"kind": "multi-label", "labels": [*MOODS], "tokenizer": tokenizer}
    with learning(model, ledger, "moods", batches=[batch], sparsity=0.3, **given):
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
        for _ in range(20):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    with answering(model, ledger, "moods"), torch.no_grad():
        shares = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits.sigmoid()
    answers = Predictor.of_ledger(ledger, str(tmp_path)).answer("moods", texts)
    assert np.allclose(shares, [[*each.probabilities.values()] for each in answers], atol=1e-5)
    assert [len(each.labels) for each in answers] == (shares > 0.5).sum(1).tolist()


def test_streams_are_checked() -> None:
    check_stream(stream_of())
    with pytest.raises(UsageError, match="chooses one label a row"):
        make_stream("x", [task_of("moods", MOODS)], tiny_model(), scenario="domain")
    with pytest.raises(UsageError, match="the readout 'prompt' chooses one"):
        make_stream("x", [task_of("moods", MOODS)], tiny_model(readout="prompt"))


def test_floors_are_of_one_classifier_a_label() -> None:
    """A bag of words needs only one keyword per label; a label without training rows is never predicted."""
    rows = task_of("moods", MOODS, train=200)
    stream = make_stream("moods", [rows], tiny_model())
    (score,) = bag_of_words(stream.tasks, [rows.train], [rows.test])
    probes = linear_probes(stream.tasks, stream.model)
    assert score > stream.tasks[0].unanswered.constant_score("micro_f1") and 0 <= probes["linear_probe"][0] <= 1
    labels = tuple((has, 0) for has, _ in rows.train.labels)
    lone = replace(rows, train=replace(rows.train, labels=labels))
    assert bag_of_words(make_stream("lone", [lone], tiny_model()).tasks, [lone.train], [lone.test])[0] < score


# -- Metrics ---------------------------------------------------------------------------------------------


def answers_of(right: Any, answered: Any) -> LabelSetAnswers:
    right, answered = np.array(right), np.array(answered)
    return LabelSetAnswers(np.eye(2)[answered.reshape(-1)], right.reshape(-1), right.shape[1])


@pytest.mark.parametrize(
    ("answered", "micro", "macro", "exact"),
    [
        ([[1, 0, 0], [1, 1, 0], [0, 0, 0]], 1.0, 1.0, 1.0),
        (
            [[1, 0, 0], [1, 0, 0], [0, 0, 0]],
            4 / 5,
            1 / 2,
            2 / 3,
        ),  # 3 expected, 2 found, 2 right; label 1 is missed
        (
            [[1, 1, 1], [1, 1, 1], [1, 1, 1]],
            6 / 12,
            (4 / 5 + 2 / 4) / 2,
            0.0,
        ),  # no row has label 2, so it does not count
        ([[0, 0, 0], [0, 0, 0], [0, 0, 0]], 0.0, 0.0, 1 / 3),
    ],
)
def test_metrics_of_sets(answered: Any, micro: float, macro: float, exact: float) -> None:
    answers = answers_of([[1, 0, 0], [1, 1, 0], [0, 0, 0]], answered)
    scores = [answers.score(name) for name in ("micro_f1", "macro_f1", "exact_match")]
    assert scores == pytest.approx([micro, macro, exact])


def test_lists_of_yes_and_no_are_refused() -> None:
    rows = [{"text": "a", "labels": [0, 1, 1]}, {"text": "b", "labels": [1, 0, 0]}]
    with pytest.raises(DataError, match="lists of 0 and 1, expected lists of the labels of a row"):
        load_tasks(None, {"mood": rows})


def test_where_no_row_has_a_label_the_f1_is_0() -> None:
    answers = answers_of([[0, 0], [0, 0]], [[0, 0], [0, 1]])
    assert [answers.score(name) for name in ("micro_f1", "macro_f1", "exact_match")] == [0.0, 0.0, 0.5]


def test_a_number_is_a_place_only_where_labels_are_listed(tmp_path: Path) -> None:
    for split, labels in {"train": "10|20\n20|30\n10|30\n", "test": "1\n"}.items():
        rows = "".join(f"t{i},{cell}\n" for i, cell in enumerate(labels.splitlines()))
        (tmp_path / f"{split}.csv").write_text(f"text,labels\n{rows}")
    with pytest.raises(DataError, match=r"expected labels of 10, 20, 30, got \"1\""):
        load_tasks("mood", tmp_path)


def test_the_sign_between_labels_is_that_of_the_training_rows(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text('text,labels\na,"Oil, gas|Wind"\nb,Wind|Sun\nc,"Sun|Oil, gas"\n')
    (tmp_path / "test.csv").write_text('text,labels\nd,"Oil, gas"\ne,Sun\n')
    (read,) = load_tasks("energy", tmp_path)
    assert read.task.labels == ("Oil, gas", "Sun", "Wind") and read.test.labels == ((1, 0, 0), (0, 1, 0))


def test_the_floor_is_the_best_constant_set() -> None:
    """The floor equals the best score among all sets, tried in turn."""
    right = (np.random.default_rng(0).random((40, 4)) < [0.7, 0.4, 0.1, 0.0]).astype(int)
    sets = [answers_of(right, np.tile(each, (40, 1))) for each in product((0, 1), repeat=4)]
    for name in ("micro_f1", "macro_f1", "exact_match"):
        assert sets[0].constant_score(name) == pytest.approx(max(each.score(name) for each in sets))


def test_answers_are_kept() -> None:
    task = TaskDefinition("mood", "multi-label", ("joy", "sad"), metric="micro_f1")
    answers = answers_of([[1, 0], [0, 1], [1, 1]], [[1, 0], [1, 1], [0, 1]])
    again = kind_of(task).kept_answers(task, answers.tensors(), 3)
    assert again.same_as(answers) and again.score("exact_match") == pytest.approx(1 / 3)
    assert again.agreement(answers_of([[1, 0]] * 3, [[1, 0], [1, 1], [1, 0]])) == pytest.approx(4 / 6)
    with pytest.raises(ValueError, match="each of 8 test rows"):
        kind_of(task).kept_answers(task, answers.tensors(), 4)


# -- From files to an export -----------------------------------------------------------------------------


def test_from_a_file_to_an_export(model_directory: Any, tmp_path: Path, capsys: Any) -> None:
    """Loaded by transformers, the exported model gives the run's answers, with a sigmoid above 0.5."""
    for name, words in (("moods", MOODS), ("topics", TOPICS)):
        rows = examples(words, 120)
        labels = ["|".join(label for label, has in zip(words, own, strict=True) if has) for _, own in rows]
        write_rows(
            tmp_path / f"{name}.csv",
            [{"text": text, "labels": each} for (text, _), each in zip(rows, labels, strict=True)],
        )
    out, files = str(tmp_path / "out"), ["--data", str(tmp_path / "moods.csv"), "--data", str(tmp_path / "topics.csv")]
    small = ["--steps", "30", "--set", "sparsity=0.2", "--set", "learning_rate=5e-3", "--metric", "moods=exact_match"]
    model = ["--model", str(model_directory("bert-pooler"))]
    assert cli.main(["run", *files, *model, *small, "--strategy", "grafting-continual", "--out", out]) == 0
    said = capsys.readouterr().out
    assert "topics (micro F1)" in said and "a bag of words" in said and "a constant answer" in said
    results = load_results(out)
    by_label = results.label_scores("grafting-continual", "topics")
    score = results.values("grafting-continual", 0, "macro_f1")[-1][1]
    assert [*by_label.index] == ["sports", "trade", "world", "macro average"]
    assert by_label["f1"]["macro average"] == pytest.approx(score)
    with pytest.raises(RunError, match="Use label_scores"):
        results.confusion("grafting-continual", "topics")
    texts = [text for text, _ in examples(TOPICS, 20, seed=9)]
    assert cli.main(["predict", out, "--task", "topics", "--json", *texts]) == 0
    ours = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["labels"] for each in ours] == [
        [label for label, share in each["probabilities"].items() if share > 0.5] for each in ours
    ]
    assert len({tuple(each["labels"]) for each in ours}) > 1
    assert cli.main(["predict", out, "--task", "topics", "--csv", texts[7]]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.startswith("text,task,labels,probability of sports,probability of trade") and line.split(",")[
        2
    ] == "|".join(ours[7]["labels"])
    assert cli.main(["predict", out, "--task", "topics", texts[7]]) == 0
    assert capsys.readouterr().out == f"{'|'.join(ours[7]['labels']) or '-'}\t{texts[7]}\n"
    client = TestClient(application(Predictor.of_run(out)))
    served = client.post("/predict", json={"task": "topics", "texts": texts}).json()["answers"]
    assert [each["labels"] for each in served] == [each["labels"] for each in ours]
    with pytest.raises(UsageError, match="one for each of its labels"):
        Predictor.of_run(out).route(texts)
    assert cli.main(["export", out, "--task", "topics", "--out", str(tmp_path / "model")]) == 0
    network = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert network.config.problem_type == "multi_label_classification"
    with torch.no_grad():
        shares = network(**tokenizer(texts, return_tensors="pt", padding=True)).logits.sigmoid()
    names = network.config.id2label
    assert [[names[i] for i in row.nonzero().flatten().tolist()] for row in shares > 0.5] == [
        each["labels"] for each in ours
    ]
    assert np.allclose(shares, [[*each["probabilities"].values()] for each in ours], atol=1e-4)
    answer = pipeline("text-classification", model=str(tmp_path / "model"), top_k=None)(texts[7])
    assert {each["label"] for each in answer[0] if each["score"] > 0.5} == {*ours[7]["labels"]}
