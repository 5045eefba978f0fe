"""Strategies that isolate tasks in a ledger: forget-free bit for bit, and each the method it is named after.

Nothing is compared with a tolerance but a gradient with that of its slow reference.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from avalanche.core import SupervisedPlugin
from torch import Tensor, nn

from forgetfree import registry
from forgetfree.cli.ledger import render_ledger
from forgetfree.core.body import fingerprint_of
from forgetfree.core.parameters import ParameterSpace, weight_matrices
from forgetfree.core.regions import Region
from forgetfree.core.selection import most_moved_by_tensor
from forgetfree.core.tensors import load_tensors_
from forgetfree.data.sources import load_tasks
from forgetfree.errors import LedgerError, ModelError, TrainingError, UsageError
from forgetfree.ledger import Ledger, LedgerSwitch
from forgetfree.ledger.graft import Graft
from forgetfree.models.loading import load_model
from forgetfree.models.state import ModelState
from forgetfree.serve.inference import Predictor
from forgetfree.strategies.wsn import WinningSubnetwork
from forgetfree.training.loop import predict
from forgetfree.training.monitor import Monitor

STEPS = 4
GRAFTING: dict[str, Any] = {"sparsity": 0.05, "mask_steps": 2, "mask_batch_size": 12}
OWN: dict[str, dict[str, Any]] = {
    "packnet": {"keep": 0.25},
    "wsn": {"capacity": 0.2, "mask_every": 1},
    "bitfit": {},
    "graft-retrain": GRAFTING,
    "grafting-continual": GRAFTING,
}
ISOLATING = [name for name in OWN if name != "grafting-continual"]  # that has tests of its own
COMPOSITION = {"packnet": "union", "wsn": "selection", "bitfit": "alone", "graft-retrain": "alone"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": "sgd", "learning_rate": 0.05, "momentum": 0.9},
    "adamw": {"optimizer": "adamw", "learning_rate": 0.003},
}
MODELS = {"bert": "linear", "roberta-mlm": "prompt"}
MakeStream = Callable[..., Any]


def make(name: str, stream: Any, **changes: Any) -> Any:
    """A strategy by its registered name; what is no option of it is an argument of the constructor."""
    cls = registry.strategy(name)
    known = cls.Options.__dataclass_fields__
    defaults = {"steps": STEPS, "batch_size": 4, "weight_decay": 0.1} | OPTIMIZERS["momentum"] | OWN[name]
    options = defaults | {key: value for key, value in changes.items() if key in known}
    return cls(
        stream=stream,
        options=cls.Options(**options),
        **{key: value for key, value in changes.items() if key not in known},
    )


def logits(strategy: Any) -> dict[str, Tensor]:
    """What the strategy answers now, for every task of the stream."""
    return {name: torch.from_numpy(answer.logits) for name, answer in strategy.evaluate().items()}


def learn(strategy: Any, count: int | None = None) -> Any:
    for experience in list(strategy.stream.benchmark.train_stream)[:count]:
        strategy.train(experience)
    return strategy


def theta_of(strategy: Any) -> Tensor:
    flat: Tensor = strategy.space.flatten(strategy.model.backbone)
    return flat


def outside(model: Any) -> dict[str, Tensor]:
    """A copy of all that is neither graftable nor a readout."""
    inside = {f"backbone.{spec.name}" for spec in model.space().tensors}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n: t.detach().clone() for n, t in tensors.items() if n not in inside and n.startswith("backbone.")}


def assert_same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


class Watch(SupervisedPlugin):
    """The flat entries that differ from those of an earlier moment at any update of a task."""

    def before_training_exp(self, strategy: Any, **_: Any) -> None:
        self.start = theta_of(strategy)
        self.updates, self.differs = 0, torch.zeros(len(strategy.space), dtype=torch.bool)

    def after_update(self, strategy: Any, **_: Any) -> None:
        self.differs |= theta_of(strategy) != self.start
        self.updates += 1


@dataclass
class History:
    """One stream learned, as seen after every task."""

    name: str
    kind: str
    stream: Any
    strategy: Any
    outside: dict[str, Tensor]
    rows: list[dict[str, Tensor]]
    moved: list[Region]
    starts: list[Tensor]
    ledger_file: Path


@pytest.fixture(scope="module", params=[(n, m, o) for n in ISOLATING for m in MODELS for o in OPTIMIZERS], ids="-".join)
def history(
    request: pytest.FixtureRequest, tiny_stream: MakeStream, tmp_path_factory: pytest.TempPathFactory
) -> History:
    name, kind, optimizer = request.param
    stream = tiny_stream(kind, MODELS[kind])
    watch, before = Watch(), outside(stream.model)
    strategy = make(name, stream, plugins=[watch], **OPTIMIZERS[optimizer])
    rows, moved, starts = [logits(strategy)], [], []
    for experience in stream.benchmark.train_stream:
        strategy.train(experience)
        moved.append(Region.from_mask(watch.differs))
        starts.append(watch.start)
        rows.append(logits(strategy))
    directory = tmp_path_factory.mktemp("run")
    strategy.save(directory)
    return History(name, kind, stream, strategy, before, rows, moved, starts, directory / "ledger.safetensors")


# -- Invariant 1: forget-free ----------------------------------------------------------------------------


@pytest.mark.sampled("wsn-bert-momentum")
def test_later_tasks_leave_every_earlier_logit_as_it_was(history: History) -> None:
    for position, task in enumerate(history.stream.tasks):
        learned = history.rows[position + 1][task.name]
        assert not torch.equal(history.rows[position][task.name], learned)  # else it would hold of doing nothing
        for later in history.rows[position + 2 :]:
            assert torch.equal(learned, later[task.name])


# -- Invariant 2: nothing else moves ---------------------------------------------------------------------


def test_only_what_a_task_may_train_moves(history: History) -> None:
    space, ledger = history.strategy.space, history.strategy.ledger
    matrices = torch.zeros(len(space), dtype=torch.bool)
    for i in weight_matrices(space):
        matrices[space.tensors[i].offset :][: space.tensors[i].size] = True
    for record, moved in zip(ledger.records, history.moved, strict=True):
        assert len(moved) > 0 and len(record.owned.region) > 0
        if history.name == "wsn":  # the mask wanders while it is learned, over weight matrices only
            assert bool(matrices[moved.indices].all())
        else:
            assert len(moved - record.owned.region) == 0
        if history.name in ("packnet", "wsn"):
            assert bool(matrices[record.region.indices].all())


def test_the_pre_trained_model_comes_back_exactly(history: History) -> None:
    strategy = history.strategy
    owned = strategy.ledger.owned() if history.name == "packnet" else Region.empty()  # it carries the union so far
    left = theta_of(strategy)
    untouched = ~owned.mask(len(left))
    assert torch.equal(left[untouched], strategy.pre_trained.theta[untouched])
    assert_same_tensors(outside(history.stream.model), history.outside)


@pytest.mark.sampled("packnet-bert-momentum")
def test_the_pre_trained_model_comes_back_exactly_after_every_switch(tiny_stream: MakeStream, history: History) -> None:
    backbone = tiny_stream(history.kind, MODELS[history.kind]).model.backbone
    ledger, pre = Ledger.load(history.ledger_file), history.strategy.pre_trained.theta
    switch = LedgerSwitch(ledger, backbone)
    for task in ("sst2", "qnli", "ag_news", "qnli", "sst2"):
        switch.to_task(task)
        expected = pre.clone()
        graft = ledger.graft(task)
        expected[graft.region.indices] = graft.values
        assert torch.equal(ledger.space.flatten(backbone), expected)
        assert not torch.equal(expected, pre)
    switch.to(0)
    assert torch.equal(ledger.space.flatten(backbone), pre)


# -- Invariant 3: who owns what --------------------------------------------------------------------------


def test_regions_are_disjoint_unless_tasks_stand_alone(history: History) -> None:
    ledger = history.strategy.ledger
    assert ledger.composition == COMPOSITION[history.name]
    union = Region.empty()
    for record in ledger.records:
        if ledger.composition == "alone":
            assert record.owned.region == record.region
        else:
            assert record.owned.region.isdisjoint(union)
            assert record.owned.region == record.region - union
        union = union | record.owned.region
    assert ledger.owned() == union
    if history.name == "packnet":  # each trains free entries only
        assert all(record.owned.region == record.region for record in ledger.records)
    if history.name == "wsn":  # masks do meet, or reuse would not be tested
        assert any(len(record.owned.region) < len(record.region) for record in ledger.records)


# -- Invariant 4: from the file --------------------------------------------------------------------------


@pytest.mark.sampled("graft-retrain-bert-adamw")
def test_a_new_strategy_answers_from_the_file(tiny_stream: MakeStream, history: History) -> None:
    fresh = make(history.name, tiny_stream(history.kind, MODELS[history.kind]))
    fresh.load(history.ledger_file.parent)
    assert fresh.ledger.composition == COMPOSITION[history.name]
    assert_same_tensors(logits(fresh), history.rows[-1])


@pytest.mark.sampled("graft-retrain-bert-adamw")
def test_a_ledger_alone_answers_from_the_file(tiny_stream: MakeStream, history: History) -> None:
    stream = tiny_stream(history.kind, MODELS[history.kind])
    ledger = Ledger.load(history.ledger_file)
    switch = LedgerSwitch(ledger, stream.model.backbone)
    for task in (stream.tasks[i] for i in (1, 0, 2)):
        load_tensors_(stream.model.readout_module(task.label), ledger.records[ledger.position(task.name)].readout)
        with switch.task(task.name):
            assert torch.equal(predict(stream.model, task.test), history.rows[-1][task.name])


@pytest.mark.sampled("bitfit-bert-momentum")
def test_rows_that_are_no_texts_are_not_predicted(model_directory: Callable[[str], Path], history: History) -> None:
    loaded = load_model(str(model_directory(history.kind)), MODELS[history.kind])
    texts = Ledger.load(history.ledger_file)
    ledger = Ledger(texts.space, texts.fingerprint, texts.composition)
    for record in texts.records:
        ledger.append(replace(record, definition=None))
    with pytest.raises(LedgerError, match=r"does not say what task .* asks for: .* its rows are no texts"):
        Predictor(loaded, ledger)


@pytest.mark.sampled("bitfit-bert-momentum")
def test_the_predictor_answers_from_the_file(
    model_directory: Callable[[str], Path], data_directory: Path, history: History
) -> None:
    tasks = load_tasks(history.stream.name, str(data_directory))
    loaded = load_model(str(model_directory(history.kind)), MODELS[history.kind])
    predictor = Predictor(loaded, Ledger.load(history.ledger_file))
    for task in (tasks[i] for i in (2, 0, 1)):
        assert torch.equal(predictor.logits(task.task.name, task.test), history.rows[-1][task.task.name])


@pytest.mark.sampled("wsn-roberta-mlm-momentum")
def test_the_predictor_reads_texts_alone_or_in_tuples(
    model_directory: Callable[[str], Path], data_directory: Path, history: History
) -> None:
    tasks = load_tasks(history.stream.name, str(data_directory))
    loaded = load_model(str(model_directory(history.kind)), MODELS[history.kind])
    predictor = Predictor(loaded, Ledger.load(history.ledger_file))
    single = next(task.task.name for task in tasks if len(task.task.text_columns) == 1)
    texts = ["a lovely film", "the story is dull"]
    assert predictor.answer(single, texts) == predictor.answer(single, [(text,) for text in texts])
    assert len(predictor.answer(single, iter(texts))) == 2
    with pytest.raises(UsageError, match=r"Expected a list of texts, got the text .a lovely film.\. Give \["):
        predictor.answer(single, "a lovely film")


@pytest.mark.sampled("packnet-bert-momentum")
def test_a_loaded_ledger_is_learned_on(tiny_stream: MakeStream, history: History) -> None:
    """A stream broken off after two tasks and taken up from the file ends in the same bits."""
    changes = {key: getattr(history.strategy.options, key) for key in ("optimizer", "learning_rate", "momentum")}
    changes["plugins"] = [Watch()]  # as the history has: beside plugins, gradients are taken in another way
    broken = learn(make(history.name, tiny_stream(history.kind, MODELS[history.kind]), **changes), 2)
    directory = history.ledger_file.parent / "broken"
    broken.save(directory)
    resumed = make(history.name, tiny_stream(history.kind, MODELS[history.kind]), **changes)
    resumed.load(directory)
    resumed.train(list(resumed.stream.benchmark.train_stream)[2])
    assert_same_tensors(logits(resumed), history.rows[-1])


@pytest.mark.sampled("packnet-bert-momentum")
def test_the_view_names_the_composition(history: History) -> None:
    ledger = Ledger.load(history.ledger_file)
    text = render_ledger(ledger, history.ledger_file)
    assert f"composition {COMPOSITION[history.name]}" in text
    assert f"{len(ledger.owned()):,}" in text


# -- Invariant 5: seeds ----------------------------------------------------------------------------------


@pytest.mark.sampled("wsn")
@pytest.mark.parametrize("name", ISOLATING)
def test_the_same_seed_gives_the_same_answers_and_another_seed_others(tiny_stream: MakeStream, name: str) -> None:
    def run(seed: int, disturb: int) -> dict[str, Tensor]:
        torch.manual_seed(disturb)  # what ran before must not matter
        return logits(learn(make(name, tiny_stream(stream="qnli,sst2"), seed=seed)))

    first = run(0, 1)
    assert_same_tensors(first, run(0, 2))
    other = run(1, 1)
    assert not any(torch.equal(first[task], other[task]) for task in first)


# -- In the midst of training ----------------------------------------------------------------------------


@pytest.mark.sampled("wsn-adamw")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ISOLATING)
def test_evaluating_in_the_midst_of_training_changes_nothing(
    tiny_stream: MakeStream, name: str, optimizer: str
) -> None:
    def run(**periodic: Any) -> tuple[dict[str, Tensor], Tensor, list[dict[str, Tensor]]]:
        strategy = make(name, tiny_stream(), accumulation=2, **OPTIMIZERS[optimizer], **periodic)
        seen = []
        for experience in strategy.stream.benchmark.train_stream:
            strategy.train(experience, eval_streams=[strategy.stream.benchmark.test_stream])
            seen.append({n: torch.from_numpy(p.logits) for n, p in strategy.predictions.items()})
        return logits(strategy), theta_of(strategy), seen

    answers, weights, _ = run()
    evaluated, weights_after, seen = run(eval_every=1, peval_mode="iteration")
    assert torch.equal(weights, weights_after)
    assert_same_tensors(evaluated, answers)
    # And they are real evaluations: learned tasks are answered by what they were learned to.
    assert all(len(row) == 3 for row in seen)
    assert torch.equal(seen[-1]["qnli"], answers["qnli"])
    assert torch.equal(seen[-1]["ag_news"], answers["ag_news"])


class Stop(Monitor):
    """Raises at the second update of one phase, once armed."""

    def __init__(self, at: str) -> None:
        self.at, self.armed = at, False

    def phase(self, task: str, phase: Any, steps: int) -> Any:
        def on_step(step: int, loss: float) -> None:
            if self.armed and phase == self.at and step == 2:
                raise KeyboardInterrupt

        return nullcontext(on_step)


@pytest.mark.sampled(
    "adamw-bitfit-train", "adamw-graft-retrain-fine_tune", "adamw-graft-retrain-localize", "adamw-packnet-fine_tune"
)
@pytest.mark.parametrize(
    ("name", "phase"),
    [(name, "train") for name in ISOLATING]
    + [("packnet", "fine_tune"), ("graft-retrain", "fine_tune"), ("graft-retrain", "localize")],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_interrupted_task_leaves_the_learned_ones_as_they_were(
    tiny_stream: MakeStream, name: str, phase: str, optimizer: str
) -> None:
    """And it can be trained after all, to the same bits as without the interrupt."""
    stop = Stop(phase)
    strategy = learn(make(name, tiny_stream(), monitor=stop, **OPTIMIZERS[optimizer]), 1)
    before, left, rest = logits(strategy), theta_of(strategy), outside(strategy.model)
    second = list(strategy.stream.benchmark.train_stream)[1]
    stop.armed = True
    with pytest.raises(KeyboardInterrupt):
        strategy.train(second)
    stop.armed = False
    assert torch.equal(theta_of(strategy), left)
    assert_same_tensors(outside(strategy.model), rest)
    assert strategy.ledger.tasks == ["qnli"]
    assert torch.equal(logits(strategy)["qnli"], before["qnli"])

    strategy.train(second)
    undisturbed = learn(make(name, tiny_stream(), **OPTIMIZERS[optimizer]), 2)
    assert_same_tensors(logits(strategy), logits(undisturbed))


@pytest.mark.sampled("wsn")
@pytest.mark.parametrize("name", ISOLATING)
def test_a_loss_that_is_not_finite_leaves_the_learned_tasks_as_they_were(tiny_stream: MakeStream, name: str) -> None:
    class Burst(SupervisedPlugin):
        armed = False

        def before_backward(self, strategy: Any, **_: Any) -> None:
            if self.armed and strategy.clock.train_exp_iterations == 1:
                strategy.loss = strategy.loss * float("nan")

    burst = Burst()
    strategy = learn(make(name, tiny_stream(), plugins=[burst]), 1)
    before, left = logits(strategy), theta_of(strategy)
    burst.armed = True
    with pytest.raises(TrainingError, match="became nan at step 2"):
        strategy.train(list(strategy.stream.benchmark.train_stream)[1])
    assert torch.equal(theta_of(strategy), left)
    assert torch.equal(logits(strategy)["qnli"], before["qnli"])
    assert strategy.ledger.tasks == ["qnli"]


def test_buffers_that_training_changes_come_back_with_their_task(tiny_stream: MakeStream) -> None:
    """BatchNorm's running statistics move in every forward pass of training, PackNet's first phase included."""
    for name in ISOLATING:
        stream = tiny_stream("bert", "linear")
        backbone = stream.model.backbone
        backbone.embeddings.LayerNorm = _Normed(backbone.embeddings.LayerNorm)
        loaded = replace(stream.loaded, fingerprint=fingerprint_of(backbone))
        stream = replace(stream, loaded=loaded, pre_trained=ModelState.of(stream.model))
        strategy = make(name, stream)
        rows = []
        for experience in stream.benchmark.train_stream:
            strategy.train(experience)
            rows.append(logits(strategy))
        assert {"embeddings.LayerNorm.batch.running_mean"} <= set(strategy.ledger.records[0].buffers)
        assert torch.equal(rows[0]["qnli"], rows[1]["qnli"])
        assert torch.equal(rows[0]["qnli"], rows[2]["qnli"])
        assert torch.equal(rows[1]["ag_news"], rows[2]["ag_news"])


class _Normed(nn.Module):
    """A LayerNorm with a BatchNorm after it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.batch = inner, nn.BatchNorm1d(inner.weight.numel(), affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.batch(self.inner(x).transpose(1, 2)).transpose(1, 2)


# -- PackNet ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "keep", "kept"), [(100, 0.25, 25), (100, 0.29, 29), (7, 0.5, 3), (1, 0.25, 1), (0, 0.5, 0)]
)
def test_a_share_is_rounded_down_but_never_to_nothing(count: int, keep: float, kept: int) -> None:
    space, pre = ParameterSpace.of(nn.Linear(100, 1, bias=False)), torch.zeros(100)
    free = torch.arange(100) < count
    assert len(most_moved_by_tensor(space, [0], pre, torch.ones(100), keep, free)) == kept


