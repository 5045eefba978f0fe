"""What the strategies promise (docs: forget-free, exact restoration, disjoint ownership), bit for bit.

Nothing here is compared with a tolerance: a stream of three tasks is learned by a tiny BERT (linear readout),
RoBERTa (prompt) and GPT-2 (causal), with SGD, momentum and AdamW, all with weight decay and dropout.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.evaluation.metrics import accuracy_metrics, bwt_metrics, forgetting_metrics, loss_metrics
from avalanche.logging import InteractiveLogger, TextLogger
from avalanche.training.plugins import AGEMPlugin, EvaluationPlugin
from torch import Tensor

from forgetfree import registry
from forgetfree.continual.regions import region_training_options
from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.core.body import fingerprint_of
from forgetfree.core.regions import Region
from forgetfree.core.tensors import load_tensors_
from forgetfree.core.trained import RegionParameters
from forgetfree.errors import ConformanceError, LedgerError, OptionError, TaskError
from forgetfree.ledger import Ledger, LedgerSwitch
from forgetfree.models.state import ModelState
from forgetfree.results import learning_matrix, metrics
from forgetfree.seeds import derive_seed
from forgetfree.training.loop import fine_tune, predict
from forgetfree.training.monitor import Monitor

MODELS = {"bert": "linear", "roberta-mlm": "prompt", "gpt2-lm": "causal"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "learning_rate": 0.05, "weight_decay": 0.1},
    "momentum": {"optimizer": "sgd", "learning_rate": 0.05, "weight_decay": 0.1, "momentum": 0.9},
    "adamw": {"optimizer": "adamw", "learning_rate": 0.005, "weight_decay": 0.1, "l1": 1e-3},
}
STEPS = 4
SMALL: dict[str, Any] = {"steps": STEPS, "batch_size": 4}
GRAFTING: dict[str, Any] = {
    "sparsity": 0.05,
    "mask_steps": 3,
    "mask_batch_size": 12,
    "base_fraction": 1.0,
}
MakeStream = Callable[..., Any]


def make(name: str, stream: Any, *, plugins: Any = None, seed: int = 0, **changes: Any) -> Any:
    """A strategy by its registered name; options that are not its own are arguments of the constructor."""
    cls = registry.strategy(name)
    defaults = SMALL | OPTIMIZERS["momentum"] | (GRAFTING if name == "grafting-continual" else {})
    known = cls.Options.__dataclass_fields__
    options = defaults | {key: value for key, value in changes.items() if key in known}
    rest = {key: value for key, value in changes.items() if key not in known}
    return cls(stream=stream, options=cls.Options(**options), seed=seed, plugins=plugins, **rest)


def logits(strategy: Any) -> dict[str, Tensor]:
    """What the strategy answers now, for every task of the stream."""
    return {name: torch.from_numpy(answer.logits) for name, answer in strategy.evaluate().items()}


def everything(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of every tensor of a model, buffers included."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


class Watch(SupervisedPlugin):
    """Notes the flat entries that move in any update of a task, and the other tensors that do."""

    def before_training_exp(self, strategy: Any, **_: Any) -> None:
        self.theta = strategy.space.flatten(strategy.model.backbone)
        self.rest = everything(strategy.model)
        self.moved = torch.zeros_like(self.theta, dtype=torch.bool)
        self.updates = 0

    def after_update(self, strategy: Any, **_: Any) -> None:
        self.moved |= strategy.space.flatten(strategy.model.backbone) != self.theta
        self.updates += 1

    def moved_tensors(self, strategy: Any) -> list[str]:
        """Tensors outside the parameter space that are not what they were."""
        inside = {f"backbone.{spec.name}" for spec in strategy.space.tensors}
        after = everything(strategy.model)
        return [name for name, was in self.rest.items() if name not in inside and not torch.equal(was, after[name])]


@dataclass
class History:
    """One stream learned by grafting-continual, as seen after every task."""

    kind: str
    stream: Any
    strategy: Any
    before: dict[str, Tensor]
    rows: list[dict[str, Tensor]]
    moved: list[Region]
    moved_tensors: list[list[str]]
    updates: list[int]
    ledger_file: Path


@pytest.fixture(scope="module", params=[(m, o) for m in MODELS for o in OPTIMIZERS], ids="-".join)
def history(
    request: pytest.FixtureRequest, tiny_stream: MakeStream, tmp_path_factory: pytest.TempPathFactory
) -> History:
    kind, optimizer = request.param
    stream = tiny_stream(kind, MODELS[kind])
    watch = Watch()
    before = everything(stream.model)
    strategy = make("grafting-continual", stream, plugins=[watch], **OPTIMIZERS[optimizer])
    rows, moved, tensors, updates = [logits(strategy)], [], [], []
    for experience in stream.benchmark.train_stream:
        strategy.train(experience)
        moved.append(Region.from_mask(watch.moved))
        tensors.append(watch.moved_tensors(strategy))
        updates.append(watch.updates)
        rows.append(logits(strategy))
    directory = tmp_path_factory.mktemp("run")
    strategy.save(directory)
    file = directory / "ledger.safetensors"
    return History(kind, stream, strategy, before, rows, moved, tensors, updates, file)


# -- Forget-free (invariant 1) ---------------------------------------------------------------------------


@pytest.mark.sampled("bert-sgd")
def test_later_tasks_leave_every_earlier_logit_as_it_was(history: History) -> None:
    for position, task in enumerate(history.stream.tasks):
        learned = history.rows[position + 1][task.name]
        for later in history.rows[position + 2 :]:
            assert torch.equal(learned, later[task.name])


def test_learning_a_task_changes_its_logits(history: History) -> None:
    """Otherwise the test above would hold for a strategy that does nothing."""
    for position, task in enumerate(history.stream.tasks):
        assert not torch.equal(history.rows[position][task.name], history.rows[position + 1][task.name])


def test_continual_fine_tuning_does_change_earlier_logits(tiny_stream: MakeStream) -> None:
    """So that the tests of forget-freedom are seen to be able to fail."""
    stream = tiny_stream("bert", "linear")
    strategy = make("continual-ft", stream)
    rows = []
    for experience in stream.benchmark.train_stream:
        strategy.train(experience)
        rows.append(logits(strategy))
    assert not torch.equal(rows[0]["qnli"], rows[1]["qnli"])
    assert not torch.equal(rows[1]["ag_news"], rows[2]["ag_news"])


@pytest.mark.sampled("gpt2-lm")
@pytest.mark.parametrize("kind", MODELS)
def test_fine_tune_answers_each_task_by_its_own_model(tiny_stream: MakeStream, kind: str) -> None:
    """A learned task's logits stay; one that is not learned yet is answered by the pre-trained model."""
    stream = tiny_stream(kind, MODELS[kind])
    strategy = make("fine-tune", stream)
    rows = [logits(strategy)]
    for experience in stream.benchmark.train_stream:
        strategy.train(experience)
        rows.append(logits(strategy))
    for position, task in enumerate(stream.tasks):
        for row, answers in enumerate(rows):
            expected = rows[position + 1] if row > position else rows[0]
            assert torch.equal(answers[task.name], expected[task.name])


