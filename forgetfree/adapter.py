"""Avalanche's own strategies as ours: from a plugin, or from a strategy class, by one class statement each.

    class EWC(PluginStrategy, plugin=EWCPlugin, ewc_lambda=option(1e3, "strength of the penalty", at_least=0)):
        \"\"\"Elastic weight consolidation (Kirkpatrick et al., 2017, eq. 3).\"\"\"

The options named become arguments of the plugin and take their place beside `TrainingOptions`, on the command line too.
All of Avalanche's code runs as it is, in our loop, on our batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from avalanche.benchmarks.utils import AvalancheDataset
from torch import Tensor, nn

from forgetfree.errors import OptionError
from forgetfree.models.state import ModelState
from forgetfree.strategy import ContinualStrategy
from forgetfree.streams import Stream, StreamTask
from forgetfree.training import TrainingOptions


class AvalancheStrategy(ContinualStrategy):
    """Base of both: trains the backbone and, as Avalanche does, the readouts of all tasks together.

    A readout that takes no part in a step has no gradient and stays as it is.
    """

    _own_options: ClassVar[tuple[str, ...]] = ()
    _fixed: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, *, fixed: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init_subclass__()
        if options:
            fields: Any = [(name, type(field.default), field) for name, field in options.items()]
            cls.Options = dataclasses.make_dataclass(
                f"{cls.__name__}Options", fields, bases=(TrainingOptions,), frozen=True, kw_only=True
            )
        cls._own_options = tuple(options)
        cls._fixed = dict(fixed or {})

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Avalanche's plugins take gradients of their own: they know neither accumulation nor loss scaling."""
        if options.accumulation > 1:
            raise OptionError(
                f"{cls.__name__} runs Avalanche's code, which does not accumulate gradients: expected accumulation=1, got "
                f"{options.accumulation}. Leave it at 1."
            )
        if options.precision == "fp16":
            raise OptionError(
                f"{cls.__name__} runs Avalanche's code, which does not scale losses for fp16. Set precision=bf16 or fp32."
            )

    def arguments(self) -> dict[str, Any]:
        """What the plugin or template is made with."""
        return {name: getattr(self.options, name) for name in self._own_options} | dict(self._fixed)

    def parameters(self, task: StreamTask) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The backbone, and the readouts of all tasks."""
        return self.space.parameters(self.task_model.backbone), self.task_model.readouts()


class PluginStrategy(AvalancheStrategy):
    """Base of strategies that are an Avalanche plugin; give it as ``plugin=…`` of the class statement."""

    plugin: ClassVar[Any] = None

    def __init_subclass__(cls, *, plugin: Any, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.plugin = plugin

    def own_plugins(self) -> list[Any]:
        """The plugin."""
        self.avalanche_plugin = self.plugin(**self.arguments())
        return [self.avalanche_plugin]

    def bytes_kept(self) -> int:
        """The model, and all tensors and rows that the plugin holds."""
        return (ModelState.of(self.task_model).size_in_bytes + held_bytes(self.avalanche_plugin)) if self.learned else 0


class TemplateStrategy(AvalancheStrategy):
    """Base of strategies that inherit from an Avalanche strategy too: ``class DER(TemplateStrategy, avalanche.DER)``."""

    def template_arguments(self) -> dict[str, Any]:
        """Its arguments beside those of every template."""
        return self.arguments()

    def training_epoch(self, **kwargs: Any) -> None:
        """The template's own loop, where it has one; else ours."""
        template: Any = next(
            cls for cls in type(self).__mro__ if cls.__module__.startswith("avalanche.training.supervised")
        )
        if "training_epoch" not in vars(template):
            super().training_epoch(**kwargs)
            return
        with self.training_steps():
            template.training_epoch(self, **kwargs)

    def held(self) -> Any:
        """What the template keeps beside the model: tensors, rows of data, or an object that has them."""
        return None

    def bytes_kept(self) -> int:
        """The model, and what the template keeps."""
        return (ModelState.of(self.task_model).size_in_bytes + held_bytes(self.held())) if self.learned else 0


def held_bytes(holder: Any) -> int:
    """Bytes of all tensors, modules and rows of data that an object of Avalanche's holds, each counted once."""
    return _held(holder, set())


def _held(value: Any, seen: set[int]) -> int:
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, AvalancheDataset):
        return sum(_held(part, set()) for row in range(len(value)) for part in value[row])
    if isinstance(value, nn.Module):
        return sum(t.numel() * t.element_size() for t in value.state_dict().values())
    if isinstance(value, Mapping):
        return sum(_held(each, seen) for each in value.values())
    if isinstance(value, (list, tuple, set)):
        return sum(_held(each, seen) for each in value)
    if type(value).__module__.startswith("avalanche.training"):  # buffers, and tensors in Avalanche's own wrapping
        return _held(vars(value), seen)
    return 0


__all__ = ["AvalancheStrategy", "PluginStrategy", "TemplateStrategy", "held_bytes"]
