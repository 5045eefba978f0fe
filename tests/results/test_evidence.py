"""Intervals, differences and calibration beside chance: against slow references, known truths and hand-worked numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from reported import make_run, write_answers
from safetensors.numpy import load_file

from forgetfree import cli
from forgetfree.results.answers import LabelAnswers
from forgetfree.results.calibration import debiased_ece, ece_noise_floor
from forgetfree.results.comparison import merge
from forgetfree.results.evidence import Evidence, Interval, contributions, drawn_scores
from forgetfree.results.stored import load_run_results


def noise_floor(answers: LabelAnswers) -> float:
    return ece_noise_floor(answers.logits, answers.labels)


def debiased(answers: LabelAnswers) -> float:
    return debiased_ece(answers.logits, answers.labels)


def answering(right: np.ndarray, labels: np.ndarray) -> LabelAnswers:
    """Answers of two labels that are right where ``right`` says so."""
    predicted = np.where(right, labels, 1 - labels)
    return LabelAnswers(np.eye(2, dtype=np.float32)[predicted], labels)


def some(n: int, share: float, seed: int) -> LabelAnswers:
    random = np.random.default_rng(seed)
    labels = (random.random(n) < 0.3).astype(np.int64)
    return answering(random.random(n) < share, labels)


@pytest.mark.parametrize("metric", ["accuracy", "f1"])
def test_rows_add_up_to_the_score_and_draws_are_those_of_a_slow_loop(metric: str) -> None:
    answers = [some(37, 0.7, 1), some(37, 0.4, 2)]
    rows = np.stack([contributions(each, metric) for each in answers])
    for each, (numerator, denominator) in zip(answers, rows, strict=True):
        assert numerator.sum() / denominator.sum() == pytest.approx(each.score(metric))
    drawn = drawn_scores(rows, task=3, draws=60)
    random = np.random.default_rng([3, 37])
    counts = np.concatenate([random.multinomial(37, np.full(37, 1 / 37), size=size) for size in (50, 10)])
    for draw, times in enumerate(counts):
        chosen = np.repeat(np.arange(37), times)
        for run, each in enumerate(answers):
            again = LabelAnswers(each.logits[chosen], each.labels[chosen])
            assert drawn[draw, run] == pytest.approx(again.score(metric))


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    held = 0
    for world in range(200):
        evidence = Evidence({"a": {0: {"t": some(150, 0.8, world)}}}, {"t": "accuracy"}, draws=200)
        found = evidence.average("a")
        held += found.low <= 0.8 <= found.high
    assert 180 <= held <= 199  # 95 % of 200 are 190


def test_a_difference_is_one_of_equal_rows() -> None:
    """One that is right on every row where the other is, and on 5 of 100 more, is higher for certain."""
    random = np.random.default_rng(0)
    labels = random.integers(2, size=400)
    right = random.random(400) < 0.6
    more = right | (np.arange(400) % 20 == 0)
    answers = {
        "less": {0: {"t": answering(right, labels)}},
        "more": {0: {"t": answering(more, labels)}},
        "same": {0: {"t": answering(right, labels)}},
        "elsewhere": {1: {"t": answering(right, labels)}},
    }
    evidence = Evidence(answers, {"t": "accuracy"})
    found = evidence.difference("more", "less")
    assert found is not None and found.value == pytest.approx((more.sum() - right.sum()) / 400)
    assert found.verdict == "higher" and 0 < found.low < found.value < found.high
    back = evidence.difference("less", "more")
    assert back is not None and back.verdict == "lower"
    widths = [interval.high - interval.low for interval in (found, evidence.average("more"))]
    assert widths[0] < widths[1] / 2  # rows that are hard for both do not count
    same = evidence.difference("same", "less")
    assert same == Interval(0.0, 0.0, 0.0) and same.verdict == "undecided"
    assert evidence.difference("elsewhere", "less") is None


def test_seeds_that_differ_widen_an_interval_and_equal_ones_do_not() -> None:
    alike = {seed: {"t": some(300, 0.7, 5)} for seed in range(5)}
    apart = {seed: {"t": some(300, 0.5 + 0.1 * seed, 5)} for seed in range(5)}
    evidence = Evidence({"one": {0: alike[0]}, "alike": alike, "apart": apart}, {"t": "accuracy"})
    one, same, other = (evidence.average(name) for name in ("one", "alike", "apart"))
    assert (same.low, same.high) == pytest.approx((one.low, one.high))  # seeds share their rows: no more is known
    assert other.high - other.low > 1.5 * (same.high - same.low)


def test_what_is_kept_is_counted_above_the_floor() -> None:
    labels = np.arange(100) % 2
    answers = {
        "fine-tune": {0: {"t": answering(np.arange(100) < 90, labels)}},
        "half": {0: {"t": answering(np.arange(100) < 70, labels)}},
        "constant": {0: {"t": answering(labels == 0, labels)}},
    }
    evidence = Evidence(answers, {"t": "accuracy"})
    kept = evidence.retention("half", "fine-tune", 0.5)
    assert kept is not None and kept.value == pytest.approx(0.5) and kept.low < 0.5 < kept.high
    assert evidence.retention("half", "constant", 0.5) is None  # a reference that learned nothing
    assert evidence.retention("constant", "fine-tune", 0.5).value == pytest.approx(0)  # type: ignore[union-attr]


def test_what_is_kept_of_one_task_is_counted_above_its_own_floor() -> None:
    labels = np.arange(200) % 2
    shares = {"fine-tune": {"easy": 190, "hard": 160}, "half": {"easy": 180, "hard": 120}}
    answers = {
        name: {0: {task: answering(np.arange(200) < right, labels) for task, right in each.items()}}
        for name, each in shares.items()
    }
    evidence = Evidence(answers, {"easy": "accuracy", "hard": "accuracy"})
    easy, hard = (
        evidence.retention("half", "fine-tune", floor, task) for floor, task in ((0.85, "easy"), (0.4, "hard"))
    )
    assert easy is not None and easy.value == pytest.approx((0.90 - 0.85) / (0.95 - 0.85))
    assert hard is not None and hard.value == pytest.approx((0.60 - 0.40) / (0.80 - 0.40))
    both = evidence.retention("half", "fine-tune", (0.85 + 0.4) / 2)
    assert both is not None and both.value == pytest.approx((0.75 - 0.625) / (0.875 - 0.625))
    assert hard.low < hard.value < hard.high


def test_draws_in_which_nothing_was_learned_have_no_share() -> None:
    """Of 10 rows with 8 right answers, 4 or fewer are drawn now and then."""
    labels = np.arange(10) % 2
    evidence = Evidence({"fine-tune": {0: {"t": answering(np.arange(10) < 8, labels)}}}, {"t": "accuracy"})
    kept = evidence.retention("fine-tune", "fine-tune", 0.4)
    assert kept is not None and (kept.value, kept.low, kept.high) == pytest.approx((1, 1, 1))


def calibrated(n: int, seed: int, shift: float = 0.0) -> LabelAnswers:
    """A model that is right with the probability it gives, or less often by ``shift``."""
    random = np.random.default_rng(seed)
    confidence = random.uniform(0.55, 0.99, size=n)
    right = random.random(n) < confidence - shift
    labels = random.integers(2, size=n)
    logit = np.log(confidence / (1 - confidence))
    logits = np.zeros((n, 2))
    logits[np.arange(n), np.where(right, labels, 1 - labels)] = logit
    return LabelAnswers(logits, labels)


def test_the_noise_floor_is_what_a_calibrated_model_shows() -> None:
    worlds = [calibrated(500, seed) for seed in range(400)]
    shown = float(np.mean([each.ece for each in worlds]))
    assert float(np.mean([noise_floor(each) for each in worlds[:40]])) == pytest.approx(shown, rel=0.06)
    assert noise_floor(calibrated(8000, 0)) < shown / 3  # it shrinks with the rows
    assert noise_floor(worlds[0]) == noise_floor(worlds[0])


def test_without_noise_a_calibrated_model_has_less_error_and_one_that_is_off_keeps_its_own() -> None:
    calm = [calibrated(500, seed) for seed in range(60)]
    left, shown = (float(np.mean([of(each) for each in calm])) for of in (debiased, lambda each: each.ece))
    assert 0 < left < 0.7 * shown
    off = [calibrated(500, seed, shift=0.2) for seed in range(60)]
    assert float(np.mean([debiased(each) for each in off])) == pytest.approx(0.2, abs=0.01)


def test_an_error_of_bins_without_spread_is_left_as_it_is() -> None:
    """All answers are right: no draw of their accuracy differs from it."""
    answers = LabelAnswers(np.array([[2.0, 0.0], [0.0, 2.0]]), np.array([0, 1]))
    assert debiased(answers) == pytest.approx(answers.ece)


# -- In a report -----------------------------------------------------------------------------------------


def of_equal_rows(out: Path) -> None:
    """Give all runs of a directory the labels of the first: they were tested on the same rows."""
    files = sorted(out.glob("*/seed-*/predictions.safetensors"))
    first = load_file(files[0])
    results = json.loads((out / "results.json").read_text())
    for file in files:
        held = load_file(file)
        run = next(
            r for r in results["runs"] if (r["strategy"], f"seed-{r['seed']}") == (file.parts[-3], file.parts[-2])
        )
        for number, task in enumerate(results["tasks"]):
            logits, old, new = held[f"{task}/logits"], held[f"{task}/labels"], first[f"{task}/labels"]
            for row in np.flatnonzero(old != new):
                logits[row, [old[row], new[row]]] = logits[row, [new[row], old[row]]]
            held[f"{task}/labels"] = new
            answers = LabelAnswers(logits, new)
            run["matrix"][-1][number], run["ece"][-1][number] = answers.score("accuracy"), answers.ece
        write_answers(file, held)
    (out / "results.json").write_text(json.dumps(results))


def test_a_report_says_what_its_averages_are_worth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = {"fine-tune": 0.0, "continual-ft": 0.1, "grafting-continual": 0.0}
    make_run(tmp_path / "run", ["a", "b", "c"], loss)
    assert cli.main(["report", str(tmp_path / "run"), "--format", "markdown"]) == 0
    assert "95 % intervals (in %" not in capsys.readouterr().out  # runs on other rows are not compared
    of_equal_rows(tmp_path / "run")
    assert cli.main(["report", str(tmp_path / "run"), "--format", "markdown"]) == 0
    said = capsys.readouterr().out
    table = said[said.index("## Averages with their 95 % intervals") :].split("\n## ")[0]
    header, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    assert header == [
        *("strategy", "average", "minus fine-tune", "minus continual-ft"),
    ]
    by_name = {row[0]: row[1:] for row in rows}
    assert list(by_name) == list(loss)
    assert by_name["fine-tune"][1] == "—" and by_name["fine-tune"][2].endswith("higher")
    assert by_name["continual-ft"][1].endswith("lower") and by_name["continual-ft"][2] == "—"
    table = said[said.index("## Kept above the floor") :].split("\n## ")[0]
    header, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    assert header == ["strategy", "a", "b", "c", "average"]
    by_name = {row[0]: row[1:] for row in rows}
    assert list(by_name) == ["the floor", *loss]
    assert by_name["fine-tune"][3] == r"100.0 \[100.0, 100.0\]"
    results = load_run_results(tmp_path / "run")
    constant = results.floors.constant
    assert by_name["the floor"][0] == f"{100 * constant[0]:.1f} (a constant answer)"
    scores = {name: np.mean([run.matrix[-1] for run in results.runs if run.strategy == name]) for name in loss}
    floor = np.mean(constant)
    kept = (scores["continual-ft"] - floor) / (scores["fine-tune"] - floor)
    assert by_name["continual-ft"][3].startswith(f"{100 * kept:.1f} ")
    assert "## Calibration beside chance" in said
    (tmp_path / "run" / "fine-tune" / "seed-0" / "predictions.safetensors").write_bytes(b"damaged")
    assert cli.main(["report", str(tmp_path / "run"), "--format", "markdown"]) == 0
    said = capsys.readouterr().out
    assert "minus fine-tune" not in said and "minus continual-ft" in said


def test_the_best_floor_of_each_task_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bag of words that scores more than a constant answer is the floor, and takes away from what was kept."""
    out = make_run(tmp_path / "run", ["a", "b"], {"fine-tune": 0.0, "continual-ft": 0.1})
    of_equal_rows(out)
    results = json.loads((out / "results.json").read_text())
    results["floors"] |= {
        "constant": [0.5, 0.4],
        "bag_of_words": {"0": [0.56, 0.2], "1": [0.54, 0.4]},
        "linear_probe": {"0": [None, 0.62], "1": [0.9, 0.58]},
    }
    (out / "results.json").write_text(json.dumps(results))
    merged = merge([load_run_results(out)])
    assert merged.learned_floors["a bag of words"] == pytest.approx((0.55, 0.3))
    assert merged.learned_floors["a linear probe"][0] is None  # one seed lacks it
    assert merged.best_floors == [("a bag of words", pytest.approx(0.55)), ("a linear probe", pytest.approx(0.6))]
    assert cli.main(["report", str(out), "--format", "markdown"]) == 0
    said = capsys.readouterr().out
    assert "| the floor | 55.0 (a bag of words) | 60.0 (a linear probe) | 57.5 |" in said
    assert "| a bag of words | 55.0 | 30.0 | 42.5 | — | — | — |" in said
    assert "| a linear probe | — | 60.0 | — | — | — | — |" in said
    results["floors"]["bag_of_words"]["0"] = [0.5]
    (out / "results.json").write_text(json.dumps(results))
    assert cli.main(["report", str(out), "--format", "markdown"]) == 1
    assert "floors.bag_of_words.0 must be 2 numbers" in capsys.readouterr().err


