"""Grafting and localizing: equations 1 to 4 of the paper, compared with a slow implementation that follows them literally."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from benchmarks.speed.measurement import PeakMemory
from forgetfree.core import mask
from forgetfree.core.mask import LearnedRegion, MaskOptions, hard_region, learn_region
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region, grafted
from forgetfree.core.selection import budget, most_moved, top
from forgetfree.core.trained import CrossEntropy, RegionParameters, in_training
from forgetfree.errors import OptionError, TrainingError

Batch = tuple[Tensor, Tensor, Tensor]


# -- Eq. 1 -----------------------------------------------------------------------------------------------


def test_a_graft_is_equation_1() -> None:
    """θ(γ) = γ ⊙ θ_ft + (1 − γ) ⊙ θ_pre, where γ is every other entry."""
    model, _ = tiny.build("bert")
    space = ParameterSpace.of(model)
    pre, ft = space.flatten(model), torch.randn(len(space))
    gamma = (torch.arange(len(space)) % 2 == 0).float()
    region = Region.from_mask(gamma.bool())
    with pytest.raises(ZeroDivisionError), grafted(model, space, region, ft[region.indices]):
        assert torch.equal(space.flatten(model), gamma * ft + (1 - gamma) * pre)
        raise ZeroDivisionError
    assert torch.equal(space.flatten(model), pre)


# -- Budget, top, base regions ---------------------------------------------------------------------------


def test_the_budget_is_the_share_rounded_down() -> None:
    """0.29 · 100 is 28.999999999999996 in floating point; the budget is 29."""
    for size, sparsity, entries in (
        (100, 0.29, 29),
        (100, 0.299, 29),
        (85_000_000, 1e-4, 8500),
        (7, 1.0, 7),
        (3, 1 / 3, 1),
    ):
        assert budget(size, sparsity) == entries
    for sparsity in (0, -0.1, 1.1, "1e-3"):
        with pytest.raises(OptionError, match="sparsity must be a number above 0 and at most 1"):
            budget(100, sparsity)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"leaves no entry of the 100 graftable ones. Give at least 1.0e-02"):
        budget(100, 0.009)


def slow_top(scores: Tensor, count: int, eligible: Tensor) -> list[int]:
    """Sort by score, and equal scores by index."""
    ranked = sorted((i for i in range(len(scores)) if eligible[i]), key=lambda i: (-float(scores[i]), i))
    return sorted(ranked[:count])


@pytest.mark.sampled("few are high-50")
@pytest.mark.parametrize("size", [50, 20_000])
@pytest.mark.parametrize("spread", ["normal", "ties", "few are high", "rising"])
def test_the_highest_scores_equal_those_of_a_slow_sort(size: int, spread: str) -> None:
    """For many scores, the maxima of blocks exclude most candidates; the result stays the same."""
    generator = torch.Generator().manual_seed(size)
    scores = torch.randn(size, generator=generator)
    if spread == "ties":
        scores = scores.round()
    elif spread == "few are high":
        scores = torch.where(torch.rand(size, generator=generator) < 0.01, scores.abs() + 9, torch.zeros(()))
    elif spread == "rising":
        scores = torch.arange(size).float()
    eligible = torch.rand(size, generator=generator) < 0.9
    for count in (1, 7, size // 100 + 1, size // 3, size):
        assert top(scores.clone(), count, eligible).indices.tolist() == slow_top(scores, count, eligible)
    assert top(scores, 0) == top(scores, 3, torch.zeros(size, dtype=torch.bool)) == Region.empty()


@pytest.mark.sampled("50-dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [50, 8192, 10_007])
def test_nan_is_never_taken_and_hides_nothing(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    ft = torch.randn(size, generator=generator).to(dtype)
    ft[[7, size // 2, size - 1]] = math.nan
    numbers = (~ft.isnan()).nonzero().squeeze(1)
    ft[numbers[-1]] = math.inf
    for count in (1, 10, size // 3, size):
        assert top(ft, count).indices.tolist() == slow_top(ft, count, ~ft.isnan())
        assert most_moved(torch.zeros_like(ft), ft, count).indices.tolist() == slow_top(ft.abs(), count, ~ft.isnan())
        assert hard_region(ft, -10.0, Region.of([3, 7]), count) - Region.of(numbers) == Region.empty()
    assert top(torch.full((size,), math.nan), 3) == Region.empty()


@pytest.mark.parametrize("count", [1, 9, 40, 300])
def test_the_hard_region_equals_that_of_a_slow_sort_by_gamma(count: int) -> None:
    """γ is ranked by its logit in float64: S outside the base, −S inside. Moves far below the last bit of S = −10 count."""
    generator = torch.Generator().manual_seed(count)
    shift = torch.randn(300, generator=generator) * 10 ** torch.linspace(-9, 1.2, 300)
    base, eligible = (torch.rand(300, generator=generator) < share for share in (0.1, 0.8))
    scores = shift.double() - 10
    rank = torch.where(base, -scores, scores)
    found = hard_region(shift.masked_fill(~eligible, -math.inf), -10.0, Region.from_mask(base), count)
    assert found.indices.tolist() == slow_top(rank, count, eligible)


def test_the_movement_base_is_the_most_moved_entries() -> None:
    pre = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])
    ft = torch.tensor([0.1, -3.0, 2.0, 0.0, 1.0])
    assert most_moved(pre, ft, 2).indices.tolist() == [1, 2]
    assert most_moved(pre, ft, 5).indices.tolist() == [0, 1, 2]  # two entries did not move
    assert pre.tolist() == [0, 0, 0, 0, 1]  # the input is not overwritten


# -- Learning the mask, against the reference ------------------------------------------------------------


class Net(nn.Module):
    """A network with four tensors (5·4 + 4 + 4·3 + 3 = 39 entries) and a nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 4)
        self.two = nn.Linear(4, 3)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


