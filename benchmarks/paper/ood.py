"""Other data sets of the same kind, and interpolated weights. Table 3 and figure 7 of the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure

from benchmarks.paper.context import Context, TunedTask
from benchmarks.paper.experiment import Claim, Experiment, main
from benchmarks.paper.plots import look, panels
from benchmarks.paper.published import TABLE_7, cell
from benchmarks.paper.rows import Row, Unit, distinct, mean, pivot, values, verdict, with_constant
from benchmarks.paper.setting import SMALL, Setting
from forgetfree.data.examples import EncodedRows
from forgetfree.data.rows import representative
from forgetfree.display import NULL
from forgetfree.errors import UnknownNameError, UsageError
from forgetfree.results.report.figures import legend
from forgetfree.results.report.page import Table, percent
from forgetfree.results.runs import CONSTANT

#: Source to targets; a target has one name or several, and the first name with data is used.
TARGETS: dict[str, tuple[tuple[str, ...], ...]] = {
    "sst2": (("yelp_polarity", "yelp_polarity_from_full"), ("imdb",)),
    "mpqa": (("sst2",), ("yelp_polarity", "yelp_polarity_from_full")),
    "qnli": (("mnli",), ("snli",)),
}
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
MODELS = ("fine-tuned", "grafted")


class OutOfDistribution(Experiment):
    """Predict other data sets without training on them; interpolate between θ_pre and the model (WiSE-FT, WiSE-graft).

    QNLI's model predicts only the contradiction and entailment rows of MNLI and SNLI (table 3, "0/1").
    """

    name: ClassVar = "ood"
    paper: ClassVar = "table 3, figure 7"
    single: ClassVar = ("shots", "sparsities")
    question: ClassVar = "Does a graft answer data of another source better than the fine-tuned model?"
    setting: ClassVar = replace(SMALL, tasks=tuple(TARGETS), sparsities=(1e-3,), seeds=(0,), test_limit=200)

    def tasks(self, setting: Setting) -> list[tuple[str, ...]]:
        """Return sources and their targets."""
        for source in setting.tasks:
            if source not in TARGETS:
                raise UnknownNameError("source for ood", source, TARGETS)
        return list(dict.fromkeys([(s,) for s in setting.tasks] + [t for s in setting.tasks for t in TARGETS[s]]))

    def measure(self, context: Context, unit: Unit) -> list[Row]:
        """Measure both models at every α, on the source and its targets."""
        tuned = context.tuned(unit)
        tests = {unit["task"]: tuned.bench.task.test}
        for names in TARGETS[unit["task"]]:
            if not context.missing(names):
                name = context.first_available(names)
                tests[name] = target_rows(context, tuned, name)
        (region,) = tuned.learned(context.setting.sparsity)
        models = {"fine-tuned": tuned.fine_tuned, "grafted": tuned.graft(region)}
        rows = []
        for target, test in tests.items():
            for model, state in models.items():
                for alpha in ALPHAS:
                    between = replace(state, theta=torch.lerp(tuned.pre.theta, state.theta, alpha))
                    answers = tuned.bench.answers(between, test, tuned.options)
                    rows.append(
                        {
                            "target": target,
                            "model": model,
                            "alpha": alpha,
                            "test_rows": len(test),
                            "score": answers.score("accuracy"),
                            "constant": answers.constant_score("accuracy"),
                            "ece": answers.ece,
                        }
                    )
        return rows

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Return accuracy and ECE by source and target."""
        whole = [row for row in rows if row["alpha"] == 1.0]
        best = [
            {
                **row,
                "score": max(values(rows, "score", **{key: row[key] for key in ("task", "target", "model", "seed")})),
            }
            for row in whole
        ]
        by = ("task", "target")
        models: dict[str, dict[str, Any]] = {name: {"model": name} for name in MODELS}
        return [
            pivot(
                "Accuracy on the target",
                whole,
                by,
                with_constant(whole, {name: ("score", what) for name, what in models.items()}),
            ),
            pivot("ECE on the target", whole, by, {name: ("ece", what) for name, what in models.items()}),
            pivot(
                "Accuracy at the best α of each (an upper bound: α is chosen on the target itself)",
                best,
                by,
                with_constant(best, {f"WiSE, {name}": ("score", what) for name, what in models.items()}),
            ),
        ]

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Return a claim for each source and target; it is undecided if no model is above a constant answer."""
        found = []
        for task in distinct(rows, "task"):
            for target in (name for name in distinct([r for r in rows if r["task"] == task], "target") if name != task):
                which = {"task": task, "target": target, "alpha": 1.0}
                full, graft = (mean(rows, "score", model=model, **which) for model in MODELS)
                told = all("constant" in row for row in rows)  # results of older versions lack it
                constant = mean(rows, "constant", **which) if told else math.nan
                beside = f", {CONSTANT} {percent(constant)}" if told else ""
                found.append(
                    Claim(
                        f"{task} → {target}: the graft answers better than the fine-tuned model",
                        _published(f"{task} → {target.partition('_')[0]}"),
                        f"{percent(graft)} against {percent(full)}{beside}",
                        None if max(full, graft) <= constant else verdict(graft > full, graft, full),
                    )
                )
        return found

    def draw(self, rows: Sequence[Row]) -> Figure:
        """Draw accuracy on the target over accuracy on the source, with α from θ_pre to the model."""
        pairs = [pair for pair in dict.fromkeys((r["task"], r["target"]) for r in rows) if pair[0] != pair[1]]
        figure, (axes,) = panels(
            [f"{task} →\n{target}" for task, target in pairs], width=2.3, height=2.5, share_y=False
        )
        for ax, (task, target) in zip(axes, pairs, strict=True):
            for model in MODELS:
                x, y = (
                    [100 * mean(rows, "score", task=task, target=t, model=model, alpha=a) for a in ALPHAS]
                    for t in (task, target)
                )
                ax.plot(x, y, **(look(model) | {"label": f"WiSE, {model}"}))
                ax.annotate("α = 1", (x[-1], y[-1]), textcoords="offset points", xytext=(3, 3), fontsize=7)
            ax.set_xlabel(f"{task} (%)")
        axes[0].set_ylabel("accuracy on the target (%)")
        legend(figure, axes)
        return figure


def _published(pair: str) -> str:
    """Return the paper's scores of the smallest graft and the fine-tuned model."""
    if pair not in TABLE_7.header:
        return NULL
    return f"{cell(TABLE_7, 'graft 0.01 %', pair)} against {cell(TABLE_7, 'graft 100 %', pair)}"


