"""Models with a readout per task: a language model (`TaskModel`), or any network that ends in a linear layer (`ModuleModel`).

Five readouts of language models (paper, §3; frozen parts: A.1; prompts: A.2):

- ``prompt``: the masked LM's logits of the label words at the mask token, through the frozen LM head;
- ``causal``: the causal LM's logits of the label words after the last token;
- ``generate``: the logits of all tokens, from a causal LM or the decoder of an encoder-decoder, at the marked positions of a
  row: see `forgetfree.data.prompts`. It writes texts, and reads labels like ``causal``;
- ``linear``: a linear layer per task on the first token's hidden state ([CLS]); for causal models and encoder-decoders, on the
  last token's (BART: in the decoder, as in its own classifier; T5: in the encoder); where words are labelled, on each word's
  first token's;
- ``mean``: the same layer on the mean of all tokens' hidden states, special ones included.

A classifier that was trained elsewhere has one more, ``classifier``: its own head, see `forgetfree.models.heads.Head`. The
other inputs of a model, such as the attention mask, are computed from token ids: see `forgetfree.models.token_inputs`.

``prompt``, ``causal`` and ``generate`` add no tensor. Linear layers and heads belong to their tasks, and so to the ledger.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forgetfree.core.families import LM_HEADS, attention_of, hidden_size_of, positions_of
from forgetfree.core.parameters import ParameterSpace, at_least_float32, load_tensors_
from forgetfree.core.readout import HiddenRows, Pooling, mean_of_tokens
from forgetfree.core.readout_model import BY_WORDS, ReadoutKind, ReadoutModel, body_of
from forgetfree.core.trained import Batch
from forgetfree.errors import ModelError
from forgetfree.models.token_inputs import TokenInputs, TokenLayout, moved_together

if TYPE_CHECKING:
    from forgetfree.models.heads import Head

#: Tokens per row for timing passes: enough to keep the device busy, on a CPU and elsewhere.
_EXAMPLE, _LONG_EXAMPLE = 32, 256


class TaskModel(ReadoutModel):
    """A Hugging Face model with readouts: a `ReadoutModel` of token ids.

    Args:
        backbone: a Hugging Face model; for ``linear`` without a head, for the others with its LM head.
        tokens: the special ids of its tokenizer.
        readout: one of the six.
        pooling: the states that linear layers read.
        head: for ``classifier``: the classifier of the tasks' heads.
        dropout: the dropout before the linear layer, as in the backbone's own classification head.
        graftable, shared_readout: see `ReadoutModel`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        tokens: TokenLayout,
        readout: ReadoutKind,
        *,
        pooling: Pooling = "first",
        head: Head | None = None,
        dropout: float = 0.1,
        graftable: str | None = None,
        shared_readout: bool = False,
    ) -> None:
        super().__init__(backbone, readout, dropout=dropout, graftable=graftable, shared_readout=shared_readout)
        self.tokens, self.pooling, self.head = tokens, pooling, head
        self.architecture = head.architecture if head else ""
        last = pooling == "last" or readout in ("causal", "generate")
        self._position = tokens.last if last else lambda x: x.new_zeros(len(x))
        if readout == "prompt":
            self._position = tokens.masked
        self.writes_apart = readout == "generate" and bool(getattr(backbone.config, "is_encoder_decoder", False))

    @property
    def hidden_size(self) -> int:
        """The width of the hidden states."""
        return hidden_size_of(self.backbone.config)

    def make_layer(self, name: str, n_labels: int, seed: int) -> nn.Module:
        """Return the untrained layer of a task's readout; for ``classifier``, the head, with its tensors if it has any."""
        if self.head is None:
            return super().make_layer(name, n_labels, seed)
        from forgetfree.models.heads import make_head

        layer = make_head(self.head.architecture, self.backbone.config, n_labels, self.tokens.pad)
        if self.head.tensors:
            load_tensors_(layer, self.head.tensors)
        return layer.to(next(self.backbone.parameters()).dtype)

    def inputs(self, x: Tensor) -> dict[str, Tensor]:
        """Return the arguments for the backbone, on the device of ``x``."""
        mask = self.tokens.attention_mask(x)
        longest = int(mask.sum(1).max())  # padding that a data loader added costs nothing
        x, mask = self.tokens.ids(x[:, :longest]), mask[:, :longest]
        inputs = {"input_ids": x, "attention_mask": mask}
        types = self.tokens.token_types(x)
        if types is not None:
            inputs["token_type_ids"] = types
        return inputs

    def prepared(self, x: Tensor | TokenInputs) -> TokenInputs:
        """Return the model's inputs for a batch, on the model's device."""
        return x if isinstance(x, TokenInputs) else self._prepared(x).to(self.device)[0]

    def on_device(self, batch: Batch) -> tuple[TokenInputs, Tensor, Tensor]:
        """Return a batch ``(x, y, t)`` on the model's device, by one copy; ``t`` stays, because the host reads its values."""
        x, y, t = batch
        if y.dtype != x.dtype or y.device != x.device:  # from a plugin
            return self.prepared(x), y.to(self.device), t
        inputs, (labels,) = self._prepared(x).to(self.device, y)
        return inputs, labels, t

    def _prepared(self, x: Tensor) -> TokenInputs:
        """Return the model's inputs for a batch, on the batch's device."""
        if self.writes_apart:
            return self._decoded(x)
        inputs = self._unlabelled(x)
        return replace(inputs, at=self._read_at(x[:, : inputs.mask.shape[1]], inputs.named["input_ids"]))

    def _unlabelled(self, x: Tensor) -> TokenInputs:
        """Return the model's inputs without the positions of labels."""
        named = self.inputs(x)
        return TokenInputs(x, named, x.new_empty(0), bool(named["attention_mask"].all()))

    def _arguments(self, inputs: TokenInputs) -> dict[str, Any]:
        """Return the arguments for the backbone, with a mask in a form that transformers need not check.

        Given a mask ``(B, L)``, transformers checks whether any token is masked, to leave the mask out if none is.
        """
        config: Any = self.backbone.config
        attention, length = attention_of(config), inputs.mask.shape[1]
        mask: Tensor | None = inputs.mask
        if attention == "bidirectional":
            mask = None if inputs.is_full else inputs.mask.bool()[:, None, None, :].expand(-1, 1, length, -1)
        elif attention == "causal" and inputs.device.type != "cpu":
            mask = None
            if not (inputs.is_full and config.use_cache):  # without a cache transformers would read the positions
                # No token attends to the padding on the right.
                mask = torch.ones(length, length, dtype=torch.bool, device=inputs.device).tril_()[None, None]
        return inputs.named | {"attention_mask": mask}

    def example(self, rows: int) -> Tensor:
        """Return rows of random tokens, of a length that suits the device: int64 ``(rows, L)``."""
        config: Any = self.backbone.config
        length = min(_EXAMPLE if self.device.type == "cpu" else _LONG_EXAMPLE, positions_of(self.backbone))
        words = getattr(config, "vocab_size", None) or 128  # CANINE reads characters, of which there are more
        return torch.randint(words, (rows, length), generator=torch.Generator().manual_seed(0), device="cpu")

    def counts(self, x: Tensor) -> Tensor:
        """Return the number of labels of each row ``(B,)``: the number of its marked words, or 1 if there are none."""
        return (x < 0).sum(1).clamp(min=1)

    def _read_at(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the positions of labels in the flattened batch ``(n,)``: marked words, or else a row's one position."""
        words = x < 0
        words[torch.arange(len(x), device=x.device), self._position(ids)] |= ~words.any(1)
        return words.flatten().nonzero().squeeze(1)

    def pooled(self, x: Tensor | TokenInputs, layer: int | None = None) -> Tensor:
        """Return the mean over a row's tokens of one hidden layer, 0 for the embeddings: ``(B, H)``."""
        marked = x.x if isinstance(x, TokenInputs) else x
        if self.readout in BY_WORDS and bool((marked < 0).any()):  # only the prompt shows a row's content
            from forgetfree.data.prompts import prompt_of

            lengths = self.tokens.attention_mask(marked).sum(1).tolist()
            x, _ = self._padded([prompt_of(row[:length]).tolist() for row, length in zip(marked, lengths, strict=True)])
        body: Any = body_of(self)  # needs neither the LM head nor a decoder above an encoder
        read = body.get_encoder() if body.config.is_encoder_decoder else body
        inputs = x if isinstance(x, TokenInputs) else self._unlabelled(x).to(self.device)[0]
        states = read(**self._arguments(inputs), output_hidden_states=True).hidden_states
        return mean_of_tokens(states[len(states) // 2 if layer is None else layer], inputs.mask)

    def features_and_mean(self, x: Tensor | TokenInputs) -> Tensor:
        """Return both from one pass, if one layer has them."""
        config: Any = self.backbone.config
        if self.readout != "linear" or config.is_encoder_decoder:
            return super().features_and_mean(x)
        inputs = self.prepared(x)
        hidden: Tensor = self.backbone(**self._arguments(inputs)).last_hidden_state
        return torch.stack([_read(hidden, inputs), mean_of_tokens(hidden, inputs.mask)], 1)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.parameters()).device

    def most_after(self, prompt: Sequence[int]) -> int:
        """Return the most tokens that may be written after a prompt; an encoder-decoder's decoder begins with its own token."""
        return positions_of(self.backbone) - (1 if self.writes_apart else len(prompt))

    def to_continue(
        self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], length: int | None = None
    ) -> dict[str, Tensor]:
        """Return the arguments of transformers' ``generate``: prompts, with the texts that were written so far.

        An encoder-decoder reads the prompts padded on the right, and its decoder continues the texts, which have one length:
        BART's decoder would count padding as positions. Any other model reads both as one row, padded on the left.

        Args:
            rows: prompts and texts.
            length: the length to which prompts are padded; default: the longest row's.
        """
        if self.writes_apart:
            prompts = self._padded([prompt for prompt, _ in rows], self.device, length=length)
            texts = self._padded([[self._decoder_start, *text] for _, text in rows], self.device)
            return self._by_name(prompts, texts)
        ids, mask = self._padded([[*prompt, *text] for prompt, text in rows], self.device, length=length, left=True)
        return {"input_ids": ids, "attention_mask": mask}

    @staticmethod
    def _by_name(prompts: tuple[Tensor, Tensor], texts: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        named = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
        return dict(zip(named, (*prompts, *texts), strict=True))

    @property
    def _decoder_start(self) -> int:
        config: Any = self.backbone.config
        return int(config.decoder_start_token_id)

    def _padded(
        self,
        rows: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        *,
        length: int | None = None,
        left: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return rows of ids padded to one length, and 1 at their tokens, 0 at padding: int64 ``(B, L)`` each."""
        longest = length or max(map(len, rows))
        ids = torch.full((len(rows), longest), self.tokens.pad, device="cpu")
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            own = slice(longest - len(row), longest) if left else slice(0, len(row))
            ids[i, own], mask[i, own] = torch.tensor(row, device="cpu"), 1
        ids, mask = moved_together([ids, mask], torch.device(device))
        return ids, mask

    def _decoded(self, x: Tensor) -> TokenInputs:
        """Return the inputs of an encoder-decoder for rows: a row is the prompt up to its first mark, and the text after it."""
        from forgetfree.data.prompts import prompt_of

        rows = [row[:length] for row, length in zip(x, self.tokens.attention_mask(x).sum(1).tolist(), strict=True)]
        prompts = self._padded([prompt_of(row).tolist() for row in rows], x.device)
        texts = self._padded([[self._decoder_start, *(~row[row < 0]).tolist()[1:]] for row in rows], x.device)
        at = texts[1].flatten().nonzero().squeeze(1)
        return TokenInputs(x, self._by_name(prompts, texts), at, False)

    def features(self, x: Tensor | TokenInputs) -> Any:
        """Return the inputs of the readouts, see `Readout.forward`."""
        inputs = self.prepared(x)
        named = self._arguments(inputs)
        if self.readout not in BY_WORDS:
            hidden = self.backbone(**named).last_hidden_state
            if self.readout == "classifier":
                return HiddenRows(hidden, inputs.named["input_ids"], inputs.mask)
            return mean_of_tokens(hidden, inputs.mask) if self.pooling == "mean" else _read(hidden, inputs)
        body, head = (self.backbone, None) if self.writes_apart else _body_and_head(self.backbone)
        if head is None:  # the head cannot be called alone: compute all positions, then take one
            return _read(self.backbone(**named).logits, inputs)
        return head(_read(body(**named).last_hidden_state, inputs).unsqueeze(1)).squeeze(1)


def _read(states: Tensor, inputs: TokenInputs) -> Tensor:
    """Return the states ``(n, …)`` at the positions of labels, out of ``(B, L, …)``."""
    return states.flatten(0, 1).index_select(0, inputs.at)


def _body_and_head(backbone: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Tensor] | None]:
    """Return the encoder, and its LM head if that is one module from hidden states to logits."""
    config: Any = backbone.config
    head = getattr(backbone, LM_HEADS.get(config.model_type, ""), None)
    return (backbone.base_model, head) if isinstance(head, nn.Module) else (backbone, None)  # type: ignore[return-value]


# -- Networks without tokens, such as Avalanche's own models -------------------------------------------------


class ModuleModel(ReadoutModel):
    """A network whose last linear layer is the readout: one for each task, or one for all.

    Args:
        network: maps inputs to logits. It is copied, and not changed.
        head: the name of the linear layer that is the readout; default: the last linear layer.
        graftable, shared_readout: see `ReadoutModel`. All readouts start from the network's layer.

    Raises:
        ModelError: there is no such layer; or a part of the network is frozen, and ``graftable`` is not given.
    """

    def __init__(
        self,
        network: nn.Module,
        head: str | None = None,
        *,
        graftable: str | None = None,
        shared_readout: bool = False,
    ) -> None:
        layers = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear) and name}
        name = head or next(reversed(layers), "")
        if name not in layers:
            raise ModelError(
                f"{type(network).__name__} has no linear layer {name!r} to read out from. Its linear layers: "
                f"{', '.join(layers) or 'none'}. Name one as head=…"
            )
        backbone = copy.deepcopy(network)
        backbone.set_submodule(name, nn.Identity())
        super().__init__(backbone, "linear", graftable=graftable, shared_readout=shared_readout)
        if graftable is None:
            self.space().check_trainable(backbone, type(network).__name__)
        #: Name of the layer in the network.
        self.head_name = name
        self._head_layer = [copy.deepcopy(layers[name])]  # in a list, so that it is not a submodule

    @property
    def hidden_size(self) -> int:
        """The width of the readouts' inputs."""
        return self._head_layer[0].in_features

    @property
    def n_labels(self) -> int:
        """The width of every readout: the network's own."""
        return self._head_layer[0].out_features

    def make_layer(self, name: str, n_labels: int, seed: int) -> nn.Module:
        """Return a copy of the network's own layer, untrained; in float32 at least, so that no small step is rounded away."""
        layer = self._head_layer[0]
        return copy.deepcopy(layer).to(at_least_float32(layer.weight.dtype))

    def space(self) -> ParameterSpace:
        """Return the space of the network without its last layer, and without any tensor excluded by its name."""
        return ParameterSpace.of(self.backbone, include=(self._graftable,), exclude=())

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the network's last layer: ``(B, H)``."""
        features: Tensor = self.backbone(x)
        return features
