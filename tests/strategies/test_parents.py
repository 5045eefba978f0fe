"""``composition=auto``: each task stands on θ_pre or on an earlier task, as a probe prefers. Models are compared to the bit.

The obvious reference of a task's model: θ_pre, the values of its ancestors from the first on, and then its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import compared
import numpy as np
import pytest
import torch
from compared import assert_same, everything, logits
from preferred import prefer
from small_strategies import theta_of
from torch import Tensor
from withheld import text_stream

import forgetfree
from forgetfree import Ledger, registry
from forgetfree.continual.stream import Stream, make_stream
from forgetfree.core.parameters import tensors_of
from forgetfree.core.selection import budget
from forgetfree.core.trained import RegionParameters
from forgetfree.errors import OptionError
from forgetfree.jobs import checkpoints
from forgetfree.jobs.checkpoints import FileCheckpoint
from forgetfree.jobs.history import History
from forgetfree.ledger import switch
from forgetfree.ledger.ledger import Record
from forgetfree.models.state import ModelState
from forgetfree.seeds import derive_seed
from forgetfree.testing import tiny
from forgetfree.training import parents
from forgetfree.training.encoded_task import loss_of
from forgetfree.training.floors import labels_of_rows
from forgetfree.training.monitor import Monitor
from forgetfree.training.parents import better_parent, cross_validation
from forgetfree.training.single_task import SingleTask
from forgetfree.training.step import fine_tune

MakeStream = Callable[..., Any]
TASKS = ("qnli", "ag_news", "sst2")
OPTIONS: dict[str, Any] = {
    **{"steps": 4, "batch_size": 4, "optimizer": "sgd", "learning_rate": 0.2, "sparsity": 0.05},
    **{"mask_steps": 2, "mask_batch_size": 12, "composition": "auto"},
}
#: Parents by task; the others stand on θ_pre.
LINE = {"ag_news": "qnli", "sst2": "ag_news"}
TREES = [{}, {"ag_news": "qnli"}, {"sst2": "qnli"}, {"ag_news": "qnli", "sst2": "qnli"}, LINE]


def made(stream: Any, monitor: Monitor | None = None, **changes: Any) -> Any:
    cls = registry.strategy("grafting-continual")
    return cls(stream=stream, options=cls.Options(**OPTIONS | changes), device="cpu", monitor=monitor)


def line(task: str, tree: Mapping[str, str]) -> list[str]:
    """The task's ancestors, the first of which stands on θ_pre, and itself."""
    return [*line(tree[task], tree), task] if task in tree else [task]


def reference(strategy: Any, task: str, tree: Mapping[str, str]) -> Tensor:
    """θ of a task's model."""
    records = {record.task: record for record in strategy.ledger.records}
    theta: Tensor = strategy.pre_trained.theta.clone()
    for name in line(task, tree):
        theta[records[name].owned.region.indices] = records[name].owned.values
    return theta


def assert_same_record(one: Record, other: Record) -> None:
    assert (one.task, one.parent, one.region) == (other.task, other.parent, other.region)
    assert one.owned.region == other.owned.region and torch.equal(one.owned.values, other.owned.values)
    assert_same(one.readout, other.readout)


@pytest.mark.sampled("tree4", share=0.5)
@pytest.mark.parametrize("tree", TREES)
def test_a_task_is_answered_with_what_its_parent_is_answered_with_and_its_own(
    tiny_stream: MakeStream, monkeypatch: pytest.MonkeyPatch, tree: dict[str, str], tmp_path: Path
) -> None:
    """Later tasks change no bit of it; nor does the file, from which a strategy learns on as if it had learned all."""
    prefer(monkeypatch, tree)
    strategy, answers = made(tiny_stream()), dict[str, Tensor]()
    for task, experience in zip(strategy.stream.tasks, strategy.stream.benchmark.train_stream, strict=True):
        if task.name == "sst2":
            strategy.save(tmp_path)
        strategy.train(experience)
        answers[task.name] = torch.from_numpy(strategy.evaluate([task])[task.name].logits)
    assert [record.parent for record in strategy.ledger.records] == [tree.get(task, "") for task in TASKS]
    for task in strategy.stream.tasks:
        with strategy.answering(task):
            assert torch.equal(theta_of(strategy), reference(strategy, task.name, tree))
        assert torch.equal(theta_of(strategy), strategy.pre_trained.theta)
    assert_same(logits(strategy), answers)

    resumed = made(tiny_stream())
    resumed.load(tmp_path)
    resumed.train(list(resumed.stream.benchmark.train_stream)[2])
    for one, other in zip(resumed.ledger.records, strategy.ledger.records, strict=True):
        assert_same_record(one, other)
    assert_same(logits(resumed), answers)