def target_rows(context: Context, tuned: TunedTask, name: str) -> EncodedRows:
    """Return another task's test rows, encoded for the source; labels are matched by name, rows without a match left out."""
    target = context.rows(name)
    new = matched(target.task.labels, tuned.bench.task.definition.labels, name)
    test = target.test.take([i for i, label in enumerate(target.test.labels) if label in new])
    test = test.take(representative(test.labels, context.setting.test_limit))
    return tuned.bench.encode(replace(test, labels=tuple(new[label] for label in test.labels)))


def matched(labels: Sequence[str], sources: Sequence[str], name: str) -> dict[int, int]:
    """Map each label of the target to the source's, by name; a contradiction is no entailment, neutral has no match (table 3).

    Raises:
        UsageError: the source lacks a label.
    """
    known = {label.lower(): i for i, label in enumerate(sources)}
    if "not_entailment" in known:
        known["contradiction"] = known["not_entailment"]
    wanted = {i: label for i, label in enumerate(labels) if label.lower() != "neutral" or "neutral" in known}
    if lacking := [label for label in wanted.values() if label.lower() not in known]:
        raise UsageError(
            f"The labels of {name!r} ({', '.join(labels)}) are not those of the source ({', '.join(sources)}): it lacks "
            f"{', '.join(lacking)}. Set label_names in the source.json of either."
        )
    return {i: known[label.lower()] for i, label in wanted.items()}


if __name__ == "__main__":
    raise SystemExit(main(OutOfDistribution()))
