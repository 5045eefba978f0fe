"""A causal language model, read at label words after the prompt. Table 9 of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from forgetfree.benchmarks.paper.localization import Localization
from forgetfree.benchmarks.paper.presets import PAPER, SMALL
from forgetfree.benchmarks.paper.published import TABLE_9
from forgetfree.jobs.experiments import Row
from forgetfree.results.report.page import Table


class Causal(Localization):
    """`Localization` with SmolLM2 (``forgetfree fetch smollm2``), or with the paper's GPT-2."""

    paper: ClassVar[str] = "table 9"
    question: ClassVar[str] = "Is a tiny region enough in a causal language model, too?"
    presets: ClassVar = {
        "small": replace(
            SMALL,
            model="smollm2",
            readout="causal",
            tasks=("sst2", "cr", "qnli"),
            shots=(64,),
            seeds=(0,),
            sparsities=(5e-4,),
            options={**SMALL.options, "steps": 200},
        ),
        "paper": replace(
            PAPER,
            model="gpt2",
            readout="causal",
            tasks=tuple(task for task in PAPER.tasks if task not in ("trec", "qqp")),
            shots=(64, 4096),
            sparsities=(5e-4,),
        ),
    }

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """The paper's table, and ours."""
        return [TABLE_9, *super().tables(rows)]
