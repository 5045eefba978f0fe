"""Graft re-training: find a task's region, then train it from θ_pre (Panigrahi et al., 2023, §3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from forgetfree.continual.skill_strategy import SkillOptions, SkillStrategy
from forgetfree.learning.training import TrainingOptions
from forgetfree.ledger import Composition
from forgetfree.options import option


@dataclass(frozen=True, kw_only=True)
class GraftRetrainOptions(SkillOptions):
    """Grafting's, with regions trained from θ_pre."""

    region_start: Literal["fine-tuned", "pre-trained"] = option("pre-trained", "values the region is trained from")


class GraftRetrain(SkillStrategy):
    """For each task: fine-tune θ_pre on it alone, localize γ, train γ alone from θ_pre (arXiv:2302.06600, §3.1).

    The paper does so for one task, to see whether γ is enough to learn it. Here each task of the stream has a region of
    its own, so that regions may overlap and no task depends on the order.

    Where the paper is silent: a linear readout starts from the fine-tuned one and is trained with the region.
    """

    Options: ClassVar[type[TrainingOptions]] = GraftRetrainOptions
    composition: ClassVar[Composition] = "alone"
