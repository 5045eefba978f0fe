"""The diagonal of the empirical Fisher information, worked by hand, and the base regions that depend on model and rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forgetfree import cli
from forgetfree.core.batch_loss import Batch
from forgetfree.core.readout_model import TaskHead
from forgetfree.core.selection import diagonal_fisher
from forgetfree.data.examples import DatasetExamples
from forgetfree.data.sources import load_task
from forgetfree.errors import ModelError
from forgetfree.ledger import Ledger
from forgetfree.models.loading import load_model
from forgetfree.models.task_model import ModuleModel
from forgetfree.training.localization import LocalizationOptions, choose_base
from forgetfree.training.single_task import SingleTask

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


@pytest.mark.parametrize(
    ("moved", "count", "entries"),
    [([1.0, 1.0], 1, [1]), ([1.0, 0.0], 1, [0]), ([1.0, 1.0], 2, [0, 1]), ([1.0, 0.0], 2, [0])],
)
def test_a_base_by_fisher_information(moved: list[float], count: int, entries: list[int]) -> None:
    """The largest diagonal is taken, 9/2 before 5/2; an entry that did not move does not count."""
    region = choose_base(
        "fisher", logistic(), examples(), torch.zeros(2), torch.tensor(moved), count, seed=0, fisher_rows=9
    )
    assert region.indices.tolist() == entries


@pytest.mark.parametrize(("moved", "entries"), [([5.0, 5.0, 1.0], [2]), ([5.0, 5.0, 0.0], [])])
def test_a_base_of_biases(moved: list[float], entries: list[int]) -> None:
    """Entries 0 and 1 are weights and entry 2 is a bias: only that is taken, and only if it moved."""
    ft = torch.tensor(moved)
    model = logistic(bias=True)
    region = choose_base("bias", model, examples(), torch.zeros(3), ft, 2, seed=0, fisher_rows=9)
    assert region.indices.tolist() == entries


def test_a_model_without_biases_has_no_such_base() -> None:
    with pytest.raises(ModelError, match="no graftable bias"):
        choose_base("bias", logistic(), examples(), torch.zeros(2), torch.ones(2), 1, seed=0, fisher_rows=9)


@pytest.mark.sampled("fisher")
@pytest.mark.parametrize("base", ["fisher", "bias"])
def test_strategies_take_these_bases(
    base: Any, data_directory: Path, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """Without mask steps the region is the base, the same as the workbench's."""
    model, options = str(model_directory("bert")), LocalizationOptions(steps=3, sparsity=0.05, base=base)
    given = ["--data", str(data_directory), "--model", model, "--shots", "4", "--steps", "3", "--sparsity", "0.05"]
    settings = ["--set", f"base={base}", "--set", "mask_steps=0"]
    strategy = ["--strategy", "grafting-continual", "--out", str(tmp_path)]
    assert cli.main(["run", "sst2", *given, *settings, *strategy]) == 0
    bench = SingleTask.of(load_model(model), load_task("sst2", str(data_directory)), shots=4)
    fine_tuned = bench.fine_tuned(options)
    region = bench.base(base, fine_tuned, int(0.05 * len(bench.space)))
    ledger = Ledger.load(tmp_path / "grafting-continual" / "seed-0" / "ledger.safetensors")
    assert ledger.records[0].region == region and 0 < len(region) <= 0.05 * len(bench.space)
