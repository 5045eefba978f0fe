"""Write the pages of docs/results/paper/, one for each run of an experiment: ``python -m forgetfree.benchmarks.paper``.

They are made of the run files beside this one, and of nothing else, their figures too; a test holds the pages to them. A
run file is called by its experiment; of a further run, with another model or readout, the name goes on after a dash. Those in
``choices`` were scored on validation rows, to choose the presets' options; docs/results/paper.md shows them.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from forgetfree import registry
from forgetfree.benchmarks.paper.presets import SMALL
from forgetfree.jobs.experiments import (
    SCORE,
    draw_outcome,
    load_experiment,
    load_experiment_results,
    outcome,
    pivot,
    share_of,
    sparsities_of,
)
from forgetfree.results.report.page import Page, render_page

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
CHOICES = RESULTS / "choices"


def run_files() -> list[Path]:
    """Those at hand, in the registry's order."""
    files = [RESULTS / f"{name}.csv" for name in registry.EXPERIMENTS]
    return [each for file in files for each in (file, *sorted(RESULTS.glob(f"{file.stem}-*.csv"))) if each.is_file()]


def page(file: Path) -> str:
    """Return the outcome of a run file with its figure."""
    run = load_experiment_results(file)
    title, rest = render_page(outcome(run), "markdown").replace(run.experiment, file.stem, 1).split("\n", 1)
    return f"{title}\n\n![{file.stem}](../../figures/{file.stem}.png)\n{rest.rstrip()}\n"


def contents() -> str:
    """Return a line for each page, with what it asks."""
    asked = {file.stem: load_experiment(load_experiment_results(file).experiment).question for file in run_files()}
    lines = [f"- [{name}](paper/{name}.md): {question}" for name, question in asked.items()]
    return _marked("pages", "\n".join(lines))


def choices() -> str:
    """What fine-tuned models and grafts score on validation rows, by the options that were tried."""
    rows = []
    for file in sorted(CHOICES.glob("*.csv")):
        run = load_experiment_results(file)
        readout = {"readout": run.setting.readout} if run.setting.readout != SMALL.readout else {}
        tried = ", ".join(f"{key}={value}" for key, value in (readout | run.setting.fixed).items())
        rows += [{**row, "tried": tried} for row in run.rows]
    columns: dict[str, tuple[str, dict[str, object]]] = {"fine-tuned": ("score", {"model": "fine-tuned"})}
    for sparsity in sparsities_of(rows, model="grafted"):
        columns[f"graft {share_of(sparsity)}"] = "score", {"model": "grafted", "sparsity": sparsity}
    table = pivot(f"{SCORE}, on validation rows", rows, ("tried", "task"), columns)
    page = render_page(Page("What was tried", (), (table,)), "markdown")
    return _marked("choices", re.sub("^#", "###", page, flags=re.MULTILINE).split("\n", 2)[2].strip())


def _marked(name: str, text: str) -> str:
    return f"<!-- {name}: begin -->\n\n{text}\n\n<!-- {name}: end -->"


def main() -> None:
    """Put pages and figures where they belong, in the checkout this file is part of."""
    documents = HERE.parents[1] / "docs"
    overview, figures = documents / "results" / "paper.md", documents / "figures"
    text = overview.read_text(encoding="utf-8")
    for name, made in (("pages", contents()), ("choices", choices())):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        text = text[: text.index(begin)] + made + text[text.index(end) + len(end) :]
    overview.write_text(text, encoding="utf-8")
    for file in run_files():
        (overview.with_suffix("") / f"{file.stem}.md").write_text(page(file), encoding="utf-8")
        run = load_experiment_results(file)
        with tempfile.TemporaryDirectory() as drawn:
            draw_outcome(run, Path(drawn))
            (figures / f"{file.stem}.png").write_bytes((Path(drawn) / f"{run.experiment}.png").read_bytes())


if __name__ == "__main__":
    main()
