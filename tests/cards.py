"""Predictions of an exported model by the usual call of transformers, if its model card shows one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from forgetfree.data.rows import Rows


def card_code(directory: Path) -> str:
    (code,) = re.findall(r"^```python\n(.*?)^```", (directory / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    return str(code)


def pipeline_probabilities(directory: Path, rows: Rows, labels: Sequence[str]) -> Tensor | None:
    """Return probabilities ``(rows, labels)`` by ``pipeline("text-classification")``, or None if the card does not show it."""
    if 'pipeline("text-classification"' not in (directory / "README.md").read_text(encoding="utf-8"):
        return None
    classify: Any = transformers.pipeline("text-classification", model=str(directory), truncation=True)  # type: ignore[call-overload]
    texts = list(zip(rows.first, rows.second, strict=True) if rows.second else zip(rows.first))
    given = [each[0] if len(each) == 1 else {"text": each[0], "text_pair": each[1] or " "} for each in texts]
    found = [
        torch.tensor(
            [[{each["label"]: each["score"] for each in answer}[label] for label in labels] for answer in answers]
        )
        for answers in ([classify(each, top_k=None) for each in given], classify(given, top_k=None, batch_size=4))
    ]
    assert torch.allclose(*found, rtol=0, atol=1e-4)
    return found[0]


def written_texts(directory: Path, prompts: Sequence[str], stop: Sequence[str]) -> list[str]:
    """Return texts by ``pipeline("text-generation")``, or by ``generate`` of an encoder-decoder, cut at the first stop text."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    if 'pipeline("text-generation"' in (directory / "README.md").read_text(encoding="utf-8"):
        write: Any = transformers.pipeline("text-generation", model=str(directory))  # type: ignore[call-overload]
        texts = [write(chat, return_full_text=False)[0]["generated_text"] for chat in chats]
    else:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory)
        model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory).eval()
        put = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        written = [model.generate(**tokenizer(each, return_tensors="pt"))[0] for each in put]
        texts = [tokenizer.decode(each, skip_special_tokens=True) for each in written]
    return [min((text.split(end)[0] for end in stop), key=len, default=text).strip() for text in texts]
