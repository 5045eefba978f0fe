"""Heads of transformers' sequence classifiers: separated from their bodies, or filled with a linear readout.

A separated head is the classifier itself, with a stand-in for the body that returns given hidden states. So it computes bit
for bit the same as the classifier, whatever the head does: layers, a pooler of the body, the choice of a token. And a linear
readout can become the head of a classifier, so that its usual call answers like the readout (`sequence_classifier`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from forgetfree.core.families import CLASSIFIER_SETTINGS, POOLER
from forgetfree.core.parameters import load_tensors_
from forgetfree.core.readout import Readout
from forgetfree.core.readout_model import body_of, body_prefix
from forgetfree.errors import ModelError


@dataclass(frozen=True)
class Head:
    """A classifier of transformers with a head that reads out a model's tasks.

    Attributes:
        architecture: the classifier's class, such as ``BertForSequenceClassification``.
        classes: the class number of each of the task's labels; empty: in order.
        tensors: the tensors of an existing head, by their names in the classifier; empty: each task loads its own.
    """

    architecture: str
    classes: tuple[int, ...] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def make_head(architecture: str, config: Any, labels: int, pad: int | None) -> nn.Module:
    """Return the head of one of transformers' classifiers, the layer of a `Readout`; its tensors must be loaded later.

    Args:
        architecture: the classifier's class.
        config: the configuration of the body.
        labels: the number of its outputs.
        pad: the token that fills short rows; ``None``: there are no such rows.

    Raises:
        ModelError: transformers has no such class, or the class is for other bodies.
    """
    kind, config = classifier_class(architecture, config), copy.deepcopy(config)
    config.num_labels, config.pad_token_id = labels, pad
    with torch.device("meta"):
        network = kind(config)
    setattr(network, network.base_model_prefix, _StandIn(network.base_model))
    head: nn.Module = network.to_empty(device="cpu").eval()
    return head


class _StandIn(nn.Module):
    """Replaces the body in a classifier: it returns the given embeddings as hidden states."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.pooler = getattr(body, "pooler", None)
        self._activation = getattr(body, "pooler_activation", None)  # for ALBERT: its pooler is a linear layer

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        hidden, pooled = inputs_embeds, None
        if self.pooler is not None:
            pooled = self.pooler(hidden) if self._activation is None else self._activation(self.pooler(hidden[:, 0]))
        return _Output((hidden, pooled))


class _Output(tuple[Any, ...]):
    """The output of a body: hidden states and the pooler's output, and nothing else."""

    def __getattr__(self, name: str) -> Any:
        return {"last_hidden_state": self[0], "pooler_output": self[1]}.get(name)


def classifier_class(architecture: str, config: Any) -> Any:
    """Return the class of transformers that has this name.

    Raises:
        ModelError: there is none, or it is for bodies of another type than ``config``.
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


def head_names(model: nn.Module) -> list[str]:
    """Return the names of a Hugging Face model's tensors that lie outside its body, and of the body's pooler."""
    prefix = body_prefix(model)
    return [name for name in model.state_dict() if not name.startswith(prefix) or re.search(POOLER, name)]


def linear_head(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """Return the linear layer that is the whole head of a token classifier, with its name; ``None`` for other heads."""
    names = sorted({name.rpartition(".")[0] for name in head_names(model)})
    if len(names) != 1 or not type(model).__name__.endswith("ForTokenClassification"):
        return None
    head = model.get_submodule(names[0])
    return (names[0], head) if isinstance(head, nn.Linear) and head.bias is not None else None


def own_readout(model: Any) -> Readout | None:
    """Return a Hugging Face classifier's own readout, apart from its body; ``None`` if it labels words and is not linear."""
    architecture, labels = type(model).__name__, model.config.num_labels
    if architecture.endswith("ForTokenClassification"):
        found = linear_head(model)
        return None if found is None else Readout("", labels, found[1], pooling="all")
    body: Any = body_of(model)
    head = make_head(architecture, body.config, labels, model.config.pad_token_id).to(body.device, body.dtype)
    load_tensors_(head, model.state_dict())
    return Readout("", labels, head)