def test_calibration_after_scaling_stands_beside_that_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = make_run(tmp_path / "run", ["a", "b"], {"fine-tune": 0.0, "continual-ft": 0.1})
    of_equal_rows(out)
    results = json.loads((out / "results.json").read_text())
    for run in results["runs"]:
        if run["strategy"] == "fine-tune":
            run |= {"temperature": [1.5, 2.5 + run["seed"]], "ece_scaled": [0.02, 0.04], "readout_again": [0.9, 0.7]}
    (out / "results.json").write_text(json.dumps(results))
    assert cli.main(["report", str(out), "--format", "markdown"]) == 0
    said = capsys.readouterr().out
    assert "| strategy | ECE | noise floor | ECE without noise | ECE after scaling | temperature |" in said
    rows = [line for line in said[said.index("## Calibration beside chance") :].splitlines() if line.startswith("| ")]
    assert rows[2].startswith("| fine-tune ") and rows[2].endswith("| 3.0 (0.0) | 2.25 (0.35) |")
    assert rows[3].startswith("| continual-ft ") and rows[3].endswith("| — | — |")
    table = said[said.index("## After re-training the readout") :].split("\n## ")[0]
    average = np.mean([run["matrix"][-1] for run in results["runs"] if run["strategy"] == "fine-tune"])
    assert "continual-ft" not in table and "| 90.0 (0.0) | 70.0 (0.0) | 80.0 (0.0) |" in table
    assert f"| {100 * (0.8 - average):.1f} (" in table
