"""Intervals and differences, compared with slow references, known truths and hand-worked numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from edited import change_outcome
from handmade import results_of, run_of, together
from reported import edit_about, make_run

from benchmarks.coverage import SEEDS, WORLDS, coverage
from forgetfree.errors import RunError
from forgetfree.results.answers import LabelAnswers
from forgetfree.results.evidence import Evidence, RowScore, forgetting, interval, ratio, shared_variance
from forgetfree.results.report.run_report import lay_out
from forgetfree.results.table import Results, load_results


def answering(right: np.ndarray, labels: np.ndarray) -> LabelAnswers:
    """Return answers of two labels that are right where ``right`` is true."""
    predicted = np.where(right, labels, 1 - labels)
    return LabelAnswers(np.eye(2, dtype=np.float32)[predicted], labels)


def some(n: int, share: float, seed: int) -> LabelAnswers:
    random = np.random.default_rng(seed)
    labels = (random.random(n) < 0.3).astype(np.int64)
    return answering(random.random(n) < share, labels)


def evidence_of(answers: dict[str, dict[int, dict[str, LabelAnswers]]], metric: str = "accuracy") -> Evidence:
    return Evidence(
        {
            name: {seed: {t: RowScore.of_answers(a, metric) for t, a in tasks.items()} for seed, tasks in seeds.items()}
            for name, seeds in answers.items()
        }
    )


@pytest.mark.parametrize("metric", ["accuracy", "f1", "macro_f1", "ece"])
def test_what_a_row_adds_is_what_the_score_moves_by_when_it_counts_more(metric: str) -> None:
    """A row's influence is the derivative of the score by the row's weight; the reference is a slow difference quotient."""
    answers = some(37, 0.7, 1)
    if metric == "ece":
        answers = LabelAnswers(np.random.default_rng(0).standard_normal((37, 2)), answers.labels)
    found = RowScore.of_answers(answers, metric)
    exact = answers.ece if metric == "ece" else answers.score(metric)
    assert found.value == pytest.approx(exact) and found.influence is not None
    many = 1000  # the number of copies of each row; one row gets another copy
    for row in range(0, 37, 9):
        chosen = np.append(np.repeat(np.arange(37), many), row)
        again = LabelAnswers(answers.logits[chosen], answers.labels[chosen])
        moved = (again.ece if metric == "ece" else again.score(metric)) - exact
        assert moved * (37 * many + 1) == pytest.approx(found.influence[row], abs=2e-3)


@pytest.mark.parametrize("metric", ["accuracy", "ece"])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_scores_alone_bound_what_rows_add(metric: str, spread: float) -> None:
    """The bound also holds where all answers are right and confidence varies."""
    for seed in range(21):
        answers = some(300, 0.5 + 0.025 * seed, seed)
        sure = 2 + spread * np.random.default_rng(seed).random((300, 1))
        answers = LabelAnswers(answers.logits * sure, answers.labels)
        known = RowScore.of_answers(answers, metric)
        bound, more = (RowScore.of_value(known.value, metric, 300, a) for a in (answers.score("accuracy"), None))
        assert known.variance <= bound.variance + 1e-9 and bound.variance <= more.variance


@pytest.mark.parametrize("metric", ["f1", "bleu", "perplexity"])
def test_of_scores_that_bound_nothing_nothing_is_said_of_rows(metric: str) -> None:
    """With label 1 in 2 % of rows, F1 has a row variance far above that of any mean of shares, so there is no bound."""
    labels = (np.arange(1000) % 50 == 0).astype(np.int64)
    rare = RowScore.of_answers(answering(np.arange(1000) % 80 != 0, labels), "f1")
    assert rare.variance > 1
    assert RowScore.of_value(rare.value, metric, 1000).variance == 0


def test_the_accuracy_of_a_task_with_another_metric_is_not_known() -> None:
    """An F1 of 0 is not an accuracy of 0: the ECE of such answers varies with the rows."""
    run = run_of("continual-ft", 0, [0.0, 0.0])
    rows = {"fingerprints": {}, "test_rows": {"qnli": 40, "mrpc": 40}}
    found = together([results_of(run, data=rows)]).evidence("ece").scores["continual-ft"][0]
    assert found["mrpc"].variance > 0.25 > found["qnli"].variance


def test_an_interval_is_worked_by_hand() -> None:
    """Seeds 0.80 and 0.84: s²/2 = 0.0008 / 2 = 0.0004, t(1) = 12.706. Rows add 0.0004, z = 1.960."""
    alone, both = interval([0.80, 0.84]), interval([0.80, 0.84], 0.0004)
    assert alone.high - alone.value == pytest.approx(12.7062 * 0.02, rel=1e-4)
    assert both.high - both.value == pytest.approx((0.0004 * 12.7062 + 0.0004 * 1.95996) / 0.0008**0.5, rel=1e-4)
    assert both.p(both.high) == pytest.approx(0.05, rel=1e-3) and both.p(both.value) == 1 and both.p(9.0) < 0.01
    assert alone.p(alone.low) == pytest.approx(0.05, rel=1e-3)
    for nothing in (interval([0.05, 0.05]), interval([0.1 + 0.2, 0.3])):  # equal seeds do not give certainty
        assert np.isnan([nothing.low, nothing.high, nothing.p(0.0)]).all() and nothing.verdict == "undecided"
    assert interval([0.05, 0.05], 0.0004).low == pytest.approx(0.05 - 1.95996 * 0.02, rel=1e-4)
    one = interval([0.8], 0.0004)
    assert np.isnan([one.low, one.high, one.p(0.0)]).all() and one.verdict == "undecided"


def test_no_interval_goes_beyond_what_a_score_can_be() -> None:
    """Two seeds are 0.5 apart, so Student's interval would be ± 12.7 · 0.25; it is cut at the bounds of the score."""

    def scores(first: float, second: float, metric: str = "accuracy") -> dict[int, dict[str, RowScore]]:
        both = [RowScore.of_value(value, metric, 0) for value in (first, second)]
        return {seed: dict.fromkeys("tu", score) for seed, score in enumerate(both)}

    evidence = Evidence({"up": scores(0.5, 1.0), "down": scores(0.5, 0.0)})
    for task in ("t", None):
        average, difference = evidence.average("up", task), evidence.difference("up", "down", task)
        assert (average.value, average.low, average.high) == (0.75, 0.0, 1.0)
        assert difference is not None and (difference.low, difference.high) == (-1.0, 1.0)
    losses = Evidence({"up": scores(0.5, 1.0, "loss"), "down": scores(0.5, 0.0, "loss")})
    assert losses.average("up").low == 0.0 and losses.average("up").high > 3
    matrices = np.array([[[0.5, 0.5], [1.0, 0.5], [last, 0.5]] for last in (0.0, 1.0)])
    found = forgetting(matrices, ["accuracy"] * 2, [0, 0])
    assert (found.value, found.low, found.high) == (0.5, -1.0, 1.0)


