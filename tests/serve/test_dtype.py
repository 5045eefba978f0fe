"""Weights in bfloat16: saved files give the run's predictions to the bit, and weights in float32 are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from compared import run_logits

from forgetfree import Ledger, Predictor, cli
from forgetfree.data.rows import Rows
from forgetfree.data.sources import load_tasks
from forgetfree.errors import LedgerError
from forgetfree.ledger.switch import check_weights
from forgetfree.models.loading import load_model

MakeRun = Callable[..., Path]
ModelDirectory = Callable[[str], Path]
STRATEGIES = ("grafting-continual", "continual-ft", "lora")


@pytest.fixture(scope="module")
def run(finished_run: MakeRun) -> Path:
    """Return a run of a causal model; its label words need no readout, which would be in float32."""
    more = ("--set", "dtype=bfloat16", "--set", "region_from=gradient")
    return finished_run("gpt2-lm", *STRATEGIES, stream="qnli,sst2", more=more)


@pytest.fixture(scope="module")
def ledger(run: Path) -> Ledger:
    return Ledger.load(run / "grafting-continual" / "seed-0" / "ledger.safetensors")


@pytest.fixture(scope="module")
def rows(data_directory: Path) -> Rows:
    (task,) = load_tasks("sst2", str(data_directory))
    return task.test


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_kept_answers_as_the_run_did(run: Path, rows: Rows, strategy: str) -> None:
    predictor = Predictor.of_run(run, strategy=strategy)
    assert {each.dtype for each in predictor.loaded.model.parameters()} == {torch.bfloat16}
    assert torch.equal(predictor.logits("sst2", rows.texts), run_logits(run, strategy, "sst2"))


def test_a_ledger_alone_reads_the_model_in_bfloat16_and_refuses_it_in_float32(
    run: Path, ledger: Ledger, rows: Rows, model_directory: ModelDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {each.owned.values.dtype for each in ledger.records} == {torch.bfloat16} and len(ledger.owned())
    directory = str(model_directory("gpt2-lm"))
    with pytest.raises(LedgerError, match=r"expected '.*' in torch\.bfloat16, got torch\.float32\. Load the model"):
        check_weights(ledger, load_model(directory).model.backbone)
    file = str(run / "grafting-continual" / "seed-0" / "ledger.safetensors")
    assert cli.main(["ledger", "verify", file, "--model", directory]) == 0, capsys.readouterr().err
    alone = Predictor.of_ledger(ledger, directory)
    assert torch.equal(alone.logits("sst2", rows.texts), run_logits(run, "grafting-continual", "sst2"))


def test_exported_models_and_applied_grafts_have_the_bits_of_the_run(
    run: Path, ledger: Ledger, model_directory: ModelDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformers loads the models in the dtype in which they were written."""
    assert cli.main(["export", str(run), "--task", "sst2", "--out", str(tmp_path / "sst2")]) == 0
    assert "note" not in capsys.readouterr().out
    file = str(tmp_path / "qnli.safetensors")
    ledger.graft("qnli").save(file)
    assert cli.main(["apply", file, "--model", str(model_directory("gpt2-lm")), "--out", str(tmp_path / "qnli")]) == 0
    predictor = Predictor.of_run(run)
    for task in ("sst2", "qnli"):
        network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / task)
        assert network.dtype == torch.bfloat16
        got = network.state_dict()
        with predictor.weights.answering(task):
            meant = predictor.loaded.model.backbone.state_dict()
            assert all(torch.equal(got[name].cpu(), tensor.cpu()) for name, tensor in meant.items())


def test_a_classifier_is_written_in_float32_and_that_is_told(
    finished_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run("bert", "bitfit", stream="sst2", more=("--set", "dtype=bfloat16"))
    assert cli.main(["export", str(run), "--task", "sst2", "--out", str(tmp_path / "model")]) == 0
    assert (
        "note: the task was learned in torch.bfloat16, and the model is written in torch.float32."
        in capsys.readouterr().out
    )
