"""The network of a task that labels words: a token classifier of transformers, with the linear readout as its head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forgetfree.core.body import body_of
from forgetfree.data.rows import Rows
from forgetfree.errors import GraftError
from forgetfree.models.architecture import reads_last
from forgetfree.serve.network import Parts, Reading, TaskNetwork, check_linear, name_labels_, tokenizer_of


def tagging_network(parts: Parts) -> TaskNetwork:
    """Return the token classifier of a task that labels words.

    Raises:
        GraftError: transformers has none for this architecture, or one that computes something else.
    """
    loaded, task = parts.loaded, parts.origin.task
    encoder = loaded.encoder(task)
    ids = encoder(Rows(("What was it ?",), (), ((0,) * 4,)))
    inputs = cast(Any, loaded.model).inputs(torch.tensor(ids))
    name_labels_(parts.config, task.labels, parts.origin.classes)
    check_linear(parts.readout, len(task.labels), loaded.model.hidden_size)
    network = _token_classifier(parts.config, parts.body, parts.readout, inputs)
    reading = Reading(
        "AutoModelForTokenClassification", encoder, position=-1 if reads_last(parts.config) else 0, usual=True
    )
    return TaskNetwork(network, tokenizer_of(loaded, list(inputs)), reading)


def _token_classifier(
    config: Any, body: Mapping[str, Tensor], readout: Mapping[str, Tensor], row: Mapping[str, Tensor]
) -> Any:
    """Return the architecture's token classifier, which computes W h + b at each token, with ``readout`` as its head.

    Args:
        config: the model's configuration, with the task's labels.
        body: the body's tensors; there may be more.
        readout: ``weight`` ``(n, H)`` and ``bias`` ``(n,)``.
        row: what the model is called with, ``(1, L)``, to compare by.

    Raises:
        GraftError: transformers has none for this architecture, or one that computes something else.
    """
    import transformers

    try:
        loader: Any = transformers.AutoModelForTokenClassification
        network = loader.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    except ValueError as error:
        raise _refusal(config, "there is none") from error
    inside = {*body_of(network).modules()}
    heads = [module for module in network.modules() if isinstance(module, nn.Linear) and module not in inside]
    lacking = body_of(network).load_state_dict(dict(body), strict=False).missing_keys
    if lacking or len(heads) != 1 or heads[0].bias is None or heads[0].weight.shape != readout["weight"].shape:
        raise _refusal(config, f"{type(network).__name__} has another head")
    heads[0].load_state_dict(dict(readout))
    with torch.no_grad():
        expected = F.linear(body_of(network)(**row).last_hidden_state, readout["weight"], readout["bias"])
        if not torch.equal(network(**row).logits, expected):
            raise _refusal(config, f"{type(network).__name__} computes other logits")
    return network


def _refusal(config: Any, why: str) -> GraftError:
    return GraftError(
        f"A graft that labels words is written as a token classifier with one linear layer, and for a model of type "
        f"{config.model_type!r} {why}. Answer from the run itself: forgetfree predict."
    )
