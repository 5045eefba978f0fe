"""All rows at hand, up to 50,000 a label. Table 5 of the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from forgetfree.benchmarks.paper.localization import Localization
from forgetfree.benchmarks.paper.presets import PAPER, SMALL
from forgetfree.benchmarks.paper.published import TABLE_5
from forgetfree.jobs.experiments import Claim, Row, mean, percent, share_of, sparsities_of, verdict
from forgetfree.results.report.page import Table

SPARSITIES = (3e-4, 6e-4, 1.2e-3)


class FullData(Localization):
    """`Localization` with up to 50,000 rows a label; the four tasks of sentiment are one."""

    paper: ClassVar[str] = "table 5"
    single: ClassVar[tuple[str, ...]] = ("shots",)
    merged: ClassVar[Mapping[str, tuple[str, ...]]] = {"sentiment": ("sst2", "mr", "cr", "mpqa")}
    question: ClassVar[str] = "Must the region grow with the data?"
    presets: ClassVar = {
        "small": replace(
            SMALL,
            tasks=("sentiment", "ag_news", "qnli", "snli"),
            shots=(50_000,),
            seeds=(0,),
            sparsities=SPARSITIES,
            options={**SMALL.options, "steps": 2000},
        ),
        "paper": replace(
            PAPER,
            tasks=("sentiment", "ag_news", "qnli", "snli"),
            shots=(50_000,),
            sparsities=SPARSITIES,
            options={**PAPER.options, "mask_steps": 1000},  # ten times as many (B.2)
        ),
    }

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """The paper's table, and ours."""
        return [TABLE_5, *super().tables(rows)]

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """What is kept at each size, and what the largest region adds to the smallest."""
        sizes = sparsities_of(rows, model="grafted")
        small, large = (mean(rows, "score", model="grafted", sparsity=s) for s in (sizes[0], sizes[-1]))
        ece = mean(rows, "ece", model="grafted", sparsity=sizes[0])
        full, whole = (mean(rows, key, model="fine-tuned") for key in ("ece", "score"))
        return [
            *super().claims(rows),
            Claim(
                f"a graft of {share_of(sizes[-1])} is no better than one of {share_of(sizes[0])} (by less than a point)",
                "89.30 against 89.05",
                f"{percent(large)} against {percent(small)}",
                verdict(large - small < 0.01, large, small, whole),
            ),
            Claim(
                f"a graft of {share_of(sizes[0])} is better calibrated than the fine-tuned model",
                "1.5 against 6.5",
                f"{percent(ece)} against {percent(full)}",
                verdict(ece < full, ece, full),
            ),
        ]
