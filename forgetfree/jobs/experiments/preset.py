"""The setting of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from forgetfree.errors import UnknownNameError
from forgetfree.jobs.run_config import CommonOptions, Faults
from forgetfree.learning.localization import LocalizationOptions
from forgetfree.options import build
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
    readout: str
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
        """The first: where an experiment looks at one."""
        return self.sparsities[0]


def adjusted(preset: Preset, changes: Mapping[str, Any], options: Mapping[str, Any]) -> Preset:
    """The preset with other tasks, seeds, …, and with options set by hand, as ``--set`` gives them.

    Raises:
        UsageError: naming every fault.
    """
    faults = Faults()
    own = set(CommonOptions.__dataclass_fields__) - {"cache", "threads"}
    known = LocalizationOptions.__dataclass_fields__
    compared = {name for grid in preset.arms.values() for choice in grid for name in choice}
    for name in options:
        if name not in known and name not in own:
            faults.add(str(UnknownNameError("option", name, [*known, *own])))
        if name in compared:
            faults.add(f"{name} is what this experiment compares. Leave --set {name} out.")
        if name == "sparsity":
            faults.add("--set sparsity has no effect here. Give --sparsity.")
    for kind, flag in (("shots", "shots"), ("sparsities", "sparsity"), ("tasks", "task")):
        faults.check_distinct(flag, changes.get(kind, ()))
    for shots in changes.get("shots", preset.shots):
        faults.check_common(shots, None, changes.get("seeds", preset.seeds))
    for sparsity in changes.get("sparsities", ()):
        if not 0 < sparsity <= 1:
            faults.add(f"--sparsity must be above 0 and at most 1, got {sparsity}.")
    mine = faults.attempt(build, CommonOptions, {k: v for k, v in options.items() if k in own}, "the experiment")
    fixed = {name: value for name, value in options.items() if name in known}
    faults.attempt(build, LocalizationOptions, {**preset.options, **fixed}, "the experiment")
    faults.report()
    given = {name: getattr(mine, name) for name in own if name in options}
    return replace(preset, **changes, **given, fixed={**preset.fixed, **fixed})
