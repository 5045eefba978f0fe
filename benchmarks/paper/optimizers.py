"""Which optimiser's moves localize: SGD, AdamW, AdamW with an ℓ1 penalty. Figure 5 of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from matplotlib.figure import Figure

from forgetfree.benchmarks.paper.presets import ADAMW, ADAMW_L1, PAPER, PAPER_ADAMW, PAPER_ADAMW_L1, SGD, SMALL
from forgetfree.jobs.experiments import (
    SCORE,
    Claim,
    Experiment,
    ExperimentContext,
    Preset,
    Row,
    Unit,
    kept,
    percent,
    pivot,
    scores_over_sparsity,
    share_of,
    sparsities_of,
    verdict,
    with_constant,
)
from forgetfree.results.report.page import Table

OPTIMIZERS = ("sgd", "adamw", "adamw + ℓ1")


class Optimizers(Experiment):
    """Fine-tune by each optimiser, graft at several sparsities."""

    paper: ClassVar[str] = "figure 5"
    question: ClassVar[str] = "Does the optimiser of fine-tuning decide whether a tiny graft is enough?"
    presets: ClassVar = {
        "small": replace(SMALL, seeds=(0,), arms=dict(zip(OPTIMIZERS, ((SGD,), (ADAMW,), (ADAMW_L1,)), strict=True))),
        "paper": replace(
            PAPER,
            tasks=("sst2", "ag_news", "qnli"),
            sparsities=(1e-5, 1e-4, 1e-3),
            arms=dict(zip(OPTIMIZERS, (PAPER.grid, PAPER_ADAMW, PAPER_ADAMW_L1), strict=True)),
        ),
    }

    def units(self, preset: Preset) -> list[Unit]:
        """By optimiser, too."""
        return [{**unit, "optimizer": name} for unit in super().units(preset) for name in preset.arms]

    def measure(self, context: ExperimentContext, unit: Unit) -> list[Row]:
        """The fine-tuned model and its grafts."""
        tuned = context.tuned(unit, context.preset.arms[unit["optimizer"]])
        rows = [tuned.row(tuned.fine_tuned, model="fine-tuned", sparsity=1.0)]
        sparsities = context.preset.sparsities
        for sparsity, region in zip(sparsities, tuned.learned(*sparsities), strict=True):
            rows.append(tuned.row(tuned.graft(region), model="grafted", sparsity=sparsity))
        return rows

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Accuracy by task and optimiser."""
        columns: dict[str, tuple[str, dict[str, Any]]] = {"fine-tuned": ("score", {"model": "fine-tuned"})}
        for sparsity in sparsities_of(rows, model="grafted"):
            columns[f"graft {share_of(sparsity)}"] = ("score", {"model": "grafted", "sparsity": sparsity})
        return [pivot(SCORE, rows, ("task", "optimizer"), with_constant(rows, columns))]

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """What a graft keeps of its own fine-tuned model, mean over tasks."""
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
        """Accuracy of grafts over sparsity; dashed: the fine-tuned models."""
        whole = {name: {"optimizer": name, "model": "fine-tuned"} for name in OPTIMIZERS}
        return scores_over_sparsity(rows, "optimizer", OPTIMIZERS, dashed=whole)
