"""Edited runs: config.json or the outcome of a unit is changed, and unit.json is made to match it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forgetfree.files import sha256, write_json
from forgetfree.results.run_folder import CONFIG, OUTCOME, RECORD, size_and_sha256


def write_config(run: Path, config: Mapping[str, Any]) -> None:
    """Give a run another config.json, as if its units had been made under it."""
    write_json(run / CONFIG, config)
    for path in run.glob(f"*/seed-*/{RECORD}"):
        write_json(path, json.loads(path.read_text()) | {"config": [sha256(run / CONFIG)]})


def change_config(run: Path, change: Callable[[Any], object]) -> None:
    """Edit config.json, as if the units had been made under it."""
    config = json.loads((run / CONFIG).read_text())
    change(config)
    write_config(run, config)


def change_outcome(folder: Path, change: Callable[[Any], object]) -> None:
    """Edit outcome.json in the folder of a unit."""
    outcome = json.loads((folder / OUTCOME).read_text())
    change(outcome)
    write_json(folder / OUTCOME, outcome)
    record = json.loads((folder / RECORD).read_text())
    record["files"][OUTCOME] = size_and_sha256(folder / OUTCOME)
    write_json(folder / RECORD, record)