def test_the_interval_of_forgetting_is_worked_by_hand() -> None:
    """Two seeds lose 0.2 and 0.1 on average: s²/2 = 0.0025. The 100 rows of task a add (0.8·0.2 + 0.6·0.4) / 100.

    The rows of b add (0.9·0.1 + 0.7·0.3) / 100 with one seed and 2·0.9·0.1 / 100 with the other. The mean of both tasks has a
    quarter of the sum: 0.0016.
    """

    matrices = [[[0.5, 0.5, 0.5], [0.8, 0.5, 0.5], [0.8, 0.9, 0.5], [0.6, b, 0.7]] for b in (0.7, 0.9)]
    found = forgetting(np.array(matrices), ["accuracy"] * 3, [100] * 3)
    assert found.value == pytest.approx(0.15)
    assert found.high - found.value == pytest.approx((0.0025 * 12.7062 + 0.0016 * 1.95996) / 0.0041**0.5, rel=1e-4)


@pytest.mark.sampled("3-small", "5-2 % wrong")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("seeds", SEEDS)
def test_an_interval_holds_the_truth_as_often_as_it_says(seeds: int, world: str) -> None:
    """Intervals from seeds alone hold it less often where the rows cause most of the variance."""
    found = coverage(seeds, WORLDS[world], worlds=200)
    ours = [share for kind, share in found.items() if "ours" in kind]
    assert len(ours) == 4 and min(ours) >= 0.9
    if world == "small":
        assert max(found["difference, Welch's t"], found["difference, bootstrap of seeds"]) < found["difference, ours"]


