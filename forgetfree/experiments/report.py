"""What was measured, read back: claims, tables and the figure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgetfree.errors import ReportError, RunError
from forgetfree.experiments.experiment import load_experiment
from forgetfree.experiments.rows import Row
from forgetfree.files import StrPath, write_atomically
from forgetfree.pages import Page, Table, render_page
from forgetfree.tasks import MAX_LENGTH

SCHEMA = 1
#: What a setting means that was written before one of these could be chosen.
_DEFAULTS = {"max_length": MAX_LENGTH, "evaluate_on": "test"}


def load_experiment_results(path: StrPath) -> dict[str, Any]:
    """The results.json of an experiment.

    Raises:
        ReportError: it cannot be read, or is of another kind.
    """
    file = Path(path) / "results.json" if Path(path).is_dir() else Path(path)
    try:
        results: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"{file} cannot be read: {error}. Give the directory of an experiment.") from error
    whole = isinstance(results, dict) and {"experiment", "setting", "units"} <= results.keys()
    if not whole or results.get("schema") != SCHEMA:
        raise ReportError(f"{file} holds no results of an experiment. Give what `forgetfree experiment --out` wrote.")
    return {**results, "setting": {**_DEFAULTS, **results["setting"]}}


def rows_of(results: Mapping[str, Any]) -> list[Row]:
    """All rows, unit after unit."""
    return [row for unit in results["units"] for row in unit["rows"]]


def outcome(results: Mapping[str, Any]) -> Page:
    """The experiment's report: claims, then tables.

    Raises:
        RunError: nothing is measured yet.
    """
    experiment, rows, setting = load_experiment(results["experiment"]), rows_of(results), results["setting"]
    if not rows:
        raise RunError("The experiment has no rows yet: its first unit is not done. Go on with --resume.")
    seeds = len({row["seed"] for row in rows})
    notes = [
        experiment.question,
        f"preset {results['preset']}: {setting['model']}, readout {setting['readout']}, "
        f"{' and '.join(map(str, setting['shots']))} shots, {seeds} {'seed' if seeds == 1 else 'seeds: mean (std)'}; all in %",
    ]
    if (rows_are := setting.get("evaluate_on", "test")) != "test":
        notes.append(f"scored on {rows_are} rows: to choose options by, not to report")
    if results["skipped"]:
        notes.append(f"no data at hand for: {', '.join(results['skipped'])}")
    if not results["complete"]:
        notes.append("not finished: some units are missing")
    verdicts = {True: "yes", False: "no", None: "not told"}
    claims = Table(
        "What the paper claims",
        ("claim", "paper", "here", "holds here"),
        tuple((c.text, c.paper, c.ours, verdicts[c.holds]) for c in experiment.claims(rows)),
    )
    return Page(f"{results['experiment']}: {experiment.paper}", tuple(notes), (claims, *experiment.tables(rows)))


def write_outcome(results: Mapping[str, Any], out: Path) -> None:
    """report.md and the figure."""
    write_atomically(out / "report.md", render_page(outcome(results), "markdown"))
    draw_outcome(results, out)


def draw_outcome(results: Mapping[str, Any], out: Path) -> None:
    """The figure, as PNG and SVG."""
    from forgetfree.figures import save_figure

    save_figure(load_experiment(results["experiment"]).draw(rows_of(results)), out / results["experiment"])
