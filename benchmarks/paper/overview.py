"""The tables of docs/results/paper.md: what the paper claims and scores, and what was measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forgetfree import registry
from forgetfree.benchmarks.paper.published import TABLE_1, TABLE_6, TABLE_8, cell
from forgetfree.display import NULL
from forgetfree.jobs.experiments import distinct, load_experiment_results, mean, outcome, percent
from forgetfree.results.records import CONSTANT
from forgetfree.results.report.page import Table

RESULTS = Path(__file__).resolve().parent / "results"
#: Runs of version 0.2.0.
OLD = ("localization", "localization-prompt")
TASKS = ("sst2", "ag_news")
#: Of the scores: what is trained, where the paper has it (table, row, column), and where we do (run file, which rows).
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
    """Return those at hand, in the registry's order."""
    files = [RESULTS / f"{name}.csv" for name in registry.EXPERIMENTS]
    return [each for file in files for each in (file, *sorted(RESULTS.glob(f"{file.stem}-*.csv"))) if each.is_file()]


def claims() -> Table:
    """Return the claims of all experiments, the paper's number beside ours."""
    rows: list[tuple[str, ...]] = []
    headings = []
    for file in run_files():
        results = load_experiment_results(file)
        page = outcome(results)
        seeds = len(distinct(results.rows, "seed"))
        where = page.title.partition(": ")[2]
        headings.append((len(rows), 0))
        name = f"{file.stem}{' †' if file.stem in OLD else ''}, {where}, {seeds} {'seed' if seeds == 1 else 'seeds'}"
        rows += [(name, "", "", ""), *page.tables[0].rows]
    return Table("Claims", ("claim", "paper", "here", "holds here"), tuple(rows), tuple(headings))


def scores() -> Table:
    """Return scores and calibration errors with 4096 shots, the paper's beside ours."""
    header = [f"{task}, {where}" for task in TASKS for where in ("paper", "here")]
    rows = []
    for name, (table, row, column), (file, wanted) in LINES:
        measured, cells = load_experiment_results(RESULTS / f"{file}.csv").rows, []
        for task in TASKS:
            theirs = (cell(table, row.format(task=task), column.format(task=task), after) for after in (0, 1))
            at = wanted | {"task": task} | ({"target": task} if file == "adapters" else {})
            ours = (percent(mean(measured, key, **at)) for key in ("score", "ece"))
            cells += [" / ".join(each).replace(f"{NULL} / {NULL}", NULL) for each in (theirs, ours)]
        rows.append((name, str(len(distinct(measured, "seed"))), *cells))
    floors = [
        percent(mean(load_experiment_results(RESULTS / "fish.csv").rows, "constant", task=task)) for task in TASKS
    ]
    rows.append((CONSTANT, NULL, *(each for floor in floors for each in (NULL, floor))))
    return Table("Score / ECE, 4096 shots", ("trained", "seeds here", *header), tuple(rows))
