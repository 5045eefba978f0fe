"""Generation tasks: how rows are read, learned, answered, and stored."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pandas
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer

import forgetfree
from forgetfree import Ledger, Predictor, cli
from forgetfree.data.columns import ReadOptions
from forgetfree.data.sources import load_tasks
from forgetfree.errors import DataError, MetricError, ModelError, UsageError
from forgetfree.kinds import generation
from forgetfree.models.loading import load_model
from forgetfree.results.answers import TextAnswers
from forgetfree.results.runs import read_answers

WORDS = ("great", "terrible", "film", "movie")


def rows_of(prompt: str, target: Callable[[list[str]], Any], count: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    words = [[draw.choice(WORDS) for _ in range(draw.randint(3, 6))] for _ in range(count)]
    return [{prompt: " ".join(each), "target": target(each)} for each in words]


def splits_of(target: Callable[[list[str]], Any], **counts: int) -> dict[str, list[dict[str, Any]]]:
    return {split: rows_of("prompt", target, count, count) for split, count in counts.items()}


def write(directory: Path, task: str, rows: dict[str, list[dict[str, Any]]], **source: Any) -> Path:
    folder = directory / task
    folder.mkdir(parents=True, exist_ok=True)
    for split, each in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    (folder / "source.json").write_text(json.dumps(source))
    return directory


def in_all_splits(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {split: rows for split in ("train", "validation", "test")}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks: the right answer is the first word of a text, or its last two words."""
    directory = tmp_path_factory.mktemp("texts")
    for task, target in (("first", lambda words: words[0]), ("last", lambda words: [" ".join(words[-2:]), "x"])):
        write(directory, task, splits_of(target, train=24, validation=9, test=13), max_new_tokens=5)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write("Llama", tmp_path_factory.mktemp("llama"))


def run(data: Path, model: Path, out: Path, *strategies: str, stream: str = "first,last", **options: Any) -> Any:
    how = {"optimizer": "adamw", "learning_rate": 1e-2, "sparsity": 0.2, "steps": 6}
    return forgetfree.run(
        stream, strategies=strategies, data=str(data), model=str(model), out=str(out), **(how | options)
    )


# -- Rows -------------------------------------------------------------------------------------------------

SQUAD = {
    "context": "It is red.",
    "question": "What?",
    "answers": {"text": ["red", "a red", "red"], "answer_start": [6, 1, 6]},
}
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "great"}]


@pytest.mark.parametrize(
    ("row", "prompt", "right"),
    [
        ({"prompt": "a", "target": "b"}, "a", ("b",)),
        ({"prompt": "a", "target": ["b", "c", "b"]}, "a", ("b", "c")),
        ({"document": "a", "summary": "b", "id": 3}, "a", ("b",)),
        ({"context": "It is red.", "question": "What?", "answer": "red"}, "It is red.\n\nWhat?", ("red",)),
        ({"instruction": "When?", "context": "In 1999.", "response": 1999.0}, "When?\n\nIn 1999.", ("1999",)),
        (SQUAD, "It is red.\n\nWhat?", ("red", "a red")),
    ],
)
def test_columns_are_recognised(row: dict[str, Any], prompt: str, right: tuple[str, ...], tmp_path: Path) -> None:
    write(tmp_path, "own", {"train": [row] * 3, "test": [row], "validation": [row]})
    (task,) = load_tasks("own", str(tmp_path))
    assert (task.task.kind, task.task.labels, task.task.metric) == ("generation", (), "rouge_l")
    assert (task.train.first[0], task.train.labels[0]) == (prompt, right)


