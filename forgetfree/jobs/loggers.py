"""Losses, rates and scores of a unit where people watch training: in other libraries, by their own writers.

``loss/PHASE`` and ``rate/PHASE`` stand over the steps of the unit, ``accuracy/TASK``, ``ece/TASK`` and all other scores over
the number of tasks learned. Such a library never costs a unit anything: if it fails, that is told once.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forgetfree.display import brief
from forgetfree.errors import UnknownNameError, UsageError, first_line
from forgetfree.files import locked
from forgetfree.terminal import tell_note
from forgetfree.training.monitor import Follower, Monitor, Phase

if TYPE_CHECKING:
    from forgetfree.results.scores import Score

#: What a step is counted by.
_STEP, _TASKS = "step", "tasks_learned"
#: Where other libraries sort our runs in.
_PROJECT = "forgetfree"
#: As many values are sent to MLflow at a time, and not more seldom than every so many seconds.
_BATCH, _SECONDS = 500, 5.0


@dataclass(frozen=True)
class Subject:
    """The unit that is logged.

    Attributes:
        name: of the unit.
        directory: its folder.
        out: the directory of the job.
        config: what was asked for.
    """

    name: str
    directory: Path
    out: Path
    config: Mapping[str, Any]


class Writer(Protocol):
    """What is made of a library, from a `Subject`."""

    def write(self, values: Mapping[str, float], at: int, axis: str) -> None:
        """Take values at a step or a number of learned tasks, as ``axis`` says."""

    def close(self) -> None:
        """End well."""


class TensorBoard:
    """An event file in the unit's folder: ``tensorboard --logdir OUT`` shows a run for each unit."""

    def __init__(self, of: Subject) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(of.directory))
        self._writer.add_text("configuration", f"```json\n{json.dumps(of.config, indent=2, default=str)}\n```")
        self.close = self._writer.close

    def write(self, values: Mapping[str, float], at: int, axis: str) -> None:
        """Add scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, at)


class Wandb:
    """A run of Weights & Biases in the group of the job; ``WANDB_MODE=offline`` keeps it in OUT/wandb."""

    def __init__(self, of: Subject) -> None:
        import wandb

        settings = wandb.Settings(silent=True, console="off")
        group, name = of.out.name, f"{of.out.name} {of.name}"
        project = os.environ.get("WANDB_PROJECT", _PROJECT)
        self._run: Any = wandb.init(
            project=project, group=group, name=name, dir=str(of.out), config=dict(of.config), settings=settings
        )
        self._known: set[str] = set()
        self.close = self._run.finish

    def write(self, values: Mapping[str, float], at: int, axis: str) -> None:
        """Log them over their axis."""
        for kind in {name.partition("/")[0] for name in values} - self._known:
            self._known.add(kind)
            self._run.define_metric(f"{kind}/*", step_metric=axis)
        self._run.log({**values, axis: at})


class MLflow:
    """A run of MLflow, where ``MLFLOW_TRACKING_URI`` says or else in OUT/mlflow.db, sent in batches."""

    def __init__(self, of: Subject) -> None:
        from mlflow import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{(of.out / 'mlflow.db').absolute()}")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        with locked(of.out / ".mlflow.lock"):  # of several workers, one makes the store
            self._client: Any = MlflowClient(tracking_uri=uri)
            known = self._client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._run = self._client.create_run(experiment, run_name=f"{of.out.name} {of.name}").info.run_id
        for key, value in of.config.items():
            self._client.log_param(self._run, key, brief(value, 250))
        self._waiting: list[Any] = []
        self._sent = time.monotonic()

    def write(self, values: Mapping[str, float], at: int, axis: str) -> None:
        """Keep them until there are many."""
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        self._waiting += [Metric(name, value, now, at) for name, value in values.items()]
        if len(self._waiting) >= _BATCH or time.monotonic() - self._sent > _SECONDS:
            self._send()

    def close(self) -> None:
        """Send the rest."""
        self._send()
        self._client.set_terminated(self._run)

    def _send(self) -> None:
        self._client.log_batch(self._run, metrics=self._waiting)
        self._waiting, self._sent = [], time.monotonic()


class Trackio:
    """A run of Trackio, which ``trackio show`` shows."""

    def __init__(self, of: Subject) -> None:
        import trackio

        name, config = f"{of.out.name} {of.name}", json.loads(json.dumps(of.config, default=str))
        self._run: Any = trackio.init(project=_PROJECT, name=name, group=of.out.name, config=config)
        self.close = trackio.finish

    def write(self, values: Mapping[str, float], at: int, axis: str) -> None:
        """Log them with the value of their axis."""
        self._run.log({**values, axis: at})


_WRITERS: dict[str, Callable[[Subject], Writer]] = {
    **{"tensorboard": TensorBoard, "wandb": Wandb},
    **{"mlflow": MLflow, "trackio": Trackio},
}


def check_loggers(names: Sequence[str]) -> None:
    """Raise ``UsageError`` unless each of them can be used: before anything is loaded or written."""
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--log names {name} twice. Give it once.")
        if name not in _WRITERS:
            raise UnknownNameError("--log", name, _WRITERS)
        if find_spec(name) is None:
            raise UsageError(
                f"--log {name} needs the library {name}, which is not installed: pip install 'forgetfree[{name}]'."
            )
    if "wandb" in names and os.environ.get("WANDB_MODE", "online") == "online":
        import wandb

        with redirect_stderr(StringIO()):  # newer versions have another way, which older ones have not
            known = wandb.api.api_key
        if not known:
            raise UsageError(
                "--log wandb needs an account: nobody is logged in here. Run 'wandb login', or set WANDB_MODE=offline to keep "
                "what is logged in the directory of the run."
            )


class Logged(Follower):
    """Passes everything on to another monitor, and to writers."""

    def __init__(self, monitor: Monitor, writers: dict[str, Writer]) -> None:
        super().__init__(monitor)
        self._writers, self._taken = writers, 0

    def met(self, task: str, phase: Phase, step: int, steps: int, loss: float, rate: float) -> None:
        """Log loss and rate of a step."""
        if not math.isfinite(loss):  # of an evaluation
            return
        self._taken += 1
        values = {f"loss/{phase}": loss} | ({} if math.isnan(rate) else {f"rate/{phase}": rate})
        self._each(lambda writer: writer.write(values, self._taken, _STEP))

    def scored(self, scores: Sequence[Score]) -> None:
        """Log them over the number of tasks that were learned."""
        super().scored(scores)
        for after in sorted({score.after for score in scores}):
            values = {_name(score): score.value for score in scores if score.after == after}
            self._each(lambda writer, values=values, after=after: writer.write(values, after, _TASKS))  # type: ignore[misc]

    def _each(self, action: Callable[[Writer], None]) -> None:
        for name, writer in list(self._writers.items()):
            try:
                action(writer)
            except Exception as error:
                del self._writers[name]
                _tell(name, error)


@contextmanager
def logged(names: Sequence[str], of: Subject, monitor: Monitor) -> Iterator[Monitor]:
    """Give a monitor that also logs to the libraries of these names."""
    writers: dict[str, Writer] = {}
    with ExitStack() as stack:
        for name in names:
            try:
                with redirect_stdout(StringIO()):  # where results stand
                    writers[name] = _WRITERS[name](of)
            except Exception as error:
                _tell(name, error)
        everything = Logged(monitor, writers)
        stack.callback(everything._each, lambda writer: writer.close())
        yield everything


def _name(score: Score) -> str:
    """Return ``METRIC/TASK``, with what else tells one score of a unit from another."""
    more = [str(score.of[key]) for key in ("model", "sparsity") if score.of.get(key) is not None]
    return "/".join([score.metric, score.task, *more])


def _tell(name: str, error: Exception) -> None:
    reason = f"{type(error).__name__}: {first_line(error)}"
    tell_note(f"logging to {name} has stopped: {reason}. The rest goes on without it.")