def test_buffers_that_training_changes_come_back_with_their_task(tiny_stream: MakeStream) -> None:
    """BatchNorm's running statistics move in every forward pass of training."""
    stream = tiny_stream("bert", "linear")
    backbone = stream.model.backbone
    backbone.embeddings.LayerNorm = _Normed(backbone.embeddings.LayerNorm)
    loaded = replace(stream.loaded, fingerprint=fingerprint_of(backbone))
    stream = replace(stream, loaded=loaded, pre_trained=ModelState.of(stream.model))
    strategy = make("grafting-continual", stream)
    rows = []
    for experience in stream.benchmark.train_stream:
        strategy.train(experience)
        rows.append(logits(strategy))
    assert {"embeddings.LayerNorm.batch.running_mean"} <= set(strategy.ledger.records[0].buffers)
    assert torch.equal(rows[0]["qnli"], rows[1]["qnli"])
    assert torch.equal(rows[0]["qnli"], rows[2]["qnli"])
    assert torch.equal(rows[1]["ag_news"], rows[2]["ag_news"])


class _Normed(torch.nn.Module):
    """A LayerNorm with a BatchNorm after it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.batch = inner, torch.nn.BatchNorm1d(inner.weight.numel(), affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.batch(self.inner(x).transpose(1, 2)).transpose(1, 2)


# -- Nothing else moves (invariant 2) --------------------------------------------------------------------


def test_no_entry_outside_the_trained_region_moves_during_a_task(history: History) -> None:
    for record, moved, updates in zip(history.strategy.ledger.records, history.moved, history.updates, strict=True):
        assert updates == STEPS
        assert len(record.owned.region) > 0
        assert len(moved) > 0
        assert len(moved - record.owned.region) == 0


def test_of_the_other_tensors_only_the_tasks_own_readout_moves(history: History) -> None:
    """Embeddings, LM head and the other tasks' readouts stay bit for bit."""
    for label, names in enumerate(history.moved_tensors):
        own = {f"linears.{label}.weight", f"linears.{label}.bias"} if history.kind == "bert" else set()
        assert set(names) == own