def test_the_last_turn_of_the_assistant_is_learned(tmp_path: Path) -> None:
    shared = {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "great"}]}
    for name, row in (("own", {"messages": CHAT}), ("text", {"messages": json.dumps(CHAT)}), ("shared", shared)):
        write(tmp_path, name, in_all_splits([row]))
        (task,) = load_tasks(name, str(tmp_path))
        assert task.task.kind == "messages"
        assert (json.loads(task.train.first[0]), task.train.labels[0]) == (CHAT[:1], ("great",))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "target": ""},
            "column 'target': expected a text, or a list of texts, none of them empty, got ''",
        ),
        ({"prompt": None, "target": "b"}, "column 'prompt': expected a text, got None"),
        ({"messages": CHAT[:1]}, "expected a turn of the assistant after another turn"),
        ({"messages": [{"role": "user"}]}, "expected a list of turns, each with a content and a role"),
        ({"messages": [{"role": "<s>", "content": "a"}, *CHAT]}, "a role, one of system, developer, user"),
        ({"prompt": "a"}, "has no column 'target'"),
    ],
)
def test_rows_that_cannot_be_learned_are_told(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, "own", in_all_splits([row]), kind="generation")
    with pytest.raises(DataError) as error:
        load_tasks("own", str(tmp_path))
    assert message in str(error.value)


def test_without_what_scores_texts_nothing_is_learned(
    data: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generation, "find_spec", lambda name: None if name == "rouge_score" else True)
    out = data.parent / "out"
    assert cli.main(["run", "first", "--data", str(data), "--model", str(model), "--out", str(out)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "rouge_score is not installed: pip install 'forgetfree[texts]'." in said and not out.exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"template": "no slot"}, "template must hold {prompt} once"),
        ({"template": "{prompt}:", "instruction": "Say it."}, "template must hold {instruction}, since there is one"),
        ({"metric": "accuracy"}, "metric must be one of rouge_l, exact_match"),
        ({"max_new_tokens": 0}, "max_new_tokens must be from 1"),
        ({"max_new_tokens": "many"}, "max_new_tokens must be a whole number"),
        ({"stop": [""]}, "stop must hold no empty text"),
        ({"stop": 3}, "stop must be a text"),
    ],
)
def test_what_source_json_says_is_checked(source: dict[str, Any], message: str, tmp_path: Path) -> None:
    row = {"prompt": "a", "target": "b"}
    write(tmp_path, "own", in_all_splits([row]), **source)
    with pytest.raises(DataError) as error:
        load_tasks("own", str(tmp_path))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("source", "named", "metric"),
    [
        ({}, None, "rouge_l"),
        ({"closed_answers": ["b", "c"]}, None, "exact_match"),
        ({"metric": "bleu"}, None, "bleu"),
        ({"metric": "bleu"}, "token_f1", "token_f1"),
        ({}, ["own=token_f1", "other=bleu"], "token_f1"),
        ({}, "other=bleu", "rouge_l"),
    ],
)
def test_free_texts_are_scored_by_what_sees_progress_or_what_is_named(
    source: dict[str, Any], named: Any, metric: str, tmp_path: Path
) -> None:
    for name in ("own", "other"):
        write(tmp_path, name, in_all_splits([{"prompt": "a", "target": "b"}]), **source)
    (own, _) = load_tasks("own,other", str(tmp_path), options=ReadOptions.of(None, None, metrics=named))
    assert own.task.metric == metric


@pytest.mark.parametrize(
    ("columns", "source", "kind"),
    [
        ({"question": "a", "answer": "b", "label": "x"}, {}, "pair"),
        ({"question": "a", "answer": "b", "class": "x"}, {}, "pair"),
        ({"text": "a", "summary": "b", "category": "x"}, {}, "single"),
        ({"text": "a", "summary": "b", "mark": "x"}, {"text_column": "text", "label_column": "mark"}, "single"),
        ({"prompt": "a", "messages": CHAT, "category": "x"}, {}, "messages"),  # the topic of the chat
        ({"prompt": "a", "messages": CHAT, "target": "b"}, {"kind": "generation"}, "generation"),
    ],
)
def test_texts_with_labels_beside_them_stay_classification(
    columns: dict[str, Any], source: dict[str, str], kind: str, tmp_path: Path
) -> None:
    """This holds even if other columns could be a prompt and its answer."""
    label = list(columns)[2]
    rows = [{**columns, label: "xy"[i % 2]} for i in range(8)]
    write(tmp_path, "own", in_all_splits(rows), **source)
    assert load_tasks("own", str(tmp_path))[0].task.kind == kind


def test_splits_are_of_one_form(tmp_path: Path) -> None:
    plain = [{"prompt": "a", "target": "b"}]
    write(tmp_path, "own", {"train": [{"messages": CHAT}], "validation": plain, "test": plain})
    with pytest.raises(DataError, match="has chats in one split, and prompts with their answers in another"):
        load_tasks("own", str(tmp_path))


