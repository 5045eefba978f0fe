"""Score the ways to choose a region in `learning`, and LoRA of about as many bytes, on validation rows.

    python -m benchmarks.picks DATA [--seed N …] [--out FILE]

DATA is a directory with sst2, mpqa and ag_news. Each line of the file is one training of one task alone, by a plain loop in
`learning`; trainings in the file are not repeated. docs/results/recipe.md shows the results.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

from forgetfree import Ledger, learning
from forgetfree.core.regions import Region
from forgetfree.models.location import locate

TASKS = ("sst2", "mpqa", "ag_news")
#: The learning rates of AdamW that are tried, by pick; those for regions are about the fine-tuning rate times √(N/s).
RATES = {
    "fine-tune": (1e-4,),
    **dict.fromkeys(("movement", "gradient", "snip", "gallop"), (3e-3, 1e-2)),
    "lora": (1e-3, 3e-3),
}
STEPS, ROWS, SCORED, LENGTH = 100, 8, 400, 32
#: Rank 1 on these has 13,824 numbers, 55 kB; a region of 0.1 % has 10,646 entries, 64 kB in the file of a ledger.
LORA = LoraConfig(r=1, lora_alpha=16, target_modules=["query", "key", "value"], modules_to_save=["classifier"])
FIELDS = ("pick", "rate", "task", "seed", "accuracy", "rows", "seconds_to_choose", "seconds_to_train", "bytes")

Batch = dict[str, Tensor]


class Task:
    """A task's rows as batches: training rows in an order that depends on the seed, and validation rows.

    Args:
        data: the directory of tasks.
        name: the name of the task.
        tokenizer: the tokenizer of minilm.
        seed: draws the rows.
    """

    def __init__(self, data: Path, name: str, tokenizer: Any, seed: int) -> None:
        self.name, self.seed = name, seed
        frames = {split: pd.read_parquet(data / name / f"{split}.parquet") for split in ("train", "validation")}
        self.labels = sorted(frames["train"]["label"].unique())
        train = frames["train"].sample(STEPS * ROWS, random_state=seed)
        scored = frames["validation"].sample(min(SCORED, len(frames["validation"])), random_state=0)
        self.train = [self._batch(train.iloc[i : i + ROWS], tokenizer) for i in range(0, len(train), ROWS)]
        self.scored = [self._batch(scored.iloc[i : i + 50], tokenizer) for i in range(0, len(scored), 50)]

    def _batch(self, frame: pd.DataFrame, tokenizer: Any) -> Batch:
        texts = [frame[name].tolist() for name in ("text", "text_a", "text_b") if name in frame]
        made = tokenizer(*texts, truncation=True, max_length=LENGTH, padding=True, return_tensors="pt")
        return {**made, "labels": torch.tensor([self.labels.index(label) for label in frame["label"]])}

    def model(self) -> Any:
        """Return minilm with a new head, the same for all picks."""
        torch.manual_seed(self.seed)
        place = locate("minilm")
        return AutoModelForSequenceClassification.from_pretrained(
            place, num_labels=len(self.labels), use_safetensors=True, trust_remote_code=False
        )


def train(model: nn.Module, batches: Iterable[Batch], rate: float) -> None:
    """Train the trainable parameters: the head at a rate of 1e-3, the rest at ``rate``."""
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    head = [each for name, each in named if "classifier" in name]
    rest = [each for name, each in named if "classifier" not in name]
    optimizer = torch.optim.AdamW([{"params": rest, "lr": rate}, {"params": head, "lr": 1e-3}], weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 6, STEPS)  # type: ignore[no-untyped-call]
    model.eval()  # without dropout
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@torch.no_grad()
def accuracy(model: nn.Module, batches: Iterable[Batch]) -> tuple[float, int]:
    """Return the share of the rows that are right, and how many there are."""
    model.eval()
    right = torch.cat([model(**batch).logits.argmax(1) == batch["labels"] for batch in batches])
    return float(right.float().mean()), len(right)


class Trained:
    """The models of a task, with the trainable parameters of each pick; regions and the fine-tuned model are computed once.

    Args:
        task: the task.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._regions: dict[str, tuple[Region, float]] = {}
        self._tuned: dict[str, Tensor] | None = None

    @contextmanager
    def by(self, pick: str) -> Iterator[tuple[Any, float, int]]:
        """Yield the model with a pick's trainable parameters, the seconds of choosing, and the stored bytes, if known."""
        model = self._task.model()
        if pick == "fine-tune":
            for each in model.bert.embeddings.parameters():
                each.requires_grad_(False)
            yield model, 0.0, 4 * sum(each.numel() for each in model.bert.encoder.parameters())
            self._tuned = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        elif pick == "lora":
            adapted = get_peft_model(model, LORA)
            numbers = sum(each.numel() for name, each in adapted.named_parameters() if "lora_" in name)
            yield adapted, 0.0, 4 * numbers
        else:
            start = time.perf_counter()
            known: Any = self._regions.get(pick)
            tuned = self.tuned() if pick == "movement" and known is None else None
            ledger = Ledger.of_model(model)
            how: Any = {"region": known[0]} if known else {"region_from": pick, "fine_tuned": tuned}
            with learning(model, ledger, "one", batches=self._task.train, seed=self._task.seed, **how) as skill:
                seconds = known[1] if known else time.perf_counter() - start
                self._regions[pick] = skill.region, seconds
                yield model, seconds, 0

    def tuned(self) -> dict[str, Tensor]:
        """Return the state of the fine-tuned model, which ``movement`` needs."""
        if self._tuned is None:
            with self.by("fine-tune") as (model, _, _):
                train(model, self._task.train, *RATES["fine-tune"])
        assert self._tuned is not None
        return self._tuned


def main() -> None:
    """Run the trainings that the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="a data directory, as in forgetfree run")
    parser.add_argument("--seed", type=int, action="append", help="default: 0")
    parser.add_argument("--pick", action="append", choices=list(RATES), help="default: all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "picks" / "minilm.csv")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(locate("minilm"), trust_remote_code=False)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if not options.out.exists():
        options.out.write_text(",".join(FIELDS) + "\n", encoding="utf-8")
    with options.out.open(encoding="utf-8") as file:
        done = {tuple(row[name] for name in FIELDS[:4]) for row in csv.DictReader(file)}
    for seed in options.seed or [0]:
        for name in TASKS:
            task = Task(options.data, name, tokenizer, seed)
            trained = Trained(task)
            for pick in options.pick or RATES:
                for rate in RATES[pick]:
                    unit = pick, f"{rate:g}", name, str(seed)
                    if unit in done:
                        continue
                    with trained.by(pick) as (model, choosing, kept):
                        start = time.perf_counter()
                        train(model, task.train, rate)
                        training = time.perf_counter() - start
                        score, count = accuracy(model, task.scored)
                    line = (*unit, f"{score:.4f}", count, f"{choosing:.1f}", f"{training:.1f}", kept or "")
                    with options.out.open("a", encoding="utf-8", newline="") as file:
                        csv.writer(file, lineterminator="\n").writerow(line)
                    print(*line, flush=True)


if __name__ == "__main__":
    main()
