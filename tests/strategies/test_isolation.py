"""Strategies that isolate tasks in a ledger: each implements the method of its name.

Only a gradient and its slow reference are compared with a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from avalanche.core import SupervisedPlugin
from compared import learn
from small_strategies import Watch, learned_rows, make
from torch import Tensor, nn

from forgetfree.core.parameters import ParameterSpace, weight_matrices
from forgetfree.core.regions import Region
from forgetfree.core.selection import most_moved_by_tensor
from forgetfree.errors import LedgerError, ModelError
from forgetfree.ledger.graft import Graft
from forgetfree.strategies.wsn import WinningSubnetwork

ISOLATING = ["packnet", "wsn", "bitfit", "graft-retrain"]
OPTIMIZERS: dict[str, dict[str, Any]] = {"momentum": {}, "adamw": {"optimizer": "adamw", "learning_rate": 0.003}}
MODELS = {"bert": "linear", "roberta-mlm": "prompt"}
MakeStream = Callable[..., Any]


# -- PackNet ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "keep", "kept"), [(100, 0.25, 25), (100, 0.29, 29), (7, 0.5, 3), (1, 0.25, 1), (0, 0.5, 0)]
)
def test_a_share_is_rounded_down_but_never_to_nothing(count: int, keep: float, kept: int) -> None:
    space, pre = ParameterSpace.of(nn.Linear(100, 1, bias=False)), torch.zeros(100)
    free = torch.arange(100) < count
    assert len(most_moved_by_tensor(space, [0], pre, torch.ones(100), keep, free)) == kept


def thetas_of_training(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return a list that collects θ after the first phase of each task from now on."""
    thetas: list[Tensor] = []
    train = strategy.training_result

    def spy(*arguments: Any, **more: Any) -> Any:
        made = train(*arguments, **more)
        thetas.append(made.theta.clone())
        return made

    monkeypatch.setattr(strategy, "training_result", spy)
    return thetas


