"""The outcome of a comparison in a few sentences, with nothing that the runs do not show."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from forgetfree.display import PERCENT, Scale
from forgetfree.results.comparison import Comparison, StrategyRuns
from forgetfree.results.evidence import student
from forgetfree.results.metrics import scale_of, sign
from forgetfree.results.report.page import size

NAIVE, OURS, REFERENCE = "continual-ft", "grafting-continual", "fine-tune"
#: They see the data of other tasks at once, or keep a model for each task: nothing to be forgotten, or no stream.
_REFERENCES = (REFERENCE, "joint", "cumulative")


def headline(comparison: Comparison) -> str:
    """Return what the comparison says of forgetting, of scores at the end, and of what is not known."""
    if not comparison.strategies:
        return "No strategy has finished, so there is nothing to compare."
    return " ".join(_sentences(comparison))


def _sentences(comparison: Comparison) -> Iterator[str]:
    scale, naive = scale_of(*comparison.metric), _first(comparison, NAIVE)
    ours = _first(comparison, OURS) or _best_of_the_others(comparison)
    if len(comparison.tasks) == 1:
        yield "The stream has one task, so nothing can be forgotten."
    else:
        parts = [_lost(entry, scale) for entry in (naive, ours) if entry]
        if parts:
            text = ", ".join(parts)
            yield f"{_capital(text) if naive else text}{_price(ours, len(comparison.tasks))}."
        if ours and not naive:
            yield f"{NAIVE} is not among the strategies: what naive training would have lost is not known."
    if naive and ours:
        yield _difference(ours, naive, scale)
    names = [entry.runs[0].strategy for entry in comparison.strategies]
    if any(names.count(entry.runs[0].strategy) > 1 for entry in (naive, ours) if entry):
        yield "These sentences tell the first set-up of a strategy; the tables have all."
    constant = (
        comparison.constant
        and f"a constant answer scores {scale.with_unit(float(np.mean(comparison.constant)))} on average"
    )
    if reference := _first(comparison, REFERENCE):
        score = f"A model for each task ({reference.label}) scores {scale.with_unit(_average(reference))} on average"
        yield f"{score}; {constant}." if constant else f"{score}."
    elif constant:
        yield f"{_capital(constant)}."


def _first(comparison: Comparison, strategy: str) -> StrategyRuns | None:
    """Return the first row of a strategy; where it has several, its label says which it is."""
    return next((entry for entry in comparison.strategies if entry.runs[0].strategy == strategy), None)


def _best_of_the_others(comparison: Comparison) -> StrategyRuns | None:
    others = [e for e in comparison.strategies if e.runs[0].strategy not in (NAIVE, *_REFERENCES)]
    better = sign(*comparison.metric)  # 0: the first, for such averages have no best
    return max(others, key=lambda entry: better * _average(entry), default=None)


def _lost(entry: StrategyRuns, scale: Scale) -> str:
    """Say how much of its score a strategy lost on average, and how sure that is."""
    values = [run.forgetting for run in entry.runs]
    mean, low, high = student(values)
    name = f"naive fine-tuning ({entry.label})" if entry.runs[0].strategy == NAIVE else entry.label
    lost = f"{name} {'gained' if scale.text(mean).startswith('-') else 'lost'} {_points(abs(mean), scale)} on average"
    if not any(values):
        return f"{lost}{', with every seed' if len(values) > 1 else ''}"
    if len(values) == 1:
        return f"{lost} (one seed)"
    if math.isnan(low):
        return f"{lost} (with each of {len(values)} seeds)"
    undecided = ": undecided whether it forgot" if low <= 0 <= high else ""
    interval = f"95 % interval of the loss {scale.text(low)} to {scale.text(high)}"
    return f"{lost} ({interval} over {len(values)} seeds{undecided})"


def _price(entry: StrategyRuns | None, tasks: int) -> str:
    """Say what the strategy named last keeps per task."""
    kept = [run.memory for run in entry.runs] if entry else []
    return f", at {size(float(np.mean([each[-1] for each in kept])) / tasks)} a task" if kept and all(kept) else ""


def _difference(ours: StrategyRuns, naive: StrategyRuns, scale: Scale) -> str:
    """Compare the averages at the end, in pairs of the same seed."""
    scores = f"At the end {ours.label} scores {scale.with_unit(_average(ours))} on average, {naive.label} "
    scores += scale.with_unit(_average(naive))
    other = {run.seed: run.average for run in naive.runs}
    pairs = [run.average - other[run.seed] for run in ours.runs if run.seed in other]
    if not pairs:
        return f"{scores}; they have no seed in common."
    mean, low, high = student(pairs)
    if len(pairs) == 1:
        return f"{scores}: one seed in common, so what other seeds would give is not known."
    if math.isnan(low):
        return f"{scores}, with the same difference for each of {len(pairs)} seeds."
    verdict = "undecided" if low <= 0 <= high else "higher" if mean > 0 else "lower"
    ends = f"{scale.text(low)} to {scale.text(high)}{' points' if scale == PERCENT else ''}"
    interval = f"95 % interval of the difference {ends} over {len(pairs)} seeds"
    return f"{scores}: {verdict} ({interval})."


def _average(entry: StrategyRuns) -> float:
    return float(np.mean([run.average for run in entry.runs]))


def _points(difference: float, scale: Scale) -> str:
    """Return a difference of scores; one of percentages in points."""
    text = scale.text(difference)
    return f"{text} point{'' if text == '1.0' else 's'}" if scale == PERCENT else scale.with_unit(difference)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
