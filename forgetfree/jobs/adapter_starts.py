"""The adapters of ``--start``: which tasks of a run are fine-tuned from them, and what is wrong with them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from forgetfree.display import escaped
from forgetfree.errors import UnknownNameError, UsageError
from forgetfree.tasks import version_of

if TYPE_CHECKING:
    from forgetfree.models.peft_adapter import AdapterStart


def fine_tunes(strategy: Any) -> bool:
    """Return whether a strategy's class fine-tunes each task on its own, from where `SingleTask.start` says."""
    from forgetfree.learning.cost import TaskSize, cost_of

    return cost_of(strategy, strategy.Options(), [TaskSize()]).fine_tunes


def check_start(task: str, tasks: Iterable[str]) -> None:
    """Raise ``UsageError`` unless a task is one of the stream that can start from an adapter."""
    if version_of(task)[1] > 1:
        raise UsageError(
            f"--start {task} is of a task that is met again, which starts from what was learned since. Leave it out."
        )
    if task not in tasks:
        raise UnknownNameError("task in --start", task, tasks)


def starts_of(places: Mapping[str, str], model: str, given: object) -> dict[str, AdapterStart]:
    """Return the adapters by task.

    Args:
        places: their directories.
        model: the name of the model that they were made from.
        given: a model in the place of the name, if there is one.

    Raises:
        UsageError, ModelError: one is no adapter, or the model has no name.
    """
    from forgetfree.models.peft_adapter import AdapterStart

    if places and given is not None:
        raise UsageError(
            "An adapter is merged into files, and the model is in memory. Give the directory that its save_pretrained writes."
        )
    return {task: AdapterStart.of(directory, model) for task, directory in places.items()}


def tell_starts(starts: Mapping[str, AdapterStart], pre: Any, strategies: Mapping[str, Any]) -> dict[str, str]:
    """Check all adapters, print notes on them, and return the SHA-256 of each, by task.

    Args:
        starts: the adapters by task.
        pre: the model, with θ_pre in it.
        strategies: the classes of the run's strategies by name.
    """
    notes = [note for start in starts.values() for note in start.check(pre)]
    without = [name for name, each in strategies.items() if not fine_tunes(each)]
    if starts and without:
        notes.append(f"--start has no effect on {', '.join(without)}: no task is fine-tuned on its own there.")
    for note in dict.fromkeys(notes):
        print(escaped(f"note: {note}"), file=sys.stderr)
    return {task: start.sha256 for task, start in starts.items()}
