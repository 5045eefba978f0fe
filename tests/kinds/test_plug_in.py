"""A kind and two metrics of a package, through commands, reports and the contract check: examples/my_kind."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import forgetfree
from forgetfree import cli, registry
from forgetfree.results.answers import LabelAnswers
from forgetfree.testing import check_stream

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_kind"
STARS = ("dull", "awful", "lovely")
SPLITS = {"train": "the", "validation": "a", "test": "a very"}


@pytest.fixture
def ratings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two tasks of the kind, each with a metric of its own."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setitem(registry.KINDS, "rating", registry.Entry("my_kind:Rating"))
    for name, target in (("weighted-kappa", "KAPPA"), ("stars-off", "STARS_OFF")):
        monkeypatch.setitem(registry.METRICS, name, registry.Entry(f"my_kind:{target}"))
    for task, metric in (("films", "weighted-kappa"), ("books", "stars-off")):
        folder = tmp_path / "data" / task
        folder.mkdir(parents=True)
        for split, text in SPLITS.items():
            rows = [{"text": f"{text} {word} film", "stars": s} for _ in range(12) for s, word in enumerate(STARS, 1)]
            (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / "source.json").write_text(json.dumps({"kind": "rating", "metric": metric}))
    return tmp_path / "data"


def test_it_runs_reports_and_answers(ratings: Path, model_directory: Any, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    small = ["--shots", "8", "--steps", "3", "--set", "sparsity=0.05", "--data", str(ratings)]
    strategies = ["--strategy", "fine-tune", "--strategy", "grafting-continual"]
    model = str(model_directory("bert"))
    assert cli.main(["run", "films,books", *strategies, "--model", model, *small, "--out", str(out)]) == 0
    results = json.loads((out / "results.json").read_text())
    assert [task["kind"] for task in json.loads((out / "config.json").read_text())["tasks"]] == ["rating"] * 2
    assert results["floors"]["constant"] == [0.0, pytest.approx(2 / 3)]  # no kappa; the middle star is off by 2/3
    for run in results["runs"]:
        assert run["metric"] == ["weighted-kappa", "stars-off"]
        first, last = run["matrix"][1][0], run["matrix"][2][0]
        assert -1 <= last <= 1 and run["matrix"][2][1] >= 0
        assert run["summary"]["forgetting"] == pytest.approx(first - last)
    assert forgetfree.load_results(out).matrix("fine-tune").shape == (3, 2)
    capsys.readouterr()
    assert cli.main(["report", str(out), "--format", "markdown"]) == 0
    assert "grafting-continual" in capsys.readouterr().out
    assert cli.main(["predict", str(out), "--task", "films", "the lovely film"]) == 0
    assert capsys.readouterr().out.split("\t")[0] in ("1", "2", "3")


@dataclass(frozen=True, eq=False)
class Sayings(LabelAnswers):
    """Answers without probabilities."""

    @property
    def ece(self) -> None:
        return None

    def more_scores(self) -> dict[str, float]:
        return {}


def test_answers_without_probabilities_have_no_calibration(
    ratings: Path, model_directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """One task of two has none: its column is empty everywhere, and the mean is that of the other."""
    usual = registry.kind("rating").answers

    def answers(kind: Any, task: Any, logits: Any, labels: Any, rows: Any) -> LabelAnswers:
        found = usual(task, logits, labels, rows)
        return Sayings(found.logits, found.labels) if task.name == "books" else found

    monkeypatch.setattr(type(registry.kind("rating")), "answers", answers)
    out, model = tmp_path / "out", str(model_directory("bert"))
    words = ["run", "films,books", "--strategy", "continual-ft", "--model", model, "--data", str(ratings)]
    assert cli.main([*words, "--steps", "2", "--out", str(out)]) == 0
    (run,) = json.loads((out / "results.json").read_text())["runs"]
    assert [row[1] for row in run["ece"]] == [None] * 3
    assert run["summary"]["ece"] == run["ece"][-1][0] > 0
    found = forgetfree.load_results(out)
    assert found.summary().loc["continual-ft", ("ece", "mean")] == pytest.approx(run["ece"][-1][0])
    for form in ("html", "csv"):
        capsys.readouterr()
        assert cli.main(["report", str(out), "--format", form]) == 0
    (tmp_path / "all.csv").write_text(capsys.readouterr().out)
    assert forgetfree.load_results(tmp_path / "all.csv").matrix("continual-ft", 0, "ece")["books"].isna().all()


def test_in_a_sweep_fewer_stars_off_are_more(ratings: Path, model_directory: Any, tmp_path: Path) -> None:
    """A sweep chooses the highest average, so a score of which lower is better counts as its negative."""
    model = str(model_directory("bert"))
    words = ["sweep", "books", "--strategy", "continual-ft", "--model", model, "--data", str(ratings)]
    tried = ["--shots", "8", "--steps", "1", "--set", "learning_rate=1e-9,1e-8", "--out", str(tmp_path / "sweep")]
    assert cli.main([*words, *tried]) == 0
    results = json.loads((tmp_path / "sweep" / "results.json").read_text())
    assert all(-2 <= trial["mean"] < 0 for trial in results["trials"])


def test_it_keeps_the_contract_of_a_stream(ratings: Path) -> None:
    check_stream("films,books", data=str(ratings))


def test_a_missing_column_is_told_from_the_header(ratings: Path, capsys: Any) -> None:
    for file in (ratings / "films").glob("*.jsonl"):
        file.write_text(file.read_text().replace("stars", "points"))
    assert cli.main(["run", "films", "--model", "no", "--data", str(ratings)]) != 0
    assert "no column 'stars'" in capsys.readouterr().err


def test_without_its_package_results_say_what_is_missing(
    ratings: Path, model_directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "out"
    words = [
        "run",
        "films",
        "--strategy",
        "continual-ft",
        "--model",
        str(model_directory("bert")),
        "--data",
        str(ratings),
    ]
    assert cli.main([*words, "--steps", "1", "--out", str(out)]) == 0
    monkeypatch.delitem(registry.KINDS, "rating")
    monkeypatch.delitem(registry.METRICS, "weighted-kappa")
    monkeypatch.delitem(sys.modules, "my_kind")
    capsys.readouterr()
    assert cli.main(["report", str(out)]) != 0
    assert "weighted-kappa" in capsys.readouterr().err
    assert cli.main(["predict", str(out), "--task", "films", "a film"]) != 0
    error = capsys.readouterr().err
    assert "kind must be one of" in error and "Install the package" in error
