"""What the command line says of damaged files: one paragraph and exit code 1, never that it is a fault of forgetfree."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzz.mutations import BYTES
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
    (tmp_path / "run" / "bitfit" / "seed-0" / "unit.json").unlink()
    return tmp_path / "run"


def flipped(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


def of_fewer_rows(data: bytes) -> bytes:
    return save({name: tensor[1:].clone() for name, tensor in load(data).items()})


UNIT = "fine-tune/seed-0"
#: What a unit is trained again for: its file, and how it is damaged.
DAMAGED_UNITS: dict[str, tuple[str, Change]] = {
    "a flipped bit": ("predictions.safetensors", flipped),
    "cut short": ("predictions.safetensors", lambda data: data[:-9]),
    "fewer rows": ("predictions.safetensors", of_fewer_rows),
    "other scores": ("scores.csv", lambda data: data.replace(b"0.", b"1.", 1)),
    "a longer history": ("history.jsonl", lambda data: data + b"{}"),
    "no record": ("unit.json", lambda data: b""),
    "a deep record": ("unit.json", lambda data: b"[" * 100_000),
    "a record of another unit": ("unit.json", lambda data: data.replace(b'"seed": 0', b'"seed": 1', 1)),
    "other options": ("outcome.json", lambda data: data.replace(b'"steps": 1', b'"steps": 2', 1)),
}
DAMAGED_CONFIGS: dict[str, tuple[Change, str]] = {
    "deep": (lambda data: b"[" * 100_000, "config.json is not valid JSON: its lists and objects"),
    "other versions": (lambda data: data.replace(b'"versions": {', b'"versions": 3, "x": {'), "versions must"),
    "other units": (
        lambda data: data.replace(b'"units": {', b'"units": {"a": 3, '),
        "units.a must be an object",
    ),
    "no units": (lambda data: data.replace(b'"units": {', b'"united": {'), "units is missing"),
}


def outcomes(run: Path) -> dict[str, tuple[Any, ...]]:
    results = json.loads((run / "results.json").read_text())
    return {run["strategy"]: (run["matrix"], run["ece"], run["agreement"], run["options"]) for run in results["runs"]}


def times(run: Path) -> dict[Path, int]:
    """When each record was written: its bytes can be the same again, seconds included."""
    return {path: path.stat().st_mtime_ns for path in run.rglob("unit.json")}


@pytest.mark.sampled("cut short")
@pytest.mark.parametrize("damage", DAMAGED_UNITS)
def test_a_damaged_unit_is_run_again_and_no_other(damage: str, run: Path, samples: Samples) -> None:
    name, change = DAMAGED_UNITS[damage]
    changed(run / UNIT / name, change)
    written = times(run)
    assert cli.main([*samples.resume, str(run)]) == 0
    assert outcomes(run) == outcomes(samples.root / "run") and "bitfit" in outcomes(run)
    again = [path.parent.relative_to(run).as_posix() for path, time in times(run).items() if time != written.get(path)]
    assert sorted(again) == ["bitfit/seed-0", UNIT]
    assert (run / UNIT / "predictions.safetensors").read_bytes() == (
        samples.root / "run" / UNIT / "predictions.safetensors"
    ).read_bytes()


@pytest.mark.sampled("deep", "other units")
@pytest.mark.parametrize("damage", DAMAGED_CONFIGS)
def test_a_run_with_a_damaged_config_is_not_resumed(damage: str, run: Path, samples: Samples, capsys) -> None:
    change, message = DAMAGED_CONFIGS[damage]
    changed(run / "config.json", change)
    assert cli.main([*samples.resume, str(run)]) == 1
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("forgetfree: error:")]
    assert message in said and "fault of forgetfree" not in said and said.endswith(".")


@pytest.mark.sampled(share=0.4)
def test_damaged_fine_tuned_models_are_made_again(run: Path, samples: Samples) -> None:
    shutil.rmtree(run / "fine-tune")
    for path in (run / "fine-tuned").glob("*.safetensors"):
        changed(path, flipped)
    assert cli.main([*samples.resume, str(run)]) == 0
    originals = samples.root / "run" / "fine-tuned"
    assert all(
        path.read_bytes() == (originals / path.name).read_bytes() for path in (run / "fine-tuned").glob("*.safetensors")
    )


@pytest.mark.sampled("flip")
@pytest.mark.parametrize("family", BYTES)
def test_predict_refuses_a_damaged_ledger(family: str, run: Path, capsys) -> None:
    changed(run / "packnet/seed-0/ledger.safetensors", lambda data: BYTES[family](data, random.Random(family)))
    assert cli.main(["predict", str(run), "--strategy", "packnet", "--task", "qnli", "a\tb"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("forgetfree: error:") and said.count("\n") == 1 and "run the stream again." in said