def problem(seed: int = 0, rows: int = 12, steps: int = 8) -> tuple[Net, ParameterSpace, Tensor, Tensor, list[Batch]]:
    """Return a model with θ_pre, a θ_ft in which one entry in five did not move, and one batch per step."""
    generator = torch.Generator().manual_seed(seed)
    model = Net()
    space = ParameterSpace.of(model)
    pre = torch.randn(len(space), generator=generator)
    move = torch.randn(len(space), generator=generator) * (torch.arange(len(space)) % 5 != 0)
    space.load_(model, pre)
    batches = [
        (
            torch.randn(rows, 5, generator=generator),
            torch.randint(0, 3, (rows,), generator=generator),
            torch.zeros(rows, dtype=torch.int64),
        )
        for _ in range(steps)
    ]
    return model, space, pre, pre + move, batches


def reference_scores(
    model: nn.Module,
    space: ParameterSpace,
    pre: Tensor,
    ft: Tensor,
    base: Tensor,
    batches: Sequence[Batch],
    rate: float,
    start: float = -10.0,
) -> tuple[Tensor, list[float]]:
    """Compute equations 3 and 4 as they are written: autograd on S, in float64."""
    scores = torch.full_like(pre, start, dtype=torch.float64, requires_grad=True)
    model = model.double()
    losses = []
    for x, y, t in batches:
        sigma = torch.sigmoid(scores)
        base64 = base.double()
        gamma = base64 * (1 - sigma) + (1 - base64) * sigma
        theta = gamma * ft.double() + (1 - gamma) * pre.double()
        tensors = {s.name: theta[s.offset : s.offset + s.size].view(s.shape) for s in space.tensors}
        inputs = x.double() if x.is_floating_point() else x
        loss = F.cross_entropy(functional_call(model, tensors, (inputs, t)), y)
        (gradient,) = torch.autograd.grad(loss, scores)
        with torch.no_grad():
            scores -= rate * gradient
        losses.append(float(loss.detach()))
    model.float()
    return scores.detach(), losses


def base_of(kind: str, pre: Tensor, ft: Tensor, count: int) -> Region:
    if kind == "random":
        return Region.of(torch.randperm(len(pre), generator=torch.Generator().manual_seed(0))[:count])
    return most_moved(pre, ft, count) if kind == "movement" else Region.empty()


