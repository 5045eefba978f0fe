"""Chats in the forms of real files, formatted by templates like those of real models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from task_files import write_task

from forgetfree.data.chats import Chat, answer_of, answer_turn
from forgetfree.data.columns import NO_COLUMN_NAMES
from forgetfree.data.encoding import drop_bad_rows
from forgetfree.data.prompts import PromptEncoder
from forgetfree.data.rows import Rows, TaskRows
from forgetfree.data.sources import load_tasks
from forgetfree.errors import DataError, UsageError
from forgetfree.kinds.kind import kind_of
from forgetfree.tasks import TaskDefinition

END = "<|endoftext|>"
#: Templates, named by their treatment of texts.
TEMPLATES = {
    # Earlier thoughts are dropped, as in Qwen3 and SmolLM3.
    "drops": "{% for m in messages %}{% set c = m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last "
    "else m.content %}[{{ m.role }}]{{ c }}"
    + END
    + "\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    # The last answer has a thought, possibly an empty one, as in Qwen3; tools and their calls are shown.
    "qwen": "{% if tools %}[tools]{{ tools | tojson }}" + END + "\n{% endif %}{% for m in messages %}[{{ m.role }}]\n"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}" + END + "\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}",
    # Every thought is dropped, and the prompt opens one, as in DeepSeek-R1.
    "opens": "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]<think>\n' }}{% endif %}",
    # Roles must alternate, and texts are trimmed, as in Mistral and Gemma.
    "strict": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '[INST] ' + m.content | trim + ' [/INST]' if m.role == 'user' else ' ' + m.content | trim + eos_token }}{% endfor %}",
    # Texts are tested and rewritten.
    "rewrites": "{% for m in messages %}{{ '[' + m.role + ']' + ('/no' if m.content.startswith('film') else '') + "
    "m.content.replace('a', 'o')[:40] + '"
    + END
    + "' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    # The assistant has another name in the generation prompt than in the chat.
    "renames": "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '" + END + "' }}{% endfor %}"
    "{% if add_generation_prompt %}[model]{% endif %}",
    # Answers are not shown at all.
    "hides": "{% for m in messages if m.role == 'user' %}{{ '[user]' + m.content + '" + END + "' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
}
CALL = [{"type": "function", "function": {"name": "price", "arguments": {"n": 1}}}]
TOOLS = [{"type": "function", "function": {"name": "price", "parameters": {}}}]


def user(content: str = "film") -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: str = "great", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def encoder_of(template: str, kind: str = "messages", length: int = 400, **fields: Any) -> tuple[Any, PromptEncoder]:
    tokenizer = tiny.byte_level(causal=True)
    tokenizer.chat_template = TEMPLATES[template]
    fields = {"metric": "exact_match", "max_new_tokens": 4, **fields}
    return tokenizer, PromptEncoder(tokenizer, TaskDefinition("own", kind, (), **fields), length)


def rows_of(*chats: Any) -> Rows:
    asked = [answer_of(Chat.of(chat)) for chat in chats]
    places = tuple(("a.jsonl", number) for number in range(1, 1 + len(asked)))
    return Rows(tuple(chat.text for chat, _ in asked), (), tuple((answer,) for _, answer in asked), places)


@pytest.mark.parametrize(
    ("template", "chat", "answer"),
    [
        ("drops", [user(), said("<think>hm</think>great"), user("movie"), said("<think>a</think>b")], "<think>a</think>b"),
        ("qwen", [user(), said(reasoning_content="hm")], "<think>\nhm\n</think>\n\ngreat"),
        ("qwen", [user(), said()], "<think>\n\n</think>\n\ngreat"),
        ("qwen", {"messages": [user(), said("", tool_calls=CALL), {"role": "tool", "content": "7"}, said()], "tools": TOOLS},
         "<think>\n\n</think>\n\ngreat"),
        ("qwen", {"messages": [user(), {"role": "assistant", "tool_calls": CALL}], "tools": TOOLS},
         '<think>\n\n</think>\n\n<call>{"name": "price", "arguments": {"n": 1}}'),
        ("opens", [user(), said("<think>\nhm</think>great")], "hm</think>great"),
        ("strict", [user("  film "), said(" great\n")], " great"),
        ("rewrites", [user("a film"), said("banana")], "bonono"),
        ("rewrites", [user(), said("movie")], "movie"),
        ("renames", [user(), said()], "great"),
        ("hides", [user(), said()], "great"),
    ],
)  # fmt: skip
def test_a_chat_is_learned_as_its_template_puts_it_together(template: str, chat: Any, answer: str) -> None:
    """Predictions, which lack the answer, and an exported model have the same prompt."""
    tokenizer, encoder = encoder_of(template)
    rows = rows_of(chat)
    (row,) = encoder.read(rows)
    labels, plain = row.labels, [token if token >= 0 else ~token for token in row.ids]
    asked = Chat.of(rows.first[0])
    before = tokenizer.apply_chat_template(
        asked.turns, tools=asked.tools or None, tokenize=False, add_generation_prompt=True
    )
    assert plain == tokenizer(before)["input_ids"] + labels[:-1]
    assert (tokenizer.decode(labels[:-1]), labels[-1]) == (answer, tokenizer.eos_token_id)
    assert row.right == (answer if answer.strip() != "great" else rows.labels[0][0],)
    tokenizer.chat_template = encoder.chat_template
    assert tokenizer.apply_chat_template(
        asked.turns, tools=asked.tools or None, tokenize=False, add_generation_prompt=True
    ) == before  # fmt: skip


@pytest.mark.parametrize("template", ["strict", "rewrites"])
@pytest.mark.parametrize("prompt", ["film banana", "  banana "])
def test_prompts_are_put_together_with_their_own_texts_too(template: str, prompt: str) -> None:
    for instruction in ("", "say"):
        tokenizer, encoder = encoder_of(template, "generation", instruction=instruction)
        (row,) = encoder.read(Rows((prompt,), (), (("great", "movie"),)))
        whole = f"{instruction}\n\n{prompt}" if instruction else prompt
        before = tokenizer.apply_chat_template([user(whole)], tokenize=False, add_generation_prompt=True)
        assert row.before == tokenizer(before)["input_ids"]
        tokenizer.chat_template = encoder.chat_template
        assert tokenizer.apply_chat_template([user(prompt)], tokenize=False, add_generation_prompt=True) == before


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        (
            "strict",
            [user(), user(), said()],
            "template accepts, got turns with user, user. The model's chat template says 'roles must alternate'",
        ),
        ("drops", {"messages": [user(), said()], "tools": TOOLS}, "ignores, got 'tools'"),
        ("drops", [user(), said("", tool_calls=CALL), {"role": "tool", "content": "7"}, said()], "ignores, got 'tool_calls'"),
        ("drops", [user(), said(reasoning_content="hm")], "in the answer .* ignores, got 'reasoning_content'"),
        ("opens", [user(), said()], r"an answer that begins with '<think>\\n', because .* got 'great'"),
        ("opens", [user(), said("<think>hm</think>great")], r"an answer that begins with '<think>\\n'"),
        ("opens", [user(), said("<b>great</b>")], r"an answer that begins with '<think>\\n'"),
    ],
)  # fmt: skip
def test_a_chat_that_the_template_cannot_show_is_a_bad_row(template: str, chat: Any, message: str) -> None:
    """It is reported by file and row, and left out with --skip-bad-rows."""
    _, encoder = encoder_of(template)
    good = [user(), said("<think>\nhm</think>great" if template == "opens" else "great")]
    rows = rows_of(good, chat, good)
    with pytest.raises(DataError, match=rf"^a\.jsonl, row 2: .*{message}.*--skip-bad-rows"):
        encoder.read(rows)
    task = TaskRows(TaskDefinition("own", "messages", (), metric="exact_match"), rows, rows_of(good), rows_of(good))
    with pytest.raises(DataError, match=r"^a\.jsonl, row 2: "):
        drop_bad_rows(task, encoder, False)
    left = drop_bad_rows(task, encoder, True)
    assert ([number for _, number in left.train.places], left.left_out["train"]["rows"]) == ([1, 3], 1)
    assert "1 bad train row left out" in left.notes[0]
    shown = replace(task, train=rows_of(chat), validation=rows_of(chat), test=rows_of(chat))
    with pytest.raises(DataError, match=r"^a\.jsonl, row 1: ") as caught:  # once, though all splits have it
        drop_bad_rows(shown, encoder, True)
    assert "faults" not in str(caught.value)


@pytest.mark.parametrize("template", ["drops", "strict", "rewrites"])
def test_a_special_token_in_a_text_stays_text(template: str) -> None:
    tokenizer, encoder = encoder_of(template)
    end, spelled = tokenizer.eos_token_id, [user(f"a {END} b"), said(f"x{END}")]
    plain = encoder.read(rows_of([user(), said("x")]))[0]
    row = encoder.read(rows_of(spelled))[0]
    assert (row.before.count(end), row.labels[:-1].count(end)) == (plain.before.count(end), 0)
    assert END in tokenizer.decode(row.before[2:]) and END in tokenizer.decode(row.labels[:-1])


def test_a_long_chat_loses_the_beginning_of_its_oldest_turns() -> None:
    """The template's own text stays, as in a shorter chat."""
    tokenizer, encoder = encoder_of("drops", length=90)
    system = {"role": "system", "content": "terrible"}
    row = encoder.read(
        rows_of([system, user("great film " * 30), said("<think>hm</think>movie"), user("great"), said()])
    )[0]
    before = tokenizer.decode(row.before)
    assert len(row.before) <= 90 - 4
    assert before.startswith(f"[system]terrible{END}\n[user] ") and before.endswith(f"[user]great{END}\n[assistant]")
    assert "[assistant]movie" in before and before.count("film") > 3
    assert row.lost > 20


