"""Time and memory of a training step of a region of minilm, compared with the whole model, LoRA and SHiRA in PEFT.

python -m benchmarks.speed region_step
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, ShiraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.speed.measurement import Figure, PeakMemory, alternate, ratio
from forgetfree.continual.stream import load_stream
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.readout_model import autocast
from forgetfree.core.regions import Region
from forgetfree.core.trained import RegionParameters, TrainedParameters, in_training, trainable
from forgetfree.training.step import TrainingStep, plan, training_mode
from forgetfree.training.training_options import TrainingOptions

SPARSITY = 1e-3
STEPS = 2
#: The matrices that PEFT adapts: all matrices of a layer.
MATRICES = r".*layer\.\d+\..*(query|key|value|dense)"

Batch = tuple[Tensor, Tensor, Tensor]


def minilm_and_batches() -> tuple[Any, list[Batch]]:
    """Return minilm in training mode without dropout, and the first batches of the demo task QNLI, of 8 rows each."""
    stream = load_stream("qnli,ag_news", data="demo", model="minilm", readout="linear")
    rows: Any = stream.tasks[0].train
    training_mode(stream.model, dropout=False)
    return stream.model, [rows.batch(batch) for batch in plan(rows.lengths, TrainingOptions(), STEPS, 0)]


def found_region(space: ParameterSpace) -> Region:
    """Return a region such as localizing finds: in 16 % of the rows and 4 % of the columns of each tensor."""
    generator = torch.Generator().manual_seed(0)
    eligible = torch.zeros(len(space))
    for block in space.views(eligible):
        lines = [
            torch.rand(size, generator=generator) < part for size, part in zip(block.shape, (0.16, 0.04), strict=False)
        ]
        block.copy_(torch.outer(*(line.float() for line in lines)) if len(lines) == 2 else lines[0])
    entries = eligible.nonzero().squeeze(1)
    return Region.of(entries[torch.randperm(len(entries), generator=generator)[: int(SPARSITY * len(space))]])


def loss_of(model: Any, batch: Batch, precision: str = "fp32") -> Tensor:
    """Return the loss of a batch."""
    x, y, t = batch
    with autocast(precision, x.device.type):
        logits = model(x, t)
    return F.cross_entropy(logits.float(), y)


def our_step(
    stack: ExitStack, model: Any, trained: TrainedParameters, options: TrainingOptions
) -> Callable[[Batch], None]:
    """Return a step as the loops of this library take it."""
    readout = list(model.readout_module(0).parameters())
    stack.enter_context(in_training(model, trained, readout))
    step = TrainingStep(model, trained, readout, options, 1000)

    def take(batch: Batch) -> None:
        step.zero_grad()
        step.backward(loss_of(model, batch, options.precision))
        step.update()

    return take


def region_step(stack: ExitStack, model: Any, region: Region, options: TrainingOptions) -> Callable[[Batch], None]:
    """Return a step of a region."""
    return our_step(stack, model, RegionParameters(model.backbone, model.space(), region), options)


def plain_step(
    stack: ExitStack, model: Any, parameters: list[nn.Parameter], optimizer: str, precision: str = "fp32"
) -> Callable[[Batch], None]:
    """Return a step of PyTorch's own optimizer."""
    stack.enter_context(trainable(model, parameters))
    stepper: Any = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer](parameters, lr=1e-5)

    def step(batch: Batch) -> None:
        stepper.zero_grad()
        loss_of(model, batch, precision).backward()  # type: ignore[no-untyped-call]
        stepper.step()

    return step


def all_of(step: Callable[[Batch], None], batches: list[Batch]) -> None:
    """Take a step on each batch."""
    for batch in batches:
        step(batch)


def whole(model: Any) -> list[nn.Parameter]:
    """Return all parameters that a task may train: graftable tensors and its readout."""
    return [*model.space().parameters(model.backbone), *model.readout_module(0).parameters()]


#: Makes the step of a model; it is valid until the stack is left.
Step = Callable[[ExitStack, Any], Callable[[Batch], None]]


