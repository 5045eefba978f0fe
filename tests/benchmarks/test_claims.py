"""Claims are judged from runs, each by its own measure; the figures of these runs are known."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reported import edit, edit_about, make_run, save

from benchmarks.claims import (
    CLAIMS,
    MEASURED,
    Claim,
    Runs,
    claims,
    figures,
    final_union,
    holm,
    judged,
    main,
    published,
    tables,
)
from forgetfree.errors import RunError
from forgetfree.results.answers import LabelAnswers
from forgetfree.results.evidence import Interval

TASKS = ["qnli", "ag_news", "sst2"]
ROWS = 400


def wrong_every(nth: int) -> LabelAnswers:
    """Return answers of two labels of which every nth is wrong, all with equal confidence."""
    labels = np.arange(ROWS) % 2
    predicted = np.where(np.arange(ROWS) % nth == 0, 1 - labels, labels)
    return LabelAnswers(4 * np.eye(2, dtype=np.float32)[predicted], labels)


def make(out: Path, wrong: dict[str, int], seeds: tuple[int, ...] = (0, 1), **of_run: Any) -> Path:
    """Make a run directory whose strategies answer every nth row wrongly, on all tasks and seeds."""
    make_run(out, TASKS, dict.fromkeys(wrong, 0.0), seeds)
    for folder in out.glob("*/seed-*"):
        found = wrong_every(wrong[folder.parent.name])
        save_equal(folder, found)
    edit(out, **of_run)
    return out


def save_equal(folder: Path, found: LabelAnswers) -> None:
    """Save the same answers for all tasks of a unit, from the first task on."""
    matrix, ece = np.full((4, 3), found.score("accuracy")), np.full((4, 3), found.ece)
    matrix[0] = 0.5
    save(folder, matrix, ece, dict.fromkeys(TASKS, found), ROWS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The runs score 95 % (fine-tune), 75 % (continual-ft), 90 % (union) and 95 % (alone)."""
    out = tmp_path_factory.mktemp("claims")
    seconds = {"fine_tune": 10.0, "localize": 1.0, "train": 3.0, "evaluate": 1.0}
    union = {"accuracy": [0.9, 0.9, 0.5], "ece": [0.1, 0.1, 0.1]}
    return [
        str(make(out / "whole", {"fine-tune": 20, "continual-ft": 4}, seconds=seconds)),
        str(
            make(
                *(out / "union", {"grafting-continual": 10}),
                **{"options": {"composition": "union"}, "seconds": seconds, "extra": {"union": union}},
            )
        ),
        str(make(out / "alone", {"grafting-continual": 20}, options={"composition": "alone"}, seconds=seconds)),
    ]


def test_every_claim_has_a_measure_and_every_measure_a_claim() -> None:
    tables = re.findall(r"^## (\S+)$", CLAIMS.read_text(), re.MULTILINE)
    lines = re.findall(r"^\| (?!claim|---)", CLAIMS.read_text(), re.MULTILINE)
    found = [claim for table in tables for claim in claims(table)]
    assert len(found) == len(lines) > 10
    assert {claim.name for claim in found} == set(MEASURED)


def test_the_command_judges_claims_by_hand_worked_figures(
    runs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["claims", "main-job", *runs])
    main()
    printed = capsys.readouterr().out
    assert "shots is 8 and not 1024; steps is 20 and not 400; seeds of fine-tune are 0,1 and not 0,1,2,3,4" in printed
    lines = [line.replace("\\", "").strip("| ").split(" | ") for line in printed.splitlines()]
    found = {line[0]: tuple(line[1:]) for line in lines}
    assert found["nothing is forgotten"] == ("= 0", "0.00 [0.00, 0.00]", "holds", "holds")
    threshold, measured, verdict, together = found["QNLI is kept"]
    assert (threshold, verdict, together) == ("> 98", "does not", "does not")
    assert measured.startswith(f"{100 * 0.9 / 0.95:.2f} [")
    # Equal answers show no variance, so nothing is known about other rows and seeds.
    assert found["QNLI is kept, alone"][1:3] == ("100.00", "undecided")
    assert found["grafting beats naive fine-tuning"][1].startswith("15.00 [")
    assert found["grafting beats naive fine-tuning"][2] == "holds"
    assert found["the union costs the last task"][1].startswith("5.00 [")
    assert found["the final union mixes"][1].startswith("-13.33 [-18.")
    assert found["grafting is cheap"] == ("< 50", "40.00", "undecided", "undecided")
    # Confidence is 1 / (1 + e⁻⁴) = 0.982: 0.032 above 95 %, 0.082 above 90 %.
    assert found["grafting is better calibrated"][1].startswith("5.00 [")
    assert found["grafting is better calibrated"][2] == "does not"


