"""Regions that fail: biases alone, and lottery tickets. Figure 4 of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure

from benchmarks.paper.context import Context, TunedTask
from benchmarks.paper.experiment import Claim, Experiment, main
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
from forgetfree.core.regions import Region, graft_theta
from forgetfree.core.selection import budget, top
from forgetfree.models.state import ModelState
from forgetfree.results.report.page import Table, percent


class WhatFails(Experiment):
    """Graft the biases alone; set everything outside a region to 0."""

    name: ClassVar = "what-fails"
    paper: ClassVar = "figure 4"
    question: ClassVar = "Are all biases together a skill? Does a region work without the pre-trained values around it?"
    setting: ClassVar = replace(SMALL, sparsities=(1e-3, 1e-2, 1e-1, 0.5, 0.9))

    def measure(self, context: Context, unit: Unit) -> list[Row]:
        """Measure the learned graft, all biases, and tickets of the largest weights and of the learned region."""
        tuned = context.tuned(unit)
        (tiny,) = tuned.learned(context.setting.sparsity)
        rows = [
            tuned.row(tuned.fine_tuned, model="fine-tuned", sparsity=1.0),
            tuned.row(tuned.readout_alone, model="no graft", sparsity=0.0),
            tuned.row(tuned.graft(tiny), model="grafted", sparsity=context.setting.sparsity),
            *(
                tuned.row(tuned.graft(each), model="biases", sparsity=len(each) / len(tuned.bench.space))
                for each in tuned.biases()
            ),
            tuned.row(
                self._ticket(tuned, tiny), model="pruned to the graft's region", sparsity=context.setting.sparsity
            ),
        ]
        for sparsity in context.setting.sparsities:
            largest = top(tuned.fine_tuned.theta.abs(), budget(len(tuned.bench.space), sparsity))
            rows.append(tuned.row(self._ticket(tuned, largest), model="pruned", sparsity=sparsity))
        return rows

    @staticmethod
    def _ticket(tuned: TunedTask, region: Region) -> ModelState:
        """Return the fine-tuned model with everything outside the region set to 0."""
        theta = tuned.fine_tuned.theta
        return replace(tuned.fine_tuned, theta=graft_theta(torch.zeros_like(theta), theta, region))

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Return accuracy by task."""
        (tiny,) = sparsities_of(rows, model="grafted")
        columns: dict[str, tuple[str, dict[str, Any]]] = {
            "no graft": ("score", {"model": "no graft"}),
            f"graft {share_of(tiny)}": ("score", {"model": "grafted"}),
            **{
                f"biases {share_of(round(s, 4))}": ("score", {"model": "biases"})
                for s in sparsities_of(rows, model="biases")
            },
            f"pruned to the graft, {share_of(tiny)}": ("score", {"model": "pruned to the graft's region"}),
        }
        for sparsity in sparsities_of(rows, model="pruned"):
            columns[f"pruned {share_of(sparsity)}"] = ("score", {"model": "pruned", "sparsity": sparsity})
        columns["fine-tuned"] = ("score", {"model": "fine-tuned"})
        title = f"{SCORE}; pruned: the largest weights are kept, all else is 0"
        return [pivot(title, rows, "task", with_constant(rows, columns))]

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Return claims that both fail, unlike a learned graft."""
        none, grafted, bias, full = (
            mean(rows, "score", model=model) for model in ("no graft", "grafted", "biases", "fine-tuned")
        )
        ticket = mean(rows, "score", model="pruned to the graft's region")
        quarter = none + 0.25 * (full - none)
        found = [
            Claim(
                "all biases together are worse than a learned graft of fewer entries (by 2 points at least)",
                "—",
                f"biases {percent(bias)}, graft {percent(grafted)}, fine-tuned {percent(full)}, no graft {percent(none)}",
                verdict(grafted - bias > 0.02, grafted, bias),
            ),
            Claim(
                "a region fails once everything outside is set to 0 (closes less than a quarter of the gap)",
                "—",
                f"pruned {percent(ticket)}, graft {percent(grafted)}, no graft {percent(none)}",
                verdict(ticket < quarter, ticket, quarter),
            ),
        ]
        for sparsity in (s for s in sparsities_of(rows, model="pruned") if s <= 0.1):
            tenth = mean(rows, "score", model="pruned", sparsity=sparsity)
            found.append(
                Claim(
                    f"a lottery ticket of {share_of(sparsity)} fails (closes less than a quarter of the gap)",
                    "—",
                    f"pruned {percent(tenth)}, fine-tuned {percent(full)}, no graft {percent(none)}",
                    verdict(tenth < quarter, tenth, quarter),
                )
            )
        return found

    def draw(self, rows: Sequence[Row]) -> Figure:
        """Draw tickets over sparsity, with the graft and the biases at their sparsities."""
        return scores_over_sparsity(
            rows,
            "model",
            ("pruned", "grafted", "biases"),
            dashed={"fine-tuned": {"model": "fine-tuned"}},
            dotted={"no graft": {"model": "no graft"}},
            share="ticket or graft",
        )


if __name__ == "__main__":
    raise SystemExit(main(WhatFails()))
