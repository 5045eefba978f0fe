"""Where tensors are computed."""

from __future__ import annotations

import torch

from forgetfree.errors import UnknownNameError, UsageError


def find_device(name: str) -> str:
    """Return ``cpu`` or ``cuda`` for ``auto``, ``cpu`` or ``cuda``.

    Raises:
        UsageError: there is no such device.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UnknownNameError("device", name, ("auto", "cpu", "cuda"))
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda is asked for, and torch finds no CUDA device. Use --device auto or cpu.")
    return name
