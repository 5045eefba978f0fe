"""A sequence classifier that was fine-tuned elsewhere: a body with its own head."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from forgetfree.core.body import POOLER, body_prefix
from forgetfree.models.task_model import TaskModel
from forgetfree.models.tokens import TokenLayout


class ClassifierModel(TaskModel):
    """A Hugging Face ``…ForSequenceClassification``, read by its own head, which does not change.

    Args:
        backbone: body and head.
        tokens: the special ids of its tokenizer.
        classes: the number of the head's class for each of the task's labels.
        graftable: see `ReadoutModel`.
    """

    def __init__(
        self, backbone: nn.Module, tokens: TokenLayout, classes: Sequence[int], *, graftable: str | None = None
    ) -> None:
        super().__init__(backbone, tokens, "classifier", graftable=graftable)
        self.classes = tuple(classes)
        config: Any = backbone.config
        config.pad_token_id = tokens.pad  # causal ones find a row's last token by it

    def features(self, x: Tensor) -> Tensor:
        """Return the head's logits ``(B, C)``."""
        logits: Tensor = self.backbone(**self.inputs(x)).logits
        return logits

    def read(self, features: Tensor, task: int) -> Tensor:
        """Return the logits ``(B, n)`` in the order of the task's labels."""
        return features[:, list(self.classes)]

    @property
    def architecture(self) -> str:
        """The name of the Hugging Face class."""
        return type(self.backbone).__name__

    def head_tensors(self) -> dict[str, Tensor]:
        """Return copies of the head's tensors, by their names in the backbone: what a pre-trained body lacks."""
        named = self.backbone.state_dict(keep_vars=True)
        return {name: named[name].detach().cpu().clone() for name in head_names(self.backbone)}


def head_names(model: nn.Module) -> list[str]:
    """Return the names of a Hugging Face model's tensors that lie outside its body, and of the body's pooler."""
    prefix = body_prefix(model)
    return [name for name in model.state_dict() if not name.startswith(prefix) or re.search(POOLER, name)]
