"""The figures of a run: small panels that stand beside each other on a wide page and below each other on a phone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forgetfree.display import PERCENT, Scale, counted
from forgetfree.results.calibration import reliability
from forgetfree.results.evidence import forgetting
from forgetfree.results.report.figures import (
    FAINT,
    LINES,
    NAMED,
    Section,
    canvas,
    course,
    key_to,
    picture,
    scale_of_costs,
    shaded,
    short,
    styles,
)
from forgetfree.results.report.page import percent, size
from forgetfree.results.runs import CONSTANT
from forgetfree.results.table import Results, mean_of_known

#: The matrices of so many strategies stand beside each other, and are the first that a reader sees.
FEW = 4
Json = dict[str, Any]
Floats = npt.NDArray[np.float64]
_PHASES = {"fine_tune": "fine-tuning", "localize": "localizing", "train": "training", "evaluate": "evaluating"}


def sections_of(results: Results) -> list[Section]:
    """Return the figures of a results; a section without any is left out."""
    if not results.entries:
        return []
    curves, matrices = _curves(results), _matrices(results)
    few = len(results.entries) <= FEW
    sections = (
        *((matrices, curves) if few else (curves, matrices)),
        *(_forgetting(results), _costs(results)),
        *(_calibration(results), _places(results), _losses(results)),
    )
    return [section for section in sections if section.pictures]


# ---- over the stream --------------------------------------------------------------------------------------


def _matrices(results: Results) -> Section:
    tasks = _names(results.tasks)
    pictures, signs = [], results.signs
    average, scales = results.scale, results.scales
    means = np.array([np.mean([run.learning_matrix for run in e.runs], axis=0) for e in results.entries])
    factors, shares = np.array([scale.factor for scale in scales]), [scale == PERCENT for scale in scales]
    low, high = factors * _ends(means, results)
    floors = _floors(results) if len(tasks) <= NAMED else {}
    below = [np.full(len(tasks), np.nan), *(factors * scores for scores in floors.values())] if floors else []
    digits, caption = (
        ("{:.0f}", "") if all(shares) else ("{:.3g}", "From dark, the lowest score, to light, the highest.")
    )
    if results.constant:
        caption = "" if floors else "From dark, a constant answer, to light, the best score of the column."
    for entry, mean in zip(results.entries, factors * means, strict=True):
        lost = f"{average.with_unit(float(np.nanmean(mean[-1])) / average.factor)} on average after the last task"
        names = ("before", *tasks, *([""] if floors else []), *floors), tasks, "after", "score on"
        pictures.append(shaded(np.vstack([mean, *below]), entry.label, lost, *names, (low, high), digits, caption))
    text = "A column is a task, a row is what was learned last. Read a column downwards: it lights up when the task is learned"
    text += ", and darkens where it is forgotten"
    text += "; where a lower score is better, the other way round" * (-1 in signs)
    if results.constant:
        text += ". Darkest: no better than a constant answer; lightest: the best score of the column"
    text += ". The lowest rows are floors: scores without fine-tuning" * bool(floors)
    unit = "" if not any(shares) else " in %" if all(shares) else " in % where they are shares"
    text += f". Scores{unit}, {_seeds(results)}{_rows(results)}."
    text += " Each metric has shades of its own." * (
        not all(shares) and len({*results.metric}) > 1 and not results.constant
    )
    text += " Tasks are numbered as they stand in the tables." * (len(tasks) > NAMED)
    return Section("matrix", "Scores after each task", text, pictures)


def _floors(results: Results) -> dict[str, Floats]:
    """Return the scores that take no fine-tuning, below the matrix: the constant answer's, and the best of each task."""
    if not results.constant:
        return {}
    constant, best = np.array(results.constant), np.array([score for _, score in results.best_floors])
    return {CONSTANT: constant} | ({"best floor": best} if results.learned_floors else {})


def _ends(means: Floats, results: Results) -> Floats:
    """Return for each task the scores of the darkest and of the lightest shade, shape (2, T).

    Where a constant answer is known and higher is better, they are its score and the best of the column; else one pair for each
    metric: 0 and 1 of shares, unless there are scores beyond, or the lowest and the highest score.
    """
    ends = np.empty((2, len(results.tasks)))
    for metric, scale in zip(results.metric, results.scales, strict=True):
        own = [name == metric for name in results.metric]
        least, most = (0.0, 1.0) if scale == PERCENT else (np.inf, -np.inf)
        ends[:, own] = [[min(least, np.nanmin(means[..., own]))], [max(most, np.nanmax(means[..., own]))]]
    if results.constant:
        higher, floors = np.array(results.signs) > 0, np.array([score for _, score in results.best_floors])
        best = np.maximum(floors, np.nanmax(means, axis=(0, 1)))
        ends[:, higher] = np.stack([np.array(results.constant), best])[:, higher]
    return ends


