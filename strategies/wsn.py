"""WSN: a mask per task, learned together with the weights that it selects (Kang et al., 2022)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from forgetfree.continual.region_strategy import LedgerOptions, RegionStrategy
from forgetfree.continual.strategy_parts import TaskRegion, Training
from forgetfree.continual.stream import Stream
from forgetfree.core.parameters import ParameterSpace, at_least_float32, weight_matrices
from forgetfree.core.regions import Region
from forgetfree.core.selection import floor_share
from forgetfree.ledger.graft import Graft
from forgetfree.options import option
from forgetfree.seeds import derive_seed
from forgetfree.training.encoded_task import EncodedTask


class WSNOptions(LedgerOptions):
    """Options of training weights and masks together."""

    capacity: float = option(
        0.1,
        "c: share of each weight matrix that a task uses at inference, its own and reused entries together",
        above=0,
        at_most=1,
    )
    mask_every: int = option(
        10,
        "number of updates between two choices of the mask; on a CPU, a choice costs about as much as an update",
        at_least=1,
    )


class WSN(RegionStrategy):
    """Winning sub-networks: learn θ and the scores s behind a mask together (Kang et al., 2022, PMLR 162, §3, eqs. 1 to 5).

    - m_t, the mask of task t, is the top-c share of each weight matrix by score. It may contain entries of earlier tasks, with
      their values.
    - The forward pass uses θ(m_t). θ is trained only where no earlier task owns it (eq. 4), s by the straight-through estimator
      (eq. 5): ∂L/∂s = ∂L/∂θ(m) ⊙ (θ − θ_pre).
    - Then M = M ∪ m_t. A task is inferred with m_t alone: its own entries, and those in m_t that earlier tasks own.

    Differences to the paper:
    - Entries outside of m_t are θ_pre and not 0: θ(m) = θ_pre + m ⊙ (θ − θ_pre). Every task's free weights start from θ_pre.
    - θ, too, gets its gradient straight through the mask, ∂L/∂θ = ∂L/∂θ(m), outside of m as inside; in the paper it is
      ∂L/∂θ(m) ⊙ m. The paper's weights are random at first, so weights outside of m contribute to the gradient of s. Here
      θ − θ_pre is 0 at first and would stay 0 outside of m, and the gradient of s with it: no entry outside of the first,
      random mask could gain a score.
    - s starts close to 0, at random only to break ties: there is no random network to select from. The authors' code draws s
      like weights and ranks by |s|; this ranks by s, as the paper says.
    - The mask is chosen again every `mask_every` updates. m_t leaves out entries that did not move and that no task owns.
    """

    Options = WSNOptions
    resumable = True

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Refuse a model without a weight matrix."""
        weight_matrices(stream.model.space())

    def setup(self) -> None:
        """Open a ledger in which a task is inferred with its mask alone, which may hold entries of earlier tasks."""
        self.open_ledger("selection")

    def begin(self, task: EncodedTask) -> Training:
        """Train θ and s, from θ_pre with the entries of earlier tasks; m_t is known only afterwards, then M = M ∪ m_t."""
        subnetwork = partial(self._subnetwork, task)
        training = self.region_training(task, Region.empty(), sparsity=self.options.capacity, trained=subnetwork)
        winning, own = cast(WinningSubnetwork, training.trained), cast(TaskRegion, training.region)
        return replace(training, finish=lambda: replace(training, region=replace(own, region=winning.region())))

    def _subnetwork(self, task: EncodedTask) -> WinningSubnetwork:
        records = self.ledger.records
        indices = torch.cat(
            [torch.empty(0, dtype=torch.int64, device="cpu"), *(r.owned.region.indices for r in records)]
        )
        values = torch.cat([self.pre_trained.theta[:0], *(r.owned.values for r in records)])
        order = indices.argsort()
        return WinningSubnetwork(
            self.model.backbone,
            self.space,
            Graft(Region(indices[order]), values[order]),
            capacity=self.options.capacity,
            mask_every=self.options.mask_every,
            seed=derive_seed(self.phase_seed("train", task), "scores"),
        )


