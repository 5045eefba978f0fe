"""Avalanche's own strategies as ours: from a plugin, or from a strategy class, by one class statement each.

    class EWC(PluginStrategy, plugin=EWCPlugin, ewc_lambda=option(1e3, "strength of the penalty", at_least=0)):
        \"\"\"Elastic weight consolidation (Kirkpatrick et al., 2017, eq. 3).\"\"\"

The named options become arguments of the plugin and are added to `TrainingOptions`, also on the command line. Avalanche's
code runs unchanged, in our loop, on our batches. Its faults are fixed around it: here for all strategies, in
`forgetfree.strategies` for one; docs/baselines.md lists them with their reasons.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

from avalanche import _annotations as decorators
from avalanche.benchmarks.utils import AvalancheDataset
from avalanche.training.templates.base import BaseTemplate
from pydantic import create_model
from torch import Tensor, nn

from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.strategy_parts import ModelStorage, Training
from forgetfree.continual.stream import Stream
from forgetfree.errors import OptionError, UsageError
from forgetfree.models.token_inputs import TokenLayout
from forgetfree.options import option
from forgetfree.seeds import derive_seed
from forgetfree.training.encoded_task import EncodedTask
from forgetfree.training.training_options import TrainingOptions


class AvalancheStrategy(ContinualStrategy):
    """Base of all: one model for all tasks, whose readouts are trained together, as in Avalanche.

    A readout that takes part in neither a step nor a penalty has no gradient and does not change.

    In addition to options, a class statement may name ``fixed``, arguments that are no options, and ``requires``, a function of
    options and stream that raises an error if they are incompatible.
    """

    _own_options: ClassVar[tuple[str, ...]] = ()
    _fixed: ClassVar[Mapping[str, Any]] = {}
    _requires: ClassVar[Callable[[Any, Stream], None] | None] = None

    def __init_subclass__(
        cls,
        *,
        fixed: Mapping[str, Any] | None = None,
        requires: Callable[[Any, Stream], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init_subclass__()
        if options:
            fields: Any = {name: (type(field.default), field) for name, field in options.items()}
            cls.Options = create_model(f"{cls.__name__}Options", __base__=cls.Options, **fields)
        cls._own_options = tuple(options)
        cls._fixed = dict(fixed or {})
        cls._requires = staticmethod(requires) if requires else None  # not a method, although it is a class attribute

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Refuse accumulation and loss scaling: Avalanche's plugins compute gradients of their own and support neither.

        Refuse weights in half precision, too: these plugins compute in the weights' dtype, which rounds small squares and steps
        to 0.
        """
        if options.accumulation > 1:
            raise OptionError(
                f"{cls.__name__} runs Avalanche's code, which does not support gradient accumulation: expected "
                f"accumulation=1, got {options.accumulation}. Leave it at 1."
            )
        if options.precision == "fp16":
            raise OptionError(
                f"{cls.__name__} runs Avalanche's code, which does not scale losses for fp16. Set precision=bf16 or fp32."
            )
        if narrow := [spec for spec in stream.model.space().tensors if spec.dtype.itemsize < 4]:
            raise UsageError(
                f"{cls.__name__} runs Avalanche's code, which computes in the dtype of the weights: expected float32, got "
                f"{narrow[0].dtype} of {narrow[0].name!r}. Give the network in float32, without dtype=bfloat16; precision=bf16 "
                "makes its passes faster."
            )
        if cls._requires is not None:
            cls._requires(options, stream)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the plugin or template."""
        return {name: getattr(self.options, name) for name in self._own_options} | dict(self._fixed)

    def keep_beside(self, memory: Callable[[], Any]) -> None:
        """Count the result of ``memory`` as stored, too: tensors, modules, rows of data, or Avalanche's objects with them."""
        tokens = getattr(self.model, "tokens", None)
        self.storage = ModelStorage(self, lambda: object_bytes(memory(), tokens))

    def everything_by_avalanche(self, task: EncodedTask, **changes: Any) -> Training:
        """Return the training of the backbone and the readouts of all tasks; arguments as for `everything`.

        Raises:
            UsageError: the strategy was loaded: its memory of earlier tasks is not saved, and training needs it.
        """
        if self.learned and not self.clock.train_exp_counter:
            raise UsageError(
                f"{type(self).__name__} was loaded from a file, so it cannot learn {task.name!r}: a saved strategy "
                "can predict, but its memory of earlier tasks is not saved. Train it on the whole stream."
            )
        self.scope.enter_context(_around(self))
        return self.everything(task, readout=self.model.learned_readouts(), **changes)

    def answering(self, task: EncodedTask) -> AbstractContextManager[None]:
        """Answer with the one model, as it is."""
        return nullcontext()

    def _before_train_dataset_adaptation(self, **kwargs: Any) -> None:
        model = self.model
        super()._before_train_dataset_adaptation(**kwargs)
        if self.model is not model:  # GDumb starts from a copy, but the stream's own model must be trained
            model.load_state_dict(self.model.state_dict())
            self.model = model