# -- Files -----------------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Say it."}
SHARE = [{"from": "human", "value": "film"}, {"from": "gpt", "value": "great"}]
PAIR = {"instruction": "film", "input": "", "output": "great"}
COLUMNS = [
    ({"system": "Say it.", "conversations": SHARE}, [SYSTEM, user()]),
    ({"system_prompt": "Say it.", "messages": [SYSTEM, user(), said()]}, [SYSTEM, user()]),
    ({"system": "", "tools": "[]", **PAIR}, "film"),
    ({"system": "Say it.", **PAIR}, [SYSTEM, user()]),
    ({"history": [["a", "b"]], **PAIR}, [user("a"), said("b"), user()]),
    ({"history": '[["a", "b"]]', **PAIR, "system": "Say it."}, [SYSTEM, user("a"), said("b"), user()]),
    ({"tools": json.dumps(TOOLS), "messages": [user(), said()]}, {"messages": [user()], "tools": TOOLS}),
    ({"functions": [TOOLS[0]["function"]], "messages": [user(), said()]}, {"messages": [user()], "tools": TOOLS}),
    ({"messages": [{**user(), "name": "bob", "weight": 0}, said(weight=1)]}, [{**user(), "name": "bob"}]),
    ({"messages": [user(), said(content=[{"type": "text", "text": "gr"}, {"type": "text", "text": "eat"}])]}, [user()]),
    (
        {"conversations": [SHARE[0], {"from": "function_call", "value": json.dumps(CALL[0]["function"])},
                           {"from": "observation", "value": "7"}, SHARE[1]]},
        [user(), {"role": "assistant", "tool_calls": CALL}, {"role": "tool", "content": "7"}],
    ),
]  # fmt: skip


