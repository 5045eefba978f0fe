"""Names and types of the options that `forgetfree.run` and `graft` take beside their named arguments, for editors.

`forgetfree list strategies --verbose` lists the same options. A test compares them with the classes of options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from forgetfree.files import StrPath
from forgetfree.options import Function
from forgetfree.recipes import ModelDtype, OptimizerName, PrecisionChoice, RegionSource
from forgetfree.tasks import EvaluatedOn, Scenario

Texts = str | Sequence[str]


class Settings(TypedDict, total=False):
    """Options of rows, of a run, of training, and of our strategies."""

    # Reading rows: `forgetfree.jobs.config.RunConfig`.
    text_column: Texts
    label_column: Texts
    kind: Texts
    map_label: Texts
    skip_bad_rows: bool
    # The run: `forgetfree.jobs.config.RunOptions`.
    test_limit: int | None
    evaluate_on: EvaluatedOn
    cache: StrPath | None
    threads: int | None
    max_length: int | None
    graftable: str | None
    dtype: ModelDtype
    scenario: Scenario
    upper_triangle: bool | None
    floors: Literal["constant", "words", "probe"]
    # Training a model, and choosing γ: `forgetfree.training.training_options`.
    optimizer: OptimizerName | Function
    learning_rate: float
    readout_learning_rate: float | None
    weight_decay: float
    l1: float
    schedule: Literal["constant", "linear"] | Function
    warmup: float
    batch_size: int
    accumulation: int
    max_gradient_norm: float | None
    dropout: bool | Literal["fine-tuning"]
    gradient_checkpointing: bool
    deterministic_training: bool
    precision: PrecisionChoice
    evaluation_batch_size: int
    region_from: RegionSource
    among: Literal["all", "free"]
    base_fraction: float
    mask_steps: int | None
    mask_batch_size: int
    mask_learning_rate: float
    # Strategies with a ledger, or with a model for each task.
    task_inference: Literal["last", "router", "lda"]
    region_steps: int | None
    region_rate_factor: float
    region_start: Literal["fine-tuned", "pre-trained"]
    composition: Literal["union", "alone"]
    warm_start: bool
    final_union: bool
    keep: float
    capacity: float
    mask_every: int
    # LoRA and O-LoRA.
    rank: int
    lora_alpha: int
    lora_dropout: float
    target_modules: str | None
    adapter_start: Literal["new", "previous"]
    lora_learning_rate: float | None
    orthogonality: float
    # Merging, and strategies that rehearse or penalise.
    weight: float
    density: float
    mem_size: int
    batch_size_mem: int
    patterns_per_experience: int
    sample_size: int
    memory_strength: float
    passes: int
    alpha: float
    beta: float
    importance_rows: int | None
    ewc_lambda: float
    decay_factor: float
    si_lambda: float
    eps: float
    lambda_reg: float
    ewc_alpha: float
    delta_t: int
    temperature: float
    steps_factor: float