@pytest.mark.sampled("bert-momentum")
def test_the_pre_trained_model_comes_back_exactly(tiny_stream: MakeStream, history: History) -> None:
    """After visiting every task in any order, the backbone holds θ_pre."""
    model = tiny_stream(history.kind, MODELS[history.kind]).model
    assert_same_tensors(everything(model), history.before)
    switch = LedgerSwitch(Ledger.load(history.ledger_file), model.backbone)
    for task in ("sst2", "qnli", "ag_news", "qnli", "sst2"):
        switch.to_task(task)
        assert not torch.equal(model.space().flatten(model.backbone), history.strategy.pre_trained.theta)
    switch.to(0)
    assert_same_tensors(everything(model), history.before)


def test_localizing_leaves_the_pre_trained_model_in_place(tiny_stream: MakeStream) -> None:
    stream = tiny_stream("bert", "linear")
    before = everything(stream.model)
    strategy = make("grafting-continual", stream)
    state = strategy.fine_tuned(stream.tasks[0])
    assert not torch.equal(state.theta, strategy.pre_trained.theta)
    assert_same_tensors(everything(stream.model), before)
    strategy.bench(stream.tasks[0]).localized(state, strategy.options)
    assert_same_tensors(everything(stream.model), before)


def test_no_dropout_while_the_mask_is_learned(tiny_stream: MakeStream) -> None:
    """The scores S must not depend on chance: neither the backbone nor the readout drops anything."""
    stream = tiny_stream("bert", "linear")
    seen: list[bool] = []
    for module in stream.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda module, *_: seen.append(module.training))

    strategy = make("grafting-continual", stream)
    state = strategy.fine_tuned(stream.tasks[0])
    seen.clear()
    strategy.bench(stream.tasks[0]).localized(state, strategy.options)
    assert len(seen) > 0
    assert not any(seen)


# -- Ownership (invariant 3) -----------------------------------------------------------------------------


def test_owned_regions_are_disjoint_and_their_union_is_that_of_the_localized(history: History) -> None:
    records = history.strategy.ledger.records
    for i, record in enumerate(records):
        assert all(record.owned.region.isdisjoint(other.owned.region) for other in records[i + 1 :])
    owned, localized = Region.empty(), Region.empty()
    for record in records:
        owned, localized = owned | record.owned.region, localized | record.region
    assert owned == localized
    assert sum(len(record.owned.region) for record in records) == len(localized)
    # Regions of different tasks do meet, or the test would be empty.
    assert any(len(record.owned.region) < len(record.region) for record in records)


def test_a_region_is_never_larger_than_its_budget(history: History) -> None:
    limit = int(GRAFTING["sparsity"] * len(history.strategy.space))
    assert all(0 < len(record.region) <= limit for record in history.strategy.ledger.records)


# -- From the file (invariant 4) -------------------------------------------------------------------------


@pytest.mark.sampled("bert-sgd")
def test_a_loaded_ledger_answers_as_the_strategy_did(tiny_stream: MakeStream, history: History) -> None:
    """Save → load → switch a fresh model → predict: the very logits of the strategy's own evaluation."""
    stream = tiny_stream(history.kind, MODELS[history.kind])
    ledger = Ledger.load(history.ledger_file)
    switch = LedgerSwitch(ledger, stream.model.backbone)
    for task in reversed(stream.tasks):
        record = ledger.records[ledger.position(task.name)]
        load_tensors_(stream.model.readout_module(task.label), record.readout)
        with switch.task(task.name):
            assert torch.equal(predict(stream.model, task.test), history.rows[-1][task.name])


# -- Seeds (invariant 5) ---------------------------------------------------------------------------------


@pytest.mark.sampled("continual-ft", "grafting-continual")
@pytest.mark.parametrize("name", registry.DEFAULT_STRATEGIES)
def test_the_same_seed_gives_the_same_answers_and_another_seed_others(tiny_stream: MakeStream, name: str) -> None:
    def run(seed: int, disturb: int) -> dict[str, Tensor]:
        stream = tiny_stream("bert", "linear", stream="qnli,sst2")
        torch.manual_seed(disturb)  # what ran before must not matter
        strategy = make(name, stream, seed=seed)
        for experience in stream.benchmark.train_stream:
            strategy.train(experience)
        return logits(strategy)

    first = run(0, 1)
    assert_same_tensors(first, run(0, 2))
    other = run(1, 1)
    assert not any(torch.equal(first[task], other[task]) for task in first)


