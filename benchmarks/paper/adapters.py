"""Grafts against LoRA and bottleneck adapters of several sizes. Tables 6 and 7 of the paper."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from matplotlib.figure import Figure
from peft import LoraConfig
from torch import nn

from benchmarks.paper.bottlenecks import bottlenecks
from benchmarks.paper.context import Context, TunedTask
from benchmarks.paper.experiment import Claim, Experiment, main
from benchmarks.paper.ood import TARGETS, target_rows
from benchmarks.paper.plots import look, panels
from benchmarks.paper.published import TABLE_6, TABLE_7
from benchmarks.paper.rows import SCORE, Row, Unit, distinct, mean, pivot, select, share_of, verdict
from benchmarks.paper.setting import ADAMW, SMALL, Setting
from forgetfree.core.trained import WholeTensors
from forgetfree.data.examples import Examples
from forgetfree.models.lora_adapters import LoraAdapters, targets
from forgetfree.results.answers import LabelAnswers, label_answers
from forgetfree.results.report.figures import legend
from forgetfree.results.report.page import Table, percent
from forgetfree.results.runs import CONSTANT
from forgetfree.seeds import derive_seed
from forgetfree.training.encoded_task import answers_of
from forgetfree.training.single_task import SingleTask
from forgetfree.training.step import fine_tune
from forgetfree.training.training_options import LocalizationOptions

#: Ranks of LoRA and widths of bottlenecks (B.3).
SIZES = {"LoRA": (1, 2, 8), "Houlsby": (1, 2, 16, 64), "Pfeiffer": (1, 2, 16, 64)}
#: Adapters are trained at ten times the rate of a whole model, as in the strategy `lora`.
RATE = {**ADAMW, "learning_rate": 1e-3}


class Adapters(Experiment):
    """Train adapters and graft regions, each of several sizes; predict the task, and other data sets of its kind."""

    name: ClassVar = "adapters"
    paper: ClassVar = "tables 6 and 7"
    question: ClassVar = (
        "At each size, are adapters as accurate, as well calibrated and as good on other data as grafts?"
    )
    setting: ClassVar = replace(SMALL, tasks=("mpqa", "sst2"), seeds=(0,), arms={"adapters": RATE})

    def tasks(self, setting: Setting) -> list[tuple[str, ...]]:
        """Return the tasks and their targets, if they have any."""
        wanted = [target for task in setting.tasks for target in TARGETS.get(task, ())]
        return list(dict.fromkeys([*((task,) for task in setting.tasks), *wanted]))

    def measure(self, context: Context, unit: Unit) -> list[Row]:
        """Measure every method at every size, on the task and its targets."""
        tuned, sparsities = context.tuned(unit), context.setting.sparsities
        tests: dict[str, Examples] = {unit["task"]: tuned.bench.task.test}
        for names in TARGETS.get(unit["task"], ()):
            if not context.missing(names):
                name = context.first_available(names)
                tests[name] = target_rows(context, tuned, name)
        grafts = [(share_of(1.0), tuned.fine_tuned)]
        grafts += [(share_of(s), tuned.graft(r)) for s, r in zip(sparsities, tuned.learned(*sparsities), strict=True)]
        rows = []
        for share, state in grafts:
            answers = {
                name: label_answers(tuned.bench.answers(state, test, tuned.options)) for name, test in tests.items()
            }
            rows += self._rows(tuned, answers, "graft", share)
        options = context.options(**context.setting.arms["adapters"])
        for method, sizes in SIZES.items():
            for size in sizes:
                rows += self._rows(tuned, adapted(tuned.bench, method, size, options, tests), method, str(size))
        return rows

    @staticmethod
    def _rows(tuned: TunedTask, answers: Mapping[str, LabelAnswers], method: str, size: str) -> list[Row]:
        rows = []
        for target, given in answers.items():
            metric = tuned.bench.task.definition.metric if target == tuned.bench.task.name else "accuracy"
            measured = {"score": given.score(metric), "constant": given.constant_score(metric), "ece": given.ece}
            rows.append({"target": target, "method": method, "size": size, "test_rows": len(given.labels), **measured})
        return rows

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Return the paper's tables, and ours."""
        own = [{**row, "method": f"{row['method']} {row['size']}"} for row in rows]
        scores: dict[str, tuple[str, dict[str, Any]]] = {}
        for row in own:
            pair = {"task": row["task"], "target": row["target"]}
            scores[row["task"] if len(set(pair.values())) == 1 else " → ".join(pair.values())] = ("score", pair)
        eces = {name: ("ece", pair) for name, (_, pair) in scores.items() if "→" not in name}
        floors = [{**row, "method": CONSTANT, "score": row["constant"]} for row in select(own, method=own[0]["method"])]
        return [
            TABLE_6,
            TABLE_7,
            pivot(f"{SCORE}; on other data, accuracy", [*own, *floors], "method", scores),
            pivot("Expected calibration error", own, "method", eces),
        ]

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Return claims on the smallest graft against adapters, mean over sizes and tasks."""
        inside = [row for row in rows if row["target"] == row["task"]]
        outside = [row for row in rows if row["target"] != row["task"]]
        grafts, found = [size for size in distinct(select(rows, method="graft"), "size") if size != share_of(1.0)], []
        for key, those, text, paper in (
            ("ece", inside, "has less calibration error", "lower"),
            ("score", outside, "scores higher on other data", "higher"),
        ):
            graft = mean(those, key, method="graft", size=grafts[0]) if grafts else float("nan")
            for method in SIZES:
                other = mean(those, key, method=method)
                better = graft < other if key == "ece" else graft > other
                found.append(
                    Claim(
                        f"the smallest graft {text} than {method}",
                        paper,
                        f"{percent(graft)} against {percent(other)}",
                        verdict(better, graft, other),
                    )
                )
        return found

    def draw(self, rows: Sequence[Row]) -> Figure:
        """Draw ECE over score, with a point for each size."""
        tasks = distinct(rows, "task")
        figure, (axes,) = panels(tasks, share_y=False)
        for ax, task in zip(axes, tasks, strict=True):
            for method in ("graft", *SIZES):
                those = select(rows, task=task, target=task, method=method)
                for size in distinct(those, "size"):
                    x, y = (100 * mean(those, key, size=size) for key in ("score", "ece"))
                    ax.plot(x, y, linestyle="", **look(method))
                    ax.annotate(size, (x, y), textcoords="offset points", xytext=(3, 3), fontsize=6)
            ax.set_xlabel("score (%)")
        axes[0].set_ylabel("calibration error (points)")
        legend(figure, axes)
        return figure


def adapted(
    bench: SingleTask, method: str, size: int, options: LocalizationOptions, tests: Mapping[str, Examples]
) -> dict[str, LabelAnswers]:
    """Train adapters and readout, and return the answers on each set of rows."""
    seed = derive_seed(bench.seed, "adapters", bench.task.name)
    steps = bench.task.full_steps(options)
    with bench.holding(bench.pre), _adapters(bench, method, size, seed) as parameters:
        with bench.monitor.phase(bench.task.name, "train", steps) as on_step:
            fine_tune(
                bench.model,
                bench.task.train,
                options.model_copy(update={"l1": 0.0}),
                steps=steps,
                seed=seed,
                on_step=on_step,
                trained=WholeTensors(parameters),
            )
        return {name: label_answers(answers_of(bench.model, bench.task, rows, options)) for name, rows in tests.items()}


@contextmanager
def _adapters(bench: SingleTask, method: str, size: int, seed: int) -> Iterator[list[nn.Parameter]]:
    """Put adapters into the model inside the block, and yield their parameters."""
    model, backbone = bench.model, bench.model.backbone
    if method != "LoRA":
        with bottlenecks(backbone, method, size, seed) as parameters:
            yield parameters
        return
    lora = LoraAdapters(backbone)
    pattern = "|".join(map(re.escape, targets(backbone, bench.space)))
    lora.add("task", LoraConfig(r=size, lora_alpha=2 * size, lora_dropout=0.0, target_modules=pattern), seed)
    model.backbone = lora.activate(["task"])
    try:
        yield lora.parameters("task")
    finally:
        model.backbone = backbone


if __name__ == "__main__":
    raise SystemExit(main(Adapters()))
