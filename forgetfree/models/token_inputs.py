"""The inputs of a language model, computed from the ids of a batch on the device where the batch is made.

On the CPU that costs next to nothing. On a GPU it would take thirty small operations, and some of their values decide the
next operations: for each such value, the processor would wait until the GPU has finished all its work.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        """Return the ids without marks: the first token of a labelled word is stored as its complement."""
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
        is_mask = x.eq(-1 if self.mask is None else self.mask)
        if not bool((is_mask.sum(1) == 1).all()):
            raise ModelError(
                "Every row needs exactly one mask token for the prompt readout, got "
                f"{sorted(set(is_mask.sum(1).tolist()))} of them. Encode with the task's template."
            )
        return torch.argmax(is_mask.long(), dim=1)


@dataclass(frozen=True)
class TokenInputs:
    """A batch as input of a language model.

    Attributes:
        x: the ids, with marks: int64 ``(B, L)``.
        named: the arguments of the model by their names: int64 ``(B, L)`` each, without columns of padding only.
        at: the positions of labels in the flattened batch: int64 ``(n,)``.
        is_full: whether no row is padded.
    """

    x: Tensor
    named: dict[str, Tensor]
    at: Tensor
    is_full: bool

    @property
    def mask(self) -> Tensor:
        """1 at each row's tokens, 0 at its padding: int64 ``(B, L)``."""
        return self.named["attention_mask"]

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.x.device

    def to(self, device: torch.device, *others: Tensor) -> tuple[TokenInputs, list[Tensor]]:
        """Return the batch, and other tensors of integers, on a device: by one copy."""
        x, at, *moved = moved_together([self.x, self.at, *self.named.values(), *others], device)
        count = len(self.named)
        named = dict(zip(self.named, moved[:count], strict=True))
        return TokenInputs(x, named, at, self.is_full), moved[count:]


def moved_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return int64 tensors on a device; they move to another device by one copy, without waiting for it."""
    if all(each.device == device for each in tensors):
        return list(tensors)
    packed = torch.cat([each.reshape(-1) for each in tensors])
    if device.type == "cuda" and packed.device.type == "cpu":
        packed = packed.pin_memory()  # from other memory the copy would wait for the GPU
    pieces = torch.split(packed.to(device, non_blocking=device.type == "cuda"), [each.numel() for each in tensors])
    return [piece.view(each.shape) for piece, each in zip(pieces, tensors, strict=True)]
