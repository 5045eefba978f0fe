"""What follows from token ids alone: attention mask, token types, mask position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forgetfree.errors import ModelError


@dataclass(frozen=True)
class TokenLayout:
    """The special ids of one tokenizer.

    Attributes:
        pad: the token that fills short rows on the right. It may also be a real token (GPT-2 pads with end-of-text).
        mask: the mask token, or ``None``.
        separator: the token that ends the first text, for models with token types; else ``None``.
    """

    pad: int
    mask: int | None = None
    separator: int | None = None

    def ids(self, x: Tensor) -> Tensor:
        """Return the ids without marks: the first token of a labelled word stands as its complement."""
        return torch.where(x < 0, ~x, x)

    def attention_mask(self, x: Tensor) -> Tensor:
        """Return 1 from each row's first token to its last that is not padding, else 0: int64 ``(B, L)``."""
        real = x.ne(self.pad).long()
        real[:, :1] = 1
        return real.flip(1).cummax(1).values.flip(1)

    def token_types(self, x: Tensor) -> Tensor | None:
        """Return 0 for the first text and its separator, 1 for the second: ``(B, L)``, or ``None`` without types."""
        if self.separator is None:
            return None
        separators = (x == self.separator).long()
        before = separators.cumsum(1) - separators
        return (before == 1).long() * self.attention_mask(x)

    def last(self, x: Tensor) -> Tensor:
        """Return each row's last position that is not padding: int64 ``(B,)``."""
        return self.attention_mask(x).sum(1) - 1

    def masked(self, x: Tensor) -> Tensor:
        """Return each row's mask position: int64 ``(B,)``.

        Raises:
            ModelError: a row has none, or more than one.
        """
        found = x.eq(-1 if self.mask is None else self.mask)
        if not bool((found.sum(1) == 1).all()):
            raise ModelError(
                "Every row needs exactly one mask token for the prompt readout, got "
                f"{sorted(set(found.sum(1).tolist()))} of them. Encode with the task's template."
            )
        return torch.argmax(found.long(), dim=1)
