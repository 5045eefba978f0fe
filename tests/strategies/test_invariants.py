"""Promises of strategies (docs: forget-free, exact restoration, disjoint ownership), each tested for many of them.

Nothing here is compared with a tolerance. `forgetfree.testing.check_strategy` tests more, for every registered strategy:
seeds, evaluation during training, loading, a fresh start on a used stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from avalanche.core import SupervisedPlugin
from compared import assert_same, everything, learn, logits
from small_strategies import (
    GRAFTING,
    SETTINGS,
    SMALL,
    Watch,
    make,
)
from torch import Tensor

from forgetfree import registry
from forgetfree.core.parameters import load_tensors_, weight_matrices
from forgetfree.core.regions import Region
from forgetfree.core.trained import RegionParameters
from forgetfree.errors import OptionError, TaskError, TrainingError
from forgetfree.ledger.switch import LedgerSwitch
from forgetfree.models.state import ModelState
from forgetfree.results import metrics
from forgetfree.seeds import derive_seed
from forgetfree.training.encoded_task import predict
from forgetfree.training.monitor import Monitor
from forgetfree.training.step import fine_tune

MODELS = {"bert": "linear", "roberta-mlm": "prompt", "gpt2-lm": "causal"}
#: Strategies with a ledger: each task stands on the one before it, on θ_pre, or on the entries that it selects.
LEDGERS = {
    "grafting-continual": "union",
    "packnet": "union",
    "wsn": "selection",
    "bitfit": "alone",
    "graft-retrain": "alone",
}
STEPS = SMALL["steps"]
MakeStream = Callable[..., Any]


# -- Invariants 1 to 4 -----------------------------------------------------------------------------------


@pytest.mark.sampled("bert-momentum-grafting-continual", "bert-momentum-wsn", share=0.15)
@pytest.mark.parametrize("name", LEDGERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_a_ledger_promises(tiny_stream: MakeStream, tmp_path: Path, setting: str, name: str) -> None:
    """Earlier logits stay; only a task's own entries and readout move; θ_pre is restored; regions are disjoint; files load."""
    kind, readout, how = SETTINGS[setting]
    stream, watch = tiny_stream(kind, readout), Watch()
    before = everything(stream.model)
    strategy = make(name, stream, plugins=[watch], **how)
    space, rows = strategy.space, [logits(strategy)]
    matrices = torch.zeros(len(space), dtype=torch.bool)
    for i in weight_matrices(space):
        space.views(matrices)[i].fill_(True)
    union = localized = Region.empty()
    for label, experience in enumerate(stream.benchmark.train_stream):
        if label == 2:
            strategy.save(tmp_path / "broken")
        strategy.train(experience)
        rows.append(logits(strategy))
        record, moved = strategy.ledger.records[-1], Region.from_mask(watch.moved)
        # Only owned entries move, at any update; WSN's mask changes during training, but only over weight matrices.
        assert len(moved) > 0 and len(record.owned.region) > 0
        assert len(Region.from_mask(watch.moved & ~matrices) if name == "wsn" else moved - record.owned.region) == 0
        own = {f"readouts.{label}.layer.{name}" for name in ("weight", "bias")} if readout == "linear" else set()
        assert watch.moved_tensors(strategy) == own
        # Owners of entries.
        if LEDGERS[name] == "alone":
            assert record.owned.region == record.region
        else:
            assert record.owned.region == record.region - union
        union, localized = union | record.owned.region, localized | record.region
        if "sparsity" in type(strategy.options).model_fields:
            assert len(record.region) <= int(GRAFTING["sparsity"] * len(space))
        if name in ("packnet", "wsn"):
            assert bool(matrices[record.region.indices].all())
    ledger = strategy.ledger
    assert ledger.owned() == union == localized
    assert ledger.composition == ("selection" if LEDGERS[name] == "selection" else "parents")
    before_it = ["", *ledger.tasks[:-1]] if LEDGERS[name] == "union" else [""] * 3
    assert [record.parent for record in ledger.records] == before_it
    if name in ("grafting-continual", "wsn"):  # regions must meet, else the test would be empty
        assert any(len(record.owned.region) < len(record.region) for record in ledger.records)
    for position, task in enumerate(stream.tasks):
        learned = rows[position + 1][task.name]
        assert not torch.equal(rows[position][task.name], learned)  # else it would hold trivially
        assert all(torch.equal(learned, later[task.name]) for later in rows[position + 2 :])
        assert all(bool(torch.isfinite(row[task.name]).all()) for row in rows)

    strategy.ledger_model._switch.to(0)
    after = everything(stream.model)
    assert_same(*({k: v for k, v in each.items() if not k.startswith("readouts.")} for each in (after, before)))

    # With plugins, gradients are computed in another way: so there is a plugin here, too.
    resumed = make(name, tiny_stream(kind, readout), plugins=[Watch()], **how)
    resumed.load(tmp_path / "broken")
    assert_same(logits(resumed), rows[2])
    resumed.train(list(resumed.stream.benchmark.train_stream)[2])
    assert_same(logits(resumed), rows[-1])


