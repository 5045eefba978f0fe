"""The number of operations that a step launches on a GPU: training a region, `learning`, full fine-tuning."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import simulated_gpu
import torch
from operations import Operations
from tape import Tape
from torch.utils.checkpoint import checkpoint

import forgetfree.training.step
from benchmarks.gpu import bench as kit
from benchmarks.speed.region_step import found_region, loss_of, whole
from forgetfree.core.mask import MaskOptions, MaskSearch
from forgetfree.core.readout_model import ReadoutModel
from forgetfree.core.selection import most_moved
from forgetfree.core.trained import RegionParameters, TrainedParameters, WholeTensors, in_training, trainable
from forgetfree.data.rows import by_length
from forgetfree.kinds.decoding import write_greedily
from forgetfree.trainers.attachment import AttachedRegion
from forgetfree.training.encoded_task import predict
from forgetfree.training.single_task import SingleTask
from forgetfree.training.step import TrainingStep, fine_tune, layer_checkpoints, training_mode

pytestmark = pytest.mark.slow
Step = Callable[[Operations], None]


@pytest.fixture
def gpu() -> Iterator[None]:
    with simulated_gpu.present():
        yield


class Steps:
    """Training steps of one model on one batch, each on its own copy of the model."""

    def __init__(self, model: ReadoutModel, batch: Any, options: Any, checkpoints: bool = False) -> None:
        self._model, self._batch, self._options, self._checkpoints = model, batch, options, checkpoints
        self._stack = ExitStack()

    def ours(self, trained: Callable[[ReadoutModel], TrainedParameters]) -> Step:
        """Return a step of our own loop."""
        made = copy.deepcopy(self._model)
        training_mode(made, dropout=False)
        what, readout = trained(made), list(made.readout_module(0).parameters())
        self._stack.enter_context(in_training(made, what, readout))
        self._stack.enter_context(layer_checkpoints(made, self._checkpoints))
        step = TrainingStep(made, what, readout, self._options, 1000)

        def take(count: Operations) -> None:
            step.zero_grad()
            with count.during("forward"):
                loss = loss_of(made, self._batch, self._options.precision)
            with count.during("backward"):
                step.backward(loss)
            with count.during("update"):
                step.update()

        return take

    def plain(self, parameters: Callable[[ReadoutModel], list[Any]]) -> Step:
        """Return a step of an ordinary loop with PyTorch's fused AdamW."""
        made = copy.deepcopy(self._model)
        training_mode(made, dropout=False)
        held = parameters(made)
        optimizer = torch.optim.AdamW(held, lr=1e-5, fused=True)
        self._stack.enter_context(trainable(made, held))

        def take(count: Operations) -> None:
            optimizer.zero_grad()
            with count.during("forward"):
                loss = loss_of(made, self._batch, self._options.precision)
            with count.during("backward"):
                loss.backward()
            with count.during("update"):
                optimizer.step()

        return take

    def attached(self, model: ReadoutModel, region: Any) -> list[Any]:
        """Attach a region as `learning` does, and return the parameters for an optimiser."""
        head = list(model.readout_module(0).parameters())
        values = AttachedRegion(model, model.backbone, model.space(), region)
        self._stack.enter_context(values.attached(head))
        return [values.values, *head]

    def counts(self, steps: dict[str, Step]) -> dict[str, Operations]:
        """Count the operations of the third call of each step: the first call compares gradients."""
        counted = {}
        with self._stack:
            for name, step in steps.items():
                step(Operations())
                step(Operations())
                with Operations() as counted[name]:
                    step(counted[name])
        return counted


def bert(bench: kit.Bench, precision: str) -> tuple[Steps, Any, Any]:
    base = SingleTask.of(bench.bert(), bench.rows("alpha", 48), device=bench.device)
    batch = base.model.on_device(base.task.train.batch(range(8)))
    assert batch[0].x.shape == (8, 50)
    return Steps(base.model, batch, bench.options(precision=precision, dropout=False)), base.space, base.model


def test_a_step_of_minilm(gpu: None) -> None:
    """MiniLM's shape, 8 rows of 50 tokens, s = 1e-3: a random region, and one found by fine-tuning."""
    bench = kit.Bench(torch.device("cuda"), False, Path("."))
    steps, space, _ = bert(bench, "fp32")
    random, found = kit.random_region(len(space), 1e-3), found_region(space)
    counted = steps.counts(
        {
            "plain": steps.plain(whole),
            "fine-tune": steps.ours(lambda m: WholeTensors(m.space().parameters(m.backbone))),
            "random": steps.ours(lambda m: RegionParameters(m.backbone, m.space(), random)),
            "found": steps.ours(lambda m: RegionParameters(m.backbone, m.space(), found)),
            "learning": steps.plain(lambda m: steps.attached(m, found)),
        }
    )
    kernels = {name: count.kernels.total() for name, count in counted.items()}
    print(kernels, {name: dict(count.kernels) for name, count in counted.items()})
    assert max(kernels["random"], kernels["found"]) <= 0.82 * kernels["fine-tune"]
    assert kernels["learning"] <= 0.90 * kernels["plain"]
    assert counted["random"].traffic == counted["fine-tune"].traffic == {"out": 1}  # the loss
    assert counted["found"].kernels["update"] <= 12  # one of these operations writes all values


