"""Grafts: a model that takes other values in a region, θ(γ) = γ ⊙ θ_ft + (1 − γ) ⊙ θ_pre (paper, §2, eq. 1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region


@contextmanager
def grafted(model: nn.Module, space: ParameterSpace, region: Region, values: Tensor) -> Iterator[None]:
    """Let the model take ``values`` ``(s,)`` in a region inside the block, and restore it exactly afterwards."""
    before = space.gather(model, region.indices)
    space.scatter_(model, region.indices, values)
    try:
        yield
    finally:
        space.scatter_(model, region.indices, before)


# -- θ by a formula: flat vectors (N,) -------------------------------------------------------------------


def graft_theta(theta_pre: Tensor, theta_ft: Tensor, region: Region) -> Tensor:
    """Return θ(γ) of eq. 1: γ ⊙ θ_ft + (1 − γ) ⊙ θ_pre."""
    theta = theta_pre.clone()
    theta[region.indices] = theta_ft[region.indices]
    return theta


def pruned_theta(theta_ft: Tensor, region: Region) -> Tensor:
    """Return a lottery ticket: γ ⊙ θ_ft, with all other entries 0 (paper, fig. 4)."""
    return graft_theta(torch.zeros_like(theta_ft), theta_ft, region)


def interpolate(theta_pre: Tensor, theta: Tensor, alpha: float) -> Tensor:
    """Return (1 − α) θ_pre + α θ (WiSE-FT; Wortsman et al., 2022): exactly θ_pre at α = 0 and θ at α = 1."""
    return torch.lerp(theta_pre, theta, alpha)
