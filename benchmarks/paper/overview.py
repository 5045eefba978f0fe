"""The tables of docs/results/paper.md: the paper's claims and scores, and our measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.paper.adapters import Adapters
from benchmarks.paper.bound import Bound
from benchmarks.paper.calibration import Calibration
from benchmarks.paper.continual import Continual
from benchmarks.paper.experiment import Experiment, read_rows
from benchmarks.paper.fish import Fish
from benchmarks.paper.localization import Localization
from benchmarks.paper.model_labels import ModelLabels
from benchmarks.paper.multi_task import MultiTask
from benchmarks.paper.ood import OutOfDistribution
from benchmarks.paper.optimizers import Optimizers
from benchmarks.paper.published import TABLE_1, TABLE_6, TABLE_8, cell
from benchmarks.paper.rows import distinct, mean
from benchmarks.paper.sparsity_curve import SparsityCurve
from benchmarks.paper.what_fails import WhatFails
from benchmarks.paper.where import Where
from forgetfree.display import NULL
from forgetfree.results.report.page import Table, percent
from forgetfree.results.runs import CONSTANT

#: All experiments, in the order of the page.
EXPERIMENTS: dict[str, Experiment] = {
    each.name: each
    for each in (
        *(Continual(), Localization(), SparsityCurve(), WhatFails(), Optimizers(), Calibration(), OutOfDistribution()),
        *(Where(), MultiTask(), Bound(), Adapters(), Fish(), ModelLabels()),
    )
}
RESULTS = Path(__file__).resolve().parent / "results"
#: Runs of version 0.2.0.
OLD = ("localization", "localization-prompt")
TASKS = ("sst2", "ag_news")
#: The lines of scores: the trained parameters, their place in the paper (table, row, column), and ours (run file, selected
#: rows).
LINES: tuple[tuple[str, tuple[Table, str, str], tuple[str, dict[str, Any]]], ...] = (
    ("fine-tuned", (TABLE_1, "fine-tuned", "{task}"), ("calibration", {"model": "fine-tuned"})),
    ("graft, 0.01 % there, 0.1 % here", (TABLE_1, "grafted", "{task}"), ("calibration", {"model": "grafted"})),
    ("its region trained again", (TABLE_1, "retrained", "{task}"), ("calibration", {"model": "retrained"})),
    ("BitFit", (TABLE_1, "bitfit", "{task}"), ("calibration", {"model": "bitfit"})),
    ("LoRA 1", (TABLE_6, "LoRA 1", "{task}"), ("adapters", {"method": "LoRA", "size": "1"})),
    ("LoRA 8", (TABLE_6, "LoRA 8", "{task}"), ("adapters", {"method": "LoRA", "size": "8"})),
    ("Houlsby 64", (TABLE_6, "Houlsby 64", "{task}"), ("adapters", {"method": "Houlsby", "size": "64"})),
    ("Pfeiffer 64", (TABLE_6, "Pfeiffer 64", "{task}"), ("adapters", {"method": "Pfeiffer", "size": "64"})),
    ("graft 1 %", (TABLE_8, "{task} 1 %", "learned"), ("fish", {"region": "learned", "sparsity": 0.01})),
    ("FISH graft 0.1 %", (TABLE_8, "{task} 0.1 %", "fisher"), ("fish", {"region": "fisher", "sparsity": 0.001})),
    ("FISH graft 1 %", (TABLE_8, "{task} 1 %", "fisher"), ("fish", {"region": "fisher", "sparsity": 0.01})),
    ("random graft 0.1 %", (TABLE_8, "{task} 0.1 %", "random"), ("fish", {"region": "random", "sparsity": 0.001})),
)


def run_files() -> list[Path]:
    """Return the existing run files, in the order of the page."""
    files = [RESULTS / f"{name}.csv" for name in EXPERIMENTS]
    return [each for file in files for each in (file, *sorted(RESULTS.glob(f"{file.stem}-*.csv"))) if each.is_file()]


def claims() -> Table:
    """Return the claims of all experiments, with the paper's number and ours."""
    rows: list[tuple[str, ...]] = []
    for file in run_files():
        header, measured = read_rows(file)
        page = EXPERIMENTS[header["experiment"]].page(header, measured)
        seeds = len(distinct(measured, "seed"))
        where = page.title.partition(": ")[2]
        name = f"{file.stem}{' †' if file.stem in OLD else ''}, {where}, {seeds} {'seed' if seeds == 1 else 'seeds'}"
        rows += [(name, "", "", ""), *page.tables[0].rows]
    return Table("Claims", ("claim", "paper", "here", "holds here"), tuple(rows))


def scores() -> Table:
    """Return scores and calibration errors with 4096 shots, the paper's and ours."""
    header = [f"{task}, {where}" for task in TASKS for where in ("paper", "here")]
    rows = []
    for name, (table, row, column), (file, wanted) in LINES:
        measured, cells = read_rows(RESULTS / f"{file}.csv")[1], []
        for task in TASKS:
            theirs = (cell(table, row.format(task=task), column.format(task=task), after) for after in (0, 1))
            at = wanted | {"task": task} | ({"target": task} if file == "adapters" else {})
            ours = (percent(mean(measured, key, **at)) for key in ("score", "ece"))
            cells += [" / ".join(each).replace(f"{NULL} / {NULL}", NULL) for each in (theirs, ours)]
        rows.append((name, str(len(distinct(measured, "seed"))), *cells))
    floors = [percent(mean(read_rows(RESULTS / "fish.csv")[1], "constant", task=task)) for task in TASKS]
    rows.append((CONSTANT, NULL, *(each for floor in floors for each in (NULL, floor))))
    return Table("Score / ECE, 4096 shots", ("trained", "seeds here", *header), tuple(rows))
