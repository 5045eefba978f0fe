"""Avalanche's own strategies as ours: from a plugin, or from a strategy class, by one class statement each.

    class EWC(PluginStrategy, plugin=EWCPlugin, ewc_lambda=option(1e3, "strength of the penalty", at_least=0)):
        \"\"\"Elastic weight consolidation (Kirkpatrick et al., 2017, eq. 3).\"\"\"

The options named become arguments of the plugin and take their place beside `TrainingOptions`, on the command line too.
All of Avalanche's code runs as it is, in our loop, on our batches. What of it goes wrong there is fixed around it, here
for all and in `forgetfree.strategies.avalanche_baselines` for one: docs/baselines.md says what and why.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Any, ClassVar

from avalanche import _annotations as decorators
from avalanche.benchmarks.utils import AvalancheDataset
from avalanche.training.templates.base import BaseTemplate
from torch import Tensor, nn

from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.errors import OptionError
from forgetfree.learning.training import TrainingOptions
from forgetfree.models.state import ModelState
from forgetfree.models.tokens import TokenLayout
from forgetfree.options import option
from forgetfree.seeds import derive_seed


class AvalancheStrategy(ContinualStrategy):
    """Base of all: trains the backbone and, as Avalanche does, the readouts of all tasks together.

    A readout that takes no part in a step, nor in a penalty, has no gradient and stays as it is.
    """

    _own_options: ClassVar[tuple[str, ...]] = ()
    _fixed: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, *, fixed: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init_subclass__()
        if without := [name for name, field in options.items() if field.default is None]:
            raise TypeError(
                f"{cls.__name__}: the default of {', '.join(without)} is None, from which no type can be told. Give a value."
            )
        if options:
            fields: Any = [(name, type(field.default), field) for name, field in options.items()]
            cls.Options = dataclasses.make_dataclass(
                f"{cls.__name__}Options", fields, bases=(cls.Options,), frozen=True, kw_only=True
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

    def parameters(self, task: EncodedTask) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The backbone, and the readouts of all tasks."""
        return self.space.parameters(self.task_model.backbone), self.task_model.readouts()

    def held(self) -> Any:
        """What is kept beside the model: tensors, modules, rows of data, or an object of Avalanche's that has them."""
        return None

    def bytes_kept(self) -> int:
        """The model, and all tensors and rows beside it."""
        if not self.learned:
            return 0
        tokens = getattr(self.task_model, "tokens", None)
        return ModelState.of(self.task_model).size_in_bytes + held_bytes(self.held(), tokens)

    def train(self, experiences: Any, eval_streams: Any = None, **kwargs: Any) -> Any:
        """Train on one experience, or on several in turn; see Avalanche."""
        with _without_its_warnings(), self._no_dropout_where_none_is_wanted():
            return super().train(experiences, eval_streams, **kwargs)

    @contextmanager
    def _no_dropout_where_none_is_wanted(self) -> Iterator[None]:
        # A-GEM, GEM and MAS ask for training mode before passes of their own.
        if self.options.dropout:
            yield
            return
        hook = self.model.register_forward_pre_hook(_evaluation_mode)
        try:
            yield
        finally:
            hook.remove()

    def _before_train_dataset_adaptation(self, **kwargs: Any) -> None:
        model = self.model
        super()._before_train_dataset_adaptation(**kwargs)
        if self.model is not model:  # GDumb's fresh start is a copy; the stream's own model is to be the one trained
            model.load_state_dict(self.model.state_dict())
            self.model = model


