"""GEM and A-GEM, as Avalanche implements them: updates that do not conflict with gradients on stored examples."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
from avalanche.training import plugins as avalanche
from torch import Tensor, nn

from forgetfree.continual.adapter import PluginStrategy, one_label_a_row
from forgetfree.continual.stream import Stream
from forgetfree.errors import OptionError, UsageError
from forgetfree.options import option


class _ProjectedUpdate:
    """Mixin of GEM's and A-GEM's plugins: they project the update, unless it is the gradient times one rate.

    AdamW's scaling, momentum, decay and a separate rate of the readout change the direction of a projected gradient, so that
    the constrained losses may rise. For the projection the update is scaled to the gradient's length, since GEM's γ is a
    margin relative to it.

    Readouts of earlier tasks have no gradient in a step. Avalanche's plugins leave them out of the projected gradient, but not
    of the constraint. Here they are in both.
    """

    _before: tuple[list[tuple[Any, Tensor]], float] | None = None

    def after_backward(self, strategy: Any, **kwargs: Any) -> None:
        if _descends_plainly(strategy.options):
            for parameter in _trainable(strategy) if strategy.clock.train_exp_counter else []:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            super().after_backward(strategy, **kwargs)  # type: ignore[misc]  # of the plugin mixed into

    def before_update(self, strategy: Any, **kwargs: Any) -> None:
        if strategy.clock.train_exp_counter and not _descends_plainly(strategy.options):
            length = _length(each.grad for each in _trainable(strategy) if each.grad is not None)
            self._before = [(each, each.detach().clone()) for each in _trainable(strategy)], length

    @torch.no_grad()
    def after_update(self, strategy: Any, **kwargs: Any) -> None:
        if self._before is None:
            return
        (pairs, length), self._before = self._before, None
        moves = [before - parameter for parameter, before in pairs]
        if not any(move.any() for move in moves):
            return
        scale = length / _length(moves)
        for (parameter, _), move in zip(pairs, moves, strict=True):
            parameter.grad = move.mul_(scale)
        super().after_backward(strategy, **kwargs)  # type: ignore[misc]
        for parameter, before in pairs:
            parameter.copy_(before.sub_(parameter.grad, alpha=1 / scale))


def _trainable(strategy: Any) -> list[nn.Parameter]:
    return [parameter for parameter in strategy.model.parameters() if parameter.requires_grad]


def _length(tensors: Iterable[Tensor]) -> float:
    """Return the length of several tensors as one vector, always above 0, so that one can divide by it."""
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm()) + torch.finfo(torch.float32).tiny


def _descends_plainly(options: Any) -> bool:
    """Return whether each update is the gradient times one rate."""
    one_rate = options.readout_learning_rate in (None, options.learning_rate)
    return options.optimizer == "sgd" and one_rate and not (options.weight_decay or options.l1)


class _AGEMPlugin(_ProjectedUpdate, avalanche.AGEMPlugin):
    pass


class _GEMPlugin(_ProjectedUpdate, avalanche.GEMPlugin):
    pass


def _a_sample_a_task(options: Any, stream: Stream) -> None:
    """Refuse a sample smaller than the number of tasks: Avalanche takes ``sample_size // tasks`` rows of each, then none."""
    earlier = len(stream.tasks) - 1
    if options.sample_size < earlier:
        raise OptionError(
            f"agem divides sample_size among the earlier tasks, got {options.sample_size} for up to {earlier} tasks. "
            f"Set sample_size={earlier} or more."
        )


class AGEM(
    PluginStrategy,
    plugin=_AGEMPlugin,
    requires=_a_sample_a_task,
    patterns_per_experience=option(64, "number of stored examples per task", at_least=1),
    sample_size=option(16, "number of stored examples for the reference gradient, in equal parts per task", at_least=1),
):
    """Averaged gradient episodic memory: remove from g what conflicts with stored examples (Chaudhry et al., 2019, eq. 11).

    Stored examples are chosen at random and used in turn; the paper samples them anew at each step.
    """


def _quadprog(options: Any, stream: Stream) -> None:
    one_label_a_row("gem", "divides its memory by labels", options, stream)
    if find_spec("quadprog") is None:  # Avalanche solves eq. 11 with it
        raise UsageError(
            "gem solves a quadratic program at each step, but the solver is not installed. Install it with: pip "
            "install 'forgetfree[gem]'."
        )


class GEM(
    PluginStrategy,
    plugin=_GEMPlugin,
    requires=_quadprog,
    patterns_per_experience=option(16, "number of stored examples per task", at_least=1),
    memory_strength=option(0.5, "γ: how far the projected gradient leans towards earlier tasks", at_least=0),
):
    """Gradient episodic memory: project g so that no earlier task's loss increases (Lopez-Paz & Ranzato, 2017, eq. 11)."""
