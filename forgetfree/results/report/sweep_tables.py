"""The report of a sweep: one table of its trials."""

from __future__ import annotations

from forgetfree.display import NULL, PERCENT
from forgetfree.results.metrics import scale_of, sign
from forgetfree.results.records import SweepResults
from forgetfree.results.report.page import Page, Table


def lay_out_sweep(results: SweepResults) -> Page:
    """Return the trials as a table, the best first, and which of them was chosen."""
    trials, chosen = results.trials, results.chosen
    # Where a lower score is better, trials hold its negative: the highest is the best.
    scale, direction = scale_of(*results.metric), sign(*results.metric) or 1
    order = sorted(trials, key=lambda trial: (trial.mean is None, -(trial.mean or 0), trial.trial))
    rows = tuple(
        (
            f"{trial.trial}{' (chosen)' * (trial.trial == chosen)}",
            trial.setting,
            NULL if trial.mean is None else scale.text(direction * trial.mean),
            NULL if trial.std is None else scale.text(trial.std),
            str(len(trial.scores)),
            NULL if trial.rows is None else f"{trial.rows:,}",
        )
        for trial in order
    )
    notes = [f"Validation rows decide; no test row was scored in a trial. Strategy: {results.strategy}."]
    if chosen is not None:
        notes.append(f"Chosen: {trials[chosen].setting}. Its scores on the test rows are in chosen/report.md.")
        equal = sum(trial.mean == trials[chosen].mean for trial in trials) - 1
        if equal:
            scored = trials[chosen].rows
            notes.append(
                f"{equal} other setting{'s' if equal > 1 else ''} scored the same, and the first was taken: "
                f"{'these' if scored is None else f'{scored:,}'} validation rows cannot tell them apart."
            )
    for trial in trials:
        notes += [f"Failed: trial {trial.trial} ({trial.setting}): {error}" for error in trial.errors]
    unit = f"{'in %, ' * (scale == PERCENT)}mean and deviation over seeds"
    title = f"Average over the tasks at the end of the stream, on validation rows ({unit})"
    header = ("trial", "setting", "average", "deviation", "seeds", "rows")
    return Page(f"forgetfree sweep: {results.stream}", tuple(notes), (Table(title, header, rows),))
