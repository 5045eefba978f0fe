"""A language model with readouts by task.

Four readouts (paper, §3; what is frozen: A.1; prompts: A.2):

- ``prompt``: the masked LM's logits of the label words at the mask token, through the frozen LM head;
- ``causal``: the causal LM's logits of the label words after the last token;
- ``linear``: a linear layer per task on the first token's hidden state ([CLS]; the last token's for causal models and
  encoder-decoders: BART's decoder's, as in its own classifier, and T5's encoder's); where words are labelled, on that of
  each word's first token;
- ``mean``: the same layer on the mean of all tokens' hidden states, special ones included.

A model that was fine-tuned elsewhere may have one more, its own head: `forgetfree.models.classifier`.

``prompt`` and ``causal`` add no tensor. The linear layers belong to their tasks, and so to the ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from forgetfree.core.body import body_of
from forgetfree.core.parameters import at_least_float32
from forgetfree.core.readout_model import ReadoutKind, ReadoutModel
from forgetfree.models.tokens import TokenLayout


class TaskModel(ReadoutModel):
    """A Hugging Face model with readouts: a `ReadoutModel` of token ids.

    Args:
        backbone: a Hugging Face model; for ``linear`` without a head, for the others with its LM head.
        tokens: the special ids of its tokenizer.
        readout: one of the four.
        read_last: whether ``linear`` reads the last token rather than the first.
        dropout: before the linear layer, as in the backbone's own classification head.
        graftable, shared_readout: see `ReadoutModel`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        tokens: TokenLayout,
        readout: ReadoutKind,
        *,
        read_last: bool = False,
        dropout: float = 0.1,
        graftable: str | None = None,
        shared_readout: bool = False,
    ) -> None:
        super().__init__(backbone, readout, dropout=dropout, graftable=graftable, shared_readout=shared_readout)
        self.tokens, self.read_last = tokens, read_last
        self._position = tokens.last if read_last or readout == "causal" else lambda x: x.new_zeros(len(x))
        if readout == "prompt":
            self._position = tokens.masked

    @property
    def hidden_size(self) -> int:
        """The width of the hidden states."""
        config: Any = self.backbone.config
        return int(getattr(config, "word_embed_proj_dim", config.hidden_size))  # OPT's last projection

    def inputs(self, x: Tensor) -> dict[str, Tensor]:
        """Return the arguments for the backbone."""
        mask = self.tokens.attention_mask(x)
        longest = int(mask.sum(1).max())  # padding that a data loader added costs nothing
        x, mask = self.tokens.ids(x[:, :longest]), mask[:, :longest]
        inputs = {"input_ids": x, "attention_mask": mask}
        types = self.tokens.token_types(x)
        if types is not None:
            inputs["token_type_ids"] = types
        return inputs

    def counts(self, x: Tensor) -> Tensor:
        """Return the number of labels of each row ``(B,)``: of its words where they are marked, else 1."""
        return (x < 0).sum(1).clamp(min=1)

    def _read_at(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return row and position of each label ``(n,)``: at the marked words of a row, or else at its one position."""
        words = x < 0
        words[torch.arange(len(x), device=x.device), self._position(ids)] |= ~words.any(1)
        rows, position = words.nonzero(as_tuple=True)
        return rows, position

    def pooled(self, x: Tensor, layer: int | None = None) -> Tensor:
        """Return the mean over a row's tokens of one hidden layer, 0 for the embeddings: ``(B, H)``."""
        inputs: dict[str, Any] = self.inputs(x)
        body: Any = body_of(self)  # nothing asks for the LM head, or for a decoder above an encoder
        read = body.get_encoder() if body.config.is_encoder_decoder else body
        states = read(**inputs, output_hidden_states=True).hidden_states
        return mean_of_tokens(states[len(states) // 2 if layer is None else layer], inputs["attention_mask"])

    def features(self, x: Tensor) -> Tensor:
        """Return what the readouts read: hidden states ``(n, H)``, or vocabulary logits ``(n, V)``."""
        inputs = self.inputs(x)
        if self.readout == "mean":
            return mean_of_tokens(self.backbone(**inputs).last_hidden_state, inputs["attention_mask"])
        rows, position = self._read_at(x[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])
        if self.readout == "linear":
            hidden: Tensor = self.backbone(**inputs).last_hidden_state
            return hidden[rows, position]
        body, head = _body_and_head(self.backbone)
        if head is None:  # the head cannot be called alone: compute all positions, then take one
            logits: Tensor = self.backbone(**inputs).logits
            return logits[rows, position]
        return head(body(**inputs).last_hidden_state[rows, position].unsqueeze(1)).squeeze(1)


def mean_of_tokens(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the hidden states ``(B, L, H)`` of each row's tokens, without padding: ``(B, H)``."""
    wide = hidden.to(at_least_float32(hidden.dtype))  # the sum of many tokens may not fit into half precision
    weights = mask.to(wide.dtype).unsqueeze(-1)
    return ((wide * weights).sum(1) / weights.sum(1)).to(hidden.dtype)


#: Heads whose output is the logits. Other models scale or cap them (Gemma 2), and so are called as a whole.
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
    """Return the encoder, and its LM head if that is one module from hidden states to logits."""
    config: Any = backbone.config
    head = getattr(backbone, _HEADS.get(config.model_type, ""), None)
    return (backbone.base_model, head) if isinstance(head, nn.Module) else (backbone, None)  # type: ignore[return-value]
