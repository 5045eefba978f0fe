"""Avalanche's own strategies as ours: from a plugin, or from a strategy class, by one class statement each.

    class EWC(PluginStrategy, plugin=EWCPlugin, ewc_lambda=option(1e3, "strength of the penalty", at_least=0)):
        \"\"\"Elastic weight consolidation (Kirkpatrick et al., 2017, eq. 3).\"\"\"

The options named become arguments of the plugin and take their place beside `TrainingOptions`, on the command line too.
All of Avalanche's code runs as it is, in our loop, on our batches. What of it goes wrong there is fixed around it, here
for all and in `forgetfree.strategies` for one: docs/baselines.md says what and why.
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
    """Base of all: one model for all tasks, whose readouts are trained together, as Avalanche does.

    A readout that takes no part in a step, nor in a penalty, has no gradient and stays as it is.

    A class statement may name, beside options: ``fixed``, arguments that are no options; and ``requires``, a function of
    options and stream that raises where they do not go together.
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
        cls._requires = staticmethod(requires) if requires else None  # no method, though it stands in the class

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Refuse accumulation and loss scaling: Avalanche's plugins take gradients of their own and know of neither.

        Weights in half precision, too: these plugins work in the weights' own dtype, which rounds small squares and steps to 0.
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
        """Return what the plugin or template is made with."""
        return {name: getattr(self.options, name) for name in self._own_options} | dict(self._fixed)

    def keep_beside(self, memory: Callable[[], Any]) -> None:
        """Count what ``memory`` returns beside the model: tensors, modules, rows of data, or Avalanche's objects with them."""
        tokens = getattr(self.model, "tokens", None)
        self.storage = ModelStorage(self, lambda: object_bytes(memory(), tokens))

    def everything_by_avalanche(self, task: EncodedTask, **changes: Any) -> Training:
        """Return the training of the backbone and the readouts of all tasks; arguments as those of `everything`.

        Raises:
            UsageError: the strategy was loaded: what it remembers of its tasks is not saved, and it would train without.
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
        if self.model is not model:  # GDumb's fresh start is a copy; the stream's own model is to be the one trained
            model.load_state_dict(self.model.state_dict())
            self.model = model


class PluginStrategy(AvalancheStrategy):
    """Base of strategies that are an Avalanche plugin; give it as ``plugin=…`` of the class statement.

    What the plugin holds is counted beside the model, working space included; ``keeps=…`` names its attribute that counts
    instead. Options that are no arguments of the plugin stand in the class's own ``Options``.
    """

    plugin: ClassVar[Any] = None
    _keeps: ClassVar[str | None] = None

    def __init_subclass__(cls, *, plugin: Any = None, keeps: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.plugin, cls._keeps = plugin, keeps

    def setup(self) -> None:
        """Make the plugin; those of the user come after it."""
        self.avalanche_plugin = plugin = self.plugin(**self.arguments())
        self.plugins.insert(0, plugin)
        self.keep_beside(lambda: getattr(plugin, self._keeps) if self._keeps else plugin)

    def begin(self, task: EncodedTask) -> Training:
        """Train everything; the plugin does the rest."""
        steps = self.updates_for(task)
        return self.everything_by_avalanche(task, **({} if steps is None else {"steps": steps}))

    def updates_for(self, task: EncodedTask) -> int | None:
        """Return how many updates a task has; ``None``: as many as the options say."""
        return None


class ImportanceOptions(TrainingOptions):
    """Options that strategies that weigh parameters after each task take beside those of training."""

    importance_rows: int | None = option(
        512,
        "number of training examples, drawn by seed, from which importances are estimated after each task; each "
        "costs a forward and a backward pass; none: all",
        at_least=1,
    )


class ImportanceStrategy(PluginStrategy):
    """Base of strategies whose plugin goes through the training rows once more after each task: here through a sample."""

    Options = ImportanceOptions

    def __init_subclass__(cls, *, plugin: Any = None, **options: Any) -> None:
        sampling = plugin and type(plugin.__name__, (_OnASample, plugin), {})
        super().__init_subclass__(plugin=sampling, **options)


class _OnASample:
    """Mixin of plugins, which shows them a sample of the rows when they look for importances."""

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
        """Return the strategy's arguments beside those of every template."""
        return self.arguments()

    def training_epoch(self, **kwargs: Any) -> None:
        """Run the strategy's own loop, where it has one; else ours."""
        template: Any = next(
            cls for cls in type(self).__mro__ if cls.__module__.startswith("avalanche.training.supervised")
        )
        if "training_epoch" not in vars(template):
            super().training_epoch(**kwargs)
            return
        with self.training_steps():
            template.training_epoch(self, **kwargs)


def one_label_a_row(name: str, why: str, options: Any, stream: Stream) -> None:
    """Refuse streams in which words are labelled, or texts are written."""
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
    """Around the training of a task: no warnings of Avalanche's, no dropout where none is wanted."""
    with _without_its_warnings(), ExitStack() as hooks:
        if not strategy.options.dropout:  # A-GEM, GEM and MAS ask for training mode before passes of their own
            hooks.callback(strategy.model.register_forward_pre_hook(_evaluation_mode).remove)
        yield


def _evaluation_mode(model: nn.Module, _: Any) -> None:
    if model.training:
        model.eval()


@contextmanager
def _without_its_warnings() -> Iterator[None]:
    """Inside, no warnings about Avalanche's own code, which its callers can do nothing about."""
    usual, silent = decorators.warnings, SimpleNamespace(simplefilter=_nothing, warn=_nothing)
    decorators.warnings = silent  # what its @deprecated warns by, after it has set a filter of its own
    try:
        with warnings.catch_warnings():
            # By np.square(tensor) in SI.
            warnings.filterwarnings("ignore", "__array_wrap__ must accept", DeprecationWarning)
            yield
    finally:
        decorators.warnings = usual


def _nothing(*_: Any, **__: Any) -> None:
    """Warn of nothing."""


# -- How many bytes an object of Avalanche's holds ------------------------------------------------------


#: The size of a label, a task label or a token id in a row.
_INTEGER_BYTES = 8


def object_bytes(holder: Any, tokens: TokenLayout | None = None) -> int:
    """Count the bytes of all tensors, modules and rows of data that an object of Avalanche's holds, each once.

    Rows are counted in every data set that has them. With ``tokens``, the padding that brings a data set's rows to one
    length does not count; tensors count as they are.
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
            _row_part(part, None if place else tokens)  # only what is read has padding
            for row in range(len(value))
            for place, part in enumerate(value[row])
        )
    if isinstance(value, nn.Module):
        return sum(_bytes_of(tensor, tokens, seen) for tensor in value.state_dict(keep_vars=True).values())
    if isinstance(value, Mapping):
        return sum(_bytes_of(each, tokens, seen) for each in value.values())
    if isinstance(value, (list, tuple, set)):
        return sum(_bytes_of(each, tokens, seen) for each in value)
    # Buffers, tensors in Avalanche's own wrapping, and what inherits from them; but no strategy.
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