class _Panel(NamedTuple):
    """A panel of curves.

    Attributes:
        title: its heading.
        scores: of the runs of each strategy (seeds, stages).
        scale: how they are shown.
        metrics: what they are scored by.
        floor: the score of a constant answer, if it is drawn.
    """

    title: str
    scores: Sequence[Floats]
    scale: Scale
    metrics: Sequence[str]
    floor: float = np.nan


def _curves(results: Results) -> Section:
    entries, tasks, few = results.entries, results.tasks, len(results.tasks) <= NAMED
    metrics, scales = results.metric, results.scales
    matrices = [np.array([run.learning_matrix for run in entry.runs]) for entry in entries]
    if few:
        floors = results.constant or [np.nan] * len(tasks)
        panels = [
            _Panel(task, [runs[:, :, i] for runs in matrices], scale, [metric], floor)
            for i, (task, scale, metric, floor) in enumerate(zip(tasks, scales, metrics, floors, strict=True))
        ]
        text = "A panel is a task: its score before training and after each task of the stream"
    else:
        first = [runs[:, :, 0] for runs in matrices]
        panels = [
            _Panel(f"{tasks[0]} (the first task)", first, scales[0], metrics[:1]),
            _Panel("tasks so far", [_so_far(runs) for runs in matrices], results.scale, metrics),
        ]
        text = "The first task, and the mean of all tasks learned so far, after each task of the stream"
    pictures = [key_to([entry.label for entry in entries], "scores")]
    for number, panel in enumerate(panels):
        scale = panel.scale
        with canvas() as ax:
            ax.set_ylim(*_range(panel, panels))
            for scores, style in zip(panel.scores, styles(len(entries)), strict=True):
                style |= {} if few else {"marker": ""}
                course(ax, scale.factor * scores, style, range_of_seeds=len(entries) <= len(LINES))
            if not np.isnan(panel.floor):
                ax.axhline(scale.factor * panel.floor, color=FAINT, linewidth=1, linestyle=(0, (1, 2)))
            if few:
                ax.axvline(number + 1, color=FAINT, linewidth=0.8)
                ax.set_xticks(range(len(tasks) + 1), ["before", *_names(tasks)], rotation=30, ha="right")
            else:
                ax.set_xlabel("tasks learned")
            ax.set_ylabel(scale.titled("score"))
        at_end = (scale.with_unit(scores[:, -1].mean()) for scores in panel.scores)
        ends = (f"{entry.label} {score}" for entry, score in zip(entries, at_end, strict=True))
        pictures.append(picture(ax, panel.title, f"at the end {', '.join(ends)}"))
    text += f". Mean over seeds; shaded: from the worst to the best seed; {_seeds(results)}{_rows(results)}."
    text += " Upright line: here the task is learned." * few
    text += " Dotted: a constant answer." * (results.constant is not None and few)
    return Section("curves", "Tasks over the stream", text, pictures)


def _range(panel: _Panel, panels: Sequence[_Panel]) -> tuple[float, float]:
    """Return the ends of the axis of a panel: those of percentages, or of one metric, so that a fall looks alike in them."""
    alike = [each for each in panels if PERCENT == each.scale == panel.scale or each.metrics == panel.metrics]
    drawn = np.concatenate([np.append(scores, each.floor) for each in alike for scores in each.scores])
    low, high = panel.scale.factor * np.nanmin(drawn), panel.scale.factor * np.nanmax(drawn)
    margin = 0.05 * (high - low) + panel.scale.factor / 100
    return low - margin, high + margin


def _so_far(runs: Floats) -> Floats:
    """Return the mean over the tasks learned so far, per run and stage; before the first it is unknown."""
    means = [np.full(len(runs), np.nan), *(runs[:, stage, :stage].mean(1) for stage in range(1, runs.shape[1]))]
    return np.stack(means, axis=1)


# ---- at the end -------------------------------------------------------------------------------------------


