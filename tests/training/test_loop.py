"""The core training loop: updates compared with hand-written ones, batches, seeds, frozen tensors, predictions."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forgetfree.core.readout_model import attention_for_training, autocast
from forgetfree.core.trained import Reading, WholeTensors
from forgetfree.data.examples import EncodedRows
from forgetfree.errors import OptionError, TrainingError
from forgetfree.models.loading import load_model
from forgetfree.models.task_model import TaskModel
from forgetfree.training.encoded_task import predict
from forgetfree.training.step import TrainingStep, fine_tune, plan
from forgetfree.training.training_options import WORKSPACE, TrainingOptions

ModelDirectory = Callable[[str], Path]
READOUTS = {
    "bert": "linear",
    "bert-mlm": "prompt",
    "roberta-mlm": "prompt",
    "gpt2-lm": "causal",
    "gpt2": "linear",
}


def load(directory: Path, readout: str) -> TaskModel:
    """Return a tiny model with two tasks of two labels."""
    model = load_model(str(directory), readout).model
    words = [(5, 6), (7, 8)] if readout != "linear" else [(), ()]
    for name, label_words in zip(("other", "task"), words, strict=True):
        model.add_task(name, 2, label_words)
    return model


def rows_for(model: TaskModel, count: int = 22, seed: int = 0) -> EncodedRows:
    """Return rows of 3 to 12 ids for task 1, with one mask token where the readout needs it."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(3, 13, (1,), generator=generator))
        row = torch.randint(10, 100, (length,), generator=generator)
        if model.readout == "prompt":
            assert model.tokens.mask is not None
            row[1] = model.tokens.mask
        rows.append(row.tolist())
    labels = torch.randint(0, 2, (count,), generator=generator).tolist()
    return EncodedRows.of(rows, labels, 1, model.tokens.pad)


@pytest.fixture(params=READOUTS)
def model(request: pytest.FixtureRequest, model_directory: ModelDirectory) -> TaskModel:
    return load(model_directory(request.param), READOUTS[request.param])


@pytest.fixture
def bert(model_directory: ModelDirectory) -> TaskModel:
    return load(model_directory("bert"), "linear")


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


# -- The update, by hand ---------------------------------------------------------------------------------


def step_of(
    backbone: nn.Parameter, options: TrainingOptions, steps: int, readout: list[nn.Parameter] | None = None
) -> TrainingStep:
    return TrainingStep(nn.Module(), WholeTensors([backbone]), readout or [], options, steps)


def run(options: TrainingOptions, gradients: list[Tensor], start: Tensor) -> list[Tensor]:
    """Return the values of one parameter after each update with the given gradients."""
    parameter = nn.Parameter(start.clone())
    step = step_of(parameter, options, len(gradients))
    values = []
    for gradient in gradients:
        parameter.grad = gradient.clone()
        step.update()
        values.append(parameter.detach().clone())
    return values


START = torch.tensor([1.0, -2.0, 0.5])
GRADIENTS = [torch.tensor([0.3, 0.1, -0.2]), torch.tensor([-0.4, 0.2, 0.1]), torch.tensor([0.2, -0.1, 0.3])]


def test_sgd_with_momentum_weight_decay_and_linear_schedule() -> None:
    """v ← 0.9·v + g + 0.01·θ; θ ← θ − lr·v with lr = 0.1, 0.1·2/3, 0.1·1/3."""
    options = TrainingOptions(optimizer="momentum", learning_rate=0.1, weight_decay=0.01)
    theta, velocity = START.double(), torch.zeros(3, dtype=torch.float64)
    for i, (gradient, got) in enumerate(zip(GRADIENTS, run(options, GRADIENTS, START), strict=True)):
        velocity = 0.9 * velocity + gradient.double() + 0.01 * theta
        theta = theta - 0.1 * (1 - i / 3) * velocity
        torch.testing.assert_close(got.double(), theta, rtol=1e-6, atol=1e-7)