class WinningSubnetwork:
    """θ and s of one task, in training: the model holds θ(m).

    Args:
        model: the model, which holds θ_pre.
        space: its parameter space of N entries.
        owned: the entries and values of earlier tasks.
        capacity: c.
        mask_every: number of updates between choices of the mask.
        seed: the seed of the first mask.

    Attributes:
        parameters: θ and s of each weight matrix in turn.
        touched: the weight matrices themselves.
    """

    def __init__(
        self, model: nn.Module, space: ParameterSpace, owned: Graft, *, capacity: float, mask_every: int, seed: int
    ) -> None:
        tensors = space.parameters(model)
        self._every, self._updates = mask_every, 0
        self._pre = space.flatten(model).to(at_least_float32(space.dtype))
        device = self._pre.device
        self._owned = owned.region.indices.to(device)
        self._values = owned.values.to(self._pre)
        self._theta = self._pre.clone()
        self._theta[self._owned] = self._values
        # So small that the first gradient outweighs it.
        ties = torch.rand(len(space), generator=torch.Generator().manual_seed(seed), device="cpu")
        self._scores = ties.to(self._pre) * 1e-20
        self._mask = torch.zeros(len(space), dtype=torch.bool, device=device)
        flat = (self._pre, self._theta, self._scores, self._mask)
        views = list(zip(*(space.views(vector) for vector in flat), strict=True))
        matrices = weight_matrices(space)
        self.touched = [tensors[i] for i in matrices]
        # Tensor by tensor, because an optimiser update then costs half as much as for one long vector: they fit the cache.
        self._pieces = [
            (tensors[i], pre, nn.Parameter(theta), nn.Parameter(scores), mask)
            for i, (pre, theta, scores, mask) in ((i, views[i]) for i in matrices)
        ]
        self.parameters = [parameter for piece in self._pieces for parameter in piece[2:4]]
        of_owned = {i: local for i, local, _ in space.split(self._owned)}
        self._owned_in = [of_owned.get(i) for i in matrices]
        self._counts = [max(1, floor_share(capacity, tensor.numel())) for tensor in self.touched]
        self._choose()
        self._show()

    @torch.no_grad()
    def collect(self) -> None:
        """Compute ∂L/∂θ and ∂L/∂s from the tensors' gradients ∂L/∂θ(m), and free these."""
        for (tensor, pre, theta, scores, _), owned in zip(self._pieces, self._owned_in, strict=True):
            gradient = torch.zeros_like(pre) if tensor.grad is None else tensor.grad.to(pre.dtype).contiguous()
            scores.grad = (theta - pre).mul_(gradient)
            if owned is not None:
                gradient.view(-1)[owned] = 0
            theta.grad, tensor.grad = gradient, None

    @torch.no_grad()
    def write(self) -> None:
        """Put θ(m) into the tensors."""
        self._theta[self._owned] = self._values  # momentum and decay move these values without a gradient
        self._updates += 1
        if self._updates % self._every == 0:
            self._choose()
        self._show()

    def region(self) -> Region:
        """Return the region of m, without the entries that did not move and that no task owns."""
        moved = self._theta != self._pre
        moved[self._owned] = True
        return Region.from_mask(self._mask & moved)

    @torch.no_grad()
    def _choose(self) -> None:
        """Choose the top-c share of each tensor by score: fewer entries where scores tie, never more."""
        for (_, _, _, scores, mask), count in zip(self._pieces, self._counts, strict=True):
            if count == scores.numel():
                mask.fill_(True)
            else:  # only entries above the best of the others
                torch.gt(scores, scores.view(-1).topk(count + 1, sorted=False).values.min(), out=mask)

    @torch.no_grad()
    def _show(self) -> None:
        for tensor, pre, theta, _, mask in self._pieces:
            tensor.detach().copy_(torch.where(mask, theta, pre))