class PluginStrategy(AvalancheStrategy):
    """Base of strategies that are an Avalanche plugin, given as ``plugin=…`` of the class statement.

    All data of the plugin, working space included, counts as stored in addition to the model; ``keeps=…`` names an attribute to
    count instead. Options that are no arguments of the plugin belong to the class's own ``Options``.
    """

    plugin: ClassVar[Any] = None
    _keeps: ClassVar[str | None] = None

    def __init_subclass__(cls, *, plugin: Any = None, keeps: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.plugin, cls._keeps = plugin, keeps

    def setup(self) -> None:
        """Create the plugin; the user's plugins come after it."""
        self.avalanche_plugin = plugin = self.plugin(**self.arguments())
        self.plugins.insert(0, plugin)
        self.keep_beside(lambda: getattr(plugin, self._keeps) if self._keeps else plugin)

    def begin(self, task: EncodedTask) -> Training:
        """Train everything; the plugin does the rest."""
        steps = self.updates_for(task)
        return self.everything_by_avalanche(task, **({} if steps is None else {"steps": steps}))

    def updates_for(self, task: EncodedTask) -> int | None:
        """Return the number of updates of a task; ``None``: as the options say."""
        return None


class ImportanceOptions(TrainingOptions):
    """Options of strategies that weigh parameters after each task, in addition to those of training."""

    importance_rows: int | None = option(
        512,
        "number of training examples, drawn by seed, from which importances are estimated after each task; each "
        "costs a forward and a backward pass; none: all",
        at_least=1,
    )


class ImportanceStrategy(PluginStrategy):
    """Base of strategies whose plugin passes over the training rows once more after each task: here over a sample."""

    Options = ImportanceOptions

    def __init_subclass__(cls, *, plugin: Any = None, **options: Any) -> None:
        sampling = plugin and type(plugin.__name__, (_OnASample, plugin), {})
        super().__init_subclass__(plugin=sampling, **options)


class _OnASample:
    """Mixin of plugins, which estimates importances on a sample of the rows."""

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        rows, data = strategy.options.importance_rows, strategy.experience.dataset
        if rows is not None and rows < len(data):
            random = Random(derive_seed(strategy.phase_seed("train", strategy.task), "importance"))
            data = data.subset(sorted(random.sample(range(len(data)), rows)))
        with showing(strategy, data):
            super().after_training_exp(strategy, **kwargs)  # type: ignore[misc]  # of the plugin mixed into


class TemplateStrategy(AvalancheStrategy):
    """Base of strategies that inherit from an Avalanche strategy too: ``class DER(TemplateStrategy, avalanche.DER)``."""

    def avalanche_arguments(self) -> dict[str, Any]:
        """Return the strategy's arguments, in addition to those of every template."""
        return self.arguments()

    def training_epoch(self, **kwargs: Any) -> None:
        """Run the loop of the Avalanche strategy, if it has its own; else ours."""
        template: Any = next(
            cls for cls in type(self).__mro__ if cls.__module__.startswith("avalanche.training.supervised")
        )
        if "training_epoch" not in vars(template):
            super().training_epoch(**kwargs)
            return
        with self.training_steps():
            template.training_epoch(self, **kwargs)


def one_label_a_row(name: str, why: str, options: Any, stream: Stream) -> None:
    """Refuse streams with tasks that have more than one label per row, or answers that are texts."""
    for task in stream.tasks:
        if task.kind.answer != "label":
            raise UsageError(
                f"{name} {why}, but task {task.name!r} has one for each {task.kind.label_of}. Use a strategy that "
                "replays or weights whole examples (replay, agem, gdumb, ewc, si), or one that does not forget "
                "(grafting-continual)."
            )


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


@contextmanager
def _around(strategy: AvalancheStrategy) -> Iterator[None]:
    """Inside, while a task is trained, suppress Avalanche's warnings, and dropout if the options exclude it."""
    with _without_its_warnings(), ExitStack() as hooks:
        if not strategy.options.dropout:  # A-GEM, GEM and MAS ask for training mode before passes of their own
            hooks.callback(strategy.model.register_forward_pre_hook(_evaluation_mode).remove)
        yield


def _evaluation_mode(model: nn.Module, _: Any) -> None:
    if model.training:
        model.eval()


@contextmanager
def _without_its_warnings() -> Iterator[None]:
    """Inside, suppress warnings about Avalanche's own code, which its callers cannot fix."""
    usual, silent = decorators.warnings, SimpleNamespace(simplefilter=_nothing, warn=_nothing)
    decorators.warnings = silent  # its @deprecated uses this module after setting its own filter
    try:
        with warnings.catch_warnings():
            # Caused by np.square(tensor) in SI.
            warnings.filterwarnings("ignore", "__array_wrap__ must accept", DeprecationWarning)
            yield
    finally:
        decorators.warnings = usual


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


# -- The bytes of Avalanche's objects -------------------------------------------------------------------


#: The size of a label, a task label or a token id in a row.
_INTEGER_BYTES = 8


def object_bytes(holder: Any, tokens: TokenLayout | None = None) -> int:
    """Return the bytes of all tensors, modules and rows of data in an object of Avalanche, each counted once.

    Rows count in every data set that has them. With ``tokens``, the padding of a data set's rows to one length does not count;
    tensors count as they are.
    """
    return _bytes_of(holder, tokens, set())


def _bytes_of(value: Any, tokens: TokenLayout | None, seen: set[int]) -> int:
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, AvalancheDataset):
        return sum(
            _row_part(part, None if place else tokens)  # only inputs have padding
            for row in range(len(value))
            for place, part in enumerate(value[row])
        )
    if isinstance(value, nn.Module):
        return sum(_bytes_of(tensor, tokens, seen) for tensor in value.state_dict(keep_vars=True).values())
    if isinstance(value, Mapping):
        return sum(_bytes_of(each, tokens, seen) for each in value.values())
    if isinstance(value, (list, tuple, set)):
        return sum(_bytes_of(each, tokens, seen) for each in value)
    # Buffers, tensors in Avalanche's wrappers, and classes that inherit from them; but no strategy.
    if _is_avalanches(type(value)) and not isinstance(value, BaseTemplate):
        return _bytes_of(vars(value), tokens, seen)
    return 0


def _is_avalanches(plugin: type) -> bool:
    return any(cls.__module__.startswith("avalanche.training") for cls in plugin.__mro__)


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
    "object_bytes",
    "one_label_a_row",
    "showing",
]
