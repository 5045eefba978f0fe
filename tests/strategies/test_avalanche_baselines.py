"""Requirements on every baseline with Avalanche's code in our loop, and each correction in docs/baselines.md.

test_differential.py checks that they compute the same as Avalanche's own strategies.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.training.utils import ParamData
from compared import learn
from torch import Tensor, nn

from forgetfree import registry
from forgetfree.continual.adapter import object_bytes
from forgetfree.errors import OptionError, UsageError
from forgetfree.models.state import ModelState
from forgetfree.strategies import avalanche_baselines, gem
from forgetfree.training.training_options import TrainingOptions

MakeStream = Callable[..., Any]

FILES = ("forgetfree.strategies.avalanche_baselines", "forgetfree.strategies.gem")
BASELINES = [name for name, entry in registry.STRATEGIES.items() if entry.target.partition(":")[0] in FILES]
STEPS, BATCH = 7, 4
#: Small penalties: models with random weights have large Fisher information.
STEADY = {"ewc": {"ewc_lambda": 1e-3}, "online-ewc": {"ewc_lambda": 1e-3}, "mas": {"lambda_reg": 1e-3}}


def make(name: str, stream: Any, *, seed: int = 0, extra: Any = None, **options: Any) -> Any:
    cls = registry.strategy(name)
    small = {"steps": STEPS, "batch_size": BATCH, "learning_rate": 0.05} | STEADY.get(name, {})
    return cls(stream=stream, options=cls.Options(**(small | options)), seed=seed, plugins=extra)


def memory_of(strategy: Any) -> Any:
    """Return the rows in the strategy's memory."""
    return getattr(strategy, "avalanche_plugin", strategy).storage_policy.buffer


def weights(strategy: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in strategy.model.parameters()])


class Updates(SupervisedPlugin):
    """Counts updates by task, and the task labels of their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[list[Counter[int]]] = []

    def before_training_exp(self, strategy: Any, **_: Any) -> None:
        self.tasks.append([])

    def after_update(self, strategy: Any, **_: Any) -> None:
        self.tasks[-1].append(Counter(strategy.mb_task_id.tolist()))


# -- All of them -----------------------------------------------------------------------------------------


class Warns(SupervisedPlugin):
    """A user's plugin that raises its own deprecation warning once a task."""

    def after_training_exp(self, strategy: Any, **_: Any) -> None:
        warnings.warn("mine", DeprecationWarning, stacklevel=1)


@pytest.mark.sampled("agem", "gdumb", "replay")
@pytest.mark.parametrize("name", BASELINES)
def test_runs_for_as_many_steps_as_told_silently_and_without_dropout(tiny_stream: MakeStream, name: str) -> None:
    """A-GEM, GEM and MAS set training mode themselves before their own passes."""
    stream, updates, modes = tiny_stream("bert", "linear"), Updates(), list[bool]()
    strategy = make(name, stream, extra=[updates, Warns()], dropout=False)
    hook = strategy.model.backbone.register_forward_hook(lambda module, *_: modes.append(module.training))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learn(strategy)
    hook.remove()
    assert [len(task) for task in updates.tasks] == ([3 * STEPS] if name == "joint" else [STEPS] * 3)
    assert {str(warning.message) for warning in caught} == {"mine"}
    assert modes and not any(modes)
    assert strategy.model is stream.model and not strategy.model._forward_pre_hooks


@pytest.mark.parametrize(("factor", "steps"), [(0.5, round(0.5 * 3 * STEPS)), (0.01, 1)])
def test_joint_takes_as_many_times_the_steps_of_all_tasks_as_told(
    tiny_stream: MakeStream, factor: float, steps: int
) -> None:
    updates = Updates()
    learn(make("joint", tiny_stream("bert", "linear"), extra=[updates], steps_factor=factor))
    assert [len(task) for task in updates.tasks] == [steps]


