"""An experiment as it was asked for, checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.jobs.run_config import CommonOptions
from forgetfree.options import build
from forgetfree.results.config_file import portable

if TYPE_CHECKING:
    from forgetfree.jobs.experiments.preset import Preset


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """An experiment as it was asked for; what is not given is the preset's. Checked as a whole by `checked`."""

    name: str
    preset: str = "small"
    model: str | None = None
    data: str = "hub"
    readout: str | None = None
    tasks: tuple[str, ...] = ()
    shots: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    sparsities: tuple[float, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    out: str = ""

    def checked(self) -> CheckedExperiment:
        """Return the setting.

        Raises:
            UsageError: naming every fault.
        """
        from forgetfree.jobs import experiments

        settings = dict(self.settings)
        common: dict[str, Any] = {key: settings.pop(key) for key in ("cache", "threads") if key in settings}
        changes = {key: getattr(self, key) for key in ("model", "readout", "tasks", "shots", "seeds", "sparsities")}
        given = {key: value for key, value in changes.items() if value}
        preset = experiments.adjusted(experiments.load_experiment(self.name).presets[self.preset], given, settings)
        return CheckedExperiment(preset, build(CommonOptions, common, "the experiment"))

    def section(self) -> dict[str, Any]:
        """Return the configuration under the names of the command line, as a file in ``out``."""
        return {
            "name": self.name,
            "preset": self.preset,
            "model": self.model and portable(self.model, Path(self.out)),
            "data": portable(self.data, Path(self.out)),
            "readout": self.readout,
            "task": list(self.tasks),
            "shots": list(self.shots),
            "seed": list(self.seeds),
            "sparsity": list(self.sparsities),
            "set": dict(self.settings),
            "device": self.device,
        }


@dataclass(frozen=True)
class CheckedExperiment:
    """The preset with what was asked for instead, and where to keep models and how many threads to use."""

    preset: Preset
    common: CommonOptions
