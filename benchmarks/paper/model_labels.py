"""Regions that are learned from the model's own predictions. Figure 15 of the paper."""

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
from forgetfree.core.regions import Region
from forgetfree.data.examples import EncodedRows, Examples
from forgetfree.results.answers import label_answers
from forgetfree.results.report.page import Table, percent

LABELS = ("true labels", "own labels")


class ModelLabels(Experiment):
    """Localize a partly trained model, by the true labels and by its own predictions."""

    name: ClassVar = "model-labels"
    paper: ClassVar = "figure 15"
    question: ClassVar = "Does a region that is learned from the model's own answers follow the model?"
    setting: ClassVar = replace(
        SMALL,
        tasks=("sst2", "ag_news"),
        seeds=(0,),
        sparsities=(1e-4, 1e-3, 1e-2),
        options={**SMALL.options, "steps": 100},
    )

    def measure(self, context: Context, unit: Unit) -> list[Row]:
        """Measure grafts of regions by either kind of label, at every sparsity."""
        tuned, sparsities = context.tuned(unit), context.setting.sparsities
        rows = [tuned.row(tuned.fine_tuned, labels="fine-tuned", sparsity=1.0)]
        for labels, regions in zip(LABELS, (tuned.learned(*sparsities), own_labels(tuned, sparsities)), strict=True):
            for sparsity, region in zip(sparsities, regions, strict=True):
                rows.append(tuned.row(tuned.graft(region), labels=labels, sparsity=sparsity))
        return rows

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Return scores and agreement with the model, by task and labels."""
        sizes = sparsities_of([row for row in rows if row["labels"] in LABELS])
        columns: dict[str, tuple[str, dict[str, Any]]] = {
            f"graft {share_of(s)}, {labels}": ("score", {"labels": labels, "sparsity": s})
            for s in sizes
            for labels in LABELS
        }
        agreement = {name: ("agreement", what) for name, (_, what) in columns.items()}
        scores = {**columns, "fine-tuned": ("score", {"labels": "fine-tuned"})}
        return [
            pivot(SCORE, rows, "task", with_constant(rows, scores)),
            pivot("Agreement with the fine-tuned model", rows, "task", agreement),
        ]

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Return claims at the largest sparsity."""
        largest = max(sparsities_of([row for row in rows if row["labels"] in LABELS]), default=0.0)
        true, own = (mean(rows, "agreement", labels=labels, sparsity=largest) for labels in LABELS)
        score, full = (
            mean(rows, "score", labels="own labels", sparsity=largest),
            mean(rows, "score", labels="fine-tuned"),
        )
        return [
            Claim(
                f"by its own labels a graft of {share_of(largest)} agrees with the model as often as by the true ones, or more",
                "—",
                f"{percent(own)} against {percent(true)}",
                verdict(own >= true, own, true),
            ),
            Claim(
                "such a graft scores as the model does (within 2 points)",
                "—",
                f"{percent(score)} against {percent(full)}",
                verdict(abs(score - full) <= 0.02, score, full),
            ),
        ]

    def draw(self, rows: Sequence[Row]) -> Figure:
        """Draw scores over sparsity; dashed: the model itself."""
        return scores_over_sparsity(rows, "labels", LABELS, dashed={"fine-tuned": {"labels": "fine-tuned"}})


def own_labels(tuned: TunedTask, sparsities: Sequence[float]) -> list[Region]:
    """Return the regions that are learned with the model's predictions in place of the labels."""
    bench, task = tuned.bench, tuned.bench.task

    def relabelled(rows: Examples) -> Examples:
        assert isinstance(rows, EncodedRows)
        answers = label_answers(bench.answers(tuned.fine_tuned, rows, tuned.options))
        return replace(rows, labels=torch.from_numpy(answers.logits.argmax(1)))

    bench.task = replace(task, train=relabelled(task.train), validation=relabelled(task.validation))
    try:
        return tuned.learned(*sparsities)
    finally:
        bench.task = task


if __name__ == "__main__":
    raise SystemExit(main(ModelLabels()))