@pytest.mark.parametrize("name", ["ewc", "gdumb"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulation": 2}, "expected accumulation=1, got 2. Leave it at 1"),
        ({"precision": "fp16"}, "Set precision=bf16 or fp32"),
    ],
)
def test_refuses_what_avalanches_code_cannot_do(
    tiny_stream: MakeStream, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        make(name, tiny_stream("bert", "linear"), **options)


# -- Memory ----------------------------------------------------------------------------------------------


def test_object_bytes_by_hand() -> None:
    """A float32 takes 4 bytes, an int64 8."""
    three, six = torch.zeros(3), ParamData("six", (2, 3))
    assert object_bytes(three) == 12
    assert object_bytes([three, three, {"again": three}]) == 12  # counted once
    assert object_bytes(six) == 24
    assert object_bytes({"a": six, "b": ParamData("view", (2, 3), init_tensor=six.data)}) == 24
    assert object_bytes((three, six, torch.zeros(2, dtype=torch.int64), "text", 5, None)) == 12 + 24 + 16
    linear = nn.Linear(2, 1)
    assert object_bytes(linear) == 12
    assert object_bytes(nn.ModuleList([linear, linear])) == 12
    assert object_bytes(SimpleNamespace(tensor=three)) == 0  # not a class of Avalanche


def _row_bytes(stream: Any, tasks: int) -> int:
    return sum((sum(task.train.lengths) + 2 * len(task.train)) * 8 for task in stream.tasks[:tasks])


@pytest.mark.sampled(share=0.25)
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        # Memories as large as all rows, so that all rows are kept.
        ("replay", {"mem_size": 500}, lambda s, n: _row_bytes(s, n)),
        ("gdumb", {"mem_size": 500}, lambda s, n: _row_bytes(s, n)),
        ("cumulative", {}, lambda s, n: _row_bytes(s, n)),
        ("joint", {}, lambda s, n: _row_bytes(s, 3)),
        # Each row has 4 logits of 4 bytes: the widest task has 4 labels.
        ("der", {"mem_size": 500}, lambda s, n: _row_bytes(s, n) + 24 * n * 16),
        # Weights and importances of every parameter, for each task or once.
        ("ewc", {}, lambda s, n: n * 2 * 4 * _parameters(s)),
        ("online-ewc", {}, lambda s, n: 2 * 4 * _parameters(s)),
        ("mas", {}, lambda s, n: 2 * 4 * _parameters(s)),
        # The teacher is the last model.
        ("lwf", {}, lambda s, n: sum(t.numel() * t.element_size() for t in s.model.state_dict().values())),
    ],
)
def test_bytes_kept_by_hand(
    tiny_stream: MakeStream, name: str, options: dict[str, Any], expected: Callable[[Any, int], int]
) -> None:
    stream = tiny_stream("bert", "linear")
    strategy = make(name, stream, **options)
    assert strategy.bytes_kept() == 0
    model = ModelState.of(stream.model).size_in_bytes
    # Reservoirs store a random weight of 4 bytes with each row.
    weight = 4 if name in ("replay", "gdumb", "der") else 0
    for count, experience in enumerate(stream.benchmark.train_stream, 1):
        strategy.train(experience)
        assert strategy.bytes_kept() == model + expected(stream, count) + weight * 24 * count


def _parameters(stream: Any) -> int:
    return sum(parameter.numel() for parameter in stream.model.parameters())


class Constraint(SupervisedPlugin):
    """Records, for each update on a later task, the least cosine between the step and a gradient on remembered rows."""

    def __init__(self) -> None:
        super().__init__()
        self.cosines: list[float] = []

    def before_update(self, strategy: Any, **_: Any) -> None:
        self.before = weights(strategy)

    def after_update(self, strategy: Any, **_: Any) -> None:
        plugin = strategy.avalanche_plugin
        if strategy.clock.train_exp_counter:
            move = self.before - weights(strategy)
            remembered = plugin.G if hasattr(plugin, "G") else plugin.reference_gradients[None]
            self.cosines.append(float((remembered @ move / remembered.norm(dim=1) / move.norm()).min()))


PLAIN = {"optimizer": "sgd", "weight_decay": 0.0}


