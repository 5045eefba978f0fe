"""The contract of a strategy: the methods that its author writes, and those that its author can use.

A strategy decides what to train for a task, from which weights and for how many steps (`begin`), what to record afterwards
(`commit`), and which model answers for a task (`answering`). All else is the same for all strategies:
`forgetfree.continual.template` connects them to Avalanche, `task_inference` answers where the stream withholds the task.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from avalanche.training.plugins import LRSchedulerPlugin
from torch import Tensor, nn

from forgetfree import recipes, registry
from forgetfree.continual.strategy_parts import Answer, ModelStorage, Storage, Training, undo_on_error
from forgetfree.continual.stream import Stream
from forgetfree.continual.task_inference import TaskwiseOptions, check_inference, features_for
from forgetfree.continual.template import StrategyTemplate, silent_evaluator
from forgetfree.core.parameters import load_tensors_
from forgetfree.core.readout_model import ReadoutModel
from forgetfree.core.regions import Region
from forgetfree.core.trained import WholeTensors
from forgetfree.data.rows import evenly
from forgetfree.device import find_device
from forgetfree.display import tell
from forgetfree.errors import OptionError
from forgetfree.files import StrPath
from forgetfree.ledger.ledger import Ledger
from forgetfree.models.state import ModelState, StateStore
from forgetfree.results.answers import Answers
from forgetfree.seeds import derive_seed
from forgetfree.training.encoded_task import EncodedTask
from forgetfree.training.monitor import Monitor, Phase, Stopwatch
from forgetfree.training.single_task import SingleTask, check_localization
from forgetfree.training.training_options import LocalizationOptions, TrainingOptions, for_model


class ContinualStrategy(StrategyTemplate):
    """Base class of all strategies. A subclass implements `begin` and `answering`, and overrides other methods as needed.

    Args:
        stream: tasks and model. The model is trained in place and belongs to this strategy from now on; an earlier strategy
            on the same stream becomes unusable. ``stream.copy()`` returns a stream for another strategy.
        options: an instance of the subclass's ``Options``; default: the recipe of the stream's model, printed to stderr.
        seed: random seed for batches, dropout and everything else that is sampled.
        device: device for training; ``auto``: a GPU, if there is one.
        plugins: Avalanche plugins.
        evaluator: an Avalanche ``EvaluationPlugin`` for its metrics and loggers; default: none.
        monitor: logs phases and steps.
        store: stores and shares fine-tuned models; default: in memory.
        eval_every, peval_mode: Avalanche's periodic evaluation.

    Raises:
        OptionError: options and stream are incompatible, or a plugin would change the learning rate of an optimiser, while
            each task has its own optimiser.
    """

    # -- What you write --------------------------------------------------------------------------------------

    #: The options that a user can set.
    Options: ClassVar[type[TrainingOptions]] = TrainingOptions
    #: True if later tasks do not change any earlier task's logits, bit for bit.
    forget_free: ClassVar[bool] = False
    #: True if later tasks depend only on what `storage` saves, and steps only on what `Training` names: see `--resume`.
    resumable: ClassVar[bool] = False
    #: Saves, loads and measures what predictions need. Replace it in `setup` if more than the model must be saved, or less.
    storage: Storage

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Raise an error if options and stream are incompatible; called before anything is trained."""

    def setup(self) -> None:
        """Create what the strategy needs; called once, at the end of the constructor, when the model holds θ_pre."""

    @abstractmethod
    def begin(self, task: EncodedTask) -> Training:
        """Prepare the model for the training of ``task`` and return its `Training`; `everything` returns the usual one.

        The model is as the last task left it. Before changing it, enter `undo_on_error` into `scope`.
        """

    def commit(self, task: EncodedTask, training: Training) -> None:
        """Record the trained values, and prepare the model for the next task."""

    @abstractmethod
    def answering(self, task: EncodedTask) -> AbstractContextManager[Answer | None]:
        """Return a context manager in which the model predicts for ``task``; on exit, it restores the model.

        It is also called during the training of another task (see `training`), and for tasks that are not learned yet.
        It yields nothing, or a function from inputs and task labels to logits that is used instead of the model.
        """

    def changed_by(self, learned: EncodedTask) -> list[EncodedTask] | None:
        """Return the tasks whose predictions may change when ``learned`` is learned; ``None``: all."""

    def extra_results(self) -> dict[str, Any]:
        """Return further content for results.json at the end of the stream."""
        return {}

    # -- What you use ----------------------------------------------------------------------------------------

    #: The tasks learned so far, in order.
    learned: list[EncodedTask]
    #: The ledger, if the strategy has one: see `forgetfree.continual.region_strategy.RegionStrategy`.
    ledger: Ledger | None = None
    #: Whether each task has its own model, which the task selects: true if `Options` are `TaskwiseOptions`.
    taskwise: ClassVar[bool] = False

    @final
    def everything(self, task: EncodedTask, **changes: Any) -> Training:
        """Return the training of all graftable tensors and the task's readout, starting from the current weights.

        Args:
            task: the task.
            changes: fields of `Training` to override.
        """
        usual: dict[str, Any] = {
            "trained": WholeTensors(self.space.parameters(self.model.backbone)),
            "readout": list(self.model.readout_module(task.label).parameters()),
            **{"steps": task.full_steps(self.options), "options": self.options},
        }
        return Training(task, **(usual | changes))

    @final
    @contextmanager
    def holding(self, state: ModelState | None = None, before: ModelState | None = None) -> Iterator[None]:
        """Load ``state`` into the model; on exit, restore ``before`` (default: the current state), buffers included."""
        before = before or ModelState.of(self.model)
        try:
            if state is not None:
                state.load_(self.model)
            yield
        finally:
            before.load_(self.model)

    @final
    def note_learned(self, task: EncodedTask, readout: dict[str, Tensor]) -> None:
        """Record that ``task`` was learned, with this readout; for `Storage.load`."""
        self.learned = [*(each for each in self.learned if each is not task), task]
        self.readouts[task.name] = readout

    @final
    def bench(self, task: EncodedTask, pre: ModelState | None = None) -> SingleTask:
        """Return the `SingleTask` of ``task``, which computes θ_ft and γ from this task alone, without plugins.

        Args:
            task: the task.
            pre: the state that the task is learned on top of and the model holds; θ_ft is then in no store. Default: θ_pre.
        """
        return SingleTask(
            self.stream.loaded,
            task,
            pre=pre or self.pre_trained,
            seed=self.seed,
            device=self.device,
            store=self.store if self.shares_store and pre is None else None,
            monitor=self.monitor,
        )

    @final
    def training_result(
        self,
        task: EncodedTask,
        tensors: Sequence[nn.Parameter],
        *,
        frozen: Region,
        readout: Mapping[str, Tensor] | None = None,
    ) -> ModelState:
        """Return the state of the model after training on ``task``; the model itself is restored.

        Args:
            task: the task.
            tensors: the tensors to train, in addition to the readout.
            frozen: entries of these tensors that are not trained.
            readout: initial values of the readout; default: its current values.
        """
        with self.holding():
            if readout is not None:
                load_tensors_(self.model.readout_module(task.label), readout)
            of_backbone = self.space.parameters(self.model.backbone)
            kept = [(of_backbone[i], local) for i, local, _ in self.space.split(frozen.indices)]
            self.bench(task).train_(self.options, "fine_tune", WholeTensors(tensors, kept))
            return ModelState.of(self.model, [task.name])

    @property
    def model(self) -> ReadoutModel:
        """Return the stream's model in its current state.

        Raises:
            RunError: the model belongs to a strategy that was created later.
        """
        self.stream.check_owner(self.owner)
        return self._model

    @model.setter
    def model(self, model: ReadoutModel) -> None:
        self._model = model

    @property
    @final
    def task(self) -> EncodedTask:
        """Return the task of the current experience."""
        return self.stream.task_of(self.experience)

    @final
    def phase_seed(self, phase: Phase, task: EncodedTask) -> int:
        """Return the seed of one phase of one task."""
        return derive_seed(self.seed, phase, task.name)

    # -- Methods for users, in addition to Avalanche's `train` and `eval` --------------------------------------

    def evaluate(self, tasks: Sequence[EncodedTask] | None = None) -> dict[str, Answers]:
        """Return the answers on the test rows of ``tasks`` (default: all), by Avalanche's evaluation loop."""
        stream = self.stream.benchmark.test_stream
        self.predictions = {}
        experiences = [stream[task.label] for task in (self.stream.tasks if tasks is None else tasks)]
        if experiences:
            self.eval(experiences)
        return self.predictions

    @final
    def save(self, directory: StrPath) -> None:
        """Write everything that later predictions need."""
        for part in self._stored:
            part.save(Path(directory))

    @final
    def load(self, directory: StrPath) -> None:
        """Load the files of `save` into this new strategy, so that it predicts the same. Errors as for `Storage.load`."""
        if self.task_features is not None:
            self.task_features.read(Path(directory))  # a damaged file is reported before anything is changed
        for part in self._stored:
            part.load(Path(directory))

    @final
    def bytes_kept(self) -> int:
        """Return the bytes stored to predict for the tasks learned so far and to learn the next, in addition to θ_pre."""
        return sum(part.bytes_kept() for part in self._stored)

    @property
    def _stored(self) -> list[Storage]:
        return [self.storage] if self.task_features is None else [self.storage, self.task_features]

    def __init__(
        self,
        *,
        stream: Stream,
        options: TrainingOptions | None = None,
        seed: int = 0,
        device: str | torch.device = "auto",
        plugins: Sequence[Any] | None = None,
        evaluator: Any = None,
        monitor: Monitor | None = None,
        store: StateStore | None = None,
        eval_every: int = -1,
        peval_mode: str = "epoch",
    ) -> None:
        if any(isinstance(plugin, LRSchedulerPlugin) for plugin in plugins or ()):
            raise OptionError(
                "LRSchedulerPlugin changes the learning rate of one optimizer, but every task has its own "
                "optimizer. Set warmup, and schedule to linear, constant or a function of the number of updates."
            )
        self.device = device = torch.device(find_device("auto") if device == "auto" else device)
        options = options or recipe_options(type(self), stream.loaded.name)
        self.options = for_model(options, stream.model.to(device), stream.tasks[0].train)
        check_options(type(self), self.options, stream)
        self.stream = stream
        self.owner = stream.claim(type(self).__name__)
        self.seed = seed
        self.monitor = Stopwatch(monitor or Monitor())
        self.shares_store = store is not None
        self.store = store or StateStore()
        self.space = stream.model.space()
        self.pre_trained = stream.pre_trained
        self.has_plugins = bool(plugins)  # their effect on training is not in the key of a shared model
        self.seconds, self.updates = self.monitor.seconds, self.monitor.updates
        self.predictions: dict[str, Answers] = {}
        self.training: Training | None = None
        self.scope = ExitStack()
        self.learned = []
        self.readouts: dict[str, dict[str, Tensor]] = {}  # of the learned tasks, as they were left
        self.storage = ModelStorage(self)
        # Avalanche gives the template a constructor that does not call another base of a strategy, such as avalanche's DER.
        super(StrategyTemplate, self).__init__(
            model=stream.model.to(device),
            optimizer=torch.optim.SGD(stream.model.parameters(), lr=1.0),  # replaced for every task
            criterion=nn.CrossEntropyLoss(),
            train_mb_size=self.options.batch_size,
            eval_mb_size=self.options.evaluation_batch_size,
            device=device,
            plugins=list(plugins or []),
            evaluator=evaluator or silent_evaluator(),
            eval_every=eval_every,
            peval_mode=peval_mode,
            **self.avalanche_arguments(),
        )
        self.task_features = features_for(self)
        self.setup()

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.taskwise = isinstance(cls.Options, type) and issubclass(cls.Options, TaskwiseOptions)