# -- Answers ----------------------------------------------------------------------------------------------


def answers(texts: list[str], right: list[list[str]]) -> TextAnswers:
    ids = np.arange(len(texts))
    ones = np.ones(len(texts), np.int64)
    return TextAnswers(ids, ones, np.full(len(texts), np.log(2), np.float32), ones, texts, right)


def test_answers_are_scored_compared_and_kept() -> None:
    found = answers(["red", "blue", "green"], [["red"], ["red", "Blue."], ["red"]])
    assert found.score("exact_match") == pytest.approx(2 / 3)
    assert found.best_constant("exact_match") == "red"  # right for every row
    assert answers(["red"] * 3, [["red"], ["red", "Blue."], ["green"]]).constant_score("exact_match") == pytest.approx(
        2 / 3
    )
    assert found.more_scores() == pytest.approx({"loss": np.log(2), "perplexity": 2.0})
    again = TextAnswers.of_tensors(found.tensors())
    assert found.same_as(again)
    assert (again.texts, again.right) == (found.texts, found.right)
    other = answers(["red", "black", "green"], [["red"]] * 3)
    assert found.agreement(other) == pytest.approx(2 / 3)
    changed = TextAnswers.of_tensors(found.tensors() | {"losses": np.nextafter(found.losses, 9)})
    assert not found.same_as(changed)
    with pytest.raises(ValueError, match="those of the same rows"):
        TextAnswers.of_tensors(found.tensors() | {"lengths": found.lengths[1:]})


def test_rows_that_somebody_put_together_have_no_texts() -> None:
    with pytest.raises(
        MetricError, match=r"no texts were generated for these rows, which a plugin or a caller put together\."
    ):
        answers([], []).score("exact_match")


# -- Streams ----------------------------------------------------------------------------------------------


def test_a_stream_is_learned_and_nothing_is_forgotten(data: Path, model: Path, tmp_path: Path) -> None:
    """Grafts have the same losses after a later task; continual fine-tuning does not."""
    run(data, model, tmp_path / "out", "continual-ft", "grafting-continual", "fine-tune")
    losses = {}
    for name in ("continual-ft", "grafting-continual"):
        scores = pandas.read_csv(tmp_path / "out" / name / "seed-0" / "scores.csv")
        losses[name] = list(scores[(scores["task"] == "first") & (scores["metric"] == "loss")]["value"])
    assert losses["grafting-continual"][1] == losses["grafting-continual"][2] < losses["grafting-continual"][0]
    assert losses["continual-ft"][1] != losses["continual-ft"][2]
    report = (tmp_path / "out" / "report.md").read_text()
    assert "first (ROUGE-L)" in report
    assert "Other metrics after the last task (in %; loss in nats per token" in report
    assert "left out" not in report  # the stored answers can be read again
    shown = report.partition("## Texts generated for first after the last task, with the first seed")[2].partition(
        "##"
    )[0]
    (asked, *_), (right, *_) = right_texts(data / "first", "test")
    assert (found_row(shown, "prompt")[0], found_row(shown, "target")[0]) == (asked, right)
    assert all(f"| {name} |" in shown for name in ("continual-ft", "grafting-continual", "fine-tune"))
    loss = forgetfree.load_results(tmp_path / "out").matrix("continual-ft", metric="loss").mean(axis=1)
    for name, row in (("continual-ft", -1), ("the model before training", 0)):
        assert found_row(report, name)[3] == f"{loss.iloc[row]:.3f}"
    floors = json.loads((tmp_path / "out" / "results.json").read_text())["floors"]
    assert floors["nearest_row"]["0"][0] == nearest_share(data / "first")
    before = forgetfree.load_results(tmp_path / "out").matrix("fine-tune").iloc[0]
    assert found_row(report, "the model before training")[:2] == [f"{100 * score:.1f}" for score in before]
    assert not {"None", "ECE"} & {*re.findall(r"\w+", report)}
    for name, values in losses.items():
        assert list(forgetfree.load_results(tmp_path / "out").matrix(name, metric="loss")["first"]) == values


