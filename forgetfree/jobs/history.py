"""history.jsonl of a unit: loss, rate and time of about a hundred steps of each phase."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forgetfree.checkpoint import Checkpoint
from forgetfree.files import write_atomically
from forgetfree.json_file import parse_json
from forgetfree.results.run_folder import HISTORY, Score
from forgetfree.training.monitor import Monitor, Phase

Json = dict[str, Any]
#: Approximate number of logged steps per phase: the first, the last, and others between.
_LOGGED = 100


class History(Monitor):
    """Passes everything on to another monitor, and appends new losses to history.jsonl.

    Args:
        monitor: the other monitor.
        directory: the folder of the unit.
        checkpoint: the checkpoint of the unit.

    Attributes:
        log: if set, a function that logs losses, rates and scores by update of the unit, see `trackers`.
    """

    log: Callable[[Mapping[str, float], int], object] | None = None

    def __init__(self, monitor: Monitor, directory: Path, checkpoint: Checkpoint) -> None:
        super().__init__(monitor)
        self._rate: Callable[[int], float] = lambda step: math.nan
        self._path, self._checkpoint = directory / HISTORY, checkpoint
        lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines() if self._path.exists() else []
        met = [line for line in map(_parsed, lines) if line]  # a kill may have cut the last one; damaged lines go
        write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in met))
        self._met = Counter(map(_timeless, met))
        self._before, self._step = 0, 0  # updates of earlier phases, and of the last one
        for line in met:
            self._count(line["step"])
        self._begin = time.perf_counter() - max((line["seconds"] for line in met), default=0.0)

    @property
    def seconds(self) -> float:
        """The seconds that the unit has taken so far, including the time before it was resumed."""
        return round(time.perf_counter() - self._begin, 3)

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint of the unit."""
        return self._checkpoint

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Log the steps of a phase; an evaluation logs no step."""
        self._rate = lambda step: math.nan  # until it is logged
        with super().phase(task, phase, steps) as pass_on:

            def on_step(step: int, loss: float) -> None:
                pass_on(step, loss)
                self.log_step(task, phase, step, steps, loss, self._rate(step))

            yield on_step

    def log_rate(self, of_step: Callable[[int], float]) -> None:
        """Remember the rate and pass it on."""
        self._rate = of_step
        super().log_rate(of_step)

    def log_step(self, task: str, phase: Phase, step: int, steps: int, loss: float, rate: float) -> None:
        """Log the step if it is one of about a hundred per phase; its rate may be NaN."""
        if math.isfinite(loss) and (step % max(1, steps // _LOGGED) == 0 or step in (1, steps)):
            line: Json = {"task": task, "phase": phase, "step": step, "loss": loss, "rate": rate}
            line["seconds"] = self.seconds
            if math.isnan(rate):
                del line["rate"]
            if self._met[_timeless(line)]:  # logged before the unit was cut short
                self._met[_timeless(line)] -= 1
                return
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._count(step)
            if self.log:
                values = {f"{name}/{phase}": line[name] for name in ("loss", "rate") if name in line}
                self.log(values, self._before + step)

    def _count(self, step: int) -> None:
        """Count the updates up to a step; a step that is not above the last one begins another phase."""
        self._before += self._step if step <= self._step else 0
        self._step = step

    def log_scores(self, scores: Sequence[Score]) -> None:
        """Log scores by task; a resumed unit logs its last scores again."""
        super().log_scores(scores)
        if self.log:
            self.log({f"{score.metric}/{score.task}": score.value for score in scores}, self._before + self._step)


def _parsed(line: str) -> Json | None:
    try:
        parsed: Any = parse_json(line)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) and isinstance(parsed.get("seconds"), float) else None


def _timeless(line: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in line.items() if key != "seconds"}, sort_keys=True)