def test_a_shared_fine_tuned_model_does_not_change_what_grafting_learns(tiny_stream: MakeStream) -> None:
    """A run that finds θ_ft in the store ends in the same bits as the run that made it."""

    def run(store: Any) -> tuple[dict[str, Tensor], Any]:
        stream = tiny_stream("bert", "linear")
        strategy = make("grafting-continual", stream, store=store)
        for experience in stream.benchmark.train_stream:
            strategy.train(experience)
        return logits(strategy), strategy.store

    first, store = run(None)
    second, _ = run(store)
    assert_same_tensors(first, second)


# -- One fine-tuning, three ways -------------------------------------------------------------------------


@pytest.mark.sampled(share=0.25)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [(kind, changes) for kind in MODELS for changes in OPTIMIZERS.values()]
    + [("bert", {"accumulation": 2}), ("bert", {"dropout": False})],
    ids=str,
)
def test_fine_tune_is_the_core_loop_and_the_fine_tuning_inside_grafting(
    tiny_stream: MakeStream, kind: str, changes: dict[str, Any]
) -> None:
    """Avalanche's loop, `forgetfree.training.loop.fine_tune` and step 1 of grafting end in the same bits."""
    stream = tiny_stream(kind, MODELS[kind], stream="qnli,sst2")
    strategy = make("fine-tune", stream, **changes)
    for experience in stream.benchmark.train_stream:
        strategy.train(experience)
    grafting_stream = tiny_stream(kind, MODELS[kind], stream="qnli,sst2")
    grafting = make("grafting-continual", grafting_stream, **changes)
    for task in stream.tasks:
        expected = strategy.store.get(strategy.models.key(task))
        assert expected is not None
        inside = grafting.fine_tuned(grafting_stream.tasks[task.label])
        _assert_same_state(inside, expected, task.name)

        core = tiny_stream(kind, MODELS[kind], stream="qnli,sst2")
        rows = core.tasks[task.label].train
        fine_tune(core.model, rows, strategy.options, steps=STEPS, seed=derive_seed(0, "fine_tune", task.name))
        _assert_same_state(ModelState.of(core.model), expected, task.name)


