"""Label words against a linear layer as the readout. Figure 3 of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from matplotlib.figure import Figure

from forgetfree.benchmarks.paper.presets import PAPER, SMALL
from forgetfree.core.readout_model import LINEAR
from forgetfree.errors import UsageError
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

#: ``auto`` is the readout by label words that the model has a head for.
READOUTS = ("auto", "linear")


class PromptAgainstLinear(Experiment):
    """Fine-tune with either readout, graft at several sparsities."""

    paper: ClassVar[str] = "figure 3"
    question: ClassVar[str] = "Does a skill lie in a tiny region also where fine-tuning must learn a readout?"
    presets: ClassVar = {
        "small": replace(
            SMALL,
            model="smollm2",
            readout="auto",
            tasks=("sst2", "qnli"),
            shots=(64,),
            seeds=(0,),
            sparsities=(1e-4, 1e-3, 1e-2),
        ),
        "paper": replace(PAPER, tasks=("sst2", "ag_news", "qnli", "qqp"), sparsities=(1e-5, 1e-4, 1e-3, 1e-2)),
    }

    def units(self, preset: Preset) -> list[Unit]:
        """By readout, too."""
        return [{**unit, "readout": readout} for unit in super().units(preset) for readout in READOUTS]

    def measure(self, context: ExperimentContext, unit: Unit) -> list[Row]:
        """The fine-tuned model, and its graft at every sparsity."""
        if unit["readout"] == "auto" and context.model("auto").readout in LINEAR:
            raise UsageError(
                f"{context.preset.model} has no head for label words, so there is nothing to compare with a linear readout. "
                "Give a masked or a causal language model."
            )
        tuned, sparsities = context.tuned(unit), context.preset.sparsities
        rows = [tuned.row(tuned.fine_tuned, model="fine-tuned", sparsity=1.0)]
        for sparsity, region in zip(sparsities, tuned.learned(*sparsities), strict=True):
            rows.append(tuned.row(tuned.graft(region), model="grafted", sparsity=sparsity))
        return rows

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Scores by task and readout."""
        columns: dict[str, tuple[str, dict[str, Any]]] = {
            f"graft {share_of(s)}": ("score", {"model": "grafted", "sparsity": s})
            for s in sparsities_of(rows, model="grafted")
        }
        columns["fine-tuned"] = ("score", {"model": "fine-tuned"})
        return [pivot(SCORE, rows, ("task", "readout"), with_constant(rows, columns))]

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """What a graft keeps with either readout, mean over tasks."""
        found = []
        for sparsity in sparsities_of(rows, model="grafted"):
            shares = [
                kept(
                    rows,
                    {"model": "grafted", "sparsity": sparsity, "readout": readout},
                    {"model": "fine-tuned", "readout": readout},
                )
                for readout in READOUTS
            ]
            found.append(
                Claim(
                    f"a graft of {share_of(sparsity)} keeps as much of the score with either readout (within 5 points)",
                    "—",
                    f"label words {percent(shares[0])}, linear {percent(shares[1])}",
                    verdict(abs(shares[0] - shares[1]) <= 0.05, *shares),
                )
            )
        return found

    def draw(self, rows: Sequence[Row]) -> Figure:
        """Scores of grafts over sparsity; dashed: the fine-tuned models."""
        named = {"auto": "label words", "linear": "linear"}
        shown_as = [{**row, "readout": named[row["readout"]]} for row in rows]
        whole = {name: {"readout": name, "model": "fine-tuned"} for name in named.values()}
        return scores_over_sparsity(shown_as, "readout", tuple(named.values()), dashed=whole)