def learn(
    model: nn.Module,
    space: ParameterSpace,
    pre: Tensor,
    ft: Tensor,
    batches: Sequence[Batch],
    base: Region,
    *,
    sparsity: float = 0.25,
    validate: Callable[[], float] | None = None,
    cut: int | None = None,
    on_step: Any = None,
    forward: Any = None,
    precision: str = "fp32",
    **options: Any,
) -> LearnedRegion:
    """Call `learn_region` with whole batches, or with micro-batches of ``cut`` rows."""

    def pieces(batch: Batch) -> list[Batch]:
        return list(zip(*(part.split(cut) for part in batch), strict=True)) if cut else [batch]

    return learn_region(
        model,
        space,
        pre,
        ft,
        [pieces(batch) for batch in batches],
        CrossEntropy(forward or model, torch.device("cpu"), precision),
        sparsity=sparsity,
        base=base,
        options=MaskOptions(**({"steps": len(batches), "learning_rate": 2e4} | options)),
        validate=validate,
        on_step=on_step,
    )


@pytest.mark.parametrize(
    ("kind", "start", "rate"),
    [
        ("movement", -10, 2e3),
        ("empty", -10, 2e4),
        ("movement", -2, 5.0),
        ("empty", -2, 5.0),
        ("random", -2, 2.0),
    ],
)
def test_learning_the_mask_is_gradient_descent_on_equation_3(kind: Any, start: float, rate: float) -> None:
    """S agrees with autograd's S to 1e-6, at learning rates that move S by whole units."""
    model, space, pre, ft, batches = problem()
    base = base_of(kind, pre, ft, 9)
    expected, losses = reference_scores(model, space, pre, ft, base.mask(len(space)), batches, rate, start)
    learned = learn(model, space, pre, ft, batches, base, learning_rate=rate, score_init=start)
    assert float((expected - start).abs().max()) > 1
    assert int(((expected - start).abs() > 0.1).sum()) >= 5
    torch.testing.assert_close(learned.scores.double(), expected, rtol=0, atol=1e-6)
    assert learned.losses == pytest.approx(losses, rel=1e-6)
    # The hard region is the top of the reference's γ among the moved entries, in float64.
    sigma = torch.sigmoid(expected)
    gamma = torch.where(base.mask(len(space)), 1 - sigma, sigma)
    assert learned.region == top(gamma, 9, ft != pre)
    assert learned.step == len(batches)


