"""An experiment as it was asked for, checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from forgetfree.jobs.config import CommonOptions, JobConfig, Readout, Seed, Shots, Sparsity
from forgetfree.options import option

if TYPE_CHECKING:
    from forgetfree.jobs.experiments.preset import Preset


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig(JobConfig):
    """An experiment as it was asked for; what is not given is the preset's. Checked as a whole by `checked`."""

    command: ClassVar[str] = "experiment"

    name: str = option("", "one of 'forgetfree list experiments'", completion="experiments")
    preset: Literal["small", "paper"] = option("small", "small (default): two cores; paper: a GPU")
    model: str | None = option(  # type: ignore[assignment]
        None, "another model than the preset's", placeholder="NAME|DIR", completion="models"
    )
    readout: Readout | None = option(None, "how logits are read (default: the preset's)")  # type: ignore[assignment]
    tasks: tuple[str, ...] = option(
        (),
        "another task than the preset's, may be given several times",
        flag="task",
        placeholder="NAME",
        completion="tasks",
    )
    shots: tuple[Shots, ...] = option((), "training rows per label, may be given several times", group="How to learn")
    seeds: tuple[Seed, ...] = option(
        (), "seed of sampling and training, may be given several times", flag="seed", group="How to learn"
    )
    sparsities: tuple[Sparsity, ...] = option(
        (),
        "share of the parameters of a region, may be given several times",
        flag="sparsity",
        group="How to learn",
        placeholder="F",
    )

    def checked(self, classes: Mapping[str, Any] = MappingProxyType({})) -> CheckedExperiment:
        """Return the setting.

        Raises:
            UsageError: naming every fault.
        """
        from forgetfree.jobs import experiments

        faults = self.faults()
        presets = experiments.load_experiment(self.name).presets
        changes = {key: getattr(self, key) for key in ("model", "readout", "tasks", "shots", "seeds", "sparsities")}
        given = {key: value for key, value in changes.items() if value}
        preset = experiments.adjusted(presets[self.preset], given, {**self.settings, **self.flags()}, faults)
        return CheckedExperiment(preset, self.set_of(CommonOptions))

    def settings_in(self, config: Mapping[str, Any]) -> Any:
        """Return the settings that the config.json of an experiment says, the preset's included."""
        return config["setting"]["options"]


@dataclass(frozen=True)
class CheckedExperiment:
    """The preset with what was asked for instead, and where to keep models and how many threads to use."""

    preset: Preset
    common: CommonOptions