@pytest.mark.sampled("momentum")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_packnet_keeps_the_top_share_of_the_free_entries_of_each_tensor(
    tiny_stream: MakeStream, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """The reference sorts |θ − θ_pre| after the first phase, tensor by tensor, over entries that no task owns."""
    strategy = make("packnet", tiny_stream(), keep=0.3, **OPTIMIZERS[optimizer])
    dense = thetas_of_training(strategy, monkeypatch)
    learn(strategy)
    space, pre = strategy.space, strategy.pre_trained.theta
    owned: set[int] = set()
    values = pre.clone()
    for theta, record in zip(dense, strategy.ledger.records, strict=True):
        assert torch.equal(theta[sorted(owned)], values[sorted(owned)])  # the first phase does not move owned entries
        expected: set[int] = set()
        for spec in space.tensors:
            entries = range(spec.offset, spec.offset + spec.size)
            if len(spec.shape) < 2:
                assert torch.equal(theta[entries], pre[entries])  # biases and LayerNorms do not train
                continue
            free = set(entries) - owned
            ranked = sorted(free, key=lambda i: (-float((theta[i] - pre[i]).abs()), i))
            expected |= set(ranked[: int(0.3 * len(free) + 1e-6)])
        assert set(record.owned.region.indices.tolist()) == expected
        owned |= expected
        values[record.owned.region.indices] = record.owned.values


def test_packnet_retrains_what_it_keeps_from_where_it_was(
    tiny_stream: MakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without retraining, the task keeps the values of the first phase, and all other entries return to θ_pre."""
    strategy = make("packnet", tiny_stream(), region_steps=0)
    thetas = thetas_of_training(strategy, monkeypatch)
    learn(strategy, 1)
    (theta,) = thetas
    record = strategy.ledger.records[0]
    assert torch.equal(record.owned.values, theta[record.owned.region.indices])
    assert bool((record.owned.values != strategy.pre_trained.theta[record.owned.region.indices]).any())
    retrained = learn(make("packnet", tiny_stream()), 1).ledger.records[0]
    assert retrained.owned.region == record.owned.region
    assert not torch.equal(retrained.owned.values, record.owned.values)


def test_packnet_retrains_for_half_as_many_updates(tiny_stream: MakeStream) -> None:
    watch = Watch()
    learn(make("packnet", tiny_stream(), steps=5, plugins=[watch]), 1)
    assert watch.updates == 3


@pytest.mark.sampled("roberta-mlm")
@pytest.mark.parametrize("kind", MODELS)
def test_packnet_trains_the_readout_alone_where_nothing_is_free(tiny_stream: MakeStream, kind: str) -> None:
    strategy = make("packnet", tiny_stream(kind, MODELS[kind]), keep=1.0)
    _, *rows = learned_rows(strategy)
    first, *others = strategy.ledger.records
    matrices = [strategy.space.tensors[i] for i in weight_matrices(strategy.space)]
    assert len(first.owned.region) == sum(spec.size for spec in matrices)
    assert [len(record.owned.region) for record in others] == [0, 0]
    assert torch.equal(rows[0]["qnli"], rows[2]["qnli"])
    assert torch.equal(rows[0]["ag_news"], rows[1]["ag_news"]) == (MODELS[kind] == "prompt")


# -- WSN -------------------------------------------------------------------------------------------------


class Two(nn.Module):
    """A network with two weight matrices and their biases."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class _Top(torch.autograd.Function):
    """h(s): 1 where s is in the top k; its gradient is passed straight through (eq. 5)."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, k: int) -> Tensor:
        mask = scores.new_zeros(scores.numel())
        mask[scores.flatten().argsort(descending=True)[:k]] = 1
        return mask.view_as(scores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def test_wsn_gradients_are_those_of_the_straight_through_estimator() -> None:
    """The reference is autograd through θ(m) = θ_pre + h(s) ⊙ (θ − θ_pre), after changes of free and owned entries."""
    torch.manual_seed(0)
    model, x, y = Two().double(), torch.randn(7, 5).double(), torch.randint(3, (7,))
    space = ParameterSpace.of(model)
    pre = space.flatten(model)
    owned = Region.of([0, 3, 11, 24, 27])  # in a.weight 0–19 and b.weight 24–35
    values = pre[owned.indices] + 0.5
    winning = WinningSubnetwork(model, space, Graft(owned, values), capacity=0.4, mask_every=1, seed=0)
    with torch.no_grad():
        for parameter in winning.parameters:
            parameter += 0.3 * torch.randn(parameter.shape)
    winning.write()
    theta = winning._theta.clone()
    assert torch.equal(theta[owned.indices], values)  # owned entries keep their values
    scores = winning._scores.clone()

    named: dict[str, Tensor] = {}
    leaves: list[tuple[Tensor, Tensor] | None] = []
    for spec, p, w, s in zip(space.tensors, *map(space.views, (pre, theta, scores)), strict=True):
        if len(spec.shape) < 2:
            named[spec.name] = p
            leaves.append(None)
            continue
        w, s = w.clone().requires_grad_(), s.clone().requires_grad_()
        mask = _Top.apply(s, int(0.4 * spec.size))
        # The product gives s its gradient through h; the gradient of θ is 1 inside and outside the mask, see the strategy.
        named[spec.name] = p + mask * (w.detach() - p) + (w - w.detach())
        leaves.append((w, s))
    reference = torch.func.functional_call(model, named, (x,))
    assert torch.equal(
        space.flatten(model), torch.cat([named[spec.name].detach().reshape(-1) for spec in space.tensors])
    )
    nn.functional.cross_entropy(reference, y).backward()
    expected = torch.zeros(2, len(space)).double()
    for spec, pair in zip(space.tensors, leaves, strict=True):
        for row, leaf in enumerate(pair or ()):
            assert leaf.grad is not None
            expected[row, spec.offset : spec.offset + spec.size] = leaf.grad.flatten()
    expected[0, owned.indices] = 0

    nn.functional.cross_entropy(model(x), y).backward()
    winning.collect()
    matrices = [space.tensors[i] for i in weight_matrices(space)]
    for position, parameter in enumerate(winning.parameters):  # θ and s of one matrix, then of the next one
        spec = matrices[position // 2]
        wanted = expected[position % 2, spec.offset : spec.offset + spec.size].view(spec.shape)
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-10, atol=1e-14)
    assert all(tensor.grad is None for tensor in winning.touched)
    assert bool((expected[1, owned.indices] != 0).all())  # owned entries do get gradients of their scores


def test_wsn_chooses_the_top_share_of_each_tensor_and_shows_the_others_as_they_were() -> None:
    """Scores are 0, 1, 2 … for 20 and 12 entries: a capacity of a quarter takes the last 5 and the last 3."""
    model = Two()
    space = ParameterSpace.of(model)
    pre = space.flatten(model)
    winning = WinningSubnetwork(
        model, space, Graft(Region.empty(), torch.empty(0)), capacity=0.25, mask_every=2, seed=0
    )
    assert torch.equal(space.flatten(model), pre)
    winning._theta += 1
    winning._scores.copy_(torch.arange(float(len(space))))
    drawn = winning.region()
    winning.write()
    assert winning.region() == drawn  # a mask is chosen at every second update
    winning.write()
    chosen = [15, 16, 17, 18, 19, 33, 34, 35]  # a.bias is 20–23
    assert winning.region().indices.tolist() == chosen
    expected = pre.clone()
    expected[chosen] += 1
    assert torch.equal(space.flatten(model), expected)
    winning._theta[17] = pre[17]
    winning._scores.zero_()
    assert 17 not in winning.region().indices  # entry 17 did not move
    winning.write()
    winning.write()
    assert len(winning.region()) == 0  # ties never make a mask larger than the capacity


def test_wsn_learns_a_mask_that_is_not_the_one_it_drew(tiny_stream: MakeStream) -> None:
    """If gradients of θ were cut off outside the mask, the first mask would be the last."""

    class First(SupervisedPlugin):
        def before_training_exp(self, strategy: Any, **_: Any) -> None:
            self.mask = strategy.training.trained._mask.clone()

    first = First()
    strategy = learn(make("wsn", tiny_stream(), plugins=[first], **OPTIMIZERS["adamw"]), 1)
    region = strategy.ledger.records[0].region
    assert len(region - Region.from_mask(first.mask)) > 0.3 * len(region)


# -- BitFit and graft re-training ------------------------------------------------------------------------


def test_bitfit_trains_all_biases_and_nothing_else(tiny_stream: MakeStream) -> None:
    strategy = learn(make("bitfit", tiny_stream()))
    biases = {spec.name for spec in strategy.space.tensors if spec.name.endswith(".bias")}
    assert len(biases) == 2 * 8  # two layers: query, key, value, two outputs, one intermediate, two LayerNorms
    for record in strategy.ledger.records:
        held = {strategy.space.tensors[i].name for i, _, _ in strategy.space.split(record.owned.region.indices)}
        assert held == biases
        assert len(record.owned.region) == sum(s.size for s in strategy.space.tensors if s.name in biases)
        assert bool((record.owned.values != strategy.pre_trained.theta[record.owned.region.indices]).any())


def test_graft_retrain_starts_from_the_pre_trained_values(tiny_stream: MakeStream) -> None:
    for start, steps in (("pre-trained", 0), ("fine-tuned", 0), (None, None)):
        changes = {"region_steps": steps} | ({"region_start": start} if start else {})
        watch = Watch()
        strategy = learn(make("graft-retrain", tiny_stream(), plugins=[watch], **changes), 1)
        owned = strategy.ledger.records[0].owned
        same = owned.values == strategy.pre_trained.theta[owned.region.indices]
        from_pre = torch.equal(watch.start, strategy.pre_trained.theta)
        assert from_pre == (start != "fine-tuned")
        assert bool(same.all()) == (start == "pre-trained")


# -- Rates and refusals ----------------------------------------------------------------------------------


class Rate(SupervisedPlugin):
    """Records the training options, with their learning rates, before the first update."""

    def before_training_exp(self, strategy: Any, **_: Any) -> None:
        self.options = strategy.training.options


@pytest.mark.sampled("packnet")
@pytest.mark.parametrize("name", ISOLATING)
def test_the_rate_of_adamw_follows_the_size_of_the_region(tiny_stream: MakeStream, name: str) -> None:
    """The rate grows by √(N/s) if s of N entries are trained; PackNet keeps the rate of its first phase."""
    rate = Rate()
    strategy = learn(make(name, tiny_stream(), plugins=[rate], optimizer="adamw", learning_rate=1e-3), 1)
    n = len(strategy.space)
    biases = sum(spec.size for spec in strategy.space.tensors if spec.name.endswith("bias"))
    factor = {"packnet": 1, "wsn": (1 / 0.2) ** 0.5, "bitfit": (n / biases) ** 0.5, "graft-retrain": (1 / 0.05) ** 0.5}
    assert rate.options.learning_rate == pytest.approx(1e-3 * factor[name], rel=0.01)
    assert rate.options.readout_learning_rate == 1e-3
    learn(make(name, tiny_stream(), plugins=[rate], optimizer="adamw", learning_rate=1e-3, region_rate_factor=2.0), 1)
    assert rate.options.learning_rate == pytest.approx(2e-3 * factor[name], rel=0.01)


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("bitfit", "weight", "The model has no graftable bias: expected a name that ends in 'bias'.*Choose"),
        ("packnet", "bias", "no graftable weight matrix: expected a tensor of two dimensions.*Choose"),
        ("wsn", "bias", "no graftable weight matrix: expected a tensor of two dimensions.*Choose"),
    ],
)
def test_a_model_without_what_is_trained_is_refused_at_once(
    tiny_stream: MakeStream, monkeypatch: pytest.MonkeyPatch, name: str, part: str, message: str
) -> None:
    stream = tiny_stream()
    space = ParameterSpace.of(stream.model.backbone, include=(rf"\.{part}$",))
    monkeypatch.setattr(type(stream.model), "space", lambda self: space)
    with pytest.raises(ModelError, match=message):
        make(name, stream)


def test_a_ledger_of_another_composition_is_refused(tiny_stream: MakeStream, tmp_path: Path) -> None:
    learn(make("wsn", tiny_stream()), 1).save(tmp_path)
    with pytest.raises(LedgerError, match=r"has composition selection, .*packnet.* needs parents"):
        make("packnet", tiny_stream()).load(tmp_path)
    for name, other, expected in (("packnet", "bitfit", "qnli, .*θ_pre"), ("bitfit", "packnet", "θ_pre, .*qnli")):
        learn(make(name, tiny_stream()), 2).save(tmp_path)
        with pytest.raises(LedgerError, match=f"'ag_news' stands on {expected}"):
            make(other, tiny_stream()).load(tmp_path)
