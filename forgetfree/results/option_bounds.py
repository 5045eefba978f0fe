"""The bounds of a strategy's options in results, beyond which no run could have gone."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from forgetfree import registry
from forgetfree.json_file import checked

Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0)]
_Above0 = Annotated[float, Field(gt=0)]
_Rate = Annotated[float, Field(gt=0, le=1e38)]
_Fraction = Annotated[float, Field(gt=0, le=1)]
_Count = Annotated[int, Field(ge=1)]
_Number = Annotated[int, Field(ge=0)]


class _Options(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")


class RunOptions(_Options):
    """The bounds of the options that every strategy has."""

    learning_rate: _Rate | None = None
    readout_learning_rate: _Rate | None = None
    momentum: Share | None = None
    weight_decay: Amount | None = None
    l1: Amount | None = None
    warmup: Share | None = None
    batch_size: _Count | None = None
    accumulation: _Count | None = None
    parts: _Count | None = None
    steps: _Count | None = None
    max_gradient_norm: _Above0 | None = None
    evaluation_batch_size: _Count | None = None


class OwnOptions(_Options):
    """The bounds of the options that only some of our strategies have, as their ``Options`` declare them.

    They stand here again since a report is made without torch, which strategies import; a test compares them. A plug-in's
    strategy may have an option of the same name with other bounds.
    """

    alpha: Amount | None = None
    base_fraction: _Fraction | None = None
    batch_size_mem: _Count | None = None
    beta: Amount | None = None
    capacity: _Fraction | None = None
    decay_factor: Share | None = None
    delta_t: _Count | None = None
    density: _Fraction | None = None
    eps: _Above0 | None = None
    ewc_alpha: Share | None = None
    ewc_lambda: Amount | None = None
    fisher_rows: _Count | None = None
    importance_rows: _Count | None = None
    keep: _Fraction | None = None
    lambda_reg: Amount | None = None
    largest_scale: Annotated[float, Field(ge=1)] | None = None
    lda_layer: _Number | None = None
    lda_rows: _Count | None = None
    lora_alpha: _Count | None = None
    lora_dropout: Share | None = None
    lora_learning_rate: _Above0 | None = None
    mask_batch_size: _Count | None = None
    mask_evaluations: _Count | None = None
    mask_every: _Count | None = None
    mask_learning_rate: _Above0 | None = None
    mask_micro_batch_size: _Count | None = None
    mask_steps: _Number | None = None
    mem_size: _Count | None = None
    memory_strength: Amount | None = None
    orthogonality: Amount | None = None
    patterns_per_experience: _Count | None = None
    rank: Annotated[int, Field(ge=1, le=65536)] | None = None
    region_learning_rate: _Above0 | None = None
    region_steps: _Number | None = None
    sample_size: _Count | None = None
    si_lambda: Amount | None = None
    sparsity: _Fraction | None = None
    steps_factor: _Above0 | None = None
    temperature: _Above0 | None = None
    validation_rows: _Count | None = None
    weight: _Above0 | None = None


class MASOptions(OwnOptions):
    """``alpha`` is a share in MAS, and a weight elsewhere."""

    alpha: Share | None = None


def check_options(place: str, strategy: str, options: Any) -> None:
    """Raise ``ValueError`` where an option is out of its bounds; of a plug-in's strategy, one that every strategy has.

    Args:
        place: of the options, for the message.
        strategy: whose they are.
        options: by name.
    """
    kinds: list[type[_Options]] = [RunOptions]
    if strategy in registry.STRATEGIES:
        kinds.append(MASOptions if strategy == "mas" else OwnOptions)
    for kind in kinds:
        try:
            checked(kind, options)
        except ValueError as error:
            raise ValueError(f"{place}.{error}") from error