def test_averages_of_a_stream_are_judged_against_each_of_its_references(runs: list[str], tmp_path: Path) -> None:
    """Multi-task training answers every eighth row wrongly: 87.5 %."""
    joint = str(make(tmp_path / "joint", {"joint": 8}))
    found = {row[0]: row[1:] for row in judged("standard", [*runs, joint]).tables[0].rows}
    assert found["the average is kept"][1].startswith(f"{100 * 0.9 / 0.95:.2f} [")
    assert found["the average is kept, alone"][1:3] == ("100.00", "undecided")
    assert found["grafting is near multi-task training"][1].startswith(f"{100 * 0.9 / 0.875:.2f} [")
    assert found["grafting is near multi-task training"][2] == "holds"
    assert found["the union costs something"][1].startswith("5.00 [")
    assert found["the union costs something"][2] == "holds"


def test_an_f1_of_the_final_union_says_nothing_of_other_rows(runs: list[str]) -> None:
    """The bound m·(1 − m) on the variance of an accuracy m does not hold for F1, and the seeds do not vary."""
    its = Runs(runs)
    assert np.isfinite(final_union(its).low)
    results, _ = its.strategies["union"]
    results.metric = ["f1"] * len(results.tasks)
    assert final_union(its).value == pytest.approx(-2 / 15) and np.isnan(final_union(its).low)


def test_a_graft_whose_region_is_not_trained_is_judged_as_a_bare_one(runs: list[str], tmp_path: Path) -> None:
    bare = str(make(tmp_path, {"grafting-continual": 5}, options={"composition": "alone", "region_steps": 0}))
    found = {row[0]: row[1:] for row in judged("bare", [*runs, bare]).tables[0].rows}
    assert found["SST-2 is kept, bare"][1].startswith(f"{100 * 0.8 / 0.95:.2f} [")
    assert found["SST-2 is kept, bare"][2] == "does not"
    assert found["MNLI is kept, bare"][1] == "no mnli among the runs"


def test_a_withheld_task_is_judged_beside_the_task_given(runs: list[str], tmp_path: Path) -> None:
    """With the task withheld, 20 of 400 rows get the label of another task, and another 20 are wrong;
    with the task given, only these other 20 are wrong."""
    out = make(tmp_path, {"grafting-continual": 10}, options={"composition": "alone"})
    edit_about(out, scenario="class")
    labels = np.arange(ROWS) % 2
    predicted = np.where(np.arange(ROWS) % 20 == 0, 1 - labels, labels)
    predicted[1::20] = 2
    for folder in out.glob("grafting-continual/seed-*"):
        save_equal(folder, LabelAnswers(4 * np.eye(3, dtype=np.float32)[predicted], labels))
    page = judged("withheld", [runs[2], str(out)])
    cost, apart = (row[1:] for row in page.tables[0].rows)
    assert cost[1].startswith("-5.00 [") and cost[2] == "does not"
    assert apart[1].startswith("95.00 [93.") and apart[2] == "does not"
    assert "seeds of withheld are 0,1 and not 0,1,2" in page.notes[0]


@pytest.mark.parametrize(
    ("compared", "interval", "verdict"),
    [
        (">", (0.5, 0.4, 0.6), "holds"),
        (">", (0.5, 0.2, 0.6), "undecided"),
        (">", (0.2, 0.1, 0.25), "does not"),
        ("<", (float("nan"), float("nan"), float("nan")), "undecided"),
        ("<", (0.2, 0.1, 0.25), "holds"),
        ("<", (0.5, 0.4, 0.6), "does not"),
        ("=", (0.3, 0.3, 0.3), "holds"),
        ("=", (0.3, 0.2, 0.4), "does not"),
        ("=", (0.3, float("nan"), 0.3), "undecided"),
    ],
)
def test_the_whole_interval_decides(compared: str, interval: tuple[float, float, float], verdict: str) -> None:
    assert Claim("", compared, 0.3).verdict(Interval(*interval)) == verdict