def _forgetting(results: Results) -> Section:
    entries, scale = results.entries, results.scale
    pictures, many = [], any(len(entry.runs) > 1 for entry in entries)
    if len(results.tasks) > 1:
        with canvas(height=0.9 + 0.24 * len(entries)) as ax:
            says = []
            for place, (entry, style) in enumerate(zip(entries, styles(len(entries)), strict=True)):
                values = [scale.factor * run.forgetting for run in entry.runs]
                loss = forgetting(entry.runs, results.test_rows)
                mean, low, high = (scale.factor * end for end in (loss.value, loss.low, loss.high))
                ax.plot([low, high], [place, place], color=style["color"], solid_capstyle="butt")  # NaN draws nothing
                ax.plot(values, [place] * len(values), "|", color=style["color"], markersize=9)
                ax.plot(mean, place, marker=style["marker"], color=style["color"])
                says.append(f"{entry.label} {scale.text(mean / scale.factor)}")
            ax.axvline(0, color=FAINT, linewidth=1)
            left, right = ax.get_xlim()
            least = scale.factor / 100  # less than a point is no picture
            ax.set_xlim(min(left, -least), max(right, least))
            ax.set_yticks(range(len(entries)), [short(f"{e.label}, n={len(e.runs)}", 30) for e in entries])
            ax.set_ylim(len(entries) - 0.4, -0.6)
            ax.set_xlabel("forgetting (points)" if scale == PERCENT else scale.titled("forgetting"))
        pictures.append(picture(ax, "Forgetting at the end", ", ".join(says)))
    text = "How far tasks are below their best score since they were learned; the mean over all tasks but the last. "
    if many:
        text += "Mark: mean over n seeds. Bar: 95 % interval for other seeds and test rows of the same tasks; none "
        text += "where nothing varies. Strokes: the seeds"
    else:
        text += "One seed: there is no interval, and how far another seed would differ is not known"
    return Section("forgetting", "Forgetting", f"{text}{_rows(results)}.", pictures)


def _costs(results: Results) -> Section:
    entries, tasks, scale = results.entries, len(results.tasks), results.scale
    pictures = []
    for title, label, show in (
        ("Score against time", "seconds of all phases", "{:,.0f}".format),
        ("Score against memory", "kept per task", size),
    ):
        with canvas() as ax:
            says, places = [], []
            for entry, style in zip(entries, styles(len(entries)), strict=True):
                ends = np.array([run.average for run in entry.runs])
                kept = [run.facts.memory[-1] / tasks if run.facts.memory else None for run in entry.runs]
                x = mean_of_known([run.facts.all_seconds for run in entry.runs] if show is not size else kept)
                if not x:
                    continue
                ax.plot([x, x], scale.factor * np.array([ends.min(), ends.max()]), color=style["color"], linewidth=1)
                ax.plot(x, scale.factor * ends.mean(), marker=style["marker"], color=style["color"], markersize=7)
                places.append(x)
                says.append(f"{entry.label} {scale.with_unit(ends.mean())} at {show(x)}")
            if results.constant:
                floor = scale.factor * float(np.mean(results.constant))
                ax.axhline(floor, color=FAINT, linewidth=1, linestyle=(0, (1, 2)))
            ax.margins(0.12)
            ax.set(xlabel=label, ylabel=scale.titled("average score"))
            if places:
                scale_of_costs(ax, places, show)
        if says:
            pictures.append(picture(ax, title, ", ".join(says)))
    better = {1: "up and to the left", -1: "down and to the left", 0: "to the left"}[results.sign]
    text = f"Average over tasks after the last one, against what it cost: better is {better}. Strokes: from the "
    text += f"worst to the best seed; {_seeds(results)}{_rows(results)}. Seconds are those of one machine; "
    text += "those of a fine-tuned model that another strategy or run made count, too, where they are known."
    text += " Dotted: a constant answer." * (results.constant is not None)
    key = [key_to([entry.label for entry in entries], "costs")] if pictures else []
    return Section("cost", "Scores against cost", text, key + pictures)


def _calibration(results: Results) -> Section:
    pictures = []
    for entry in results.entries:
        answers = [run.probabilities for run in entry.runs]
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
        pictures.append(picture(ax, entry.label, f"mean ECE {ece} points", caption))
    lacking = any(np.isnan(entry.runs[0].ece[-1]).any() for entry in results.entries)
    of = "all tasks with probabilities, and of all seeds," if lacking else "all tasks and seeds"
    text = f"What confidence is worth: answers of {of} after the last task, in 15 bins of confidence. On the "
    text += "dotted line, a model is right as often as it says; below it, it is too sure. The larger a mark, the more "
    text += "answers it holds."
    return Section("reliability", "Reliability", text, pictures)


