"""Print the reports of experiments' runs, or draw their figures.

    python -m benchmarks.paper FILE.csv …     # claims and tables
    python -m benchmarks.paper                # the figures of docs/results/paper.md, of the runs that are committed

A run file is named after its experiment; a further run, with another model or readout, has a suffix after a dash. The runs in
``choices`` were scored on validation rows, to choose options.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper.experiment import read_rows
from benchmarks.paper.overview import EXPERIMENTS, run_files
from benchmarks.paper.plots import save_figure
from forgetfree.results.report.page import render_page


def main(files: Sequence[str]) -> None:
    """Print the report of each file; without files, write the figures into docs/figures of this checkout."""
    for file in files:
        header, rows = read_rows(Path(file))
        print(render_page(EXPERIMENTS[header["experiment"]].page(header, rows), "rich"))
    figures = Path(__file__).resolve().parents[2] / "docs" / "figures"
    for path in () if files else run_files():
        header, rows = read_rows(path)
        with tempfile.TemporaryDirectory() as drawn:
            save_figure(EXPERIMENTS[header["experiment"]].draw(rows), Path(drawn) / "figure")
            (figures / f"{path.stem}.png").write_bytes((Path(drawn) / "figure.png").read_bytes())


if __name__ == "__main__":
    main(sys.argv[1:])
