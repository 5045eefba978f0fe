"""Losses, rates and scores of a unit where people watch training: in the libraries that `accelerate.tracking` knows.

``loss/PHASE``, ``rate/PHASE``, ``accuracy/TASK`` and all other scores stand over the steps of the unit. A unit that is resumed
goes on in its run of TensorBoard, W&B, MLflow and Trackio. A tracker that fails costs a unit nothing, and is told once.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.display import tell_note
from forgetfree.errors import UnknownNameError, UsageError, first_line
from forgetfree.files import locked, write_json
from forgetfree.jobs.checkpoints import CHECKPOINT
from forgetfree.jobs.unit import Unit, is_logged
from forgetfree.results.unit_folder import HISTORY
from forgetfree.training.monitor import Follower, Monitor, Phase

if TYPE_CHECKING:
    from forgetfree.results.scores import Score


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
def track(
    names: Sequence[str], unit: Unit, out: Path, config: Mapping[str, Any], monitor: Monitor
) -> Iterator[Monitor]:
    """Give a monitor that also logs to trackers.

    Args:
        names: of the trackers.
        unit: of what.
        out: the directory of the job.
        config: what was asked for.
        monitor: another monitor.
    """
    trackers = dict[str, Any]()
    for name in names:
        try:
            with redirect_stdout(StringIO()):  # where results stand
                trackers[name] = _start(name, unit, out, config)
        except Exception as error:
            _tell(name, error)
    if not trackers:
        yield monitor
        return
    tracked = TrackedMonitor(monitor, trackers, unit.directory / HISTORY)
    try:
        yield tracked
    finally:
        tracked.each(lambda tracker: tracker.finish())


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
        simple = {key: value for key, value in config.items() if isinstance(value, str | int | float)}
        others = {key: json.dumps(value, default=str) for key, value in config.items() if key not in simple}
        tracker.store_init_configuration(simple | others)
    run = tracker.tracker
    of_mlflow = getattr(getattr(run, "info", None), "run_id", None)
    write_json(file, known | {name: of_mlflow or str(getattr(run, "id", ""))})
    return tracker


class TrackedMonitor(Follower):
    """Passes everything on to another monitor, and to trackers what is new.

    Args:
        monitor: another monitor.
        trackers: of accelerate, by name.
        history: the unit's file: what it holds was tracked before the unit was cut short.
    """

    def __init__(self, monitor: Monitor, trackers: dict[str, Any], history: Path) -> None:
        super().__init__(monitor)
        self._trackers = trackers
        lines = map(json.loads, history.read_text(encoding="utf-8").splitlines())
        self._steps: dict[tuple[str, str], int] = {(line["task"], line["phase"]): line["step"] for line in lines}
        self._last = sum(self._steps.values())  # the last step that was tracked
        self._met, self._earlier = set[tuple[str, str]](), 0
        self._goes_on = self._last > 0

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """From the first phase on, scores are new."""
        self._goes_on = False
        with super().phase(task, phase, steps) as on_step:
            yield on_step

    def log_step(self, task: str, phase: Phase, step: int, steps: int, loss: float, rate: float) -> None:
        """Log loss and rate of a step, if it is one of about a hundred."""
        key = (task, phase)
        if step == 1 and key in self._met:  # a second phase of that name
            self._earlier += self._steps.pop(key, 0)
        self._met.add(key)
        if math.isfinite(loss) and is_logged(step, steps):  # not of an evaluation
            self._steps[key] = step
            at = self._earlier + sum(self._steps.values())
            if at > self._last:
                self._last = at
                self._log({f"loss/{phase}": loss} | ({} if math.isnan(rate) else {f"rate/{phase}": rate}))

    def log_scores(self, scores: Sequence[Score]) -> None:
        """Log them by task; of a unit that goes on, those of learned tasks are told again, before its first phase."""
        super().log_scores(scores)
        if not self._goes_on:
            self._log({f"{score.metric}/{score.task}": score.value for score in scores})

    def _log(self, values: Mapping[str, float]) -> None:
        self.each(lambda tracker: tracker.log(values, step=self._last))

    def each(self, action: Callable[[Any], object]) -> None:
        """Do this with each tracker that has not failed."""
        for name, tracker in list(self._trackers.items()):
            try:
                action(tracker)
            except Exception as error:
                del self._trackers[name]
                _tell(name, error)


def _tell(name: str, error: Exception) -> None:
    reason = f"{type(error).__name__}: {first_line(error)}"
    tell_note(f"logging to {name} has stopped: {reason}. The rest goes on without it.")
