"""The parts of a tiny pre-trained model and of tiny tasks, made from a config and a seed: nothing is downloaded.

The tasks can be learned by keyword, and every word of them is one token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import BertConfig, BertTokenizer

M = TypeVar("M", bound=nn.Module)

HIDDEN, LAYERS, HEADS, INNER, POSITIONS = 16, 2, 2, 32, 48
#: Larger than the usual 0.02, so that so narrow a model tells its inputs apart.
SPREAD = 0.2
#: Rows of each task's splits.
SIZES = {"train": 24, "validation": 12, "test": 16}

FILLER = [
    *("a", "the", "it", "was", "is", "this", "that", "film", "story", "very", "and"),
    *("of", "in", "on", "to", "with", "by", "for", "who", "what", "when", "film"),
]
#: Label words of every task that is tested with prompts, and keywords of each task by label.
LABEL_WORDS = ["terrible", "great", "Yes", "No", "World", "Sports", "Business", "Tech", "Topic", "Answer"]
KEYWORDS: dict[str, list[list[str]]] = {
    "qnli": [["river", "city"], ["moon", "paper"]],
    "ag_news": [["war", "treaty"], ["goal", "match"], ["bank", "shares"], ["chip", "software"]],
    "sst2": [["awful", "dull"], ["lovely", "bright"]],
}
LABELS = {
    "qnli": ["entailment", "not_entailment"],
    "ag_news": ["World", "Sports", "Business", "Sci/Tech"],
    "sst2": ["negative", "positive"],
}
#: Of `LABEL_WORDS`, one a label.
PROMPT_WORDS = {
    "qnli": ("Yes", "No"),
    "ag_news": ("World", "Sports", "Business", "Tech"),
    "sst2": ("terrible", "great"),
}
_PUNCTUATION = [".", ",", "?", ":"]


def pre_trained(build: Callable[[], M]) -> M:
    """Return what ``build`` makes, with weights that are the same at every call, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build()
        with torch.no_grad():  # biases and LayerNorms, which start at 0 and 1, get values of their own
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.01)
    return model.eval()


def bert_config(vocabulary: int, **changes: Any) -> BertConfig:
    """Return the configuration of the tiny BERT."""
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        initializer_range=SPREAD,
        **{"max_position_embeddings": POSITIONS} | changes,
    )


def words() -> list[str]:
    """Return every word that the tasks and their prompts use, once."""
    keywords = [word for by_label in KEYWORDS.values() for group in by_label for word in group]
    plain = [*FILLER, *keywords, *LABEL_WORDS]
    return list(dict.fromkeys([*plain, *(word.lower() for word in plain), "It", "This"]))


def wordpiece() -> BertTokenizer:
    """Return BERT's tokenizer, lower-casing, with one piece a word; other words fall into letters."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_PUNCTUATION, *words()]
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = dict.fromkeys([*(p.lower() if p[0] != "[" else p for p in pieces), *letters])
    vocabulary |= dict.fromkeys(f"##{letter}" for letter in letters)
    return BertTokenizer(vocab={piece: i for i, piece in enumerate(vocabulary)}, do_lower_case=True)


def tiny_rows(task: str, **sizes: int) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of one task by split, as a data file holds them; labels take turns."""
    draw = random.Random(task)
    splits = {}
    for split, count in sizes.items():
        rows = [_row(task, i % len(LABELS[task]), draw) for i in range(count)]
        draw.shuffle(rows)
        splits[split] = rows
    return splits


def _row(task: str, label: int, draw: random.Random) -> dict[str, Any]:
    def text(keyword: str) -> str:
        body = [draw.choice(FILLER) for _ in range(draw.randint(2, 9))]
        body.insert(draw.randrange(len(body) + 1), keyword)
        return " ".join(body)

    keyword = draw.choice(KEYWORDS[task][label])
    if task == "qnli":
        return {"text_a": text("who") + " ?", "text_b": text(keyword) + " .", "label": label}
    return {"text": text(keyword) + " .", "label": label}
