"""A readout: from the last hidden states of a body to the logits of one task, whatever computes the states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from forgetfree.core.parameters import at_least_float32

#: The hidden states that a linear layer reads: a row's ``first``, its ``last``, the ``mean`` of all, or ``all`` of them.
Pooling = Literal["first", "last", "mean", "all"]


@dataclass(frozen=True)
class HiddenRows:
    """A batch as the input of a classification head of transformers.

    Attributes:
        hidden: the body's last hidden states ``(B, L, H)``.
        ids: token ids ``(B, L)``.
        mask: 1 at tokens, 0 at padding ``(B, L)``; ``None``: there is no padding.
    """

    hidden: Tensor
    ids: Tensor | None
    mask: Tensor | None

    def __len__(self) -> int:
        return len(self.hidden)

    def __getitem__(self, rows: Any) -> HiddenRows:
        return HiddenRows(*(None if each is None else each[rows] for each in (self.hidden, self.ids, self.mask)))  # type: ignore[arg-type]


class Readout(nn.Module):
    """Computes the logits of one task. Its tensors belong to `layer`; a ledger keeps them in the task's record.

    >>> readout = Readout("mood", 2, nn.Linear(8, 2), pooling="last")
    >>> readout.logits(torch.zeros(3, 5, 8)).shape
    torch.Size([3, 2])

    Args:
        task: its name.
        n_labels: the number of its logits.
        layer: a linear layer on pooled states; or a classifier of transformers with a stand-in for its body, see
            `forgetfree.models.heads.make_head`. ``None``: the backbone's LM head has computed the logits of the vocabulary.
        columns: the outputs of the layer, or the words of the vocabulary, that are the task's labels, in order; empty: all.
        pooling: the states that a linear layer reads.
        dropout: the dropout before a linear layer, in training.
        yes_or_no: whether each label is a separate yes-or-no question, so that a row has any number of labels. The logit z
            of a label is then a line (0, z), for no and yes: the cross-entropy of the lines is the binary cross-entropy of
            the labels.
    """

    def __init__(
        self,
        task: str,
        n_labels: int,
        layer: nn.Module | None = None,
        columns: Sequence[int] = (),
        pooling: Pooling = "first",
        dropout: float = 0.0,
        yes_or_no: bool = False,
    ) -> None:
        super().__init__()
        self.task, self.n_labels, self.columns, self.pooling = task, n_labels, tuple(columns), pooling
        self.layer = nn.Module() if layer is None else layer
        self.dropout = nn.Dropout(dropout)
        self.yes_or_no = yes_or_no

    @property
    def lines(self) -> int:
        """The number of lines of logits at each position."""
        return self.n_labels if self.yes_or_no else 1

    def in_lines(self, logits: Tensor) -> Tensor:
        """Return logits ``(n, n_labels)`` as the lines that labels are compared with, see `yes_or_no`."""
        if not self.yes_or_no:
            return logits
        return torch.stack([torch.zeros_like(logits), logits], -1).flatten(0, 1)

    def misfit(self, tensors: Mapping[str, Tensor]) -> str:
        """Return how names and shapes of tensors differ from the layer's; an empty text if they fit."""
        own = self.layer.state_dict()
        expected, got = ({name: tuple(each.shape) for name, each in named.items()} for named in (own, tensors))
        return "" if expected == got else f"expected {expected}, got {got}"

    def logits(self, hidden: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the logits ``(B, n)``, or ``(B, L, n)`` with the pooling ``all``.

        Args:
            hidden: the body's last hidden states ``(B, L, H)``.
            ids: token ids ``(B, L)``, for heads of transformers.
            mask: 1 at tokens, 0 at padding ``(B, L)``, on either side; default: there is no padding.
        """
        linear = isinstance(self.layer, nn.Linear)
        logits: Tensor = self(pooled(hidden, mask, self.pooling) if linear else HiddenRows(hidden, ids, mask))
        return logits

    def forward(self, features: Any) -> Tensor:
        """Return the logits ``(n, n_labels)`` of pooled states ``(n, H)``, `HiddenRows`, or vocabulary logits ``(n, V)``."""
        logits: Tensor = features
        if isinstance(self.layer, nn.Linear):
            logits = self.layer(self.dropout(features).to(self.layer.weight.dtype))  # a backbone may be narrower
        elif isinstance(features, HiddenRows):
            rows = {"input_ids": features.ids, "attention_mask": features.mask, "inputs_embeds": features.hidden}
            logits = self.layer(**rows).logits
        return logits[:, list(self.columns)] if self.columns else logits


def empty_linear(width: int, labels: int) -> nn.Linear:
    """Return a linear layer with uninitialised weights: random ones would shift every later random number."""
    return nn.Linear(width, labels, device="meta").to_empty(device="cpu")


def pooled(hidden: Tensor, mask: Tensor | None, pooling: Pooling) -> Tensor:
    """Return the states that a linear layer reads, ``(B, H)`` or ``(B, L, H)``; arguments as for `Readout.logits`."""
    if pooling == "all":
        return hidden
    if mask is None:
        mask = torch.ones(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    if pooling == "mean":
        return mean_of_tokens(hidden, mask)
    first, last = mask.long().argmax(1), mask.shape[1] - 1 - mask.long().flip(1).argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), last if pooling == "last" else first]


def mean_of_tokens(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the hidden states ``(B, L, H)`` of each row's tokens, without padding: ``(B, H)``."""
    wide = hidden.to(at_least_float32(hidden.dtype))  # the sum of many tokens may not fit into half precision
    weights = mask.to(wide.dtype).unsqueeze(-1)
    return ((wide * weights).sum(1) / weights.sum(1)).to(hidden.dtype)