# -- Interrupts and errors ------------------------------------------------------------------------------


class Stop(Monitor):
    """When armed, raises KeyboardInterrupt in one phase of a task: at its second update, or in an evaluation of ``qnli``."""

    def __init__(self, at: str) -> None:
        self.at, self.armed = at, False

    @contextmanager
    def phase(self, task: str, phase: Any, steps: int) -> Iterator[Callable[[int, float], None]]:
        def on_step(step: int, loss: float) -> None:
            enough = task == "qnli" if phase == "evaluate" else step == 2
            if self.armed and phase == self.at and enough:
                self.interrupt()

        yield on_step

    def interrupt(self) -> None:
        raise KeyboardInterrupt


class Burst(SupervisedPlugin):
    """When armed, makes the loss of the second step NaN."""

    armed = False

    def before_backward(self, strategy: Any, **_: Any) -> None:
        if self.armed and strategy.clock.train_exp_iterations == 1:
            strategy.loss = strategy.loss * float("nan")


BROKEN = [
    *((name, "task", how) for name in LEDGERS for how in ("train", "nan")),
    *((name, "task", "fine_tune") for name in ("grafting-continual", "packnet", "graft-retrain")),
    *((name, "task", "localize") for name in ("grafting-continual", "graft-retrain")),
    ("grafting-continual", "task", "evaluate"),
    *((name, "task", "begin") for name in (*LEDGERS, "lora", "fine-tune")),
    *((name, scenario, "train") for name in ("lora", "o-lora") for scenario in ("task", "class")),
]


@pytest.mark.sampled(
    "bitfit-task-train", "graft-retrain-task-localize", "grafting-continual-task-begin", "o-lora-task-train", share=0.15
)
@pytest.mark.parametrize(("name", "scenario", "how"), BROKEN)
def test_a_task_broken_off_leaves_the_learned_ones_as_they_were(
    tiny_stream: MakeStream, name: str, scenario: str, how: str
) -> None:
    """The task can then be trained, to the same bits as without the interruption."""
    stream, twin = (tiny_stream("bert", "linear", stream="qnli,sst2", scenario=scenario) for _ in range(2))
    stop, burst = Stop(how), Burst()
    within = {"eval_every": 2, "peval_mode": "iteration"} if how == "evaluate" else {}
    plugins = [burst] if how == "nan" else []  # with plugins, gradients are computed in another way
    strategy = make(name, stream, monitor=stop, plugins=plugins, **within)
    first, second = stream.benchmark.train_stream
    strategy.train(first, eval_streams=[])
    before, tensors = logits(strategy), everything(stream.model)
    stop.armed = burst.armed = True
    begin = strategy.begin
    if how == "begin":  # at the end of begin()
        strategy.begin = lambda task: (begin(task), stop.interrupt())
    error = (
        pytest.raises(TrainingError, match="became nan at step 2") if how == "nan" else pytest.raises(KeyboardInterrupt)
    )
    with error:
        strategy.train(second, eval_streams=[stream.benchmark.test_stream])
    stop.armed, burst.armed, strategy.begin = False, False, begin
    assert_same(everything(stream.model), tensors)
    assert_same(logits(strategy), before)
    assert [task.name for task in strategy.learned] == ["qnli"]
    strategy.train(second, eval_streams=[])
    assert_same(logits(strategy), logits(learn(make(name, twin, plugins=[Burst()] if plugins else []))))


@pytest.mark.parametrize("name", ["grafting-continual", "lora"])
def test_a_task_met_again_is_refused_and_nothing_changes(tiny_stream: MakeStream, name: str) -> None:
    stream = tiny_stream("bert", "linear", stream="qnli,sst2")
    strategy = learn(make(name, stream))
    before, tensors = logits(strategy), everything(stream.model)
    with pytest.raises(TaskError, match=r"'qnli' (is already in the ledger|already has adapters)"):
        strategy.train(next(iter(stream.benchmark.train_stream)))
    assert [task.name for task in strategy.learned] == ["qnli", "sst2"]
    assert_same(everything(stream.model), tensors)
    assert_same(logits(strategy), before)


