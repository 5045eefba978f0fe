"""A training step of a region of minilm, beside a step of the whole model, and LoRA's and SHiRA's in PEFT.

python -m forgetfree.benchmarks.speed region_step
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, ShiraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F

from forgetfree.benchmarks.speed.measurement import Figure, alternate, ratio
from forgetfree.continual.streams import load_stream
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.readout_model import autocast
from forgetfree.core.regions import Region
from forgetfree.core.steps import trainable
from forgetfree.core.trained import RegionParameters, in_training
from forgetfree.learning.training import TrainingOptions, Update, plan, training_mode

SPARSITY = 1e-3
STEPS = 4
#: The matrices that PEFT adapts: all of a layer's.
MATRICES = r".*layer\.\d+\..*(query|key|value|dense)"


def found_region(space: ParameterSpace) -> Region:
    """Return a region such as localizing finds: in 16 % of the rows and 4 % of the columns of each tensor."""
    generator = torch.Generator().manual_seed(0)
    eligible = torch.zeros(len(space))
    for block in space.views(eligible):
        lines = [
            torch.rand(size, generator=generator) < part for size, part in zip(block.shape, (0.16, 0.04), strict=False)
        ]
        block.copy_(torch.outer(*(line.float() for line in lines)) if len(lines) == 2 else lines[0])
    return Region.of(torch.multinomial(eligible, int(SPARSITY * len(space)), generator=generator))


def losses(model: Any, batches: list[tuple[Tensor, Tensor, Tensor]], precision: str) -> Any:
    """Yield the loss of every batch."""
    for x, y, t in batches:
        with autocast(precision, "cpu"):
            logits = model(x, t)
        yield F.cross_entropy(logits.float(), y)


def region_steps(model: Any, region: Region, options: TrainingOptions, batches: Any) -> None:
    """Train a region as the loops of this library do."""
    readout = list(model.readout_module(0).parameters())
    trained = RegionParameters(model.backbone, model.space(), region)
    with in_training(model, trained, readout):
        update = Update(trained.parameters, readout, options, STEPS)
        for loss in losses(model, batches, options.precision):
            update.optimizer.zero_grad()
            update.backward(loss)
            trained.collect()
            update.before_step()
            update.step()
            trained.write()


def plain_steps(model: Any, parameters: list[nn.Parameter], batches: Any, precision: str = "fp32") -> None:
    """Train parameters by PyTorch's SGD."""
    with trainable(model, parameters):
        optimizer = torch.optim.SGD(parameters, lr=1e-3, weight_decay=1e-4)
        for loss in losses(model, batches, precision):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def input_gradients(model: Any, batches: Any) -> None:
    """Compute forward passes, and gradients of all layers' inputs alone."""
    hook = model.backbone.embeddings.register_forward_hook(lambda module, args, output: output.requires_grad_())
    with trainable(model, []):
        for loss in losses(model, batches, "fp32"):
            loss.backward()
    hook.remove()


def figures(turns: int = 9) -> list[Figure]:
    """Measure on the demo task QNLI, 8 rows a step, without dropout."""
    stream = load_stream("qnli,ag_news", data="demo", model="minilm", readout="linear")
    model: Any = stream.model
    rows: Any = stream.tasks[0].train
    batches = [rows.batch(batch) for batch in plan(rows.lengths, TrainingOptions(), STEPS, 0)]
    space = model.space()
    found, anywhere = found_region(space), Region.of(torch.randperm(len(space))[: int(SPARSITY * len(space))])
    training_mode(model, dropout=False)

    contenders: dict[str, Callable[[], None]] = {}
    for precision in ("fp32", "bf16"):
        options = TrainingOptions(learning_rate=1e-3, precision=precision)  # type: ignore[arg-type]
        contenders[precision] = partial(region_steps, model, found, options, batches)
        contenders[f"anywhere {precision}"] = partial(region_steps, model, anywhere, options, batches)
    whole = [*space.parameters(model.backbone), *model.readout_module(0).parameters()]
    contenders["dense fp32"] = partial(plain_steps, model, whole, batches)
    contenders["limit"] = partial(input_gradients, model, batches)
    peers = {"LoRA": LoraConfig(r=8, target_modules=MATRICES), "SHiRA": ShiraConfig(r=1, target_modules=MATRICES)}
    for name, config in peers.items():
        adapted: Any = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted.backbone = get_peft_model(adapted.backbone, config)  # type: ignore[arg-type]
        training_mode(adapted, dropout=False)
        trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        contenders[name] = partial(plain_steps, adapted, trained, batches)
    seconds = alternate(contenders, turns=turns)

    limit = float(ratio("", seconds, "limit", "dense fp32").value)
    what = f"step of a region, s = {SPARSITY:g}, {{}} / of the whole model, fp32"
    return [
        ratio(what.format("fp32"), seconds, "fp32", "dense fp32", at_most=0.66, limit=limit),
        ratio(what.format("bf16"), seconds, "bf16", "dense fp32", at_most=0.45),
        ratio(what.format("fp32, entries anywhere"), seconds, "anywhere fp32", "dense fp32", limit=limit),
        ratio(what.format("bf16, entries anywhere"), seconds, "anywhere bf16", "dense fp32"),
        ratio("step of a region, fp32 / of LoRA (PEFT), rank 8", seconds, "fp32", "LoRA"),
        ratio("step of a region, fp32 / of SHiRA (PEFT), rank 1", seconds, "fp32", "SHiRA"),
    ]
