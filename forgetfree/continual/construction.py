"""What a strategy's class and constructor make of what they are given: final names, the model's recipe, Avalanche's habits."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

from avalanche.training.plugins import EvaluationPlugin, LRSchedulerPlugin

from forgetfree import recipes, registry
from forgetfree.continual.stream import Stream
from forgetfree.continual.task_inference import check_inference
from forgetfree.display import brief, tell
from forgetfree.errors import ConformanceError, OptionError
from forgetfree.training.single_task import check_localization
from forgetfree.training.training_options import LocalizationOptions, TrainingOptions, check_optimizer

#: Where no author of a strategy writes.
_LIBRARIES = ("forgetfree.", "avalanche.", "builtins")


def check_options(cls: Any, options: TrainingOptions, stream: Stream) -> None:
    """Raise where options and stream do not go together, by what every strategy refuses and by the ``check`` of this one."""
    check_inference(options, stream)
    if isinstance(options, LocalizationOptions):
        check_localization(options, stream.model.space())
    cls.check(options, stream)


def check_final_names(cls: type) -> None:
    """Raise ``ConformanceError`` where a class or a mixin of it defines a name that is final in another base.

    So, too, where the class says ``taskwise``, which follows from ``Options``.
    """
    faults = []
    authors = [base for base in cls.__mro__ if base is cls or not base.__module__.startswith(_LIBRARIES)]
    for name in dict.fromkeys(name for base in authors for name in vars(base)):
        _, *others = [base for base in cls.__mro__ if name in vars(base)]
        if final := next((base for base in others if _is_final(vars(base)[name])), None):
            faults.append(f"{name}: expected {final.__name__}'s own, which is final. Give yours another name.")
    if "taskwise" in vars(cls):
        faults.append(
            "taskwise: expected none, since it follows from Options, got one. Leave it out; where each task has a model of its "
            "own, let Options be a subclass of TaskwiseOptions."
        )
    if faults:
        subject = f"{cls.__name__} is not written for the contract of a strategy (docs/plug-in.md)"
        raise ConformanceError(subject, faults)


def _is_final(member: object) -> bool:
    return bool(getattr(getattr(member, "fget", member), "__final__", False))


def recipe_options(strategy: Any, model: str) -> TrainingOptions:
    """Return the options of a strategy that is given none: the recipe of its model, as the command line takes it.

    It is said on stderr, once for each strategy and model.

    Args:
        strategy: the class.
        model: the name it was loaded by.
    """
    name = registry.name_of(strategy)
    options: TrainingOptions = strategy.Options.for_model(model, strategy=name)
    recipe = recipes.recipe_of(model, strategy=name)
    if chosen := " ".join(f"{key}={value}" for key, value in recipe.items() if hasattr(options, key)):
        _say_once(f"Recipe of {model} for {name or strategy.__name__}: {chosen} (options=… replaces it)")
    return options


@cache
def _say_once(line: str) -> None:
    tell(line)


def check_arguments(plugins: Sequence[Any] | None, optimizer: Any) -> None:
    """Refuse what Avalanche's templates take, and what a new optimiser for every task leaves without effect.

    Raises:
        OptionError: naming what to give instead.
    """
    if optimizer is not None:
        check_optimizer(optimizer)
        raise OptionError(f"optimizer={brief(optimizer)} is an option: give it to Options(optimizer=…).")
    if any(isinstance(plugin, LRSchedulerPlugin) for plugin in plugins or ()):
        raise OptionError(
            "LRSchedulerPlugin moves the rate of one optimiser, and there is an optimiser of its own for every task. Set "
            "schedule to linear, constant or a function of the updates done, and warmup."
        )


def silent_evaluator() -> EvaluationPlugin:
    """Return Avalanche's evaluation without metrics and loggers, for a strategy that is given none."""
    with warnings.catch_warnings():  # it warns that it will not log anything: so it is meant
        warnings.simplefilter("ignore")
        return EvaluationPlugin()
