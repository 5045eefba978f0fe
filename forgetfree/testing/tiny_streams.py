"""Streams of tiny tasks with a tiny model, built in memory."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, wraps
from typing import Any, Literal, ParamSpec

from torch import Tensor, nn
from transformers import BertForMaskedLM, BertModel

from forgetfree.continual.streams import Stream, make_stream
from forgetfree.core.body import fingerprint_of
from forgetfree.data.rows import Rows, TaskRows
from forgetfree.models.loading import LoadedModel
from forgetfree.models.task_model import TaskModel, TokenLayout
from forgetfree.tasks import DEFAULT_TEMPLATE, Scenario, TaskDefinition
from forgetfree.testing.tiny import (
    HIDDEN,
    LABELS,
    POSITIONS,
    PROMPT_WORDS,
    SIZES,
    bert_config,
    pre_trained,
    tiny_rows,
    wordpiece,
    words,
)

Readout = Literal["linear", "prompt"]
P = ParamSpec("P")


def copies(make: Callable[P, Stream]) -> Callable[P, Stream]:
    """``make``, called once for the same arguments: a copy of a stream takes a third of the time that a new one takes."""
    made = cache(make)

    @wraps(make)
    def copied(*args: P.args, **kwargs: P.kwargs) -> Stream:
        return copy.deepcopy(made(*args, **kwargs))  # type: ignore[arg-type]  # they can be hashed

    return copied


def tiny_stream(
    tasks: Sequence[str] = ("qnli", "ag_news"),
    *,
    scenario: Scenario = "task",
    readout: Readout = "linear",
    seed: int = 0,
    shots: int | None = None,
) -> Stream:
    """Return a fresh stream of tiny tasks with a fresh tiny BERT, the same at every call.

    Its model has two layers of width 16, and a BatchNorm, whose buffers move in training.

    Args:
        tasks: of ``qnli`` (pairs, two labels), ``ag_news`` (four labels), ``sst2`` (two labels).
        scenario: what is known at inference.
        readout: ``linear``: a layer per task; ``prompt``: the label words' logits at a mask token.
        seed: of the sample and of the readouts' first weights.
        shots: training rows per label; default: all 24 rows.
    """
    rows = [tiny_task(task) for task in tasks]
    return make_stream(",".join(tasks), rows, tiny_model(readout=readout), scenario=scenario, seed=seed, shots=shots)


def tiny_task(name: str, labels: int | None = None) -> TaskRows:
    """Return the rows of one tiny task, or of its first ``labels`` labels alone, if that is given."""
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


def other_rows(rows: Rows, labels: int) -> Rows:
    """As many rows, each as long as before, of other words and under others of ``labels`` labels, the last twice as often.

    So that what takes no notice of the order differs, too: counts of words and of labels, sums of ids.
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
    """Return a BERT as `forgetfree.models.loading.load_model` gives it, without a head or with its LM head; no tasks yet."""
    tokenizer = wordpiece()

    def build() -> nn.Module:
        config = bert_config(len(tokenizer), max_position_embeddings=positions)
        backbone = BertModel(config, add_pooling_layer=False) if readout == "linear" else BertForMaskedLM(config)
        embeddings: Any = backbone.base_model.embeddings
        embeddings.LayerNorm = _Normalized(embeddings.LayerNorm)
        return backbone

    backbone = pre_trained(build)
    tokens = TokenLayout(tokenizer.pad_token_id, tokenizer.mask_token_id, tokenizer.sep_token_id)
    return LoadedModel("tiny", TaskModel(backbone, tokens, readout), tokenizer, readout, fingerprint_of(backbone))


class _Normalized(nn.Module):
    """A LayerNorm and after it a BatchNorm: its running statistics are buffers, and move at every training step."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.batch = nn.BatchNorm1d(HIDDEN, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        normalized: Tensor = self.batch(self.layer(x).flatten(0, 1))
        return normalized.view_as(x)