@pytest.mark.sampled(share=0.25)
@pytest.mark.parametrize("changes", [{}, {"accumulation": 2}, {"precision": "bf16"}], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_a_region_is_trained_to_the_same_bits_by_both_loops(
    tiny_stream: MakeStream, kind: str, changes: dict[str, Any]
) -> None:
    """Avalanche's loop and `forgetfree.training.loop.fine_tune`, by gradients of the region's entries alone."""
    stream = tiny_stream(kind, MODELS[kind], stream="qnli,sst2")
    strategy = make("graft-retrain", stream, sparsity=0.05, **changes)
    strategy.train(stream.benchmark.train_stream[0])
    task, record = stream.tasks[0], strategy.ledger.records[0]

    core = tiny_stream(kind, MODELS[kind], stream="qnli,sst2")
    model, space, region = core.model, core.model.space(), record.owned.region
    load_tensors_(model.readout_module(0), strategy.fine_tuned(task).readouts[task.name])
    options = region_training_options(strategy.options, len(space), len(region))
    steps = task.full_steps(strategy.options)
    seed = derive_seed(0, "train", task.name)
    trained = RegionParameters(model.backbone, space, region)
    model.precision = options.precision
    fine_tune(model, core.tasks[0].train, options, steps=steps, seed=seed, trained=trained)
    assert torch.equal(space.gather(model.backbone, region.indices), record.owned.values)
    assert bool(
        (record.owned.values != space.gather(tiny_stream(kind, MODELS[kind]).model.backbone, region.indices)).any()
    )


def _assert_same_state(one: ModelState, other: ModelState, task: str) -> None:
    assert torch.equal(one.theta, other.theta)
    assert_same_tensors(dict(one.readouts[task]), dict(other.readouts[task]))
    assert_same_tensors(dict(one.buffers), dict(other.buffers))


# -- Edges -----------------------------------------------------------------------------------------------


@pytest.mark.sampled("roberta-mlm")
@pytest.mark.parametrize("kind", MODELS)
def test_a_first_task_that_takes_everything_leaves_the_others_their_readouts(
    tiny_stream: MakeStream, kind: str
) -> None:
    stream = tiny_stream(kind, MODELS[kind])
    strategy = make("grafting-continual", stream, sparsity=1.0)
    rows = []
    for experience in stream.benchmark.train_stream:
        strategy.train(experience)
        rows.append(logits(strategy))
    sizes = [len(record.owned.region) for record in strategy.ledger.records]
    assert sizes[0] == len(strategy.space)  # weight decay moves every entry
    assert sizes[1:] == [0, 0]
    assert torch.equal(rows[0]["qnli"], rows[2]["qnli"])
    assert torch.equal(rows[1]["ag_news"], rows[2]["ag_news"])
    readout_learned = not torch.equal(rows[0]["ag_news"], rows[1]["ag_news"])
    assert readout_learned == (MODELS[kind] == "linear")


WAYS: list[dict[str, Any]] = [
    *({"region_steps": 0, "region_start": start} for start in ("fine-tuned", "pre-trained")),
    *({"mask_steps": 0, "region_start": start} for start in ("fine-tuned", "pre-trained")),
    *({"base_fraction": 0.0, "region_start": start} for start in ("fine-tuned", "pre-trained")),
    {"region_start": "pre-trained", "dropout": "fine-tuning"},
    {"region_start": "fine-tuned", "localize_at": "union"},
    {"region_start": "pre-trained", "composition": "alone"},
    {"region_from": "gradient"},
    {"region_from": "gallop", "localize_at": "union"},
    {"region_from": "midpoint"},
]


@pytest.mark.sampled(share=0.25)
@pytest.mark.parametrize("changes", WAYS, ids=str)
def test_every_way_to_localize_is_forget_free(tiny_stream: MakeStream, changes: dict[str, Any]) -> None:
    stream = tiny_stream("roberta-mlm", stream="qnli,sst2")
    strategy = make("grafting-continual", stream, **changes)
    first, second = stream.benchmark.train_stream
    strategy.train(first)
    learned = logits(strategy)["qnli"]
    strategy.train(second)
    assert torch.equal(learned, logits(strategy)["qnli"])


def test_a_task_met_again_is_refused_and_nothing_changes(tiny_stream: MakeStream) -> None:
    stream = tiny_stream("bert", "linear")
    strategy = make("grafting-continual", stream)
    first, second, _ = stream.benchmark.train_stream
    strategy.train(first)
    strategy.train(second)
    before, tensors = logits(strategy), everything(stream.model)
    with pytest.raises(TaskError, match="'qnli' is already in the ledger"):
        strategy.train(first)
    assert strategy.ledger.tasks == ["qnli", "ag_news"]
    assert_same_tensors(everything(stream.model), tensors)
    assert_same_tensors(logits(strategy), before)


class Interrupt(SupervisedPlugin):
    """Stops the training of the second task, as Ctrl-C does, at one callback."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase = phase
        self.armed = False

    def after_update(self, strategy: Any, **_: Any) -> None:
        if self.armed and self.phase == "train" and strategy.clock.train_exp_iterations == 2:
            raise KeyboardInterrupt


class InterruptedMonitor(Monitor):
    """The same for the phases that Avalanche does not see."""

    def __init__(self, interrupt: Interrupt) -> None:
        self.interrupt = interrupt

    @contextmanager
    def phase(self, task: str, phase: Any, steps: int) -> Iterator[Callable[[int, float], None]]:
        def on_step(step: int, loss: float) -> None:
            # Evaluation takes one step, and it is that of another task, during training.
            enough = task == "qnli" if phase == "evaluate" else step == 2
            if self.interrupt.armed and phase == self.interrupt.phase and enough:
                raise KeyboardInterrupt

        yield on_step


@pytest.mark.sampled("evaluate")
@pytest.mark.parametrize("phase", ["fine_tune", "localize", "train", "evaluate"])
def test_an_interrupted_task_leaves_the_learned_ones_as_they_were(tiny_stream: MakeStream, phase: str) -> None:
    """And the task can be trained after all, to the same result as without the interrupt."""
    stream, twin = tiny_stream("bert", "linear"), tiny_stream("bert", "linear")
    interrupt = Interrupt(phase)
    strategy = make(
        "grafting-continual",
        stream,
        plugins=[interrupt],
        monitor=InterruptedMonitor(interrupt),
        eval_every=2 if phase == "evaluate" else -1,
        peval_mode="iteration",
    )
    undisturbed = make("grafting-continual", twin)
    first, second, _ = stream.benchmark.train_stream
    strategy.train(first, eval_streams=[])
    before = logits(strategy)
    interrupt.armed = True
    with pytest.raises(KeyboardInterrupt):
        strategy.train(second, eval_streams=[stream.benchmark.test_stream])
    interrupt.armed = False
    after = logits(strategy)
    assert torch.equal(after["qnli"], before["qnli"])
    assert strategy.ledger.tasks == ["qnli"]
    theta = strategy.space.flatten(strategy.model.backbone)
    untouched = ~strategy.ledger.owned().mask(len(theta))
    assert torch.equal(theta[untouched], strategy.pre_trained.theta[untouched])

    strategy.train(second, eval_streams=[])
    for experience in list(twin.benchmark.train_stream)[:2]:
        undisturbed.train(experience)
    assert_same_tensors(logits(strategy), logits(undisturbed))


def test_a_second_strategy_on_a_stream_starts_from_the_pre_trained_model_too(
    tiny_stream: MakeStream, tmp_path: Path
) -> None:
    """What another strategy left in the shared model reaches neither weights nor ledger."""
    used, fresh = tiny_stream("bert", "linear"), tiny_stream("bert", "linear")
    for experience in used.benchmark.train_stream:
        if experience.task_label == 0:
            make("continual-ft", used).train(experience)
    strategies = [make("grafting-continual", stream) for stream in (used, fresh)]
    for strategy in strategies:
        for experience in strategy.stream.benchmark.train_stream:
            strategy.train(experience)
    assert_same_tensors(logits(strategies[0]), logits(strategies[1]))


def test_a_stream_whose_model_was_changed_is_refused(tiny_stream: MakeStream) -> None:
    """Outside the graftable entries nothing is put back, so a ledger would name weights it does not belong to."""
    stream = tiny_stream("bert", "linear")
    with torch.no_grad():
        stream.model.backbone.embeddings.word_embeddings.weight.add_(1)
    with pytest.raises(LedgerError, match="belongs to other weights"):
        make("grafting-continual", stream)


@pytest.mark.sampled("0.01-10.0")
@pytest.mark.parametrize(("sparsity", "factor"), [(1.0, 1.0), (0.01, 10.0)])
def test_adamw_moves_a_region_as_far_as_the_whole(tiny_stream: MakeStream, sparsity: float, factor: float) -> None:
    """√(N/s) is 1 for s = N and 10 for s = N/100 (up to the rounding of s)."""

    def options(**changes: Any) -> Any:
        strategy = make("grafting-continual", tiny_stream(), sparsity=sparsity, **changes)
        return strategy.begin(strategy.stream.tasks[0]).options

    trained = options(optimizer="adamw", learning_rate=1e-3)
    assert trained.learning_rate == pytest.approx(1e-3 * factor, rel=0.01)
    assert trained.readout_learning_rate == 1e-3
    assert options(optimizer="sgd", learning_rate=0.5).learning_rate == 0.5


def test_the_rate_is_that_of_the_budget_though_the_region_has_fewer_entries(tiny_stream: MakeStream) -> None:
    """And nothing pulls a region back to where it began."""
    adamw = {"optimizer": "adamw", "learning_rate": 1e-3, "l1": 0.5}
    strategy = make("grafting-continual", tiny_stream(), sparsity=0.01, **adamw)
    task = strategy.stream.tasks[0]
    strategy.known_regions = {task.name: Region.of([3, 5])}
    options = strategy.begin(task).options
    assert options.learning_rate == pytest.approx(1e-2, rel=0.01)
    assert options.l1 == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_fraction": 0.0, "mask_steps": 0}, "base_fraction=0 with mask_steps=0 leaves no region"),
        ({"sparsity": 1e-9}, "leaves no entry"),
    ],
)
def test_options_that_cannot_go_together_are_refused_at_once(
    tiny_stream: MakeStream, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        make("grafting-continual", tiny_stream(), **changes)


def test_tasks_that_are_not_learned_yet_are_answered(history: History) -> None:
    for row in history.rows:
        for task in history.stream.tasks:
            assert row[task.name].shape == (len(task.test), len(task.definition.labels))
            assert bool(torch.isfinite(row[task.name]).all())


def test_the_final_union_is_the_last_tasks_model_for_all(tiny_stream: MakeStream) -> None:
    stream = tiny_stream("roberta-mlm")
    strategy = make("grafting-continual", stream, final_union=True)
    for experience in stream.benchmark.train_stream:
        strategy.train(experience)
    before = logits(strategy)
    extra = strategy.extra_results()["union"]
    switch = LedgerSwitch(strategy.ledger, (fresh := tiny_stream("roberta-mlm")).model.backbone)
    switch.to(3)
    for task, accuracy in zip(fresh.tasks, extra["accuracy"], strict=True):
        assert accuracy == metrics.accuracy(predict(fresh.model, task.test).numpy(), task.test.labels.numpy())
    assert_same_tensors(logits(strategy), before)


# -- Avalanche around it ---------------------------------------------------------------------------------


class Count(SupervisedPlugin):
    """Counts every callback it hears of."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()


def _counting(name: str) -> Callable[..., None]:
    def callback(self: Count, strategy: Any, *args: Any, **kwargs: Any) -> None:
        self.calls[name] += 1

    return callback


for _name in dir(SupervisedPlugin):
    if _name.startswith(("before_", "after_")):
        setattr(Count, _name, _counting(_name))


class Gradients(SupervisedPlugin):
    """Notes which matrices have gradients, and sets all gradients to zero if asked to."""

    def __init__(self, zero: bool) -> None:
        super().__init__()
        self.zero, self.matrices = zero, 0

    def after_backward(self, strategy: Any, **_: Any) -> None:
        for parameter in strategy.model.parameters():
            if parameter.grad is not None:
                self.matrices += parameter.dim() == 2
                if self.zero:
                    parameter.grad.zero_()


@pytest.mark.parametrize("zero", [False, True])
def test_plugins_may_change_gradients(tiny_stream: MakeStream, zero: bool) -> None:
    """They find each tensor's gradient in its place, and what they leave there is what moves a region."""
    stream = tiny_stream("bert", "linear")
    gradients, watch = Gradients(zero), Watch()
    how = {"optimizer": "sgd", "weight_decay": 0.0, "momentum": 0.0}
    strategy = make("grafting-continual", stream, plugins=[watch, gradients], **how)
    strategy.train(stream.benchmark.train_stream[0])
    assert gradients.matrices > 0 and watch.updates > 0
    assert bool(watch.moved.any()) != zero


class Projected(AGEMPlugin):
    """A-GEM, which notes whether it has changed a matrix's gradient."""

    projected = 0

    def after_backward(self, strategy: Any, **kwargs: Any) -> None:
        before = [p.grad.clone() for p in strategy.model.parameters() if p.grad is not None and p.dim() == 2]
        super().after_backward(strategy, **kwargs)
        after = [p.grad for p in strategy.model.parameters() if p.grad is not None and p.dim() == 2]
        self.projected += any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_plugins_that_project_gradients_project_those_of_matrices(tiny_stream: MakeStream) -> None:
    stream = tiny_stream("bert", "linear")
    plugin = Projected(8, 8)
    strategy = make("grafting-continual", stream, plugins=[plugin], steps=10)
    for experience in stream.benchmark.train_stream:
        strategy.train(experience)
    assert plugin.projected > 0


def test_without_plugins_no_matrix_has_a_gradient(tiny_stream: MakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = tiny_stream("bert", "linear")
    strategy = make("grafting-continual", stream, eval_every=1)
    plugin, step = Gradients(False), strategy.optimizer_step

    def look() -> None:
        plugin.after_backward(strategy)
        step()

    monkeypatch.setattr(strategy, "optimizer_step", look)
    strategy.train(stream.benchmark.train_stream[0])
    updates = stream.tasks[0].full_steps(strategy.options)
    assert plugin.matrices == updates  # the readout's


@pytest.mark.sampled("continual-ft", "grafting-continual")
@pytest.mark.parametrize("name", registry.DEFAULT_STRATEGIES)
def test_plugins_hear_of_every_phase(tiny_stream: MakeStream, name: str) -> None:
    """Per task: one experience, one epoch, a forward pass for each of the 2 parts of a batch, an update a batch."""
    count = Count()
    stream = tiny_stream("bert", "linear")
    strategy = make(name, stream, plugins=[count], accumulation=2, evaluation_batch_size=8)
    for experience in stream.benchmark.train_stream:
        strategy.train(experience)
    assert count.calls["before_training"] == count.calls["after_training_exp"] == 3
    assert count.calls["before_training_epoch"] == count.calls["after_training_epoch"] == 3
    for callback in ("training_iteration", "forward", "backward"):
        assert count.calls[f"before_{callback}"] == count.calls[f"after_{callback}"] == 3 * STEPS * 2
    assert count.calls["before_update"] == count.calls["after_update"] == 3 * STEPS
    assert count.calls["before_eval"] == 0
    strategy.evaluate()
    assert count.calls["before_eval"] == count.calls["after_eval"] == 1
    assert count.calls["before_eval_exp"] == count.calls["after_eval_exp"] == 3
    assert count.calls["before_eval_iteration"] == count.calls["after_eval_iteration"] == 3 * 2  # 16 rows by 8


@pytest.mark.sampled("continual-ft", "grafting-continual")
@pytest.mark.parametrize("name", registry.DEFAULT_STRATEGIES)
def test_avalanches_metrics_and_loggers_agree_with_ours(
    tiny_stream: MakeStream, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = io.StringIO()
    evaluator = EvaluationPlugin(
        accuracy_metrics(minibatch=True, epoch=True, experience=True, stream=True),
        loss_metrics(epoch=True, experience=True),
        forgetting_metrics(experience=True, stream=True),
        bwt_metrics(experience=True, stream=True),
        loggers=[TextLogger(log), InteractiveLogger()],
    )
    stream = tiny_stream("bert", "linear")
    strategy = make(name, stream, evaluator=evaluator, learning_rate=0.2)
    matrix = [[answer.score("accuracy") for answer in strategy.evaluate().values()]]
    for experience in stream.benchmark.train_stream:
        trained = strategy.train(experience)
        assert "Loss_Epoch/train_phase/train_stream/Task000" in trained
        matrix.append([answer.score("accuracy") for answer in strategy.evaluate().values()])
    theirs = evaluator.get_last_metrics()
    for label in range(3):
        key = f"Top1_Acc_Exp/eval_phase/test_stream/Task00{label}/Exp00{label}"
        assert theirs[key] == pytest.approx(matrix[-1][label], abs=1e-12)
    # All test sets are of one size, so the mean over rows is the mean over tasks.
    average = learning_matrix.average_accuracy(np.array(matrix))
    assert theirs["Top1_Acc_Stream/eval_phase/test_stream/Task002"] == pytest.approx(average, abs=1e-12)
    backward = learning_matrix.backward_transfer(np.array(matrix))
    assert theirs["StreamBWT/eval_phase/test_stream"] == pytest.approx(backward, abs=1e-12)
    assert theirs["StreamForgetting/eval_phase/test_stream"] == pytest.approx(-backward, abs=1e-12)
    assert "Top1_Acc_Exp" in log.getvalue()
    assert "Top1_Acc_Exp" in capsys.readouterr().out


@pytest.mark.sampled("fine-tune-epoch", "grafting-continual-iteration")
@pytest.mark.parametrize("mode", ["epoch", "iteration"])
@pytest.mark.parametrize("name", registry.DEFAULT_STRATEGIES)
def test_evaluating_in_the_midst_of_training_changes_nothing(tiny_stream: MakeStream, name: str, mode: str) -> None:
    """Weights and answers are those of an undisturbed run, dropout included."""

    def run(**periodic: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, Tensor]]]:
        stream = tiny_stream("bert", "linear", stream="qnli,sst2")
        strategy = make(name, stream, accumulation=2, **periodic)
        seen: list[dict[str, Tensor]] = []
        for experience in stream.benchmark.train_stream:
            strategy.train(experience, eval_streams=[stream.benchmark.test_stream])
            seen.append({n: torch.from_numpy(p.logits) for n, p in strategy.predictions.items()})
        return everything(stream.model), logits(strategy), seen

    weights, answers, _ = run()
    with_evaluation = run(eval_every=1, peval_mode=mode)
    assert_same_tensors(with_evaluation[0], weights)
    assert_same_tensors(with_evaluation[1], answers)
    # And they are real evaluations: all tasks are answered, the learned ones by what they were learned to.
    assert all(len(row) == 2 for row in with_evaluation[2])
    if registry.strategy(name).forget_free:
        assert torch.equal(with_evaluation[2][-1]["qnli"], answers["qnli"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda s, task: list(s.model.parameters()), "expected a Training, got "),
        (
            lambda s, task: s.everything(task, readout=[0.5]),
            "expected trained and readout to list parameters, got a float",
        ),
    ],
)
def test_what_begin_returns_is_checked(tiny_stream: MakeStream, given: Any, message: str) -> None:
    class Loose(ContinualStrategy):
        def begin(self, task: Any) -> Any:
            return given(self, task)

        def answering(self, task: Any) -> Any:
            return nullcontext()

    stream = tiny_stream("bert", "linear")
    strategy = Loose(stream=stream, options=Loose.Options(**SMALL))
    with pytest.raises(ConformanceError, match=rf"Loose .*\n- begin\(task\): {message}"):
        strategy.train(stream.benchmark.train_stream[0])
