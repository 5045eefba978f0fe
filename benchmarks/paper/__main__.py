"""Draw the figures of docs/results/paper.md, one for each run of an experiment: ``python -m forgetfree.benchmarks.paper``.

A run file is called by its experiment; of a further run, with another model or readout, the name goes on after a dash. Those in
``choices`` were scored on validation rows, to choose the presets' options.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from forgetfree.benchmarks.paper.overview import run_files
from forgetfree.jobs.experiments import draw_outcome, load_experiment_results


def main() -> None:
    """Put the figures where they belong, in the checkout this file is part of."""
    figures = Path(__file__).resolve().parents[2] / "docs" / "figures"
    for file in run_files():
        run = load_experiment_results(file)
        with tempfile.TemporaryDirectory() as drawn:
            draw_outcome(run, Path(drawn))
            (figures / f"{file.stem}.png").write_bytes((Path(drawn) / f"{run.experiment}.png").read_bytes())


if __name__ == "__main__":
    main()
