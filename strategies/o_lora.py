"""O-LoRA: each task's adapters on top of all earlier ones, in a subspace orthogonal to theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from forgetfree.continual.lora_strategy import AdapterOptions, LoraStrategy
from forgetfree.continual.streams import EncodedTask
from forgetfree.learning.training import TrainingOptions
from forgetfree.models.lora import overlap
from forgetfree.options import option


@dataclass(frozen=True, kw_only=True)
class OLoRAOptions(AdapterOptions):
    """Adapters, and how far they must keep apart."""

    orthogonality: float = option(0.5, "λ₁: strength of the penalty; the paper's is 0.5 for most tasks", at_least=0)


class OLoRA(LoraStrategy):
    """Orthogonal low-rank adaptation: loss + λ₁ Σ_{i<t} L_orth(A_i, A_t) (Wang et al., 2023, arXiv:2310.14152, eqs. 6 to 8).

    L_orth is the sum of the squared entries of A_iᵀ·A_t, layer by layer (eq. 8; the authors' code takes their absolute
    values, and adds an ℓ2 norm of the new adapters that the paper does not mention: weight_decay has its place here).
    Earlier adapters are frozen and act together with the new ones; all tasks are answered by W_pre + (α/r) Σ_i B_i·A_i with
    all adapters so far (eq. 9, without merging them into W_pre). Later adapters do reach earlier tasks, so it forgets
    little, not nothing. The readouts belong to their tasks; the paper generates label words instead.
    """

    Options: ClassVar[type[TrainingOptions]] = OLoRAOptions

    def prepare(self, task: EncodedTask) -> None:
        """New adapters, and the subspaces to keep out of."""
        super().prepare(task)
        frozen: dict[str, list[Tensor]] = {}
        for earlier in self.earlier:
            for layer, projection in self.adapters.projections(earlier).items():
                frozen.setdefault(layer, []).append(projection.detach())
        self._frozen = {layer: torch.cat(projections) for layer, projections in frozen.items()}

    def criterion(self) -> Any:
        """In training, with the penalty."""
        loss = super().criterion()
        if not (self.is_training and self._frozen and self.options.orthogonality):
            return loss
        return loss + self.options.orthogonality * overlap(self._frozen, self.adapters.projections(self.newest))
