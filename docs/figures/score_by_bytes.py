"""Draw what strategies score beside what they keep a task, from committed runs: ``python docs/figures/score_by_bytes.py``.

A point is a configuration: its average after the last task with the 95 % interval of reports. The same numbers always give
the same bytes, and the picture follows the reader's light or dark scheme.
"""

from __future__ import annotations

import math
import runpy
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from forgetfree.results.report.page import size
from forgetfree.results.runs import Run
from forgetfree.results.table import load_results

HERE = Path(__file__).parent
RUNS = HERE.parent.parent / "benchmarks" / "results"
#: Files of runs on the same test rows.
FILES = ("movement", "movement-alone", "movement-lora", "baselines-lora")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 330, 56, 24, 62, 270  # in pixels
#: Points that would hide one another stand so far apart.
APART = 8
#: By strategy: the colours in the light and in the dark scheme.
COLOURS = {
    "grafting-continual": ("#0969da", "#58a6ff"),
    "lora": ("#8250df", "#bc8cff"),
    "continual-ft": ("#bc4c00", "#f0883e"),
    "fine-tune": ("#1a7f37", "#3fb950"),
}
_OTHER = ("#59636e", "#9198a1")
#: What a label tells of the options, where they differ between runs of its strategy.
TOLD = ("composition", "sparsity", "rank")


def picture(files: Sequence[str] = FILES) -> str:
    """Return the picture as SVG text.

    Args:
        files: names of CSV files in benchmarks/results, whose runs may stand side by side.
    """
    drawing = runpy.run_path(str(HERE / "concepts.py"))
    colours, text = drawing["COLOURS"], drawing["_text"]
    results = load_results(*(RUNS / f"{name}.csv" for name in files))
    evidence, tasks = results.evidence(), len(results.tasks)
    kept = {label: _bytes([*runs.values()]) for label, runs in results.units.items()}
    labels = sorted((label for label in kept if not math.isnan(kept[label])), key=lambda label: kept[label])
    averages = [evidence.average(label) for label in labels]
    ends = [each for found in averages for each in (found.value, found.low, found.high) if not math.isnan(each)]
    lowest, highest = math.floor(50 * min(ends)) * 2, math.ceil(50 * max(ends)) * 2
    least, most = math.log10(kept[labels[0]] / tasks / 2), math.log10(kept[labels[-1]] / tasks * 2)

    def across(amount: float) -> float:
        return LEFT + (math.log10(amount) - least) / (most - least) * (WIDTH - LEFT - RIGHT)

    def height(score: float) -> float:
        return round(TOP + (highest - 100 * score) / (highest - lowest) * (BOTTOM - TOP), 1)

    rows = ", ".join(f"{count:,}" for count in results.test_rows.values())
    seeds = " to ".join(map(str, sorted({len(results.units[label]) for label in labels})))
    parts = [
        text(LEFT, 24, f"Average over {tasks} tasks, in %, by bytes stored per task", "text", anchor="start"),
        text(LEFT, 41, f"mean and 95 % interval, {seeds} seeds, {rows} test rows", "faint", anchor="start", size=11),
    ]
    for level in range(lowest, highest + 1, 2):
        path = f"M{LEFT} {height(level / 100):g}H{WIDTH - RIGHT}"
        parts.append(f'<path d="{path}" class="line" stroke="{colours["line"][0]}"/>')
        parts.append(text(LEFT - 8, height(level / 100) + 4, str(level), "faint", anchor="end", size=11))
    for power in range(math.ceil(least), math.floor(most) + 1):
        parts.append(text(across(10**power), BOTTOM + 20, size(10**power), "faint", size=11))
    parts.append(
        text(
            WIDTH - RIGHT,
            HEIGHT - 14,
            "bytes stored per task, in addition to the pre-trained model",
            "faint",
            anchor="end",
            size=11,
        )
    )
    first = {label: next(iter(results.units[label].values())) for label in labels}
    dark, places = dict[str, None](), list[float]()  # a strategy may stand there several times
    for label in labels:
        places.append(max(across(kept[label] / tasks), places[-1] + APART if places else -math.inf))
    marks = list(zip(labels, averages, places, strict=True))
    left = max((x for x in places if x < WIDTH / 2), default=0.0)
    line = -math.inf  # of the labels beside the points on the left, which stand close to one another
    for label, found, x in sorted(marks, key=lambda mark: height(mark[1].value)):
        name = first[label].strategy
        before, after = COLOURS.get(name, _OTHER)
        bar = "" if math.isnan(found.low) else f"M{x:.1f} {height(found.low):g}V{height(found.high):g}"
        parts.append(f'<path d="{bar}" class="{name}" stroke="{before}" stroke-width="2"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{height(found.value):g}" r="4.5" class="{name}-fill" fill="{before}"/>')
        y, start, anchor = height(found.value) + 4, x - 9, "end"
        if x <= left:
            line, start, anchor = max(y, line + 14), left + 24, "start"
            y = line
            lead = f"M{x + 6:.1f} {height(found.value):g}L{start - 4:.1f} {y - 4:g}"
            parts.append(f'<path d="{lead}" class="{name}" stroke="{before}" stroke-width="1" opacity="0.35"/>')
        words = text(start, y, _label(first[label], [first[each] for each in labels]), "text", anchor=anchor, size=11)
        parts.append(words.replace('class="text"', f'class="{name}-fill"').replace(colours["text"][0], before))
        dark[f".{name}{{stroke:{after}}}.{name}-fill{{fill:{after}}}"] = None
    return str(drawing["_page"](WIDTH, HEIGHT, parts, "".join(dark)))


def _bytes(runs: Sequence[Run]) -> float:
    """Return what is kept after the last task, the mean over seeds; NaN where it is not known."""
    return float(np.mean([run.facts.kept_bytes[-1] if run.facts.kept_bytes else math.nan for run in runs]))


def _label(run: Run, runs: Sequence[Run]) -> str:
    same = [each.facts.options for each in runs if each.strategy == run.strategy]
    told = [f"{key}={run.facts.options[key]}" for key in TOLD if len({options.get(key) for options in same}) > 1]
    return f"{run.strategy} ({', '.join(told)})" if told else run.strategy


if __name__ == "__main__":
    (HERE / "score-by-bytes.svg").write_text(picture(), encoding="utf-8")
