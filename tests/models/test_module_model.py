"""A network without its last linear layer: readouts, features, and graftable tensors."""

from __future__ import annotations

import pytest
import small_vision as vision
import torch
from torch import nn

from forgetfree.errors import ModelError
from forgetfree.models.task_model import ModuleModel

X = vision.digits()[0][:5]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", vision.NETWORKS)
def test_every_readout_starts_as_the_networks_own(kind: str, shared: bool) -> None:
    network = vision.network(kind).eval()
    model = ModuleModel(network, shared_readout=shared).eval()
    for name in ("one", "two"):
        model.add_task(name, model.n_labels)
    with torch.no_grad():
        for task in (0, 1, torch.tensor([0, 1, 0, 1, 1])):
            assert torch.allclose(model(X, task), network(X))
    assert len({model.readout_module(task) for task in range(2)}) == (1 if shared else 2)
    assert (model.hidden_size, model.n_labels) == ({"mlp": 24, "conv": 128}[kind], 10)


def test_the_readouts_of_a_network_in_half_precision_are_float32() -> None:
    network = vision.network("mlp").bfloat16().eval()
    model = ModuleModel(network).eval()
    model.add_task("one", model.n_labels)
    assert {parameter.dtype for parameter in model.readouts.parameters()} == {torch.float32}
    x = X.bfloat16()
    with torch.no_grad():
        assert torch.allclose(model(x, 0), network(x).float(), atol=0.02)


class Named(nn.Module):
    """A network whose body has a name that marks untrained tensors in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Linear(64, 6)
        self.classifier = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.embeddings(x.flatten(1)))
        return logits


def test_all_but_the_last_layer_may_be_grafted_under_any_name() -> None:
    names = ["embeddings.weight", "embeddings.bias", "classifier.0.weight", "classifier.0.bias"]
    assert [spec.name for spec in ModuleModel(Named()).space().tensors] == names
    assert [spec.name for spec in ModuleModel(Named(), graftable=r"weight$").space().tensors] == names[::2]


def test_a_network_that_is_frozen_in_part_is_not_trained_in_silence() -> None:
    network = Named()
    network.embeddings.requires_grad_(False)
    with pytest.raises(
        ModelError, match=r"'embeddings\.weight' of Named is frozen .* Name those that may be as graftable="
    ):
        ModuleModel(network)
    names = [spec.name for spec in ModuleModel(network, graftable=r"^classifier").space().tensors]
    assert names == ["classifier.0.weight", "classifier.0.bias"]
    network.requires_grad_(False)  # all frozen, as for inference: the caller selected no tensors
    assert len(ModuleModel(network).space().tensors) == 4


def test_the_head_may_be_named() -> None:
    class TwoHeads(Named):
        def __init__(self) -> None:
            super().__init__()
            self.auxiliary = nn.Linear(6, 2)

    model = ModuleModel(TwoHeads(), "classifier.2")
    assert (model.n_labels, model.head_name) == (3, "classifier.2")
    with pytest.raises(
        ModelError, match=r"TwoHeads has no linear layer .head. to read out from\..*classifier\.0, classifier\.2"
    ):
        ModuleModel(TwoHeads(), "head")
