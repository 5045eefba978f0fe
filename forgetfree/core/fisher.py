"""The diagonal of the empirical Fisher information, by which FISH masks choose entries (Sung et al., 2021).

Sung et al., *Training Neural Networks with Fixed Sparse Masks*, NeurIPS 2021, arXiv:2111.09839, eq. 4.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from forgetfree.core.examples import Examples
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.readout_model import ReadoutModel
from forgetfree.core.steps import OnStep, check_loss, trainable


def diagonal_fisher(
    model: ReadoutModel, space: ParameterSpace, rows: Examples, on_step: OnStep | None = None
) -> Tensor:
    """Return for every graftable entry the mean over rows of (∂ log p(y|x) / ∂θ)², where y is the row's own label, or labels.

    Each gradient is of one row, because the square of a mean over rows is another quantity; in float32, without dropout.

    Args:
        model: holds the θ and the readout at which gradients are computed.
        space: its parameter space of N entries.
        rows: of one task.
        on_step: called after every row.

    Returns:
        ``(N,)`` on the model's device.
    """
    parameters = space.parameters(model.backbone)
    device = parameters[0].device
    total = torch.zeros(len(space), device=device)
    views = space.views(total)
    precision, model.precision = model.precision, "fp32"  # small squares would not survive half precision
    try:
        with trainable(model, parameters):
            model.eval()
            for row in range(len(rows)):
                x, y, t = (tensor.to(device) for tensor in rows.batch([row]))
                loss = F.cross_entropy(model(x, t).float(), y, reduction="sum")
                loss.backward()  # type: ignore[no-untyped-call]
                for parameter, view in zip(parameters, views, strict=True):
                    if parameter.grad is not None:
                        view.add_(parameter.grad.float().square())
                        parameter.grad = None
                value = check_loss(loss, row + 1)
                if on_step:
                    on_step(row + 1, value)
    finally:
        model.precision = precision
    return total / len(rows)