def difference(few: Operations, many: Operations, each: int) -> dict[str, float]:
    """Return the counts of one further step or batch, without those that occur once a call."""
    counts = [{"kernels": of.kernels.total(), **of.traffic} for of in (few, many)]
    return {
        name: (counts[1].get(name, 0) - counts[0].get(name, 0)) / each for name in ("kernels", "in", "out", "waits")
    }


def test_a_step_waits_for_nothing(gpu: None) -> None:
    """A batch is copied to the GPU once, prepared; the loss of the step before is copied back; no value is read at once."""
    bench = kit.Bench(torch.device("cuda"), False, Path("."))
    base = SingleTask.of(bench.bert(), bench.rows("alpha", 48), device=bench.device)
    regions = {"random": kit.random_region(len(base.space), 1e-3), "found": found_region(base.space)}
    found = {}
    for name in ("fine-tune", *regions):
        counted = [Operations(), Operations()]
        for count, steps in zip(counted, (4, 12), strict=True):
            region = regions.get(name)
            trained = region and RegionParameters(base.model.backbone, base.space, region)
            with count:
                fine_tune(
                    base.model, base.task.train, bench.options(dropout=False), steps=steps, seed=0, trained=trained
                )
        found[name] = difference(*counted, each=8)
        assert found[name] | {"kernels": 0} == {"kernels": 0, "in": 1, "out": 1, "waits": 0}
    print(found)
    assert found["fine-tune"]["kernels"] <= 275
    for name in regions:
        assert found[name]["kernels"] <= min(215, 0.80 * found["fine-tune"]["kernels"])


def test_an_evaluation_waits_once_a_split(gpu: None) -> None:
    bench = kit.Bench(torch.device("cuda"), False, Path("."))
    base = SingleTask.of(bench.bert(), bench.rows("alpha", 48), device=bench.device)
    rows, counted = base.task.test, [Operations(), Operations()]
    for count, size in zip(counted, (64, 3), strict=True):
        with count:
            predict(base.model, rows, batch_size=size)
    batches = [len(by_length(rows.lengths, size, by_tokens=True)) for size in (64, 3)]
    assert batches[0] == 1 < batches[1] < len(rows) / 3  # batches are as large in tokens as those of long rows
    batch = difference(*counted, each=batches[1] - 1)
    print(batches, batch)
    assert counted[0].traffic["waits"] == 1
    assert batch["waits"] == batch["out"] == 0 and batch["kernels"] <= 115