def test_the_interval_of_a_ratio_is_fieller_s() -> None:
    """Its ends are the r at which the interval of n̄ − r·d̄ begins to hold 0; a denominator that may be 0 gives no ratio."""
    random = np.random.default_rng(4)
    above, below = 0.6 + 0.02 * random.standard_normal(5), 0.7 + 0.02 * random.standard_normal(5)
    rows = np.array([[2e-4, 1e-4], [1e-4, 3e-4]])
    found = ratio(above, below, rows)
    assert found is not None and found.value == pytest.approx(above.mean() / below.mean())
    for r in (found.low, found.high):
        contrast = interval(above - r * below, 2e-4 - 2 * r * 1e-4 + r * r * 3e-4)
        assert min(abs(contrast.low), abs(contrast.high)) < 1e-6
        assert found.p(r) == pytest.approx(0.05, rel=1e-3)
    assert ratio(above, below - 0.7, rows) is None
    half = ratio(below / 2, below)
    assert half is not None and half.value == pytest.approx(0.5) and np.isnan([half.low, half.high, half.p(0.4)]).all()


def test_what_seeds_share_of_rows_is_their_covariance() -> None:
    """The reference is the mean covariance over all pairs of different seeds."""
    random = np.random.default_rng(1)
    shared = random.standard_normal(50)
    rows = [[shared + random.standard_normal(50) for _ in range(4)] for _ in range(2)]
    scores = [[RowScore(0.0, 50, 0.0, each - each.mean()) for each in of_seeds] for of_seeds in rows]
    for i, j in ((0, 0), (0, 1), (1, 1)):
        pairs = [np.cov(rows[i][s], rows[j][t])[0, 1] for s in range(4) for t in range(4) if s != t]
        assert shared_variance(scores)[i, j] == pytest.approx(np.mean(pairs) / 50)


def test_a_difference_is_one_of_equal_rows() -> None:
    """A strategy that is right wherever the other is, and on every 20th row, is certainly higher."""
    random = np.random.default_rng(0)
    labels = random.integers(2, size=400)
    right = random.random(400) < 0.6
    more = right | (np.arange(400) % 20 == 0)
    answers = {
        "less": {seed: {"t": answering(right, labels)} for seed in (0, 1)},
        "more": {seed: {"t": answering(more, labels)} for seed in (0, 1)},
        "same": {seed: {"t": answering(right, labels)} for seed in (0, 1)},
        "elsewhere": {2: {"t": answering(right, labels)}},
    }
    evidence = evidence_of(answers)
    found = evidence.difference("more", "less")
    assert found is not None and found.value == pytest.approx((more.sum() - right.sum()) / 400)
    assert found.verdict == "higher" and 0 < found.low < found.value < found.high
    back = evidence.difference("less", "more")
    assert back is not None and back.verdict == "lower"
    widths = [each.high - each.low for each in (found, evidence.average("more"))]
    assert widths[0] < widths[1] / 2  # rows that are hard for both cancel out
    same = evidence.difference("same", "less")
    assert same is not None and same.value == 0 and np.isnan(same.low) and same.verdict == "undecided"
    assert evidence.difference("elsewhere", "less") is None
    itself = evidence.difference("less", "less")
    assert itself is not None and itself.value == 0 and np.isnan(itself.low)  # both have the same answers


