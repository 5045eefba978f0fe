"""A sweep as it was asked for: settings that are tried, checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from types import MappingProxyType
from typing import Any, ClassVar, get_type_hints

from forgetfree import registry
from forgetfree.display import brief
from forgetfree.errors import Faults, OptionError, UsageError
from forgetfree.jobs.config import check_known
from forgetfree.jobs.run_config import CheckedRun, RunConfig, RunOptions, StreamConfig
from forgetfree.options import fits, option, read_value

#: One value of each option that is tried.
Setting = dict[str, Any]


@dataclass(frozen=True)
class Range:
    """Numbers between two, of which ``--trials`` draws: by orders of magnitude where both are above 0."""

    low: float
    high: float

    @property
    def is_whole(self) -> bool:
        """Say whether only whole numbers are meant."""
        return isinstance(self.low, int)


@dataclass(frozen=True, kw_only=True)
class SweepConfig(StreamConfig):
    """A sweep as it was asked for: what ``forgetfree sweep`` takes.

    A value in ``settings`` that has commas, or is a list, names the values that are tried; ``LOW..HIGH`` is a range for
    ``trials``. All combinations are tried, or as many as ``trials`` says.
    """

    command: ClassVar[str] = "sweep"

    strategy: str = option(
        "grafting-continual",
        "whose options are tried: a name, or [NAME=]MODULE:CLASS (default: grafting-continual)",
        placeholder="NAME",
        completion="strategies",
    )
    trials: int | None = option(None, "settings that Optuna tries (default: all combinations)", at_least=1)

    def candidates(self) -> dict[str, tuple[Any, ...] | Range]:
        """Return the options of the strategy that are tried, with their values.

        Raises:
            UsageError: an option is not known, none is tried, or is without ``trials`` or
                has no numbers.
        """
        own = get_type_hints(registry.strategy(self.strategy).Options)
        for key in self.settings:
            check_known(self._own(key), {*own, *RunOptions.__dataclass_fields__})
        hints = {key: own[self._own(key)] for key in self.settings if self._own(key) in own}
        candidates_of = {key: _candidates(key, self.settings[key], hint) for key, hint in hints.items()}
        tried = {key: values for key, values in candidates_of.items() if values}
        if not tried:
            raise UsageError(
                "Nothing is tried: give an option of the strategy several values, say --set learning_rate=1e-3,1e-2."
            )
        for key, values in tried.items():
            if isinstance(values, Range) and self.trials is None:
                raise UsageError(
                    f"--set {key}={self.settings[key]} is a range, of which --trials N draws. Give it, too."
                )
            read = [read_value(value, hints[key]) for value in _values(values)]
            if any(value in read[:place] for place, value in enumerate(read)):
                raise UsageError(f"--set {key}={self.settings[key]} names the same value twice. Give each once.")
        return tried

    @property
    def strategy_name(self) -> str:
        """Return what tables and options call the strategy."""
        return registry.strategy_name(self.strategy)

    def _own(self, key: str) -> str:
        return key.removeprefix(f"{self.strategy_name}.")

    def grid(self) -> list[Setting]:
        """Return all combinations of the values that are tried."""
        tried = self.candidates()
        return [dict(zip(tried, values, strict=True)) for values in product(*(map(_values, tried.values())))]

    def run_config(self, setting: Mapping[str, Any], out: str, *, trial: bool) -> RunConfig:
        """Return the run with one setting.

        Args:
            setting: of what is tried.
            out: its directory.
            trial: whether it is scored on validation rows, and only at what it has learned.
        """
        settings = {**self.settings, **setting}
        if trial:
            settings = {"upper_triangle": False, **settings, "evaluate_on": "validation"}
        shared = {field.name: getattr(self, field.name) for field in fields(StreamConfig)}
        return RunConfig(**{**shared, "strategies": (self.strategy,), "settings": settings, "out": out})

    def recipe(self) -> dict[str, Any]:
        """Return the model's recipe, as the first setting leaves it."""
        return self.run_config(self.grid()[0], self.out, trial=True).recipe()

    def checked(self, classes: Mapping[str, Any] = MappingProxyType({})) -> CheckedSweep:
        """Return the settings at the corners of what is tried: without ``trials``, all of them.

        Raises:
            UsageError: naming every fault.
        """
        faults = self.faults()
        if "evaluate_on" in self.settings:
            faults.add("A sweep chooses on validation rows and then scores on test rows. Leave --set evaluate_on out.")
        faults.attempt(registry.strategy, self.strategy)
        faults.report()
        return self.checked_settings(self.grid(), faults)

    def checked_settings(self, settings: Sequence[Setting], faults: Faults | None = None) -> CheckedSweep:
        """Return what some settings come to.

        Args:
            settings: the settings.
            faults: what is wrong already.

        Raises:
            UsageError: naming every fault.
        """
        faults = faults or Faults()
        runs = [faults.attempt(self.run_config(setting, self.out, trial=True).checked) for setting in settings]
        if self.trials is not None:
            faults.attempt(_require_optuna)
        faults.report()
        return CheckedSweep(tuple(settings), tuple(runs))


@dataclass(frozen=True)
class CheckedSweep:
    """Settings that are tried, and what the run of each has."""

    settings: tuple[Setting, ...]
    runs: tuple[CheckedRun, ...]


def setting_text(setting: Mapping[str, Any]) -> str:
    """Return a setting as one would type it."""
    return " ".join(f"{key}={value}" for key, value in setting.items())


def _candidates(key: str, value: Any, hint: Any) -> tuple[Any, ...] | Range | None:
    """Return what a value of ``--set`` says is tried; nothing where it is one value."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(value)
    if not isinstance(value, str):
        return None
    low, dots, high = value.partition("..")
    if dots and (fits(1, hint) or fits(0.5, hint)):  # else it is text that has dots, such as a path
        ends = [_number(low), _number(high)]
        if None in ends or ends[0] >= ends[1]:  # type: ignore[operator]
            raise OptionError(
                f"--set {key}={value} needs a number, two dots and a larger number. Write, say, 1e-4..1e-2."
            )
        if not all(isinstance(end, int) for end in ends):
            ends = [float(end) for end in ends]  # type: ignore[arg-type]
        return Range(*ends)  # type: ignore[arg-type]
    parts = tuple(part.strip() for part in value.split(","))
    if "" in parts:
        raise OptionError(
            f"--set {key}={brief(value)} has an empty value. Write the values that are tried, with commas."
        )
    return parts if len(parts) > 1 else None


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _values(candidates: tuple[Any, ...] | Range) -> tuple[Any, ...]:
    return (candidates.low, candidates.high) if isinstance(candidates, Range) else candidates


def _require_optuna() -> None:
    from importlib.util import find_spec

    if find_spec("optuna") is None:
        raise UsageError("--trials needs Optuna, which is not installed: pip install 'forgetfree[optuna]'.")
