"""What an experiment is: one class in one file of `forgetfree.benchmarks.paper`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, ClassVar

from forgetfree import registry
from forgetfree.jobs.experiment_config import Preset
from forgetfree.jobs.experiments.context import ExperimentContext
from forgetfree.jobs.experiments.rows import Row, Unit
from forgetfree.results.report.page import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Claim:
    """What the paper says, what it measured, what we measure, and whether the claim holds here.

    Attributes:
        text: the claim.
        paper: its number there; a dash where only the claim is at hand.
        ours: ours.
        holds: ``None`` where the rows do not tell.
    """

    text: str
    paper: str
    ours: str
    holds: bool | None


class Experiment(ABC):
    """Base of all experiments. Subclasses say what they measure and what follows."""

    #: What of the paper it repeats.
    paper: ClassVar[str]
    #: What it asks, in one sentence.
    question: ClassVar[str]
    presets: ClassVar[Mapping[str, Preset]]
    #: What it looks at one of: several numbers of shots, or sparsities, would be taken for seeds.
    single: ClassVar[tuple[str, ...]] = ("shots",)
    #: Tasks that are made of the rows of several, by name.
    merged: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    #: The columns of its rows that hold what was measured, see `forgetfree.results.scores.scores_of_rows`.
    measured: ClassVar[tuple[str, ...]] = ("score", "constant", "ece", "agreement")

    def tasks(self, preset: Preset) -> list[tuple[str, ...]]:
        """Return the tasks whose data it needs, each under one name or several; the first name that has data counts."""
        return [(each,) for task in preset.tasks for each in self.merged.get(task, (task,))]

    def units(self, preset: Preset) -> list[Unit]:
        """Return what is measured one by one: by default every task, number of shots, and seed."""
        return [
            {"task": task, "shots": shots, "seed": seed}
            for task, shots, seed in product(preset.tasks, preset.shots, preset.seeds)
        ]

    @abstractmethod
    def measure(self, context: ExperimentContext, unit: Unit) -> list[Row]:
        """Return the rows of one unit; the unit's own keys are put before them."""

    @abstractmethod
    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Return what was measured as tables."""

    @abstractmethod
    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Return the paper's claims, each beside what was measured here."""

    @abstractmethod
    def draw(self, rows: Sequence[Row]) -> Figure:
        """Draw the paper's figure from rows that were measured here."""


def load_experiment(name: str) -> Experiment:
    """Return the experiment of a name.

    Raises:
        UnknownNameError: no such experiment.
    """
    experiment: Experiment = registry.experiment(name)()
    return experiment
