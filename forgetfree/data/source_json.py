"""The description of a task in a data directory's ``source.json``, and what is inferred where it says nothing."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from forgetfree import registry
from forgetfree.display import brief
from forgetfree.errors import DataError
from forgetfree.json_file import read_json
from forgetfree.tasks import DEFAULT_CAUSAL_TEMPLATE, DEFAULT_TEMPLATE, KIND_OF_FORM, TaskDefinition

#: What is read of source.json; more may stand there.
_KEYS = (
    *("label_names", "label_words", "template", "causal_template", "metric"),
    *("text_column", "label_column", "kind", "entities"),
    *("instruction", "max_new_tokens", "stop"),
)


def read_source(folder: Path) -> dict[str, Any]:
    """Read a task's ``source.json``; empty if there is none.

    Raises:
        DataError: it is no JSON object, or a key that counts is misspelt or has a value that does not fit.
    """
    path = folder / "source.json"
    if not os.path.lexists(path):
        return {}
    source = read_json(path, DataError, "Fix or remove it.")
    if not isinstance(source, dict):
        raise DataError(f"{path} must hold a JSON object with label_names, got a {type(source).__name__}.")
    for key in [key for key in source if key not in _KEYS]:
        if meant := difflib.get_close_matches(key, [known for known in _KEYS if known not in source], 1, 0.8):
            raise DataError(f"{path}: {key!r} is not read. Did you mean {meant[0]!r}? Rename or remove it.")
    for key in ("label_names", "label_words"):
        names = source.get(key)
        if names is not None and not _are_names(names):
            raise DataError(
                f"{path}: {key} must be a list of at least two names, all different, got {brief(names, 200)}."
            )
    for key, most in (("text_column", 2), ("label_column", 1)):
        names = source.get(key, [])
        listed = names if isinstance(names, list) else [names]
        if len(listed) > most or not all(isinstance(each, str) and each for each in listed):
            expected = "the name of a column" + ", or a list of two for pairs" * (most == 2)
            raise DataError(f"{path}: {key} must be {expected}, got {brief(names, 200)}.")
    kinds = [*KIND_OF_FORM, *registry.kinds()]
    if source.get("kind", kinds[0]) not in kinds:
        raise DataError(f"{path}: kind must be {', '.join(kinds)}, got {brief(source['kind'], 200)}.")
    stop = source.get("stop", "")
    if not (isinstance(stop, str) or (isinstance(stop, list) and all(isinstance(each, str) for each in stop))):
        raise DataError(f"{path}: stop must be a text, or a list of texts, got {brief(stop, 200)}.")
    for key in ("instruction", "template"):
        if not isinstance(source.get(key, ""), str):
            raise DataError(f"{path}: {key} must be a text, got {brief(source[key], 200)}.")
    if type(source.get("max_new_tokens", 1)) is not int:
        raise DataError(f"{path}: max_new_tokens must be a whole number, got {brief(source['max_new_tokens'], 200)}.")
    entities = source.get("entities")
    if entities is not None and not (isinstance(entities, list) and entities and _are_names([*entities, "O"])):
        raise DataError(f"{path}: entities must be a list of kinds, all different, got {brief(entities, 200)}.")
    if source.get("metric", "accuracy") not in (metrics := list(registry.metrics())):
        raise DataError(f"{path}: metric must be {' or '.join(map(repr, metrics))}, got {source['metric']!r}.")
    return source


def _are_names(names: Any) -> bool:
    """Return whether these are different texts that are not blank, or whole numbers used as names."""
    if not isinstance(names, list) or not all(type(name) in (str, int) for name in names):
        return False
    plain = {str(name).strip() for name in names}
    return "" not in plain and len(plain) == len(names) > 1


def infer(name: str, kind: str, labels: tuple[str, ...], texts: int, metric: str) -> TaskDefinition:
    """Return the definition of a task that is not registered, over one text or two."""
    form = "pair" if texts == 2 else "single"
    return TaskDefinition(
        name,
        kind,
        labels,
        template=DEFAULT_TEMPLATE[form],
        label_words=labels,
        causal_template=DEFAULT_CAUSAL_TEMPLATE[form],
        metric=metric,
    )


def described(task: TaskDefinition, source: Mapping[str, Any], folder: Path) -> TaskDefinition:
    """Return ``task`` as ``source.json`` describes it: labels in the data's own order, and other given values."""
    path = folder / "source.json"
    if source.get("label_names"):
        task = _renamed(task, tuple(map(str, source["label_names"])), path)
    words = tuple(map(str, source.get("label_words") or task.label_words))
    if words and len(words) != len(task.labels):
        raise DataError(
            f"{path}: expected one of label_words for each of the {len(task.labels)} labels, got {len(words)}."
        )
    metric = source.get("metric", task.metric)
    if metric == "f1" and len(task.labels) != 2:
        raise DataError(
            f"{path}: metric 'f1' is that of label 1 of two, and there are {len(task.labels)} labels. Give 'accuracy'."
        )
    prompts = {key: source[key] for key in ("template", "causal_template") if source.get(key) is not None}
    task = replace(task, label_words=words, metric=metric, **prompts)
    for key in prompts:
        if faults := task.prompt_faults("prompt" if key == "template" else "causal", words=False):
            raise DataError(f"{path}: {faults[0]}.")
    return task


def _renamed(task: TaskDefinition, labels: tuple[str, ...], path: Path) -> TaskDefinition:
    """Return the registered task with its labels in the data's own order; label words follow their labels."""
    if len(labels) != len(task.labels):
        raise DataError(
            f"{path} names {len(labels)} labels, but task {task.name!r} has {len(task.labels)}: "
            f"{', '.join(task.labels)}. Rename the folder to make it a task of its own."
        )
    known = {_plain(label): word for label, word in zip(task.labels, task.label_words, strict=True)}
    if sorted(known) != sorted(map(_plain, labels)):  # names of the data's own: by position
        return replace(task, labels=labels)
    return replace(task, labels=labels, label_words=tuple(known[_plain(label)] for label in labels))


def _plain(label: str) -> str:
    """Return a label name without case and punctuation: "Sci/Tech" and "sci_tech" are equal."""
    return re.sub(r"[\W_]+", "", label).lower()
