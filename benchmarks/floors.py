"""Measure the floors of published runs anew: ``python -m benchmarks.floors [--probe] DATA FILE ...``.

No strategy is trained. The rows are drawn by the seeds and shots of the runs; the first line of each CSV file gets the floors.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forgetfree.continual.stream import make_stream
from forgetfree.core.readout import mean_of_tokens
from forgetfree.core.readout_model import ReadoutModel
from forgetfree.data.examples import Examples
from forgetfree.data.rows import Rows, TaskRows, by_length, representative
from forgetfree.data.sources import load_tasks
from forgetfree.json_file import parse_json
from forgetfree.kinds.kind import kind_of
from forgetfree.models.loading import load_model
from forgetfree.results.answers import LabelAnswers
from forgetfree.training.encoded_task import sampled
from forgetfree.training.floors import Floats, Integers, probe_answers, word_answers

Json = dict[str, Any]


def words(train: Sequence[Rows], test: Sequence[Rows], tasks: Sequence[TaskRows], task_known: bool) -> list[float]:
    """Return the score of a bag of words on each task; where the task is withheld, among the labels of all."""
    sizes = [len(rows.task.labels) for rows in tasks]
    first = [0 if task_known else sum(sizes[:i]) for i in range(len(tasks))]
    labels = [[np.array(rows.labels) + first[i] for i, rows in enumerate(part)] for part in (train, test)]
    if task_known:
        answers = [word_answers([a], b, [c])[0] for a, b, c in zip(train, labels[0], test, strict=True)]
    else:
        answers = word_answers(train, np.concatenate(labels[0]), test)
    metrics = [rows.task.metric if task_known else "accuracy" for rows in tasks]
    return [_score(*each) for each in zip(answers, labels[1], metrics, strict=True)]


class Probe:
    """Linear probes on a frozen model, which computes the features of each row once, for all seeds.

    Args:
        runs: the first line of a file.
        tasks: the tasks with all rows.
        seeds: the seeds of the runs.
    """

    def __init__(self, runs: Json, tasks: Sequence[TaskRows], seeds: Sequence[int]) -> None:
        self.known: list[dict[tuple[str, ...], dict[str, Floats]]] = [{} for _ in tasks]
        for seed in seeds:
            loaded = load_model(runs["model"]["name"], readout=runs["model"]["readout"])
            stream = make_stream(runs["stream"], tasks, loaded, **_drawn_as(runs), seed=seed)
            for i, (rows, task) in enumerate(zip(tasks, stream.tasks, strict=True)):
                for part, encoded in zip(_drawn(runs, rows, seed), (task.train, task.test), strict=True):
                    new = [n for n, key in enumerate(part.texts) if key not in self.known[i]]
                    if new:
                        keys = [part.texts[n] for n in new]
                        features = _features(stream.model, encoded.subset(new))
                        self.known[i] |= dict(zip(keys, features, strict=True))

    def scores(self, where: str, train: Sequence[Rows], test: Sequence[Rows], tasks: Sequence[TaskRows]) -> list[float]:
        """Return the score on each task of a probe at ``linear`` or ``mean``."""
        found = []
        for known, ours, theirs, rows in zip(self.known, train, test, tasks, strict=True):
            read, scored = (np.stack([known[key][where] for key in part.texts]) for part in (ours, theirs))
            predicted = probe_answers(read, np.array(ours.labels), scored)
            found.append(_score(predicted, np.array(theirs.labels), rows.task.metric))
        return found


@torch.no_grad()
def _features(model: ReadoutModel, rows: Examples) -> list[dict[str, Floats]]:
    """Return, for each row, the last hidden state of its first token and the mean over all tokens, from one pass."""
    model.eval()
    found: list[dict[str, Floats]] = [{} for _ in range(len(rows))]
    for batch in by_length(rows.lengths, 64):
        x, _, _ = rows.batch(batch)
        inputs: Any = model.inputs(x)  # type: ignore[operator]
        hidden = model.backbone(**inputs).last_hidden_state
        read = {"linear": hidden[:, 0], "mean": mean_of_tokens(hidden, inputs["attention_mask"])}
        for place, row in enumerate(batch):
            found[row] = {where: each[place].numpy() for where, each in read.items()}
    return found


def _score(predicted: Integers | None, labels: Integers, metric: str) -> float:
    if predicted is None:
        raise SystemExit("A task's rows have no words.")
    width = 1 + max(int(predicted.max()), int(labels.max()), 1)
    return LabelAnswers(np.eye(width)[predicted], labels).score(metric)


def _drawn_as(runs: Json) -> Json:
    data, settings = runs["data"], runs.get("set", {})
    limit = settings.get("test_limit") or max(data["test_rows"].values())
    return {"shots": data["shots"], "test_limit": int(limit)}


def _drawn(runs: Json, rows: TaskRows, seed: int) -> tuple[Rows, Rows]:
    """Return the training rows of a seed, and the test rows."""
    how = _drawn_as(runs)
    kept = representative(kind_of(rows.task).groups(rows.test.labels), how["test_limit"])
    return sampled(rows, how["shots"], seed), rows.test.take(kept)


def measured(text: str, data: str, probe: bool) -> str:
    """Return the text of a CSV file of runs with new floors."""
    first, rest = text.split("\n", 1)
    runs = parse_json(first.removeprefix("# "))
    lines = (parse_json(line.removeprefix("# ")) for line in rest.splitlines() if line.startswith("# "))
    seeds, tasks = sorted({each["seed"] for each in lines}), load_tasks(runs["stream"], data)
    expected = runs["data"].get("fingerprints", {})
    if others := [rows.task.name for rows in tasks if expected.get(rows.task.name) not in (None, rows.fingerprint())]:
        raise SystemExit(
            f"{data} has other rows of {', '.join(others)} than the runs were made with. Give their directory."
        )
    floors = {key: each for key, each in runs.get("floors", {}).items() if key != "bag_of_words"}
    probes = Probe(runs, tasks, seeds) if probe else None
    for seed in seeds:
        train, test = zip(*(_drawn(runs, rows, seed) for rows in tasks), strict=True)
        found = {"bag_of_words": words(train, test, tasks, runs.get("scenario", "task") == "task")}
        if probes:
            found |= {
                name: probes.scores(where, train, test, tasks)
                for name, where in (("linear_probe", "linear"), ("mean_probe", "mean"))
            }
        for name, scores in found.items():
            floors.setdefault(name, {})[str(seed)] = scores
    return f"# {json.dumps(runs | {'floors': floors})}\n{rest}"


def main() -> None:
    """Write new floors into files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floors", description=__doc__)
    parser.add_argument("--probe", action="store_true", help="linear probes on the model, too: it reads every row once")
    parser.add_argument("data", help="the directory with the tasks")
    parser.add_argument("files", nargs="+", type=Path, help="CSV files of runs")
    arguments = parser.parse_args()
    for file in arguments.files:
        file.write_text(measured(file.read_text(encoding="utf-8"), arguments.data, arguments.probe), encoding="utf-8")
        print(file)


if __name__ == "__main__":
    main()