def test_adamw() -> None:
    """Loshchilov & Hutter's algorithm 2 with β = (0.9, 0.999), ε = 1e-8."""
    options = TrainingOptions(optimizer="adamw", learning_rate=0.1, weight_decay=0.02, schedule="constant")
    theta = START.double()
    m, v = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for t, (gradient, got) in enumerate(zip(GRADIENTS, run(options, GRADIENTS, START), strict=True), 1):
        m = 0.9 * m + 0.1 * gradient.double()
        v = 0.999 * v + 0.001 * gradient.double() ** 2
        theta = theta - 0.1 * 0.02 * theta
        theta = theta - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        torch.testing.assert_close(got.double(), theta, rtol=1e-5, atol=1e-6)


def test_the_l1_penalty_pulls_towards_where_the_task_began() -> None:
    """Its gradient is 0.05·sign(θ − θ_pre): zero at θ_pre, then −0.05, +0.05 or 0."""
    options = TrainingOptions(learning_rate=0.1, weight_decay=0.0, l1=0.05, schedule="constant")
    theta = START.double()
    for gradient, got in zip(GRADIENTS, run(options, GRADIENTS, START), strict=True):
        theta = theta - 0.1 * (gradient.double() + 0.05 * (theta - START.double()).sign())
        torch.testing.assert_close(got.double(), theta, rtol=1e-6, atol=1e-7)


def test_the_penalty_does_not_reach_the_readout_which_may_have_a_rate_of_its_own() -> None:
    backbone, readout = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    options = TrainingOptions(
        learning_rate=0.1, readout_learning_rate=0.5, weight_decay=0.0, l1=0.5, schedule="constant"
    )
    step = step_of(backbone, options, 1, [readout])
    with torch.no_grad():
        backbone += 1
    backbone.grad, readout.grad = torch.zeros(2), torch.ones(2)
    step.update()
    assert backbone.tolist() == pytest.approx([1.95, 1.95])
    assert readout.tolist() == [0.5, 0.5]


def test_gradients_are_clipped_to_a_length() -> None:
    """(3, 4) has length 5 and is scaled to length 1: (0.6, 0.8)."""
    options = TrainingOptions(learning_rate=1.0, weight_decay=0.0, max_gradient_norm=1.0, schedule="constant")
    (got,) = run(options, [torch.tensor([3.0, 4.0])], torch.zeros(2))
    assert got.tolist() == pytest.approx([-0.6, -0.8], rel=1e-5)


def test_the_linear_schedule_falls_to_zero_and_the_constant_one_stays() -> None:
    """Four updates with gradient 1 at rate 1 add up to 1 + 3/4 + 2/4 + 1/4 = 2.5, or to 4."""
    ones = [torch.ones(1)] * 4
    linear = run(TrainingOptions(learning_rate=1.0, weight_decay=0.0), ones, torch.zeros(1))
    constant = run(TrainingOptions(learning_rate=1.0, weight_decay=0.0, schedule="constant"), ones, torch.zeros(1))
    assert [float(v) for v in linear] == [-1, -1.75, -2.25, -2.5]
    assert [float(v) for v in constant] == [-1, -2, -3, -4]


@pytest.mark.parametrize(
    ("steps", "rows", "batch_size", "updates"),
    [
        ("auto", 32, 8, 100),
        ("auto", 401, 8, 201),  # 4 · 401 / 8, rounded up
        ("auto", 401, 16, 101),
        ("auto", 100_000, 8, 400),
        ("paper", 128, 8, 2048),
        (7, 128, 8, 7),
    ],
)
def test_steps_are_a_number_or_follow_a_rule(steps: Any, rows: int, batch_size: int, updates: int) -> None:
    """`auto` is four passes, in 100 to 400 updates; `paper` is the paper's rule, here for 2 labels and 64 shots."""
    options = TrainingOptions(steps=steps, batch_size=batch_size)
    assert options.updates(labels=2, shots=64, rows=rows) == updates


# -- The loop --------------------------------------------------------------------------------------------


