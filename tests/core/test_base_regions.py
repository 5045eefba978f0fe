"""The diagonal of the empirical Fisher information, worked by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forgetfree.core.batch_loss import Batch
from forgetfree.core.readout_model import TaskHead
from forgetfree.core.selection import diagonal_fisher
from forgetfree.data.examples import DatasetExamples
from forgetfree.models.task_model import ModuleModel

ROWS = [(torch.tensor([2.0, 0.0]), 1), (torch.tensor([4.0, 6.0]), 0)]


def logistic(bias: bool = False, dropout: float = 0.0) -> ModuleModel:
    """f = w·x with w = 0, and logits (0, f): p(1|x) = σ(f) = 1/2."""
    network = nn.Sequential(nn.Linear(2, 1, bias=bias), nn.Dropout(dropout), nn.Linear(1, 2))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        network[2].weight[1] = 1.0
    model = ModuleModel(network)
    model.add_task(TaskHead("toy", 2))
    return model


def examples(rows=ROWS) -> DatasetExamples:
    return DatasetExamples(rows, [label for _, label in rows], task=0)


def one_by_one(rows: DatasetExamples) -> list[Batch]:
    return [rows.batch([row]) for row in range(len(rows))]


def test_the_diagonal_is_the_mean_of_squared_gradients() -> None:
    """∂ log p(y|x)/∂w = (y − 1/2)·x: (1, 0) and (−2, −3). Their squares' mean: (5/2, 9/2); their mean's square: (1/4, 9/4)."""
    model = logistic()
    assert diagonal_fisher(model, model.space(), one_by_one(examples())).tolist() == [2.5, 4.5]


def test_away_from_zero() -> None:
    """w = (ln 3, 0), x = (1, 2), y = 1: p = 3/4, the gradient (1/4)·x, its square (1/16, 1/4)."""
    model = logistic()
    with torch.no_grad():
        model.backbone[0].weight[0, 0] = torch.log(torch.tensor(3.0))
    row = examples([(torch.tensor([1.0, 2.0]), 1)])
    found = diagonal_fisher(model, model.space(), one_by_one(row))
    assert found.tolist() == pytest.approx([1 / 16, 1 / 4], rel=1e-6)


def test_the_model_is_left_as_it_was() -> None:
    """Weights, gradients, mode and precision stay; dropout is off, and gradients are those of float32."""
    model = logistic(dropout=0.9).train()
    model.precision = "bf16"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = examples([(torch.tensor([0.3, 2.1]), 1)])  # in bf16, 0.3008 and 2.09
    found = diagonal_fisher(model, model.space(), one_by_one(rows))
    assert found.tolist() == pytest.approx([0.0225, 1.1025], rel=1e-6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.precision == "bf16"
    assert model.training and all(p.grad is None and p.requires_grad for p in model.parameters())