def test_a_step_of_llama(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama's 16 layers in bf16 with gradient checkpointing, at a small width."""
    monkeypatch.setitem(kit.SHAPES, "1 billion", (64, 16, 128, 8, 2, 1024))
    # The simulation cannot report the device in a recomputation.
    monkeypatch.setattr(forgetfree.training.step, "checkpointed", partial(checkpoint, determinism_check="none"))
    bench = kit.Bench(torch.device("cuda"), False, Path("."))
    base = SingleTask.of(bench.llama("1 billion", "linear", "bfloat16"), bench.rows("alpha", 4), device=bench.device)
    batch = base.model.on_device(base.task.train.batch(range(2)))
    steps = Steps(base.model, batch, bench.options(precision="fp32", dropout=False), checkpoints=True)
    random = kit.random_region(len(base.space), 1e-2)
    counted = steps.counts(
        {
            "fine-tune": steps.ours(lambda m: WholeTensors(m.space().parameters(m.backbone))),
            "region": steps.ours(lambda m: RegionParameters(m.backbone, m.space(), random)),
        }
    )
    kernels = {name: count.kernels.total() for name, count in counted.items()}
    print(kernels)
    assert kernels["region"] <= 0.87 * kernels["fine-tune"]


def test_texts_take_a_pass_a_token(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights in bfloat16 often give ties between tokens; even so, no token of the 16 texts needs a second pass."""
    monkeypatch.setitem(kit.SHAPES, "135 million", (192, 4, 512, 3, 1, 8192))
    model: Any = kit.Bench(torch.device("cuda"), False, Path(".")).llama("135 million", "generate", "bfloat16").model
    draw, passes = random.Random(0), list[int]()
    prompts = [draw.choices(range(10, 200), k=draw.randint(40, 60)) for _ in range(16)]
    model.backbone.model.register_forward_hook(lambda *_: passes.append(1))
    texts = write_greedily(model, prompts, task=0, most=48, ends=lambda ids: False, end=-1)
    print(len(passes))
    assert len(passes) <= 50 and {len(text) for text in texts} == {48}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_the_mask_search_is_that_of_a_cpu_in_a_few_operations(dtype: torch.dtype) -> None:
    """S, θ(γ) and the region have the same bits, also where tensors cannot be views of one vector."""

    def searching(count: Operations, device: str) -> list[Any]:
        model = kit.Bench(torch.device("cpu"), False, Path(".")).bert().model
        model.backbone.encoder.layer[0].output.dense.weight.data = (  # other strides
            model.backbone.encoder.layer[0].output.dense.weight.data.t().contiguous().t()
        )
        model.backbone.encoder.layer[1].to(dtype)
        space = model.space()
        generator = torch.Generator().manual_seed(1)
        pre = space.flatten(model.backbone)
        ft = pre + 1e-3 * torch.randn(len(space), generator=generator) * (
            torch.rand(len(space), generator=generator) < 0.9
        )
        base = most_moved(pre, ft, 5000)
        model.to(device)
        search = MaskSearch(
            model.backbone,
            space,
            pre.to(device),
            ft.to(device),
            base,
            MaskOptions(steps=3),
            lambda batch: 0.0,  # type: ignore[arg-type]
        )
        for step in range(5):
            for number, tensor in enumerate(search.tensors):
                gradient = 1e-6 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
                if number == 3:  # the model does not read this tensor
                    continue
                if tensor.grad is None:
                    tensor.grad = gradient.to(device)
                else:
                    tensor.grad.copy_(gradient)
            with count if step == 4 else nullcontext():
                search.graft_(1e7 if step else 0.0, step)
        found = [search.shift.cpu(), search.region(4, 10_000).indices, space.flatten(model.backbone, "cpu")]
        search.release()
        assert torch.equal(found[-1], space.flatten(model.backbone, "cpu"))
        assert len({tensor.untyped_storage().data_ptr() for tensor in search.tensors}) == len(search.tensors)
        return found

    count = Operations()
    expected = searching(Operations(), "cpu")
    with simulated_gpu.present():
        got = searching(count, "cuda")
    print(count.kernels, count.traffic)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    assert not count.traffic["waits"]
    assert count.kernels.total() <= (30 if dtype == torch.float32 else 80)


def test_a_tape_refuses_a_step_that_reads_a_value(gpu: None) -> None:
    with pytest.raises(RuntimeError, match="reads a value"), Tape():
        torch.ones(3, device="cuda").sum().item()


@pytest.mark.parametrize("what", ["fine-tune", "region"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_recorded_step_replays_to_the_bits_of_one_that_is_run(
    family: str, what: str, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty other batches of the same shape replay to the same bits: a CUDA graph can capture the step."""
    monkeypatch.setitem(kit.SHAPES, "1 billion", (64, 3, 128, 8, 2, 1024))
    bench = kit.Bench(torch.device("cuda"), False, Path("."))
    loaded = bench.bert() if family == "bert" else bench.llama("1 billion", "linear", "float32")
    base = SingleTask.of(loaded, bench.rows("alpha", 30), device=bench.device)
    rows, draw = base.task.train, random.Random(0)
    longest = max(range(len(rows)), key=rows.lengths.__getitem__)
    shorter = [row for row in range(len(rows)) if rows.lengths[row] < rows.lengths[longest]]

    def batch() -> Any:
        return base.model.on_device(rows.batch([longest, *draw.sample(shorter, 5)]))

    def tensors(of: Any) -> list[torch.Tensor]:
        inputs, y, _ = of
        return [inputs.x, inputs.at, *inputs.named.values(), y]

    region = kit.random_region(len(base.space), 1e-3)
    options = bench.options(precision="fp32", dropout=False)

    def start(stack: ExitStack) -> tuple[TrainingStep, Callable[[Any], torch.Tensor]]:
        model = copy.deepcopy(base.model)
        training_mode(model, dropout=False)
        trained: TrainedParameters = (
            RegionParameters(model.backbone, model.space(), region)
            if what == "region"
            else WholeTensors(model.space().parameters(model.backbone))
        )
        readout = list(model.readout_module(0).parameters())
        stack.enter_context(in_training(model, trained, readout))
        step = TrainingStep(model, trained, readout, options, 1000)

        def take(of: Any) -> torch.Tensor:
            step.zero_grad()
            loss = loss_of(model, (of[0], of[1], 0))
            step.backward(loss)
            step.update()
            return loss.detach()

        for _ in range(2):
            take(first)
        return step, take

    with ExitStack() as stack:
        first = batch()
        (recorded, take), (run, take_twin) = start(stack), start(stack)
        tape = Tape()
        with tape:
            loss = take(first)
        take_twin(first)
        for _ in range(20):
            other = batch()
            for there, values in zip(tensors(first), tensors(other), strict=True):
                there.copy_(values)
            (found,) = tape.replay(loss)
            assert torch.equal(found, take_twin(other).cpu())
            for one, twin in zip(recorded._parameters, run._parameters, strict=True):
                assert torch.equal(one, twin)
