"""The sentences above the tables of a report: the set-up, rows and seeds, and what is left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from forgetfree.display import counted
from forgetfree.options import FLAGGED, typed
from forgetfree.results.records import Failed, Unfinished
from forgetfree.results.rendering import WIDE
from forgetfree.results.run_results import SECONDS_PER_TASK, Comparison
from forgetfree.results.unit_files import HISTORY, fault_of_answers, fault_of_file

#: What is told of the set-up in words; what else was set stands as it was typed.
_SETUP = ("model", "scenario", "evaluated_on", "readout", "shots", "steps", "sparsity", "starts", *FLAGGED)
#: What nobody typed.
_UNTOLD = ("parts",)


def notes(comparison: Comparison) -> Iterable[str]:
    """Yield them in order."""
    settings = {key: typed(value) for key, value in comparison.settings.items() if key not in _UNTOLD}
    if setup := [f"{key.replace('_', ' ')} {settings.pop(key)}" for key in _SETUP if key in settings]:
        yield f"Set-up: {', '.join(setup)}."
    if settings:
        yield f"Also set: {' '.join(f'{key}={value}' for key, value in settings.items())}."
    if rows := _test_rows(comparison.test_rows):
        yield rows
    seeds = [(entry.label, [run.seed for run in entry.runs]) for entry in comparison.strategies]
    if any(len(numbers) > 1 for _, numbers in seeds):
        yield "Cells are mean (standard deviation, n - 1) over seeds."
    if seeds and all(numbers == seeds[0][1] for _, numbers in seeds):
        yield f"Every strategy: {_count_seeds(seeds[0][1])}."
    elif seeds:
        yield "; ".join(f"{label}: {_count_seeds(numbers)}" for label, numbers in seeds) + "."
    tuned = [(entry.label, entry.runs[0].trials) for entry in comparison.strategies]
    if any(trials for _, trials in tuned):
        chosen = ", ".join(f"{label} {trials or 'not tuned'}" for label, trials in tuned)
        yield f"Settings that were tried on validation rows: {chosen}."
    for entry in comparison.strategies:
        for run in entry.runs:
            for claim in run.broken_claims:
                yield f"Broken claim of {entry.label}, seed {run.seed}: {claim}."
    for cut in comparison.unfinished:
        done = max(0, len(cut.matrix) - 1)
        yield (
            f"Unfinished and left out: {cut.strategy}, seed {cut.seed}, "
            f"after {done} of {counted(len(comparison.tasks), 'task')}{_place(cut)}."
        )
    for failed in comparison.failed:
        yield f"Failed and left out: {failed.strategy}, seed {failed.seed}{_place(failed)}: {failed.error}"


def left_out(comparison: Comparison) -> Iterable[str]:
    """Yield which answers, losses and times are not shown, and why."""
    for entry in comparison.strategies:
        for run in entry.runs:
            of_unit = f"of {entry.label}, seed {run.seed}, are left out"
            if fault := fault_of_answers(run, comparison.tasks):
                yield f"Answers {of_unit}: {fault}"
            for what, name in (("Losses", HISTORY), ("Seconds per task", SECONDS_PER_TASK)):
                if fault := fault_of_file(run, name):
                    yield f"{what} {of_unit}: {fault}"


def _place(run: Unfinished | Failed) -> str:
    return f" ({run.source})" if run.source else ""  # that of a run at its own end is clear


def _test_rows(rows: Mapping[str, int]) -> str:
    """Say how many rows each task is scored on."""
    counts = sorted(set(rows.values()))
    if not counts:
        return ""
    if len(counts) == 1:
        return f"Each task is scored on {counted(counts[0], 'row')}."
    if len(rows) > WIDE:
        return f"Tasks are scored on {counts[0]:,} to {counts[-1]:,} rows each."
    return f"Scored on rows: {', '.join(f'{task} {count:,}' for task, count in rows.items())}."


def _count_seeds(seeds: Sequence[int]) -> str:
    return f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''} ({', '.join(map(str, seeds))})"
