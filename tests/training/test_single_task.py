"""One task on one model: the formulas of its models, and the state of the model after each call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forgetfree import registry
from forgetfree.continual.stream import make_stream
from forgetfree.core.regions import Region, biases
from forgetfree.core.selection import most_moved
from forgetfree.data.rows import Rows, TaskRows
from forgetfree.data.sources import load_tasks
from forgetfree.errors import DataError
from forgetfree.models.loading import load_model
from forgetfree.models.state import StateStore
from forgetfree.seeds import derive_seed
from forgetfree.tasks import TaskDefinition
from forgetfree.training import single_task
from forgetfree.training.encoded_task import predict
from forgetfree.training.single_task import SingleTask
from forgetfree.training.step import plan
from forgetfree.training.training_options import LocalizationOptions, TrainingOptions

OPTIONS = LocalizationOptions(steps=4, batch_size=4, learning_rate=0.1, sparsity=0.02, mask_steps=2, mask_batch_size=8)


@pytest.fixture
def bench(model_directory, data_directory: Path) -> SingleTask:
    return SingleTask.of(
        load_model(str(model_directory("bert")), "linear"), load_tasks("sst2", str(data_directory))[0], seed=3
    )


def held(bench: SingleTask) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in bench.model.state_dict().items()}


# -- Models ----------------------------------------------------------------------------------------------


def test_every_call_leaves_the_pre_trained_model(bench: SingleTask) -> None:
    before = held(bench)
    fine_tuned = bench.fine_tuned(OPTIONS)
    region = bench.localized(fine_tuned, OPTIONS).region
    retrained = bench.retrained(fine_tuned, region, OPTIONS)
    for state in (fine_tuned, bench.grafted(fine_tuned, region), retrained):
        bench.answers(state)
    after = held(bench)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not torch.equal(fine_tuned.theta, bench.pre.theta)


def test_answers_are_those_of_the_state_asked_about(bench: SingleTask) -> None:
    fine_tuned = bench.fine_tuned(OPTIONS)
    answers = bench.answers(fine_tuned)
    with bench.holding(fine_tuned):
        expected = predict(bench.model, bench.task.test)
    assert np.array_equal(answers.logits, expected.numpy())
    assert not np.array_equal(answers.logits, bench.answers(replace(fine_tuned, theta=bench.pre.theta)).logits)


def test_the_fine_tuned_model_is_the_one_that_strategies_make_and_share(
    tiny_stream, model_directory, data_directory: Path
) -> None:
    """In a stream, sst2 is the third task, and here the only one: the model and its key are the same."""
    store = StateStore()
    options = TrainingOptions(steps=4, batch_size=4, learning_rate=0.1)
    stream = tiny_stream("bert", "linear", seed=3)
    cls = registry.strategy("grafting-continual")
    strategy = cls(
        stream=stream, seed=3, store=store, options=cls.Options(steps=4, batch_size=4, learning_rate=0.1, sparsity=0.02)
    )
    task = next(task for task in stream.tasks if task.name == "sst2")
    theirs = strategy.fine_tuned(task)
    alone = SingleTask.of(
        load_model(str(model_directory("bert")), "linear"),
        load_tasks("sst2", str(data_directory))[0],
        seed=3,
        store=store,
    )
    assert alone.fine_tuned(options) is theirs  # from the store


def test_retraining_starts_at_the_pre_trained_values_and_moves_the_region_alone(bench: SingleTask) -> None:
    fine_tuned = bench.fine_tuned(OPTIONS)
    region = biases(bench.space)
    retrained = bench.retrained(fine_tuned, region, OPTIONS)
    outside = ~region.mask(len(bench.space))
    assert torch.equal(retrained.theta[outside], bench.pre.theta[outside])
    moved = retrained.theta != bench.pre.theta
    assert moved.any()
    # One plain SGD step of rate r from θ_pre: θ_pre − r · ∂L/∂θ, inside the region.
    one = OPTIONS.model_copy(update={"steps": 1, "weight_decay": 0.0, "schedule": "constant", "dropout": False})
    stepped = bench.retrained(fine_tuned, region, one)
    with bench.holding(replace(fine_tuned, theta=bench.pre.theta)):
        seed = derive_seed(bench.seed, "train", "sst2")
        batch = bench.task.train.batch(plan(bench.task.train.lengths, one, 1, seed)[0])
        x, y, t = (each.to(bench.device) for each in batch)
        bench.model.eval()
        loss = torch.nn.functional.cross_entropy(bench.model(x, t), y)
        gradients = torch.autograd.grad(loss, bench.space.parameters(bench.model.backbone), allow_unused=True)
        flat = torch.cat(
            [
                torch.zeros(spec.size) if g is None else g.reshape(-1).cpu()
                for g, spec in zip(gradients, bench.space.tensors, strict=True)
            ]
        )
    expected = bench.pre.theta.clone()
    expected[region.indices] -= 0.1 * flat[region.indices]
    assert torch.allclose(stepped.theta, expected, atol=1e-7)


def test_rows_of_another_data_set_are_read_as_this_tasks(bench: SingleTask, data_directory: Path) -> None:
    fine_tuned = bench.fine_tuned(OPTIONS)
    test = load_tasks("sst2", str(data_directory))[0].test
    other = Rows(test.first[::-1], (), test.labels[::-1])
    answers = bench.answers(fine_tuned, bench.encode(other))
    assert np.allclose(answers.logits, bench.answers(fine_tuned).logits[::-1], atol=1e-6)
    assert answers.labels.tolist() == list(test.labels[::-1])


def test_updates_go_by_the_shots_asked_for(model_directory) -> None:
    labels = (0,) * 600 + (1,) * 1000
    rows = Rows(tuple("ab" for _ in labels), (), labels)
    few = Rows(("a", "b"), (), (0, 1))
    task = TaskRows(TaskDefinition("own", "single", ("no", "yes")), rows, few, few)

    def steps(**how: Any) -> int:
        bench = SingleTask.of(load_model(str(model_directory("bert")), "linear"), task, **how)
        return bench.task.full_steps(TrainingOptions())

    assert steps(shots=64) == 16 * 2 * 64
    assert steps(shots=4096) == 16 * 2 * 512  # the paper's number for 4096 shots, though labels have fewer rows
    assert steps() == 16 * 2 * 512  # all rows
    task = replace(task, train=few)
    assert steps() == 16 * 2 * 1


@pytest.mark.parametrize(("fraction", "steps", "share"), [(0.1, 2, 0.1), (1.0, 2, 1.0), (0.1, 0, 1.0), (1e-9, 2, 0.0)])
def test_the_base_region_is_a_fraction_of_the_budget_where_s_is_learned(
    bench: SingleTask, fraction: float, steps: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the paper, it is the top 1e-5 by movement for a region of at most 1e-4 (§3.1). Without S, the base is the region."""
    options = OPTIONS.model_copy(update={"sparsity": 0.05, "base_fraction": fraction, "mask_steps": steps})
    count = int(0.05 * len(bench.space))
    found: list[Region] = []
    learn = single_task.learn_region

    def spied(*arguments: Any, base: Region, **named: Any) -> Any:
        found.append(base)
        return learn(*arguments, base=base, **named)

    monkeypatch.setattr(single_task, "learn_region", spied)
    fine_tuned = bench.fine_tuned(options)
    learned = bench.localized(fine_tuned, options)
    assert found == [most_moved(bench.pre.theta, fine_tuned.theta, max(1, int(share * count)))]
    assert len(learned.region) <= count and learned.budget == count
    if steps == 0:
        assert learned.region == found[0]


@pytest.mark.parametrize("split", ["validation", "test"])
def test_f1_needs_rows_of_label_1(model_directory, data_directory: Path, split: str) -> None:
    """Without such rows, every mask scores 0 and the first would win, so the task is refused before training."""
    (rows,) = load_tasks("sst2", str(data_directory))
    without = [i for i, label in enumerate(getattr(rows, split).labels) if label == 0]
    measured = replace(rows, task=replace(rows.task, metric="f1"))
    loaded = load_model(str(model_directory("bert")), "linear")
    with pytest.raises(
        DataError, match=rf"'sst2' is measured by the F1 of label 1 \('positive'\), and none of its \d {split}"
    ):
        SingleTask.of(loaded, replace(measured, **{split: getattr(rows, split).take(without)}))
    with pytest.raises(DataError, match=f"none of its . {split} rows"):
        make_stream("x", [replace(measured, **{split: getattr(rows, split).take(without)})], loaded)
    SingleTask.of(loaded, measured)
