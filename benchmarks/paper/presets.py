"""The two settings of the experiments: ``small`` for two cores, ``paper`` for a GPU."""

from __future__ import annotations

from forgetfree.jobs.experiments import Preset
from forgetfree.recipes import recipe_of

#: Of a graft on its own, as `forgetfree graft` makes it.
_RECIPE = recipe_of("minilm", graft=True)
#: SGD with momentum and clipped gradients learns in hundreds of steps what plain SGD learns in the paper's thousands.
SGD = {
    key: _RECIPE[key]
    for key in ("optimizer", "learning_rate", "readout_learning_rate", "momentum", "max_gradient_norm")
}
#: AdamW moves everything by little, ℓ1 makes its moves few (§3.2). What other rates on S give: docs/results/paper.md.
ADAMW = {"optimizer": "adamw", "learning_rate": 1e-4, "readout_learning_rate": 1e-3, "mask_learning_rate": 1e10}
ADAMW_L1 = {**ADAMW, "l1": 1e-4}

#: The embedded model and half an hour on two cores.
SMALL = Preset(
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
        "validation_rows": 256,
    },
    grid=(SGD,),
    test_limit=400,
)

#: The paper's (A.2 and §3): prompts, SGD, 16·n·512 steps, rates and batch sizes chosen on validation rows.
PAPER = Preset(
    model="roberta-base",
    readout="prompt",
    tasks=("sst2", "cr", "mr", "mpqa", "trec", "subj", "ag_news", "qnli", "snli", "mnli", "rte", "mrpc", "qqp"),
    shots=(4096,),
    seeds=(0, 1, 2, 3, 4),
    sparsities=(1e-4,),
    options={
        "optimizer": "sgd",
        "weight_decay": 1e-4,
        "schedule": "linear",
        "base_fraction": 0.1,
        "mask_steps": 100,
        "precision": "bf16",
    },
    grid=tuple({"learning_rate": rate, "batch_size": size} for rate in (1e-2, 5e-3, 1e-3) for size in (2, 4, 8)),
)
#: AdamW's rates are those usual for fine-tuning RoBERTa; ℓ1 is the paper's.
PAPER_ADAMW = tuple({"optimizer": "adamw", "learning_rate": rate, "batch_size": 8} for rate in (1e-5, 2e-5, 5e-5))
PAPER_ADAMW_L1 = tuple({**choice, "l1": 1e-3} for choice in PAPER_ADAMW)