def right_texts(task: Path, split: str) -> tuple[list[str], list[str]]:
    rows = [json.loads(line) for line in (task / f"{split}.jsonl").read_text().splitlines()]
    return [row["prompt"] for row in rows], [row["target"] for row in rows]


def nearest_share(task: Path) -> float:
    """Return the share of test rows whose answer is that of the training row with the most similar words."""
    (prompts, train), (asked, test) = (right_texts(task, split) for split in ("train", "test"))
    words = TfidfVectorizer().fit(prompts)
    nearest = (words.transform(asked) @ words.transform(prompts).T).toarray().argmax(axis=1)
    return sum(train[row] == target for row, target in zip(nearest, test, strict=True)) / len(test)


def found_row(report: str, name: str) -> list[str]:
    return [cell.strip() for cell in re.search(rf"\| {name} \|(.*)\|", report)[1].split("|")]  # type: ignore[index]


def test_rows_of_texts_are_read_further_than_others(data: Path, tmp_path: Path) -> None:
    """This also holds after such a task is removed from a run: the remaining tasks were learned from such rows."""
    labels = [{"text": f"{word} {i}", "label": WORDS[i % 2]} for i, word in enumerate(WORDS * 2)]
    both = write(tmp_path / "data", "labels", in_all_splits(labels))
    (both / "last").symlink_to(data / "last")
    bloom = families.write("Bloom", tmp_path / "bloom")  # takes rows of any length
    run(both, bloom, tmp_path / "both", "grafting-continual", stream="labels,last", steps=2)
    forgetfree.run(on=tmp_path / "both", without="last", out=tmp_path / "one", progress=False)
    binding = Ledger.load(tmp_path / "one" / "grafting-continual" / "seed-0" / "ledger.safetensors").binding
    assert binding is not None and binding.max_length == 1024
    assert load_model(str(bloom), "generate", tasks=[load_tasks("labels", str(both))[0].task]).max_length == 128