@torch.no_grad()
def reads_alike(readout: Readout, model: Any, row: Mapping[str, Tensor]) -> bool:
    """Return whether a separate readout computes the logits of a Hugging Face model on a row bit for bit."""
    hidden = body_of(model)(**row).last_hidden_state
    logits = readout.logits(hidden, row["input_ids"], row.get("attention_mask"))
    return torch.equal(logits, model(**row).logits)


# -- A linear readout as a head --------------------------------------------------------------------------------

#: ε: a power of two, so that products with it are exact. A logit u passes tanh with an error of ε²u³/3: 2e-5 at 10.
EPSILON = 2.0**-12
#: The largest difference between the classifier's and the readout's logits on the test rows.
TOLERANCE = 1e-4


def sequence_classifier(
    config: Any,
    body: Mapping[str, Tensor],
    readout: Readout,
    rows: Sequence[Mapping[str, Tensor]],
) -> Any:
    """Return the architecture's sequence classifier with a linear readout inside, or ``None`` if it cannot hold it.

    The readout is u = W h + b, on the hidden state h of the first token (of XLNet, the last). The heads of
    encoders' sequence classifiers read the same h, and compute one of two functions:

    - ``V f(U h + c) + d``, with U square; f is tanh (BERT, RoBERTa, ALBERT, MPNet), GELU (ELECTRA, DeBERTa) or
      ReLU (DistilBERT);
    - ``V norm(f(U h + c)) + d``: ModernBERT, where f can be the identity.

    U computes εu and −εu, and V takes the difference, times a scale. For GELU and ReLU, f(x) − f(−x) is x itself, because
    f(x) = x·g(x) with g(x) + g(−x) = 1. For tanh it is 2x(1 − x²/3 + …), and ε is small. For the LayerNorm, two constants
    beside them make its standard deviation nearly the same for all rows. The head of most causal models is ``V h``,
    without a place for the readout's bias.

    Args:
        config: the model's configuration, with the task's labels; for ModernBERT, the settings of the head are changed.
        body: the body's tensors; there may be more.
        readout: a linear readout on the first token or the last.
        rows: the arguments of test calls of the model, one row ``(1, L)`` each.
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
    if inner.bias is None or inner.out_features < 2 * readout.n_labels + 2:
        return None
    with torch.no_grad():
        expected = torch.cat([readout.logits(body_of(network)(**row).last_hidden_state) for row in rows])
        _fill_layers(inner, outer, readout.layer, normalized=len(layers) > 2)
        got = network(**rows[0]).logits
        outer.weight.mul_((got * expected[:1]).sum() / got.square().sum())
        got = torch.cat([network(**row).logits for row in rows])
    return network if torch.allclose(got, expected, rtol=0, atol=TOLERANCE) else None


def _head_modules(network: nn.Module) -> list[nn.Module]:
    """Return the modules of the head that have parameters, including a pooler's, in order."""
    names = dict.fromkeys(name.rpartition(".")[0] for name in head_names(network))
    return [network.get_submodule(name) for name in names]


def _fill_layers(inner: nn.Linear, outer: nn.Linear, readout: Any, *, normalized: bool) -> None:
    """Fill U with εW and −εW, and V with their difference."""
    n = len(readout.bias)
    for parameter in (*inner.parameters(), *outer.parameters()):
        parameter.zero_()
    for sign, rows in ((1, slice(0, n)), (-1, slice(n, 2 * n))):
        inner.weight[rows] = sign * EPSILON * readout.weight
        inner.bias[rows] = sign * EPSILON * readout.bias
        outer.weight[:, rows] = sign * torch.eye(n, device="cpu")
    if normalized:
        inner.bias[2 * n], inner.bias[2 * n + 1] = 1.0, -1.0
