"""What a run leaves on disk, written so that it can be read at any moment.

OUT/config.json                       everything needed to repeat it
OUT/results.json                      see docs/results-format.md; rewritten after every row of a matrix
OUT/report.md                         the tables
OUT/fine-tuned/                       each task's fine-tuned model, shared by the strategies
OUT/STRATEGY/seed-S/                  ledger.safetensors or checkpoint.safetensors, predictions.safetensors (the last
                                      row's logits and labels on every task's test rows), seconds-per-task.json
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree import registry
from forgetfree.errors import RunError, UsageError
from forgetfree.files import read_signed, signed_bytes, write_atomically, write_json
from forgetfree.jobs.environment import make_directory, refuse_held
from forgetfree.json_file import check
from forgetfree.results.config_file import PLACES, load_run, located
from forgetfree.results.reports import render
from forgetfree.results.run_results import USUAL, load_results, merge, with_timings

if TYPE_CHECKING:
    from torch import Tensor

    from forgetfree.results.metrics import Predictions

SCHEMA = 1
_PREDICTIONS = "predictions.safetensors"
Json = dict[str, Any]


class RunDirectory:
    """A run directory, new or resumed.

    Args:
        path: where; made if it does not exist.
        section: the configuration, see `RunConfig.section`.
        resume: take up what the directory holds.

    Attributes:
        results: the content of results.json.
        section: the configuration with the strategies and seeds of all commands that ran into this directory.

    Raises:
        UsageError: it cannot be written, is not empty, or was begun with another configuration.
        RunError: what it holds cannot be read.
    """

    def __init__(self, path: Path, section: Json, resume: bool) -> None:
        self.path = path
        self.section = section
        self.results: Json = {
            "schema": SCHEMA,
            "stream": section["stream"],
            "tasks": [],
            "model": {},
            "data": {},
            "runs": [],
        }
        self._begun: Json = {}
        held = make_directory(path)
        if resume and "config.json" in held:
            self._take_up()
        else:
            or_else = ". There is no run in it to resume." if resume else ", or --resume to continue that run."
            refuse_held(path, held, f"Give another directory{or_else}")
        self.results["unfinished"], self.results["failed"] = [], []

    def _take_up(self) -> None:
        self._begun = load_run(self.path, "Start again with another --out.")
        before: Json = self._begun["run"]
        now = self.section
        may_differ = {"seed", "strategy"}
        if "config" in self._begun.get("model", {}):  # then `describe` can tell what lies there now
            may_differ.add("data")
            if not {before["model"], now["model"]} & registry.MODELS.keys():  # those bring recipes
                may_differ.add("model")
        was, is_now = ({**run, **_lying(run, self.path)} for run in (before, now))
        differ = sorted(key for key in now if key not in may_differ and was[key] != is_now[key])
        if differ:
            raise UsageError(
                f"--resume needs the configuration that {self.path} was begun with; these differ: "
                + ", ".join(f"{key} (was {before[key]!r}, now {now[key]!r})" for key in differ)
                + ". Start again with another --out."
            )
        for key in ("seed", "strategy"):
            self.section = self.section | {key: list(dict.fromkeys([*before[key], *now[key]]))}
        if (self.path / "results.json").is_file():
            self.results = load_results(self.path)
            self.results.pop("source")
            for key, usual in USUAL.items():
                self.results.setdefault(key, usual)
            for run in self.results["runs"]:
                run.pop("seconds_per_task", None)

    def describe(self, description: Json, config: Json) -> None:
        """Say what was loaded, once; when resuming, compare.

        Raises:
            RunError: model or data are not those that the directory was begun with.
        """
        config = json.loads(json.dumps(config | {"run": self.section}))
        if self.results["model"]:
            # What models and rows hold identifies them, not where they lie.
            description = description | {"model": description["model"] | {"name": self.results["model"].get("name")}}
            differ = [key for key in description if self.results.get(key) != description[key]]
            if differ := differ or _differing(self._begun, config):
                raise RunError(
                    f"{self.path} cannot be resumed: {' and '.join(differ)} changed since it was begun. Start again with "
                    "another --out, or put the old files back."
                )
        self.results |= description
        self._begun = config
        write_json(self.path / "config.json", config)
        self.save()

    def save(self) -> None:
        """Write results.json and report.md."""
        write_json(self.path / "results.json", self.results)
        if self.results["runs"]:
            report = render(merge([with_timings(self.results, self.path)]), "markdown")
            write_atomically(self.path / "report.md", report)

    def of(self, strategy: str, seed: int) -> Path:
        """The folder of one strategy and seed."""
        return self.path / strategy / f"seed-{seed}"

    def entry(self, strategy: str, seed: int) -> Json | None:
        """The finished run of one strategy and seed, if there is one."""
        return next((r for r in self.results["runs"] if (r["strategy"], r["seed"]) == (strategy, seed)), None)

    def save_predictions(self, strategy: str, seed: int, predictions: Mapping[str, Predictions]) -> None:
        """Keep logits and labels of every task."""
        import torch

        arrays = {f"{task}/logits": answers.logits for task, answers in predictions.items()}
        arrays |= {f"{task}/labels": answers.labels for task, answers in predictions.items()}
        tensors = {name: torch.tensor(array) for name, array in arrays.items()}
        write_atomically(self.of(strategy, seed) / _PREDICTIONS, signed_bytes(tensors, {}))

    def load_logits(self, strategy: str, seed: int) -> dict[str, Any]:
        """The kept logits by task: arrays ``(n, n_labels)``.

        Raises:
            RunError: the file is missing or damaged, or of other tasks or rows.
        """
        path, remedy = self.of(strategy, seed) / _PREDICTIONS, "Start again with another --out."
        _, tensors = read_signed(path, RunError, remedy, unsigned=())
        tasks, rows = self.results["tasks"], self.results["data"].get("test_rows", {})
        try:
            keys = {f"{task}/{part}" for task in tasks for part in ("logits", "labels")}
            check("its tensors", sorted(tensors), tensors.keys() == keys, f"logits and labels of {', '.join(tasks)}")
            for task in tasks:
                _check_predictions(task, tensors[f"{task}/logits"], tensors[f"{task}/labels"], rows.get(task))
        except ValueError as error:
            raise RunError(f"{path}: {error}. {remedy}") from error
        return {task: tensors[f"{task}/logits"].numpy() for task in tasks}


def _check_predictions(task: str, logits: Tensor, labels: Tensor, rows: int | None) -> None:
    """Raise ``ValueError`` unless they are finite logits of labels, one row each, of as many test rows as there are."""
    import torch

    shapes = tuple(logits.shape), tuple(labels.shape)
    count = len(labels) if labels.dim() == 1 and rows is None else rows
    right = logits.dim() == 2 and len(logits) == count and shapes[1] == (count,)
    check(f"logits and labels of {task!r}", shapes, right, f"one row for each of {count} test rows")
    finite = logits.is_floating_point() and bool(logits.isfinite().all())
    check(f"logits of {task!r}", str(logits.dtype), finite, "finite numbers")
    within = labels.dtype == torch.int64 and bool(((labels >= 0) & (labels < logits.shape[1])).all())
    check(f"labels of {task!r}", str(labels.dtype), within, f"whole numbers below {logits.shape[1]}")


def _lying(run: Json, directory: Path) -> Json:
    """Where model and data of a section lie, however they are named."""
    return {
        key: os.path.realpath(name) if os.path.isdir(name := located(run[key], directory)) else name
        for key in PLACES
        if key in run
    }


def _differing(before: Json, now: Json) -> list[str]:
    """What both config.json say and is not the same: our version, prompts, labels, the model's config, ids of rows."""
    found = []
    was, is_now = (each.get("versions", {}).get("forgetfree", "none") for each in (before, now))
    if was != is_now:
        found.append(f"the version of forgetfree (was {was}, is {is_now})")
    if before.get("tasks") != now["tasks"]:
        found.append("labels, label words, templates or metrics of tasks")
    model, held = before.get("model", {}), now["model"]
    if any(model[key] != held[key] for key in ("config", "max_length") if key in model):
        found.append("the model's config.json")
    data = before.get("data", {})
    if any(data.get(task, {}).get("encoded", rows["encoded"]) != rows["encoded"] for task, rows in now["data"].items()):
        found.append("the tokenizer or the prompts")
    return found
