"""Every kind of file that forgetfree reads back: who reads it, what that may raise, and when what was read is sound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgetfree.results.stored import load_graft_results, load_run_results
from fuzz import reading
from fuzz.reading import bits
from fuzz.samples import Samples

from forgetfree.errors import (
    DataError,
    ForgetfreeError,
    GraftError,
    LedgerError,
    ModelError,
    ReportError,
    RunError,
    UsageError,
)
from forgetfree.jobs.diagnostics import read_floors
from forgetfree.ledger import Ledger
from forgetfree.ledger.graft import Graft
from forgetfree.models.state import ModelState, StateStore
from forgetfree.results.scores import read_scores


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    Attributes:
        files: patterns of the files of this kind below the folder of all samples; the first that is found is damaged.
        read: reads the file, as its user does.
        content: all that was read, to compare; of tensors the bits.
        sound: asserts that what was read is sound; the path is for scratch.
        errors: what the reader may raise.
        signed: whether the file has a checksum.
    """

    files: tuple[str, ...]
    read: Callable[[Path, Samples], Any]
    content: Callable[[Any], Any]
    sound: Callable[[Any, Path], None]
    errors: tuple[type[ForgetfreeError], ...]
    signed: bool = False


KINDS: dict[str, Kind] = {
    "ledger": Kind(
        ("run/grafting-continual/seed-0/ledger.safetensors", "run/*/seed-0/ledger.safetensors"),
        lambda path, samples: Ledger.load(path),
        reading.ledger_content,
        reading.sound_ledger,
        (LedgerError,),
        signed=True,
    ),
    "graft": Kind(
        ("graft/graft.safetensors", "graft/seed-0/graft-*.safetensors"),
        lambda path, samples: Graft.load(path),
        bits,
        reading.sound_graft,
        (GraftError,),
        signed=True,
    ),
    "state": Kind(
        ("graft/fine-tuned/*.safetensors", "*/fine-tuned/*.safetensors"),
        lambda path, samples: ModelState.load(path),
        bits,
        reading.sound_state,
        (ModelError,),
        signed=True,
    ),
    "seconds of a fine-tuned model": Kind(
        ("graft/fine-tuned/*.seconds.json", "*/fine-tuned/*.seconds.json"),
        lambda path, samples: StateStore(path.parent).seconds(path.name.removesuffix(".seconds.json")),
        repr,
        reading.sound_note,
        (ModelError,),
    ),
    "checkpoint": Kind(
        ("run/continual-ft/seed-0/checkpoint.safetensors",),
        reading.read_strategy("continual-ft"),
        reading.strategy_content,
        reading.sound_strategy,
        (ModelError, RunError),
        signed=True,
    ),
    "learned tasks": Kind(
        ("run/continual-ft/seed-0/learned.json",),
        reading.read_strategy("continual-ft"),
        reading.strategy_content,
        reading.sound_strategy,
        (RunError,),
    ),
    "fine-tuned models": Kind(
        ("run/fine-tune/seed-0/fine-tuned.json",),
        reading.read_strategy("fine-tune"),
        reading.strategy_content,
        reading.sound_strategy,
        (RunError,),
    ),
    "adapters": Kind(
        ("run/lora/seed-0/adapters.safetensors", "run/o-lora/seed-0/adapters.safetensors"),
        reading.read_strategy("lora"),
        reading.strategy_content,
        reading.sound_strategy,
        (RunError,),
        signed=True,
    ),
    "predictions": Kind(
        ("run/packnet/seed-0/predictions.safetensors", "run/*/seed-0/predictions.safetensors"),
        reading.read_predictions,
        bits,
        reading.sound_predictions,
        (RunError,),
        signed=True,
    ),
    "config of a run": Kind(("run/config.json",), reading.read_run, bits, reading.sound_config, (RunError, UsageError)),
    "config of a graft": Kind(
        ("graft/config.json",), reading.read_job("graft"), bits, reading.sound_job, (RunError, UsageError)
    ),
    "record of a unit": Kind(
        (
            "run/packnet/seed-0/unit.json",
            "run/*/seed-0/unit.json",
            "graft/seed-0/unit.json",
        ),
        reading.read_record,
        bits,
        reading.sound_record,
        (),  # a record that is damaged counts as none
    ),
    "scores": Kind(
        (
            "run/packnet/seed-0/scores.csv",
            "run/*/seed-0/scores.csv",
            "graft/seed-0/scores.csv",
            "scores.csv",
        ),
        lambda path, samples: read_scores(path),
        bits,
        reading.sound_scores,
        (ReportError,),
    ),
    "results of a run": Kind(
        ("run/results.json",), lambda path, samples: load_run_results(path), bits, reading.sound_results, (ReportError,)
    ),
    "seconds per task": Kind(
        ("run/packnet/seed-0/seconds-per-task.json", "run/*/seed-0/seconds-per-task.json"),
        reading.read_seconds,
        bits,
        reading.sound_seconds,
        (),  # a file that is damaged counts as none
    ),
    "floors": Kind(
        ("run/grafting-continual/seed-0/floors.json",),
        lambda path, samples: read_floors(path.parent),
        bits,
        reading.sound_floors,
        (),  # a file that is damaged counts as none
    ),
    "results of a graft": Kind(
        ("graft/results.json",),
        lambda path, samples: load_graft_results(path),
        bits,
        reading.sound_graft_results,
        (ReportError,),
    ),
    "results of a run in one file": Kind(
        ("run.csv",), lambda path, samples: load_run_results(path), bits, reading.sound_results, (ReportError,)
    ),
    "results of a graft in one file": Kind(
        ("graft.csv",),
        lambda path, samples: load_graft_results(path),
        bits,
        reading.sound_graft_results,
        (ReportError,),
    ),
    "notes of a data directory": Kind(
        ("data/sst2/source.json", "data/*/source.json"),
        reading.read_task_notes,
        bits,
        reading.sound_notes,
        (DataError,),
    ),
}