class PluginStrategy(AvalancheStrategy):
    """Base of strategies that are an Avalanche plugin; give it as ``plugin=…`` of the class statement."""

    plugin: ClassVar[Any] = None

    def __init_subclass__(cls, *, plugin: Any = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.plugin = plugin
        if plugin is None:  # a base of several
            return
        known = inspect.signature(plugin).parameters
        unknown = sorted({*cls._own_options, *cls._fixed} - set(known))
        if unknown and not any(each.kind is each.VAR_KEYWORD for each in known.values()):
            raise TypeError(
                f"{cls.__name__}: {plugin.__name__} takes no {', '.join(unknown)}. It takes: {', '.join(known)}."
            )

    def own_plugins(self) -> list[Any]:
        """The plugin."""
        self.avalanche_plugin = self.plugin(**self.arguments())
        return [self.avalanche_plugin]

    def held(self) -> Any:
        """All that the plugin has, working space included."""
        return self.avalanche_plugin


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportanceOptions(TrainingOptions):
    """What strategies that weigh parameters after each task take beside."""

    importance_rows: int | None = option(
        512,
        "training rows that importances are taken from after each task, drawn by seed; each costs a forward and a backward "
        "pass. none: all",
        at_least=1,
    )


class ImportanceStrategy(PluginStrategy):
    """Base of strategies whose plugin goes through the training rows once more after each task."""

    Options = ImportanceOptions

    def own_plugins(self) -> list[Any]:
        """The plugin, which is shown a sample of the rows when it looks for importances."""
        plugins = super().own_plugins()
        on_all_rows = self.avalanche_plugin.after_training_exp

        def on_a_sample(strategy: Any, **kwargs: Any) -> None:
            with showing(strategy, self._sample(strategy.experience.dataset)):
                on_all_rows(strategy, **kwargs)

        self.avalanche_plugin.after_training_exp = on_a_sample
        return plugins

    def _sample(self, data: Any) -> Any:
        rows = self.options.importance_rows
        if rows is None or rows >= len(data):
            return data
        random = Random(derive_seed(self.phase_seed(self.training_phase, self.task), "importance"))
        return data.subset(sorted(random.sample(range(len(data)), rows)))


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


@contextmanager
def showing(strategy: Any, data: Any) -> Iterator[None]:
    """Inside, ``data`` is the data set of the strategy's current experience."""
    whole = strategy.experience
    strategy.experience = copy.copy(whole)
    strategy.experience._dataset = data
    try:
        yield
    finally:
        strategy.experience = whole


def _evaluation_mode(model: nn.Module, _: Any) -> None:
    if model.training:
        model.eval()


class _Annotations:
    """What Avalanche's ``@deprecated`` sees as the module ``warnings``."""

    @staticmethod
    def simplefilter(*args: Any, **kwargs: Any) -> None:
        """It would put a filter before those of the user, for good."""

    @staticmethod
    def warn(message: str, category: type[Warning], stacklevel: int) -> None:
        """Let all pass but its own call of its own buffers' ``update``."""
        if not message.startswith("Call to deprecated function update "):
            warnings.warn(message, category=category, stacklevel=stacklevel + 1)


@contextmanager
def _without_its_warnings() -> Iterator[None]:
    """Two warnings that are about Avalanche's code and that its callers can do nothing about."""
    module = decorators.warnings
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array_wrap__ must accept", DeprecationWarning)  # np.square(tensor) in SI
        decorators.warnings = _Annotations
        try:
            yield
        finally:
            decorators.warnings = module


# -- Memory ----------------------------------------------------------------------------------------------

#: Of a label, a task label or a token id in a row.
_INTEGER_BYTES = 8


def held_bytes(holder: Any, tokens: TokenLayout | None = None) -> int:
    """Bytes of all tensors, modules and rows of data that an object of Avalanche's holds, each counted once.

    Rows are counted in every data set that has them. With ``tokens``, the padding that brings a data set's rows to one
    length does not count; tensors count as they are.
    """
    return _held(holder, tokens, set())


def _held(value: Any, tokens: TokenLayout | None, seen: set[int]) -> int:
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, AvalancheDataset):
        return sum(_row_part(part, tokens) for row in range(len(value)) for part in value[row])
    if isinstance(value, nn.Module):
        return sum(_held(tensor, tokens, seen) for tensor in value.state_dict(keep_vars=True).values())
    if isinstance(value, Mapping):
        return sum(_held(each, tokens, seen) for each in value.values())
    if isinstance(value, (list, tuple, set)):
        return sum(_held(each, tokens, seen) for each in value)
    # Buffers, tensors in Avalanche's own wrapping, and what inherits from them; but no strategy.
    if _is_avalanches(type(value)) and not isinstance(value, BaseTemplate):
        return _held(vars(value), tokens, seen)
    return 0


def _is_avalanches(kind: type) -> bool:
    return any(cls.__module__.startswith("avalanche.training") for cls in kind.__mro__)


def _row_part(part: Any, tokens: TokenLayout | None) -> int:
    if not isinstance(part, Tensor):
        return _INTEGER_BYTES
    if tokens is not None and part.dim() == 1 and not part.is_floating_point():
        return int(tokens.attention_mask(part[None]).sum()) * part.element_size()
    return part.numel() * part.element_size()


__all__ = [
    "AvalancheStrategy",
    "ImportanceOptions",
    "ImportanceStrategy",
    "PluginStrategy",
    "TemplateStrategy",
    "held_bytes",
    "showing",
]
