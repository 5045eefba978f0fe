"""The setting of an experiment: model, tasks, seeds and options; and the usual setting, for two cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forgetfree.jobs.config import Readout
from forgetfree.recipes import recipe_of
from forgetfree.tasks import MAX_LENGTH, EvaluatedOn


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The setting of an experiment.

    Attributes:
        model: as ``--model`` of ``forgetfree run``.
        readout: as ``--readout``.
        tasks: the names of tasks.
        shots: training rows per label; all rows of a label that has fewer.
        seeds: the seeds of sampling and training.
        sparsities: the sparsities of regions.
        options: the `LocalizationOptions` that differ from the defaults.
        optimizer: further options, for fine-tuning.
        arms: if ways to train are compared, the options of each by its name, in place of ``optimizer``.
        fixed: options set by the user, which override all others.
        test_limit: test rows per task; all for ``None``.
        validation_limit: validation rows per task, by which masks are chosen; all for ``None``.
        max_length: the most tokens per row.
        evaluate_on: the rows that are scored, see `TaskRows.evaluated_on`.
        graftable: regular expression over names of tensors that may be grafted; all for ``None``.
    """

    model: str
    readout: Readout
    tasks: tuple[str, ...]
    shots: tuple[int, ...]
    seeds: tuple[int, ...]
    sparsities: tuple[float, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    arms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    test_limit: int | None = None
    validation_limit: int | None = None
    max_length: int = MAX_LENGTH
    evaluate_on: EvaluatedOn = "test"
    graftable: str | None = None

    @property
    def sparsity(self) -> float:
        """The first sparsity, for an experiment that has only one."""
        return self.sparsities[0]


#: The recipe of a single graft, as in `forgetfree graft`.
_RECIPE = recipe_of("minilm", strategies=["bare-graft"])
#: SGD with momentum and clipped gradients learns in hundreds of steps as much as plain SGD in the paper's thousands.
SGD = {key: _RECIPE[key] for key in ("optimizer", "learning_rate", "readout_learning_rate", "max_gradient_norm")}
#: AdamW moves all entries a little; with ℓ1, it moves few (§3.2). Results of other rates on S: docs/results/paper.md.
ADAMW = {"optimizer": "adamw", "learning_rate": 1e-4, "readout_learning_rate": 1e-3, "mask_learning_rate": 1e10}
ADAMW_L1 = {**ADAMW, "l1": 1e-4}
#: The embedded model, for half an hour on two cores.
SMALL = Setting(
    model="minilm",
    readout="linear",
    tasks=("sst2", "mpqa", "ag_news"),
    shots=(4096,),
    seeds=(0, 1),
    sparsities=(1e-3, 1e-2),
    options={
        **{key: value for key, value in _RECIPE.items() if key not in SGD and key != "sparsity"},
        "steps": 400,
        "precision": "bf16",
    },
    optimizer=SGD,
    test_limit=400,
    validation_limit=256,
)
