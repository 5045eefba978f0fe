"""How far the error on new rows can lie above that on training rows. Section 4.3 and appendix D of the paper.

A bound says something if few bits say which model was learned:

1. which s of N entries its region holds: ln C(N, s) nats;
2. their values as θ_pre + scale · g, with g one of q even steps from −1 to 1: s·ln q, and 16·ln 2 for the scale;
3. its readout relative to the first label's: for n labels and H features (n − 1)·(H + 1) values of q′ steps, with a
   scale a tensor;
4. which sparsity, q and q′ were chosen from lists that were fixed before.

Let L be the sum. Give each model δ·e^(−L) of the allowed failures, which sum to at most δ (Occam's razor: Blumer et
al., 1987; McAllester, 1999). The errors of one model on n independent rows are binomial. So with k errors, each share
p is excluded for which k errors or fewer have a probability below δ·e^(−L); the largest p that is left is the
certificate (Langford, 2005, section 3). The union bound makes it hold however the model was found. ``--shots`` draws
as many rows of each label: the lower tail of such a sum is no heavier than that of a binomial with its mean
(Hoeffding, 1956, theorem 4), so the error is that on new rows with the labels' shares among the training rows. Of
rows that took no part in training, ``certified_error(k, m, 0.0, 0.05)`` gives a tighter limit. docs/experiments.md,
"Certificates", has what this rests on. The bounds stand below the experiment; all logarithms are natural.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.optimize import brentq
from scipy.special import gammaln, logsumexp
from torch import Tensor

from benchmarks.paper.context import Context, TunedTask
from benchmarks.paper.experiment import Claim, Experiment, main
from benchmarks.paper.plots import look, panels
from benchmarks.paper.rows import Row, Unit, distinct, mean, pivot, select, sparsities_of, verdict
from benchmarks.paper.setting import SMALL
from forgetfree.core.regions import Region
from forgetfree.core.selection import budget
from forgetfree.data.rows import representative
from forgetfree.models.state import ModelState
from forgetfree.recipes import recipe_of
from forgetfree.results.answers import Answers, label_answers
from forgetfree.results.report.figures import legend
from forgetfree.results.report.page import Table, percent
from forgetfree.results.runs import CONSTANT
from forgetfree.training.single_task import VALIDATION_ROWS

#: The probability that a bound fails, for each task and seed.
DELTA = 0.05
#: How many values an entry of the region, or of the readout, may take.
LEVELS = (2, 4, 16)
#: Values that a float32 can take, as the paper counts them.
FLOAT32_LEVELS = 2.0**32
#: What a described scale costs: it is a float16.
SCALE_NATS = 16 * math.log(2)
# The paper's search; in float32: bounds are small differences.
_RECIPE = {
    key: value
    for key, value in recipe_of("minilm", {"region_from": "mask"}).items()
    if key not in {"sparsity", "precision"}
}


class Bound(Experiment):
    """Train–test gaps, the paper's bound, and certificates of models with a short description (docs/experiments.md)."""

    name: ClassVar = "bound"
    paper: ClassVar = "section 4.3, appendix D"
    single: ClassVar = ("shots",)
    question: ClassVar = "Do few trained entries bound the error on new rows by that on training rows?"
    setting: ClassVar = replace(
        SMALL,
        tasks=("ag_news", "mpqa"),
        seeds=(0,),
        sparsities=(3e-6, 1e-5, 1e-4),
        # Few entries must go far: AdamW's steps are as long for all of them.
        options={**_RECIPE, "steps": 200, "precision": "bf16"},
        optimizer={},
        test_limit=1000,
        validation_limit=128,
    )

    def measure(self, context: Context, unit: Unit) -> list[Row]:
        """The fine-tuned model, re-trained regions, and the same rounded to few values."""
        tuned, sparsities = context.tuned(unit), context.setting.sparsities
        rows = [self._row(tuned, tuned.fine_tuned, len(tuned.bench.space), model="fine-tuned", sparsity=1.0)]
        for sparsity, region in zip(sparsities, tuned.learned(*sparsities), strict=True):
            state = tuned.bench.retrained(tuned.pre, region, tuned.options)
            rows.append(self._row(tuned, state, len(region), model="re-trained", sparsity=sparsity))
            # Which sparsity and levels were taken, and how many entries a region has, which depends on the data.
            choices = len(sparsities) * len(LEVELS) ** 2 * (1 + budget(len(tuned.bench.space), sparsity))
            rows += self._certified(tuned, state, region, sparsity, math.log(choices))
        return rows

    @staticmethod
    def _row(tuned: TunedTask, state: ModelState, entries: int, **what: object) -> Row:
        """Errors on as many training rows as test rows, and the paper's bound for all training rows."""
        train = tuned.bench.task.train
        some = train.subset(representative(train.targets, len(tuned.bench.task.test)))
        return {
            **what,
            "entries": entries,
            "train_rows": len(train),
            "train_error": error(tuned, tuned.bench.answers(state, some, tuned.options)),
            **tested(tuned, state),
            "printed": printed_bound(entries, len(train), DELTA),
        }

    @staticmethod
    def _certified(tuned: TunedTask, state: ModelState, region: Region, sparsity: float, choices: float) -> list[Row]:
        """The certificate of the rounding that promises most on validation rows; none if it would be 1/2 at best."""
        train, validation = tuned.bench.task.train, tuned.bench.task.validation
        validation = validation.subset(representative(validation.targets, VALIDATION_ROWS))
        best = 0.5, 0, 0
        for levels in LEVELS:
            for readout_levels in LEVELS:
                made, nats = described(tuned, state, region, levels, readout_levels)
                if certified_error(0, len(train), nats + choices, DELTA) < best[0]:
                    promised = error(tuned, tuned.bench.answers(made, validation, tuned.options))
                    limit = certified_error(round(promised * len(train)), len(train), nats + choices, DELTA)
                    best = min(best, (limit, levels, readout_levels))
        if best[0] == 0.5:
            return []
        made, nats = described(tuned, state, region, *best[1:])
        answers = label_answers(tuned.bench.answers(made, train, tuned.options))
        errors = int((answers.logits.argmax(1) != answers.labels).sum())
        return [
            {
                "model": "described",
                "sparsity": sparsity,
                "entries": len(region),
                "levels": best[1],
                "readout_levels": best[2],
                "nats": round(nats + choices, 1),
                "train_rows": len(train),
                "train_error": errors / len(train),
                **tested(tuned, made),
                "certificate": certified_error(errors, len(train), nats + choices, DELTA),
            }
        ]

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Errors and bounds by task, model and entries."""
        errors: dict[str, tuple[str, dict[str, Any]]] = {
            "training rows": ("train_error", {}),
            "test rows": ("test_error", {}),
        }
        whole = [row for row in rows if row["model"] != "described"]
        certified = [{**row, "constant": 1 - row["constant"]} for row in select(rows, model="described")]
        limits = {**errors, CONSTANT: ("constant", {}), f"at most, with {1 - DELTA:.0%}": ("certificate", {})}
        title = "Error, and the paper's bound on the difference"
        tables = [pivot(title, whole, ("task", "model", "entries"), {**errors, "bound": ("printed", {})})]
        if certified:
            title = "Error of models with a description of so many nats, and what is certified of all new rows"
            tables.append(pivot(title, certified, ("task", "entries", "nats"), limits))
        return tables

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """The gaps, the bound as printed, and the best certificate of each task."""
        found = []
        for task in distinct(rows, "task"):
            those = select(rows, task=task)
            largest = max(sparsities_of(those, model="re-trained"), default=0.0)
            gaps = {
                model: mean(those, "test_error", model=model, sparsity=share)
                - mean(those, "train_error", model=model, sparsity=share)
                for model, share in (("fine-tuned", 1.0), ("re-trained", largest))
            }
            printed = mean(those, "printed", model="re-trained", sparsity=largest)
            limits = {
                s: mean(those, "certificate", model="described", sparsity=s)
                for s in sparsities_of(those, model="described")
            }
            best = min(limits, key=lambda s: limits[s], default=math.nan)
            limit, test = limits.get(best, math.nan), mean(those, "test_error", model="described", sparsity=best)
            found += [
                Claim(
                    f"{task}: the gap between training and test error is smaller for a re-trained region",
                    "1 against 12 (QNLI)",
                    f"{percent(gaps['re-trained'])} against {percent(gaps['fine-tuned'])}",
                    verdict(gaps["re-trained"] < gaps["fine-tuned"], *gaps.values()),
                ),
                Claim(
                    f"{task}: the bound as printed says nothing (above 100)",
                    "740 (computed for QNLI)",
                    percent(printed),
                    verdict(printed > 1, printed),
                ),
                Claim(
                    f"{task}: a model with a short description is certified to err on less than half of all new rows",
                    "—",
                    f"{percent(limit)} certified, {percent(test)} on test rows",
                    verdict(limit < 0.5, limit),
                ),
            ]
        return found

    def draw(self, rows: Sequence[Row]) -> Figure:
        """Errors and certificates over the number of entries."""
        tasks = distinct(rows, "task")
        figure, (axes,) = panels(tasks)
        lines = (
            ("re-trained", "train_error", "random"),
            ("re-trained", "test_error", "retrained"),
            ("described", "test_error", "grafted"),
            ("described", "certificate", "pruned"),
        )
        for ax, task in zip(axes, tasks, strict=True):
            for model, key, style in lines:
                those = select(rows, task=task, model=model)
                at = sorted({row["entries"] for row in those})
                label = f"{model}: {key.replace('_', ' ')}"
                ax.plot(at, [100 * mean(those, key, entries=n) for n in at], **{**look(style), "label": label})
            full = 100 * mean(rows, "test_error", task=task, model="fine-tuned")
            ax.axhline(full, color="black", ls="--", label="fine-tuned: test error")
            ax.set_xscale("log")
            ax.set_xlabel("entries of the region")
        axes[0].set_ylabel("error (%)")
        legend(figure, axes)
        return figure


def error(tuned: TunedTask, answers: Answers) -> float:
    """The share of wrong answers, each label weighted as it is among the training rows."""
    given = label_answers(answers)
    wrong = torch.from_numpy(given.logits.argmax(1) != given.labels).double()
    labels, shares = torch.from_numpy(given.labels), Counter(tuned.bench.task.train.targets)
    there = {label: share for label, share in shares.items() if bool((labels == label).any())}
    return sum(share * float(wrong[labels == label].mean()) for label, share in there.items()) / sum(there.values())


def tested(tuned: TunedTask, state: ModelState) -> Row:
    """The error on test rows, and what a constant answer gets right there."""
    answers = tuned.answers_of(state)
    return {
        "test_rows": len(answers.labels),
        "test_error": error(tuned, answers),
        "constant": answers.constant_score("accuracy"),
    }


def described(
    tuned: TunedTask, state: ModelState, region: Region, levels: int, readout_levels: int
) -> tuple[ModelState, float]:
    """The model that is left when region and readout are rounded, and the length of its description in nats.

    The readout is described relative to that of the first label, which changes no answer.
    """
    at, pre = region.indices, tuned.pre.theta
    theta = pre.clone()
    theta[at] += on_grid(state.theta[at] - pre[at], levels)
    nats = region_nats(len(pre), len(region)) + len(region) * math.log(levels) + SCALE_NATS
    task, readout = tuned.bench.task.name, dict[str, Tensor]()
    for name, tensor in state.readouts[task].items():
        others = tensor[1:] - tensor[:1]
        rounded = on_grid(others.flatten(), readout_levels).view_as(others)
        readout[name] = torch.cat([torch.zeros_like(tensor[:1]), rounded])
        nats += others.numel() * math.log(readout_levels) + SCALE_NATS
    return replace(state, theta=theta, readouts={task: readout}), nats


# -- The bounds ------------------------------------------------------------------------------------------


def printed_bound(
    entries: int, rows: int, delta: float, levels: float = FLOAT32_LEVELS, log_regions: float = 0
) -> float:
    """Return ``2·√((s·ln q + ln Θ + ln(1/δ)) / n)``: the train–test term of the paper (appendix D, theorem D.2).

    >>> round(printed_bound(5000, 8192, 0.05), 1)
    7.4

    Args:
        entries: s, of the region.
        rows: n, of the training set.
        delta: δ, the probability that the bound fails.
        levels: q, the values that an entry can take.
        log_regions: ln Θ, of the number of regions that the training set could lead to; 0 for a region that is fixed before.
    """
    return 2 * math.sqrt((entries * math.log(levels) + log_regions + math.log(1 / delta)) / rows)


def region_nats(space_size: int, entries: int) -> float:
    """Return ``ln C(N, s)``: what it costs to say which s of N entries a region holds.

    >>> round(math.exp(region_nats(5, 2)))
    10
    """
    return float(gammaln(space_size + 1) - gammaln(entries + 1) - gammaln(space_size - entries + 1))


def certified_error(errors: int, rows: int, nats: float, delta: float) -> float:
    """Return the largest error rate under which so few errors on training rows have probability δ·e^(−nats) or more.

    With probability ≥ 1 − δ over the training rows no model that has a description of this length errs more often on new
    rows, however it was found: binomial tail inversion (Langford, 2005, section 3) in the union bound that gives each
    description its share of δ (Occam's razor, McAllester, 1999).

    Args:
        errors: training rows that the model answers wrongly.
        rows: all training rows.
        nats: the length of the model's description, so that e^(−nats) sums to at most 1 over all models.
        delta: δ.
    """
    if errors >= rows:
        return 1.0
    k = np.arange(errors + 1)
    choices = gammaln(rows + 1) - gammaln(k + 1) - gammaln(rows - k + 1)
    allowed = math.log(delta) - nats

    def excess(rate: float) -> float:
        """How far the log-probability of at most so many errors lies above what is allowed."""
        return float(logsumexp(choices + k * math.log(rate) + (rows - k) * math.log1p(-rate))) - allowed

    low, high = max(errors / rows, 1e-12), 1 - 1e-12
    return 1.0 if excess(high) > 0 else float(brentq(excess, low, high, xtol=1e-9))


def on_grid(values: Tensor, levels: int) -> Tensor:
    """Return the values rounded to ``scale · {−1, …, 1}`` in ``levels`` even steps; the scale is a float16.

    Of 32 scales the one with the smallest squared error is taken: with two levels about the mean magnitude.

    >>> on_grid(torch.tensor([4.0, -4.0, 2.0, -2.0]), 2).tolist()
    [3.0, -3.0, 3.0, -3.0]
    """
    largest = float(values.abs().max()) if len(values) else 0.0
    best = torch.zeros_like(values)
    for part in range(1, 33):
        scale = float(torch.tensor(largest * part / 32).to(torch.float16))
        if 0 < scale < math.inf:
            steps = ((values / scale).clamp(-1, 1) + 1) * (levels - 1) / 2
            rounded = (steps.round() * 2 / (levels - 1) - 1) * scale
            if (rounded - values).square().sum() < (best - values).square().sum():
                best = rounded
    return best


if __name__ == "__main__":
    raise SystemExit(main(Bound()))
