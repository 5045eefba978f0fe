"""The regions of tasks that one model learned together: overlaps, gains, unions. Section 5.1 and figure 8 of the paper."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce
from operator import or_
from random import Random
from typing import ClassVar

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.nn import functional as F

from benchmarks.paper.context import Context, TunedTask
from benchmarks.paper.experiment import Claim, Experiment, main
from benchmarks.paper.plots import panels
from benchmarks.paper.rows import SCORE, Row, Unit, distinct, mean, pivot, select, verdict, with_constant
from benchmarks.paper.setting import SMALL, Setting
from forgetfree.core.mask import learn_region
from forgetfree.core.readout_model import autocast
from forgetfree.core.regions import Region
from forgetfree.core.trained import Batch, WholeTensors, in_training
from forgetfree.errors import UsageError
from forgetfree.models.state import ModelState
from forgetfree.results.report.page import Table, percent
from forgetfree.seeds import derive_seed
from forgetfree.training.single_task import SingleTask, mask_batches, mask_loss, mask_options
from forgetfree.training.step import TrainingStep, plan, training_mode
from forgetfree.training.training_options import LocalizationOptions, TrainingOptions, scheduled_rate

#: Kinds of tasks. The paper names seven of its eight tasks; the kinds are its own (§5.1), AG News is our eighth.
KINDS = {
    "NLI": ("qnli", "snli", "mnli", "rte"),
    "sentiment": ("sst2", "cr", "mr", "mpqa"),
    "paraphrase": ("mrpc", "qqp"),
    "classification": ("ag_news", "trec", "subj"),
}
TASKS = ("qnli", "snli", "mnli", "sst2", "cr", "mrpc", "qqp", "ag_news")
#: Gradient steps on S (figure 8d).
PURIFYING_STEPS = 10
#: The least gain from training for which a share of the gain is reported.
LEARNED = 0.05


class MultiTask(Experiment):
    """Fine-tune one model on all tasks, find each task's region, and graft regions and their unions."""

    name: ClassVar = "multi-task"
    paper: ClassVar = "figure 8"
    single: ClassVar = ("shots", "sparsities")
    question: ClassVar = (
        "Do the skills of one model that learned several tasks lie apart, and do their regions work together?"
    )
    setting: ClassVar = replace(
        SMALL,
        tasks=("snli", "mnli", "sst2", "cr", "ag_news"),
        seeds=(0,),
        sparsities=(1e-3,),
        options={**SMALL.options, "base_fraction": 0.0, "steps": 200, "mask_steps": 8},
        test_limit=200,
    )

    def units(self, setting: Setting) -> list[Unit]:
        """Return all tasks together, with every number of shots and seed."""
        if len(setting.tasks) < 2:
            raise UsageError(
                f"multi-task needs two tasks or more, got {', '.join(setting.tasks)}. Give another --task."
            )
        return [{"shots": shots, "seed": seed} for shots in setting.shots for seed in setting.seeds]

    def measure(self, context: Context, unit: Unit) -> list[Row]:
        """Measure all models on all tasks, and the overlaps of grafts of one task."""
        loaded, tasks = context.model(), context.setting.tasks
        benches = {task: context.bench({**unit, "task": task}, loaded) for task in tasks}
        options = context.options(**context.setting.optimizer)
        together = train_together(list(benches.values()), options)
        tuned = {task: TunedTask(bench, together, options) for task, bench in benches.items()}
        first = tuned[tasks[0]]
        rows = [
            tuned[task].row(state, region=name, model=name, task=task)
            for name, state in (("no graft", first.readout_alone), ("whole model", first.fine_tuned))
            for task in tasks
        ]
        regions = {task: each.learned(context.setting.sparsity)[0] for task, each in tuned.items()}
        for source, region in regions.items():
            graft = first.graft(region)
            for task in tasks:
                shared = overlap(region, regions[task])
                rows.append({**tuned[task].row(graft, region=source, model="graft", task=task), "overlap": shared})
        for name, members in groups(tasks).items():
            union = reduce(or_, (regions[task] for task in members))
            pure = purified([benches[t] for t in members], first.fine_tuned, union, first.options, PURIFYING_STEPS)
            for model, region in (("union", union), ("purified", pure)):
                graft, of_union = first.graft(region), overlap(region, union)
                for task in members:
                    rows.append({**tuned[task].row(graft, region=name, model=model, task=task), "of_union": of_union})
        return rows

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Return scores, overlaps, and the kept gain of grafts and unions."""
        tasks, rows = distinct(rows, "task"), with_gains(rows)
        models = {"no graft": "no graft", "graft of its own": "graft", "whole model": "whole model"}
        own = [row for row in rows if row["model"] != "graft" or row["region"] == row["task"]]
        gains = {task: ("gain", {"task": task}) for task in tasks}
        scores = {title: ("score", {"model": model}) for title, model in models.items()}
        grafts = select(rows, model="graft")
        title = "Share of the gain that is kept (eq. 5)"
        return [
            pivot(SCORE, own, "task", with_constant(own, scores)),
            pivot(
                "Share of the column's region that lies in the row's",
                grafts,
                "region",
                {task: ("overlap", {"task": task}) for task in tasks},
            ),
            pivot(f"{title}: grafts of one task", grafts, "region", gains),
            pivot(
                f"{title}: unions of several tasks' regions, before and after {PURIFYING_STEPS} steps on S",
                [row for row in rows if row["model"] in ("union", "purified")],
                ("region", "model"),
                gains,
            ),
        ]

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Return claims on tasks of equal and different kinds, on unions, and on the pair that the text names."""
        rows = with_gains(rows)
        pairs = [row for row in select(rows, model="graft") if row["region"] != row["task"]]
        kin = [row for row in pairs if kind_of(row["region"]) == kind_of(row["task"])]
        strangers = [row for row in pairs if row not in kin]
        shared, apart = mean(kin, "overlap"), mean(strangers, "overlap")
        helped, unhelped = known_mean(kin), known_mean(strangers)
        members = groups(distinct(rows, "task"))
        inside = [row for row in rows if row["task"] in members.get(row["region"], ())]
        union, pure = (known_mean(select(inside, model=model)) for model in ("union", "purified"))
        there, back = (
            known_mean(select(pairs, region=source, task=target))
            for source, target in (("mrpc", "qqp"), ("qqp", "mrpc"))
        )
        return [
            Claim(
                "the regions of two tasks share less than half",
                "—",
                percent(mean(pairs, "overlap")),
                verdict(mean(pairs, "overlap") < 0.5, mean(pairs, "overlap")),
            ),
            Claim(
                "regions of one kind of task share more than those of two kinds",
                "—",
                f"{percent(shared)} against {percent(apart)}",
                verdict(shared > apart, shared, apart),
            ),
            Claim(
                "a graft gives tasks of its kind more of their gain than other tasks",
                "—",
                f"{percent(helped)} against {percent(unhelped)}",
                verdict(helped > unhelped, helped, unhelped),
            ),
            Claim(
                "a union keeps 70 % of the gain of its tasks, mean over unions and tasks",
                "70",
                percent(union),
                verdict(union >= 0.7, union),
            ),
            Claim("ten steps on S raise that to 80 %", "80", percent(pure), verdict(pure >= 0.8, pure)),
            Claim(
                "MRPC's region gives QQP more of its gain than QQP's gives MRPC",
                "—",
                f"{percent(there)} against {percent(back)}",
                verdict(there > back, there, back),
            ),
        ]

    def draw(self, rows: Sequence[Row]) -> Figure:
        """Draw figure 8: overlaps; gains of grafts; gains of unions, before and after the steps on S."""
        rows, tasks = with_gains(rows), distinct(rows, "task")
        shown_in = {
            "overlap": ("graft", "overlap"),
            "gain of grafts": ("graft", "gain"),
            "gain of unions": ("union", "gain"),
            "of purified unions": ("purified", "gain"),
        }
        figure, (axes,) = panels(list(shown_in), width=3.4, height=3.4, share_y=False)
        for ax, (model, key) in zip(axes, shown_in.values(), strict=True):
            names = distinct(select(rows, model=model), "region")
            cells = np.array([[mean(rows, key, model=model, region=n, task=t) for t in tasks] for n in names])
            ax.imshow(cells, vmin=0, vmax=1, cmap="Blues", aspect="auto")
            ax.grid(visible=False)
            ax.set_xticks(range(len(tasks)), tasks, rotation=60, ha="right", rotation_mode="anchor")
            ax.set_yticks(range(len(names)), names)
            for (i, j), value in np.ndenumerate(cells):
                if not math.isnan(value):
                    ax.text(
                        j,
                        i,
                        f"{100 * value:.0f}",
                        ha="center",
                        va="center",
                        fontsize=6,
                        color="white" if value > 0.6 else "black",
                    )
        axes[0].set_ylabel("region of; all in %")
        return figure


