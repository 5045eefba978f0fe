"""The report of a graft: how its models score and where its region lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from forgetfree.display import NULL, PERCENT, counted
from forgetfree.results.metrics import scale_of
from forgetfree.results.records import CONSTANT, GraftResults, GraftRow
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
