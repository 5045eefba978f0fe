"""Learned, most moved and random regions over sparsity. Figure 2 of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from matplotlib.figure import Figure

from benchmarks.paper.context import Context
from benchmarks.paper.experiment import Claim, Experiment, main
from benchmarks.paper.rows import (
    SCORE,
    Row,
    Unit,
    mean,
    pivot,
    scores_over_sparsity,
    share_of,
    verdict,
    with_constant,
)
from benchmarks.paper.setting import SMALL
from forgetfree.results.report.page import Table, percent

REGIONS = ("learned", "movement", "random")


class SparsityCurve(Experiment):
    """Graft regions of three kinds, of increasing size."""

    name: ClassVar = "sparsity-curve"
    paper: ClassVar = "figure 2"
    question: ClassVar = "Must the region be learned, or will the most moved entries do, or any?"
    setting: ClassVar = replace(SMALL, sparsities=(1e-4, 1e-3, 1e-2, 1e-1))

    def measure(self, context: Context, unit: Unit) -> list[Row]:
        """Measure each kind of region at each sparsity."""
        tuned = context.tuned(unit)
        rows = [
            tuned.row(tuned.fine_tuned, region="fine-tuned", sparsity=1.0),
            tuned.row(tuned.readout_alone, region="none", sparsity=0.0),
        ]
        sparsities = context.setting.sparsities
        for sparsity, learned in zip(sparsities, tuned.learned(*sparsities), strict=True):
            rows += [
                tuned.row(tuned.graft(learned), region="learned", sparsity=sparsity),
                tuned.row(tuned.graft(tuned.salient("movement", sparsity)), region="movement", sparsity=sparsity),
                tuned.row(tuned.graft(tuned.salient("random", sparsity)), region="random", sparsity=sparsity),
            ]
        return rows

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Return accuracy by task and region."""
        tables = []
        for region in REGIONS:
            columns: dict[str, tuple[str, dict[str, Any]]] = {"none": ("score", {"region": "none"})}
            columns |= {share_of(s): ("score", {"region": region, "sparsity": s}) for s in _sparsities(rows)}
            columns["fine-tuned"] = ("score", {"region": "fine-tuned"})
            tables.append(pivot(f"{SCORE}: {region} regions", rows, "task", with_constant(rows, columns)))
        return tables

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Return claims at the two lowest sparsities, and up to 1 %."""
        found = []
        for sparsity in _sparsities(rows)[:2]:
            learned, moved = (mean(rows, "score", region=kind, sparsity=sparsity) for kind in ("learned", "movement"))
            text = f"learned ≫ most moved at {share_of(sparsity)} (by 2 points at least)"
            ours = f"{percent(learned)} against {percent(moved)}"
            found.append(Claim(text, "—", ours, verdict(learned - moved > 0.02, learned, moved)))
        none, full = (mean(rows, "score", region=kind) for kind in ("none", "fine-tuned"))
        for sparsity in (s for s in _sparsities(rows) if s <= 1e-2):
            random = mean(rows, "score", region="random", sparsity=sparsity)
            text = f"random regions fail at {share_of(sparsity)} (close less than a quarter of the gap)"
            ours = f"{percent(random)}; without a graft {percent(none)}, fine-tuned {percent(full)}"
            found.append(Claim(text, "—", ours, verdict(random - none < 0.25 * (full - none), random, none, full)))
        return found

    def draw(self, rows: Sequence[Row]) -> Figure:
        """Draw accuracy over sparsity, by task."""
        return scores_over_sparsity(
            rows,
            "region",
            REGIONS,
            dashed={"fine-tuned": {"region": "fine-tuned"}},
            dotted={"no graft": {"region": "none"}},
            share="region",
        )


def _sparsities(rows: Sequence[Row]) -> list[float]:
    return sorted({row["sparsity"] for row in rows if row["region"] in REGIONS})


if __name__ == "__main__":
    raise SystemExit(main(SparsityCurve()))
