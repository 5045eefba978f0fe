"""Heads of transformers' sequence classifiers: apart from their bodies, and made to answer as a linear readout does.

One body answers for tasks with a head each (`HeadModel`). A head is the classifier itself, in which a stand-in gives hidden
states that are there already. So it computes what the classifier does, to the bit, whatever that is: layers, a pooler of the
body, which token is read. And a linear readout becomes the head of a classifier, whose usual call then answers as the readout
does (`sequence_classifier`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forgetfree.core.families import CLASSIFIER_SETTINGS, POOLER
from forgetfree.core.readout_model import TaskHead, body_of
from forgetfree.errors import ModelError
from forgetfree.models.task_model import TaskModel, head_names
from forgetfree.models.token_inputs import TokenInputs, TokenLayout


@dataclass(frozen=True)
class HiddenRows:
    """A batch as heads read it.

    Attributes:
        hidden: the body's last hidden states ``(B, L, H)``.
        ids: token ids ``(B, L)``.
        mask: 1 at tokens, 0 at padding ``(B, L)``.
    """

    hidden: Tensor
    ids: Tensor
    mask: Tensor | None

    def __len__(self) -> int:
        return len(self.hidden)

    def __getitem__(self, rows: Any) -> HiddenRows:
        return HiddenRows(self.hidden[rows], self.ids[rows], None if self.mask is None else self.mask[rows])


def make_head(architecture: str, config: Any, labels: int, pad: int | None) -> nn.Module:
    """Return one of transformers' classifiers with a stand-in for its body; its tensors are still empty.

    Args:
        architecture: the classifier's class, such as ``BertForSequenceClassification``.
        config: the configuration of the body.
        labels: how many outputs it has.
        pad: the token that fills short rows; none: there are no such rows.

    Raises:
        ModelError: transformers has no such class, or it is one for other bodies.
    """
    kind, config = classifier_class(architecture, config), copy.deepcopy(config)
    config.num_labels, config.pad_token_id = labels, pad
    with torch.device("meta"):
        network = kind(config)
    setattr(network, network.base_model_prefix, _StandIn(network.base_model))
    head: nn.Module = network.to_empty(device="cpu").eval()
    return head


def read_head(head: Any, rows: HiddenRows) -> Tensor:
    """Return the logits ``(B, n)`` of a head that `make_head` returned."""
    stand_in = head.base_model
    stand_in.hidden = rows.hidden
    try:
        logits: Tensor = head(input_ids=rows.ids, attention_mask=rows.mask).logits
    finally:
        stand_in.hidden = None
    return logits


class _StandIn(nn.Module):
    """Stands for the body in a classifier."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.pooler = getattr(body, "pooler", None)
        self._activation = getattr(body, "pooler_activation", None)  # of ALBERT, whose pooler is a linear layer
        self.hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> _Output:
        hidden, pooled = self.hidden, None
        if self.pooler is not None and hidden is not None:
            pooled = self.pooler(hidden) if self._activation is None else self._activation(self.pooler(hidden[:, 0]))
        return _Output((hidden, pooled))


class _Output(tuple[Any, ...]):
    """The output of a body: hidden states and what its pooler makes of them; nothing else is known."""

    def __getattr__(self, name: str) -> Any:
        return {"last_hidden_state": self[0], "pooler_output": self[1]}.get(name)


def classifier_class(architecture: str, config: Any) -> Any:
    """Return the class of transformers that has this name.

    Raises:
        ModelError: there is none, or it is one for other bodies than that of ``config``.
    """
    import transformers

    kind = getattr(transformers, architecture, None)
    if not architecture.endswith("ForSequenceClassification") or not isinstance(kind, type):
        raise ModelError(
            f"The readout is the head of {architecture!r}, which this version of transformers does not have. Expected a "
            "…ForSequenceClassification."
        )
    if getattr(kind, "config_class", None) is not type(config):
        raise ModelError(
            f"The readout is the head of a {architecture}, and the model is of type {config.model_type!r}. Give the model that "
            "the tasks were trained on."
        )
    return kind


class HeadModel(TaskModel):
    """A body with a head of transformers' own for each task.

    Args:
        backbone: the body.
        tokens: the special ids of its tokenizer.
        architecture: the class that the heads are of.
    """

    def __init__(self, backbone: nn.Module, tokens: TokenLayout, architecture: str) -> None:
        super().__init__(backbone, tokens, "classifier")
        self.architecture = architecture

    def add_task(self, head: TaskHead, seed: int = 0) -> int:
        """Add a task, whose head is empty until its tensors are loaded, and return its task label."""
        label, body = super().add_task(head, seed), next(self.backbone.parameters())
        module = make_head(self.architecture, self.backbone.config, head.n_labels, self.tokens.pad)
        self.linears[self._key(label)] = module.to(body.device, body.dtype)
        return label

    def readout_module(self, task: int) -> nn.Module:
        """Return the task's head."""
        return self.linears[self._key(task)]

    def features(self, x: Tensor | TokenInputs) -> Any:
        """Return what heads read: `HiddenRows`."""
        inputs = self.prepared(x)
        hidden = self.backbone(**self._arguments(inputs)).last_hidden_state
        return HiddenRows(hidden, inputs.named["input_ids"], inputs.mask)

    def read(self, features: Any, task: int) -> Tensor:
        """Return the logits ``(B, n)`` of one task."""
        self._head(task)
        return read_head(self.linears[self._key(task)], features)


