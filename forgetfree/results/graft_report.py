"""The tables of ``forgetfree graft``: how the models score, and where the region lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forgetfree.display import counted
from forgetfree.results.rendering import CONSTANT, NULL, Page, Table, cell, percent
from forgetfree.results.run_results import USUAL
from forgetfree.results.schema import check_graft
from forgetfree.results.stored import find_results, read_stored

Json = Mapping[str, Any]


def load_graft_results(path: Path) -> Json:
    """Read and check the results of a graft.

    Args:
        path: its directory, the results.json in it, or a CSV file that says the same.

    Raises:
        ReportError: the file is missing or is not what ``forgetfree graft`` writes; the message names file and key.
    """
    return read_stored(find_results(path), check_graft, "Restore it from a copy, or graft again with another --out.")


def lay_out_graft(results: Json) -> Page:
    """Return the report of a graft."""
    return Page(
        f"forgetfree graft: {results['task']}",
        tuple(_notes(results)),
        (_scores(results), _places(results, "layers", "layer"), _places(results, "kinds", "kind")),
    )


def _scores(results: Json) -> Table:
    rows: dict[tuple[str, float | None], list[Json]] = {}
    for row in results["rows"]:
        rows.setdefault((row["model"], row["sparsity"]), []).append(row)
    body = []
    for (model, sparsity), those in rows.items():
        name = model if sparsity is None else f"{model}, sparsity {sparsity:g}"
        entries = cell((row["entries"] for row in those), _count)
        body.append(
            (name, entries, *(cell((row[key] for row in those), percent) for key in ("score", "ece", "agreement")))
        )
    if floors := results.get("floors"):
        body.append((CONSTANT, NULL, percent(floors["constant"]), NULL, NULL))
    which = results.get("evaluated_on", USUAL["evaluated_on"])
    return Table(
        f"On {counted(results['data']['test_rows'], f'{which} row')} (in %; ECE in percentage points)",
        ("model", "entries", results["metric"], "ECE", "agreement with fine-tuned"),
        tuple(body),
    )


def _places(results: Json, key: str, word: str) -> Table:
    """Return the share of a region's entries in every layer, or of every kind."""
    regions: dict[float, list[Mapping[str, int]]] = {}
    for region in results["regions"]:
        regions.setdefault(region["sparsity"], []).append(region[key])
    whole: Mapping[str, int] = results["space"][key]
    return Table(
        f"Where the region lies, by {word} (share of its entries in %{', mean over seeds' if _seeds(results) > 1 else ''})",
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


def _mean_share(counts: list[Mapping[str, int]], name: str) -> float:
    return sum(each[name] / max(1, sum(each.values())) for each in counts) / len(counts)


def _notes(results: Json) -> Iterator[str]:
    model, data, given = results["model"], results["data"], results.get("fine_tuned")
    setup = {
        "model": model["name"],
        "readout": model["readout"],
        "fine-tuned": given and given["architecture"],
        "base": results["base"],
        "shots": f"{data['shots']} or fewer" if data.get("or_fewer") else data.get("shots"),
        "steps": data.get("steps"),
    }
    yield f"Set-up: {', '.join(f'{key} {value}' for key, value in setup.items() if value is not None)}."
    if _seeds(results) > 1:
        yield f"Cells are mean (standard deviation, n - 1) over {_seeds(results)} seeds."
    if given and (left_out := given["left_out"]):
        yield (
            f"{len(left_out)} tensor{'s' if len(left_out) > 1 else ''} of the fine-tuned model that cannot be grafted differ "
            f"from the pre-trained one's, e.g. {left_out[0]}: a graft does not carry them."
        )


def _seeds(results: Json) -> int:
    return len({row["seed"] for row in results["rows"]})


def _count(number: float) -> str:
    return f"{number:,.0f}"
