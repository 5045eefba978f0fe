"""Faults are collected and reported together."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from forgetfree.errors import ConformanceError

#: Libraries that strategies call.
_LIBRARIES = {"torch", "transformers", "avalanche", "peft", "numpy"}


class Faults:
    """What was found wrong so far."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._cause: Exception | None = None

    def add(self, fault: str) -> None:
        """Add a fault, once even where it is found in several places."""
        if fault not in self.messages:
            self.messages.append(fault)

    @contextmanager
    def catching(self, what: str, remedy: str) -> Iterator[None]:
        """Turn an error that is raised inside into a fault of ``what``."""
        try:
            yield
        except Exception as error:
            self._cause = self._cause or error
            frames = traceback.extract_tb(error.__traceback__)
            # The author's own line, where there is one: the last that is not in a library that strategies call.
            frame = next(
                (frame for frame in reversed(frames) if not _LIBRARIES & {*Path(frame.filename).parts}), frames[-1]
            )
            where = f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}"
            self.add(f"{what}: expected no error, got {type(error).__name__}: {error} ({where}). {remedy}")

    def raise_any(self, subject: str) -> None:
        """Raise ``ConformanceError`` with all of them, if there are any."""
        if self.messages:
            raise ConformanceError(subject, self.messages) from self._cause


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every tensor of a model, buffers included."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Return the names whose tensors differ by a bit, or that only one of the two has."""
    return [
        name
        for name in dict.fromkeys([*one, *other])
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]