def test_where_no_parent_is_better_each_task_stands_alone(
    tiny_stream: MakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(monkeypatch, {})
    auto, alone = (compared.learn(made(tiny_stream(), composition=each)) for each in ("auto", "alone"))
    for one, other in zip(auto.ledger.records, alone.ledger.records, strict=True):
        assert_same_record(one, other)


def load_buffers(model: Any, buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        model.get_buffer(name).copy_(buffer)


@pytest.mark.sampled("mask")
@pytest.mark.parametrize("source", ["mask", "movement", "gradient"])
def test_a_task_with_a_parent_is_trained_as_one_on_a_model_of_the_parents_weights(
    monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """θ_ft, γ and its values, with the parent's running statistics; what is no search chooses γ among free entries."""
    prefer(monkeypatch, LINE)
    strategy = compared.learn(made(tiny.tiny_stream(TASKS), region_from=source))
    first, parent, record = strategy.ledger.records
    options, taken = strategy.options, first.owned.region | parent.owned.region

    stream = tiny.tiny_stream(TASKS)
    model, task, space = stream.model, stream.tasks[2], stream.model.space()
    space.load_(model.backbone, reference(strategy, "ag_news", LINE))
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


# -- The choice ------------------------------------------------------------------------------------------


def slow(model: Any, task: Any, options: Any) -> tuple[float, ...]:
    """A probe's loss and errors, on features that are read row by row; where texts are written, the loss of the model."""
    if model.readout == "generate":
        return (loss_of(model, task, task.train, options),)
    features, labels = [], []
    for rows in (task.train, task.validation):
        labels.append(labels_of_rows(rows))
        with torch.no_grad():
            features += [model.eval().features(rows.batch([row])[0]).numpy() for row in range(len(rows))]
    return cross_validation(np.concatenate(features), np.concatenate(labels))


def stream_with_a_twin(readout: Any) -> Stream:
    """Two tasks, and the first one again under another name."""
    tasks = [(tiny.tiny_texts if readout == "generate" else tiny.tiny_task)(name) for name in ("sst2", "qnli")]
    twin = replace(tasks[0], task=replace(tasks[0].task, name="twin"))
    return make_stream("twins", [*tasks, twin], tiny.tiny_model(readout=readout))


@pytest.mark.parametrize("readout", ["linear", "generate"])
def test_the_parent_is_chosen_by_what_rows_lose_on_the_weights_of_each_earlier_task(
    monkeypatch: pytest.MonkeyPatch, readout: Any
) -> None:
    probe, found = parents.probe, dict[str, list[Any]]()

    def noted(model: Any, task: Any, options: Any) -> Any:
        found.setdefault(task.name, []).append(probe(model, task, options))
        return found[task.name][-1]

    monkeypatch.setattr(parents, "probe", noted)
    how = {"steps": 30, "optimizer": "adamw", "learning_rate": 0.01}
    strategy = compared.learn(made(stream_with_a_twin(readout), **how))
    model, options, tasks = strategy.model, strategy.options, strategy.stream.tasks
    for task, record in zip(tasks, strategy.ledger.records, strict=True):
        expected = {"": slow(model, task, options)}
        for earlier in tasks[: task.label]:
            with strategy.answering(earlier):
                expected[earlier.name] = slow(model, task, options)
        if task.label:  # the first has nothing to stand on, and is not probed
            np.testing.assert_allclose(found[task.name], [*expected.values()], rtol=1e-3)
        assert record.parent == better_parent(expected)
    assert strategy.ledger.records[2].parent == "sst2"


def test_of_many_earlier_tasks_the_nearest_are_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that are more than many: the twin, whose rows are the same."""
    monkeypatch.setattr(parents, "MANY", 1)
    monkeypatch.setattr(parents, "NEAREST", 1)
    probed = list[str]()

    def noted(model: Any, task: Any, options: Any) -> tuple[float]:
        probed.append(f"{task.name} on {switch._IN_PLACE.get(model.backbone, 'θ_pre')}")
        return (1.0,)

    monkeypatch.setattr(parents, "probe", noted)
    compared.learn(made(stream_with_a_twin("linear")))
    assert probed == ["qnli on θ_pre", "qnli on sst2", "twin on θ_pre", "twin on sst2"]


def test_a_region_on_the_pre_trained_model_may_take_what_a_union_owns(tiny_stream: MakeStream) -> None:
    """By hand: the same rows move the same entries, so γ is the first task's own again, or has none of them."""
    strategy = made(stream_with_a_twin("linear"), composition="union", region_from="movement", among="free")
    first, _, twin = strategy.stream.tasks
    strategy.train(strategy.stream.benchmark.train_stream[0])
    own, tuned = strategy.ledger.records[0].region, strategy.fine_tuned(first)
    assert strategy.localize(twin, replace(tuned, readouts={"twin": tuned.readouts["sst2"]}), "") == own
    assert not len(strategy.localize(twin, replace(tuned, readouts={"twin": tuned.readouts["sst2"]})) & own)


# -- What does not come to its end -----------------------------------------------------------------------


class Stop(Monitor):
    """Raises at the second step of one phase of ``sst2``, once armed."""

    def __init__(self, at: str) -> None:
        self.at, self.armed = at, True

    @contextmanager
    def phase(self, task: str, phase: Any, steps: int) -> Iterator[Callable[[int, float], None]]:
        def on_step(step: int, loss: float) -> None:
            if self.armed and (task, phase, step) == ("sst2", self.at, 2):
                raise KeyboardInterrupt

        yield on_step


@pytest.mark.sampled("train", share=0.5)
@pytest.mark.parametrize("phase", ["fine_tune", "localize", "train"])
def test_a_task_broken_off_leaves_the_model_as_it_was(
    tiny_stream: MakeStream, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """And it is learned after all, to the same bits."""
    prefer(monkeypatch, {"sst2": "qnli"})
    stop = Stop(phase)
    strategy, twin = made(tiny_stream(stream="qnli,sst2"), stop), made(tiny_stream(stream="qnli,sst2"))
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


@pytest.mark.sampled("train-2", share=0.5)
@pytest.mark.parametrize(("phase", "step"), [("fine_tune", 2), ("localize", 1), ("train", 2)])
def test_a_run_that_is_cut_short_goes_on(
    model_directory: Callable[[str], Path],
    data_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    step: int,
) -> None:
    """In the midst of a phase, and to the same parents and values; a phase that had ended is passed over."""
    prefer(monkeypatch, {"sst2": "qnli"})
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
        places: Any = {"data": data_directory, "model": model_directory("bert"), "out": tmp_path / name}
        chosen: Any = {"strategies": "grafting-continual", "progress": False, **OPTIONS, **how}
        return forgetfree.run("qnli,sst2", **places, **chosen).ledger()

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


# -- Other options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["class", "domain"])
def test_tasks_may_be_withheld(
    tiny_stream: MakeStream, monkeypatch: pytest.MonkeyPatch, scenario: str, tmp_path: Path
) -> None:
    prefer(monkeypatch, tree := {"sst2": "qnli"})
    strategy = compared.learn(made(text_stream(tiny_stream, scenario), task_inference="router"))
    for task in strategy.stream.tasks:
        with strategy.answering(task):
            assert torch.equal(theta_of(strategy), reference(strategy, task.name, tree))
    answers = logits(strategy)
    strategy.save(tmp_path)
    again = made(text_stream(tiny_stream, scenario), task_inference="router")
    again.load(tmp_path)
    assert again.ledger.records[-1].parent == "qnli"
    assert_same(logits(again), answers)


@pytest.mark.parametrize("composition", ["alone", "auto"])
def test_there_is_no_final_union_unless_each_task_stands_on_the_one_before(
    tiny_stream: MakeStream, composition: str
) -> None:
    with pytest.raises(OptionError, match=f"composition={composition} makes no union"):
        made(tiny_stream(), composition=composition, final_union=True)
