"""A tiny pre-trained model, tiny tasks and streams of them, made in memory from a config and a seed: nothing is downloaded.

The tasks can be learned by keyword, and every word of them is one token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertModel, BertTokenizer, GPT2Config, GPT2LMHeadModel

from forgetfree.core.fingerprint import fingerprint_of
from forgetfree.data.rows import Rows, TaskRows
from forgetfree.models.loading import LoadedModel, plain_generation
from forgetfree.models.task_model import TaskModel
from forgetfree.models.token_inputs import TokenLayout
from forgetfree.tasks import DEFAULT_TEMPLATE, Scenario, TaskDefinition

if TYPE_CHECKING:
    from forgetfree.continual.stream import Stream

M = TypeVar("M", bound=nn.Module)
Readout = Literal["linear", "prompt", "generate"]

HIDDEN, LAYERS, HEADS, INNER, POSITIONS = 16, 2, 2, 32, 48
#: Larger than the usual 0.02, so that such a narrow model distinguishes its inputs.
SPREAD = 0.2
#: Rows of each task's splits.
SIZES = {"train": 24, "validation": 12, "test": 16}

FILLER = [
    *("a", "the", "it", "was", "is", "this", "that", "film", "story", "very", "and"),
    *("of", "in", "on", "to", "with", "by", "for", "who", "what", "when", "film"),
]
#: Label words of all tasks that are tested with prompts, and keywords of each task by label.
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
#: The word of `LABEL_WORDS` for each label.
PROMPT_WORDS = {
    "qnli": ("Yes", "No"),
    "ag_news": ("World", "Sports", "Business", "Tech"),
    "sst2": ("terrible", "great"),
}
_PUNCTUATION = [".", ",", "?", ":"]


def pre_trained(build: Callable[[], M]) -> M:
    """Return the model that ``build`` creates, with the same weights at every call, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build()
        with torch.no_grad():  # biases and LayerNorms, which start at 0 and 1, get values of their own
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, device="cpu") * 0.01)
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


def gpt2_config(vocabulary: int, positions: int = POSITIONS) -> GPT2Config:
    """Return the configuration of the tiny GPT-2."""
    return GPT2Config(
        vocab_size=vocabulary,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=INNER,
        n_positions=positions,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=SPREAD,
    )


def words() -> list[str]:
    """Return every word that the tasks and their prompts use, once."""
    keywords = [word for by_label in KEYWORDS.values() for group in by_label for word in group]
    plain = [*FILLER, *keywords, *LABEL_WORDS]
    return list(dict.fromkeys([*plain, *(word.lower() for word in plain), "It", "This"]))


def wordpiece() -> BertTokenizer:
    """Return BERT's lower-casing tokenizer, with one piece per known word; other words are split into letters."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_PUNCTUATION, *words()]
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = dict.fromkeys([*(p.lower() if p[0] != "[" else p for p in pieces), *letters])
    vocabulary |= dict.fromkeys(f"##{letter}" for letter in letters)
    return BertTokenizer(vocab={piece: i for i, piece in enumerate(vocabulary)}, do_lower_case=True)


def tiny_rows(task: str, **sizes: int) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of one task by split, in the form of a data file, with equally frequent labels."""
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


# -- Tasks, model and streams ----------------------------------------------------------------------------


def tiny_stream(
    tasks: Sequence[str] = ("qnli", "ag_news"),
    *,
    scenario: Scenario = "task",
    readout: Readout = "linear",
    seed: int = 0,
    shots: int | None = None,
) -> Stream:
    """Return a fresh stream of tiny tasks with a fresh tiny model, the same at every call.

    The model is a BERT of two layers of width 16 with a BatchNorm, whose buffers move in training; or a GPT-2 of that size,
    which answers with texts.

    Args:
        tasks: some of ``qnli`` (pairs, two labels), ``ag_news`` (four labels), ``sst2`` (two labels).
        scenario: whether the task is known at inference.
        readout: ``linear``: a layer per task; ``prompt``: the label words' logits at a mask token; ``generate``: a text.
        seed: the seed of the sample and of the readouts' initial weights.
        shots: training rows per label; default: all 24 rows.
    """
    from forgetfree.continual.stream import make_stream  # imports Avalanche, which the model and the tasks do not need

    rows = [(tiny_texts if readout == "generate" else tiny_task)(task) for task in tasks]
    return make_stream(",".join(tasks), rows, tiny_model(readout=readout), scenario=scenario, seed=seed, shots=shots)


