"""A step of the mask search (eqs. 3 and 4), compared with a plain forward and backward pass and the inner loops of peers.

python -m benchmarks.speed mask_step
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.speed.measurement import Figure, alternate, ratio
from forgetfree.continual.stream import Stream, load_stream
from forgetfree.core.mask import MaskOptions, MaskSearch
from forgetfree.core.readout_model import ReadoutModel
from forgetfree.core.selection import most_moved
from forgetfree.core.trained import Batch, CrossEntropy, trainable
from forgetfree.data.rows import micro_batches


def gradients(model: ReadoutModel, batch: list[Batch]) -> None:
    """Add up the gradients of the mean loss over a batch."""
    rows = sum(len(y) for _, y, _ in batch)
    for x, y, t in batch:
        loss = F.cross_entropy(model(x, t), y, reduction="sum") / rows
        loss.backward()  # type: ignore[no-untyped-call]


def plain(model: ReadoutModel, batch: list[Batch]) -> None:
    """Compute gradients alone."""
    gradients(model, batch)
    model.zero_grad()


class LocalizeAndStitch:
    """The inner loop of Localize-and-Stitch (He et al., 2024, arXiv:2408.13656), over whole tensors.

    S is learned by SGD on the loss of θ_pre + σ(S) ⊙ τ plus an ℓ1 penalty on σ(S).
    """

    def __init__(self, parameters: list[Any], pre: list[Tensor], moves: list[Tensor]) -> None:
        self.tensors = [(*each, torch.full_like(each[1], -3.0)) for each in zip(parameters, pre, moves, strict=True)]

    def step(self, model: ReadoutModel, batch: list[Batch]) -> None:
        """Put the masked task vector into the model, and descend."""
        with torch.no_grad():
            for parameter, pre, move, scores in self.tensors:
                parameter.copy_(pre + torch.sigmoid(scores) * move)
        gradients(model, batch)
        with torch.no_grad():
            for parameter, _, move, scores in self.tensors:
                if parameter.grad is not None:
                    sigma = torch.sigmoid(scores)
                    scores -= (parameter.grad * move + 1e-6) * sigma * (1 - sigma)
                    parameter.grad = None


class ComposableSFT:
    """The inner loop of composable-sft (Ansell et al., 2022, arXiv:2110.07560): AdamW under a mask of the most moved."""

    def __init__(self, parameters: list[Any], masks: list[Tensor]) -> None:
        self.tensors = list(zip(parameters, masks, strict=True))
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-6)

    def step(self, model: ReadoutModel, batch: list[Batch]) -> None:
        """Train the entries of the mask."""
        gradients(model, batch)
        for parameter, mask in self.tensors:
            if parameter.grad is not None:
                parameter.grad *= mask
        self.optimizer.step()
        self.optimizer.zero_grad()


def lines(stream: Stream, size: int, at_most: float, turns: int, peers: bool) -> list[Figure]:
    """Return the figures for a number of rows, in micro-batches as in a search."""
    model: Any = stream.model
    rows: Any = stream.tasks[0].train
    space = model.space()
    parameters = space.parameters(model.backbone)
    pre = space.flatten(model.backbone)
    ft = pre + 1e-3 * torch.randn(len(space), generator=torch.Generator().manual_seed(0))
    base = most_moved(pre, ft, len(space) // 10_000)
    mask = most_moved(pre, ft, len(space) // 100).mask(len(space)).float()
    batch = [rows.batch(piece) for piece in micro_batches(range(size), rows.lengths, 64, tokens=240)]
    search = MaskSearch(
        model.backbone, space, pre, ft, base, MaskOptions(), CrossEntropy(model, torch.device("cpu"), "fp32")
    )

    def ours() -> None:
        search.in_model = True  # the other contenders' values there do not change the cost
        search.step_(batch, 1)

    contenders: dict[str, Callable[[], object]] = {"ours": ours, "forward and backward": lambda: plain(model, batch)}
    if peers:
        localize = LocalizeAndStitch(parameters, space.views(pre), space.views(ft - pre))
        sft = ComposableSFT(parameters, space.views(mask))
        contenders["Localize-and-Stitch"] = lambda: localize.step(model, batch)
        contenders["composable-sft"] = lambda: sft.step(model, batch)
    with trainable(model, parameters):
        model.eval()
        seconds = alternate(contenders, turns=turns)
    space.load_(model.backbone, pre)
    return [
        ratio(
            f"mask step / plain forward and backward, {size} short rows, fp32",
            seconds,
            "ours",
            "forward and backward",
            at_most=at_most,
            limit=1.0,
        ),
        *(
            ratio(f"mask step / {peer}, {size} short rows, fp32", seconds, "ours", peer)
            for peer in list(contenders)[2:]
        ),
    ]


def figures(turns: int = 9) -> list[Figure]:
    """Measure on short rows of the demo task SST-2 with minilm, in fp32."""
    stream = load_stream("sst2", data="demo", model="minilm", readout="linear")
    return [
        *lines(stream, 32, 1.2, turns, peers=True),
        *lines(stream, 256, 1.03, max(2, turns // 4), peers=False),
    ]
