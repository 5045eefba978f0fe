"""Commands and Python calls on a simulated GPU: they compute on it, and mix no devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import simulated_gpu

import forgetfree
from forgetfree import Ledger, Predictor, cli

ROOT = Path(__file__).parents[1]


@pytest.fixture
def gpu() -> Iterator[None]:
    with simulated_gpu.present():
        yield


@pytest.fixture(scope="module")
def run(model_directory: Any, data_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that was trained on the CPU."""
    out = tmp_path_factory.mktemp("run") / "out"
    forgetfree.run(
        "sst2,ag_news",
        data=str(data_directory),
        model=str(model_directory("bert")),
        strategies=["grafting-continual", "fine-tune"],
        shots=4,
        steps=2,
        sparsity=0.05,
        device="cpu",
        out=out,
        floors="constant",
        progress=False,
    )
    return out


@pytest.mark.parametrize("readout", ["linear", "mean"])
def test_a_check_takes_its_first_step_there(
    readout: str, gpu: None, model_directory: Any, data_directory: Path, tmp_path: Path, plans: list[Any]
) -> None:
    places = ["--data", str(data_directory), "--model", str(model_directory("bert")), "--out", str(tmp_path / "out")]
    assert (
        cli.main(["run", "sst2", *places, "--readout", readout, "--shots", "4", "--sparsity", "0.05", "--check"]) == 0
    )
    (plan,) = plans
    assert plan["device"] == "cuda" and plan["total"]["seconds"] is not None
    assert not [note for note in plan["notes"] if "fails" in note]


@pytest.mark.parametrize("strategy", ["grafting-continual", "fine-tune"])
@pytest.mark.parametrize(("device", "expected"), [("auto", "cuda"), ("cpu", "cpu")])
def test_what_answers_is_where_it_is_asked_to_be(
    device: str, expected: str, strategy: str, gpu: None, run: Path
) -> None:
    predictor = Predictor.of_run(run, strategy=strategy, device=device)
    texts = [("a joy",), ("a bore",)]
    answers = predictor.answer("sst2", texts) + predictor.answer_mixed(["sst2", "ag_news"], texts)
    assert {each.device.type for each in predictor.loaded.model.parameters()} == {expected}
    on_cpu = Predictor.of_run(run, strategy=strategy, device="cpu")
    assert answers == on_cpu.answer("sst2", texts) + on_cpu.answer_mixed(["sst2", "ag_news"], texts)


def test_a_ledger_answers_there_by_default(gpu: None, run: Path, model_directory: Any) -> None:
    ledger = Ledger.load(run / "grafting-continual" / "seed-0" / "ledger.safetensors")
    predictor = Predictor.of_ledger(ledger, str(model_directory("bert")))
    assert predictor.loaded.model.device.type == "cuda" and predictor.answer("sst2", ["a joy"])


#: Tests that reach most of the computing code, in half a minute.
SHARE = ("tests/core/test_grafting.py", "tests/core/test_selection.py", "tests/ledger/test_mixed_batch.py")


@pytest.mark.slow
def test_a_share_of_the_suite_passes_there() -> None:
    """docs/testing.md has the command for the whole suite, to be run by hand."""
    words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--simulated-gpu", *SHARE]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_a_run_tells_that_another_precision_may_be_faster(
    gpu: None, model_directory: Any, data_directory: Path, tmp_path: Path, capsys: Any
) -> None:
    places = ["--data", str(data_directory), "--model", str(model_directory("bert"))]
    for precision in ("fp32", "bf16"):
        words = ["run", "sst2", *places, "--out", str(tmp_path / precision), "--precision", precision, "--shots", "4"]
        assert cli.main([*words, "--steps", "1", "--strategy", "continual-ft", "--set", "floors=constant"]) == 0
        told = "continual-ft: training computes in float32. --precision auto" in capsys.readouterr().err
        assert told == (precision == "fp32")
