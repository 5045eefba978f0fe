"""Options of training and localization, and the steps, learning rates and optimisers that follow from them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from forgetfree import recipes
from forgetfree.errors import OptionError
from forgetfree.options import Function, Options, build, name_of_function, option

if TYPE_CHECKING:
    import torch

    from forgetfree.core.readout_model import ReadoutModel

AnyOptions = TypeVar("AnyOptions", bound="TrainingOptions")

#: The environment variable that CUDA needs for matrix products that are reproducible bit for bit.
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
#: ``steps=auto``: epochs over the rows of a task, and the minimum and maximum number of updates. See docs/results/recipe.md.
AUTO_PASSES, AUTO_LEAST, AUTO_MOST = 4, 100, 400


class TrainingOptions(Options):
    """Options of training. The defaults are the paper's (A.2 and §3) unless stated otherwise.

    >>> options = TrainingOptions(optimizer="adamw", learning_rate=1e-4)
    >>> options.model_copy(update={"steps": 100}).steps
    100
    """

    optimizer: recipes.OptimizerName | Function = option(
        "sgd",
        "optimizer; sgd: as in the paper, because its updates localize well (§3.2, fig. 5); momentum: SGD with "
        "momentum 0.9, which needs hundreds of steps instead of thousands. An optimizer class, such as "
        "torch.optim:RMSprop, is given the learning rates; a function of parameter groups sets everything itself",
    )
    learning_rate: float = option(
        1e-2,
        "learning rate of the backbone; the paper chooses from 1e-2, 5e-3 and 1e-3",
        above=0,
        at_most=1e38,
        group="How to learn",
        placeholder="F",
    )
    readout_learning_rate: float | None = option(
        None, "learning rate of the task's linear readout; none: that of the backbone", above=0, at_most=1e38
    )
    weight_decay: float = option(1e-4, "weight decay", at_least=0)
    l1: float = option(
        0.0, "weight of the penalty ‖θ − θ_pre‖₁; AdamW needs 1e-3 to localize (§3.2, fig. 5)", at_least=0
    )
    schedule: Literal["constant", "linear"] | Function = option(
        "linear",
        "learning-rate schedule; linear: decays to 0; a function maps the number of updates to a factor",
    )
    warmup: float = option(
        0.0, "share of the steps over which the learning rate increases from 0 to its full value", at_least=0, at_most=1
    )
    batch_size: int = option(
        8, "examples per update; the paper chooses from 2, 4 and 8", at_least=1, group="How to learn"
    )
    accumulation: int = option(
        1, "number of parts that each batch is split into, to save memory; the update stays the same", at_least=1
    )
    steps: Annotated[int, Field(ge=1)] | recipes.StepsRule = option(
        "paper",
        f"updates per task; auto: {AUTO_PASSES} epochs over its examples, {AUTO_LEAST} to {AUTO_MOST} updates; "
        "paper: 16 per label and shot",
        group="How to learn",
        placeholder="INT|auto|paper",
    )
    max_gradient_norm: float | None = option(
        None, "maximum norm of the gradient; larger gradients are clipped", above=0
    )
    dropout: bool | Literal["fine-tuning"] = option(
        True,
        "whether the backbone's dropout is active in training; fine-tuning: in fine-tuning, but not when a "
        "region is trained",
    )
    gradient_checkpointing: bool = option(
        False,
        "store only the inputs of each layer and recompute the rest in the backward pass: much less memory for long "
        "examples, about a third more time, the same gradients",
    )
    deterministic_training: bool = option(
        False,
        "use slower deterministic algorithms of PyTorch, so that training on a GPU is reproducible bit for bit; "
        "on a CPU it always is",
    )
    precision: recipes.PrecisionChoice = option(
        "fp32",
        "precision of the forward and backward passes in training; weights keep their dtype, which is also used for "
        "predictions. fp32: the dtype of the weights, so bfloat16 with dtype=bfloat16; bf16, and fp16 on a GPU: up "
        "to twice as fast on devices that support them, slower on others; auto: the faster one, measured once (bf16 "
        "if it takes at most 0.85 of the time of fp32)",
        group="How to learn",
        placeholder="NAME",
    )
    evaluation_batch_size: int = option(
        64,
        "examples per forward pass in evaluation; on a GPU, as many tokens as this many examples of 512 tokens "
        "have; with 1, the logits of an example have the same bits whatever else is evaluated; generation in half "
        "precision or on a GPU chooses its own batch size",
        at_least=1,
    )

    @field_validator("optimizer", mode="before")
    @classmethod
    def _check_optimizer(cls, value: Any) -> Any:
        check_optimizer(value)
        return value

    @model_validator(mode="after")
    def _prepare_cuda(self) -> Self:
        if self.deterministic_training:
            import torch

            if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                os.environ.setdefault(WORKSPACE, ":4096:8")  # CUDA reads it when it starts
        return self

    def updates(self, labels: int, shots: int, rows: int) -> int:
        """Return the number of updates of a task: ``steps``, or the result of its rule.

        >>> TrainingOptions(steps="paper").updates(2, 64, 128), TrainingOptions(steps=7).updates(2, 64, 128)
        (2048, 7)

        Args:
            labels: number of the task's labels; 1 where texts are the answers.
            shots: training rows per label.
            rows: training rows.
        """
        if self.steps == "paper":
            return paper_steps(labels, shots)
        if self.steps == "auto":
            return min(max(AUTO_LEAST, math.ceil(AUTO_PASSES * rows / self.batch_size)), AUTO_MOST)
        return self.steps

    @classmethod
    def for_model(cls, model: str, *, strategy: str | None = None, **changes: Any) -> Self:
        """Return the command line's options for a model: its recipe, if it is registered with one, else the defaults.

        >>> TrainingOptions.for_model("minilm", steps=100).optimizer
        'adamw'

        Args:
            model: its name, as ``--model``.
            strategy: a strategy, so that its own options in the recipe apply, too.
            changes: options to override. Another ``optimizer`` of ours among them drops the recipe.

        Raises:
            UnknownNameError, OptionError: see `build`.
        """
        known = cls.model_fields
        recipe = recipes.recipe_of(model, changes, strategy=strategy)
        return build(cls, {key: value for key, value in recipe.items() if key in known} | changes, cls.__name__)


class LocalizationOptions(TrainingOptions):
    """Options of fine-tuning a task and localizing it."""

    sparsity: float = option(
        1e-4,
        "size of a region, as a share of the graftable entries; the paper: 1e-4",
        above=0,
        at_most=1,
        group="How to learn",
        placeholder="F",
    )
    region_from: recipes.RegionSource = option(
        "mask",
        "how γ is chosen; mask: learns S, starting from γ_base, as in the paper. The others select the entries with "
        "the highest score, where Δ = θ_ft − θ_pre and g is the mean gradient at θ_pre: movement |Δ|, gradient |g|, "
        "snip |g·θ|, gallop |g|/(|θ| + 0.001), fisher (FISH masks), random. The last five need no θ_ft",
    )
    among: Literal["all", "free"] = option(
        "all",
        "entries from which γ is chosen; all: all graftable entries, as in the paper, including those that earlier "
        "tasks own; free: only entries that no task below owns (not for region_from=mask). With a parent, always free",
    )
    base_fraction: float = option(
        0.1,
        "size of γ_base, the entries that moved most (§2), as a share of the region, for region_from=mask; S "
        "chooses the rest. The paper: 0.1 (§3.1), and 0 for several tasks (§5.1). With mask_steps=0, γ_base is the "
        "whole region",
        at_least=0,
        at_most=1,
    )
    mask_steps: int | None = option(
        None,
        "number of SGD steps on the mask scores S; 0: keep γ_base; none: as many as it takes to see as many "
        "examples as fine-tuning saw, at most the paper's 100",
        at_least=0,
    )
    mask_batch_size: int = option(1024, "examples per SGD step on S", at_least=1)
    mask_learning_rate: float = option(1e7, "learning rate of SGD on S", above=0)

    @property
    def needs_fine_tuned(self) -> bool:
        """Whether γ cannot be chosen without θ_ft."""
        return self.region_from in ("mask", "movement")

    @model_validator(mode="after")
    def _check_among(self) -> Self:
        if self.among == "free" and self.region_from == "mask":
            raise OptionError(
                "region_from=mask searches γ among all entries (C.3), so it does not support among=free. Set "
                "region_from=movement, or leave among out."
            )
        return self


def for_model(options: AnyOptions, model: ReadoutModel, rows: Any = None) -> AnyOptions:
    """Return the options with ``precision=auto`` resolved for a model on its device, see `forgetfree.core.precision`."""
    if options.precision != "auto":
        return options
    from forgetfree.core.precision import faster_precision

    return options.model_copy(update={"precision": faster_precision(model, rows)})


#: The number of shots that counts towards the number of updates if there are thousands.
MOST_SHOTS = 512


def paper_steps(n_labels: int, shots: int) -> int:
    """Return the paper's number of updates: 16·n·k for k shots, 16·n·512 from 4096 shots on (A.2).

    >>> paper_steps(2, 64), paper_steps(2, 4096)
    (2048, 16384)
    """
    return 16 * n_labels * (shots if shots < 4096 else MOST_SHOTS)


def rate_at(done: int, steps: int, options: TrainingOptions) -> float:
    """Return the factor on the learning rate after ``done`` of ``steps`` updates: warm-up, then the schedule."""
    rising = round(options.warmup * steps)
    if done < rising:
        return (done + 1) / rising * (float(options.schedule(done)) if callable(options.schedule) else 1.0)
    if callable(options.schedule):
        return float(options.schedule(done))
    return 1.0 if options.schedule == "constant" else max(0.0, (steps - done) / max(1, steps - rising))


def scheduled_rate(options: TrainingOptions, steps: int) -> Callable[[int], float]:
    """Return a function from the number of a step of `fine_tune`, from 1, to the backbone's learning rate; NaN if unknown."""
    if sets_rates(options.optimizer):
        return lambda step: math.nan
    return lambda step: options.learning_rate * rate_at(step - 1, steps, options)


