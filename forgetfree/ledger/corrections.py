"""Sparse corrections: every row of a batch gets the entries of its own task, while the model holds one θ for all of them.

A linear layer answers y = x Wᵀ + b. Where a task moves W by δ at (r, c), its rows need y_r += δ x_c; where it moves b by δ
at r, they need y_r += δ; and a LayerNorm's weight moved by δ at r needs y_r += δ x̂_r. So the rows of many tasks share one
pass over the weights, and each costs a few entries more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forgetfree.core.parameters import ParameterSpace
from forgetfree.ledger.graft import Graft


class NotCorrected(Exception):
    """A module computes in a way that corrections do not follow."""


@dataclass(frozen=True)
class Change:
    """What a graft adds to θ_pre, entry by entry and tensor after tensor.

    Attributes:
        indices: the graft's, which are not copied: ``(s,)``.
        delta: the graft's values minus θ_pre's: ``(s,)``.
        cuts: where the entries of each tensor begin, and the end: int32 ``(P + 1,)``.
    """

    indices: Tensor
    delta: Tensor
    cuts: Tensor


@dataclass(frozen=True)
class Entries:
    """The entries that one tensor needs for each row of a batch, filled up with zeros to n: ``(B, 1, n)`` each.

    Attributes:
        output: which output of its module an entry adds to.
        input: which input of a linear layer it multiplies.
        delta: by what.
    """

    output: Tensor
    input: Tensor
    delta: Tensor


@dataclass
class _Site:
    """A module that computes with graftable tensors, and their numbers in the space."""

    module: nn.Module
    numbers: dict[str, int] = field(default_factory=dict)


class Corrections:
    """Finds what can be corrected in a model, and corrects it.

    That is each weight and bias of a linear layer (GPT-2's ``Conv1D``, too) or a LayerNorm, in single or double precision.

    Args:
        space: the parameter space of ``backbone``.
        backbone: the model.
    """

    def __init__(self, space: ParameterSpace, backbone: nn.Module) -> None:
        self._space, self._backbone = space, backbone
        parameters = space.parameters(backbone)
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._sites: list[_Site] = []
        for module in backbone.modules():
            own = {name: numbers[id(p)] for name, p in module.named_parameters(recurse=False) if id(p) in numbers}
            normalizes = isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1
            if own and (normalizes or isinstance(module, nn.Linear) or _is_conv1d(module)):
                self._sites.append(_Site(module, own))
        reached = {number for site in self._sites for number in site.numbers.values()}
        exact = (torch.float32, torch.float64)
        self._reached = torch.tensor([i in reached and p.dtype in exact for i, p in enumerate(parameters)])
        turned = {site.numbers.get("weight") for site in self._sites if _is_conv1d(site.module)}
        self._turned = torch.tensor([number in turned for number in range(len(parameters))])
        self._columns = torch.tensor([spec.shape[-1] if len(spec.shape) > 1 else 1 for spec in space.tensors])

    @torch.no_grad()
    def change(self, graft: Graft) -> Change | None:
        """Return what ``graft`` adds to the model, which must hold θ_pre; ``None`` if not all of it can be corrected."""
        indices = graft.region.indices
        cuts = torch.searchsorted(indices, self._space.boundaries)
        if bool((cuts.diff()[~self._reached] > 0).any()):
            return None
        pre = self._space.gather(self._backbone, indices)
        return Change(indices, graft.values.to(pre) - pre, cuts.int())

    def entries(self, runs: Sequence[tuple[int, Change, int]], rows: int) -> dict[int, Entries]:
        """Return the entries by tensor.

        Args:
            runs: the row that a change is for, the change, and +1 to add or −1 to take it back; in the order of the rows.
            rows: the number of rows B.
        """
        if not runs:
            return {}
        changes = [change for _, change, _ in runs]
        row = torch.tensor([row for row, _, _ in runs])
        cuts = torch.stack([change.cuts for change in changes]).long()
        counts = cuts.diff(dim=1)  # (runs, P)
        totals = counts.new_zeros(rows, counts.shape[1]).index_add_(0, row, counts)
        width = totals.amax(0)
        # Every entry goes to: its tensor's block, its row there, the runs before it in the row, its place in the run.
        before = counts.cumsum(0) - counts
        before = before - before[torch.searchsorted(row, row)]
        block = rows * (width.cumsum(0) - width)
        begin = cuts[:, -1:].cumsum(0) - cuts[:, -1:]
        shift = block + row[:, None] * width + before - begin - cuts[:, :-1]
        counts = counts.flatten()
        place = torch.repeat_interleave(shift.flatten(), counts).add_(torch.arange(int(counts.sum())))
        tensor = torch.repeat_interleave(torch.arange(len(width)).repeat(len(runs)), counts)
        local = torch.cat([change.indices for change in changes]) - self._space.boundaries[tensor]
        columns, turned = self._columns[tensor], self._turned[tensor]
        across, along = local // columns, local % columns
        device = changes[0].delta.device
        output, input = torch.zeros(2, rows * int(width.sum()), dtype=torch.int64)
        output[place], input[place] = across.where(~turned, along), along.where(~turned, across)
        delta = torch.zeros(len(output), dtype=changes[0].delta.dtype, device=device)
        delta[place.to(device)] = torch.cat([change.delta if sign > 0 else -change.delta for _, change, sign in runs])
        sizes = (rows * width).tolist()
        blocks = zip(*(torch.split(each, sizes) for each in (output.to(device), input.to(device), delta)), strict=True)
        return {
            number: Entries(*(each.view(rows, 1, -1) for each in parts))
            for number, parts in enumerate(blocks)
            if sizes[number]
        }

    @contextmanager
    def applied(self, entries: Mapping[int, Entries]) -> Iterator[None]:
        """Correct the model's passes inside the block.

        Raises:
            NotCorrected: a module was not called, or not with one item a row; answers of the block are wrong.
        """
        waiting = set(entries)
        numbers = {
            id(site.module): site.numbers for site in self._sites if not waiting.isdisjoint(site.numbers.values())
        }

        def correct(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            own = numbers[id(module)]
            weight, bias = (entries.get(own.get(name, -1)) for name in ("weight", "bias"))
            rows = len(entries[next(number for number in own.values() if number in entries)].delta)
            if not inputs or inputs[0].dim() not in (2, 3) or len(inputs[0]) != rows or output.dim() != inputs[0].dim():
                raise NotCorrected
            x, y = (tensor if tensor.dim() == 3 else tensor.unsqueeze(1) for tensor in (inputs[0], output))
            span = (-1, x.shape[1], -1)
            if weight is not None and isinstance(module, nn.LayerNorm):
                scale = x.new_zeros(rows, 1, x.shape[-1]).scatter_add_(2, weight.output, weight.delta.to(x))
                y.addcmul_(F.layer_norm(x, module.normalized_shape, eps=module.eps), scale)
            elif weight is not None:
                moved = x.gather(2, weight.input.expand(span)).mul_(weight.delta)
                y.scatter_add_(2, weight.output.expand(span), moved)
            if bias is not None:
                y.scatter_add_(2, bias.output.expand(span), bias.delta.to(x).expand(span))
            waiting.difference_update(own.values())

        handles = [site.module.register_forward_hook(correct) for site in self._sites if id(site.module) in numbers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if waiting:
            raise NotCorrected


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is GPT-2's linear layer, of transformers, which stores its weight as (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")