@pytest.mark.parametrize(("value", "verdict"), [(1e-9, "does not"), (np.nan, "undecided")])
def test_a_score_that_changes_is_forgetting(
    runs: list[str], value: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing score leaves the claim undecided, for either task."""
    for task in range(2):
        changed = Runs(runs)
        matrices = changed.matrices("union").copy()
        matrices[-1, -1, task] += value
        monkeypatch.setattr(changed, "matrices", lambda role, its=matrices: its)
        found = MEASURED["nothing is forgotten"](changed)
        assert found is not None
        assert Claim("", "=", 0.0).verdict(found) == verdict


def test_what_the_runs_lack_is_said(runs: list[str]) -> None:
    found = {row[0]: row[1:] for row in judged("smollm2", runs[1:2]).tables[0].rows}
    assert found["QNLI is kept"][1:] == ("no fine-tune among the runs", "—", "—")
    assert found["nothing is forgotten"][2] == "holds"


def test_claims_together_need_more_than_each_alone(monkeypatch: pytest.MonkeyPatch, runs: list[str]) -> None:
    """One of five claims holds alone with p = 0.02, but not with p = 5 · 0.02. A measurement that is used twice counts once."""
    weak = Interval(1.0, 0.9, 1.1, lambda threshold: 0.02)
    none = [Interval(0.9 + i / 100, 0.0, 2.0, lambda threshold: 0.7) for i in range(5)]

    def together() -> tuple[str, ...]:
        monkeypatch.setitem(MEASURED, "grafting beats naive fine-tuning", lambda runs: weak)
        return {row[0]: row[3:] for row in judged("smollm2", runs).tables[0].rows}["grafting beats naive fine-tuning"]

    counted = [claim.name for claim in claims("smollm2") if claim.compared != "="]
    for name, found in zip(counted, none, strict=True):
        monkeypatch.setitem(MEASURED, name, lambda runs, found=found: found)
    assert together() == ("holds", "undecided")
    for name in counted:
        if name.endswith("is kept"):  # these share one number; with the weak claim and calibration, three claims remain
            monkeypatch.setitem(MEASURED, name, lambda runs: none[0])
    weak = Interval(1.0, 0.9, 1.1, lambda threshold: 0.016)
    assert together() == ("holds", "holds")


def test_the_published_claims_are_judged_from_csv_files(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert {name for name in tables() if name == "main-job"} == {"main-job"}
    monkeypatch.setattr(sys, "argv", ["claims", "withheld"])
    main()
    assert "| a withheld task costs little | \\> -1 | -0.93" in capsys.readouterr().out


def test_published_runs_are_judged_on_the_seeds_that_a_table_names() -> None:
    """The movement runs have five seeds, and baselines names three of them; for runs that are named, all seeds count."""
    assert judged("baselines").notes == ()
    assert "seeds of union are 0,1,2,3,4 and not 0,1,2" in judged("baselines", published("baselines")).notes[0]


def test_figures_say_of_each_strategy_what_claims_are_made_of(runs: list[str], monkeypatch: Any, capsys: Any) -> None:
    """Alone and fine-tune score 95 %, continual-ft 75 %, union 90 %; localizing takes 1 s, training 3 s, fine-tuning 10 s."""
    table = figures("main-job", runs)
    found = {row[0]: dict(zip(table.header[1:], row[1:], strict=True)) for row in table.rows}
    assert {*table.header} == {"", "continual-ft", "union", "alone"}
    assert found["share of fine-tune, average"]["union"].startswith("94.7 [")
    assert found["share of fine-tune, sst2"]["alone"] == "100.0"
    assert found["minus continual-ft, average"]["alone"].startswith("20.0 [")
    assert found["minus union, sst2"]["alone"].startswith("5.0 [") and found["minus union, sst2"]["union"] == "—"
    assert found["final union, average"]["union"].startswith("-13.3 [")
    assert found["final union, qnli"]["union"].startswith("0.0 [") and found["final union, qnli"]["alone"] == "—"
    assert found["seconds of all training, share of fine-tune"] == dict.fromkeys(
        ["continual-ft", "union", "alone"], "140.0"
    )
    assert "minus lora, average" not in found
    monkeypatch.setattr(sys, "argv", ["claims", "--figures", "main-job", *runs])
    main()
    assert "Figures of main-job" in capsys.readouterr().out


def test_wrong_input_is_told(runs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with pytest.raises(RunError, match="It has those of: movement, bare, baselines, related-32"):
        judged("nothing", runs)
    monkeypatch.setattr(sys, "argv", ["claims", "main-job", "/nowhere"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "does not exist" in capsys.readouterr().err


def test_claims_together_are_adjusted_as_holm_does() -> None:
    """The results are 0.01 · 4, 0.02 · 3, 0.03 · 2 and 0.5; none is below the one before, and an unknown p does not count."""
    assert holm([0.03, 0.01, float("nan"), 0.5, 0.02]) == pytest.approx(
        [0.06, 0.04, float("nan"), 0.5, 0.06], nan_ok=True
    )
