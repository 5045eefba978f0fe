"""How far runs are from fine-tuned models that stand in another directory: intransigence, and agreement.

A run is compared with `fine-tune` of its own directory when its results are made. Here, those that lack it there take it from
the directories beside them, if stream, model, data and seed are the same, and all options that both have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from forgetfree.results.learning_matrix import summarize
from forgetfree.results.run_results import REFERENCE, Run

if TYPE_CHECKING:
    from forgetfree.results.comparison import Comparison, StrategyRuns
    from forgetfree.results.unit_folder import Units


def with_intransigence(entries: Iterable[StrategyRuns]) -> tuple[StrategyRuns, ...]:
    """Return the runs of strategies; those without intransigence have it, if a reference stands beside them."""
    entries = tuple(entries)

    def filled(entry: StrategyRuns, run: Run) -> Run:
        found = None if run.summary.intransigence is not None else _reference(entry, run, entries)
        if found is None:
            return run
        _, its = found
        learned = np.diagonal(its.learning_matrix, offset=-1)
        summary: Any = summarize(run.matrix, np.array(run.ece, dtype=np.float64), learned, run.metric)  # type: ignore[arg-type]
        return run.with_facts(summary=run.summary.with_facts(intransigence=summary["intransigence"]))

    return tuple(replace(entry, runs=tuple(filled(entry, run) for run in entry.runs)) for entry in entries)


def with_agreement(comparison: Comparison, units: Units) -> Comparison:
    """Return the comparison; runs without agreement have it, if a reference stands beside them and answers of both are kept.

    Args:
        comparison: what `merge` returned.
        units: the files of its units; empty, or without answers, where only scores are known.
    """
    answers = {
        (entry.label, run.seed): unit.answers
        for entry in comparison.strategies
        for run, unit in zip(entry.runs, units.get(entry.label, ()), strict=False)
    }

    def filled(entry: StrategyRuns, run: Run) -> Run:
        found = None if run.agreement else _reference(entry, run, comparison.strategies)
        if found is None:
            return run
        own, others = (answers.get((each.label, run.seed), {}) for each in (entry, found[0]))
        pairs = [(own[task], others[task]) for task in comparison.tasks if task in own and task in others]
        if len(pairs) < len(comparison.tasks) or not all(np.array_equal(a.labels, b.labels) for a, b in pairs):
            return run
        return run.with_facts(agreement=[a.agreement(b) for a, b in pairs])

    entries = (replace(entry, runs=tuple(filled(entry, run) for run in entry.runs)) for entry in comparison.strategies)
    return replace(comparison, strategies=tuple(entries))


def _reference(entry: StrategyRuns, run: Run, entries: Iterable[StrategyRuns]) -> tuple[StrategyRuns, Run] | None:
    """Return the fine-tuned models that a run is compared with, and their row, if they stand in another directory alone."""
    those = [each for each in entries if each.runs[0].strategy == REFERENCE]
    found = [(each, its) for each in those for its in each.runs if its.seed == run.seed]
    if run.strategy == REFERENCE or any(its.source == run.source for _, its in found):
        return None
    return next(((each, its) for each, its in found if _agree(entry, each)), None)


def _agree(entry: StrategyRuns, other: StrategyRuns) -> bool:
    both = entry.options.keys() & other.options.keys()
    return all(entry.options[key] == other.options[key] for key in both)
