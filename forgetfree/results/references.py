"""How often runs answer like fine-tuned models that stand in another directory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from forgetfree.results.comparison import Comparison, StrategyRuns, reference_of
from forgetfree.results.run_results import Run
from forgetfree.results.unit_folder import Units


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
        found = None if run.agreement else reference_of(entry, run, comparison.strategies)
        if found is None:
            return run
        own, others = (answers.get((each.label, run.seed), {}) for each in (entry, found[0]))
        pairs = [(own[task], others[task]) for task in comparison.tasks if task in own and task in others]
        if len(pairs) < len(comparison.tasks) or not all(np.array_equal(a.labels, b.labels) for a, b in pairs):
            return run
        return run.with_facts(agreement=[a.agreement(b) for a, b in pairs])

    entries = (replace(entry, runs=tuple(filled(entry, run) for run in entry.runs)) for entry in comparison.strategies)
    return replace(comparison, strategies=tuple(entries))
