"""A linear readout inside the heads of transformers' sequence classifiers: its precision, and its limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from forgetfree.core.parameters import load_tensors_
from forgetfree.core.readout import Readout
from forgetfree.core.readout_model import body_of
from forgetfree.models.heads import TOLERANCE, sequence_classifier

WIDTH = 32
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
#: One family for each kind of head: tanh, GELU, ReLU, LayerNorm.
HEADS: dict[str, dict[str, Any]] = {
    "Bert": SIZES,
    "Electra": SIZES | {"embedding_size": 8},
    "DistilBert": {"dim": WIDTH, "n_layers": 1, "n_heads": 2, "hidden_dim": 16},
    "ModernBert": SIZES,
}


def config_of(family: str, labels: int) -> Any:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 3, "sep_token_id": 4}
    make = getattr(transformers, f"{family}Config")
    return make(vocab_size=90, max_position_embeddings=20, num_labels=labels, **HEADS[family], **special)


def body_with(family: str) -> Any:
    torch.manual_seed(0)
    body = transformers.AutoModel.from_config(config_of(family, 2)).eval()
    with torch.no_grad():
        for parameter in body.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return body


def readout_of(hidden: Tensor, labels: int, largest: float) -> Readout:
    """Return a random readout with logits up to ``largest``, half of that from the bias."""
    weight, bias = torch.randn(labels, WIDTH), torch.linspace(-largest / 2, largest / 2, labels)
    readout = Readout("", labels, torch.nn.Linear(WIDTH, labels))
    load_tensors_(readout.layer, {"weight": weight * (largest / 2 / (hidden @ weight.T).abs().max()), "bias": bias})
    return readout


@pytest.mark.sampled("DistilBert-2", "ModernBert-2")
@torch.no_grad()
@pytest.mark.parametrize("labels", [2, 7])
@pytest.mark.parametrize("family", HEADS)
def test_logits_come_through(family: str, labels: int) -> None:
    """Logits up to 10 agree on rows that the head was not measured on, one by one and all in one batch."""
    body, x = body_with(family), torch.randint(5, 90, (40, 12))
    hidden = body(x).last_hidden_state[:, 0]
    readout = readout_of(hidden, labels, 10.0)
    rows = [{"input_ids": x[:1, :7]}, {"input_ids": x[1:2]}]
    network = sequence_classifier(config_of(family, labels), body.state_dict(), readout, rows)
    expected = readout(hidden)
    assert expected.abs().max() > 8
    for logits in (network(x).logits, torch.cat([network(row[None]).logits for row in x])):
        assert torch.allclose(logits, expected, rtol=0, atol=TOLERANCE)
    for name, tensor in body.state_dict().items():
        assert "pooler" in name or torch.equal(body_of(network).state_dict()[name], tensor)


@torch.no_grad()
def test_more_labels_than_the_head_is_wide_for_have_no_place() -> None:
    body, x = body_with("Bert"), torch.randint(5, 90, (1, 9))
    for labels in (WIDTH // 2 - 1, WIDTH // 2):
        readout = Readout("", labels, torch.nn.Linear(WIDTH, labels))
        network = sequence_classifier(config_of("Bert", labels), body.state_dict(), readout, [{"input_ids": x}])
        assert (network is None) == (labels == WIDTH // 2)


@torch.no_grad()
def test_a_head_on_another_token_than_the_readouts_is_not_used() -> None:
    """XLNet's head reads the last token."""
    config = transformers.XLNetConfig(vocab_size=90, d_model=WIDTH, n_layer=1, n_head=2, d_inner=16, num_labels=2)
    torch.manual_seed(0)
    body, x = transformers.AutoModel.from_config(config).eval(), torch.randint(5, 90, (1, 9))
    layer = torch.nn.Linear(WIDTH, 2)
    for pooling, holds in (("first", False), ("last", True)):
        readout = Readout("", 2, layer, pooling=pooling)  # type: ignore[arg-type]
        network = sequence_classifier(config, body.state_dict(), readout, [{"input_ids": x}])
        assert (network is not None) == holds
