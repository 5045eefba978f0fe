"""Grafts after fine-tuning with SGD, AdamW, and AdamW with an ℓ1 penalty. Figure 5 of the paper."""

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
    kept,
    pivot,
    scores_over_sparsity,
    share_of,
    sparsities_of,
    verdict,
    with_constant,
)
from benchmarks.paper.setting import ADAMW, ADAMW_L1, SGD, SMALL, Setting
from forgetfree.results.report.page import Table, percent

OPTIMIZERS = ("sgd", "adamw", "adamw + ℓ1")


class Optimizers(Experiment):
    """Fine-tune with each optimiser, and graft at several sparsities."""

    name: ClassVar = "optimizers"
    paper: ClassVar = "figure 5"
    question: ClassVar = "Does the optimiser of fine-tuning decide whether a tiny graft is enough?"
    setting: ClassVar = replace(SMALL, seeds=(0,), arms=dict(zip(OPTIMIZERS, (SGD, ADAMW, ADAMW_L1), strict=True)))

    def units(self, setting: Setting) -> list[Unit]:
        """Return the units, each with every optimiser."""
        return [{**unit, "optimizer": name} for unit in super().units(setting) for name in setting.arms]

    def measure(self, context: Context, unit: Unit) -> list[Row]:
        """Measure the fine-tuned model and its grafts."""
        tuned = context.tuned(unit, context.setting.arms[unit["optimizer"]])
        rows = [tuned.row(tuned.fine_tuned, model="fine-tuned", sparsity=1.0)]
        sparsities = context.setting.sparsities
        for sparsity, region in zip(sparsities, tuned.learned(*sparsities), strict=True):
            rows.append(tuned.row(tuned.graft(region), model="grafted", sparsity=sparsity))
        return rows

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Return accuracy by task and optimiser."""
        columns: dict[str, tuple[str, dict[str, Any]]] = {"fine-tuned": ("score", {"model": "fine-tuned"})}
        for sparsity in sparsities_of(rows, model="grafted"):
            columns[f"graft {share_of(sparsity)}"] = ("score", {"model": "grafted", "sparsity": sparsity})
        return [pivot(SCORE, rows, ("task", "optimizer"), with_constant(rows, columns))]

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Return claims on the share of the fine-tuned score that a graft keeps, mean over tasks."""
        found = []
        for sparsity in sparsities_of(rows, model="grafted"):
            graft, whole = {"model": "grafted", "sparsity": sparsity}, {"model": "fine-tuned"}
            sgd, adamw, l1 = (kept(rows, {**graft, "optimizer": o}, {**whole, "optimizer": o}) for o in OPTIMIZERS)
            text = f"a graft of {share_of(sparsity)} keeps"
            found += [
                Claim(
                    f"{text} less of the fine-tuned score with AdamW than with SGD",
                    "—",
                    f"{percent(adamw)} against {percent(sgd)}",
                    verdict(adamw < sgd, adamw, sgd),
                ),
                Claim(
                    f"{text} more of it with AdamW and ℓ1 than without ℓ1",
                    "—",
                    f"{percent(l1)} against {percent(adamw)}",
                    verdict(l1 > adamw, l1, adamw),
                ),
            ]
        return found

    def draw(self, rows: Sequence[Row]) -> Figure:
        """Draw accuracy of grafts over sparsity; dashed: the fine-tuned models."""
        whole = {name: {"optimizer": name, "model": "fine-tuned"} for name in OPTIMIZERS}
        return scores_over_sparsity(rows, "optimizer", OPTIMIZERS, dashed=whole)


if __name__ == "__main__":
    raise SystemExit(main(Optimizers()))
