"""Families beside BERT, RoBERTa and GPT-2: loaded, fine-tuned, localised, grafted, and written as a model of their own."""

from __future__ import annotations

from pathlib import Path

import families
import pytest
import torch
import transformers
from cards import card_logits

from forgetfree import cli
from forgetfree.apply import apply_graft
from forgetfree.data.rows import Rows
from forgetfree.data.sources import load_task
from forgetfree.grafting import Graft
from forgetfree.localization import LocalizationOptions
from forgetfree.models.loading import load_model
from forgetfree.parameters import ParameterSpace
from forgetfree.single_task import SingleTask
from forgetfree.training import TrainingOptions

GRAFTED = (
    *(
        "DistilBert",
        "DebertaV2",
        "Electra",
        "Albert",
        "MPNet",
        "ModernBert",
        "XLNet",
        "OPT",
        "Bloom",
        "Llama",
        "GPTNeoX",
    ),
    *("T5", "Bart"),
)


@pytest.fixture(scope="module", params=GRAFTED)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A family's name, and a tiny model of it with its LM head, as a directory."""
    return request.param, families.write(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("readout", ["linear", "auto"])
def test_a_family_is_grafted_and_written(
    model: tuple[str, Path], readout: str, data_directory: Path, tmp_path: Path
) -> None:
    family, directory = model
    loaded = load_model(str(directory), readout)
    assert loaded.readout == (readout if readout == "linear" else families.FAMILIES[family].readout)
    bench = SingleTask(loaded, load_task("qnli", str(data_directory)), shots=8)
    options = LocalizationOptions(steps=3, learning_rate=0.1, sparsity=0.05, mask_steps=2, mask_batch_size=8)
    fine_tuned = bench.fine_tuned(options)
    (found,) = bench.localized(fine_tuned, options)
    assert len(found.region)
    bench.graft(fine_tuned, found.region, 0.05).save(tmp_path / "graft.safetensors")
    graft = Graft.load(tmp_path / "graft.safetensors")
    # The same bits, whatever head the model has.
    theta = bench.grafted(fine_tuned, found.region).theta
    whole = load_model(str(directory), readout).model.backbone
    graft.apply_(whole)
    assert torch.equal(ParameterSpace.of(whole).flatten(whole), theta)
    written = apply_graft(graft, str(directory), tmp_path / "out")
    again = getattr(transformers, written.loader).from_pretrained(tmp_path / "out")
    assert torch.equal(ParameterSpace.of(again).flatten(again), theta)
    # And the answers of the model that was written, by its card alone.
    texts = Rows(("is the film good ?", "", "a dull story " * 30), ("a lovely film", "it was", "who"), (0, 0, 0))
    rows = bench.encode(texts)
    expected = bench.answers(bench.grafted(fine_tuned, found.region), rows, TrainingOptions(evaluation_batch_size=1))
    got = card_logits(tmp_path / "out", texts)
    assert torch.allclose(got, torch.from_numpy(expected.logits), atol=1e-4)
    assert len({tuple(row) for row in got.tolist()}) == 3


@pytest.mark.parametrize("family", ["Bart", "T5"])
def test_an_encoder_decoder_learns_a_stream_and_predicts(
    family: str, data_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command line: a run, its ledger verified, and labels for new texts from it."""
    model, out = str(families.write(family, tmp_path / "model")), str(tmp_path / "out")
    options = ["--shots", "4", "--steps", "4", "--set", "sparsity=0.05", "--set", "mask_steps=2"]
    run = ["run", "qnli,sst2", "--data", str(data_directory), "--model", model, *options]
    assert cli.main([*run, "--strategy", "grafting-continual", "--out", out]) == 0
    (ledger,) = (tmp_path / "out").rglob("ledger.safetensors")
    assert cli.main(["ledger", "verify", str(ledger), "--model", model]) == 0
    capsys.readouterr()
    assert cli.main(["predict", out, "--task", "sst2", "a lovely film", "a dull story"]) == 0
    labels = [line.split("\t")[0].strip() for line in capsys.readouterr().out.splitlines()]
    assert len(labels) == 2 and set(labels) <= {"negative", "positive"}