class Mixed(nn.Module):
    """A model with a channels-last convolution, two dtypes, and a layer without influence on the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.linear = nn.Linear(16, 3, dtype=torch.bfloat16)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        hidden = torch.tanh(self.convolution(x)).flatten(1)
        return self.linear(hidden.to(self.linear.weight.dtype))


def test_a_step_is_equations_3_and_4_for_any_layout_and_dtype() -> None:
    """The gradients of bfloat16 tensors have two to three digits."""
    torch.manual_seed(0)
    model = Mixed()
    space = ParameterSpace.of(model)
    pre = space.flatten(model)
    ft = (pre + torch.randn(len(space))).bfloat16().float()
    batches = [(torch.randn(6, 3, 3, 3), torch.randint(0, 3, (6,)), torch.zeros(6, dtype=torch.long))] * 3
    base = Region.of(torch.randperm(len(pre))[:20])
    gamma = base.mask(len(space))
    loss = CrossEntropy(model, torch.device("cpu"), "fp32")
    search = mask.MaskSearch(model, space, pre, ft, base, MaskOptions(learning_rate=5.0, score_init=-2.0), loss)
    search.step_(batches[:1], 1)
    sigma = torch.sigmoid(search.scores())
    theta = torch.where(gamma, ft + sigma * (pre - ft), pre + sigma * (ft - pre))
    torch.testing.assert_close(
        space.flatten(model),
        torch.cat([v.to(s.dtype).float().view(-1) for s, v in zip(space.tensors, space.views(theta), strict=True)]),
        rtol=1e-2,
        atol=1e-6,
    )
    space.load_(model, pre)
    learned = learn(model, space, pre, ft, batches, base, learning_rate=5.0, score_init=-2.0)
    assert torch.equal(space.flatten(model), pre)
    expected, _ = reference_scores(Mixed(), space, pre, ft, gamma, batches, 5.0, -2.0)
    assert float((expected + 2).abs().max()) > 0.5
    torch.testing.assert_close(learned.scores.double(), expected, rtol=0.01, atol=0.02)
    assert bool((learned.scores[-6:] == -2).all())


def test_micro_batches_do_not_change_the_scores() -> None:
    model, space, pre, ft, batches = problem()
    base = most_moved(pre, ft, 9)
    whole = learn(model, space, pre, ft, batches, base)
    cut = learn(model, space, pre, ft, batches, base, cut=5)  # 12 rows as 5, 5 and 2
    torch.testing.assert_close(cut.scores, whole.scores, rtol=2e-5, atol=1e-6)
    assert cut.losses == pytest.approx(whole.losses, rel=1e-5)
    assert cut.region == whole.region


@pytest.mark.parametrize("entries", [1, 9, 20, 39])
@pytest.mark.parametrize("kind", ["movement", "empty", "random"])
def test_the_budget_is_met_exactly_and_nothing_unmoved_is_taken(kind: Any, entries: int) -> None:
    """31 of 39 entries moved, so at most 31 can be chosen. Each step is reported; with one candidate, validation is skipped."""
    model, space, pre, ft, batches = problem()
    assert int((ft != pre).sum()) == 31
    base, told = base_of(kind, pre, ft, entries), list[tuple[int, float]]()
    learned = learn(
        model, space, pre, ft, batches, base, sparsity=entries / 39,
        on_step=lambda *step: told.append(step), validate=lambda: 1 / 0, evaluate_every=8,
    )  # fmt: skip
    assert (learned.budget, len(learned.region)) == (entries, min(entries, 31))
    assert bool((ft != pre)[learned.region.indices].all())
    assert told == list(enumerate(learned.losses, 1))
    assert (learned.validation, learned.step) == ((), 8)


def test_the_model_ends_as_it_began() -> None:
    """The model holds θ_pre bit for bit, has no gradients, and has its former modes and flags."""
    model, space, pre, ft, batches = problem()
    model.train()
    model.two.bias.requires_grad_(False)
    learn(model, space, pre, ft, batches, most_moved(pre, ft, 9), validate=lambda: 0.0, evaluate_every=2)
    assert torch.equal(space.flatten(model), pre)
    assert model.training
    assert [p.requires_grad for p in model.parameters()] == [True, True, True, False]
    assert all(p.grad is None for p in model.parameters())


def test_no_steps_take_only_the_base() -> None:
    """A base below the budget is not filled up, and its unmoved entries are left out."""
    model, space, pre, ft, _ = problem()
    small, still = most_moved(pre, ft, 3), Region.of([0, 5, 6])  # every fifth entry does not move
    assert learn(model, space, pre, ft, [], small, steps=0).region == small
    assert learn(model, space, pre, ft, [], still, steps=0).region == Region.of([6])
    with pytest.raises(OptionError, match=r"An empty base region and 0 steps leave no region\. Give steps"):
        learn(model, space, pre, ft, [], Region.empty(), steps=0)


def test_half_precision_gradients_of_a_large_batch_do_not_vanish() -> None:
    """In fp16 the scores follow those of fp32, even where a step adds up 512 rows."""
    scores = {}
    for precision in ("fp32", "fp16"):
        model, space, pre, ft, batches = problem(rows=512, steps=2)
        learned = learn(
            model, space, pre, ft, batches, Region.empty(), steps=2, cut=64, learning_rate=1e3, precision=precision
        )
        scores[precision] = learned.scores + 10
    assert float((scores["fp16"] - scores["fp32"]).norm() / scores["fp32"].norm()) < 0.01


# -- Validation ------------------------------------------------------------------------------------------


def test_validation_sees_the_hard_mask_and_the_best_wins() -> None:
    """Scores 1, 3, 3, 2 at steps 2, 4, 6, 8: the later of the two best, step 6, is taken."""
    model, space, pre, ft, batches = problem()
    base = most_moved(pre, ft, 9)
    answers, seen = iter([1.0, 3.0, 3.0, 2.0]), []

    def validate() -> float:
        seen.append(space.flatten(model))
        return next(answers)

    learned = learn(model, space, pre, ft, batches, base, validate=validate, evaluate_every=2)
    assert learned.validation == ((2, 1.0), (4, 3.0), (6, 3.0), (8, 2.0))
    assert learned.step == 6
    for theta in seen:  # every one is a hard graft of 9 entries
        at = theta != pre
        assert int(at.sum()) == 9
        assert torch.equal(theta[at], ft[at])
    assert Region.from_mask(seen[2] != pre) == learned.region


def test_dropout_stays_off_if_validation_leaves_the_model_in_training_mode() -> None:
    model, space, pre, ft, batches = problem()
    modes = []
    model.register_forward_pre_hook(lambda *_: modes.append(model.training))
    learn(
        model, space, pre, ft, batches, Region.empty(), validate=lambda: float(model.train() is None), evaluate_every=1
    )
    assert modes == [False] * len(batches)


# -- Memory ----------------------------------------------------------------------------------------------


def test_a_search_takes_little_more_than_two_vectors_beside_the_model_and_both_thetas() -> None:
    """The vectors are S, and gradients or ranks; validation is included. N is 2.6 million, the largest tensor 0.1 N."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(10)), nn.Linear(512, 2))
    space = ParameterSpace.of(model)
    pre = space.flatten(model)
    ft = pre + torch.randn(len(space), generator=torch.Generator().manual_seed(0)) * 0.01
    batch = torch.randn(4, 512), torch.tensor([0, 1, 0, 1]), torch.zeros(4, dtype=torch.long)
    base = most_moved(pre, ft, 300)
    how: Any = {"forward": lambda x, t: model(x), "validate": lambda: 0.0, "evaluate_every": 1, "learning_rate": 1e7}
    with PeakMemory(pre, ft, *model.parameters()) as peak:
        learn(model, space, pre, ft, [batch] * 3, base, sparsity=1e-3, **how)
    assert 2 < peak.bytes / (4 * len(space)) < 2.5


