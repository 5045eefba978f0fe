"""A task that stands on θ_pre or on an earlier one, in a strategy. Models are compared to the bit.

The reference for a task's model is θ_pre, then the values of its ancestors from the first on, and then its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import compared
import pytest
import torch
from compared import assert_same, everything, logits
from on_parents import OnParents, tree_of
from small_strategies import theta_of
from torch import Tensor
from withheld import text_stream

import forgetfree
from forgetfree import Ledger, registry
from forgetfree.continual.stream import make_stream
from forgetfree.core.parameters import tensors_of
from forgetfree.core.selection import budget
from forgetfree.core.trained import RegionParameters
from forgetfree.jobs import checkpoints
from forgetfree.jobs.checkpoints import FileCheckpoint
from forgetfree.jobs.history import History
from forgetfree.ledger.ledger import Record
from forgetfree.models.state import ModelState
from forgetfree.seeds import derive_seed
from forgetfree.testing import tiny
from forgetfree.training.monitor import Monitor
from forgetfree.training.single_task import SingleTask
from forgetfree.training.step import fine_tune

MakeStream = Callable[..., Any]
TASKS = ("qnli", "ag_news", "sst2")
OPTIONS: dict[str, Any] = {
    **{"steps": 4, "batch_size": 4, "optimizer": "sgd", "learning_rate": 0.2, "sparsity": 0.05},
    **{"mask_steps": 2, "mask_batch_size": 12},
}
LINE = "ag_news=qnli,sst2=ag_news"
TREES = ["", "ag_news=qnli", "sst2=qnli", "ag_news=qnli,sst2=qnli", LINE]


def made(stream: Any, parents: str = "", monitor: Monitor | None = None, **changes: Any) -> OnParents:
    options = OnParents.Options(**OPTIONS | changes, parents=parents)
    return OnParents(stream=stream, options=options, device="cpu", monitor=monitor)


def line(task: str, tree: Mapping[str, str]) -> list[str]:
    """Return the task's ancestors, from the one that stands on θ_pre, and the task."""
    return [*line(tree[task], tree), task] if task in tree else [task]


def reference(strategy: Any, task: str, tree: Mapping[str, str]) -> Tensor:
    """Return θ of a task's model."""
    records = {record.task: record for record in strategy.ledger.records}
    theta: Tensor = strategy.pre_trained.theta.clone()
    for name in line(task, tree):
        theta[records[name].owned.region.indices] = records[name].owned.values
    return theta


def assert_same_record(one: Record, other: Record) -> None:
    assert (one.task, one.parent, one.region) == (other.task, other.parent, other.region)
    assert one.owned.region == other.owned.region and torch.equal(one.owned.values, other.owned.values)
    assert_same(one.readout, other.readout)


@pytest.mark.sampled("ag_news=qnli,sst2=ag_news", share=0.35)
@pytest.mark.parametrize("tree", TREES)
def test_a_task_is_answered_with_what_its_parent_is_answered_with_and_its_own(
    tiny_stream: MakeStream, tree: str, tmp_path: Path
) -> None:
    """Later tasks change no bit of a task's model; a strategy loaded from the file continues as the original does."""
    strategy, answers, parents = made(tiny_stream(), tree), dict[str, Tensor](), tree_of(tree)
    for task, experience in zip(strategy.stream.tasks, strategy.stream.benchmark.train_stream, strict=True):
        if task.name == "sst2":
            strategy.save(tmp_path)
        strategy.train(experience)
        answers[task.name] = torch.from_numpy(strategy.evaluate([task])[task.name].logits)
    assert [record.parent for record in strategy.ledger.records] == [parents.get(task, "") for task in TASKS]
    for task in strategy.stream.tasks:
        with strategy.answering(task):
            assert torch.equal(theta_of(strategy), reference(strategy, task.name, parents))
        assert torch.equal(theta_of(strategy), strategy.pre_trained.theta)
    assert_same(logits(strategy), answers)

    resumed = made(tiny_stream(), tree)
    resumed.load(tmp_path)
    resumed.train(list(resumed.stream.benchmark.train_stream)[2])
    for one, other in zip(resumed.ledger.records, strategy.ledger.records, strict=True):
        assert_same_record(one, other)
    assert_same(logits(resumed), answers)


