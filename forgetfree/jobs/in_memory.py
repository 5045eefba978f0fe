"""What a Python program hands to a job as objects, where the command line has names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forgetfree.options import name_of_function


@dataclass(frozen=True)
class InMemory:
    """Objects in the place of names. config.json says what they were, but cannot bring them back.

    Attributes:
        strategies: classes by the names that stand in the configuration.
        data: rows, as `load_tasks` takes them; none: those that the configuration names.
        model: a model, as `load_stream` takes it, which copies it; none: the one that the configuration names.
        tokenizer: of the model; without one, it reads tensors.
        call: what the program called, for config.json; empty: the command line.
    """

    strategies: Mapping[str, Any] = field(default_factory=dict)
    data: Any = None
    model: Any = None
    tokenizer: Any = None
    call: str = ""

    def objects(self, settings: Mapping[str, Any]) -> list[str]:
        """List what cannot be named in a file, for config.json."""
        found = [f"the strategy {name} (a class)" for name in self.strategies]
        found += [f"{key}={name_of_function(value)} (a function)" for key, value in settings.items() if callable(value)]
        found += ["data in memory"] * (self.data is not None)
        return found + [f"a {type(self.model).__name__} in memory"] * (self.model is not None)

    @property
    def reads_tensors(self) -> bool:
        """Say whether the model is any network, for rows of tensors."""
        return self.model is not None and self.tokenizer is None

    def data_or(self, named: Any) -> Any:
        """Return the rows, or else what names them."""
        return named if self.data is None else self.data

    def model_or(self, named: str) -> Any:
        """Return the model, or else its name."""
        return named if self.model is None else self.model

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Return the arguments of `load_model` that only a model in memory has."""
        return {} if self.tokenizer is None else {"tokenizer": self.tokenizer}
