"""Draw pictures of README and the main job from movement.csv and demo.csv: ``python docs/figures/first_task.py``.

They show the first task's accuracy while the others are learned. The same numbers always give the same bytes, and a picture
follows the reader's light or dark scheme.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np

from forgetfree.display import counted
from forgetfree.results.table import load_results

HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "benchmarks" / "results"
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, STEP = 640, 300, 60, 58, 242, 261  # in pixels
#: For each picture the file of its runs, and the accuracies at its bottom and at its top.
PICTURES = {"first-task": ("movement", 45, 85), "demo": ("demo", 40, 100)}
#: What is drawn, with its name in the picture and its colours in the light and the dark scheme.
LINES = {
    "continual-ft": ("naive fine-tuning", "#bc4c00", "#f0883e"),
    "grafting-continual": ("grafting", "#0969da", "#58a6ff"),
}


def picture(name: str) -> str:
    """Return a picture as SVG text."""
    file, lowest, highest = PICTURES[name]

    def height(score: float) -> float:
        return round(TOP + (highest - score) / (highest - lowest) * (BOTTOM - TOP), 1)

    def points(scores: np.ndarray) -> list[str]:
        return [f"{LEFT + i * STEP:g},{height(float(score)):g}" for i, score in enumerate(scores)]

    drawing = runpy.run_path(str(HERE / "concepts.py"))
    colours, text = drawing["COLOURS"], drawing["_text"]
    results = load_results(RESULTS / f"{file}.csv")
    first, rows = results.tasks[0], results.test_rows[results.tasks[0]]
    stages = [f"after {task}" for task in results.tasks]
    seeds = counted(len(results.units[results.strategies[0]]), "seed")
    parts = [
        text(LEFT, 24, f"Accuracy on {first}, the first of {len(results.tasks)} tasks, in %", "text", anchor="start"),
        text(LEFT, 41, f"mean and range over {seeds}, {rows:,} test rows", "faint", anchor="start", size=11),
    ]
    for level in range(50, highest + 1, 10):
        path = f"M{LEFT} {height(level):g}h{STEP * (len(stages) - 1)}"
        parts.append(f'<path d="{path}" class="line" stroke="{colours["line"][0]}"/>')
        parts.append(text(LEFT - 8, height(level) + 4, str(level), "faint", anchor="end", size=11))
    for i, stage in enumerate(stages):
        parts.append(text(LEFT + i * STEP, BOTTOM + 22, stage, "faint", size=12))
    dark = ""
    for label in results.strategies:
        if label not in LINES:
            continue
        called, before, after = LINES[label]
        scores = 100 * results.matrices(label)[:, 1:, 0]
        band = [*points(scores.max(0)), *reversed(points(scores.min(0)))]
        parts.append(f'<polygon points="{" ".join(band)}" class="{label}-fill" fill="{before}" opacity="0.18"/>')
        line = " ".join(points(scores.mean(0)))
        parts.append(f'<polyline points="{line}" class="{label}" fill="none" stroke="{before}" stroke-width="2.5"/>')
        before_last, end = scores.mean(0)[-2:]
        place = height(end) + (18 if before_last - end > 10 else -10)  # below a line that falls
        words = text(LEFT + (len(stages) - 1) * STEP, place, f"{called}: {end:.1f}", "text", anchor="end")
        parts.append(words.replace('class="text"', f'class="{label}-fill"').replace(colours["text"][0], before))
        dark += f".{label}{{stroke:{after}}}.{label}-fill{{fill:{after}}}"
    return str(drawing["_page"](WIDTH, HEIGHT, parts, dark))


if __name__ == "__main__":
    for name in PICTURES:
        (HERE / f"{name}.svg").write_text(picture(name), encoding="utf-8")