def step_memory(base: Any, batch: Batch, step: Step) -> float:
    """Return the peak bytes of steps besides model and activations, as multiples of all graftable entries' bytes.

    The steps use one row of 4 tokens, with negligible activations.
    """
    model = copy.deepcopy(base)
    entries = len(base.space())
    row: Any = tuple(each[:1, :4] if each.dim() > 1 else each[:1] for each in batch)
    with PeakMemory(*model.parameters()) as peak, ExitStack() as stack:
        all_of(step(stack, model), [row] * STEPS)
    return float(peak.bytes / (4 * entries))


def input_gradients(stack: ExitStack, model: Any) -> Callable[[Batch], None]:
    """Return a forward pass with the gradients of all layers' inputs alone."""
    stack.enter_context(trainable(model, []))
    model.backbone.embeddings.register_forward_hook(lambda module, args, output: output.requires_grad_())
    return lambda batch: loss_of(model, batch).backward()  # type: ignore[no-untyped-call]


def adapted(model: Any, config: Any) -> tuple[Any, list[nn.Parameter]]:
    """Return a copy of the model with PEFT's adapter, and its trained parameters."""
    model = copy.deepcopy(model)
    model.backbone = get_peft_model(model.backbone, config)
    training_mode(model, dropout=False)
    return model, [*(p for p in model.backbone.parameters() if p.requires_grad), *model.readout_module(0).parameters()]


def figures(turns: int = 9) -> list[Figure]:
    """Measure on the demo task QNLI, 8 rows a step, without dropout."""
    base, batches = minilm_and_batches()
    space = base.space()
    generator = torch.Generator().manual_seed(0)
    found = found_region(space)
    anywhere = Region.of(torch.randperm(len(space), generator=generator)[: len(found)])
    with ExitStack() as stack:
        steps: dict[str, Callable[[Batch], None]] = {}
        for name, region, optimizer, precision in (
            ("region", found, "adamw", "fp32"),
            ("region, bf16", found, "adamw", "bf16"),
            ("region by SGD", found, "sgd", "fp32"),
            ("region anywhere", anywhere, "adamw", "fp32"),
        ):
            how: Any = {"optimizer": optimizer, "precision": precision}
            options = TrainingOptions(learning_rate=1e-5, schedule="constant", **how)
            steps[name] = region_step(stack, copy.deepcopy(base), region, options)
        for name, optimizer in (("dense", "adamw"), ("dense by SGD", "sgd")):
            model = copy.deepcopy(base)
            steps[name] = plain_step(stack, model, whole(model), optimizer)
        steps["limit"] = input_gradients(stack, copy.deepcopy(base))
        steps["LoRA"] = plain_step(stack, *adapted(base, LoraConfig(r=8, target_modules=MATRICES)), "adamw")
        steps["SHiRA"] = plain_step(stack, *adapted(base, ShiraConfig(r=1, target_modules=MATRICES)), "adamw")
        seconds = alternate({name: partial(all_of, step, batches) for name, step in steps.items()}, turns=turns)

    what = f"step of a region, s = {SPARSITY:g}, {{}} / of the whole model, fp32"
    adamw = TrainingOptions(optimizer="adamw", learning_rate=1e-5, schedule="constant")
    ours = step_memory(base, batches[0], lambda stack, model: region_step(stack, model, found, adamw))
    dense = step_memory(base, batches[0], lambda stack, model: plain_step(stack, model, whole(model), "adamw"))
    memory = "most memory of an AdamW step beside model and activations:"
    limit, slow = (ratio("", seconds, "limit", name).value for name in ("dense", "dense by SGD"))
    return [
        ratio(what.format("AdamW, fp32"), seconds, "region", "dense", at_most=0.66, limit=limit),
        ratio(what.format("AdamW, bf16"), seconds, "region, bf16", "dense", at_most=0.45),
        ratio(what.format("SGD, fp32"), seconds, "region by SGD", "dense by SGD", limit=slow),
        ratio(what.format("AdamW, fp32, entries anywhere"), seconds, "region anywhere", "dense", limit=limit),
        ratio("step of a region, fp32 / of LoRA (PEFT), rank 8", seconds, "region", "LoRA"),
        ratio("step of a region, fp32 / of SHiRA (PEFT), rank 1", seconds, "region", "SHiRA"),
        Figure(f"{memory} of a region", ours, at_most=0.05, unit="N"),
        Figure(f"{memory} of the whole model", dense, limit=3.0, unit="N"),
    ]
