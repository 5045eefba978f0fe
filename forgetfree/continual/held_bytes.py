"""How many bytes an object of Avalanche's holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from avalanche.benchmarks.utils import AvalancheDataset
from avalanche.training.templates.base import BaseTemplate
from torch import Tensor, nn

from forgetfree.models.task_model import TokenLayout

#: The size of a label, a task label or a token id in a row.
_INTEGER_BYTES = 8


def held_bytes(holder: Any, tokens: TokenLayout | None = None) -> int:
    """Count the bytes of all tensors, modules and rows of data that an object of Avalanche's holds, each once.

    Rows are counted in every data set that has them. With ``tokens``, the padding that brings a data set's rows to one
    length does not count; tensors count as they are.
    """
    return _held(holder, tokens, set())


def _held(value: Any, tokens: TokenLayout | None, seen: set[int]) -> int:
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, AvalancheDataset):
        return sum(
            _row_part(part, None if place else tokens)  # only what is read has padding
            for row in range(len(value))
            for place, part in enumerate(value[row])
        )
    if isinstance(value, nn.Module):
        return sum(_held(tensor, tokens, seen) for tensor in value.state_dict(keep_vars=True).values())
    if isinstance(value, Mapping):
        return sum(_held(each, tokens, seen) for each in value.values())
    if isinstance(value, (list, tuple, set)):
        return sum(_held(each, tokens, seen) for each in value)
    # Buffers, tensors in Avalanche's own wrapping, and what inherits from them; but no strategy.
    if _is_avalanches(type(value)) and not isinstance(value, BaseTemplate):
        return _held(vars(value), tokens, seen)
    return 0


def _is_avalanches(kind: type) -> bool:
    return any(cls.__module__.startswith("avalanche.training") for cls in kind.__mro__)


def _row_part(part: Any, tokens: TokenLayout | None) -> int:
    if not isinstance(part, Tensor):
        return _INTEGER_BYTES
    if tokens is not None and part.dim() == 1 and not part.is_floating_point():
        return int(tokens.attention_mask(part[None]).sum()) * part.element_size()
    return part.numel() * part.element_size()
