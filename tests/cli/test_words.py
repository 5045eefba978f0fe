"""What a command says: lines that fit the terminal, and each fault once."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import replace

import pytest

from forgetfree import cli
from forgetfree.cli.job import recipe_of
from forgetfree.display import tell
from forgetfree.jobs.config import RunConfig


class Terminal(io.StringIO):
    """A stderr that is a terminal, or not."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def test_a_line_is_wrapped_between_words_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = "Recipe of minilm: " + " ".join(f"option_{i}={i}e-{i}" for i in range(12))
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((40, 24)))
    for is_terminal in (True, False):
        monkeypatch.setattr(sys, "stderr", terminal := Terminal(is_terminal))
        tell(recipe)
        lines = terminal.getvalue().splitlines()
        assert " ".join(line.strip() for line in lines) == recipe  # no word is broken
        assert (len(lines) > 4) == is_terminal
        assert not is_terminal or max(map(len, lines)) <= 40


@pytest.mark.sampled("words1-faults1")
@pytest.mark.parametrize(
    ("words", "faults"),
    [
        (
            ["--set", "learning_rate=-1"],
            ["Options of fine-tune, continual-ft, grafting-continual: learning_rate must be above 0, got -1.0."],
        ),
        (
            ["--set", "batch_size=x", "--set", "fine-tune.learning_rate=-2", "--steps", "-3"],
            [
                "--steps must be at least 1, got -3.",
                "Options of fine-tune: learning_rate must be above 0, got -2.0.",
                "Options of fine-tune, continual-ft, grafting-continual: batch_size must be a whole number, got 'x'.",
            ],
        ),
    ],
)
def test_a_fault_of_several_strategies_is_told_once(
    words: list[str], faults: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "sst2", "--data", "demo", *words]) == 2
    told = capsys.readouterr().err.removeprefix("forgetfree: error: ").splitlines()
    assert sorted(line.removeprefix("- ") for line in told if not line.endswith("faults:")) == sorted(faults)


def test_who_has_no_recipe_and_sets_no_optimizer_is_told_what_trains() -> None:
    config = RunConfig(stream="sst2", model="gpt2", strategies=("fine-tune",))
    assert recipe_of(config).startswith("No recipe for gpt2: the paper's options train it, by SGD")
    for key in ("optimizer", "fine-tune.optimizer"):
        assert recipe_of(replace(config, settings={key: "adamw"})) == ""
