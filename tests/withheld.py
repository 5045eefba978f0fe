"""Streams and strategies without the task at inference, for tests of which model answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import small_vision as vision
from compared import everything
from torch import Tensor

from forgetfree import registry
from forgetfree.continual.stream import Stream

MakeStream = Callable[..., Any]
TASKWISE = [name for name in registry.STRATEGIES if registry.strategy(name).taskwise]
INFERENCE = ["last", "router", "lda"]


def kind_of(name: str) -> str:
    """Return the kind of network for a strategy: adapters need linear layers."""
    return "mlp" if "lora" in name else "conv"


def text_stream(tiny_stream: MakeStream, scenario: str) -> Stream:
    stream: Stream = tiny_stream(
        "bert", "linear", scenario=scenario, stream="qnli,sst2" if scenario == "domain" else "qnli,ag_news,sst2"
    )
    return stream


def a_stream(tiny_stream: MakeStream, scenario: str, kind: str) -> Stream:
    return text_stream(tiny_stream, scenario) if kind == "text" else vision.stream(scenario, kind)


def model_of(strategy: Any, task: Any) -> dict[str, Tensor]:
    """Return every tensor of the backbone that belongs to ``task``."""
    with strategy.answering(task):
        return everything(strategy.model.backbone)