def region_rate(options: TrainingOptions, space_size: int, budget: int) -> float:
    """Return the learning rate of a region, given options whose learning rate suits the whole model.

    With AdamW it is √(N/s) times as high, for s of N entries: AdamW moves every entry by about the learning rate, so the
    update of s entries has a smaller norm.
    """
    return options.learning_rate * (math.sqrt(space_size / max(1, budget)) if options.optimizer == "adamw" else 1)


# -- Optimisers of a user's own --------------------------------------------------------------------------


def check_optimizer(optimizer: object) -> None:
    """Raise ``OptionError`` for an optimiser instance, which Avalanche's templates take."""
    if isinstance(optimizer, str):
        return
    from torch.optim import Optimizer

    if isinstance(optimizer, Optimizer):
        name = type(optimizer).__name__
        raise OptionError(
            f"optimizer={name}(…) holds the parameters of one model, but every task gets its own optimizer, for the "
            "parameters that the strategy trains. Give a function that creates it: Options(optimizer=lambda "
            f"parameters: torch.optim.{name}(parameters, lr=0.01))."
        )


def sets_rates(optimizer: str | Function | None) -> bool:
    """Return whether an optimiser is made by a function, which sets the learning rates itself; a class gets the options'."""
    return callable(optimizer) and not isinstance(optimizer, type)


def build_optimizer(function: Function, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the optimiser that a function or class makes from parameter groups.

    Raises:
        OptionError: the result is no optimiser, or has other parameters: frozen parameters must not change.
    """
    from torch.optim import Optimizer

    own = [{"params": group["params"]} for group in groups] if sets_rates(function) else groups
    name, handed = name_of_function(function), {id(each) for group in groups for each in group["params"]}
    made = function(own)
    if not isinstance(made, Optimizer):
        raise OptionError(
            f"optimizer={name} returned a {type(made).__name__}, expected a torch.optim.Optimizer. Give a function such as "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.01)."
        )
    others = sum(id(each) not in handed for group in made.param_groups for each in group["params"])
    if others:
        raise OptionError(
            f"optimizer={name} contains {others} parameters that must not be trained. Create it from the parameters "
            "that the function is given, and from no others."
        )
    return made
