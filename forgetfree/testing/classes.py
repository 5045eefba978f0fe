"""What holds of a strategy's class before anything is run: its bases, its constructor, its options."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from forgetfree import registry
from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.errors import OptionError
from forgetfree.learning.training_options import TrainingOptions
from forgetfree.testing.faults import Faults, listed
from forgetfree.testing.influences import three_tasks


def check_class(cls: Any, faults: Faults) -> None:
    """Check that it is a final subclass of `ContinualStrategy` with options."""
    if not (isinstance(cls, type) and issubclass(cls, ContinualStrategy)) or cls is ContinualStrategy:
        faults.add(f"class: expected a subclass of forgetfree.continual.strategy.ContinualStrategy, got {cls!r}.")
        return
    constructor = inspect.unwrap(cls.__init__)  # Avalanche wraps that of every subclass
    if constructor is not inspect.unwrap(ContinualStrategy.__init__):
        faults.add(
            f"__init__: expected ContinualStrategy's own, got {constructor.__qualname__}. Drop it: the runner makes every "
            "strategy alike. What is to be prepared once belongs into setup(), what a user may choose into Options."
        )
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        faults.add(
            f"class: expected {listed(missing)}(), got none. Write begin(task), which says what is trained, "
            "and answering(task), a context manager in which the model answers for the task."
        )
    targets = {entry.target: name for name, entry in registry.strategies().items()}
    for base in cls.__mro__[1:]:
        if name := targets.get(f"{base.__module__}:{base.__qualname__}"):
            faults.add(
                f"class: strategies are final, got a subclass of {base.__name__}, which is the strategy {name!r}. Inherit "
                "from ContinualStrategy or another base, and share code as functions."
            )
    _check_options(cls, faults)


def _check_options(cls: type[ContinualStrategy], faults: Faults) -> None:
    options: Any = cls.Options
    if not (isinstance(options, type) and issubclass(options, TrainingOptions)):
        faults.add(f"Options: expected a subclass of TrainingOptions, got {options!r}.")
        return
    if "__dataclass_params__" not in vars(options):  # a dataclass that inherits from a frozen one is frozen
        faults.add(
            f"Options: expected a frozen dataclass, got {options.__name__}, which is none. Decorate it with "
            "@dataclass(frozen=True, kw_only=True)."
        )
        return
    silent = [field.name for field in dataclasses.fields(options) if not field.metadata.get("help")]
    if silent:
        faults.add(
            f"Options: expected a help text for every field, got none for {listed(silent)}. Make it by "
            'forgetfree.options.option(default, "what it means").'
        )
    with faults.catching("Options: constructed from their defaults", "Give every field a default within its bounds."):
        options()


def check_defaults(cls: type[ContinualStrategy], options_given: bool, faults: Faults) -> None:
    """Check that it can be made without options, unless the caller says that the defaults do not suit."""
    remedy = "Look at check() and setup(): cls(stream=stream) must do."
    with faults.catching("defaults: constructed without options", remedy):
        try:
            cls(stream=three_tasks(), device="cpu")
        except OptionError:
            if not options_given:  # else the caller says that the defaults do not suit so tiny a model
                raise
