"""Whatever a strategy keeps answers only for the labels, the prompts, the tokenizer and the network of its run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from edited import change_config, change_outcome

from forgetfree import Predictor
from forgetfree.errors import LedgerError, RunError

MakeRun = Callable[..., Path]
STRATEGIES = ("grafting-continual", "lora", "continual-ft", "fine-tune")
each = pytest.mark.parametrize("strategy", STRATEGIES)


@pytest.fixture
def run(finished_run: MakeRun, tmp_path: Path) -> Path:
    made = finished_run("bert", *STRATEGIES, stream="qnli,sst2", more=("--seed", "0", "--seed", "1"))
    return Path(shutil.copytree(made, tmp_path / "run"))


@each
def test_what_answers_says_itself_what_its_labels_are(run: Path, strategy: str) -> None:
    """A ledger, or the unit.json of another file; config.json is not asked a second time."""
    expected = Predictor.of_run(run, 0, strategy).answer("sst2", ["a film"])
    change_config(run, lambda config: config["tasks"][1]["labels"].reverse())
    change_config(run, lambda config: config["tasks"].reverse())
    change_config(run, lambda config: config.update(scenario="class"))
    assert Predictor.of_run(run, 0, strategy).answer("sst2", ["a film"]) == expected


def test_a_config_that_was_changed_answers_nothing(run: Path) -> None:
    path = run / "config.json"
    path.write_text(path.read_text().replace('"precision": "fp32"', '"precision": "bf16"'))
    with pytest.raises(RunError, match=r"config\.json is not the one that .* was made under.* restore it from a copy"):
        Predictor.of_run(run, 0, "lora")


@each
def test_another_tokenizer_answers_nothing(
    run: Path, strategy: str, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(model_directory("bert"), tmp_path / "model"))
    path = model / "tokenizer.json"
    described = json.loads(path.read_text())
    words = described["model"]["vocab"]
    first, second = list(words)[-2:]
    words[first], words[second] = words[second], words[first]
    path.write_text(json.dumps(described))
    with pytest.raises((RunError, LedgerError), match=r"would not answer as .*: the tokenizer"):
        Predictor.of_run(run, 0, strategy, str(model))


def test_a_unit_that_does_not_say_it_answers_nothing(run: Path) -> None:
    change_outcome(run / "lora" / "seed-0", lambda outcome: outcome["details"].pop("bound"))
    with pytest.raises(
        RunError, match=r"unit\.json: details\.bound .*missing.* Restore it from a copy, or run the stream"
    ):
        Predictor.of_run(run, 0, "lora")


def test_a_ledger_answers_without_its_unit_and_no_other_file_does(run: Path) -> None:
    for strategy in ("grafting-continual", "lora"):
        (run / strategy / "seed-0" / "unit.json").unlink()
    assert Predictor.of_run(run, 0).answer("sst2", ["a film"])
    with pytest.raises(RunError, match=r"has no unit\.json, which says what its tasks are: it was cut short"):
        Predictor.of_run(run, 0, "lora")