def test_rows_whose_answer_does_not_fit_are_left_out_and_counted(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other rows give the same results as without the removed rows."""
    good = splits_of(lambda words: words[0], train=9, test=5)
    long = {"prompt": "a", "target": "film " * 60}
    write(tmp_path / "good", "own", good | {"validation": good["test"]})
    write(
        tmp_path / "bad",
        "own",
        {"train": [long, *good["train"]], "test": good["test"], "validation": [*good["test"], long]},
    )
    words = ["run", "own", "--model", str(model), "--steps", "2", "--set", "max_length=32", "--skip-bad-rows"]
    words += ["--strategy", "continual-ft"]
    assert (
        cli.main([*words[:-3], "--data", str(tmp_path / "bad"), *words[-2:], "--check"]) == 2
    )  # as for other bad rows
    assert "--skip-bad-rows skips such rows" in capsys.readouterr().err
    for place in ("good", "bad"):
        more = ["--data", str(tmp_path / place)]
        assert cli.main([*words, *more, "--check"]) == 0
        assert cli.main([*words, *more, "--out", str(tmp_path / place / "out")]) == 0
    told = capsys.readouterr()
    note = "Task 'own': 1 bad train row left out: answer does not fit (1); 1 bad validation row left out"
    assert note in told.err and note in told.out
    one, other = (json.loads((tmp_path / place / "out" / "results.json").read_text()) for place in ("good", "bad"))
    fault = {"rows": 1, "faults": {"answer does not fit": 1}}
    assert other["data"].pop("left_out") == {"own": {"train": fault, "validation": fault}}
    assert one["data"] == other["data"]
    scores = (forgetfree.load_results(tmp_path / place / "out").scores for place in ("good", "bad"))
    assert next(scores).equals(next(scores))


def test_what_writes_no_texts_is_refused(data: Path, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="answered by texts, and the readout 'linear' gives labels"):
        run(data, model, tmp_path / "out", "grafting-continual", readout="linear")
    bert = families.write("Bert", tmp_path / "bert")
    with pytest.raises(ModelError, match="'generate' needs a causal language model or an encoder-decoder"):
        run(data, bert, tmp_path / "out", "grafting-continual")
    with pytest.raises(UsageError, match="task_inference=router uses the entropy of label predictions"):
        run(data, model, tmp_path / "out", "grafting-continual", scenario="class", task_inference="router")


def test_routing_sees_the_prompt_and_not_the_answer(data: Path, model: Path) -> None:
    from forgetfree.training.encoded_task import encode_task

    loaded = load_model(str(model), "generate")
    rows = load_tasks("first", str(data))[0]
    task = encode_task(rows, loaded)
    x, _, _ = task.test.batch([0, 1, 2])
    alone = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(ids) for ids in task.test.prompts[:3]],
        batch_first=True,
        padding_value=loaded.pad,  # type: ignore[attr-defined]
    )
    assert torch.equal(loaded.model.pooled(x), loaded.model.pooled(alone))


# -- Closed answers ---------------------------------------------------------------------------------------


def test_the_likeliest_of_closed_answers_is_given_with_its_probability(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With closed answers, a run has an ECE, and `Predictor` and `predict` give the same answers."""
    closed = [*WORDS, "great film"]
    rows = splits_of(lambda words: words[0], train=24, validation=9, test=13)
    write(tmp_path, "first", rows, closed_answers=closed)
    write(tmp_path, "last", rows, max_new_tokens=3)
    run(tmp_path, model, tmp_path / "out", "grafting-continual")
    unit = tmp_path / "out" / "grafting-continual" / "seed-0"
    tasks = [rows.task for rows in load_tasks("first,last", str(tmp_path))]
    kept = read_answers(unit, tasks)
    first, last = kept["first"], kept["last"]
    assert isinstance(first, TextAnswers) and isinstance(last, TextAnswers)
    assert first.logits is not None and first.labels is not None
    assert (first.logits.shape, last.logits, last.ece) == ((13, 5), None, None)
    assert list(first.texts) == [closed[i] for i in first.logits.argmax(1)]
    assert [closed[i] for i in first.labels] == [each[0] for each in first.right]
    share = np.exp(first.logits - first.logits.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    (told,) = json.loads((tmp_path / "out" / "results.json").read_text())["runs"]
    assert [row[1] for row in told["ece"]] == [None] * 3  # without probabilities, no ECE; the mean skips it
    assert told["summary"]["ece"] == told["ece"][-1][0] == pytest.approx(first.ece, abs=1e-6) and first.ece
    assert not first.same_as(replace(first, logits=np.nextafter(first.logits, np.float32(9))))
    assert len(first.tensors()["ids"]) == first.lengths.sum()

    predictor = Predictor.of_run(tmp_path / "out")
    assert predictor.definition("first").closed_answers == tuple(closed)
    said = predictor.answer("first", [row["prompt"] for row in rows["test"]], batch_size=5)
    assert [each.text for each in said] == list(first.texts)
    assert np.allclose([list(each.probabilities.values()) for each in said], share, atol=1e-6)
    (one,) = predictor.answer("first", ["great"])
    words = ["predict", str(tmp_path / "out"), "--task", "first", "great"]
    assert cli.main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["text"], told["probability"]) == (one.text, one.probabilities[one.text])
    assert list(told["probabilities"]) == closed
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"{one.text}\t{one.probabilities[one.text]:.3f}\tgreat\n"


@pytest.mark.parametrize(
    ("closed", "message"),
    [
        (["great"], "closed_answers must be at least two texts, all different"),
        ("great", "closed_answers must be a list of names, all different"),
        (["great", "no"], r"row 2, column 'target': expected one of closed_answers, .*, got 'film'\. Fix or remove"),
    ],
)
def test_what_is_no_closed_answer_is_told(closed: Any, message: str, tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "target": "great"},
        {"prompt": "b", "target": "film"},
        {"prompt": "c", "target": ["x", "no "]},
    ]
    write(tmp_path, "own", in_all_splits(rows[:1]) | {"train": rows}, closed_answers=closed)
    with pytest.raises(DataError, match=message):
        load_tasks("own", str(tmp_path))
    write(tmp_path, "own", in_all_splits(rows), closed_answers=["great", "no", "film"])
    assert load_tasks("own", str(tmp_path))[0].train.labels == (("great",), ("film",), ("no",))