@pytest.mark.parametrize("name", ["grafting-continual", "lora"])
def test_evaluating_between_parts_of_a_batch_changes_nothing(tiny_stream: MakeStream, name: str) -> None:
    """Weights and predictions are those of an undisturbed run, dropout included; learned tasks keep their predictions."""

    def run(**periodic: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        stream = tiny_stream("bert", "linear", stream="qnli,sst2")
        strategy = make(name, stream, accumulation=2, lora_dropout=0.2, **periodic)
        for experience in stream.benchmark.train_stream:
            strategy.train(experience, eval_streams=[stream.benchmark.test_stream])
        within = {task: torch.from_numpy(answers.logits) for task, answers in strategy.predictions.items()}
        return everything(stream.model), logits(strategy), within

    weights, answers, _ = run()
    disturbed, answers_after, within = run(eval_every=1, peval_mode="iteration")
    assert_same(disturbed, weights)
    assert_same(answers_after, answers)
    assert len(within) == 2
    if registry.strategy(name).forget_free:
        assert torch.equal(within["qnli"], answers["qnli"])


# -- One fine-tuning, three ways -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("bert", {"optimizer": "sgd", "accumulation": 2}),
        ("roberta-mlm", {"optimizer": "momentum", "dropout": False}),
        ("gpt2-lm", {"optimizer": "adamw", "learning_rate": 0.005, "l1": 1e-3}),
    ],
    ids=str,
)
def test_fine_tune_is_the_core_loop_and_the_fine_tuning_inside_grafting(
    tiny_stream: MakeStream, kind: str, changes: dict[str, Any]
) -> None:
    """Avalanche's loop, `forgetfree.training.step.fine_tune` and step 1 of grafting give the same bits."""
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


@pytest.mark.sampled(share=0.35)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [("bert", {}), ("roberta-mlm", {"accumulation": 2}), ("gpt2-lm", {"precision": "bf16"})],
    ids=str,
)
def test_a_region_is_trained_to_the_same_bits_by_both_loops(
    tiny_stream: MakeStream, kind: str, changes: dict[str, Any]
) -> None:
    """Avalanche's loop and `forgetfree.training.step.fine_tune` both use only the gradients of the region's entries."""
    stream = tiny_stream(kind, MODELS[kind], stream="qnli,sst2")
    strategy = make("graft-retrain", stream, sparsity=0.05, **changes)
    strategy.train(stream.benchmark.train_stream[0])
    task, record = stream.tasks[0], strategy.ledger.records[0]

    core = tiny_stream(kind, MODELS[kind], stream="qnli,sst2")
    model, space, region = core.model, core.model.space(), record.owned.region
    load_tensors_(model.readout_module(0), strategy.fine_tuned(task).readouts[task.name])
    options = strategy.options.for_region(len(space), len(region))
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
    assert_same(dict(one.readouts[task]), dict(other.readouts[task]))
    assert_same(dict(one.buffers), dict(other.buffers))


# -- Edges -----------------------------------------------------------------------------------------------


def test_the_rate_is_that_of_the_budget_though_the_region_has_fewer_entries(tiny_stream: MakeStream) -> None:
    """The L1 penalty, which would pull a region back to its start, is off."""
    adamw = {"optimizer": "adamw", "learning_rate": 1e-3, "l1": 0.5}
    strategy = make("grafting-continual", tiny_stream(), sparsity=0.01, **adamw)
    task = strategy.stream.tasks[0]
    strategy.localize = lambda *_: Region.of([3, 5])
    options = strategy.begin(task).options
    assert options.learning_rate == pytest.approx(1e-2, rel=0.01)
    assert options.l1 == 0


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "grafting-continual",
            {"base_fraction": 0.0, "mask_steps": 0},
            "base_fraction=0 with mask_steps=0 leaves the region empty",
        ),
        (
            "grafting-continual",
            {"composition": "alone", "final_union": True},
            "composition=alone makes no union, but final_union evaluates one",
        ),
        ("merge-stitch", {"sparsity": 1e-9}, "leaves no entry"),
        ("merge-ties", {"density": 1e-9}, "leaves no entry"),
    ],
)
def test_options_that_cannot_go_together_are_refused_at_once(
    tiny_stream: MakeStream, name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        make(name, tiny_stream(), **changes)


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
    assert_same(logits(strategy), before)


# -- Avalanche's plugins --------------------------------------------------------------------------------


class Count(SupervisedPlugin):
    """Counts the calls of every callback."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        for name in dir(SupervisedPlugin):
            if name.startswith(("before_", "after_")):
                setattr(self, name, partial(self.count, name))

    def count(self, name: str, *_: Any, **__: Any) -> None:
        self.calls[name] += 1


class Gradients(SupervisedPlugin):
    """Counts matrices with gradients, and sets all gradients to zero if ``zero``."""

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
    """Plugins find each tensor's gradient in ``grad``, and a region moves by the gradients that they leave there."""
    stream = tiny_stream("bert", "linear")
    gradients, watch = Gradients(zero), Watch()
    how = {"optimizer": "sgd", "weight_decay": 0.0}
    strategy = make("grafting-continual", stream, plugins=[watch, gradients], **how)
    strategy.train(stream.benchmark.train_stream[0])
    assert gradients.matrices > 0 and watch.updates > 0
    assert bool(watch.moved.any()) != zero


@pytest.mark.parametrize("name", ["continual-ft", "grafting-continual"])
def test_plugins_hear_of_every_phase(tiny_stream: MakeStream, name: str) -> None:
    """A task has one experience, one epoch, a forward pass for each of the 2 parts of a batch, and an update a batch."""
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