@pytest.mark.sampled("optimizer-learning_rate-readout_learning_rate-agem", "optimizer-weight_decay-agem")
@pytest.mark.parametrize("name", ["agem", "gem"])
@pytest.mark.parametrize(
    "how",
    [
        {"optimizer": "adamw", "learning_rate": 1e-3, "readout_learning_rate": 1e-2},
        {"optimizer": "momentum"},
        {"optimizer": "sgd", "weight_decay": 0.0, "l1": 0.5},
        PLAIN,
    ],
    ids=lambda how: "-".join(how),
)
def test_no_update_goes_against_a_gradient_on_remembered_rows(
    tiny_stream: MakeStream, monkeypatch: pytest.MonkeyPatch, name: str, how: dict[str, Any]
) -> None:
    """This holds for any optimiser. The bound of 0 has a margin for rounding, and for the 1e-3 that GEM's solver adds to a

    diagonal. The diagonal has squared norms of gradients, so the 1e-3 matters more for small gradients.
    """
    if name == "gem":
        pytest.importorskip("quadprog")

    def least() -> float:
        constraint = Constraint()
        learn(make(name, tiny_stream("bert", "linear"), extra=[constraint], steps=20, dropout=False, **how))
        assert len(constraint.cosines) == 40
        return min(constraint.cosines)

    nearly, projected = -6e-3 if name == "gem" else -1e-4, least()
    assert projected > nearly
    if how != PLAIN:
        monkeypatch.setattr(gem, "_descends_plainly", lambda options: True)
        assert least() < min(2 * nearly, 3 * projected)  # projecting the gradient is not enough


def test_gdumb_passes_over_its_memory_as_often_as_told(tiny_stream: MakeStream) -> None:
    """The memory of 60 is partly empty, because rare labels have few rows: the passes count only the rows in it."""
    stream, updates = tiny_stream("bert", "linear"), Updates()
    held = len(memory_of(learn(make("gdumb", stream, extra=[updates], mem_size=60, passes=3))))
    assert len(updates.tasks[0]) == 3 * 24 // BATCH
    assert len(updates.tasks[-1]) == 3 * -(-held // BATCH) < 3 * 60 // BATCH


@torch.no_grad()
def test_an_update_that_moves_nothing_stays_so() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), 10.0)
    strategy = SimpleNamespace(
        options=TrainingOptions(optimizer="adamw"),
        model=torch.nn.ParameterList([weight]),
        clock=SimpleNamespace(train_exp_counter=1),
    )
    update = gem._ProjectedUpdate()
    update.before_update(strategy)
    update.after_update(strategy)
    assert weight.tolist() == [1.0, 1.0]


# -- Rehearsal -------------------------------------------------------------------------------------------


@pytest.mark.sampled("der")
@pytest.mark.parametrize("name", ["gdumb", "der"])
def test_memories_are_balanced_over_the_labels_of_all_tasks(tiny_stream: MakeStream, name: str) -> None:
    """There are 16 rows for 2 + 4 + 2 labels; Avalanche's own memory would use only the numbers 0 to 3."""
    strategy = learn(make(name, tiny_stream("bert", "linear"), mem_size=16))
    rows = memory_of(strategy)
    counts = Counter((row[2], row[1]) for row in (rows[i] for i in range(len(rows))))
    labels = [(task.label, y) for task in strategy.stream.tasks for y in task.classes]
    assert counts == dict.fromkeys(labels, 2)


def test_labels_that_tasks_share_share_the_memory(tiny_stream: MakeStream) -> None:
    stream = tiny_stream("bert", "linear", stream="qnli,sst2", scenario="domain")
    rows = memory_of(learn(make("gdumb", stream, mem_size=10)))
    assert Counter(row[1] for row in (rows[i] for i in range(len(rows)))) == {0: 5, 1: 5}


def test_a_memory_without_a_row_for_each_label_is_refused(tiny_stream: MakeStream) -> None:
    for name, scenario in (("gdumb", "task"), ("der", "class")):
        with pytest.raises(OptionError, match=r"got mem_size=7 for 8 labels\. Set mem_size=8 or more"):
            make(name, tiny_stream("bert", "linear", scenario=scenario), mem_size=7)
    make("gdumb", tiny_stream("bert", "linear", stream="qnli,sst2", scenario="domain"), mem_size=2)


def test_a_sample_without_a_row_for_each_earlier_task_is_refused(tiny_stream: MakeStream) -> None:
    with pytest.raises(OptionError, match=r"got 1 for up to 2 tasks\. Set sample_size=2 or more"):
        make("agem", tiny_stream("bert", "linear"), sample_size=1)
    make("agem", tiny_stream("bert", "linear"), sample_size=2)


