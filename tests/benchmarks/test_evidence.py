"""Units of evidence run once, even with several processes, and are stored as soon as they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import evidence
from forgetfree.errors import RunError, UnknownNameError
from forgetfree.files import locked
from forgetfree.results.table import load_results

CONFIG = """
stream = "sst2,qnli"
model = "{model}"
readout = "linear"
shots = 3
steps = 2
seed = [0, 1]
strategy = ["fine-tune", "alone=forgetfree.strategies.grafting_continual:GraftingContinual"]

[set]
test_limit = 9
max_length = 20
floors = "constant"
sparsity = 0.02
"alone.composition" = "alone"
"alone.steps" = 1
"""


@pytest.fixture
def folder(
    tmp_path: Path, data_directory: Path, model_directory: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, list[str]]:
    """A folder for the results, with a TOML file, and the arguments that measure it."""
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / "tiny.toml").write_text(CONFIG.format(model=model_directory("bert")))
    monkeypatch.setattr(evidence, "CONFIGS", tmp_path / "evidence")
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    return tmp_path, ["tiny", "--data", str(data_directory), "--work", str(tmp_path / "work")]


def test_each_unit_is_run_once_and_kept_when_it_ends(
    folder: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    root, arguments = folder
    (root / "work" / "tiny" / "fine-tune-0").mkdir(parents=True)  # left by a killed process
    (root / "work" / "tiny" / "fine-tune-0" / "config.json").write_text("{}")
    with locked(root / "work" / "tiny" / "alone-1.lock"):  # another process runs it
        assert evidence.main(arguments) == 0
    units = ["tiny: fine-tune-0", "tiny: alone-0", "tiny: fine-tune-1", "tiny: alone-1"]
    assert capsys.readouterr().out.splitlines() == units[:3]
    assert evidence.main(arguments) == 0
    assert capsys.readouterr().out.splitlines() == units[3:]
    before = (root / "tiny.csv").read_bytes()
    assert evidence.main(arguments) == 0
    assert capsys.readouterr().out == "" and (root / "tiny.csv").read_bytes() == before
    runs = load_results(root / "tiny.csv").runs
    (alone,) = {str(run.facts.options["composition"]) for run in runs[2:]}
    assert alone == "alone"
    assert {run.facts.made["command"] for run in runs} == {"python -m benchmarks.evidence tiny --data DIR"}
    assert not [path for path in (root / "work" / "tiny").iterdir() if path.name != "fine-tuned"]


def test_rates_are_scored_on_validation_rows_with_a_seed_of_their_own(
    folder: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, Any]] = []
    run = evidence.run

    def heard(config: Any, execution: Any) -> Any:
        asked.append((config.seed, config.set["evaluate_on"]))
        return run(config, execution)

    monkeypatch.setattr(evidence, "run", heard)
    monkeypatch.setattr(evidence, "RATES", ("learning_rate", (1e-5, 1e-1)))
    assert evidence.main([*folder[1], "--rates", "--strategy", "fine-tune"]) == 0
    assert [*evidence.averages("tiny")] == ["fine-tune"]
    assert evidence.main([*folder[1], "--rates"]) == 0
    found = evidence.averages("tiny")
    assert {name: [*of_rates] for name, of_rates in found.items()} == {
        "fine-tune": ["1e-05", "0.1"],
        "alone": ["1e-05", "0.1"],
    }
    assert asked == [((evidence.SEED,), "validation")] * 4
    assert evidence.main([*folder[1], "--rates"]) == 0 and len(asked) == 4


def test_nothing_is_run_with_a_rate_that_is_not_the_best(
    folder: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    root, arguments = folder
    (root / "rates").mkdir()
    scored = {"fine-tune": {"1e-05": 0.5, "3e-05": 0.6, "0.0001": 0.4}}
    evidence.write_json(root / "rates" / "tiny.json", scored)
    assert evidence.main(arguments) == RunError.exit_code
    assert "expected fine-tune.learning_rate=3e-05, the best of the 4 rates" in capsys.readouterr().err
    assert not (root / "tiny.csv").exists()
    with (root / "evidence" / "tiny.toml").open("a") as file:
        file.write('"fine-tune.learning_rate" = 3e-5\n')
    assert evidence.main(arguments) == RunError.exit_code  # one rate is missing
    scored["fine-tune"]["0.0003"] = 0.1
    evidence.write_json(root / "rates" / "tiny.json", scored)
    assert evidence.main([*arguments, "--strategy", "nobody"]) == UnknownNameError.exit_code
    assert evidence.main([*arguments, "--strategy", "fine-tune"]) == 0
    assert {run.strategy for run in load_results(root / "tiny.csv").runs} == {"fine-tune"}


NAMES = sorted(path.stem for path in evidence.CONFIGS.glob("*.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_was_run_with_the_options_of_its_file(name: str) -> None:
    scores = evidence.Scores(name, "demo", Path())
    scored = evidence.averages(name)
    if all(len(scored[each]) == len(evidence.rates_of(scores.references[each])[1]) for each in scored):
        assert scores.units()  # the options have the best rates
    for run in load_results(scores.path).runs if scores.path.exists() else []:
        options = scores.config.options[run.strategy].model_dump()
        assert {key: value for key, value in run.facts.options.items() if options.get(key, value) != value} == {}
