"""Tasks of texts in use: predict and exported models write the run's texts again, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import prompted
import pytest
import torch
import transformers
from cards import written_texts

from forgetfree import Predictor, cli
from forgetfree.data.sources import load_tasks
from forgetfree.errors import UsageError
from forgetfree.kinds.generation import chat_of
from forgetfree.kinds.kind import GenerationOptions, kind_of
from forgetfree.tasks import TaskDefinition

pytestmark = pytest.mark.long

STRATEGIES = ("grafting-continual", "continual-ft", "fine-tune", "lora")
PROMPTS = TaskDefinition("own", "generation", ())
CHATS = TaskDefinition("own", "messages", ())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prompted.write_data(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of a decoder with a chat template."""
    place = tmp_path_factory.mktemp("llama")
    return prompted.run(data, prompted.write_model("Llama", place / "model", chats=True), place / "run", *STRATEGIES)


@pytest.fixture(scope="module")
def apart(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of an encoder-decoder."""
    place = tmp_path_factory.mktemp("t5")
    return prompted.run(data, prompted.write_model("T5", place / "model"), place / "run", "grafting-continual")


def asked(data: Path, task: str) -> list[str]:
    """Return the prompts of the test rows."""
    return list(load_tasks(task, str(data))[0].test.first)


# -- Texts of a run ---------------------------------------------------------------------------------------


@pytest.mark.sampled("run-grafting-continual", share=0.25)
@pytest.mark.parametrize(
    ("source", "strategy"), [*(("run", name) for name in STRATEGIES), ("apart", "grafting-continual")]
)
def test_the_run_s_texts_are_written_again(source: str, strategy: str, data: Path, request: Any) -> None:
    """This holds for any batch size, in any order of tasks and beside any other rows."""
    run = request.getfixturevalue(source)
    predictor, expected = Predictor.of_run(run, strategy=strategy), prompted.answers_of_run(run, strategy)
    for task, size in (("last", 3), ("first", 64), ("chat", 1), ("first", 2), ("chat", 5)):
        written = predictor.answer(task, asked(data, task), batch_size=size)
        assert [each.text for each in written] == list(expected[task].texts)
        assert [each.tokens for each in written] == expected[task].lengths.tolist()
        assert written[-1].cut_tokens > 40
    tasks = ["chat", "first", "chat"]
    mixed = predictor.answer_mixed(tasks, [asked(data, task)[2] for task in tasks])
    assert [each.text for each in mixed] == [expected[task].texts[2] for task in tasks]
    assert any(text for answers in expected.values() for text in answers.texts)


def test_a_text_ends_where_it_is_asked_to(run: Path, data: Path) -> None:
    predictor = Predictor.of_run(run, strategy="fine-tune")
    prompt = asked(data, "last")[:1]
    (whole,) = predictor.answer("last", prompt)
    (short,) = predictor.answer("last", prompt, options=GenerationOptions(max_tokens=2))
    assert (short.tokens, short.ended) == (2, False)
    assert whole.text.startswith(short.text)
    (stopped,) = predictor.answer("last", prompt, options=GenerationOptions(stop=(whole.text[1],)))
    assert (stopped.text, stopped.ended) == (whole.text[:1].strip(), True)
    with pytest.raises(UsageError, match="max_tokens must be from 1 to"):
        predictor.answer("last", prompt, options=GenerationOptions(max_tokens=0))


# -- Prompts and chats ------------------------------------------------------------------------------------

TURN = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("chat", "expected"),
    [
        ("hello", TURN),
        (json.dumps(TURN), TURN),
        (TURN, TURN),
        ([{"from": "human", "value": "hello"}, {"from": "gpt", "value": "…"}], TURN),  # the model writes the last turn
        ("[sic] hello", [{"role": "user", "content": "[sic] hello"}]),
        ('["hello"]', [{"role": "user", "content": '["hello"]'}]),
    ],
)
def test_a_chat_is_a_list_of_turns_and_a_text_is_one_turn(chat: Any, expected: list[dict[str, str]]) -> None:
    assert chat_of(chat).turns == expected
    assert json.loads(kind_of(CHATS).rows(CHATS, [chat]).first[0]) == expected


@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        (CHATS, [{"role": "user"}], r"Chat 1: expected a list of turns, each with a content and a role"),
        (CHATS, '[{"role": "user", "content": 3}]', "Chat 1: expected a list of turns"),
        (CHATS, [{"role": "assistant", "content": "…"}], "Chat 1 has no turn to answer"),
        (CHATS, [], "Chat 1 has no turn to answer"),
        (CHATS, ("a", "b"), "reads one text, got 2"),
        (PROMPTS, TURN, "reads prompts, got a list"),
    ],
)
def test_what_cannot_be_answered_is_refused(task: Any, text: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kind_of(task).rows(task, [text])


@pytest.mark.parametrize(
    ("rows", "prompt"),
    [
        ([{"instruction": "great", "input": "film", "output": "x"}], "great\n\nfilm"),
        ([{"question": "great film", "id": 3}], "great film"),
    ],
)
def test_predict_reads_the_files_of_the_training(
    run: Path, tmp_path: Path, rows: list[Any], prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert cli.main(["predict", str(run), "--task", "first", "--file", str(file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    (written,) = Predictor.of_run(run).answer("first", [prompt])
    assert said == {"prompt": prompt, "task": "first", "text": written.text, "cut_tokens": 0}


def test_predict_prints_texts_and_tables(run: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = list(prompted.answers_of_run(run, "grafting-continual")["chat"].texts)
    file = str(data / "chat" / "test.jsonl")
    words = ["predict", str(run), "--task", "chat"]
    assert cli.main([*words, "--file", file, "--json"]) == 0
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == expected
    turns = json.dumps(prompted.chat(prompted.prompts(prompted.COUNTS["test"], prompted.COUNTS["test"])[0]))
    assert cli.main([*words, turns, "film"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert second.endswith("\tfilm") and first.endswith(turns)
    assert cli.main([*words, "--csv", "film"]) == 0
    assert capsys.readouterr().out.startswith("prompt,task,text\nfilm,chat,")
    assert cli.main(["predict", str(run), "--task", "auto", "film"]) == 2
    told = capsys.readouterr().err
    assert "The router chooses among labels of whole texts, and first has one for each token of a text" in told


def test_a_run_whose_tasks_are_withheld_is_answered_from(data: Path, tmp_path: Path, plain: Path) -> None:
    run = prompted.run(data, plain.parent / "model", tmp_path / "run", "continual-ft", scenario="class", steps=1)
    predictor, expected = Predictor.of_run(run), prompted.answers_of_run(run, "continual-ft")
    for task in prompted.TASKS:
        assert [each.text for each in predictor.answer(task, asked(data, task))] == list(expected[task].texts)


# -- Exported models --------------------------------------------------------------------------------------

#: A run, a strategy of it, and the exported task.
EXPORTS = [
    ("run", "grafting-continual", "chat"),
    ("run", "lora", "last"),
    ("plain", "grafting-continual", "first"),
    ("plain", "grafting-continual", "chat"),
    ("apart", "grafting-continual", "first"),
    ("apart", "grafting-continual", "chat"),
]


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of a decoder without a chat template."""
    place = tmp_path_factory.mktemp("gpt2")
    return prompted.run(data, prompted.write_model("GPT2", place / "model"), place / "run", "grafting-continual")


@pytest.mark.parametrize(("source", "strategy", "task"), EXPORTS)
def test_an_exported_model_writes_the_texts_of_predict(
    source: str, strategy: str, task: str, tmp_path: Path, request: Any, capsys: Any
) -> None:
    """The texts are written by ``pipeline("text-generation")``, or by ``generate`` of an encoder-decoder."""
    run, out = request.getfixturevalue(source), tmp_path / "model"
    assert cli.main(["export", str(run), "--strategy", strategy, "--task", task, "--out", str(out)]) == 0
    assert ("text-generation" in capsys.readouterr().out) == (source != "apart")
    prompts = ["great film", "terrible movie film", "film", "great movie", "movie great"]
    predictor = Predictor.of_run(run, strategy=strategy)
    written = predictor.answer(task, prompts)
    assert any(each.text for each in written)
    assert not any(each.cut_tokens for each in written)  # transformers cuts no prompts
    assert written_texts(out, prompts, predictor.definition(task).stop) == [each.text for each in written]
    card = (out / "README.md").read_text()
    assert f"of {len(predictor.loaded.model.space()):,} parameters that training may move" in card
    assert "If a prompt contains the characters of a special token" in card
    model = type(predictor.loaded.model.backbone).from_pretrained(out)  # type: ignore[attr-defined]
    with predictor.weights.merged(task):
        meant = predictor.loaded.model.backbone.state_dict()
        assert all(torch.equal(tensor, meant[name]) for name, tensor in model.state_dict().items())


def test_an_exported_model_refuses_chats_where_prompts_are_read(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert cli.main(["export", str(plain), "--task", "last", "--out", str(out)]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "{{ a }}"}], tokenize=False) == (
        "terrible\n\n{{ a }}\n\n"
    )
    with pytest.raises(Exception, match="reads single prompts"):
        tokenizer.apply_chat_template(prompted.chat("a"), tokenize=False)
    settings = transformers.GenerationConfig.from_pretrained(out)
    assert (settings.max_new_tokens, settings.do_sample) == (6, False)
