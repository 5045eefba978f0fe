"""Is a tiny region enough? Table 2 and figure 3 of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from matplotlib.figure import Figure

from benchmarks.paper.context import Context
from benchmarks.paper.experiment import Claim, Experiment, main
from benchmarks.paper.plots import look, panels
from benchmarks.paper.rows import (
    SCORE,
    Row,
    Unit,
    distinct,
    kept,
    mean,
    pivot,
    select,
    share_of,
    sparsities_of,
    values,
    verdict,
    with_constant,
)
from benchmarks.paper.setting import SMALL
from forgetfree.results.report.figures import legend
from forgetfree.results.report.page import Table, percent

TASKS = ("sst2", "cr", "mr", "mpqa", "trec", "subj", "ag_news", "qnli", "snli", "mnli", "rte", "mrpc", "qqp")


class Localization(Experiment):
    """Fine-tune, localize, graft: with few shots and with many."""

    name: ClassVar = "localization"
    paper: ClassVar = "table 2, figure 3"
    single: ClassVar = ()
    question: ClassVar = "Do the fine-tuned values of a tiny region bring back what fine-tuning learned?"
    setting: ClassVar = replace(SMALL, tasks=TASKS, shots=(64, 4096), seeds=(0,))

    def measure(self, context: Context, unit: Unit) -> list[Row]:
        """Measure θ_pre, θ_ft, and the graft at every sparsity."""
        tuned, sparsities = context.tuned(unit), context.setting.sparsities
        rows = [tuned.row(tuned.pre, model="pre-trained", sparsity=0.0)]
        if tuned.fine_tuned.readouts[unit["task"]]:  # label words have no readout of their own
            rows.append(tuned.row(tuned.readout_alone, model="readout alone", sparsity=0.0))
        rows.append(tuned.row(tuned.fine_tuned, model="fine-tuned", sparsity=1.0))
        for sparsity, region in zip(sparsities, tuned.learned(*sparsities), strict=True):
            rows.append(tuned.row(tuned.graft(region), model="grafted", sparsity=sparsity))
        return rows

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Return accuracy or F1, ECE and agreement, by task and shots."""
        models: dict[str, dict[str, Any]] = {
            name: {"model": name} for name in distinct(rows, "model") if name != "grafted"
        }
        models |= {
            f"graft {share_of(s)}": {"model": "grafted", "sparsity": s} for s in sparsities_of(rows, model="grafted")
        }
        grafts = {name: what for name, what in models.items() if what["model"] in ("fine-tuned", "grafted")}
        by = ("task", "shots")
        return [
            pivot(SCORE, rows, by, with_constant(rows, {name: ("score", what) for name, what in models.items()})),
            pivot("Expected calibration error", rows, by, {name: ("ece", what) for name, what in grafts.items()}),
            pivot(
                "Agreement with the fine-tuned model",
                rows,
                by,
                {name: ("agreement", what) for name, what in grafts.items() if what["model"] == "grafted"},
            ),
        ]

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Return claims on the kept share of the fine-tuned score, mean over tasks."""
        found = []
        for shots in distinct(rows, "shots"):
            those = _learned(rows, shots)
            for sparsity in sparsities_of(rows, model="grafted"):
                share = kept(those, {"model": "grafted", "sparsity": sparsity}, {"model": "fine-tuned"})
                text = f"{shots} shots: a graft of {share_of(sparsity)} keeps > 95 % of the score, where fine-tuning learned"
                found.append(Claim(text, "> 95", percent(share), verdict(share > 0.95, share)))
        return found

    def draw(self, rows: Sequence[Row]) -> Figure:
        """Draw fine-tuned and grafted models side by side, by task."""
        shots, tasks, smallest = (
            distinct(rows, "shots"),
            distinct(rows, "task"),
            sparsities_of(rows, model="grafted")[0],
        )
        before = "readout alone" if select(rows, model="readout alone") else "pre-trained"
        figure, (axes,) = panels([f"{k} shots per label" for k in shots], width=max(3.6, 0.5 * len(tasks)))
        for ax, k in zip(axes, shots, strict=True):
            for shift, (name, sparsity) in enumerate(((before, 0.0), ("fine-tuned", 1.0), ("grafted", smallest))):
                where = [
                    i + 0.2 * (shift - 1)
                    for i, task in enumerate(tasks)
                    for _ in _scores(rows, k, task, name, sparsity)
                ]
                scores = [100 * x for task in tasks for x in _scores(rows, k, task, name, sparsity)]
                label = f"graft {share_of(sparsity)}" if name == "grafted" else name
                ax.plot(where, scores, linestyle="", **(look(name) | {"label": label}))
            ax.set_xticks(range(len(tasks)), tasks, rotation=40, ha="right", rotation_mode="anchor")
        axes[0].set_ylabel("score (%)")
        legend(figure, axes)
        return figure


def _scores(rows: Sequence[Row], shots: int, task: str, model: str, sparsity: float) -> list[float]:
    return values(rows, "score", shots=shots, task=task, model=model, sparsity=sparsity)


def _learned(rows: Sequence[Row], shots: int) -> list[Row]:
    """Return the rows of tasks on which fine-tuning is at least 5 points above the pre-trained model."""
    those = select(rows, shots=shots)
    return [
        row
        for row in those
        if mean(those, "score", task=row["task"], model="fine-tuned")
        >= 0.05 + mean(those, "score", task=row["task"], model="pre-trained")
    ]


if __name__ == "__main__":
    raise SystemExit(main(Localization()))
