"""Write the tables of README and the result pages from the committed CSV files: ``python -m benchmarks.pages``.

``make results`` calls it. A page marks the place and the source of each table; a test checks that the tables are up to date:

    <!-- made of: comparison -->
    <!-- made of: claims movement -->
    <!-- made of: figures movement -->
    <!-- made of: report main-job,main-job-alone: Kept above the best baseline -->
    <!-- made of: averages standard-2,standard-3 -->
    <!-- made of: paper claims -->
    <!-- made of: compositions -->
    <!-- made of: coverage -->
    <!-- made of: gpu -->
    <!-- made of: parents -->
    <!-- made of: rates one-budget -->
    …
    <!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import claims, coverage, evidence, parents
from benchmarks.gpu import table as gpu
from benchmarks.paper import overview
from forgetfree.display import NULL
from forgetfree.results.report.page import Page, Table, render_page, size
from forgetfree.results.report.run_report import lay_out
from forgetfree.results.table import load_results

FLOORS = ("a constant answer", "a bag of words")
ROOT = Path(__file__).resolve().parents[1]
#: The rows of README's table: the title, file and strategy of each.
COMPARED = (
    ("one model per task", "movement", "fine-tune"),
    ("one model, naive", "movement", "continual-ft"),
    ("one model, replay of 500 rows", "baselines", "replay"),
    ("LoRA, rank 1", "movement-lora", "lora"),
    ("LoRA, rank 8", "baselines-lora", "lora"),
    ("PackNet, a quarter of the free entries", "packnet", "packnet"),
    ("grafts, union", "movement", "grafting-continual"),
    ("grafts, union, by a short mask search", "movement-mask", "grafting-continual"),
    ("grafts, alone", "movement-alone", "grafting-continual"),
)
#: Runs of unions and independent grafts on the same rows: the stream, the files, and the number of rows per label.
COMPOSED = (
    ("the main job", ("movement", "movement-alone"), "1,024"),
    ("standard-1", ("standard-1", "standard-1-alone"), "512"),
    ("progressive-8", ("progressive-8", "progressive-8-alone"), "512"),
    ("named entities", ("ner-domains", "ner-domains-alone"), "all"),
    ("related tasks", ("related-32",), "32"),
    ("mixed tasks", ("mixed-32",), "32"),
    ("unrelated tasks", ("unrelated-32",), "32"),
)
_MARKED = re.compile(r"(<!-- made of: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """Return the pages with generated tables."""
    known = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return [path for path in known if _MARKED.search(path.read_text(encoding="utf-8"))]


def written(text: str) -> str:
    """Return the text of a page with new tables."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{made(found[2])}\n\n{found[3]}", text)


def made(what: str) -> str:
    """Return tables as markdown.

    Args:
        what: the text of their mark.
    """
    kind, _, rest = what.partition(" ")
    if kind == "comparison":
        return _markdown([comparison()])
    if kind == "compositions":
        return _markdown([compositions()])
    if kind == "coverage":
        return _markdown(coverage.tables().tables)
    if kind == "gpu":
        return _markdown([gpu.table(claims.RESULTS / "gpu")])
    if kind == "parents":
        return _markdown(parents.tables(claims.RESULTS / "parents"))
    if kind == "claims":
        return _markdown(claims.judged(rest).tables)
    if kind == "figures":
        return _markdown([claims.figures(rest)])
    if kind == "paper":
        return _markdown([overview.claims() if rest == "claims" else overview.scores()])
    if kind == "rates":
        return _markdown([rates(rest)])
    if kind == "averages":
        return _markdown([averages(rest.split(","))])
    files, _, titles = rest.partition(": ")
    tables = lay_out(load_results(*(claims.RESULTS / f"{name}.csv" for name in files.split(",")))).tables
    return _markdown([next(each for each in tables if each.title.startswith(title)) for title in titles.split("; ")])


