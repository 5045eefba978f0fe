"""A stream of three tasks: fine-tuning each alone, all in turn, and grafting. Table 4 of the paper."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from matplotlib.figure import Figure

import forgetfree
from benchmarks.paper.context import Context
from benchmarks.paper.experiment import Claim, Experiment, main
from benchmarks.paper.plots import look, panels
from benchmarks.paper.rows import Row, Unit, distinct, mean, pivot, select, verdict
from benchmarks.paper.setting import SMALL, Setting
from forgetfree.display import NULL
from forgetfree.registry import DEFAULT_STRATEGIES
from forgetfree.results.report.figures import legend
from forgetfree.results.report.page import Table, percent
from forgetfree.results.runs import CONSTANT

STREAM = ("qnli", "ag_news", "sst2")
#: Table 4: after the last task, RoBERTa-base, 4096-shot.
PAPER_ACCURACY = {
    "fine-tune": (0.880, 0.931, 0.921),
    "continual-ft": (0.675, 0.876, 0.920),
    "grafting-continual": (0.865, 0.908, 0.925),
}


class Continual(Experiment):
    """The main job, with one seed per unit."""

    name: ClassVar = "continual"
    paper: ClassVar = "table 4"
    single: ClassVar = ("shots", "sparsities")
    question: ClassVar = "Does grafting keep what naive continual fine-tuning forgets?"
    setting: ClassVar = replace(
        SMALL,
        tasks=STREAM,
        shots=(512,),
        seeds=(0,),
        sparsities=(1e-3,),
        options={"steps": 200, "precision": "bf16"},
        optimizer={},
        test_limit=400,
    )

    def units(self, setting: Setting) -> list[Unit]:
        """Return the whole stream with every number of shots and seed."""
        return [{"shots": shots, "seed": seed} for shots in setting.shots for seed in setting.seeds]

    def measure(self, context: Context, unit: Unit) -> list[Row]:
        """Measure the last row of each strategy's matrix, and the scores right after learning."""
        setting, out = context.setting, context.out / "streams" / f"seed-{unit['seed']}-shots-{unit['shots']}"
        shots = min(
            [unit["shots"], *(min(Counter(context.rows(task).train.labels).values()) for task in setting.tasks)]
        )
        more = {key: getattr(setting, key) for key in ("max_length", "evaluate_on", "test_limit", "graftable")}
        forgetfree.run(
            setting.tasks,
            data=context.data,
            model=setting.model,
            readout=setting.readout,
            strategies=DEFAULT_STRATEGIES,
            sparsity=setting.sparsity,
            shots=shots,
            seeds=unit["seed"],
            device=context.device,
            cache=str(context.cache),
            out=out,
            resume=(out / "config.json").exists(),
            floors="constant",
            **{key: value for key, value in more.items() if value is not None},
            **{**setting.options, **setting.fixed},
        )
        results = forgetfree.load_results(out)
        assert results.constant is not None
        return [
            {
                "strategy": run.strategy,
                "task": task,
                "after": len(results.tasks),
                "test_rows": results.test_rows[task],
                "score": float(results.values(run.strategy, run.seed)[-1, i]),
                "constant": results.constant[i],
                "ece": float(results.values(run.strategy, run.seed, "ece")[-1, i]),
                "learned": float(results.values(run.strategy, run.seed)[i + 1, i]),
                "train_shots": shots,
                "kept_bytes": run.facts.kept_bytes[-1],
                "steps": run.facts.options["steps"],
            }
            for run in results.runs
            for i, task in enumerate(results.tasks)
        ]

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Return accuracy after the last task, the paper's and ours."""
        tasks = distinct(rows, "task")
        fewer = [row["train_shots"] for row in rows if row.get("train_shots", row["shots"]) < row["shots"]]
        here = f"here (with {min(fewer)} shots: a label has no more rows)" if fewer else "here"
        floors = [
            {**row, "strategy": CONSTANT, "score": row["constant"]}
            for row in select(rows, strategy=rows[0]["strategy"])
            if "constant" in row  # results of older versions lack it
        ]
        ours = pivot(
            f"Accuracy after the last task, {here}",
            [*rows, *floors],
            "strategy",
            {task: ("score", {"task": task}) for task in tasks},
        )
        theirs = Table(
            "Accuracy after the last task, in the paper",
            ("strategy", *STREAM),
            tuple((name, *map(percent, scores)) for name, scores in PAPER_ACCURACY.items()),
        )
        ece = pivot(
            "ECE after the last task, here", rows, "strategy", {task: ("ece", {"task": task}) for task in tasks}
        )
        return [theirs, ours, ece]

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Return claims that naive fine-tuning forgets the first task, and grafting does not."""
        first = distinct(rows, "task")[0]
        fine, naive, graft = (mean(rows, "score", task=first, strategy=name) for name in DEFAULT_STRATEGIES)
        grafts = select(rows, strategy="grafting-continual")
        lost = max((abs(row["learned"] - row["score"]) for row in grafts), default=math.nan)
        fine_there, naive_there, graft_there = (
            percent(PAPER_ACCURACY[name][0]) if first == STREAM[0] else NULL for name in DEFAULT_STRATEGIES
        )
        return [
            Claim(
                f"{first}, the first task: grafting keeps what continual fine-tuning forgets",
                f"{graft_there} against {naive_there}",
                f"{percent(graft)} against {percent(naive)}",
                verdict(graft > naive, graft, naive),
            ),
            Claim(
                f"{first}: grafting stays close to separate fine-tuning (at most 2 points below)",
                f"{graft_there} against {fine_there}",
                f"{percent(graft)} against {percent(fine)}",
                verdict(graft > fine - 0.02, graft, fine),
            ),
            Claim(
                "grafting forgets nothing (the most that any task lost or gained)",
                NULL,  # the paper has only final scores
                percent(lost),
                verdict(lost == 0, lost),
            ),
        ]

    def draw(self, rows: Sequence[Row]) -> Figure:
        """Draw accuracy after the last task, by task, with bars for the paper's."""
        tasks = distinct(rows, "task")
        figure, (axes,) = panels(tasks, width=2.4)
        for i, (ax, task) in enumerate(zip(axes, tasks, strict=True)):
            for place, strategy in enumerate(DEFAULT_STRATEGIES):
                ours = [100 * row["score"] for row in rows if row["task"] == task and row["strategy"] == strategy]
                ax.plot([place] * len(ours), ours, linestyle="", **look(strategy))
                if tuple(tasks) == STREAM:
                    ax.plot(place, 100 * PAPER_ACCURACY[strategy][i], "_", color="black", ms=16, label="the paper")
            ax.set_xticks([])
        axes[0].set_ylabel("accuracy after the last task (%)")
        legend(figure, axes)
        return figure


if __name__ == "__main__":
    raise SystemExit(main(Continual()))
