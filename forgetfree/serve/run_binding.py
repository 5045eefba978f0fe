"""What the answers of a unit depend on besides its files: the same for all that strategies keep, under ``bound`` in unit.json.

The labels of a run stand in its config.json. Were they turned round there, every answer would be, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from forgetfree.display import brief
from forgetfree.errors import RunError
from forgetfree.json_file import check_fields
from forgetfree.ledger.binding import Binding
from forgetfree.results.unit_folder import RECORD, read_record
from forgetfree.serve.source import Source
from forgetfree.tasks import TaskDefinition

Json = dict[str, Any]
_REMEDY = "Put back what it was when the stream was trained."


def run_binding(
    tasks: Iterable[TaskDefinition], binding: Binding, shared_labels: bool, task_inference: str = "last"
) -> Json:
    """Return what answers depend on, as JSON.

    Args:
        tasks: the tasks of the stream, in order.
        binding: of the model.
        shared_labels: whether all tasks' labels have one readout.
        task_inference: how the task of a row is found out; ``last``: it is not. (The layer of ``lda`` is in its own file.)
    """
    return {
        "binding": binding.json,
        "shared_labels": shared_labels,
        "task_inference": task_inference,
        "tasks": {task.name: _reading(task, binding.readout) for task in tasks},
    }


def check_run_binding(source: Source, now: Binding) -> None:
    """Check that what answers now is what answered in the run. A file that was taken out of its run passes.

    Args:
        source: the file that answers, and what config.json says of its run.
        now: of the model.

    Raises:
        RunError: something differs, or unit.json is damaged.
    """
    path = source.file.with_name(RECORD)
    if not path.exists():
        return
    record = read_record(path.parent)
    try:
        check_fields("", record, {"details": dict})
        check_fields("details", record["details"], {"bound": dict})
        stored = record["details"]["bound"]
        check_fields("details.bound", stored, {"binding": str, "tasks": dict})
        check_fields("details.bound.tasks", stored["tasks"], dict.fromkeys(stored["tasks"], dict))
        then = Binding.of_json(stored["binding"])
    except ValueError as error:
        raise RunError(f"{path}: {error}. Restore it from a copy, or run the stream again.") from error
    if differ := then.differences(now):
        raise RunError(
            f"{source.file} would not answer as it did: {'; '.join(differ)}. Use the model's own config.json and tokenizer, "
            "and the options that the stream was trained with."
        )
    tasks = {task.name: _reading(task, then.readout) for task in source.tasks}
    _compare(source, "order of tasks", list(stored["tasks"]), list(tasks))
    for name, reading in stored["tasks"].items():
        for key in dict.fromkeys((*reading, *tasks[name])):
            _compare(source, f"{key} of task {name!r}", reading.get(key), tasks[name].get(key))
    _compare(source, "readout of all tasks' labels together", stored.get("shared_labels"), source.shared_labels)
    _compare(source, "task_inference", stored.get("task_inference"), source.task_inference)


def _compare(source: Source, what: str, expected: Any, got: Any) -> None:
    if expected != got:
        raise RunError(
            f"{source.file.with_name(RECORD)} and the run's config.json differ in the {what}: expected {_shown(expected)}, got "
            f"{_shown(got)}. {_REMEDY}"
        )


def _reading(task: TaskDefinition, readout: str) -> Json:
    """Return the fields of a task that decide how it is answered, as a JSON file gives them back."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in task.reading(readout).items()}


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else brief(value)
