"""Heads of transformers' sequence classifiers, apart from their bodies: one body answers for tasks with a head each.

A head is the classifier itself, in which a stand-in gives hidden states that are there already. So it computes what the
classifier does, to the bit, whatever that is: layers, a pooler of the body, which token is read.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forgetfree.core.readout_model import TaskHead
from forgetfree.errors import ModelError
from forgetfree.models.task_model import TaskModel, TokenLayout


@dataclass(frozen=True)
class HiddenRows:
    """A batch as heads read it.

    Attributes:
        hidden: the body's last hidden states ``(B, L, H)``.
        ids: token ids ``(B, L)``.
        mask: 1 at tokens, 0 at padding ``(B, L)``.
    """

    hidden: Tensor
    ids: Tensor
    mask: Tensor | None

    def __len__(self) -> int:
        return len(self.hidden)

    def __getitem__(self, rows: Any) -> HiddenRows:
        return HiddenRows(self.hidden[rows], self.ids[rows], None if self.mask is None else self.mask[rows])


def make_head(architecture: str, config: Any, labels: int, pad: int | None) -> nn.Module:
    """Return one of transformers' classifiers with a stand-in for its body; its tensors are still empty.

    Args:
        architecture: the classifier's class, such as ``BertForSequenceClassification``.
        config: the configuration of the body.
        labels: how many outputs it has.
        pad: the token that fills short rows; none: there are no such rows.

    Raises:
        ModelError: transformers has no such class, or it is one for other bodies.
    """
    kind, config = classifier_class(architecture, config), copy.deepcopy(config)
    config.num_labels, config.pad_token_id = labels, pad
    with torch.device("meta"):
        network = kind(config)
    setattr(network, network.base_model_prefix, _StandIn(network.base_model))
    head: nn.Module = network.to_empty(device="cpu").eval()
    return head


def read_head(head: Any, rows: HiddenRows) -> Tensor:
    """Return the logits ``(B, n)`` of a head that `make_head` returned."""
    stand_in = head.base_model
    stand_in.hidden = rows.hidden
    try:
        logits: Tensor = head(input_ids=rows.ids, attention_mask=rows.mask).logits
    finally:
        stand_in.hidden = None
    return logits


class _StandIn(nn.Module):
    """Stands for the body in a classifier."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.pooler = getattr(body, "pooler", None)
        self._activation = getattr(body, "pooler_activation", None)  # of ALBERT, whose pooler is a linear layer
        self.hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> _Output:
        hidden, pooled = self.hidden, None
        if self.pooler is not None and hidden is not None:
            pooled = self.pooler(hidden) if self._activation is None else self._activation(self.pooler(hidden[:, 0]))
        return _Output((hidden, pooled))


class _Output(tuple[Any, ...]):
    """The output of a body: hidden states and what its pooler makes of them; nothing else is known."""

    def __getattr__(self, name: str) -> Any:
        return {"last_hidden_state": self[0], "pooler_output": self[1]}.get(name)


def classifier_class(architecture: str, config: Any) -> Any:
    """Return the class of transformers that has this name.

    Raises:
        ModelError: there is none, or it is one for other bodies than that of ``config``.
    """
    import transformers

    kind = getattr(transformers, architecture, None)
    if not architecture.endswith("ForSequenceClassification") or not isinstance(kind, type):
        raise ModelError(
            f"The readout is the head of {architecture!r}, which this version of transformers does not have. Expected a "
            "…ForSequenceClassification."
        )
    if getattr(kind, "config_class", None) is not type(config):
        raise ModelError(
            f"The readout is the head of a {architecture}, and the model is of type {config.model_type!r}. Give the model that "
            "the tasks were trained on."
        )
    return kind


class HeadModel(TaskModel):
    """A body with a head of transformers' own for each task.

    Args:
        backbone: the body.
        tokens: the special ids of its tokenizer.
        architecture: the class that the heads are of.
    """

    def __init__(self, backbone: nn.Module, tokens: TokenLayout, architecture: str) -> None:
        super().__init__(backbone, tokens, "classifier")
        self.architecture = architecture

    def add_task(self, head: TaskHead, seed: int = 0) -> int:
        """Add a task, whose head is empty until its tensors are loaded, and return its task label."""
        label, body = super().add_task(head, seed), next(self.backbone.parameters())
        module = make_head(self.architecture, self.backbone.config, head.n_labels, self.tokens.pad)
        self.linears[self._key(label)] = module.to(body.device, body.dtype)
        return label

    def readout_module(self, task: int) -> nn.Module:
        """Return the task's head."""
        return self.linears[self._key(task)]

    def features(self, x: Tensor) -> Any:
        """Return what heads read: `HiddenRows`."""
        inputs = self.inputs(x)
        hidden = self.backbone(**inputs).last_hidden_state
        return HiddenRows(hidden, inputs["input_ids"], inputs["attention_mask"])

    def read(self, features: Any, task: int) -> Tensor:
        """Return the logits ``(B, n)`` of one task."""
        self._head(task)
        return read_head(self.linears[self._key(task)], features)
