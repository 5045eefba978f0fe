"""A backbone and one readout per task: ``forward(x, task_labels)``.

Three readouts (paper, §2 and appendix A):

- ``prompt``: the masked LM's logits of the label words at the mask token, through the frozen LM head;
- ``causal``: the causal LM's logits of the label words after the last token;
- ``linear``: a linear layer per task on the first token's hidden state ([CLS]; the last token's for causal
  models).

``prompt`` and ``causal`` add no tensor. The linear layers belong to their tasks, and so to the ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from forgetfree.errors import TaskError
from forgetfree.models.tokens import TokenLayout
from forgetfree.parameters import ParameterSpace
from forgetfree.seeds import derive_seed

ReadoutKind = Literal["linear", "prompt", "causal"]
READOUTS: tuple[ReadoutKind, ...] = ("linear", "prompt", "causal")


@dataclass(frozen=True)
class TaskHead:
    """What a readout needs to know of a task: name, label count, label-word ids (none for ``linear``)."""

    name: str
    n_labels: int
    label_words: tuple[int, ...] = ()


class TaskModel(nn.Module):
    """Backbone plus readouts. Everything frozen but what `trainable` lists is left to the strategies.

    Args:
        backbone: a Hugging Face model; for ``linear`` without a head, for the others with its LM head.
        tokens: the special ids of its tokenizer.
        readout: which of the three.
        causal: whether ``linear`` must read the last token rather than the first.
        dropout: before the linear layer, as in the backbone's own classification head.
        graftable: regular expression over parameter names; only tensors it is found in are in `space`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        tokens: TokenLayout,
        readout: ReadoutKind,
        *,
        causal: bool = False,
        dropout: float = 0.1,
        graftable: str | None = None,
    ) -> None:
        super().__init__()
        self._graftable = graftable or "."
        self.backbone = backbone
        self.tokens = tokens
        self.readout: ReadoutKind = readout
        self.heads: list[TaskHead] = []
        self.linears = nn.ModuleDict()
        self.dropout = nn.Dropout(dropout)
        self._position = tokens.last if causal or readout == "causal" else lambda x: x.new_zeros(len(x))
        if readout == "prompt":
            self._position = tokens.masked

    def add_task(self, head: TaskHead, seed: int = 0) -> int:
        """Add a task and return its task label: 0 for the first, 1 for the second, and so on.

        The linear layer's weights are drawn by ``seed`` and the task's name, so they do not depend on the
        stream.
        """
        if any(known.name == head.name for known in self.heads):
            raise TaskError(f"The model already reads out task {head.name!r}. Give the task another name.")
        if self.readout == "linear":
            # Its usual first weights would be drawn from the global generator, and so shift every later draw.
            linear = nn.Linear(_hidden_size(self.backbone), head.n_labels, device="meta").to_empty(device="cpu")
            generator = torch.Generator().manual_seed(derive_seed(seed, "readout", head.name))
            nn.init.normal_(linear.weight, std=0.02, generator=generator)
            nn.init.zeros_(linear.bias)
            self.linears[str(len(self.heads))] = linear
        self.heads.append(head)
        return len(self.heads) - 1

    def task_label(self, name: str) -> int:
        """The task label of a name.

        Raises:
            TaskError: no such task.
        """
        for label, head in enumerate(self.heads):
            if head.name == name:
                return label
        known = ", ".join(head.name for head in self.heads)
        raise TaskError(f"The model has no task {name!r}. It reads out: {known or 'none'}.")

    def readout_module(self, task: int) -> nn.Module:
        """The module that task ``task`` owns; without parameters for ``prompt`` and ``causal``."""
        return self.linears[str(task)] if self.readout == "linear" else nn.Module()

    def forward(self, x: Tensor, task_labels: Tensor | int) -> Tensor:
        """Logits of the labels.

        Args:
            x: token ids ``(B, L)``.
            task_labels: one task for all rows, or one a row ``(B,)``.

        Returns:
            ``(B, n)`` with the label count of the task, or the largest among several; labels a row's task
            does not have get the lowest finite logit.
        """
        features = self.features(x)
        if isinstance(task_labels, int):
            return self.read(features, task_labels)
        tasks = sorted(set(task_labels.tolist()))
        if len(tasks) == 1:
            return self.read(features, tasks[0])
        width = max(self._head(task).n_labels for task in tasks)
        logits = features.new_full((len(x), width), torch.finfo(features.dtype).min)
        for task in tasks:
            rows = task_labels == task
            read = self.read(features[rows], task)
            logits[rows, : read.shape[1]] = read.to(logits.dtype)
        return logits

    def features(self, x: Tensor) -> Tensor:
        """What the readouts read: hidden states ``(B, H)``, or vocabulary logits ``(B, V)``."""
        inputs: dict[str, Any] = {"input_ids": x, "attention_mask": self.tokens.attention_mask(x)}
        types = self.tokens.token_types(x)
        if types is not None:
            inputs["token_type_ids"] = types
        rows, position = torch.arange(len(x), device=x.device), self._position(x)
        if self.readout == "linear":
            hidden: Tensor = self.backbone(**inputs).last_hidden_state
            return hidden[rows, position]
        body, head = _body_and_head(self.backbone)
        if head is None:  # an architecture whose head we cannot call by itself: all positions, then one
            logits: Tensor = self.backbone(**inputs).logits
            return logits[rows, position]
        return head(body(**inputs).last_hidden_state[rows, position].unsqueeze(1)).squeeze(1)

    def read(self, features: Tensor, task: int) -> Tensor:
        """Logits ``(B, n)`` of one task from `features`."""
        head = self._head(task)
        if self.readout == "linear":
            logits: Tensor = self.linears[str(task)](self.dropout(features))
            return logits
        return features[:, list(head.label_words)]

    def _head(self, task: int) -> TaskHead:
        if not 0 <= task < len(self.heads):
            raise TaskError(f"The model has no task label {task}; it has {len(self.heads)} tasks.")
        return self.heads[task]

    def space(self) -> ParameterSpace:
        """The backbone's graftable entries."""
        return ParameterSpace.of(self.backbone, include=(self._graftable,))


def _hidden_size(backbone: nn.Module) -> int:
    config: Any = backbone.config
    return int(config.hidden_size)


#: Where the logits are the head's own output. Others scale or cap them (Gemma 2), and so are called as a whole.
_HEADS = {
    "bert": "cls",
    "gpt2": "lm_head",
    "llama": "lm_head",
    "mistral": "lm_head",
    "qwen2": "lm_head",
    "qwen3": "lm_head",
    "roberta": "lm_head",
    "xlm-roberta": "lm_head",
}


def _body_and_head(backbone: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Tensor] | None]:
    """The encoder and its LM head, where the head is one module from hidden states to logits."""
    config: Any = backbone.config
    head = getattr(backbone, _HEADS.get(config.model_type, ""), None)
    return (backbone.base_model, head) if isinstance(head, nn.Module) else (backbone, None)  # type: ignore[return-value]