def test_der_rehearses_from_a_memory_smaller_than_its_batch(tiny_stream: MakeStream) -> None:
    updates = Updates()
    learn(make("der", tiny_stream("bert", "linear"), mem_size=10, batch_size_mem=64, extra=[updates]))
    assert updates.tasks[0] == [Counter({0: BATCH})] * STEPS
    assert updates.tasks[1] == [Counter({1: BATCH, 0: 10})] * STEPS
    assert all(batch[2] == BATCH and batch.total() == BATCH + 10 for batch in updates.tasks[2])


def test_gem_says_what_to_install(tiny_stream: MakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gem, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"Install it with: pip install 'forgetfree\[gem\]'"):
        make("gem", tiny_stream("bert", "linear"))


# -- Regularisation --------------------------------------------------------------------------------------


def test_si_drives_no_weight_away(tiny_stream: MakeStream) -> None:
    """Momentum and decay move some weights against their gradients: there, Avalanche's importances would be below 0."""
    plugin = learn(make("si", tiny_stream("bert", "linear"), optimizer="momentum")).avalanche_plugin
    importances, climbed = (
        torch.cat([each.data for each in tensors.values()])
        for tensors in (plugin.ewc_data[1], plugin.syn_data["cum_trajectory"])
    )
    assert float(climbed.max()) > 0
    assert float(importances.min()) == 0.0 < float(importances.max())


def test_rwalk_takes_scores_in_tasks_shorter_than_delta_t(tiny_stream: MakeStream) -> None:
    strategy = learn(make("rwalk", tiny_stream("bert", "linear"), delta_t=100))
    assert strategy.avalanche_plugin.delta_t == STEPS
    assert bool(weights(strategy).isfinite().all())
    assert max(float(each.data.max()) for each in strategy.avalanche_plugin.exp_scores.values()) > 0


def test_lwfs_teacher_answers_without_dropout(tiny_stream: MakeStream) -> None:
    teacher = learn(make("lwf", tiny_stream("bert", "linear"))).avalanche_plugin.lwf.prev_model
    assert not any(module.training for module in teacher.modules())


@pytest.mark.parametrize("name", ["ewc", "cumulative"])
def test_a_loaded_strategy_does_not_learn_without_its_memory(tiny_stream: MakeStream, name: str, tmp_path: Any) -> None:
    first = make(name, tiny_stream("bert", "linear"))
    first.train(first.stream.benchmark.train_stream[0])
    first.save(tmp_path)
    loaded = make(name, tiny_stream("bert", "linear"))
    loaded.load(tmp_path)
    before = weights(loaded).clone()
    with pytest.raises(
        UsageError, match=r"was loaded from a file, so it cannot learn 'ag_news': .* Train it on the whole stream"
    ):
        loaded.train(loaded.stream.benchmark.train_stream[1])
    assert torch.equal(weights(loaded), before)


def test_mas_goes_on_at_a_loss_of_0() -> None:
    plugin, model = avalanche_baselines._MASPlugin(lambda_reg=2.0), nn.Linear(1, 1, bias=False)
    plugin.importance = {"weight": ParamData("weight", (1, 1), init_tensor=torch.tensor([[3.0]]))}
    plugin.params = {"weight": ParamData("weight", (1, 1), init_tensor=model.weight.detach() - 1)}
    strategy = SimpleNamespace(loss=torch.zeros(1), model=model, clock=SimpleNamespace(train_exp_counter=1))
    plugin.before_backward(strategy)
    assert float(strategy.loss.detach()) == pytest.approx(2 * 3 * 1)


@pytest.mark.parametrize(("name", "rows", "expected"), [("mas", 5, 5), ("ewc", 1000, 24), ("online-ewc", None, 24)])
def test_importances_are_taken_from_as_many_rows_as_told(
    tiny_stream: MakeStream, name: str, rows: int | None, expected: int
) -> None:
    seen: list[int] = []

    class Count(SupervisedPlugin):
        """Counts rows after the last step, when the model is called for importances only."""

        def after_training_epoch(self, strategy: Any, **_: Any) -> None:
            self.hook = strategy.model.register_forward_hook(lambda model, inputs, _: seen.append(len(inputs[0])))

        def after_training_exp(self, strategy: Any, **_: Any) -> None:
            self.hook.remove()
            assert len(strategy.experience.dataset) == 24  # other plugins see all rows

    learn(make(name, tiny_stream("bert", "linear"), importance_rows=rows, extra=[Count()]))
    assert sum(seen) == 3 * expected
