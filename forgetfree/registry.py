"""Names and what they stand for. Reading this file imports nothing: targets are ``package.module:object``.

A strategy is registered here by one line, or by any installed package's entry point in the group
``forgetfree.strategies``; streams likewise in ``forgetfree.streams``.
"""

from __future__ import annotations

import importlib
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from forgetfree.errors import ForgetfreeError, UnknownNameError

if TYPE_CHECKING:
    from forgetfree.tasks import TaskDefinition


@dataclass(frozen=True)
class Entry:
    """One registered name."""

    target: str
    summary: str = ""

    def load(self) -> Any:
        """Import the target.

        Raises:
            ForgetfreeError: it cannot be imported; the message names it and the reason.
        """
        module, _, attribute = self.target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except Exception as error:
            raise ForgetfreeError(
                f"{self.target!r} cannot be loaded: {type(error).__name__}: {error}. "
                "Mend or uninstall the package that registers it."
            ) from error


STRATEGIES: dict[str, Entry] = {
    "fine-tune": Entry("forgetfree.strategies.fine_tune:FineTune", "a separate model per task: the reference"),
    "continual-ft": Entry("forgetfree.strategies.continual_ft:ContinualFT", "train everything on each task in turn"),
    "grafting-continual": Entry(
        "forgetfree.strategies.grafting_continual:GraftingContinual",
        "a tiny region per task, frozen for ever after (Panigrahi et al., 2023)",
    ),
}
DEFAULT_STRATEGIES = ("fine-tune", "continual-ft", "grafting-continual")


@dataclass(frozen=True)
class ModelEntry:
    """A model known by name.

    Attributes:
        summary: one line.
        recipe: options measured to suit the model. They stand in for the strategies' defaults on the command
            line, as a whole, unless ``--set optimizer=…`` chooses another way to train; any single one gives
            way to ``--set``.
    """

    summary: str
    recipe: Mapping[str, Any] = field(default_factory=dict)


MODELS: dict[str, ModelEntry] = {
    "minilm": ModelEntry(
        "all-MiniLM-L6-v2, embedded (22.7 M parameters, BERT architecture, no LM head)",
        # SGD would need the paper's thousands of steps: see docs/results.md, "Choosing the recipe".
        recipe={
            "optimizer": "adamw",
            "learning_rate": 1e-4,
            "readout_learning_rate": 1e-3,
            "warmup": 0.06,
            "sparsity": 1e-3,
            "base": "empty",
            "mask_steps": 4,
            "mask_batch_size": 256,
            "mask_evaluations": 2,
        },
    ),
    "roberta-base": ModelEntry("the paper's masked LM, from the hub (125 M parameters)"),
    "bert-base-uncased": ModelEntry("from the hub (110 M parameters)"),
    "gpt2": ModelEntry("the paper's causal LM, from the hub (124 M parameters)"),
}

SOURCES: dict[str, Entry] = {
    "demo": Entry("forgetfree.benchmarks.demo:load", "three small tasks, embedded"),
}


def strategies() -> dict[str, Entry]:
    """All strategies: ours first, then those of installed packages, which cannot take our names."""
    return STRATEGIES | _plugins("forgetfree.strategies", STRATEGIES)


def strategy(name: str) -> Any:
    """The strategy class of a name."""
    known = strategies()
    if name not in known:
        raise UnknownNameError("strategy", name, known)
    return known[name].load()


def tasks() -> dict[str, TaskDefinition]:
    """All registered tasks."""
    from forgetfree.benchmarks.tasks import TASKS

    return dict(TASKS)


def streams() -> dict[str, tuple[str, ...]]:
    """All streams: ours first, then those of installed packages (each a tuple of task names)."""
    from forgetfree.benchmarks.streams import STREAMS

    plugins = {name: tuple(entry.load()) for name, entry in _plugins("forgetfree.streams", STREAMS).items()}
    return dict(STREAMS) | plugins


def _plugins(group: str, ours: Container[str]) -> dict[str, Entry]:
    return {
        point.name: Entry(point.value, f"from {point.dist.name}" if point.dist else "")
        for point in entry_points(group=group)
        if point.name not in ours
    }
