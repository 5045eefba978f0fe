"""The card of a model that is written, its README.md: what it is, and how it is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from forgetfree.core.readout_model import BY_WORDS
from forgetfree.data.prompts import PromptEncoder
from forgetfree.display import escaped
from forgetfree.kinds.networks import READOUT, TOKEN_CLASSIFIER, Reading
from forgetfree.ledger.graft import GraftOrigin
from forgetfree.results.report.page import in_markdown


@dataclass(frozen=True)
class Change:
    """What was done to the base model.

    Attributes:
        command: that wrote the model: ``apply`` or ``export``.
        strategy: that trained it; empty for a graft on its own.
        entries: how many parameters differ from the base model's.
        size: how many may.
    """

    command: str
    strategy: str
    entries: int = 0
    size: int = 0


def model_card(origin: GraftOrigin, reading: Reading, change: Change) -> str:
    """Return the model card as Markdown.

    Args:
        origin: the task, and the base model.
        reading: how to read the written model.
        change: what was done to the base model.
    """
    grafted = change.command == "apply"
    facts = {
        "task": f"{_code(origin.task.name)}: {_answers(origin)}",
        "base model": _code(origin.model),
        "fingerprint of its body": f"`{origin.fingerprint}`",
        **({"sparsity": f"{origin.sparsity:g}"} if grafted else {}),
        **({"learned by": _code(change.strategy)} if change.strategy else {}),
        "class": f"`{reading.loader}`",
        **dict(_texts(origin, reading) if isinstance(reading.encoder, PromptEncoder) else _labels(origin, reading)),
    }
    tag, on = ("grafting", "grafted onto") if grafted else ("continual-learning", "on")
    title = f"{_shown(origin.task.name)} {on} {_shown(origin.model)}"
    return "\n".join(
        [
            *("---", "library_name: transformers", f"tags: [forgetfree, {tag}]", "---", "", f"# {title}", ""),
            f"{change.entries:,} of {change.size:,} parameters that training may move differ from the base model's",
            f"([Panigrahi et al., 2023](https://arxiv.org/abs/2302.06600)). Written by `forgetfree {change.command}`.",
            *("", "| | |", "|---|---|", *(f"| {name} | {fact} |" for name, fact in facts.items()), ""),
            *_use(origin, reading),
            "",
        ]
    )


def _answers(origin: GraftOrigin) -> str:
    task = origin.task
    if not task.labels:
        return f"a text after a {'chat' if task.form == 'messages' else 'prompt'}"
    return _shown(", ".join(task.labels))


def _labels(origin: GraftOrigin, reading: Reading) -> Iterator[tuple[str, str]]:
    """Yield how labels are read, and rows."""
    task, where = origin.task, "first" if reading.position == 0 else "last"
    if origin.readout in BY_WORDS:
        words = [f"{label}: {word!r}" for label, word in zip(task.labels, task.label_words, strict=False)]
        place = "at the mask" if origin.readout == "prompt" else "after the last token"
        yield "readout", f"the logits of label words {place} ({_shown(', '.join(words))})"
        yield "prompt", _shown(task.template if origin.readout == "prompt" else task.causal_template)
    elif origin.readout == "classifier":
        yield "readout", "the fine-tuned model's own classification head"
    elif reading.own_readout:
        place = "on the mean of all tokens" if origin.readout == "mean" else f"at the {where} token"
        yield "readout", f"the linear layer in `{READOUT}` {place}"
    else:
        of = " of each word" if reading.loader == TOKEN_CLASSIFIER else ""
        yield "readout", f"a linear layer, inside the model's head, at the {where} token{of}"
    yield "rows", f"Rows are read up to {origin.max_length} tokens"


def _texts(origin: GraftOrigin, reading: Reading) -> Iterator[tuple[str, str]]:
    """Yield how texts are written, and rows."""
    task = origin.task
    yield "an answer", f"at most {task.max_new_tokens:,} tokens, greedily"
    if task.instruction:
        yield "instruction", _shown(task.instruction)
    if isinstance(reading.encoder, PromptEncoder) and reading.encoder.frame:
        yield "prompt", _shown(reading.encoder.frame)
    if task.stop:
        yield "ends before", _shown(json.dumps(task.stop, ensure_ascii=False))
    if task.closed_answers:
        likeliest = _shown(", ".join(task.closed_answers))
        yield (
            "closed answers",
            f"`forgetfree predict` takes the likeliest of {likeliest}; here texts are written freely",
        )
    yield "rows", f"{origin.max_length:,} tokens at most, with the answer; longer prompts are not cut here"


def _use(origin: GraftOrigin, reading: Reading) -> list[str]:
    """Return the usual call, where it answers as the task's own model does."""
    task, pair, tagged = origin.task, len(origin.task.text_columns) == 2, reading.loader == TOKEN_CLASSIFIER
    if not reading.usual and not tagged:
        if reading.loader == "AutoModelForSequenceClassification":
            return ["The tokenizer by itself reads texts in another way, so `pipeline` does not answer exactly so."]
        if not task.labels:
            made = "chats" if task.form == "messages" else "prompts"
            return [f"The tokenizer by itself makes other tokens of some {made} here than in training."]
        return ["This is no sequence classifier: `pipeline` has no classes for it, and fails."]
    if not task.labels and reading.loader != "AutoModelForCausalLM":
        return [
            "`generate` writes after its chat template. A prompt that spells a special token is read as that token here."
        ]
    call = 'pipeline("text-classification", model=".", truncation=True)'
    given, beside = '"This is one text."', "A text that spells a special token is read as a text."
    if tagged:
        call = 'pipeline("token-classification", model=".", aggregation_strategy="first")'
        given, beside = '"Jane Smith works in Paris ."', "Each word is labelled at its first token."
    elif not task.labels:
        call = 'pipeline("text-generation", model=".")'
        given = '[{"role": "user", "content": "What is to be answered?"}], return_full_text=False'
        beside = "A prompt that spells a special token is read as that token here."
        if task.stop:
            given += f", stop_sequence={escaped(json.dumps(task.stop, ensure_ascii=False))}"
    elif pair:
        given = '{"text": "Is this one text?", "text_pair": "This is another."}'
        beside += " For an empty second text give a blank."
    return ["```python", "from transformers import pipeline", "", f"print({call}({given}))", "```", "", beside]


def _code(name: str) -> str:
    """Return a name between backticks: it cannot end a line, a table's cell, or them."""
    return f"`{escaped(name).replace('`', chr(39)).replace('|', '/')}`"


def _shown(text: str) -> str:
    """Return a text that markdown shows as it is."""
    return in_markdown(escaped(text))