# -- Errors ----------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_the_search_and_restores_the_model() -> None:
    model, space, pre, ft, batches = problem()
    x, y, t = batches[1]
    batches[1] = (x * float("nan"), y, t)
    with pytest.raises(TrainingError, match="The loss became nan at step 2"):
        learn(model, space, pre, ft, batches, Region.empty())
    assert torch.equal(space.flatten(model), pre)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("entry", [0, 38])
def test_a_gradient_that_is_not_finite_stops_the_search_and_restores_the_model(entry: int, odd: float) -> None:
    """This holds even where the loss is finite, and at an entry that did not move."""
    model, space, pre, ft, batches = problem()
    ft[0] = pre[0]
    number = next(i for i, spec in enumerate(space.tensors) if entry < spec.offset + spec.size)

    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[entry - space.tensors[number].offset] = odd
        return gradient

    space.parameters(model)[number].register_hook(spoil)
    with pytest.raises(TrainingError, match="The gradients at step 1 of the mask search add up to"):
        learn(model, space, pre, ft, batches, Region.empty())
    assert torch.equal(space.flatten(model), pre)


# -- Training a region -----------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd with weight decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
}


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_the_region_moves_with_any_optimizer(name: str, sampling: bool) -> None:
    model, space, pre, _, batches = problem()
    indices = torch.tensor([0, 7, 21, 38])
    region = Region.of(indices)
    trained = RegionParameters(model, space, region)
    assert [id(p) for p in trained.touched] == [id(model.one.weight), id(model.one.bias), id(model.two.bias)]
    optimizer = OPTIMIZERS[name]([trained.values])
    with in_training(model, trained, [], sampling=sampling):
        for x, y, t in batches:
            F.cross_entropy(model(x, t), y).backward()
            trained.collect()
            optimizer.step()
            trained.write()
            assert all(p.grad is None for p in trained.touched)
    after = space.flatten(model)
    outside = ~region.mask(len(space))
    assert torch.equal(after[outside], pre[outside])
    assert bool((after[indices] != pre[indices]).all())
    assert torch.equal(after[indices], trained.values.detach())
