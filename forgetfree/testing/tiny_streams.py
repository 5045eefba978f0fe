"""Streams of tiny tasks with a tiny model, built in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import BertModel

from forgetfree.data.rows import Rows, TaskRows
from forgetfree.models.loading import LoadedModel, fingerprint_of
from forgetfree.models.task_model import TaskModel
from forgetfree.models.tokens import TokenLayout
from forgetfree.streams import Stream, make_stream
from forgetfree.tasks import Scenario, TaskDefinition
from forgetfree.testing.tiny import HIDDEN, LABELS, POSITIONS, SIZES, bert_config, pre_trained, tiny_rows, wordpiece


def tiny_stream(
    tasks: Sequence[str] = ("qnli", "ag_news"), *, scenario: Scenario = "task", seed: int = 0, shots: int | None = None
) -> Stream:
    """A fresh stream of tiny tasks with a fresh tiny BERT, the same at every call.

    Its model has two layers of width 16, a linear readout per task, and a BatchNorm, whose buffers move in training.

    Args:
        tasks: of ``qnli`` (pairs, two labels), ``ag_news`` (four labels), ``sst2`` (two labels).
        scenario: what is known at inference.
        seed: of the sample and of the readouts' first weights.
        shots: training rows per label; default: all 24 rows.
    """
    return make_stream(
        ",".join(tasks), [tiny_task(t) for t in tasks], tiny_model(), scenario=scenario, seed=seed, shots=shots
    )


def tiny_task(name: str) -> TaskRows:
    """The rows of one tiny task."""
    pair = name == "qnli"
    splits = {}
    for split, rows in tiny_rows(name, **SIZES).items():
        first = tuple(row["text_a" if pair else "text"] for row in rows)
        second = tuple(row["text_b"] for row in rows) if pair else ()
        splits[split] = Rows(first, second, tuple(row["label"] for row in rows))
    task = TaskDefinition(name, "pair" if pair else "single", tuple(LABELS[name]))
    return TaskRows(task, splits["train"], splits["validation"], splits["test"])


def tiny_model(positions: int = POSITIONS) -> LoadedModel:
    """A BERT with a linear readout, as `forgetfree.models.loading.load_model` gives it; no tasks yet."""
    tokenizer = wordpiece()

    def build() -> nn.Module:
        backbone = BertModel(bert_config(len(tokenizer), max_position_embeddings=positions), add_pooling_layer=False)
        embeddings: Any = backbone.embeddings
        embeddings.LayerNorm = _Normalized(embeddings.LayerNorm)
        return backbone

    backbone = pre_trained(build)
    tokens = TokenLayout(tokenizer.pad_token_id, tokenizer.mask_token_id, tokenizer.sep_token_id)
    return LoadedModel("tiny", TaskModel(backbone, tokens, "linear"), tokenizer, "linear", fingerprint_of(backbone))


class _Normalized(nn.Module):
    """A LayerNorm and after it a BatchNorm: its running statistics are buffers, and move at every training step."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.batch = nn.BatchNorm1d(HIDDEN, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        normalized: Tensor = self.batch(self.layer(x).flatten(0, 1))
        return normalized.view_as(x)
