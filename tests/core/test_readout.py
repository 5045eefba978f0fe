"""A readout on hand-made hidden states: which states it pools, and which outputs are labels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forgetfree.core.readout import Pooling, Readout

#: Two rows of four states of width 1; the second has two tokens, with padding after them.
HIDDEN = torch.tensor([[1.0, 2.0, 3.0, 6.0], [10.0, 20.0, 0.0, 0.0]]).unsqueeze(2)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("pooling", "read", "turned"),
    [("first", [1.0, 10.0], [6.0, 20.0]), ("last", [6.0, 20.0], [1.0, 10.0]), ("mean", [3.0, 15.0], [3.0, 15.0])],
)
@torch.no_grad()
def test_a_linear_layer_reads_the_tokens_of_a_row_and_no_padding(
    pooling: Pooling, read: list[float], turned: list[float]
) -> None:
    layer = nn.Linear(1, 2)
    layer.weight.copy_(torch.tensor([[1.0], [2.0]]))
    layer.bias.copy_(torch.tensor([0.0, 0.5]))
    readout = Readout("own", 2, layer, pooling=pooling)
    assert readout.logits(HIDDEN, mask=MASK).tolist() == [[value, 2 * value + 0.5] for value in read]
    assert readout.logits(HIDDEN.flip(1), mask=MASK.flip(1))[:, 0].tolist() == turned
    assert readout.logits(HIDDEN[:1])[:, 0].tolist() == read[:1]  # without a mask there is no padding
    assert Readout("own", 2, layer, pooling="all").logits(HIDDEN)[1, :, 0].tolist() == [10.0, 20.0, 0.0, 0.0]


def test_columns_are_the_labels_in_their_order() -> None:
    words = torch.arange(8.0).reshape(2, 4)
    assert Readout("own", 2, columns=(3, 1))(words).tolist() == [[3.0, 1.0], [7.0, 5.0]]
    assert torch.equal(Readout("own", 4)(words), words)


def test_tensors_that_do_not_fit_are_told() -> None:
    readout = Readout("own", 2, nn.Linear(1, 2))
    assert readout.misfit({"weight": torch.ones(2, 1), "bias": torch.ones(2)}) == ""
    assert readout.misfit({}).endswith("got {}") and Readout("own", 2).misfit({}) == ""
