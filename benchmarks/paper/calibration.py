"""Calibration of fine-tuning, grafts, re-trained regions and BitFit. Table 1 and figure 6 of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from matplotlib.figure import Figure

from benchmarks.paper.context import Context, TunedTask
from benchmarks.paper.experiment import Claim, Experiment, main
from benchmarks.paper.plots import look, panels
from benchmarks.paper.rows import (
    SCORE,
    Row,
    Unit,
    distinct,
    mean,
    pivot,
    ratio,
    select,
    verdict,
    with_constant,
)
from benchmarks.paper.setting import SMALL
from forgetfree.models.state import ModelState
from forgetfree.results.metrics import reliability
from forgetfree.results.report.page import Table, percent

MODELS = {"fine-tuned": "fine-tuned", "grafted": "graft", "retrained": "region re-trained", "bitfit": "BitFit"}


class Calibration(Experiment):
    """Compare the calibration of four ways to learn a task."""

    name: ClassVar = "calibration"
    paper: ClassVar = "table 1, figure 6"
    single: ClassVar = ("shots", "sparsities")
    question: ClassVar = (
        "Are grafts better calibrated than the fine-tuned model, and as good as training the region again?"
    )
    setting: ClassVar = replace(SMALL, sparsities=(1e-3,))

    def measure(self, context: Context, unit: Unit) -> list[Row]:
        """Measure accuracy, ECE and the reliability diagram of each."""
        tuned = context.tuned(unit)
        (region,) = tuned.learned(context.setting.sparsity)
        models = {"fine-tuned": tuned.fine_tuned, "grafted": tuned.graft(region)}
        for name, trained in [("retrained", region), *(("bitfit", each) for each in tuned.biases())]:
            models[name] = tuned.bench.retrained(tuned.pre, trained, tuned.options)  # from an untrained readout, too
        return [self._row(tuned, name, state) for name, state in models.items()]

    @staticmethod
    def _row(tuned: TunedTask, name: str, state: ModelState) -> Row:
        answers = tuned.answers_of(state)
        diagram = reliability(answers.logits, answers.labels, bins=10)
        held = diagram.counts > 0
        return {
            "model": name,
            **tuned.measures(answers),
            "counts": diagram.counts.tolist(),
            # Sums, so that they can be added over seeds.
            "right": np.where(held, diagram.counts * diagram.accuracy, 0.0).round(3).tolist(),
            "confidence": np.where(held, diagram.counts * diagram.confidence, 0.0).round(3).tolist(),
        }

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Return accuracy and ECE by task."""
        scores, eces = ({name: (key, {"model": name}) for name in MODELS} for key in ("score", "ece"))
        return [
            pivot(SCORE, rows, "task", with_constant(rows, scores)),
            pivot("Expected calibration error", rows, "task", eces),
        ]

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Return the claims on each task."""
        found = []
        for task in distinct(rows, "task"):
            ece = {name: mean(rows, "ece", task=task, model=name) for name in MODELS}
            score = {name: mean(rows, "score", task=task, model=name) for name in MODELS}
            fall = 1 - ratio(ece["grafted"], ece["fine-tuned"])
            found += [
                Claim(
                    f"{task}: the graft's ECE is at least 40 % lower",
                    "40 to 90",
                    f"{percent(ece['fine-tuned'])} → {percent(ece['grafted'])}",
                    verdict(fall >= 0.4, fall),
                ),
                Claim(
                    f"{task}: training the region again is as good as the graft (within half a point), or better",
                    "—",
                    f"re-trained {percent(score['retrained'])}, graft {percent(score['grafted'])}",
                    verdict(score["retrained"] >= score["grafted"] - 0.005, score["retrained"], score["grafted"]),
                ),
            ]
        return found

    def draw(self, rows: Sequence[Row]) -> Figure:
        """Draw reliability diagrams above, histograms of confidence below; all tasks and seeds together."""
        models = distinct(rows, "model")
        figure, axes = panels([MODELS[name] for name in models], rows=2, width=2.4, height=2.3)
        edges = np.linspace(0, 1, len(rows[0]["counts"]) + 1)
        centres = (edges[1:] + edges[:-1]) / 2
        for name, above, below in zip(models, *axes, strict=True):
            counts, right, confidence = (_total(rows, name, key) for key in ("counts", "right", "confidence"))
            held = counts > 0
            above.plot([0, 1], [0, 1], color="black", ls=":", lw=1)
            above.bar(centres[held], (right[held] / counts[held]), width=0.09, color=look(name)["color"], alpha=0.6)
            above.plot(
                confidence[held] / counts[held],
                right[held] / counts[held],
                color=look(name)["color"],
                marker="o",
                clip_on=False,
            )
            below.bar(centres, 100 * counts / counts.sum(), width=0.09, color=look(name)["color"], alpha=0.6)
            above.set(xlim=(0, 1), ylim=(0, 1), xticks=(0, 0.5, 1))
            below.set(xlim=(0, 1), xticks=(0, 0.5, 1), xlabel="confidence")
        axes[0][0].set_ylabel("accuracy, all tasks and seeds")
        axes[1][0].set_ylabel("share of all examples (%)")
        return figure


def _total(rows: Sequence[Row], model: str, key: str) -> Any:
    return np.sum([row[key] for row in select(rows, model=model)], axis=0)


if __name__ == "__main__":
    raise SystemExit(main(Calibration()))