def comparison() -> Table:
    """Return a row for each of `COMPARED`: scores on the main job with intervals, updates, and bytes on disk."""
    rows = []
    for called, file, strategy in COMPARED:
        results = load_results(claims.RESULTS / f"{file}.csv")
        label = results.first_of(strategy) or strategy
        runs, measured = [*results.units[label].values()], results.evidence()
        newest, forgets = measured.average(label, results.tasks[-1]), results.forgetting(label)
        options, kept = runs[0].facts.options, np.mean([run.facts.kept_bytes[-1] for run in runs])
        region = options.get("region_steps", 0)
        updates = options["steps"] + (options["steps"] if region is None else region)
        scores = (NULL if each is None else each.text for each in (measured.average(label), newest, forgets))
        rows.append((called, str(len(runs)), *scores, str(updates), size(float(kept))))
    title = "QNLI → AG News → SST-2 on MiniLM (in %, with 95 % intervals over seeds and test rows)"
    header = ("", "seeds", "average", "newest task", "forgetting", "updates per task", "on disk after three tasks")
    return Table(title, header, tuple(rows))


def compositions() -> Table:
    """Return for each of `COMPOSED` how far the average of independent grafts is above the union's, with its interval."""
    rows = []
    for called, files, shots in COMPOSED:
        runs = claims.Runs([str(claims.RESULTS / f"{file}.csv") for file in files])
        difference = claims.above("alone", "union", runs)
        seeds = runs.units("alone").keys() & runs.units("union").keys()
        rows.append((called, str(len(runs.tasks)), shots, str(len(seeds)), difference.text if difference else NULL))
    title = "Independent grafts minus the union, averages (in percentage points, with 95 % intervals)"
    return Table(title, ("stream", "tasks", "rows per label", "seeds", "difference"), tuple(rows))


def rates(name: str) -> Table:
    """Return the averages that each strategy reached with its learning rates on validation rows; the best is marked.

    Args:
        name: the name of a TOML file in benchmarks/evidence.
    """
    references, rows = evidence.Rates(name, "", Path()).references, []
    for strategy, found in evidence.averages(name).items():
        best = max(found, key=lambda rate: found[rate])
        texts = (f"{rate}: {100 * found[rate]:.1f}" + " (best)" * (rate == best) for rate in sorted(found, key=float))
        rows.append((strategy, evidence.rates_of(references[strategy])[0], ", ".join(texts)))
    title = f"Averages by learning rate (validation rows of seed {evidence.SEED}, in %)"
    return Table(title, ("strategy", "option", "averages"), tuple(rows))


def averages(names: Sequence[str]) -> Table:
    """Return a row for each file: final averages of its strategies, and the forgetting of naive training."""
    columns = ("fine-tune", "grafting-continual", "continual-ft", "continual-ft forgets", *FLOORS)
    rows = []
    for name in names:
        results = load_results(claims.RESULTS / f"{name}.csv")
        table = lay_out(results).tables[0]
        lines = [table.header, *table.rows]
        header, *lines = lines if "average" in table.header else list(zip(*lines, strict=True))  # many tasks are rows
        average, forgetting = header.index("average"), header.index("forgetting")
        found = {line[0]: line[average] for line in lines}
        found |= {f"{line[0]} forgets": line[forgetting] for line in lines}
        seeds = str(len({run.seed for run in results.runs}))
        rows.append((name, seeds, *(found.get(column, NULL) for column in columns)))
    return Table("Averages after the last task (in %; forgetting in points)", ("order", "seeds", *columns), tuple(rows))


def _markdown(tables: Sequence[Table]) -> str:
    """Return tables as markdown, each below its title."""
    text = render_page(Page("", (), tuple(tables)), "markdown")
    return re.sub(r"^## (.+)$", r"**\1**", text, flags=re.MULTILINE).removeprefix("#").strip()


def main() -> None:
    """Write the pages."""
    for path in pages():
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
