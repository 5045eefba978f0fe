"""A model's tensors beside flat vectors of the same entries, in stretches that the cache of a processor holds.

What a step computes of them it computes stretch by stretch, so it reads memory once, however many operations there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn

from forgetfree.core.parameters import ParameterSpace


def stretch_of(device: torch.device) -> int:
    """Return how many entries of long vectors to work on at a time: what the cache of a processor's core holds.

    An accelerator is fastest with whole vectors.
    """
    return 2**17 if device.type == "cpu" else 2**62


class Stretches:
    """Views of tensors and of vectors, all cut at the same entries.

    Args:
        tensors: the model's, in the order of the space.
        space: its parameter space of N entries.
        vectors: ``(N,)`` each.
    """

    def __init__(self, tensors: Sequence[nn.Parameter], space: ParameterSpace, *vectors: Tensor) -> None:
        self._tensors, self._space, self._vectors = tensors, space, vectors
        self._stretches: list[list[tuple[Tensor, ...]]] = []
        self._where: list[tuple[int, tuple[int, ...]]] = []

    @property
    def longest(self) -> int:
        """The most entries of a stretch."""
        self._cut_()
        return max(views[0].numel() for stretches in self._stretches for views in stretches)

    def views(self, *, gradients: bool) -> Iterator[tuple[tuple[Tensor, ...], Tensor | None]]:
        """Yield for each stretch the views of the tensor and of the vectors, and that of the tensor's gradient.

        Args:
            gradients: else there are none. A tensor's own may be missing, too.
        """
        self._cut_()
        for tensor, stretches in zip(self._tensors, self._stretches, strict=True):
            gradient = tensor.grad if gradients else None
            yield from zip_longest(stretches, () if gradient is None else _cut(gradient, tensor))

    def _cut_(self) -> None:
        """Cut all of them; again if a tensor got other storage, as `forgetfree.ledger.flat.FlatTensors` gives it."""
        where = [(tensor.data_ptr(), tensor.stride()) for tensor in self._tensors]
        if where == self._where:
            return
        tensors = [tensor.detach() for tensor in self._tensors]
        views = zip(tensors, *map(self._space.views, self._vectors), strict=True)
        self._stretches = [list(zip(*(_cut(view, like[0]) for view in like), strict=True)) for like in views]
        self._where = where


def _cut(tensor: Tensor, like: Tensor) -> Sequence[Tensor]:
    """Return views of a tensor that the cache holds; the whole one, where those of the tensor it is ``like`` have gaps."""
    return torch.split(tensor.reshape(-1), stretch_of(tensor.device)) if like.is_contiguous() else (tensor,)
