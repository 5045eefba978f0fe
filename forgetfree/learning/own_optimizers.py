"""Optimisers of a user's own: what makes one of parameters, and what may not."""

from __future__ import annotations

from typing import Any

import torch

from forgetfree.errors import OptionError
from forgetfree.options import Function, name_of_function


def refuse_made(optimizer: object) -> None:
    """Raise ``OptionError`` for an optimiser that is made already, as Avalanche's templates take it."""
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        raise OptionError(
            f"optimizer={name}(…) holds the parameters of one model, and every task gets an optimiser of its own, over what "
            f"the strategy trains. Give a function that makes it: Options(optimizer=lambda parameters: torch.optim.{name}("
            "parameters, lr=0.01))."
        )


def sets_rates(optimizer: str | Function | None) -> bool:
    """Say whether an optimiser is made by a function, which sets the learning rates itself; a class gets the options'."""
    return callable(optimizer) and not isinstance(optimizer, type)


def made_by(function: Function, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the optimiser that a function or class makes of parameter groups.

    Raises:
        OptionError: it is none, or would move other parameters: what is frozen must stay as it is.
    """
    own = [{"params": group["params"]} for group in groups] if sets_rates(function) else groups
    name, handed = name_of_function(function), {id(each) for group in groups for each in group["params"]}
    made = function(own)
    if not isinstance(made, torch.optim.Optimizer):
        raise OptionError(
            f"optimizer={name} returned a {type(made).__name__}, expected a torch.optim.Optimizer. Give a function such as "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.01)."
        )
    others = sum(id(each) not in handed for group in made.param_groups for each in group["params"])
    if others:
        raise OptionError(
            f"optimizer={name} took {others} parameters that are not to be trained. Make it of the parameters that the "
            "function is given, and of no others."
        )
    return made