def test_fine_tuning_is_a_plain_loop_over_the_planned_batches(bert: TaskModel, model_directory: ModelDirectory) -> None:
    """A plain loop with torch's SGD, without dropout, gives the same weights and losses up to rounding."""
    rows = rows_for(bert)
    options = TrainingOptions(optimizer="momentum", learning_rate=0.1, batch_size=4, dropout=False, schedule="constant")
    losses: list[float] = []
    fine_tune(bert, rows, options, steps=7, seed=3, on_step=lambda step, loss: losses.append(loss))

    twin = load(model_directory("bert"), "linear").eval()
    trained = [*twin.space().parameters(twin.backbone), *twin.readouts[1].parameters()]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=1e-4)
    for i, batch in enumerate(plan(rows.lengths, options, 7, 3)):
        x, y, _ = rows.batch(batch)
        loss = F.cross_entropy(twin(x, 1), y)
        assert losses[i] == pytest.approx(float(loss.detach()), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, tensor in state(twin).items():
        torch.testing.assert_close(bert.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled("gpt2-lm")
def test_only_layers_and_the_tasks_readout_move(model: TaskModel) -> None:
    """Embeddings, LM head and the other task's readout stay bit for bit, under momentum and weight decay."""
    before, rows = state(model), rows_for(model)
    graftable = {f"backbone.{spec.name}" for spec in model.space().tensors}
    options = TrainingOptions(optimizer="momentum", learning_rate=0.05, weight_decay=0.1, batch_size=4)
    fine_tune(model, rows, options, steps=3, seed=0)
    moved = {name for name, tensor in state(model).items() if not torch.equal(tensor, before[name])}
    own = {"readouts.1.layer.weight", "readouts.1.layer.bias"} if model.readout == "linear" else set()
    assert moved == graftable | own


def test_flags_mode_and_gradients_are_as_before(bert: TaskModel) -> None:
    bert.eval()
    bert.backbone.encoder.layer[0].output.dense.bias.requires_grad_(False)  # type: ignore[union-attr, index]
    flags = [p.requires_grad for p in bert.parameters()]
    fine_tune(bert, rows_for(bert), TrainingOptions(batch_size=4), steps=2, seed=0)
    assert [p.requires_grad for p in bert.parameters()] == flags
    assert not bert.training
    assert all(p.grad is None for p in bert.parameters())


@pytest.mark.parametrize("accumulation", [3, 50])
def test_accumulation_is_the_same_update(bert: TaskModel, model_directory: ModelDirectory, accumulation: int) -> None:
    rows = rows_for(bert)
    plain: dict[str, Any] = {"learning_rate": 0.1, "batch_size": 8, "dropout": False}
    twin = load(model_directory("bert"), "linear")
    whole: list[float] = []
    cut: list[float] = []
    fine_tune(bert, rows, TrainingOptions(**plain), steps=4, seed=0, on_step=lambda _, loss: whole.append(loss))
    options = TrainingOptions(**plain, accumulation=accumulation)
    fine_tune(twin, rows, options, steps=4, seed=0, on_step=lambda _, loss: cut.append(loss))
    assert cut == pytest.approx(whole, rel=1e-6)
    for name, tensor in state(bert).items():
        torch.testing.assert_close(twin.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


def test_dropout_can_be_turned_off(bert: TaskModel) -> None:
    active: list[bool] = []
    for module in bert.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda module, *_: active.append(module.training))
    fine_tune(bert, rows_for(bert), TrainingOptions(batch_size=4), steps=1, seed=0)
    assert all(active)
    active.clear()
    fine_tune(bert, rows_for(bert), TrainingOptions(batch_size=4, dropout=False), steps=1, seed=0)
    assert active
    assert not any(active)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_half_precision_the_weights_stay_float32_and_near(
    bert: TaskModel, model_directory: ModelDirectory, precision: Any
) -> None:
    rows, twin = rows_for(bert), load(model_directory("bert"), "linear")
    plain: dict[str, Any] = {"learning_rate": 0.05, "batch_size": 8, "dropout": False}
    fine_tune(bert, rows, TrainingOptions(**plain), steps=3, seed=0)
    fine_tune(twin, rows, TrainingOptions(**plain, precision=precision), steps=3, seed=0)
    for name, tensor in state(bert).items():
        assert twin.state_dict()[name].dtype == torch.float32
        torch.testing.assert_close(twin.state_dict()[name], tensor, rtol=0.05, atol=0.01)


# -- Errors ----------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_training_with_the_remedy(bert: TaskModel) -> None:
    with torch.no_grad():
        bert.readout_module(1).weight[0, 0] = float("nan")
    with pytest.raises(TrainingError, match=r"became nan at step 1\. Lower the learning rate"):
        fine_tune(bert, rows_for(bert), TrainingOptions(batch_size=4), steps=2, seed=0)
    assert all(p.requires_grad for p in bert.parameters())


# -- Predictions -----------------------------------------------------------------------------------------


@pytest.mark.sampled("gpt2")
def test_predictions_come_in_the_rows_order_whatever_the_batch_size(model: TaskModel) -> None:
    """Single rows without padding give the same predictions, up to rounding: padding is masked."""
    rows = rows_for(model)
    model.eval()
    with torch.no_grad():
        alone = torch.cat([model(rows.batch([i])[0], 1) for i in range(len(rows))]).float()
    for batch_size in (1, 3, 8, 100):
        torch.testing.assert_close(predict(model, rows, batch_size=batch_size), alone, rtol=1e-4, atol=1e-5)
    assert float((alone - alone[0]).abs().max()) > 1e-2  # the rows' predictions differ


def test_predicting_turns_dropout_off_and_restores_the_mode(bert: TaskModel) -> None:
    rows = rows_for(bert)
    bert.train()
    assert torch.equal(predict(bert, rows), predict(bert, rows))
    assert bert.training
    bert.eval()
    predict(bert, rows)
    assert not bert.training


def test_attention_in_training_is_the_plain_formula_where_that_is_faster() -> None:
    """This is for short rows under autocast on a CPU, with gradients, and nowhere else."""

    def flash(length: int, precision: str) -> bool:
        ids = torch.zeros(2, length, dtype=torch.long)
        with autocast(precision, "cpu"), attention_for_training(ids):
            return torch.backends.cuda.flash_sdp_enabled()

    assert [flash(16, "bf16"), flash(16, "fp32"), flash(1024, "bf16")] == [False, True, True]
    with torch.no_grad():
        assert flash(16, "bf16")
    assert flash(16, "fp32")


# -- On a GPU ----------------------------------------------------------------------------------------------


def test_deterministic_training_asks_for_algorithms_that_repeat_while_it_trains(
    bert: TaskModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option sets a variable that CUDA reads when it starts; it is refused if CUDA has started without it."""
    monkeypatch.delenv(WORKSPACE, raising=False)
    options = TrainingOptions(batch_size=4, deterministic_training=True)
    assert os.environ[WORKSPACE] == ":4096:8"
    inside = list[bool]()
    note = lambda step, loss: inside.append(torch.are_deterministic_algorithms_enabled())  # noqa: E731
    fine_tune(bert, rows_for(bert), options, steps=1, seed=0, on_step=note)
    assert inside == [True] and not torch.are_deterministic_algorithms_enabled()
    monkeypatch.delenv(WORKSPACE)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    options = TrainingOptions(batch_size=4, deterministic_training=True)
    with pytest.raises(OptionError, match=r"before CUDA is initialised.*Set CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        fine_tune(bert, rows_for(bert), options, steps=1, seed=0)


def test_losses_on_a_gpu_are_told_an_update_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are reported in order, with their rates; a non-finite loss stops training at the next update, or at the end."""

    class Later(Reading):
        def __init__(self, value: Tensor) -> None:
            super().__init__(value)
            self.is_there = False

    monkeypatch.setattr("forgetfree.training.step.Reading", Later)
    parameter, told = nn.Parameter(torch.zeros(1)), list[tuple[int, float, float]]()
    step = step_of(parameter, TrainingOptions(learning_rate=0.4), 4)
    step.on_step = lambda number, loss: told.append((number, loss, step.rate))
    for value in (1.0, 2.0):
        for share in (0.25, 0.75):
            step.backward(parameter.sum() + value, share)
        with torch.no_grad():
            parameter.zero_()
        step.update()
        with torch.no_grad():
            parameter.zero_()
    assert told == [(1, 1.0, pytest.approx(0.4))]
    step.finish()
    assert told[1:] == [(2, 2.0, pytest.approx(0.3))]
    step.backward(parameter.sum() * math.nan)
    step.update()
    with pytest.raises(TrainingError, match="became nan at step 3"):
        step.finish()
