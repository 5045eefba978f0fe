"""Learned regions against regions of largest Fisher information (FISH masks). Table 8 of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from matplotlib.figure import Figure

from benchmarks.paper.context import Context
from benchmarks.paper.experiment import Claim, Experiment, main
from benchmarks.paper.published import TABLE_8
from benchmarks.paper.rows import (
    SCORE,
    Row,
    Unit,
    mean,
    pivot,
    scores_over_sparsity,
    share_of,
    sparsities_of,
    verdict,
    with_constant,
)
from benchmarks.paper.setting import SMALL
from forgetfree.results.report.page import Table, percent

REGIONS = ("learned", "fisher", "random")


class Fish(Experiment):
    """Graft the learned region, the entries of largest Fisher information at θ_pre (Sung et al., 2021), and random ones."""

    name: ClassVar = "fish"
    paper: ClassVar = "table 8"
    question: ClassVar = "Does the Fisher information of the pre-trained model tell where a skill will lie?"
    setting: ClassVar = replace(SMALL, seeds=(0,))

    def measure(self, context: Context, unit: Unit) -> list[Row]:
        """Measure each kind of region at each sparsity, and its overlap with the learned one."""
        tuned, sparsities = context.tuned(unit), context.setting.sparsities
        rows = [tuned.row(tuned.fine_tuned, region="fine-tuned", sparsity=1.0)]
        for sparsity, learned in zip(sparsities, tuned.learned(*sparsities), strict=True):
            regions = {"learned": learned, **{kind: tuned.salient(kind, sparsity) for kind in ("fisher", "random")}}
            for kind, region in regions.items():
                shared = len(region & learned) / len(region | learned)
                rows.append(tuned.row(tuned.graft(region), region=kind, sparsity=sparsity) | {"overlap": shared})
        return rows

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Return the paper's table, and ours."""
        grafts = [row for row in rows if row["region"] != "fine-tuned"]
        by = ("task", "sparsity")
        scores, eces = ({kind: (key, {"region": kind}) for kind in REGIONS} for key in ("score", "ece"))
        shared = {kind: ("overlap", {"region": kind}) for kind in REGIONS[1:]}
        return [
            TABLE_8,
            pivot(SCORE, grafts, by, with_constant(grafts, scores)),
            pivot("Expected calibration error", grafts, by, eces),
            pivot("Overlap with the learned region (intersection over union)", grafts, by, shared),
        ]

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Return claims at each sparsity, mean over tasks."""
        found = []
        for sparsity in sparsities_of(rows, region="fisher"):
            learned, fisher = (mean(rows, "score", region=kind, sparsity=sparsity) for kind in ("learned", "fisher"))
            shared = mean(rows, "overlap", region="fisher", sparsity=sparsity)
            told = sparsity == 1e-4  # the paper's text has a number for this size
            found += [
                Claim(
                    f"at {share_of(sparsity)} the learned graft scores higher than the FISH graft",
                    "by about 10 points" if told else "—",
                    f"{percent(learned)} against {percent(fisher)}",
                    verdict(learned > fisher, learned, fisher),
                ),
                Claim(
                    f"at {share_of(sparsity)} the two regions share less than a tenth of their entries",
                    "1.1 to 11.4",
                    percent(shared),
                    verdict(shared < 0.1, shared),
                ),
            ]
        return found

    def draw(self, rows: Sequence[Row]) -> Figure:
        """Draw scores over sparsity, by task."""
        return scores_over_sparsity(
            rows, "region", REGIONS, dashed={"fine-tuned": {"region": "fine-tuned"}}, share="region"
        )


if __name__ == "__main__":
    raise SystemExit(main(Fish()))
