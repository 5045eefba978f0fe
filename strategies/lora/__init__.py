"""LoRA: the file of adapters, what strategies by adapters share, and the two strategies; adapters: models/lora_adapters.py."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "LoRA":  # the strategies need Avalanche; what answers from their file does not
        from forgetfree.strategies.lora.lora import LoRA

        return LoRA
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
