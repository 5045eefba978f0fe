"""The figures of a run: small panels that stand beside each other on a wide page and below each other on a phone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from forgetfree.display import PERCENT, Scale
from forgetfree.results.metrics import reliability
from forgetfree.results.report.figures import (
    FAINT,
    LINES,
    NAMED,
    Section,
    canvas,
    course,
    key_to,
    picture,
    shaded,
    short,
    styles,
)
from forgetfree.results.report.page import percent
from forgetfree.results.table import Results

Floats = npt.NDArray[np.float64]


def sections_of(results: Results) -> list[Section]:
    """Return the figures of results; a section without any is left out."""
    if not results.strategies:
        return []
    sections = (_matrices(results), _curves(results), _calibration(results))
    return [section for section in sections if section.pictures]


# ---- over the stream --------------------------------------------------------------------------------------


def _matrices(results: Results) -> Section:
    tasks, pictures = _names(results.tasks), []
    means = np.array([results.matrices(label).mean(axis=0) for label in results.strategies])
    gains = means * results.signs
    worst, best = np.nanmin(gains, axis=(0, 1)), np.nanmax(gains, axis=(0, 1))
    shades = (gains - worst) / np.where(best > worst, best - worst, 1)
    shares = [scale == PERCENT for scale in results.scales]
    digits = "{:.0f}" if all(shares) else "{:.3g}"
    for label, mean, shade in zip(results.strategies, means, shades, strict=True):
        says = f"{results.scale.with_unit(float(mean[-1].mean()))} on average after the last task"
        shown = mean * [scale.factor for scale in results.scales]
        pictures.append(shaded(shown, shade, label, says, ("before", *tasks), tasks, "after", "score on", digits))
    unit = "" if not any(shares) else " in %" if all(shares) else " in % where they are shares"
    text = "A column is a task, a row is what was learned last. Read a column downwards: it lights up when the task is "
    text += "learned, and darkens where it is forgotten. From dark, the worst score of all strategies on the task, to light, "
    text += f"the best. Scores{unit}, {_seeds(results)}{_rows(results)}."
    text += " Tasks are numbered as they stand in the tables." * (len(tasks) > NAMED)
    return Section("matrix", "Scores after each task", text, pictures)


def _curves(results: Results) -> Section:
    """Return a panel for each task; of a long stream one for the first task, and one for the mean of all so far."""
    labels, tasks, few = results.strategies, results.tasks, len(results.tasks) <= NAMED
    matrices = [results.matrices(label) for label in labels]
    panels: list[tuple[str, Scale, list[Floats]]]
    if few:
        panels = [
            (task, scale, [runs[:, :, i] for runs in matrices])
            for i, (task, scale) in enumerate(zip(tasks, results.scales, strict=True))
        ]
        text = "A panel is a task: its score before training and after each task of the stream"
    else:
        first = [runs[:, :, 0] for runs in matrices]
        panels = [
            (f"{tasks[0]} (the first task)", results.scales[0], first),
            ("tasks so far", results.scale, [_so_far(runs) for runs in matrices]),
        ]
        text = "The first task, and the mean of all tasks learned so far, after each task of the stream"
    shares = [floor for floor, scale in zip(results.constant or (), results.scales, strict=False) if scale == PERCENT]
    pictures = [key_to(labels, "scores")]
    for number, (title, scale, curves) in enumerate(panels):
        floor = results.constant[number] if few and results.constant else np.nan
        with canvas() as ax:
            for scores, style in zip(curves, styles(len(labels)), strict=True):
                style |= {} if few else {"marker": ""}
                course(ax, scale.factor * scores, style, range_of_seeds=len(labels) <= len(LINES))
            ax.axhline(scale.factor * floor, color=FAINT, linewidth=1, linestyle=(0, (1, 2)))  # NaN draws nothing
            if few:
                ax.axvline(number + 1, color=FAINT, linewidth=0.8)
                ax.set_xticks(range(len(tasks) + 1), ["before", *_names(tasks)], rotation=30, ha="right")
            else:
                ax.set_xlabel("tasks learned")
            ax.set_ylabel(scale.titled("score"))
            if scale == PERCENT:  # so that a fall looks alike in all panels
                drawn = [scores for _, its, of_panel in panels if its == PERCENT for scores in of_panel]
                ax.set_ylim(*_range([*drawn, np.array(shares if few else [])]))
        at_end = (f"{label} {scale.with_unit(s[:, -1].mean())}" for label, s in zip(labels, curves, strict=True))
        pictures.append(picture(ax, title, f"at the end {', '.join(at_end)}"))
    text += f". Mean over seeds; shaded: from the worst to the best seed; {_seeds(results)}{_rows(results)}."
    text += " Upright line: here the task is learned." * few
    text += " Dotted: a constant answer." * (results.constant is not None and few)
    return Section("curves", "Tasks over the stream", text, pictures)


def _range(curves: Sequence[Floats]) -> tuple[float, float]:
    """Return the ends of an axis of percentages."""
    low, high = (100 * end(np.concatenate([scores.ravel() for scores in curves])) for end in (np.nanmin, np.nanmax))
    margin = 0.05 * (high - low) + 1
    return low - margin, high + margin


def _so_far(runs: Floats) -> Floats:
    """Return the mean over the tasks learned so far, per run and stage; before the first it is unknown."""
    means = [np.full(len(runs), np.nan), *(runs[:, stage, :stage].mean(1) for stage in range(1, runs.shape[1]))]
    return np.stack(means, axis=1)


# ---- at the end -------------------------------------------------------------------------------------------


def _calibration(results: Results) -> Section:
    pictures = []
    for label, runs in results.units.items():
        answers = [run.probabilities for run in runs.values()]
        if not all(answers):
            continue
        diagrams = [reliability(each.logits, each.labels) for of_tasks in answers for each in of_tasks.values()]
        ece = percent(float(np.mean([each.ece for each in diagrams])))
        places = np.concatenate([each.places for each in diagrams])
        counts = np.bincount(places)
        filled = counts > 0
        hits = np.bincount(places, np.concatenate([each.right for each in diagrams]))
        sure = np.bincount(places, np.concatenate([each.sure for each in diagrams]))
        with canvas(height=2.9) as ax:
            ax.plot([0, 100], [0, 100], color=FAINT, linewidth=1, linestyle=(0, (1, 2)))
            x, y = 100 * sure[filled] / counts[filled], 100 * hits[filled] / counts[filled]
            ax.plot(x, y, color=LINES[0], linewidth=1)
            ax.scatter(x, y, s=12 + 150 * counts[filled] / counts.sum(), color=LINES[0], alpha=0.75, linewidth=0)
            ax.set(xlim=(0, 102), ylim=(0, 102), xlabel="confidence (%)", ylabel="accuracy (%)")
        caption = f"n = {len(places):,} answers; mean ECE {ece}"
        pictures.append(picture(ax, label, f"mean ECE {ece} points", caption))
    text = "What confidence is worth: answers of all tasks with probabilities, and of all seeds, after the last task, in 15 "
    text += (
        "bins of confidence. On the dotted line, a model is right as often as it says; below it, it is too sure. The "
    )
    text += "larger a mark, the more answers it holds."
    return Section("reliability", "Reliability", text, pictures)


# ---- words ----------------------------------------------------------------------------------------------


def _names(tasks: Sequence[str]) -> list[str]:
    """Return the names of tasks; of a long stream their numbers."""
    if len(tasks) > NAMED:
        return [str(number) for number in range(1, len(tasks) + 1)]
    return [short(task, 24) for task in tasks]


def _seeds(results: Results) -> str:
    counts = {len(runs) for runs in results.units.values()}
    if counts == {1}:
        return "one seed"
    return f"mean over {counts.pop()} seeds" if len(counts) == 1 else f"mean over {min(counts)} to {max(counts)} seeds"


def _rows(results: Results) -> str:
    counts = sorted(set(results.test_rows.values()))
    if not counts:
        return ""
    return f"; {counts[0]:,}{f' to {counts[-1]:,}' if len(counts) > 1 else ''} test rows a task"