def check_options(cls: Any, options: TrainingOptions, stream: Stream) -> None:
    """Raise an error if options and stream are incompatible: by the checks of every strategy and by this one's ``check``."""
    check_inference(options, stream)
    if isinstance(options, LocalizationOptions):
        check_localization(options, stream.model.space())
    cls.check(options, stream)


def recipe_options(strategy: Any, model: str) -> TrainingOptions:
    """Return the default options of a strategy class: the recipe of its model, printed to stderr once."""
    name = registry.name_of(strategy)
    options: TrainingOptions = strategy.Options.for_model(model, strategy=name)
    recipe = recipes.recipe_of(model, strategy=name)
    if chosen := " ".join(f"{key}={value}" for key, value in recipe.items() if hasattr(options, key)):
        _say_once(f"Recipe of {model} for {name or strategy.__name__}: {chosen} (options=… replaces it)")
    return options


@cache
def _say_once(line: str) -> None:
    tell(line)


# -- Evaluation while a stream is learned --------------------------------------------------------------


class StreamAnswers:
    """A strategy's answers on every task, updated after each task that it learns; answers that cannot change are kept.

    A task that `ContinualStrategy.changed_by` does not name keeps its answers. So do learned tasks of a strategy that claims
    ``forget_free``, if a sample of their rows gets answers with the same bits again: a stream of T tasks costs T whole
    evaluations of learned tasks in place of T².

    Args:
        strategy: the strategy, before it learns the first task.
        upper_triangle: evaluate tasks before they are learned, too.

    Attributes:
        answers: the latest answers, by the names of the tasks that were evaluated.
        sampled: the answers to samples of learned tasks, right after they were learned.
        broken: a phrase for each time that ``forget_free`` was claimed and did not hold.
    """

    def __init__(self, strategy: ContinualStrategy, *, upper_triangle: bool = True) -> None:
        self._strategy, self._upper = strategy, upper_triangle
        self.answers: dict[str, Answers] = {}
        self.broken: list[str] = []
        self._learned: list[EncodedTask] = []
        self.sampled: dict[str, Answers] = {}

    def resume(self, learned: Sequence[EncodedTask], answers: dict[str, Answers], sampled: dict[str, Answers]) -> None:
        """Resume after the tasks ``learned``, with the ``answers`` and ``sampled`` of that moment."""
        self._learned, self.answers, self.sampled = list(learned), dict(answers), sampled

    def before(self, known: dict[str, Answers] | None = None) -> dict[str, Answers]:
        """Return the answers before the first task, on all tasks or on none.

        Args:
            known: the answers, if they are known; default: they are computed.
        """
        if self._upper:
            self.answers = dict(self._strategy.evaluate() if known is None else known)
        return dict(self.answers)

    def begun(self, learned: Sequence[EncodedTask]) -> dict[str, Answers]:
        """Return the answers of a strategy that has already learned the first tasks: on all tasks, or on those learned."""
        self._learned = list(learned)
        self.answers = dict(self._strategy.evaluate(None if self._upper else learned))
        if self._claims:
            self.sampled = self._answer_sample(learned)
        return dict(self.answers)

    def after(self, task: EncodedTask) -> dict[str, Answers]:
        """Return the answers after ``task`` was learned: on all tasks, or on those learned so far."""
        strategy, before = self._strategy, list(self._learned)
        self._learned.append(task)
        named = strategy.changed_by(task)
        wanted = [
            each
            for each in (strategy.stream.tasks if self._upper else self._learned)
            if named is None or each in named or each.name not in self.answers
        ]
        proved = [each for each in before if each in wanted] if self._claims else []
        changed = self._changed(proved)
        if changed:
            names = ", ".join(each.name for each in changed)
            self.broken.append(f"forget_free is True, but learning {task.name} changed the predictions for {names}")
        self.answers |= strategy.evaluate([each for each in wanted if each not in proved or each in changed])
        if self._claims:
            self.sampled |= self._answer_sample([task, *changed])
        return dict(self.answers)

    @property
    def _claims(self) -> bool:
        """Whether learned tasks must keep their answers."""
        # Where the stream withholds the task, a model for each task is chosen among those learned so far.
        return self._strategy.forget_free and (self._strategy.stream.scenario == "task" or not self._strategy.taskwise)

    def _changed(self, tasks: Sequence[EncodedTask]) -> list[EncodedTask]:
        """Return the tasks whose sample gets other answers than right after they were learned, in any bit."""
        again = self._answer_sample(tasks)
        return [task for task in tasks if not self.sampled[task.name].same_as(again[task.name])]

    def _answer_sample(self, tasks: Sequence[EncodedTask]) -> dict[str, Answers]:
        self._strategy.choose_batches = lambda task, batches: sample(batches, task.kind.checked_rows)
        try:
            return self._strategy.evaluate(tasks) if tasks else {}
        finally:
            self._strategy.choose_batches = None


def sample(batches: list[list[int]], count: int) -> list[list[int]]:
    """Return at most ``count`` of the rows, in batches of at most the same size.

    The rows are spread evenly over batches sorted by length. They are the same at every call, since the bits of a row's logits
    depend on the other rows in its batch.
    """
    rows, size = [row for batch in batches for row in batch], max(map(len, batches))
    chosen = [rows[place] for place in evenly(len(rows), count)]
    return [chosen[i : i + size] for i in range(0, len(chosen), size)]


__all__ = [
    "Answer",
    "ContinualStrategy",
    "EncodedTask",
    "Stream",
    "TaskwiseOptions",
    "Training",
    "undo_on_error",
]
