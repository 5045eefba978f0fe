"""O-LoRA: each task's adapters on top of all earlier ones, in a subspace orthogonal to theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from forgetfree.continual.strategy import Training
from forgetfree.continual.stream import EncodedTask
from forgetfree.models.lora_adapters import overlap
from forgetfree.options import option
from forgetfree.strategies.lora.task_adapters import AdapterOptions, AdapterStrategy, TaskAdapters
from forgetfree.training.training_options import TrainingOptions


@dataclass(frozen=True, kw_only=True)
class OLoRAOptions(AdapterOptions):
    """Adapters, and how far they must keep apart."""

    orthogonality: float = option(0.5, "λ₁: strength of the penalty; the paper's is 0.5 for most tasks", at_least=0)


class OLoRA(AdapterStrategy):
    """Orthogonal low-rank adaptation: loss + λ₁ Σ_{i<t} L_orth(A_i, A_t) (Wang et al., 2023, arXiv:2310.14152, eqs. 6 to 8).

    L_orth is the sum of the squared entries of A_iᵀ·A_t, layer by layer (eq. 8; the authors' code takes their absolute
    values, and adds an ℓ2 norm of the new adapters that the paper does not mention: weight_decay has its place here).
    Earlier adapters are frozen and act together with the new ones; all tasks are answered by W_pre + (α/r) Σ_i B_i·A_i with
    all adapters so far (eq. 9, without merging them into W_pre). Later adapters do reach earlier tasks, so it forgets
    little, not nothing. The readouts belong to their tasks; the paper generates label words instead.

    The penalty's curvature is 2·λ₁·σ², with σ the largest singular value of the earlier A_i of a layer, stacked: SGD follows it
    only while the adapters' rate · λ₁ · σ² is below 1 (docs/baselines.md).
    """

    Options: ClassVar[type[TrainingOptions]] = OLoRAOptions

    def setup(self) -> None:
        """Make adapters that act together, none so far."""
        self.adapters = TaskAdapters(self, joint=True)

    def begin(self, task: EncodedTask) -> Training:
        """Train new adapters on top of the earlier ones, and keep out of their subspaces."""
        return self.adapters.training(task, self._penalized())

    def _penalized(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Return cross-entropy with the penalty; ``None`` where there is none."""
        frozen: dict[str, list[Tensor]] = {}
        adapters, strength = self.adapters, self.options.orthogonality
        for earlier in adapters.earlier:
            for layer, projection in adapters.adapters.projections(earlier).items():
                frozen.setdefault(layer, []).append(projection.detach())
        subspaces = {layer: torch.cat(projections) for layer, projections in frozen.items()}

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            newest = adapters.adapters.projections(adapters.newest)
            penalty: Tensor = strength * overlap(subspaces, newest)
            return cross_entropy(logits, labels) + penalty

        return loss if subspaces and strength else None
