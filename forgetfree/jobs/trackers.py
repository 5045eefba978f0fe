"""Logs losses, rates and scores of a unit to the tracking libraries that `accelerate.tracking` supports.

``loss/PHASE``, ``rate/PHASE``, ``accuracy/TASK`` and all other scores are logged by step of the unit. A resumed unit begins
a new run in the tracker, with the new values. A tracker that fails does not stop the unit, and is reported once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from forgetfree.display import tell_note
from forgetfree.errors import UnknownNameError, UsageError, first_line
from forgetfree.files import locked
from forgetfree.jobs.history import History
from forgetfree.jobs.run_directory import Unit


def check_trackers(names: Sequence[str]) -> None:
    """Raise ``UsageError`` unless each tracker can be used, before anything is loaded or written."""
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    missing = {str(each) for each in LoggerType} - {str(each) for each in get_available_trackers()}
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--log names {name} twice. Give it once.")
        if name not in LOGGER_TYPE_TO_CLASS:
            raise UnknownNameError("--log", name, LOGGER_TYPE_TO_CLASS)
        if name in missing:
            raise UsageError(
                f"--log {name} needs the library {name}, which is not installed. Install it with: pip install {name}."
            )


@contextmanager
def track(names: Sequence[str], unit: Unit, out: Path, config: Mapping[str, Any], history: History) -> Iterator[None]:
    """Inside the block, log the configuration, the new history of a unit, and its scores to trackers."""
    trackers = dict[str, Any]()

    def each(action: Callable[[Any], object]) -> None:
        for name, tracker in list(trackers.items()):
            del trackers[name]
            with _told(name):
                action(tracker)
                trackers[name] = tracker

    for name in names:
        with _told(name), redirect_stdout(StringIO()):  # stdout is for results
            trackers[name] = _start(name, unit, out, config)
    history.log = lambda values, step: each(lambda tracker: tracker.log(values, step=step))
    try:
        yield
    finally:
        each(lambda tracker: tracker.finish())


def _start(name: str, unit: Unit, out: Path, config: Mapping[str, Any]) -> Any:
    """Return a tracker with a new run, to which the configuration is logged."""
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState(cpu=True)  # trackers need it for their own messages
    tracker_class: Any = LOGGER_TYPE_TO_CLASS[name]
    if tracker_class.requires_logging_directory:
        tracker = tracker_class(str(unit.directory.relative_to(out)), out / "logs")
    else:
        title = {"name": f"{out.name} {unit}", "group": out.name}
        options: Mapping[str, dict[str, Any]] = {
            "wandb": {**title, "dir": str(out), "settings": {"silent": True, "console": "off"}},
            "mlflow": {"run_name": title["name"]},
            "trackio": title,
        }
        tracker = tracker_class(os.environ.get("WANDB_PROJECT", "forgetfree"), **options.get(name, {}))
    with locked(out / ".trackers.lock"):  # one of several workers creates the shared files
        tracker.start()
    given = {key: value for key, value in config.items() if key != "set"} | config["set"]
    simple = {key: value for key, value in given.items() if isinstance(value, str | int | float)}
    others = {key: json.dumps(value, default=str) for key, value in given.items() if key not in simple}
    tracker.store_init_configuration(simple | others)
    return tracker


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Report an error of a tracker; the unit goes on."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        tell_note(f"logging to {name} has stopped: {reason}. The run continues without it.")
