"""A kind and two metrics from a package, in commands, reports and the contract check: examples/my_kind."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from handmade import results_of, run_of, together

import forgetfree
from forgetfree import cli, registry
from forgetfree.data.columns import ColumnNames
from forgetfree.data.sources import load_task
from forgetfree.kinds.classification import Classification
from forgetfree.kinds.kind import Form, kind_of
from forgetfree.kinds.tagging import Tagging
from forgetfree.registry import Entry
from forgetfree.results.answers import Answers, LabelAnswers, constant_scores
from forgetfree.results.metrics import Metric
from forgetfree.results.report.run_report import lay_out
from forgetfree.tasks import TaskDefinition
from forgetfree.testing import check_stream

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_kind"
STARS = ("dull", "awful", "lovely")
SPLITS = {"train": "the", "validation": "a", "test": "a very"}


@pytest.fixture
def ratings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two tasks of the kind, each with its own metric."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setitem(registry.KINDS, "rating", Entry("my_kind:Rating"))
    for name, target in (("weighted-kappa", "KAPPA"), ("stars-off", "STARS_OFF")):
        monkeypatch.setitem(registry.METRICS, name, Entry(f"my_kind:{target}"))
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
    assert results["floors"]["constant"] == [0.0, pytest.approx(2 / 3)]  # kappa is 0; the middle star is off by 2/3
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
class Guesses(Answers):
    """Answers that are numbers of stars instead of labels."""

    stars: Any
    right: Any

    def score(self, metric: str) -> float:
        return float(np.abs(self.stars - self.right).mean())

    def more_scores(self) -> dict[str, float]:
        return {"accuracy": float((np.abs(self.stars - self.right) < 0.5).mean())}

    def constant_score(self, metric: str) -> float:
        return min(float(np.abs(self.right - star).mean()) for star in range(len(STARS)))

    def same_as(self, other: Guesses) -> bool:
        return np.array_equal(self.stars, other.stars)

    def agreement(self, other: Guesses) -> float:
        return float((np.abs(self.stars - other.stars) < 0.5).mean())

    def tensors(self) -> dict[str, Any]:
        return {"stars": self.stars, "right": self.right}


class Guessing(Classification):
    """Ratings whose answers are numbers between the stars."""

    forms: ClassVar[Mapping[str, Form]] = {"guessing": ("a text, and how many stars it gives", ("text", "label"))}
    metrics = ("stars-off",)

    def form(self, columns: Any) -> str:
        return "guessing"

    def answers(self, task: Any, logits: Any, labels: Any, rows: Any) -> Any:
        stars = logits.softmax(dim=1).numpy() @ np.arange(logits.shape[1], dtype=np.float32)
        return Guesses(stars, labels.numpy())

    def kept_answers(self, task: Any, arrays: Any, rows: int | None = None) -> Any:
        return Guesses(arrays["stars"], arrays["right"])


def test_answers_that_are_no_labels_are_trained_compared_and_kept(
    ratings: Path, model_directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their metric scores them, and their kind defines agreement.

    If a stream withholds the task, constants are still per task.
    """
    monkeypatch.setitem(registry.KINDS, "guessing", Entry(f"{__name__}:Guessing"))
    for task in ("films", "books"):
        (ratings / task / "source.json").write_text('{"kind": "guessing", "label_column": "stars"}')
    model = str(model_directory("bert"))
    words = ["run", "films,books", "--strategy", "fine-tune", "--strategy", "continual-ft", "--model", model]
    words += ["--data", str(ratings), "--steps", "2", "--shots", "4", "--set", "floors=constant"]
    assert cli.main([*words, "--out", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["floors"]["constant"] == [pytest.approx(2 / 3)] * 2
    for run in results["runs"]:
        assert run["metric"] == ["stars-off"] * 2
        assert all(0 <= share <= 1 for share in run["agreement"])
    assert cli.main([*words, "--set", "scenario=domain", "--out", str(tmp_path / "domain")]) == 0


def test_a_kind_of_a_kind_scores_in_its_own_way(ratings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its metric also scores answers that are labels, which otherwise have the metrics of classification."""
    kind = registry.kind("rating")
    halved = Metric(lambda answers: 0.5, higher_is_better=False, bounds=(0.0, None))
    monkeypatch.setattr(type(kind), "metric", lambda self, name: halved)
    films = load_task("films", str(ratings)).task
    given = kind.answers(films, torch.eye(3), torch.tensor([0, 1, 2]), None)
    assert given.score("stars-off") == 0.5
    assert kind.kept_answers(films, given.tensors()).score("stars-off") == 0.5


def test_one_constant_answer_for_all_tasks_has_the_fewest_stars_off(ratings: Path) -> None:
    """The labels are 0, 0 and 0, 0, 2: label 0 is off by 0 and 2/3, and label 2 by 2 and 4/3."""
    answers = [LabelAnswers(np.zeros((len(labels), 3)), np.array(labels)) for labels in ([0, 0], [0, 0, 2])]
    found = constant_scores(answers, ["stars-off"] * 2, task_known=False)
    assert found == pytest.approx([0.0, 2 / 3])


def _broken(answers: Any) -> float:
    raise ValueError("no stars")


BROKEN = Metric(_broken)


def test_a_metric_that_fails_is_told_by_its_name(
    ratings: Path, model_directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(registry.METRICS, "weighted-kappa", Entry(f"{__name__}:BROKEN"))
    words = f"graft films --model {model_directory('bert')} --data {ratings} --shots 8 --steps 2 --sparsity 0.05"
    assert cli.main([*words.split(), "--out", str(tmp_path / "graft")]) != 0
    told = " ".join(capsys.readouterr().err.split())
    assert (
        "The metric 'weighted-kappa' failed on the predictions for" in told and "ValueError: no stars. Fix it" in told
    )


def test_reports_say_what_is_best_by_the_direction_of_a_metric(ratings: Path) -> None:
    """Fewer stars off are better: in floors, in the headline, and in tinted cells."""
    for metrics, best, expected in (
        (["stars-off"] * 2, "low ", [0.2, 0.2]),
        (["weighted-kappa"] * 2, "high ", [0.4, 0.4]),
        (["weighted-kappa", "stars-off"], "", [0.4, 0.2]),
    ):
        runs = [run_of(name, 0, [last, last], metric=metrics) for name, last in (("high", 0.7), ("low", 0.1))]
        floors = {"constant": [0.4, 0.4], "bag_of_words": {"0": [0.2, 0.2]}}
        held = together([results_of(*runs, floors=floors)])
        assert [score for _, score in held.best_floors] == expected
        page = lay_out(held)
        assert page.headline.startswith(best)
        high, low = ([bool(tint) for tint in table.tints[-1]] for table in page.tables if table.tints)
        assert high == [metric == "weighted-kappa" for metric in metrics]
        assert low == [metric == "stars-off" for metric in metrics]


def test_scores_are_shown_as_their_metric_says(ratings: Path) -> None:
    runs = [run_of(name, 0, [0.7, 0.7], metric=["f1", "stars-off"]) for name in ("fine-tune", "continual-ft")]
    page = lay_out(together([results_of(*runs)]))
    assert page.tables[0].title == "After the last task (in % where scores are shares)"
    assert page.tables[0].rows[0][1:4] == ("70.0", "0.700", "0.700")
    assert "scores 0.700 on" in page.headline


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
    words = f"run films --strategy continual-ft --model {model_directory('bert')} --data {ratings}".split()
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


class Chunks(Tagging):
    """Phrases of a sentence: a kind derived from `Tagging`."""

    forms: ClassVar[Mapping[str, Form]] = {"chunks": ("a sentence, and its phrases", ("tokens", "tags"))}
    metrics = ("accuracy", "f1")


class Likeness(Classification):
    """Pairs of texts: a kind derived from `Classification`."""

    forms: ClassVar[Mapping[str, Form]] = {"likeness": ("two texts, and a label", ("text_a", "text_b", "label"))}

    def form(self, columns: ColumnNames) -> str:
        return "likeness"


@pytest.fixture
def made_from_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, cls in (("chunks", "Chunks"), ("likeness", "Likeness")):
        monkeypatch.setitem(registry.KINDS, name, Entry(f"{__name__}:{cls}"))


def _rows(folder: Path, source: dict[str, Any], *rows: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    for split in SPLITS:
        (folder / f"{split}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "source.json").write_text(json.dumps(source))
    return folder.parent


@pytest.mark.usefixtures("made_from_ours")
@pytest.mark.parametrize(("said", "metric"), [({}, "accuracy"), ({"metric": "f1"}, "f1")])
def test_a_kind_made_from_tagging_is_the_one_that_is_asked(tmp_path: Path, said: dict[str, str], metric: str) -> None:
    row = {"tokens": ["the", "film", "ended"], "tags": ["B-NP", "I-NP", "O"]}
    task = load_task("parse", str(_rows(tmp_path / "parse", {"kind": "chunks", **said}, row, row))).task
    assert (task.kind, task.metric, task.entities, task.text_columns) == ("chunks", metric, ("NP",), ("tokens",))
    assert isinstance(kind_of(task), Chunks)


@pytest.mark.usefixtures("made_from_ours")
def test_a_kind_made_from_classification_may_have_pairs(tmp_path: Path) -> None:
    rows = [{"text_a": f"one {i}", "text_b": f"other {i}", "label": i} for i in range(2)]
    task = load_task("like", str(_rows(tmp_path / "like", {"kind": "likeness"}, *rows))).task
    assert (task.kind, task.form, task.text_columns) == ("likeness", "pair", ("text_a", "text_b"))
    assert registry.faults_of(task) == [] and kind_of(task).names(task) == ("text_a", "text_b")


def test_answers_to_words_without_their_rows_are_kept() -> None:
    """A plugin may give labels alone, without the sentences."""
    task = TaskDefinition.of_entities("people", ["PER"])
    given = kind_of(task).answers(task, torch.eye(3), torch.tensor([0, 1, 2]), None)
    assert kind_of(task).kept_answers(task, given.tensors()).agreement(given) == 1.0
