"""What an experiment is, one class in one file of `forgetfree.benchmarks.paper`, and what it says of what was measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from forgetfree import registry
from forgetfree.errors import ReportError, RunError, first_line
from forgetfree.files import StrPath
from forgetfree.jobs.experiment_config import Preset
from forgetfree.jobs.experiments.context import ExperimentContext
from forgetfree.jobs.experiments.rows import Row, Unit
from forgetfree.results.records import ExperimentResults
from forgetfree.results.report.page import Page, Table, render_page
from forgetfree.results.stored import find_results, read_stored
from forgetfree.results.unit_folder import made_of_units
from forgetfree.tasks import MAX_LENGTH

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


# -- What was measured, read back: claims, tables and the figure ------------------------------------------

#: What a setting means that was written before one of these could be chosen.
_DEFAULTS = {"max_length": MAX_LENGTH, "evaluate_on": "test"}


def load_experiment_results(path: StrPath) -> ExperimentResults:
    """Read and check the results of an experiment; under ``made`` stands what its units were computed with.

    Raises:
        ReportError: it cannot be read, is of another kind, or lacks what its report is made of.
    """
    file = find_results(path)
    results = read_stored(file, _read, "Give what `forgetfree experiment --out` wrote.")
    return results.with_facts(**made_of_units(file.parent / "units")) if file.suffix == ".json" else results


def _read(content: Any) -> ExperimentResults:
    """Check that the report can be made of it, and that it can be resumed."""
    if not isinstance(content, dict) or not {"experiment", "setting", "units"} <= content.keys():
        raise ValueError("it holds no results of an experiment")
    if isinstance(content["setting"], dict):
        content = {**content, "setting": {**_DEFAULTS, **content["setting"]}}
    results = ExperimentResults.of(content)
    if results.rows:
        with _what_rows_lack():
            render_page(outcome(results), "markdown")
    return results


@contextmanager
def _what_rows_lack() -> Iterator[None]:
    """Turn what goes wrong with rows of a file into a ``ValueError``: only the experiment knows what they must hold."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"a row lacks {error}, which this experiment measures") from error
    except (TypeError, LookupError, ArithmeticError, AttributeError, ValueError) as error:
        raise ValueError(f"its rows are not those of this experiment ({first_line(error)})") from error


def rows_of(content: Mapping[str, Any]) -> list[Row]:
    """Return all rows in the content of results.json, unit after unit."""
    return [row for unit in content["units"] for row in unit["rows"]]


def outcome(results: ExperimentResults) -> Page:
    """Return the report of an experiment: claims, then tables.

    Raises:
        RunError: nothing is measured yet.
    """
    experiment, rows, setting = load_experiment(results.experiment), results.rows, results.setting
    if not rows:
        raise RunError("The experiment has no rows yet: its first unit is not done. Go on with --resume.")
    seeds = len({row["seed"] for row in rows})
    notes = [
        experiment.question,
        f"preset {results.preset}: {setting.model}, readout {setting.readout}, "
        f"{' and '.join(map(str, setting.shots))} shots, {seeds} {'seed' if seeds == 1 else 'seeds: mean (std)'}; all in %",
    ]
    if setting.evaluate_on != "test":
        notes.append(f"scored on {setting.evaluate_on} rows: to choose options by, not to report")
    if results.skipped:
        notes.append(f"no data at hand for: {', '.join(results.skipped)}")
    if not results.complete:
        notes.append("not finished: some units are missing")
    verdicts = {True: "yes", False: "no", None: "undecided"}
    claims = Table(
        "What the paper claims",
        ("claim", "paper", "here", "holds here"),
        tuple((c.text, c.paper, c.ours, verdicts[c.holds]) for c in experiment.claims(rows)),
    )
    return Page(f"{results.experiment}: {experiment.paper}", tuple(notes), (claims, *experiment.tables(rows)))


def draw_outcome(results: ExperimentResults, out: Path) -> None:
    """Write the figure as PNG and SVG.

    Raises:
        ReportError: the rows lack what it shows.
    """
    from forgetfree.results.report.figures import save_figure

    name = results.experiment
    try:
        with _what_rows_lack():
            figure = load_experiment(name).draw(results.rows)
    except ValueError as error:
        raise ReportError(f"The figure of {name!r} cannot be drawn: {error}. Measure it again.") from error
    save_figure(figure, out / name)
