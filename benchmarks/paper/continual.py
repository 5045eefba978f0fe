"""A stream of three tasks: fine-tuning each alone, all in turn, and grafting. Table 4 of the paper."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from matplotlib.figure import Figure

from forgetfree.benchmarks.paper.presets import PAPER, SMALL
from forgetfree.display import NULL
from forgetfree.jobs.experiments import (
    Claim,
    Experiment,
    ExperimentContext,
    Preset,
    Row,
    Unit,
    distinct,
    mean,
    pivot,
    select,
    verdict,
)
from forgetfree.jobs.run import RunJob
from forgetfree.jobs.run_config import RunConfig
from forgetfree.registry import DEFAULT_STRATEGIES
from forgetfree.results.records import CONSTANT
from forgetfree.results.report.figures import legend, look, panels
from forgetfree.results.report.page import Table, percent

STREAM = ("qnli", "ag_news", "sst2")
#: Table 4: after the last task, RoBERTa-base, 4096-shot.
PAPER_ACCURACY = {
    "fine-tune": (0.880, 0.931, 0.921),
    "continual-ft": (0.675, 0.876, 0.920),
    "grafting-continual": (0.865, 0.908, 0.925),
}


class Continual(Experiment):
    """The main job, one seed a unit."""

    paper: ClassVar[str] = "table 4"
    single: ClassVar = ("shots", "sparsities")
    measured: ClassVar = ("score", "constant", "ece", "learned", "kept_bytes")
    question: ClassVar[str] = "Does grafting keep what naive continual fine-tuning forgets?"
    presets: ClassVar = {
        # The model's own recipe; 16·n·k steps would take a night.
        "small": replace(
            SMALL,
            tasks=STREAM,
            shots=(512,),
            seeds=(0,),
            sparsities=(1e-3,),
            options={"steps": 200, "precision": "bf16"},
            grid=({},),
            test_limit=400,
        ),
        "paper": replace(PAPER, tasks=STREAM, options={**PAPER.options, "learning_rate": 5e-3}, grid=({},)),
    }

    def units(self, preset: Preset) -> list[Unit]:
        """The whole stream with every seed."""
        return [{"shots": shots, "seed": seed} for shots in preset.shots for seed in preset.seeds]

    def measure(self, context: ExperimentContext, unit: Unit) -> list[Row]:
        """The last row of each strategy's matrix, and what was forgotten."""
        preset = context.preset
        settings: dict[str, Any] = {"sparsity": preset.sparsity, **preset.options, **preset.fixed}
        settings |= {"cache": str(context.cache), "max_length": preset.max_length, "evaluate_on": preset.evaluate_on}
        if preset.test_limit is not None:
            settings["test_limit"] = preset.test_limit
        if preset.graftable is not None:
            settings["graftable"] = preset.graftable
        shots = min([unit["shots"], *(min(Counter(context.rows(task).train.labels).values()) for task in preset.tasks)])
        config = RunConfig(
            stream=",".join(preset.tasks),
            model=preset.model,
            data=context.data if isinstance(context.data, str) else tuple(context.data),
            text_columns=context.read_options.texts,
            label_columns=context.read_options.labels,
            kinds=context.read_options.kinds,
            skip_bad_rows=context.read_options.skip_bad_rows,
            metrics=context.read_options.metrics,
            readout=preset.readout,
            shots=shots,
            seeds=(unit["seed"],),
            settings=settings,
            device=context.device,
        )
        learner = RunJob(config).learner
        tasks = learner.stream(unit["seed"]).tasks
        constant = [task.unanswered.constant_score(task.definition.metric) for task in tasks]
        rows = []
        for strategy in config.strategies:
            learned = learner.learn(strategy, unit["seed"], context.monitor)
            for i, task in enumerate(tasks):
                last = learned.rows[-1][task.name]
                rows.append(
                    {
                        "strategy": strategy,
                        "task": task.name,
                        "after": len(tasks),
                        "test_rows": len(task.test),
                        "score": last.score(task.definition.metric),
                        "constant": constant[i],
                        "ece": last.ece,
                        "learned": learned.rows[i + 1][task.name].score(task.definition.metric),
                        "train_shots": shots,
                        "kept_bytes": learned.kept_bytes[-1],
                        "steps": learned.strategy.options.steps,
                    }
                )
        return rows

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Accuracy after the last task, the paper's and ours."""
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
        """The first task is forgotten by naive fine-tuning, and by grafting not at all."""
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
                NULL,  # the paper prints scores at the end alone
                percent(lost),
                verdict(lost == 0, lost),
            ),
        ]

    def draw(self, rows: Sequence[Row]) -> Figure:
        """Accuracy after the last task, by task; bars for the paper's."""
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
