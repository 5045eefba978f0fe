"""The configuration of an experiment: a preset of the paper's, with what is asked for instead, checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from forgetfree import registry
from forgetfree.errors import Faults
from forgetfree.jobs.config import CommonOptions, JobConfig, Readout, Seed, Shots, Sparsity, check_known
from forgetfree.options import build, option
from forgetfree.tasks import MAX_LENGTH, EvaluatedOn


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One setting of an experiment.

    Attributes:
        model: as ``--model``.
        readout: as ``--readout``.
        tasks: names.
        shots: training rows per label; of a label that has fewer, all.
        seeds: of sample and training.
        sparsities: of the regions.
        options: of `LocalizationOptions`, where they are not the defaults.
        grid: options to choose from on validation rows, e.g. learning rates; the first of equals wins.
        arms: where ways to train are compared, the grid of each by name.
        fixed: options set by hand, which nothing changes.
        test_limit: test rows per task; all for ``None``.
        max_length: tokens a row is read at, at most.
        evaluate_on: which rows are scored, see `TaskRows.evaluated_on`.
        graftable: regular expression over names of tensors that may be grafted; all for ``None``.
    """

    model: str
    readout: Readout
    tasks: tuple[str, ...]
    shots: tuple[int, ...]
    seeds: tuple[int, ...]
    sparsities: tuple[float, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    grid: tuple[Mapping[str, Any], ...] = ({},)
    arms: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    test_limit: int | None = None
    max_length: int = MAX_LENGTH
    evaluate_on: EvaluatedOn = "test"
    graftable: str | None = None

    @property
    def sparsity(self) -> float:
        """Return the first sparsity, for an experiment that looks at one."""
        return self.sparsities[0]


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig(JobConfig):
    """What ``forgetfree experiment`` takes; what is not given is the preset's."""

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
        faults, presets = self.faults(), registry.experiment(self.name).presets
        changes = {key: getattr(self, key) for key in ("model", "readout", "tasks", "shots", "seeds", "sparsities")}
        changes = {key: value for key, value in changes.items() if value}
        preset = adjusted(presets[self.preset], changes, {**self.settings, **self.flags()}, faults)
        return CheckedExperiment(preset, self.set_of(CommonOptions))

    def settings_in(self, config: Mapping[str, Any]) -> Any:
        """Return the settings that the config.json of an experiment says, the preset's included."""
        return config["setting"]["options"]


@dataclass(frozen=True)
class CheckedExperiment:
    """The preset with what was asked for instead, and where to keep models and how many threads to use."""

    preset: Preset
    common: CommonOptions


def adjusted(
    preset: Preset, changes: Mapping[str, Any], options: Mapping[str, Any], faults: Faults | None = None
) -> Preset:
    """Return the preset with other tasks, seeds, …, and with options set by hand, as ``--set`` gives them.

    Args:
        preset: the setting to change.
        changes: values of its fields.
        options: of `LocalizationOptions` and `CommonOptions`, by name; values may be texts.
        faults: what is wrong already.

    Raises:
        UsageError: naming every fault.
    """
    from forgetfree.training.localization import LocalizationOptions

    faults = faults or Faults()
    # An experiment always takes fewer rows, and is in float32 as the paper's are.
    own = {*CommonOptions.__dataclass_fields__} - {"or_fewer", "dtype"}
    known = set(LocalizationOptions.__dataclass_fields__)
    compared = {name for grid in preset.arms.values() for choice in grid for name in choice}
    for name in options:
        faults.attempt(check_known, name, own | known)
        if name in compared:
            faults.add(f"{name} is what this experiment compares. Leave --set {name} out.")
        if name == "sparsity":
            faults.add("--set sparsity has no effect here. Give --sparsity.")
    mine = faults.attempt(build, CommonOptions, {k: v for k, v in options.items() if k in own}, "the experiment")
    fixed = {name: value for name, value in options.items() if name in known}
    faults.attempt(build, LocalizationOptions, {**preset.options, **fixed}, "the experiment")
    faults.report()
    common = {name: getattr(mine, name) for name in own & options.keys() - {"cache", "threads"}}
    return replace(preset, **changes, **common, fixed={**preset.fixed, **fixed})
