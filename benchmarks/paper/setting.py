"""What an experiment is measured with: model, tasks, seeds and options; and what most of them take, for two cores."""

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
        tasks: names.
        shots: training rows per label; of a label that has fewer, all.
        seeds: of sample and training.
        sparsities: of the regions.
        options: of `LocalizationOptions`, where they are not the defaults.
        optimizer: further options, those of fine-tuning.
        arms: where ways to train are compared, the options of each by its name, in the place of ``optimizer``.
        fixed: options set by hand, which go before all others.
        test_limit: test rows per task; all for ``None``.
        validation_limit: validation rows per task, by which masks are chosen; all for ``None``.
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
        """Return the first sparsity, for an experiment that looks at one."""
        return self.sparsities[0]


#: Of a graft on its own, as `forgetfree graft` makes it.
_RECIPE = recipe_of("minilm", strategies=["bare-graft"])
#: SGD with momentum and clipped gradients learns in hundreds of steps what plain SGD learns in the paper's thousands.
SGD = {key: _RECIPE[key] for key in ("optimizer", "learning_rate", "readout_learning_rate", "max_gradient_norm")}
#: AdamW moves everything by little, ℓ1 makes its moves few (§3.2). What other rates on S give: docs/results/paper.md.
ADAMW = {"optimizer": "adamw", "learning_rate": 1e-4, "readout_learning_rate": 1e-3, "mask_learning_rate": 1e10}
ADAMW_L1 = {**ADAMW, "l1": 1e-4}
#: The embedded model and half an hour on two cores.
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