# -- A linear readout as a head --------------------------------------------------------------------------------

#: ε: a power of two, so that products with it are exact. A logit u comes through tanh with an error of ε²u³/3: 2e-5 at 10.
EPSILON = 2.0**-12
#: How far from the readout's own logits the classifier's may be, on the rows that it is measured by.
TOLERANCE = 1e-4


def sequence_classifier(
    config: Any,
    body: Mapping[str, Tensor],
    readout: Mapping[str, Tensor],
    rows: Sequence[Mapping[str, Tensor]],
    position: int,
) -> Any:
    """Return the architecture's sequence classifier with ``readout`` inside, or ``None`` if it cannot hold it.

    The readout is u = W h + b, on the hidden state h of the first token (of XLNet, the last). The heads of
    encoders' sequence classifiers stand on the same h, and compute one of two things:

    - ``V f(U h + c) + d``, with U square; f is tanh (BERT, RoBERTa, ALBERT, MPNet), GELU (ELECTRA, DeBERTa) or
      ReLU (DistilBERT);
    - ``V norm(f(U h + c)) + d``: ModernBERT, which lets f be the identity.

    U computes εu and −εu, and V takes the difference, times a scale. For GELU and ReLU, f(x) − f(−x) is x itself, because
    f(x) = x·g(x) with g(x) + g(−x) = 1. For tanh it is 2x(1 − x²/3 + …), and ε is small. For the LayerNorm, two constants
    beside them make the deviation that it divides by nearly the same for all rows. The head of most causal models is ``V h``,
    without a place for the readout's bias.

    Args:
        config: the model's configuration, with the task's labels; for ModernBERT, its settings of the head are changed.
        body: the body's tensors; there may be more.
        readout: ``weight`` ``(n, H)`` and ``bias`` ``(n,)``.
        rows: what the model is called with, one row ``(1, L)`` each, to measure by.
        position: of the token that the readout is on: 0, or −1 for causal models.
    """
    import transformers

    for name, value in CLASSIFIER_SETTINGS.get(config.model_type, {}).items():
        setattr(config, name, value)
    try:
        loader: Any = transformers.AutoModelForSequenceClassification
        network = loader.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    except ValueError:  # there is none
        return None
    lacking = body_of(network).load_state_dict(dict(body), strict=False).missing_keys
    layers = _head_modules(network)
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    if not all(re.search(POOLER, name) for name in lacking) or len(linears) != 2:
        return None
    inner, outer = linears
    if inner.bias is None or inner.out_features < 2 * len(readout["bias"]) + 2:
        return None
    with torch.no_grad():
        hidden = torch.cat([body_of(network)(**row).last_hidden_state[:, position] for row in rows])
        expected = F.linear(hidden, readout["weight"], readout["bias"])
        _fill_layers(inner, outer, readout, normalized=len(layers) > 2)
        got = network(**rows[0]).logits
        outer.weight.mul_((got * expected[:1]).sum() / got.square().sum())
        got = torch.cat([network(**row).logits for row in rows])
    return network if torch.allclose(got, expected, rtol=0, atol=TOLERANCE) else None


def _head_modules(network: nn.Module) -> list[nn.Module]:
    """Return the modules of the head that have parameters, including a pooler's, in order."""
    names = dict.fromkeys(name.rpartition(".")[0] for name in head_names(network))
    return [network.get_submodule(name) for name in names]


def _fill_layers(inner: nn.Linear, outer: nn.Linear, readout: Mapping[str, Tensor], *, normalized: bool) -> None:
    """Fill U with εW and −εW, and V with their difference."""
    n = len(readout["bias"])
    for parameter in (*inner.parameters(), *outer.parameters()):
        parameter.zero_()
    for sign, rows in ((1, slice(0, n)), (-1, slice(n, 2 * n))):
        inner.weight[rows] = sign * EPSILON * readout["weight"]
        inner.bias[rows] = sign * EPSILON * readout["bias"]
        outer.weight[:, rows] = sign * torch.eye(n, device="cpu")
    if normalized:
        inner.bias[2 * n], inner.bias[2 * n + 1] = 1.0, -1.0