def load_buffers(model: Any, buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        model.get_buffer(name).copy_(buffer)


@pytest.mark.sampled("mask")
@pytest.mark.parametrize("source", ["mask", "movement", "gradient"])
def test_a_task_with_a_parent_is_trained_as_one_on_a_model_of_the_parents_weights(source: str) -> None:
    """θ_ft, γ and its values are equal, with the parent's running statistics; only a mask search may choose owned entries."""
    strategy = compared.learn(made(tiny.tiny_stream(TASKS), LINE, region_from=source))
    first, parent, record = strategy.ledger.records
    options, taken = strategy.options, first.owned.region | parent.owned.region

    stream = tiny.tiny_stream(TASKS)
    model, task, space = stream.model, stream.tasks[2], stream.model.space()
    space.load_(model.backbone, reference(strategy, "ag_news", tree_of(LINE)))
    load_buffers(model.backbone, parent.buffers)
    bench = SingleTask(stream.loaded, task, pre=ModelState.of(model, ["sst2"]), seed=0, device=torch.device("cpu"))
    chosen = options if source == "mask" else options.model_copy(update={"among": "free"})
    tuned = bench.with_readout(options) if source == "gradient" else bench.fine_tuned(options)
    region = bench.region(tuned, chosen, taken)
    assert record.region == region and record.owned.region == region - taken
    assert (record.owned.region == record.region) == (source != "mask")

    tuned.load_beside_theta_(model, ["sst2"])
    space.scatter_(model.backbone, record.owned.region.indices, tuned.theta[record.owned.region.indices])
    load_buffers(model.backbone, parent.buffers)
    trained = RegionParameters(model.backbone, space, record.owned.region)
    how = options.for_region(len(space), budget(len(space), options.sparsity))
    fine_tune(model, task.train, how, steps=4, seed=derive_seed(0, "train", "sst2"), trained=trained)
    assert torch.equal(space.gather(model.backbone, record.owned.region.indices), record.owned.values)
    assert_same(tensors_of(model.readout_module(task.label)), record.readout)


def test_a_region_on_the_pre_trained_model_may_take_what_a_union_owns() -> None:
    """The same rows move the same entries, so γ is the first task's region again, or has none of its entries."""
    first = tiny.tiny_task("sst2")
    twin = replace(first, task=replace(first.task, name="twin"))
    cls = registry.strategy("grafting-continual")
    options = cls.Options(**OPTIONS, region_from="movement", among="free")
    strategy = cls(stream=make_stream("twins", [first, twin], tiny.tiny_model()), options=options, device="cpu")
    first, twin = strategy.stream.tasks
    strategy.train(strategy.stream.benchmark.train_stream[0])
    own, tuned = strategy.ledger.records[0].region, strategy.fine_tuned(first)
    assert strategy.localize(twin, replace(tuned, readouts={"twin": tuned.readouts["sst2"]}), "") == own
    assert not len(strategy.localize(twin, replace(tuned, readouts={"twin": tuned.readouts["sst2"]})) & own)


# -- Interrupts ------------------------------------------------------------------------------------------


class Stop(Monitor):
    """While armed, raises KeyboardInterrupt at the second step of one phase of ``sst2``."""

    def __init__(self, at: str) -> None:
        self.at, self.armed = at, True

    @contextmanager
    def phase(self, task: str, phase: Any, steps: int) -> Iterator[Callable[[int, float], None]]:
        def on_step(step: int, loss: float) -> None:
            if self.armed and (task, phase, step) == ("sst2", self.at, 2):
                raise KeyboardInterrupt

        yield on_step


@pytest.mark.sampled("train", share=0.35)
@pytest.mark.parametrize("phase", ["fine_tune", "localize", "train"])
def test_a_task_broken_off_leaves_the_model_as_it_was(tiny_stream: MakeStream, phase: str) -> None:
    """The task can then be learned, to the same bits."""
    stop = Stop(phase)
    strategy, twin = (made(tiny_stream(stream="qnli,sst2"), "sst2=qnli", each) for each in (stop, None))
    first, second = strategy.stream.benchmark.train_stream
    strategy.train(first)
    before, tensors = logits(strategy), everything(strategy.model)
    with pytest.raises(KeyboardInterrupt):
        strategy.train(second)
    assert_same(everything(strategy.model), tensors)
    assert_same(logits(strategy), before)
    stop.armed = False
    strategy.train(second)
    assert_same_record(strategy.ledger.records[1], compared.learn(twin).ledger.records[1])


@pytest.mark.sampled("train-2", share=0.35)
@pytest.mark.parametrize(("phase", "step"), [("fine_tune", 2), ("localize", 1), ("train", 2)])
def test_a_run_that_is_cut_short_goes_on(
    model_directory: Callable[[str], Path],
    data_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    step: int,
) -> None:
    """The run is resumed in the middle of a phase, with the same parents and values; finished phases are skipped."""
    monkeypatch.setattr(checkpoints, "INTERVAL", 0.0)
    monkeypatch.setattr(checkpoints, "SHARE", float("inf"))
    cut, steps, log_step, after = ("sst2", phase, step), list[Any](), History.log_step, FileCheckpoint.after

    def logs(history: Any, *about: Any) -> None:
        log_step(history, *about)
        steps.append(about[:3])

    def keeps(kept: Any, *about: Any) -> None:
        after(kept, *about)
        if steps[-1] == cut:
            raise KeyboardInterrupt

    def run(name: str, **how: Any) -> Ledger:
        places: Any = {
            "data": data_directory,
            "model": model_directory("bert"),
            "out": tmp_path / name,
            "set": {"parents": "sst2=qnli"},
        }
        chosen: Any = {"strategies": "on_parents:OnParents", "progress": False, **OPTIONS, **how}
        return forgetfree.run("qnli,sst2", **places, **chosen).ledger("OnParents")

    whole = run("whole")
    monkeypatch.setattr(History, "log_step", logs)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(FileCheckpoint, "after", keeps)
        run("cut")
    steps.clear()
    again = run("cut", resume=True)
    assert steps[0] == ("sst2", phase, step + 1)
    for one, other in zip(again.records, whole.records, strict=True):
        assert_same_record(one, other)


# -- Other scenarios -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["class", "domain"])
def test_tasks_may_be_withheld(tiny_stream: MakeStream, scenario: str, tmp_path: Path) -> None:
    tree = "sst2=qnli"
    strategy = compared.learn(made(text_stream(tiny_stream, scenario), tree, task_inference="router"))
    for task in strategy.stream.tasks:
        with strategy.answering(task):
            assert torch.equal(theta_of(strategy), reference(strategy, task.name, tree_of(tree)))
    answers = logits(strategy)
    strategy.save(tmp_path)
    again = made(text_stream(tiny_stream, scenario), tree, task_inference="router")
    again.load(tmp_path)
    assert again.ledger.records[-1].parent == "qnli"
    assert_same(logits(again), answers)
