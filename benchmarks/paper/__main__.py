"""Write the section of docs/results.md that holds the experiments: ``python -m forgetfree.benchmarks.paper``.

It is made of the run files beside this one, and of nothing else, its figures too; a test holds the document to it. A run
file is called by its experiment; of a further run, with another model or readout, the name goes on after a dash.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from forgetfree import registry
from forgetfree.experiments import draw_outcome, load_experiment_results, outcome
from forgetfree.pages import render_page

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
BEGIN, END = "<!-- experiments: begin -->", "<!-- experiments: end -->"


def run_files() -> list[Path]:
    """Those at hand, in the registry's order."""
    files = [RESULTS / f"{name}.json" for name in registry.EXPERIMENTS]
    return [each for file in files for each in (file, *sorted(RESULTS.glob(f"{file.stem}-*.json"))) if each.is_file()]


def section() -> str:
    """The outcome of every run file with its figure."""
    parts = []
    for file in run_files():
        run = load_experiment_results(file)
        page = re.sub(r"^#", "###", render_page(outcome(run), "markdown"), flags=re.MULTILINE)
        title, rest = page.replace(run["experiment"], file.stem, 1).split("\n", 1)
        parts.append(f"{title}\n\n![{file.stem}](figures/{file.stem}.png)\n{rest.rstrip()}")
    return "\n\n".join([BEGIN, *parts, END])


def main() -> None:
    """Put section and figures where they belong, in the checkout this file is part of."""
    documents = HERE.parents[1] / "docs"
    results, figures = documents / "results.md", documents / "figures"
    text = results.read_text(encoding="utf-8")
    before, after = text[: text.index(BEGIN)], text[text.index(END) + len(END) :]
    results.write_text(before + section() + after, encoding="utf-8")
    for file in run_files():
        run = load_experiment_results(file)
        with tempfile.TemporaryDirectory() as drawn:
            draw_outcome(run, Path(drawn))
            (figures / f"{file.stem}.png").write_bytes((Path(drawn) / f"{run['experiment']}.png").read_bytes())


if __name__ == "__main__":
    main()
