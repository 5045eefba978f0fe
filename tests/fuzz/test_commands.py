"""What the command line says of damaged files: one paragraph and exit code 1, never that it is a fault of forgetfree."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz.mutations import BYTES, split
from fuzz.samples import Samples
from safetensors.torch import load, save

from forgetfree import cli

Change = Callable[[bytes], bytes]


def changed(path: Path, change: Change) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.fixture
def run(samples: Samples, tmp_path: Path) -> Path:
    """The run, in which bitfit is still to be trained, and then compared with the fine-tuned models."""
    shutil.copytree(samples.root / "run", tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    results["runs"] = [entry for entry in results["runs"] if entry["strategy"] != "bitfit"]
    (tmp_path / "run" / "results.json").write_text(json.dumps(results))
    return tmp_path / "run"


def flipped(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


def without_checksum(data: bytes) -> bytes:
    """As version 0.2 wrote it."""
    return save(load(data))


def of_fewer_rows(data: bytes) -> bytes:
    return save({name: tensor[1:].clone() for name, tensor in load(data).items()})


def of_other_tasks(data: bytes) -> bytes:
    return save({name.replace("qnli", "rte"): tensor for name, tensor in load(data).items()})


PREDICTIONS = "fine-tune/seed-0/predictions.safetensors"
DAMAGE: dict[str, tuple[str, Change, str]] = {
    "a flipped bit": (PREDICTIONS, flipped, "is damaged: its contents do not match its checksum. Start again"),
    "cut short": (PREDICTIONS, lambda data: data[:-9], "cannot be read"),
    "fewer rows": (PREDICTIONS, of_fewer_rows, "logits and labels of 'qnli' must be one row for each of 16 test rows"),
    "other tasks": (PREDICTIONS, of_other_tasks, "its tensors must be logits and labels of qnli, ag_news"),
    "a deep config": (
        "config.json",
        lambda data: b"[" * 100_000,
        "config.json is not valid JSON: its lists and objects",
    ),
    "other versions": (
        "config.json",
        lambda data: data.replace(b'"versions": {', b'"versions": 3, "x": {'),
        "versions must",
    ),
    "results of NaN": ("results.json", lambda data: data.replace(b"0.", b"NaN", 1), "results.json is not valid JSON"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_run_with_a_damaged_file_is_not_resumed(damage: str, run: Path, samples: Samples, capsys) -> None:
    name, change, message = DAMAGE[damage]
    changed(run / name, change)
    assert cli.main([*samples.resume, str(run)]) == 1
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("forgetfree: error:")]
    assert message in said and "fault of forgetfree" not in said and said.endswith(".")


def test_a_run_of_before_predictions_had_a_checksum_is_resumed(run: Path, samples: Samples) -> None:
    before = json.loads((samples.root / "run" / "results.json").read_text())
    for path in run.glob(f"*/{Path(PREDICTIONS).parent.name}/predictions.safetensors"):
        changed(path, without_checksum)
        assert "__metadata__" not in split(path.read_bytes())[0]
    assert cli.main([*samples.resume, str(run)]) == 0
    after = json.loads((run / "results.json").read_text())
    outcomes = [
        {run["strategy"]: (run["matrix"], run["agreement"]) for run in each["runs"]} for each in (before, after)
    ]
    assert outcomes[0] == outcomes[1] and "bitfit" in outcomes[1]


def test_damaged_fine_tuned_models_are_made_again(run: Path, samples: Samples) -> None:
    shutil.rmtree(run / "fine-tune")
    results = json.loads((run / "results.json").read_text())
    results["runs"] = [entry for entry in results["runs"] if entry["strategy"] not in ("fine-tune", "bitfit")]
    (run / "results.json").write_text(json.dumps(results))
    for path in (run / "fine-tuned").iterdir():
        changed(path, flipped)
    assert cli.main([*samples.resume, str(run)]) == 0
    originals = samples.root / "run" / "fine-tuned"
    assert all(path.read_bytes() == (originals / path.name).read_bytes() for path in (run / "fine-tuned").iterdir())


@pytest.mark.parametrize("family", BYTES)
def test_predict_refuses_a_damaged_ledger(family: str, run: Path, capsys) -> None:
    changed(run / "packnet/seed-0/ledger.safetensors", lambda data: BYTES[family](data, random.Random(family)))
    assert cli.main(["predict", str(run), "--strategy", "packnet", "--task", "qnli", "a\tb"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("forgetfree: error:") and said.count("\n") == 1 and "run the stream again." in said