def test_what_is_kept_is_counted_above_the_floor_of_its_task() -> None:
    labels = np.arange(200) % 2
    shares = {"fine-tune": {"easy": 190, "hard": 160}, "half": {"easy": 180, "hard": 120}}
    answers = {
        name: {
            seed: {task: answering(np.arange(200) < right + seed, labels) for task, right in each.items()}
            for seed in (0, 1)
        }
        for name, each in shares.items()
    }
    evidence = evidence_of(answers)
    easy, hard = (
        evidence.retention("half", "fine-tune", floor, task) for floor, task in ((0.8025, "easy"), (0.4025, "hard"))
    )
    assert easy is not None and easy.value == pytest.approx((0.9025 - 0.8025) / (0.9525 - 0.8025))
    assert hard is not None and hard.value == pytest.approx((0.6025 - 0.4025) / (0.8025 - 0.4025))
    assert hard.low < hard.value < hard.high
    both = evidence.retention("half", "fine-tune", 0.6025)
    assert both is not None and both.value == pytest.approx((0.7525 - 0.6025) / (0.8775 - 0.6025))
    assert evidence.retention("half", "half", 0.9, "hard") is None  # a reference that learned nothing
    one = evidence_of(
        {name: {0: of_seeds[0]} for name, of_seeds in answers.items()}
    )  # fine-tuning has 80 % on the hard task
    known = [one.retention("half", "fine-tune", floor, "hard") for floor in (0.769, 0.771)]  # 3.1 and 2.9 points below
    assert known[0] is not None and known[1] is None
    same = evidence.retention("fine-tune", "fine-tune", 0.4025, "hard")
    assert same is not None and same.value == pytest.approx(1) and np.isnan(same.low)


# -- In a report -----------------------------------------------------------------------------------------


def rows_of(results: Results, title: str) -> dict[str, tuple[str, ...]]:
    """Return the rows of a report's table, with its header, by their first cells."""
    (table,) = [each for each in lay_out(results).tables if each.title.startswith(title)]
    return {cells[0]: cells[1:] for cells in (table.header, *table.rows)}


def test_a_report_says_what_its_averages_are_worth(tmp_path: Path) -> None:
    loss = {"fine-tune": 0.0, "continual-ft": 0.1, "grafting-continual": 0.0}
    results = load_results(make_run(tmp_path / "run", ["a", "b", "c"], loss))
    found = rows_of(results, "Averages with their 95 % intervals")
    assert found.pop("strategy") == ("average", "forgetting", "minus fine-tune", "minus continual-ft")
    assert list(found) == list(loss) and found["fine-tune"][1] == "0.0" and "[" in found["continual-ft"][1]
    assert found["fine-tune"][2] == "—" and found["fine-tune"][3].endswith("undecided")  # there are only two seeds
    found = rows_of(results, "Kept above the best baseline")
    assert found.pop("strategy") == ("a", "b", "c", "average")
    assert list(found) == ["the best baseline", *loss] and found["fine-tune"][3] == "100.0"
    assert results.constant and found["the best baseline"][0] == f"{100 * results.constant[0]:.1f} (a constant answer)"
    scores, floor = {name: np.mean(results.matrices(name)[:, -1]) for name in loss}, np.mean(results.constant)
    kept = (scores["continual-ft"] - floor) / (scores["fine-tune"] - floor)
    assert found["continual-ft"][3].startswith(f"{100 * kept:.1f} ")


def test_the_best_floor_of_each_task_counts(tmp_path: Path) -> None:
    """A bag of words that scores above a constant answer is the floor, and lowers the kept share."""
    out = make_run(tmp_path / "run", ["a", "b"], {"fine-tune": 0.0, "continual-ft": 0.1})
    edit_about(out, floors={"constant": [0.5, 0.4]})
    bags, probes = [{"a": 0.56, "b": 0.2}, {"a": 0.54, "b": 0.4}], [{"b": 0.62}, {"a": 0.9, "b": 0.58}]
    for seed, (bag, probe) in enumerate(zip(bags, probes, strict=True)):
        floors = {"bag_of_words": bag, "linear_probe": probe}
        change_outcome(out / "fine-tune" / f"seed-{seed}", lambda outcome, its=floors: outcome.update(floors=its))
    merged = load_results(out)
    assert merged.learned_floors["a linear probe"][0] is None  # one seed lacks it
    assert merged.best_floors == [("a bag of words", pytest.approx(0.55)), ("a linear probe", pytest.approx(0.6))]
    found = rows_of(merged, "Kept above the best baseline")
    assert found["the best baseline"] == ("55.0 (a bag of words)", "60.0 (a linear probe)", "57.5")
    found = rows_of(merged, "After the last task")
    assert found["a bag of words"] == ("55.0", "30.0", "42.5", "—", "—", "—")
    assert found["a linear probe"] == ("—", "60.0", "—", "—", "—", "—")
    edit_about(out, floors={"constant": [0.5]})
    with pytest.raises(RunError, match=r"floors\.constant must be 2 numbers"):
        load_results(out)
