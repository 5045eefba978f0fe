"""The reports of a graft and of a sweep: how its models score and where its region lies; its trials, the best first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from forgetfree.display import NULL, PERCENT, counted
from forgetfree.results.metrics import scale_of, sign
from forgetfree.results.records import CONSTANT, GraftResults, GraftRow, SweepResults
from forgetfree.results.report.page import Page, Table, cell, percent, titled


def lay_out_graft(results: GraftResults) -> Page:
    """Return the report of a graft."""
    return Page(
        f"forgetfree graft: {results.task}",
        tuple(_notes(results)),
        (_scores(results), _places(results, "layers", "layer"), _places(results, "kinds", "kind")),
    )


def _scores(results: GraftResults) -> Table:
    rows: dict[tuple[str, float | None], list[GraftRow]] = {}
    scale = scale_of(results.metric)
    shows = {"score": scale.text, "ece": percent, "agreement": percent}
    for row in results.rows:
        rows.setdefault((row.model, row.sparsity), []).append(row)
    body = []
    for (model, sparsity), those in rows.items():
        name = model if sparsity is None else f"{model}, sparsity {sparsity:g}"
        entries = cell((row.entries for row in those), _count)
        body.append(
            (
                name,
                entries,
                *(cell((getattr(row, key) for row in those), show) for key, show in shows.items()),
            )
        )
    if results.floors:
        body.append((CONSTANT, NULL, scale.text(results.floors.constant), NULL, NULL))
    unit = "in %; ECE in percentage points" if scale == PERCENT else "ECE in percentage points, agreement in %"
    return Table(
        titled(f"On {counted(results.data.test_rows, f'{results.evaluated_on} row')}", unit),
        ("model", "entries", results.metric, "ECE", "agreement with fine-tuned"),
        tuple(body),
    )


def _places(results: GraftResults, key: str, word: str) -> Table:
    """Return the share of a region's entries in every layer, or of every kind."""
    regions: dict[float, list[Mapping[str, float]]] = {}
    for region in results.regions:
        regions.setdefault(region.sparsity, []).append(getattr(region, key))
    whole: Mapping[str, float] = getattr(results.space, key)
    return Table(
        f"Where the region lies, by {word} (share of its entries in %{', mean over seeds' if results.seeds > 1 else ''})",
        (word, *(f"sparsity {sparsity:g}" for sparsity in regions), "all graftable"),
        tuple(
            (
                name,
                *(percent(_mean_share(those, name)) for those in regions.values()),
                percent(_mean_share([whole], name)),
            )
            for name in whole
        ),
    )


def _mean_share(counts: list[Mapping[str, float]], name: str) -> float:
    return sum(each[name] / max(1, sum(each.values())) for each in counts) / len(counts)


def _notes(results: GraftResults) -> Iterator[str]:
    model, data, tuned = results.model, results.data, results.fine_tuned
    setup = {
        "model": model.name,
        "readout": model.readout,
        "fine-tuned": tuned and tuned.architecture,
        "base": results.base,
        "shots": f"{data.shots} or fewer" if data.or_fewer else data.shots,
        "steps": data.steps,
    }
    yield f"Set-up: {', '.join(f'{key} {value}' for key, value in setup.items() if value is not None)}."
    if results.seeds > 1:
        yield f"Cells are mean (standard deviation, n - 1) over {results.seeds} seeds."
    if tuned and (left_out := tuned.left_out):
        yield (
            f"{len(left_out)} tensor{'s' if len(left_out) > 1 else ''} of the fine-tuned model that cannot be grafted differ "
            f"from the pre-trained one's, e.g. {left_out[0]}: a graft does not carry them."
        )


def _count(number: float) -> str:
    return f"{number:,.0f}"


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
