"""Losses, rates and scores of a unit where people watch training: in the libraries that `accelerate.tracking` knows.

``loss/PHASE``, ``rate/PHASE``, ``accuracy/TASK`` and all other scores stand over the steps of the unit. A unit that is resumed
goes on in its run of TensorBoard, W&B, MLflow and Trackio. A tracker that fails costs a unit nothing, and is told once.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from forgetfree.display import tell_note
from forgetfree.errors import UnknownNameError, UsageError, first_line
from forgetfree.files import locked, write_json
from forgetfree.jobs.checkpoints import CHECKPOINT
from forgetfree.jobs.unit import History, Unit


def check_trackers(names: Sequence[str]) -> None:
    """Raise ``UsageError`` unless each of them can be used: before anything is loaded or written."""
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
            raise UsageError(f"--log {name} needs the library {name}, which is not installed: pip install {name}.")
    if "wandb" in names and os.environ.get("WANDB_MODE", "online") == "online":
        import wandb

        with redirect_stderr(StringIO()):  # newer versions have another way, which older ones have not
            known = wandb.api.api_key
        if not known:  # else it would ask for one in the midst of a run
            raise UsageError(
                "--log wandb needs an account: nobody is logged in here. Run 'wandb login', or set WANDB_MODE=offline to keep "
                "what is logged in the directory of the run."
            )


@contextmanager
def track(names: Sequence[str], unit: Unit, out: Path, config: Mapping[str, Any], history: History) -> Iterator[None]:
    """Log to trackers, inside, what is new in the history of a unit, and its scores.

    Args:
        names: of the trackers.
        unit: of what.
        out: the directory of the job.
        config: what was asked for.
        history: of the unit.
    """
    trackers = dict[str, Any]()

    def each(action: Callable[[Any], object]) -> None:
        for name, tracker in list(trackers.items()):
            del trackers[name]
            with _told(name):
                action(tracker)
                trackers[name] = tracker

    for name in names:
        with _told(name), redirect_stdout(StringIO()):  # where results stand
            trackers[name] = _start(name, unit, out, config)
    history.log = lambda values, step: each(lambda tracker: tracker.log(values, step=step))
    try:
        yield
    finally:
        each(lambda tracker: tracker.finish())


def _start(name: str, unit: Unit, out: Path, config: Mapping[str, Any]) -> Any:
    """Return a tracker, in the run in which the unit was tracked before it was cut short, or else in a new one."""
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState(cpu=True)  # without which trackers cannot log what they do
    file = unit.directory / CHECKPOINT / "trackers.json"
    known: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    tracker_class: Any = LOGGER_TYPE_TO_CLASS[name]
    if tracker_class.requires_logging_directory:
        folder, logs = unit.directory.relative_to(out), out / "logs"
        if name not in known:
            shutil.rmtree(logs / folder, ignore_errors=True)
        tracker = tracker_class(str(folder), logs)
    else:
        title = {"name": f"{out.name} {unit}", "group": out.name}
        of_wandb = {"dir": str(out), "id": known.get(name), "settings": {"silent": True, "console": "off"}}
        options: Mapping[str, dict[str, Any]] = {
            "wandb": {**title, **of_wandb, "resume": "allow"},
            "mlflow": {"run_name": title["name"], "run_id": known.get(name)},
            "trackio": {**title, "resume": "allow" if name in known else "never"},
        }
        tracker = tracker_class(os.environ.get("WANDB_PROJECT", "forgetfree"), **options.get(name, {}))
    with locked(out / ".trackers.lock"):  # of several workers, one makes what they share
        tracker.start()
    if name not in known:
        given = {key: value for key, value in config.items() if key != "set"} | config["set"]
        simple = {key: value for key, value in given.items() if isinstance(value, str | int | float)}
        others = {key: json.dumps(value, default=str) for key, value in given.items() if key not in simple}
        tracker.store_init_configuration(simple | others)
    run = tracker.tracker
    of_mlflow = getattr(getattr(run, "info", None), "run_id", None)
    write_json(file, known | {name: of_mlflow or str(getattr(run, "id", ""))})
    return tracker


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Tell of an error of a tracker; the unit goes on."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        tell_note(f"logging to {name} has stopped: {reason}. The rest goes on without it.")
