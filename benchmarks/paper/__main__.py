"""Write the section of docs/results.md that holds the experiments: ``python -m forgetfree.benchmarks.paper``.

It is made of the run files beside this one, and of nothing else; a test holds the document to it.
"""

from __future__ import annotations

import re
from pathlib import Path

from forgetfree import registry
from forgetfree.experiments import load_experiment_results, outcome
from forgetfree.pages import render_page

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
BEGIN, END = "<!-- experiments: begin -->", "<!-- experiments: end -->"


def section() -> str:
    """The outcome of every experiment with a run file, in the registry's order, each with its figure."""
    parts = []
    for name in registry.EXPERIMENTS:
        file = RESULTS / f"{name}.json"
        if file.is_file():
            page = render_page(outcome(load_experiment_results(file)), "markdown")
            title, rest = re.sub(r"^#", "###", page, flags=re.MULTILINE).split("\n", 1)
            parts.append(f"{title}\n\n![{name}](figures/{name}.png)\n{rest.rstrip()}")
    return "\n\n".join([BEGIN, *parts, END])


def main() -> None:
    """Put it where it belongs, in the checkout this file is part of."""
    document = HERE.parents[1] / "docs" / "results.md"
    text = document.read_text(encoding="utf-8")
    before, after = text[: text.index(BEGIN)], text[text.index(END) + len(END) :]
    document.write_text(before + section() + after, encoding="utf-8")


if __name__ == "__main__":
    main()
