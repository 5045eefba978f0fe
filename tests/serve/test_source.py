"""The file that answers in a run's directory, its description before a model is loaded, and refusals of other runs' files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from edited import change_config, change_outcome

from forgetfree import Predictor, TaskSwitch, cli, load_results
from forgetfree.errors import LedgerError, RunError, UsageError
from forgetfree.serve.source import Source, saved_file

MakeRun = Callable[..., Path]
#: The file of each strategy in the folder of a unit.
KEPT = {
    "grafting-continual": "ledger.safetensors",
    "lora": "adapters.safetensors",
    "continual-ft": "checkpoint.safetensors",
    "fine-tune": "fine-tuned.json",
}
each = pytest.mark.parametrize("strategy", KEPT)


@pytest.fixture
def run(finished_run: MakeRun, tmp_path: Path) -> Path:
    """Return a copy of a run, which a test may change."""
    made = finished_run("bert", *KEPT, stream="qnli,sst2", more=("--seed", "0", "--seed", "1"))
    return Path(shutil.copytree(made, tmp_path / "run"))


# -- The file and its description ------------------------------------------------------------------------


def test_the_run_chooses_grafting_then_a_ledger(run: Path) -> None:
    assert saved_file(run).parts[-3] == "grafting-continual"
    assert saved_file(run, strategy="continual-ft").name == "checkpoint.safetensors"
    shutil.move(run / "grafting-continual", run / "wsn")
    with pytest.raises(
        RunError, match=r"unit\.json belongs to another unit: expected wsn/seed-0, got grafting-continual/seed-0"
    ):
        saved_file(run)


def test_a_source_says_what_its_run_says(run: Path, model_directory: Callable[[str], Path]) -> None:
    source = Source.of(run)
    assert (source.file, source.strategy, source.is_ledger) == (saved_file(run), "grafting-continual", True)
    assert source.model == str(model_directory("bert"))
    assert (source.tasks, source.task_inference) == ((), "last")  # a ledger contains them itself
    moved = Source.of(run, strategy="continual-ft", model="elsewhere")
    assert (moved.model, moved.is_ledger) == ("elsewhere", False)
    assert [task.name for task in moved.tasks] == ["qnli", "sst2"]
    assert not moved.shared_labels
    for strategy, seed, message in (
        ("wsn", None, "no model or ledger of wsn to predict with.* continual-ft"),
        (None, 7, "of seed 7"),
    ):
        with pytest.raises(RunError, match=message):
            Source.of(run, seed, strategy)


def test_a_ledger_alone_needs_its_model(run: Path) -> None:
    ledger = saved_file(run)
    source = Source.of(ledger, model="minilm")
    assert (source.file, source.model, source.strategy, source.tasks) == (ledger, "minilm", "", ())
    for more in ({}, {"model": "minilm", "seed": 0}, {"model": "minilm", "strategy": "wsn"}):
        with pytest.raises(UsageError, match="Give --model, and neither --strategy nor --seed"):
            Source.of(ledger, **more)  # type: ignore[arg-type]


def test_a_unit_must_say_what_its_answers_depend_on(run: Path) -> None:
    change_outcome(run / "lora" / "seed-0", lambda outcome: outcome["details"]["bound"].pop("shared_labels"))
    message = r"details\.bound\.shared_labels is missing.* Restore it from a copy, or run the stream"
    with pytest.raises(RunError, match=message):
        Source.of(run, strategy="lora")


# -- Labels and models ----------------------------------------------------------------------------------


@each
def test_what_answers_says_itself_what_its_labels_are(run: Path, strategy: str) -> None:
    """Labels come from the ledger, or from the unit.json of another file; config.json does not decide them."""
    expected = Predictor.of_run(run, 0, strategy).answer("sst2", ["a film"])
    change_config(run, lambda config: config["tasks"][1]["labels"].reverse())
    change_config(run, lambda config: config["tasks"].reverse())
    change_config(run, lambda config: config.update(scenario="class"))
    assert Predictor.of_run(run, 0, strategy).answer("sst2", ["a film"]) == expected
    path = run / "config.json"
    path.write_text(path.read_text().replace('"precision": "fp32"', '"precision": "bf16"'))
    with pytest.raises(
        RunError, match=r"config\.json is not the configuration that .* was made with.* restore it from a copy"
    ):
        Predictor.of_run(run, 0, strategy)


@each
def test_a_model_that_computes_otherwise_answers_nothing(
    run: Path, strategy: str, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(model_directory("bert"), tmp_path / "model"))
    settings = model / "config.json"
    settings.write_text(settings.read_text().replace('"hidden_act": "gelu"', '"hidden_act": "relu"'))
    with pytest.raises((RunError, LedgerError), match="the model's hidden_act"):
        Predictor.of_run(run, 0, strategy, str(model))


def test_a_ledger_answers_without_its_unit_and_no_other_file_does(run: Path) -> None:
    for strategy in ("grafting-continual", "lora"):
        (run / strategy / "seed-0" / "unit.json").unlink()
    assert Predictor.of_run(run, 0).answer("sst2", ["a film"])
    with pytest.raises(RunError, match=r"has no unit\.json, which defines its tasks: the run was interrupted"):
        Predictor.of_run(run, 0, "lora")


# -- Files of another seed or run -------------------------------------------------------------------------


def exchange(run: Path, strategy: str, name: str) -> Path:
    """Put seed 1's file in place of seed 0's."""
    path = run / strategy / "seed-0" / name
    shutil.copy(run / strategy / "seed-1" / name, path)
    return path


@each
def test_what_another_seed_kept_answers_nothing(run: Path, strategy: str, tmp_path: Path, capsys: Any) -> None:
    asked = ("--task", "sst2", "--strategy", strategy, "--seed", "0")
    assert cli.main(["predict", str(run), *asked, "a film"]) == 0
    path = exchange(run, strategy, KEPT[strategy])
    capsys.readouterr()
    assert cli.main(["predict", str(run), *asked, "a film"]) == 1
    assert "is not the file that its unit wrote" in capsys.readouterr().err
    assert cli.main(["export", str(run), *asked, "--out", str(tmp_path / "model")]) == 1
    with pytest.raises(RunError, match=f"{path.name} is not the file that its unit wrote: .*Restore it from a copy"):
        Predictor.of_run(run, 0, strategy)


def test_a_ledger_of_another_seed_is_refused_wherever_it_is_read(
    run: Path, model_directory: Callable[[str], Path], tmp_path: Path, capsys: Any
) -> None:
    path, other = exchange(run, "grafting-continual", "ledger.safetensors"), str(model_directory("bert"))
    alone = str(shutil.copy(path, tmp_path / "ledger.safetensors"))
    for command in (
        ("ledger", "show", str(path)),
        ("ledger", "verify", str(path)),
        ("predict", str(path), "--model", other, "--task", "sst2", "a film"),
    ):
        assert cli.main(list(command)) == 1, command
        assert "is not the file that its unit wrote" in capsys.readouterr().err
    with pytest.raises(RunError, match="its unit wrote"):
        TaskSwitch(path, object())
    with pytest.raises(RunError, match="its unit wrote"):
        load_results(run).ledger("grafting-continual", 0)
    assert cli.main(["ledger", "show", alone]) == 0  # a ledger outside of its run is accepted


def test_the_folder_of_another_seed_or_a_damaged_record_answers_nothing(run: Path) -> None:
    path = run / "lora" / "seed-0" / "unit.json"
    path.write_text(path.read_text().replace('"bytes": ', '"bytes": 1'))
    with pytest.raises(RunError, match="is not the file that its unit wrote"):
        Predictor.of_run(run, 0, "lora")
    shutil.rmtree(path.parent)
    shutil.copytree(run / "lora" / "seed-1", path.parent)
    with pytest.raises(RunError, match=r"unit.json belongs to another unit: expected .*/seed-0, got .*/seed-1\."):
        Predictor.of_run(run, 0, "lora")


def test_a_fine_tuned_model_under_another_name_answers_nothing(run: Path) -> None:
    first, second = sorted((run / "fine-tuned").glob("sst2-*.safetensors"))
    first.rename(first.with_name("taken"))
    shutil.copy(second, first)
    answered = 0
    for seed in (0, 1):
        predictor = Predictor.of_run(run, seed, "fine-tune")
        try:
            answered += len(predictor.answer("sst2", ["a film"]))
        except RunError as error:
            assert "another one has its name" in str(error)
    assert answered == 1
