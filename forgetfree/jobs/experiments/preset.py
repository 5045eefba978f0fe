"""The setting of an experiment: what the paper's preset says, and what is asked for instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from forgetfree.jobs.config import CommonOptions, Faults, Readout, check_known
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
    faults = faults or Faults()
    own = {*CommonOptions.__dataclass_fields__} - {"or_fewer"}  # an experiment always takes fewer
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
    given = {name: getattr(mine, name) for name in own & options.keys() - {"cache", "threads"}}
    return replace(preset, **changes, **given, fixed={**preset.fixed, **fixed})