# ---- ledgers ----------------------------------------------------------------------------------------------


def _places(results: Results) -> Section:
    pictures = []
    for entry in results.entries:
        ledgers = [run.facts.ledger for run in entry.runs if run.facts.ledger and run.facts.ledger.places]
        if len(ledgers) < len(entry.runs):
            continue
        alone = any(ledger.composition in ("alone", "auto") for ledger in ledgers)
        every = [place for ledger in ledgers for place in ledger.places or ()]
        layers, kinds = (list(dict.fromkeys(getattr(place, of) for place in every)) for of in ("layer", "kind"))
        share = np.full((len(layers), len(kinds)), np.nan)
        for place in every:
            row, column = layers.index(place.layer), kinds.index(place.kind)
            owned = max(place.owned) if alone else sum(place.owned)  # regions that stand alone may overlap
            share[row, column] = np.nan_to_num(share[row, column]) + 100 * owned / place.entries / len(ledgers)
        most = np.unravel_index(np.nanargmax(share), share.shape)
        says = f"most, {share[most]:.3g} % of the entries, in {layers[most[0]]}, {kinds[most[1]]}"
        top = float(np.nanmax(share)) or 1.0
        who, what = ("the largest owner", "one task owns at most") if alone else ("any task", "some task owns")
        pictures.append(
            shaded(
                *(share, f"{entry.label}: owned by {who}", says, layers, kinds, "layer", "", (0, top), ""),
                caption=f"Share of a place's entries that {what}, from 0 to {top:.3g} %.",
            )
        )
    text = f"Which entries of the model the tasks own, by layer and kind of parameter; {_seeds(results)}."
    return Section("ownership", "Who owns what", text, pictures)


# ---- training ---------------------------------------------------------------------------------------------


def _losses(results: Results) -> Section:
    pictures = []
    for entry in results.entries:
        run, steps = entry.runs[0], entry.runs[0].losses
        pieces: dict[tuple[str, str], list[Json]] = {}
        for step in steps:
            pieces.setdefault((step["task"], step["phase"]), []).append(step)
        if not pieces:
            continue
        colours = dict(zip(_PHASES, LINES, strict=False))
        with canvas() as ax:
            x, named, task = 0.0, set[str](), ""
            for (name, phase), those in pieces.items():
                if name != task:
                    ax.axvline(x, color=FAINT, linewidth=0.6)
                    if len(results.tasks) <= 5:
                        label = f" {short(name, 36 // len(results.tasks))}"
                        ax.text(x, 1, label, transform=ax.get_xaxis_transform(), va="top", fontsize=8)
                    task = name
                label = "_" if phase in named else _PHASES.get(phase, phase)
                places, losses = [x + step["step"] for step in those], [step["loss"] for step in those]
                colour = colours.get(phase, LINES[-1])
                ax.plot(places, losses, color=colour, linewidth=1, label=label, marker="" if len(those) > 1 else ".")
                named.add(phase)
                x = places[-1]
            ax.set(xlabel="steps, task after task", ylabel="loss")
            ax.margins(y=0.15)
            ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
            if len(named) > 1:
                ax.figure.legend(loc="outside upper center", ncols=len(named), fontsize=8)
        last = pieces[next(reversed(pieces))][-1]["loss"]
        pictures.append(
            picture(ax, f"{entry.label}, seed {run.seed}", f"{counted(len(steps), 'step')}, the last loss {last:.3g}")
        )
    return Section("losses", "Losses", "The loss over the steps of training, of the first seed.", pictures)


# ---- words ----------------------------------------------------------------------------------------------


def _names(tasks: Sequence[str]) -> list[str]:
    return (
        [short(task, 24) for task in tasks]
        if len(tasks) <= NAMED
        else [str(number) for number in range(1, len(tasks) + 1)]
    )


def _seeds(results: Results) -> str:
    counts = {len(entry.runs) for entry in results.entries}
    if counts == {1}:
        return "one seed"
    return f"mean over {counts.pop()} seeds" if len(counts) == 1 else f"mean over {min(counts)} to {max(counts)} seeds"


def _rows(results: Results) -> str:
    counts = sorted(set(results.test_rows.values()))
    if not counts:
        return ""
    return f"; {counts[0]:,}{f' to {counts[-1]:,}' if len(counts) > 1 else ''} test rows a task"
