"""Claims, tables and matched label names in the experiments of the paper, on hand-made rows."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.paper import published
from benchmarks.paper.multi_task import groups, with_gains
from benchmarks.paper.ood import matched
from benchmarks.paper.overview import EXPERIMENTS
from benchmarks.paper.rows import pivot
from forgetfree.errors import UsageError


def verdicts(name: str, rows: list[dict[str, Any]]) -> dict[str, bool | None]:
    return {claim.text: claim.holds for claim in EXPERIMENTS[name].claims(rows)}


def test_localization_asks_for_95_percent_of_the_fine_tuned_score() -> None:
    def rows(grafted: float, before: float = 0.5) -> list[dict[str, Any]]:
        common = {"task": "a", "shots": 64, "seed": 0}
        return [
            {**common, "model": "pre-trained", "sparsity": 0.0, "score": before},
            {**common, "model": "fine-tuned", "sparsity": 1.0, "score": 0.8},
            {**common, "model": "grafted", "sparsity": 0.01, "score": grafted},
        ]

    assert list(verdicts("localization", rows(0.77)).values()) == [True]  # 96.25 %
    assert list(verdicts("localization", rows(0.75)).values()) == [False]  # 93.75 %
    assert list(verdicts("localization", rows(0.8, before=0.76)).values()) == [None]  # nothing was learned


def test_calibration_asks_for_an_ece_at_least_40_percent_lower() -> None:
    def rows(ece: float, retrained: float) -> list[dict[str, Any]]:
        common = {"task": "a", "seed": 0, "score": 0.9, "ece": 0.1}
        return [
            {**common, "model": "fine-tuned"},
            {**common, "model": "grafted", "ece": ece},
            {**common, "model": "retrained", "score": retrained},
            {**common, "model": "bitfit"},
        ]

    assert list(verdicts("calibration", rows(0.055, 0.91)).values()) == [True, True]  # 45 % lower
    assert list(verdicts("calibration", rows(0.07, 0.85)).values()) == [False, False]  # 30 % lower


def test_optimizers_compares_shares_kept() -> None:
    def rows(adamw: float, l1: float) -> list[dict[str, Any]]:
        kept = {"sgd": 0.9, "adamw": adamw, "adamw + ℓ1": l1}
        return [
            {"task": "a", "seed": 0, "optimizer": name, "model": model, "sparsity": sparsity, "score": score}
            for name, share in kept.items()
            for model, sparsity, score in (("fine-tuned", 1.0, 0.8), ("grafted", 0.01, 0.8 * share))
        ]

    assert list(verdicts("optimizers", rows(0.6, 0.95)).values()) == [True, True]
    assert list(verdicts("optimizers", rows(0.95, 0.9)).values()) == [False, False]


def test_sparsity_curve_tells_learned_from_moved_and_random() -> None:
    def rows(moved: float, random: float) -> list[dict[str, Any]]:
        scores = {"none": 0.5, "fine-tuned": 0.9, "learned": 0.85, "movement": moved, "random": random}
        sparsity = {"none": 0.0, "fine-tuned": 1.0}
        return [
            {"task": "a", "seed": 0, "region": name, "sparsity": sparsity.get(name, 0.01), "score": score}
            for name, score in scores.items()
        ]

    assert list(verdicts("sparsity-curve", rows(0.6, 0.55)).values()) == [True, True]
    assert list(verdicts("sparsity-curve", rows(0.84, 0.7)).values()) == [False, False]


def test_ood_compares_whole_models_by_target() -> None:
    def rows(grafted: float) -> list[dict[str, Any]]:
        return [
            {"task": "a", "seed": 0, "target": target, "model": model, "alpha": alpha, "score": score}
            for target in ("a", "b")
            for model, score in (("fine-tuned", 0.7), ("grafted", grafted))
            for alpha in (0.0, 1.0)
        ]

    assert list(verdicts("ood", rows(0.71)).values()) == [True]
    assert list(verdicts("ood", rows(0.69)).values()) == [False]


def test_of_two_models_below_a_constant_answer_neither_is_called_better() -> None:
    rows = [
        {"task": "qnli", "target": "mnli", "model": model, "alpha": 1.0, "seed": 0, "score": score, "constant": 0.6}
        for model, score in (("fine-tuned", 0.4), ("grafted", 0.5))
    ]
    (claim,) = EXPERIMENTS["ood"].claims(rows)
    assert claim.holds is None and claim.ours == "50.0 against 40.0, a constant answer 60.0"
    (claim,) = EXPERIMENTS["ood"].claims([row | {"constant": 0.45} for row in rows])
    assert claim.holds is True


def test_what_fails_asks_whether_biases_and_tickets_fail() -> None:
    def rows(bias: float, pruned: float) -> list[dict[str, Any]]:
        scores = {
            "fine-tuned": 0.9,
            "no graft": 0.5,
            "grafted": 0.85,
            "biases": bias,
            "pruned to the graft's region": pruned,
            "pruned": pruned,
        }
        return [
            {"task": "a", "seed": 0, "model": name, "sparsity": 0.1, "score": score} for name, score in scores.items()
        ]

    assert list(verdicts("what-fails", rows(0.6, 0.5)).values()) == [True, True, True]
    assert list(verdicts("what-fails", rows(0.84, 0.61)).values()) == [False, False, False]


def test_continual_sets_the_papers_numbers_beside_ours() -> None:
    rows = [
        {"task": task, "seed": 0, "strategy": name, "score": score, "learned": score, "ece": 0.1}
        for name, score in (("fine-tune", 0.8), ("continual-ft", 0.6), ("grafting-continual", 0.79))
        for task in ("qnli", "ag_news", "sst2")
    ]
    claims = EXPERIMENTS["continual"].claims(rows)
    assert [claim.holds for claim in claims] == [True, True, True]
    assert claims[0].paper == "86.5 against 67.5"
    assert claims[0].ours == "79.0 against 60.0"
    rows = [row | {"shots": 512, "train_shots": 512} for row in rows]
    titles = [table.title for table in EXPERIMENTS["continual"].tables(rows)]
    assert "Accuracy after the last task, here" in titles
    fewer = [row | {"train_shots": 327} for row in rows]
    titles = [table.title for table in EXPERIMENTS["continual"].tables(fewer)]
    assert "Accuracy after the last task, here (with 327 shots: a label has no more rows)" in titles
    rows[-2]["learned"] += 0.01  # one task loses what another gains: that is still a change
    rows[-1]["learned"] -= 0.01
    assert [claim.holds for claim in EXPERIMENTS["continual"].claims(rows)] == [True, True, False]
    others = [row | {"task": row["task"].upper()} for row in rows]
    assert EXPERIMENTS["continual"].claims(others)[0].paper == "— against —"


def test_a_table_is_mean_and_standard_deviation_over_seeds_in_percent() -> None:
    rows = [{"task": "a", "seed": seed, "model": "m", "score": score} for seed, score in enumerate((0.5, 0.7))]
    table = pivot("t", rows, "task", {"m": ("score", {"model": "m"}), "n": ("score", {"model": "n"})})
    assert (table.header, table.rows) == (("task", "m", "n"), (("a", "60.0 (14.1)", "—"),))


def test_labels_of_targets_are_matched_by_name() -> None:
    three = ("entailment", "neutral", "contradiction")
    assert matched(three, ("entailment", "not_entailment"), "mnli") == {0: 0, 2: 1}  # neutral is left out (table 3)
    assert matched(three, ("not_entailment", "entailment"), "mnli") == {0: 1, 2: 0}
    assert matched(three, three[::-1], "mnli") == {0: 2, 1: 1, 2: 0}
    assert matched(("Positive", "negative"), ("negative", "positive"), "imdb") == {0: 1, 1: 0}
    with pytest.raises(UsageError, match=r"labels of 'boolq' \(false, true\) are not those of the source"):
        matched(("false", "true"), ("negative", "positive"), "boolq")


def multi_task_rows(kin: float, union: float, pure: float) -> list[dict[str, Any]]:
    """Return rows where SST-2 and CR are related, and QNLI is not; training lifts each score from 50 to 90 %."""
    tasks, common = ("sst2", "cr", "qnli"), {"seed": 0, "shots": 4}
    rows = []
    for task in tasks:
        of = {**common, "task": task}
        rows += [
            {**of, "region": name, "model": name, "score": s} for name, s in (("no graft", 0.5), ("whole model", 0.9))
        ]
        for region in tasks:
            gain = 0.9 if region == task else kin if {region, task} == {"sst2", "cr"} else 0.1
            rows.append({**of, "region": region, "model": "graft", "score": 0.5 + 0.4 * gain, "overlap": gain / 2})
        for region in ("sentiment", "all") if task != "qnli" else ("all",):
            for model, gain in (("union", union), ("purified", pure)):
                rows.append({**of, "region": region, "model": model, "score": 0.5 + 0.4 * gain})
    return rows


def test_multi_task_weighs_kin_and_strangers_and_unions() -> None:
    claims = EXPERIMENTS["multi-task"].claims(multi_task_rows(0.6, 0.75, 0.85))
    assert [claim.holds for claim in claims] == [True, True, True, True, True, None]  # no MRPC, no QQP
    assert [claim.ours for claim in claims[1:5]] == ["30.0 against 5.0", "60.0 against 10.0", "75.0", "85.0"]
    claims = EXPERIMENTS["multi-task"].claims(multi_task_rows(0.05, 0.65, 0.7))
    assert [claim.holds for claim in claims] == [True, False, False, False, False, None]


def test_no_share_is_told_of_a_gain_that_is_noise() -> None:
    rows = [row | ({"score": 0.52} if row["model"] == "whole model" else {}) for row in multi_task_rows(0.6, 0.7, 0.8)]
    assert all(math.isnan(row["gain"]) for row in with_gains(rows))


def test_unions_are_of_kinds_of_pairs_and_of_all() -> None:
    assert groups(("snli", "mnli", "sst2", "cr", "qqp")) == {
        "NLI": ("snli", "mnli"),
        "sentiment": ("sst2", "cr"),
        "NLI + paraphrase": ("snli", "mnli", "qqp"),
        "all": ("snli", "mnli", "sst2", "cr", "qqp"),
    }
    assert groups(("snli", "mnli", "mine")) == {"NLI": ("snli", "mnli"), "all": ("snli", "mnli", "mine")}
    assert groups(("sst2", "qnli")) == {"all": ("sst2", "qnli")}


def test_the_papers_tables_are_whole() -> None:
    tables = [published.TABLE_6, published.TABLE_7, published.TABLE_8]
    assert [len(table.rows) for table in tables] == [16, 16, 12]
    for table in tables:
        assert table.title.endswith("in the paper")
        assert all(len(row) == len(table.header) for row in table.rows)
        assert all(0 <= float(cell) <= 100 for row in table.rows for cell in row[1:])
    rows = {row[0]: row for row in published.TABLE_6.rows}
    assert rows["graft 0.01 %"][1:3] == ("92.4", "3.2") and rows["LoRA 8"][-2:] == ("79.7", "14.3")
    assert next(row for row in published.TABLE_8.rows if row[0] == "qqp 0.01 %")[1] == "11.4"