def kind_of(task: str) -> str:
    """Return the kind of a task; an unknown task is its own kind."""
    return next((kind for kind, members in KINDS.items() if task in members), task)


def groups(tasks: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the tasks of each union of regions: each kind, all pairs of texts, and all; at least two tasks each."""
    found = {kind: tuple(task for task in tasks if task in members) for kind, members in KINDS.items()}
    found["NLI + paraphrase"] = found["NLI"] + found["paraphrase"]
    found = {name: members for name, members in found.items() if len(members) > 1 and len(members) < len(tasks)}
    unions = {members: name for name, members in reversed(found.items())}  # of equal groups, the first
    return {name: members for members, name in reversed(unions.items())} | {"all": tuple(tasks)}


def with_gains(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the kept share of the gain (eq. 5): NaN if training raises the score by too little."""
    found = []
    for row in rows:
        same = {key: row[key] for key in ("task", "shots", "seed") if key in row}
        before, after = (mean(rows, "score", model=model, **same) for model in ("no graft", "whole model"))
        learned = after - before >= LEARNED
        found.append({**row, "gain": (row["score"] - before) / (after - before) if learned else math.nan})
    return found


def known_mean(rows: Sequence[Row]) -> float:
    """Return the mean gain of the rows that have one; NaN if none has."""
    return mean([row for row in rows if not math.isnan(row["gain"])], "gain")


# -- One model for several tasks, and one region for several of its skills --------------------------------


def train_together(benches: Sequence[SingleTask], options: TrainingOptions) -> ModelState:
    """Fine-tune θ_pre on all tasks, each batch from a task drawn at random, for the sum of their steps (paper, C.1).

    Args:
        benches: the tasks, on one model.
        options: the options of training.

    Returns:
        The model with the readouts of all tasks.

    Raises:
        TrainingError: the loss is not finite.
    """
    first, model = benches[0], benches[0].model
    steps = sum(bench.task.full_steps(options) for bench in benches)
    seed = derive_seed(first.seed, "multi-task")
    turns = Random(derive_seed(seed, "tasks")).choices(benches, k=steps)
    plans = {b.task.name: iter(plan(b.task.train.lengths, options, turns.count(b), seed)) for b in benches}
    trained = WholeTensors(first.space.parameters(model.backbone))
    readouts = [p for bench in benches for p in model.readout_module(bench.task.label).parameters()]
    with ExitStack() as stack:
        for bench in benches:
            stack.enter_context(bench.holding(bench.pre))
        on_step = stack.enter_context(first.monitor.phase("all tasks", "fine_tune", steps))
        stack.enter_context(in_training(model, trained, readouts))
        first.monitor.log_rate(scheduled_rate(options, steps))
        step = TrainingStep(model, trained, readouts, options, steps)
        step.on_step = on_step
        torch.manual_seed(derive_seed(seed, "dropout"))
        training_mode(model, bool(options.dropout))
        for bench in turns:
            x, y, t = model.on_device(bench.task.train.batch(next(plans[bench.task.name])))
            step.zero_grad()
            with autocast(options.precision, first.device.type):
                logits = model(x, t)
            step.backward(F.cross_entropy(logits.float(), y))
            step.update()
        step.finish()
        return ModelState.of(model, [bench.task.name for bench in benches])


def purified(
    benches: Sequence[SingleTask], trained: ModelState, region: Region, options: LocalizationOptions, steps: int
) -> Region:
    """Return a region of the same size after steps on S that lower the sum of the tasks' losses (paper, §5.1).

    Args:
        benches: the tasks, on one model.
        trained: the model after `train_together`.
        region: γ_base, such as the union of the tasks' regions.
        options: the options of learning S.
        steps: the number of steps on S.
    """
    first = benches[0]
    rows = min(options.mask_batch_size, *(len(bench.task.train) for bench in benches))  # every task has the same weight
    mask = mask_options(options, rows, steps).model_copy(update={"steps": steps, "evaluate_every": steps})

    def batches() -> Iterator[list[Batch]]:
        seeds = (derive_seed(bench.seed, "purify", bench.task.name) for bench in benches)
        each = [
            mask_batches(bench.task.train, mask, seed, first.device) for bench, seed in zip(benches, seeds, strict=True)
        ]
        for of_tasks in zip(*each, strict=True):
            yield [batch for of_task in of_tasks for batch in of_task]

    with ExitStack() as stack:
        for bench in benches:
            stack.enter_context(bench.holding(replace(trained, theta=first.pre.theta)))
        first.model.eval()
        on_step = stack.enter_context(first.monitor.phase("all tasks", "localize", steps))
        found = learn_region(
            first.model.backbone,
            first.space,
            first.pre.theta.to(first.device),
            trained.theta.to(first.device),
            batches(),
            mask_loss(first.model, options),
            sparsity=len(region) / len(first.space),
            base=region,
            options=mask,
            on_step=on_step,
        )
    return found.region


def overlap(region: Region, other: Region) -> float:
    """Return the share of ``other`` that also lies in ``region``: ``|γ_i ∩ γ_j| / |γ_j|`` (paper, fig. 8)."""
    return len(region & other) / len(other) if len(other) else 0.0


if __name__ == "__main__":
    raise SystemExit(main(MultiTask()))