def thetas_of_training(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the first phase of each task leaves, of those that are learned from now on."""
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
    """By a sort of |θ − θ_pre| as the first phase left it, tensor by tensor, over entries that no task owned."""
    strategy = make("packnet", tiny_stream(), keep=0.3, **OPTIMIZERS[optimizer])
    dense = thetas_of_training(strategy, monkeypatch)
    learn(strategy)
    space, pre = strategy.space, strategy.pre_trained.theta
    owned: set[int] = set()
    values = pre.clone()
    for theta, record in zip(dense, strategy.ledger.records, strict=True):
        assert torch.equal(theta[sorted(owned)], values[sorted(owned)])  # frozen bit for bit in the first phase
        expected: set[int] = set()
        for spec in space.tensors:
            entries = range(spec.offset, spec.offset + spec.size)
            if len(spec.shape) < 2:
                assert torch.equal(theta[entries], pre[entries])  # biases and LayerNorms do not train
                continue
            free = sorted(set(entries) - owned, key=lambda i: (-abs(float(theta[i]) - float(pre[i])), i))
            ranked = sorted(free, key=lambda i: (-float((theta[i] - pre[i]).abs()), i))
            expected |= set(ranked[: int(0.3 * len(free) + 1e-6)])
        assert set(record.owned.region.indices.tolist()) == expected
        owned |= expected
        values[record.owned.region.indices] = record.owned.values


def test_packnet_retrains_what_it_keeps_from_where_it_was(
    tiny_stream: MakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without retraining, the task keeps the values of the first phase, and the others go back to θ_pre."""
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
    rows = []
    for experience in strategy.stream.benchmark.train_stream:
        strategy.train(experience)
        rows.append(logits(strategy))
    first, *others = strategy.ledger.records
    matrices = [strategy.space.tensors[i] for i in weight_matrices(strategy.space)]
    assert len(first.owned.region) == sum(spec.size for spec in matrices)
    assert [len(record.owned.region) for record in others] == [0, 0]
    assert torch.equal(rows[0]["qnli"], rows[2]["qnli"])
    assert torch.equal(rows[0]["ag_news"], rows[1]["ag_news"]) == (MODELS[kind] == "prompt")


# -- WSN -------------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two matrices and their biases."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class _Top(torch.autograd.Function):
    """h(s): 1 where s is in the top k; its gradient passes straight through (eq. 5)."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, k: int) -> Tensor:
        mask = scores.new_zeros(scores.numel())
        mask[scores.flatten().argsort(descending=True)[:k]] = 1
        return mask.view_as(scores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def test_wsn_gradients_are_those_of_the_straight_through_estimator() -> None:
    """Against autograd through θ(m) = θ_pre + h(s) ⊙ (θ − θ_pre), after some free and some owned entries have moved."""
    torch.manual_seed(0)
    model, x, y = Two().double(), torch.randn(7, 5).double(), torch.randint(3, (7,))
    space = ParameterSpace.of(model)
    pre = space.flatten(model)
    owned = Region.of([0, 3, 11, 24, 27])  # of a.weight 0–19 and b.weight 24–35
    values = pre[owned.indices] + 0.5
    winning = WinningSubnetwork(model, space, Graft(owned, values), capacity=0.4, mask_every=1, seed=0)
    with torch.no_grad():
        for parameter in winning.parameters:
            parameter += 0.3 * torch.randn(parameter.shape)
    winning.write()
    theta = winning._theta.clone()
    assert torch.equal(theta[owned.indices], values)  # they did not follow
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
        # The product gives s its gradient through h; that of θ is 1 inside of the mask and outside, see the strategy.
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
    for position, parameter in enumerate(winning.parameters):  # θ and s of one matrix, then of the next
        spec = matrices[position // 2]
        wanted = expected[position % 2, spec.offset : spec.offset + spec.size].view(spec.shape)
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-10, atol=1e-14)
    assert all(tensor.grad is None for tensor in winning.touched)
    assert bool((expected[1, owned.indices] != 0).all())  # owned entries do win scores


def test_wsn_chooses_the_top_share_of_each_tensor_and_shows_the_others_as_they_were() -> None:
    """Scores 0, 1, 2 … of 20 and 12 entries: at a quarter the last 5 and the last 3."""
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
    assert winning.region() == drawn  # chosen at every second update
    winning.write()
    chosen = [15, 16, 17, 18, 19, 33, 34, 35]  # a.bias is 20–23
    assert winning.region().indices.tolist() == chosen
    expected = pre.clone()
    expected[chosen] += 1
    assert torch.equal(space.flatten(model), expected)
    winning._theta[17] = pre[17]
    winning._scores.zero_()
    assert 17 not in winning.region()  # it did not move
    winning.write()
    winning.write()
    assert len(winning.region()) == 0  # ties never make a mask too large


def test_wsn_learns_a_mask_that_is_not_the_one_it_drew(tiny_stream: MakeStream) -> None:
    """Were gradients of θ cut off outside of the mask, the first mask would be the last."""

    class First(SupervisedPlugin):
        def before_training_exp(self, strategy: Any, **_: Any) -> None:
            self.mask = strategy.training.trained._mask.clone()

    first = First()
    strategy = learn(make("wsn", tiny_stream(), plugins=[first], **OPTIMIZERS["adamw"]), 1)
    region = strategy.ledger.records[0].region
    assert len(region - Region.from_mask(first.mask)) > 0.3 * len(region)


def test_wsn_keeps_to_its_capacity(tiny_stream: MakeStream) -> None:
    strategy = learn(make("wsn", tiny_stream()))
    for record in strategy.ledger.records:
        sizes = {i: len(local) for i, local, _ in strategy.space.split(record.region.indices)}
        assert set(sizes) <= set(weight_matrices(strategy.space))
        assert all(0 < count <= 0.2 * strategy.space.tensors[i].size for i, count in sizes.items())


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


@pytest.mark.sampled("bitfit")
@pytest.mark.parametrize("name", ["bitfit", "graft-retrain"])
def test_tasks_that_stand_alone_start_from_the_pre_trained_model(tiny_stream: MakeStream, name: str) -> None:
    """Whatever was learned before: the second task ends as if it were the first."""
    strategy = learn(make(name, tiny_stream(stream="qnli,sst2")))
    alone = learn(make(name, tiny_stream(stream="sst2")))
    assert torch.equal(strategy.ledger.records[1].owned.values, alone.ledger.records[0].owned.values)
    assert torch.equal(logits(strategy)["sst2"], logits(alone)["sst2"])


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


# -- Rates and what cannot be ----------------------------------------------------------------------------


class Rate(SupervisedPlugin):
    """The learning rates at the first update."""

    def before_training_exp(self, strategy: Any, **_: Any) -> None:
        self.options = strategy.training.options


@pytest.mark.sampled("packnet")
@pytest.mark.parametrize("name", ISOLATING)
def test_the_rate_of_adamw_follows_the_size_of_the_region(tiny_stream: MakeStream, name: str) -> None:
    """√(N/s) for s of N entries trained; PackNet goes on at the rate of its first phase."""
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
    learn(make("bitfit", tiny_stream()), 1).save(tmp_path)
    with pytest.raises(LedgerError, match=r"has composition alone, .*packnet.* needs union"):
        make("packnet", tiny_stream()).load(tmp_path)
