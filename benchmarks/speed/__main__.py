"""Measure how fast forgetfree is: ratios to plain PyTorch, to peers and to limits, one script a topic.

    python -m benchmarks.speed [NAME …] [--turns N] [--threads N] [--json FILE]

Without a name, all of them run.
"""

from __future__ import annotations

import argparse
import json
import platform
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from pkgutil import iter_modules

import torch

from benchmarks import speed
from benchmarks.speed.measurement import Figure, measured

#: The scripts: each has a function ``figures(turns) -> list[Figure]`` and a docstring whose first line is its title.
SCRIPTS = tuple(found.name for found in iter_modules(speed.__path__) if found.name not in ("__main__", "measurement"))


def table(figures: list[Figure]) -> str:
    """Return the figures as a table in Markdown."""
    lines = ["| measurement | value | quartiles | target | limit | median times |", "|---|---|---|---|---|---|"]
    for figure in figures:
        quartiles = "–" if figure.low is None else f"{figure.low:.3g} to {figure.high:.3g}"
        wanted = "–" if figure.at_most is None else f"≤ {figure.at_most:g}{'' if figure.holds else ' (not reached)'}"
        limit = "–" if figure.limit is None else f"{figure.limit:.3g}"
        times = ", ".join(f"{name} {1000 * each:.3g} ms" for name, each in figure.seconds.items()) or "–"
        unit = f" {figure.unit}" if figure.unit else ""
        lines.append(f"| {figure.what} | {figure.value:.3g}{unit} | {quartiles} | {wanted} | {limit} | {times} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCRIPTS)}; default: all")
    parser.add_argument("--turns", type=int, default=9, help="turns that count (default: 9)")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch (default: 1)")
    parser.add_argument("--json", type=Path, help="also write the figures into this file")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(SCRIPTS)):
        parser.error(f"unknown: {', '.join(unknown)}; expected some of {', '.join(SCRIPTS)}")
    machine = f"{platform.processor() or platform.machine()}, {options.threads} threads, PyTorch {torch.__version__}"
    written = {}
    for name in options.names or SCRIPTS:
        # A process for each, so that none finds memory that another left.
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            title, figures = process.submit(measured, name, options.turns, options.threads).result()
        written[name] = [asdict(figure) for figure in figures]
        print(f"## {title.rstrip('.')}\n\n{table(figures)}\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "figures": written}, indent=1) + "\n")


if __name__ == "__main__":
    main()