def data_of(root: Path, row: dict[str, Any]) -> str:
    return str(write_task(root, "own", [row]).parent)


@pytest.mark.parametrize(("row", "expected"), COLUMNS)
def test_what_stands_beside_a_chat_is_asked_with_it(row: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    """This holds in training, and in predictions for a file."""
    (task,) = load_tasks("own", data_of(tmp_path, row))
    prompt = task.train.first[0]
    assert (prompt if isinstance(expected, str) else json.loads(prompt)) == expected
    assert task.train.labels[0] == ("great",)
    if not isinstance(expected, str):
        kind, own = kind_of(task.task), task.task
        columns = kind.columns_of_texts(own, "own", [*row], NO_COLUMN_NAMES)
        (text,) = kind.texts_of(own, row, columns)
        assert json.loads(kind.rows(own, [text]).first[0]) == expected  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images": ["a.png"], "messages": [user("<image>"), said()]}, "'images': expected nothing, because only texts"),
        ({"system": "Sing.", "messages": [SYSTEM, user(), said()]}, "'system': expected the same text as that of the chat's"),
        ({"tools": "price", "messages": [user(), said()]}, "'tools': expected a list of tools"),
        ({"history": ["a", "b"], **PAIR}, "'history': expected a list of pairs of texts"),
        ({"system": "Say it.", "messages": []}, "expected a turn of the assistant after another turn"),
        ({"messages": [user(), said(weight=0)]}, "that is trained on like any other, so 'weight' of 1 or none"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, said()]}, "without a part of the type 'image'"),
        ({"conversations": [SHARE[0], {"from": "function_call", "value": "price()"}]}, "a function_call that is the JSON"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_by_name(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        load_tasks("own", data_of(tmp_path, row))
    assert message in str(error.value)


def test_columns_that_are_not_read_are_told(tmp_path: Path) -> None:
    (task,) = load_tasks("own", data_of(tmp_path, {"prompt": "a", "target": "b", "topic": "c"}))
    assert "not read: 'topic'" in task.notes[0]


def test_a_task_of_prompts_refuses_what_it_was_not_trained_on() -> None:
    task = TaskDefinition("own", "generation", ())
    with pytest.raises(
        UsageError, match=r"trained on prompts with nothing beside them, got 'Say it.' in column 'system'"
    ):
        kind_of(task).texts_of(task, {"prompt": "film", "system": "Say it."}, ("prompt",))


def test_what_a_turn_does_not_say_may_be_nan() -> None:
    nan = float("nan")
    turns = [said(tool_calls=nan, name=None), {"role": "assistant", "content": nan, "tool_calls": CALL}]
    assert Chat.of([user(), *turns]) == Chat([user(), said(), {"role": "assistant", "tool_calls": CALL}])


def test_an_answer_is_its_text_or_its_turn() -> None:
    for turn in (said(), said(reasoning_content="hm"), said('{"role": "assistant", "content": "a"}')):
        assert answer_turn(answer_of(Chat([user(), turn]))[1]) == turn
