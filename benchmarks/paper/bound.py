"""Upper bounds on the error on new rows, from the error on training rows. Section 4.3 and appendix D of the paper.

A bound is useful if few bits describe the learned model:

1. which s of N entries its region holds: ln C(N, s) nats;
2. its values as θ_pre + scale · g, with g one of q even steps from −1 to 1: s·ln q, and 16·ln 2 for the scale;
3. its readout relative to the first label's: for n labels and H features (n − 1)·(H + 1) values of q′ steps, with one scale per
   tensor;
4. which sparsity, q and q′ were chosen from lists that were fixed before.

Let L be the sum. Give each model the failure probability δ·e^(−L); these sum to at most δ (Occam's razor: Blumer et
al., 1987; McAllester, 1999). The errors of one model on n independent rows are binomial. So k errors exclude each error rate p
at which k errors or fewer have a probability below δ·e^(−L); the largest remaining p is the certificate (Langford, 2005,
section 3). By the union bound, it holds for any way to find the model. ``--shots`` draws equally many rows of each label: the
lower tail of such a sum is no heavier than the tail of a binomial with its mean (Hoeffding, 1956, theorem 4), so the
certificate holds for new rows with the label shares of the training rows. On rows without a part in training,
``certified_error(k, m, 0.0, 0.05)`` gives a tighter limit. docs/experiments.md, "Certificates", lists the assumptions. The
bounds are defined below the experiment; all logarithms are natural.
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
#: The number of values that an entry of the region, or of the readout, may take.
LEVELS = (2, 4, 16)
#: The number of values of a float32, as the paper counts them.
FLOAT32_LEVELS = 2.0**32
#: The cost of describing a scale, which is a float16.
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
        # Few entries must move far: AdamW's steps have the same length for all of them.
        options={**_RECIPE, "steps": 200, "precision": "bf16"},
        optimizer={},
        test_limit=1000,
        validation_limit=128,
    )

    def measure(self, context: Context, unit: Unit) -> list[Row]:
        """Measure the fine-tuned model, re-trained regions, and these regions rounded to few values."""
        tuned, sparsities = context.tuned(unit), context.setting.sparsities
        rows = [self._row(tuned, tuned.fine_tuned, len(tuned.bench.space), model="fine-tuned", sparsity=1.0)]
        for sparsity, region in zip(sparsities, tuned.learned(*sparsities), strict=True):
            state = tuned.bench.retrained(tuned.pre, region, tuned.options)
            rows.append(self._row(tuned, state, len(region), model="re-trained", sparsity=sparsity))
            # The choices of sparsity and levels, and of the number of entries in a region, which depends on the data.
            choices = len(sparsities) * len(LEVELS) ** 2 * (1 + budget(len(tuned.bench.space), sparsity))
            rows += self._certified(tuned, state, region, sparsity, math.log(choices))
        return rows

    @staticmethod
    def _row(tuned: TunedTask, state: ModelState, entries: int, **what: object) -> Row:
        """Measure errors on as many training rows as test rows, and the paper's bound for all training rows."""
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
        """Return the certificate of the rounding with the best limit on validation rows; empty if no limit is below 1/2."""
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
        """Return errors and bounds by task, model and entries."""
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
        """Return claims on the gaps, the printed bound, and the best certificate of each task."""
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
        """Draw errors and certificates over the number of entries."""
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
    """Return the share of wrong answers, with labels weighted by their shares among the training rows."""
    given = label_answers(answers)
    wrong = torch.from_numpy(given.logits.argmax(1) != given.labels).double()
    labels, shares = torch.from_numpy(given.labels), Counter(tuned.bench.task.train.targets)
    there = {label: share for label, share in shares.items() if bool((labels == label).any())}
    return sum(share * float(wrong[labels == label].mean()) for label, share in there.items()) / sum(there.values())


def tested(tuned: TunedTask, state: ModelState) -> Row:
    """Return the error on test rows, and the accuracy of a constant answer there."""
    answers = tuned.answers_of(state)
    return {
        "test_rows": len(answers.labels),
        "test_error": error(tuned, answers),
        "constant": answers.constant_score("accuracy"),
    }


def described(
    tuned: TunedTask, state: ModelState, region: Region, levels: int, readout_levels: int
) -> tuple[ModelState, float]:
    """Return the model with rounded region and readout, and the length of its description in nats.

    The readout is described relative to the first label's, which changes no prediction.
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
        entries: s, the number of entries of the region.
        rows: n, the number of rows of the training set.
        delta: δ, the probability that the bound fails.
        levels: q, the number of values of an entry.
        log_regions: ln Θ, with Θ the number of regions that the training set could lead to; 0 for a region that is fixed
            before.
    """
    return 2 * math.sqrt((entries * math.log(levels) + log_regions + math.log(1 / delta)) / rows)


def region_nats(space_size: int, entries: int) -> float:
    """Return ``ln C(N, s)``: the cost in nats of describing which s of N entries a region holds.

    >>> round(math.exp(region_nats(5, 2)))
    10
    """
    return float(gammaln(space_size + 1) - gammaln(entries + 1) - gammaln(space_size - entries + 1))


def certified_error(errors: int, rows: int, nats: float, delta: float) -> float:
    """Return the largest error rate at which so few errors on training rows have a probability of at least δ·e^(−nats).

    With probability ≥ 1 − δ over the training rows no model with a description of this length has a higher error rate on new
    rows, for any way to find it: binomial tail inversion (Langford, 2005, section 3) with a union bound that gives each
    description its share of δ (Occam's razor, McAllester, 1999).

    Args:
        errors: the number of wrongly predicted training rows.
        rows: the number of training rows.
        nats: the length of the model's description, so that e^(−nats) sums to at most 1 over all models.
        delta: δ.
    """
    if errors >= rows:
        return 1.0
    k = np.arange(errors + 1)
    choices = gammaln(rows + 1) - gammaln(k + 1) - gammaln(rows - k + 1)
    allowed = math.log(delta) - nats

    def excess(rate: float) -> float:
        """Return the log-probability of at most so many errors, minus the allowed one."""
        return float(logsumexp(choices + k * math.log(rate) + (rows - k) * math.log1p(-rate))) - allowed

    low, high = max(errors / rows, 1e-12), 1 - 1e-12
    return 1.0 if excess(high) > 0 else float(brentq(excess, low, high, xtol=1e-9))


def on_grid(values: Tensor, levels: int) -> Tensor:
    """Return the values rounded to ``scale · {−1, …, 1}`` in ``levels`` even steps; the scale is a float16.

    The scale is the one of 32 with the smallest squared error; with two levels, it is about the mean magnitude.

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
