"""`evaluate_on=validation`: options are chosen on validation rows, without any use of the test rows."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import forgetfree
from forgetfree import cli
from forgetfree.data.rows import Rows, TaskRows
from forgetfree.data.sources import load_task
from forgetfree.errors import DataError, UsageError
from forgetfree.models.loading import load_model
from forgetfree.tasks import TaskDefinition
from forgetfree.training.single_task import SingleTask
from forgetfree.training.training_options import LocalizationOptions

CHOOSE = ("--set", "evaluate_on=validation")


def task_of(labels: tuple[int, ...]) -> TaskRows:
    """Return a task with numbered validation rows that have these labels."""
    train, test = Rows(("x", "y"), (), (0, 1)), Rows(("t", "u"), (), (0, 1))
    validation = Rows(tuple(map(str, range(len(labels)))), (), labels)
    return TaskRows(TaskDefinition("own", "single", ("no", "yes")), train, validation, test)


def test_every_other_validation_row_of_each_label_stands_in_for_the_test_rows() -> None:
    rows = task_of((0, 0, 0, 1, 0, 0, 1, 1))
    chosen = rows.evaluated_on("validation")
    assert chosen.test == Rows(("1", "4", "6"), (), (0, 0, 1))
    assert chosen.validation == Rows(("0", "2", "3", "5", "7"), (), (0, 0, 1, 0, 1))
    assert chosen.train == rows.train
    assert rows.evaluated_on("test") is rows


def test_a_task_with_a_single_validation_row_a_label_is_refused() -> None:
    """No row of either label would be left to be scored."""
    with pytest.raises(
        DataError, match=r"has 2 validation rows, .* choosing options with them needs at least two per label"
    ):
        task_of((0, 1)).evaluated_on("validation")
    assert task_of((0, 0, 0, 1)).evaluated_on("validation").test.labels == (0,)


def test_no_other_rows_can_be_asked_for() -> None:
    with pytest.raises(UsageError, match="evaluate_on must be test or validation, got 'valid'"):
        task_of((0, 0, 1, 1)).evaluated_on("valid")  # type: ignore[arg-type]


@pytest.mark.sampled(share=0.15)
def test_reports_say_it_and_do_not_mix_it_with_test_rows(
    data_directory: Path, model_directory: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--data", str(data_directory), "--model", str(model_directory("bert")), "--shots", "4"]
    run = ["run", "sst2", "--strategy", "continual-ft", "--steps", "3", *given]
    assert cli.main([*run, "--out", str(tmp_path / "test")]) == 0
    assert cli.main([*run, "--out", str(tmp_path / "chosen"), *CHOOSE]) == 0
    results = json.loads((tmp_path / "chosen" / "results.json").read_text())
    assert (results["evaluated_on"], results["data"]["test_rows"]) == ("validation", {"sst2": 6})
    assert "evaluated on validation" in (tmp_path / "chosen" / "report.md").read_text()
    assert "evaluated on" not in (tmp_path / "test" / "report.md").read_text()
    capsys.readouterr()
    assert cli.main(["report", str(tmp_path / "test"), str(tmp_path / "chosen")]) == 1
    assert "evaluated_on is 'test' in one and 'validation' in the other" in capsys.readouterr().err


def test_the_recipe_of_the_documents_tries_on_validation_rows_and_ends_on_test_rows(
    data_directory: Path, model_directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example of docs/watching.md, with Optuna on a tiny model: the last run has the options of the best trial."""
    optuna = pytest.importorskip("optuna", reason="Optuna is not installed: pip install optuna")
    page = (Path(__file__).parents[2] / "docs" / "watching.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S)
    run, tiny = forgetfree.run, {"data": str(data_directory), "model": str(model_directory("bert")), "shots": 4}
    monkeypatch.setattr(forgetfree, "run", lambda **how: run(**how | tiny | {"steps": 3, "progress": False}))
    monkeypatch.chdir(tmp_path)
    optuna.logging.disable_default_handler()
    namespace: dict[str, Any] = {}
    exec(compile(recipe, "docs/watching.md", "exec"), namespace)
    study = namespace["study"]
    assert len(study.trials) == 2 and all(1e-4 <= each.params["learning_rate"] <= 1e-1 for each in study.trials)
    assert study.best_value == max(each.value for each in study.trials)
    best = {key: json.loads((tmp_path / "runs/best" / f"{key}.json").read_text()) for key in ("config", "results")}
    assert best["results"]["evaluated_on"] == "test"
    assert {key: best["results"]["runs"][0]["options"][key] for key in study.best_params} == study.best_params
    tiny["data"] = str(shutil.copytree(data_directory, tmp_path / "turned"))
    for path in (tmp_path / "turned").glob("*/test.jsonl"):  # swap labels: the best becomes worst
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row | {"label": (row["label"] + 1) % 2}) + "\n" for row in rows))
    assert namespace["average"](optuna.trial.FixedTrial(study.best_params)) == study.best_value  # no test row was used


def opposite(rows: Rows) -> Rows:
    """Return the same texts with the other of two labels, so that the best mask becomes the worst."""
    return replace(rows, labels=tuple(1 - label for label in rows.labels))


@pytest.mark.sampled(share=0.3)
def test_the_rows_that_are_scored_choose_no_mask(data_directory: Path, model_directory: Any) -> None:
    rows = load_task("sst2", str(data_directory), "validation")
    rows = replace(rows, validation=rows.train)  # more rows: on six rows all masks answer alike
    options = LocalizationOptions(
        steps=60,
        optimizer="adamw",
        learning_rate=0.01,
        sparsity=0.2,
        mask_steps=8,
        mask_learning_rate=1e9,
    )

    def region(rows: TaskRows) -> list[int]:
        bench = SingleTask.of(load_model(str(model_directory("bert")), "linear"), rows)
        found = bench.localized(bench.fine_tuned(options), options)
        return found.region.indices.tolist()

    assert region(replace(rows, test=opposite(rows.test))) == region(rows)
    assert region(replace(rows, validation=opposite(rows.validation))) != region(rows)  # which do choose it