def tiny_task(name: str, labels: int | None = None) -> TaskRows:
    """Return the rows of one tiny task; with ``labels``, only of its first so many labels."""
    pair, names = name == "qnli", tuple(LABELS[name][:labels])
    splits = {}
    for split, rows in tiny_rows(name, **SIZES).items():
        rows = [row for row in rows if row["label"] < len(names)]
        first = tuple(row["text_a" if pair else "text"] for row in rows)
        second = tuple(row["text_b"] for row in rows) if pair else ()
        splits[split] = Rows(first, second, tuple(row["label"] for row in rows))
    kind: Literal["single", "pair"] = "pair" if pair else "single"
    prompt_words = PROMPT_WORDS[name][: len(names)]
    task = TaskDefinition(name, kind, names, template=DEFAULT_TEMPLATE[kind], label_words=prompt_words)
    return TaskRows(task, splits["train"], splits["validation"], splits["test"])


def tiny_texts(name: str) -> TaskRows:
    """Return one tiny task with text answers: one word for its first label, two words for the next, and so on."""
    rows = tiny_task(name)

    def texts(part: Rows) -> Rows:
        prompts = tuple(map(" ".join, zip(part.first, part.second, strict=True))) if part.second else part.first
        words = PROMPT_WORDS[name]
        return Rows(prompts, (), tuple((" ".join([*words[:label], words[label]]).lower(),) for label in part.labels))

    task = TaskDefinition(name, "generation", (), metric="exact_match", max_new_tokens=4)
    return TaskRows(task, texts(rows.train), texts(rows.validation), texts(rows.test))


def other_rows(rows: Rows, labels: int) -> Rows:
    """Return as many rows of the same lengths, with other words and other labels; the last of ``labels`` is twice as frequent.

    So statistics that ignore the order differ, too: counts of words and of labels, sums of ids.
    """
    draw, known = random.Random(0), words()

    def other(text: str) -> str:
        return " ".join(draw.choices(known, k=len(text.split())))

    first, second = (tuple(map(other, texts)) for texts in (rows.first, rows.second))
    return replace(
        rows,
        first=first,
        second=second,
        labels=tuple(min(i % (labels + 1), labels - 1) for i in range(len(rows.labels))),
    )


def tiny_model(positions: int = POSITIONS, readout: Readout = "linear") -> LoadedModel:
    """Return a model in the form of `forgetfree.models.loading.load_model`, without tasks.

    It is a BERT, without a head or with its LM head; or a GPT-2, where texts are written.
    """
    tokenizer = wordpiece()

    def build() -> nn.Module:
        if readout == "generate":
            tokenizer.eos_token = tokenizer.sep_token
            return GPT2LMHeadModel(gpt2_config(len(tokenizer), positions))
        config = bert_config(len(tokenizer), max_position_embeddings=positions)
        backbone = BertModel(config, add_pooling_layer=False) if readout == "linear" else BertForMaskedLM(config)
        embeddings: Any = backbone.base_model.embeddings
        embeddings.LayerNorm = _Normalized(embeddings.LayerNorm)
        return backbone

    backbone: Any = pre_trained(build)
    tokens = TokenLayout(tokenizer.pad_token_id, tokenizer.mask_token_id, tokenizer.sep_token_id)
    if readout == "generate":
        tokens = TokenLayout(tokenizer.pad_token_id)
        backbone.generation_config = plain_generation(tokenizer, tokens.pad, backbone.config)
    return LoadedModel("tiny", TaskModel(backbone, tokens, readout), tokenizer, readout, fingerprint_of(backbone))


class _Normalized(nn.Module):
    """A LayerNorm followed by a BatchNorm, whose running statistics are buffers that move at every training step."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.batch = nn.BatchNorm1d(HIDDEN, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        normalized: Tensor = self.batch(self.layer(x).flatten(0, 1))
        return normalized.view_as(x)
