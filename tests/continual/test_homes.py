"""Users without a writable home: a container's user whose id is in no table, ``HOME=/``, a read-only home."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
from avalanche.benchmarks.datasets import dataset_utils
from huggingface_hub import constants

from forgetfree import cli
from forgetfree.cli.hub import go_offline_if_cut_off
from forgetfree.continual import CONFIG, nothing_written
from forgetfree.errors import UsageError


def avalanche_settings() -> Any:
    """Return the settings that Avalanche reads when it is imported."""
    with nothing_written():
        return runpy.run_path(str(dataset_utils.__file__))["AVALANCHE_CONFIG"]


@pytest.mark.parametrize("config", [None, "", "[]", "{}"])
def test_avalanche_is_imported_without_a_trace(
    config: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if config is not None:  # another process is about to write the file, or has damaged it
        (tmp_path / ".avalanche").mkdir()
        (tmp_path / ".avalanche" / "config.json").write_text(config)
    before = sorted(tmp_path.rglob("*"))
    assert avalanche_settings() == {"dataset_location": "~/.avalanche/data"}
    assert sorted(tmp_path.rglob("*")) == before


def test_the_users_own_settings_of_avalanche_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = Path(os.path.expanduser(CONFIG))
    path.parent.mkdir()
    path.write_text(json.dumps({"dataset_location": "/data"}))
    assert avalanche_settings() == {"dataset_location": "/data"}


def test_a_model_to_fetch_without_a_place_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("FORGETFREE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cli.main(["fetch", "smollm2"]) == 2
    assert "Name a directory in FORGETFREE_CACHE." in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_the_hub_has_no_cache_named_for_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub")
    with pytest.raises(UsageError, match="Set HF_HOME to a directory"):
        go_offline_if_cut_off()
