"""The files that these tests damage, made once per session and worker."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from forgetfree import cli
from forgetfree.results.report.run_report import to_csv
from forgetfree.results.table import load_results


@pytest.fixture(scope="session")
def samples(data_directory: Path, model_directory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one small run, one graft, data, and the run as one csv."""
    root = tmp_path_factory.mktemp("fuzz")
    shutil.copytree(data_directory, root / "data")
    common = ["--data", str(root / "data"), "--model", str(model_directory("bert")), "--set", "mask_steps=1"]
    common += ["--shots", "2", "--steps", "1", "--sparsity", "0.01"]
    strategies = ["--strategy", "grafting-continual", "--strategy", "fine-tune"]
    assert cli.main(["run", "qnli,ag_news", *common, *strategies, "--out", str(root / "run")]) == 0
    assert cli.main(["graft", "sst2", *common, "--out", str(root / "graft")]) == 0
    (root / "run.csv").write_text(to_csv(load_results(root / "run")), encoding="utf-8")
    return root
