"""The base of all strategies: Avalanche's training template around our steps, batches and evaluation.

A strategy is one final class in one file. It says how it prepares for a task (`prepare`), which parameters it trains
(`parameters`), what it does around a step and after the task (`before_step`, `after_step`, `commit`), and what the
model must be to answer for a task (`enter_evaluation`, `leave_evaluation`). Everything else, and all of Avalanche's
plugins, evaluators and loggers, is the same for all.

Where the stream withholds the task at inference (its ``scenario`` is ``class`` or ``domain``), a strategy with one model
for all tasks answers with it. One with a model per task (`taskwise`) answers with that of the last task, every label read
by the readout of the last task that has it; or, with ``task_inference=router``, each row with the model of the task
whose answer, among its own labels, has the least entropy as a share of the largest they could have. During
training, the task in training is the last. Labels of no such task get the lowest logit there is; before any task, the
untrained model answers.
"""

from __future__ import annotations

import math
import random
import reprlib
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from avalanche.training.plugins import EvaluationPlugin, LRSchedulerPlugin
from avalanche.training.templates import SupervisedTemplate
from avalanche.training.utils import cycle
from torch import Tensor, nn
from torch.utils.data import DataLoader

from forgetfree.continual.experiences import check_experiences, part_of
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.core.readout_model import LOWEST, ReadoutModel
from forgetfree.core.steps import OnStep, check_loss, trainable
from forgetfree.core.tensors import load_tensors_, tensors_of
from forgetfree.data.sampling import by_length
from forgetfree.display import brief
from forgetfree.errors import ConformanceError, OptionError, RunError, UsageError
from forgetfree.files import StrPath, write_json
from forgetfree.json_file import check, read_json
from forgetfree.learning.fine_tuning import fine_tuned_key, fine_tuned_state, full_steps
from forgetfree.learning.monitor import Monitor, Phase
from forgetfree.learning.training import Part, TrainingOptions, Update, parts, plan, training_mode
from forgetfree.ledger import Ledger
from forgetfree.models.state import ModelState, StateStore
from forgetfree.options import option
from forgetfree.results.metrics import Predictions
from forgetfree.seeds import derive_seed


@dataclass(frozen=True, kw_only=True)
class TaskwiseOptions(TrainingOptions):
    """What strategies with a model per task take beside."""

    task_inference: Literal["last", "router"] = option(
        "last",
        "where the stream withholds the task: the model of the last task (for unions, the one with all tasks), or for each row "
        "that of the task whose answer has the least entropy",
    )


class ContinualStrategy(SupervisedTemplate):
    """Base of all strategies. Subclasses set `Options` and override the hooks below; none overrides the constructor.

    Without any override it trains everything on each task in turn.

    Args:
        stream: tasks and model. The model is trained in place, from the stream's θ_pre. Several strategies on one stream take
            turns: whichever is used finds in the model what it left there itself.
        options: how, see the subclass's ``Options``; default: its defaults.
        seed: of batches, dropout and everything else that is drawn.
        device: where to train.
        plugins: Avalanche plugins.
        evaluator: an Avalanche ``EvaluationPlugin`` for its metrics and loggers; default: none.
        monitor: hears of phases and steps.
        store: where fine-tuned models are kept and shared; default: in memory.
        eval_every, peval_mode: Avalanche's periodic evaluation.
    """

    Options: ClassVar[type[TrainingOptions]] = TrainingOptions
    #: True where later tasks leave every earlier task's logits as they are, bit for bit.
    forget_free: ClassVar[bool] = False
    #: True where each task is answered by a model of its own, chosen by the task; `Options` are `TaskwiseOptions` then.
    taskwise: ClassVar[bool] = False
    #: True where a task may be learned in parts, which Avalanche's online streams cut it into, one `train` after another.
    online: ClassVar[bool] = False
    #: What the main training loop is called in progress and timings.
    training_phase: ClassVar[Phase] = "train"

    def __init__(
        self,
        *,
        stream: Stream,
        options: TrainingOptions | None = None,
        seed: int = 0,
        device: str | torch.device = "cpu",
        plugins: Sequence[Any] | None = None,
        evaluator: Any = None,
        monitor: Monitor | None = None,
        store: StateStore | None = None,
        eval_every: int = -1,
        peval_mode: str = "epoch",
    ) -> None:
        self.options: Any = options or self.Options()
        self.check(self.options, stream)
        if any(isinstance(plugin, LRSchedulerPlugin) for plugin in plugins or ()):
            raise OptionError(
                "LRSchedulerPlugin moves the rate of one optimiser, and there is an optimiser of its own for every task. Set "
                "schedule=linear or constant, and warmup."
            )
        self.stream = stream
        self.device = torch.device(device)
        #: What this strategy left in the model, while it is another's turn.
        self.set_aside: ModelState | None = None
        #: Whether it is training or evaluating.
        self.is_busy = False
        stream.turn.take(self)
        self.seed = seed
        self.monitor = monitor or Monitor()
        self.shares_store = store is not None
        self.store = store or StateStore()
        self.space = stream.model.space()
        self.pristine = stream.pristine
        # What plugins do to training is not in the key of a shared model.
        self.has_plugins = bool(plugins)
        self.seconds: dict[Phase, float] = {}
        self.predictions: dict[str, Predictions] = {}
        self.ledger: Ledger | None = None
        self._training_scope = ExitStack()
        #: The tasks learned so far, in order.
        self.learned: list[EncodedTask] = []
        self._readouts: dict[str, dict[str, Tensor]] = {}
        self._in_training: EncodedTask | None = None
        self._in_evaluation: EncodedTask | None = None
        self._suspended: Any = None
        self._readout_in_training: dict[str, Tensor] | None = None
        self._routing = False
        self._unseen: list[int] = []
        self._collected: list[tuple[Tensor, Tensor]] = []
        super().__init__(
            model=stream.model.to(device),
            optimizer=torch.optim.SGD(stream.model.parameters(), lr=1.0),  # replaced for every task
            criterion=nn.CrossEntropyLoss(),
            train_mb_size=self.options.batch_size,
            eval_mb_size=self.options.evaluation_batch_size,
            device=device,
            plugins=[*self.own_plugins(), *(plugins or [])],
            evaluator=evaluator or _silent_evaluator(),
            eval_every=eval_every,
            peval_mode=peval_mode,
            **self.template_arguments(),
        )
        self.setup()

    # -- What a strategy says ------------------------------------------------------------------------------

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Raise where options and stream do not go together; asked before anything is trained."""

    def setup(self) -> None:
        """Called once, at the end of the constructor."""

    def own_plugins(self) -> list[Any]:
        """Avalanche plugins the strategy is made of; those of the user come after."""
        return []

    def template_arguments(self) -> dict[str, Any]:
        """Arguments of an Avalanche strategy that this one also inherits from."""
        return {}

    def prepare(self, task: EncodedTask) -> None:
        """Called before a task is trained, with the model as the last task left it."""

    def parameters(self, task: EncodedTask) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """What the optimiser trains: of the backbone, and of the readout."""
        readout = self.task_model.readout_module(task.label)
        return self.space.parameters(self.task_model.backbone), list(readout.parameters())

    def gradients(self, task: EncodedTask) -> list[nn.Parameter]:
        """The model's parameters that need gradients; by default those trained."""
        return [parameter for group in self.parameters(task) for parameter in group]

    def steps(self, task: EncodedTask) -> int:
        """Updates in the main training loop."""
        return self.full_steps(task)

    def training_options(self) -> TrainingOptions:
        """The options of the main training loop; by default the strategy's own."""
        options: TrainingOptions = self.options
        return options

    def before_step(self) -> None:
        """Called before each update, gradients ready."""

    def after_step(self) -> None:
        """Called after each update."""

    def commit(self, task: EncodedTask) -> None:
        """Called after a task was trained."""

    def suspend(self) -> None:
        """Make the model what it was before the current task: called during training, to evaluate others."""

    def snapshot(self) -> Any:
        """The model during training, for `resume`."""
        return ModelState.of(self.task_model)

    def resume(self, snapshot: Any) -> None:
        """Undo `suspend`."""
        snapshot.load_(self.task_model)

    def enter_evaluation(self, task: EncodedTask) -> None:
        """Make the model the one that answers for ``task``."""

    def leave_evaluation(self, task: EncodedTask) -> None:
        """Undo `enter_evaluation`."""

    def stale(self, learned: EncodedTask) -> list[EncodedTask]:
        """The tasks whose answers may have changed by learning ``learned``: by default all."""
        return list(self.stream.tasks)

    def extra_results(self) -> dict[str, Any]:
        """More to say in results.json at the end of the stream."""
        return {}

    def save(self, directory: StrPath) -> None:
        """Write what is needed to answer later: by default all that training may change."""
        ModelState.of(self.task_model).save(Path(directory) / "checkpoint.safetensors")
        write_json(Path(directory) / "learned.json", [task.name for task in self.learned])

    def load(self, directory: StrPath) -> None:
        """Answer as the strategy did that wrote ``directory`` by `save`; to be called on a new one.

        Raises:
            ForgetfreeError: a file is missing or damaged, or of another model or stream; nothing is changed.
        """
        path = Path(directory) / "learned.json"
        names = read_json(path, RunError, "Restore it from a copy, or run the stream again.", _check_learned)
        learned = self.tasks_named(names, path)
        state = ModelState.load(Path(directory) / "checkpoint.safetensors")
        state.check_fits(self.task_model, names)
        state.load_(self.task_model)
        for task in learned:
            self.note_learned(task, tensors_of(self.task_model.readout_module(task.label)))

    def bytes_kept(self) -> int:
        """Bytes kept to answer for the tasks learned so far and to learn the next, beside θ_pre itself."""
        return ModelState.of(self.task_model).size_in_bytes if self.learned else 0

    # -- What strategies use -------------------------------------------------------------------------------

    @property
    def model(self) -> ReadoutModel:
        """The stream's model, with what this strategy left in it: to ask for it is to take one's turn."""
        self.stream.turn.take(self)
        return self._model

    @model.setter
    def model(self, model: ReadoutModel) -> None:
        self._model = model

    @property
    def task_model(self) -> ReadoutModel:
        """The model."""
        return self.model

    @property
    def task(self) -> EncodedTask:
        """The task of the current experience."""
        return self.stream.task_of(self.experience)

    def tasks_named(self, names: Iterable[str], path: Path) -> list[EncodedTask]:
        """The stream's tasks of these names, which a file says were learned.

        Raises:
            RunError: the stream lacks one.
        """
        tasks = {task.name: task for task in self.stream.tasks}
        if missing := [name for name in names if name not in tasks]:
            raise RunError(
                f"{path} says that task {brief(missing[0])} was learned, which this stream lacks: it has {', '.join(tasks)}. "
                "Load it with its stream."
            )
        return [tasks[name] for name in names]

    def note_learned(self, task: EncodedTask, readout: dict[str, Tensor]) -> None:
        """``task`` can be answered from now on, by this readout; for `load` too."""
        self.learned = [*(each for each in self.learned if each is not task), task]
        self._readouts[task.name] = readout

    def full_steps(self, task: EncodedTask) -> int:
        """``options.steps``, or the paper's rule."""
        return full_steps(self.options, task)

    def phase_seed(self, phase: Phase, task: EncodedTask) -> int:
        """The seed of one phase of one task, or of one part of it."""
        part = None if self.experience is None else part_of(self.experience)
        return derive_seed(self.seed, phase, task.name, *([] if part is None else [part]))

    @contextmanager
    def phase(self, name: Phase, task: EncodedTask, steps: int) -> Iterator[OnStep]:
        """Time a phase and show it."""
        start = time.perf_counter()
        try:
            with self.monitor.phase(task.name, name, steps) as on_step:
                yield on_step
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def fine_tuned(self, task: EncodedTask) -> ModelState:
        """θ_ft of ``task``: θ_pre fine-tuned on it alone, without plugins.

        Made once, shared by all strategies through the store, if one was given. The model holds θ_pre afterwards.
        """
        if not self.shares_store:
            return self._fine_tune(task)
        return self.store.get_or_make(self.fine_tuned_key(task), lambda: self._fine_tune(task))

    def fine_tuned_key(self, task: EncodedTask) -> str:
        """Names everything that determines the fine-tuned model, as a digest; without a shared store, just the task."""
        if not self.shares_store:
            return task.name
        return fine_tuned_key(self.stream.loaded, task, self.pristine, self.options, self.seed, self.device)

    def _fine_tune(self, task: EncodedTask) -> ModelState:
        seed = self.phase_seed("fine_tune", task)
        with self.phase("fine_tune", task, self.full_steps(task)) as on_step:
            return fine_tuned_state(self.stream.loaded, task, self.pristine, self.options, seed, on_step)

    def evaluate(self, tasks: Sequence[EncodedTask] | None = None) -> dict[str, Predictions]:
        """Answers on the test rows of ``tasks`` (default: all), by Avalanche's evaluation loop."""
        stream = self.stream.benchmark.test_stream
        self.predictions = {}
        experiences = [stream[task.label] for task in (self.stream.tasks if tasks is None else tasks)]
        if experiences:
            self.eval(experiences)
        return self.predictions

    # -- Avalanche's template: training ----------------------------------------------------------------------

    def train(self, experiences: Any, eval_streams: Any = None, **kwargs: Any) -> Any:
        """Train on one experience, or on several in turn; see Avalanche."""
        check_experiences(experiences)
        try:
            with self._at_work():
                return super().train(experiences, eval_streams, **kwargs)
        except BaseException:  # an interrupt too: what earlier tasks own must be as it was
            if self._in_training is not None:
                self.suspend()
            raise
        finally:
            self._training_scope.close()
            self._in_training = self.task_model.current_task = None

    def check_experience(self, experience: Any) -> EncodedTask:
        """The task of an experience that is to be trained on.

        Raises:
            UsageError: it is none of the stream's training experiences, or part of one, and the strategy is not `online`.
        """
        task, part = self.stream.task_of(experience, training=True), part_of(experience)
        if part is not None and not self.online:
            raise UsageError(
                f"{type(self).__name__} learns a task at once, from all of its rows, got part {part} of {task.name} "
                f"({len(experience.dataset)} of {len(task.train)} rows). Train on the experience that it was cut from, or by a "
                "strategy that learns in parts: continual-ft, replay, der, cumulative."
            )
        return task

    def _before_training_exp(self, **kwargs: Any) -> None:
        task = self.check_experience(self.experience)
        _seed_generators(self.phase_seed(self.training_phase, task))  # Avalanche's plugins draw from them
        self.prepare(task)
        self._in_training = task
        self.task_model.current_task = task.label
        super()._before_training_exp(**kwargs)

    def _after_training_exp(self, **kwargs: Any) -> None:
        task = self.task
        readout = tensors_of(self.task_model.readout_module(task.label))
        self.commit(task)
        self.note_learned(task, readout)
        self._in_training = None
        super()._after_training_exp(**kwargs)  # plugins still see which parameters are trained
        self._training_scope.close()

    def make_train_dataloader(self, num_workers: int = 0, **kwargs: Any) -> None:
        """The planned batches of this task, cut into parts where gradients are accumulated."""
        task, data, options = self.task, self.adapted_dataset, self.training_options()
        whole = data is self.experience.dataset and part_of(self.experience) is None
        lengths = task.train.lengths if whole else self._lengths(data)
        batches = plan(lengths, options, self._updates(), self.phase_seed(self.training_phase, task))
        self._parts = [part for batch in batches for part in parts(batch, options.accumulation)]
        self._planned = self.dataloader = DataLoader(
            data,
            batch_sampler=[list(part.rows) for part in self._parts],
            collate_fn=data.collate_fn,
            num_workers=num_workers,
            generator=torch.Generator(),  # the loader must not draw from the generator of dropout
        )

    def check_model_and_optimizer(self, **kwargs: Any) -> None:
        """A fresh optimiser for every task, over what the strategy trains and nothing else."""
        task, options = self.task, self.training_options()
        self.model = self.model_adaptation()
        backbone, readout = self._checked_parameters(task)
        anchors = [parameter.detach().clone() for parameter in backbone] if options.l1 else []
        self._update = Update(backbone, readout, options, self._updates(), anchors)
        self.optimizer = self._update.optimizer
        self._training_scope.enter_context(trainable(self.model, self.gradients(task)))

    def _checked_parameters(self, task: EncodedTask) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        given: Any = self.parameters(task)
        groups: list[list[Any]] = []
        if isinstance(given, tuple):
            groups = [list(each) if isinstance(each, Iterable) else [None] for each in given]
        if len(groups) != 2 or not all(isinstance(each, nn.Parameter) for group in groups for each in group):
            raise ConformanceError(
                type(self).__name__,
                [
                    "parameters(task): expected two lists of parameters, of the backbone and of the readout, got "
                    f"{reprlib.repr(given)}. Leave the hook out to train everything."
                ],
            )
        return groups[0], groups[1]

    def training_epoch(self, **kwargs: Any) -> None:
        """All steps of one task, with Avalanche's callbacks around each.

        An iteration is one forward pass; with ``accumulation`` several of them make one update.
        """
        with self.training_steps():
            for batch, part in self._batches():
                self._part = part
                if self._stop_training:
                    break
                self.mbatch = batch
                self._unpack_minibatch()
                self._before_training_iteration(**kwargs)
                if self._part.first:
                    self.model.zero_grad()
                    self.optimizer.zero_grad()
                self.loss = self._make_empty_loss()

                self._before_forward(**kwargs)
                self.mb_output = self.forward()
                self._after_forward(**kwargs)

                self.loss = self.loss + self.criterion()
                self._before_backward(**kwargs)
                self.backward()
                self._after_backward(**kwargs)

                if self._part.last:
                    self._before_update(**kwargs)
                    self.optimizer_step()
                    self._after_update(**kwargs)
                self._after_training_iteration(**kwargs)

    def _updates(self) -> int:
        """Those of the task; for a part of it, its share by rows, rounded up."""
        task, steps = self.task, self.steps(self.task)
        if part_of(self.experience) is None:
            return steps
        return math.ceil(steps * len(self.experience.dataset) / len(task.train))

    def _lengths(self, data: Any) -> list[int]:
        """Tokens per row of rows that a plugin put together; 0 where rows are no texts."""
        tokens = getattr(self.task_model, "tokens", None)
        if tokens is None:
            return [0] * len(data)
        return [int(tokens.attention_mask(data[i][0].unsqueeze(0)).sum()) for i in range(len(data))]

    @contextmanager
    def training_steps(self) -> Iterator[None]:
        """Around all steps of one task: the mode, the draws of dropout, and what the monitor hears."""
        seed, steps = self.phase_seed(self.training_phase, self.task), self._updates()
        training_mode(self.model, self.options.dropout)
        torch.manual_seed(derive_seed(seed, "dropout"))
        self._part, self._step, self._step_loss = _WHOLE, 0, 0.0
        with self.phase(self.training_phase, self.task, steps) as self._on_step:
            yield

    def _batches(self) -> Iterator[tuple[Any, Part]]:
        if self.dataloader is self._planned:
            yield from zip(self.dataloader, self._parts, strict=False)
        else:  # a plugin's own loader, such as replay's: round and round, for as many steps
            yield from ((batch, _WHOLE) for batch in islice(cycle(self.dataloader), self._updates()))

    def _before_training_iteration(self, **kwargs: Any) -> None:
        super()._before_training_iteration(**kwargs)
        # Avalanche's RWalk leaves evaluation mode on, A-GEM training mode; without dropout, the model's flag tells neither.
        if not (self.options.dropout and self.model.training):
            training_mode(self.model, self.options.dropout)

    def forward(self) -> Tensor:
        """Logits of the mini-batch in float32, computed in the precision of the options."""
        if self._routing:
            return self._route()
        logits = self._answer()
        if self._unseen:
            logits[:, self._unseen] = LOWEST
        return logits

    def _answer(self) -> Tensor:
        logits: Tensor
        if hasattr(self.experience, "task_labels"):
            logits = super().forward()
        else:  # Avalanche would call the model without task labels, even where the batch has them
            logits = self.model(self.mb_x, self.mbatch[-1] if len(self.mbatch) > 2 else 0)
        return logits

    def backward(self) -> None:
        """Gradients of this part of the batch, by its share."""
        self._update.backward(self.loss * self._part.share)
        self._step_loss += check_loss(self.loss, self._step + 1) * self._part.share

    def optimizer_step(self) -> None:
        """Move the weights."""
        self.before_step()
        self._update.before_step()
        self._update.step()
        self.after_step()
        self._step += 1
        self._on_step(self._step, self._step_loss)
        self._step_loss = 0.0

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        model = self.model
        before = model.precision, self.is_busy
        # Of every forward pass, those of Avalanche's plugins too.
        model.precision, self.is_busy = self.options.precision, True
        try:
            yield
        finally:
            model.precision, self.is_busy = before

    # -- Avalanche's template: evaluation --------------------------------------------------------------------

    def eval(self, experiences: Any, **kwargs: Any) -> Any:
        """Evaluate on one experience, or on several in turn; see Avalanche."""
        check_experiences(experiences)
        current = self.task_model.current_task  # during training, that in training
        try:
            with self._at_work():
                return super().eval(experiences, **kwargs)
        finally:  # an interrupt, too, must not leave the model as another task needs it
            self._end_evaluation()
            self.task_model.current_task = current

    def make_eval_dataloader(self, num_workers: int = 0, **kwargs: Any) -> None:
        """All rows once, rows of similar length together."""
        data = self.adapted_dataset
        rows = getattr(self.task, self.experience.origin_stream.name, None)
        lengths = rows.lengths if rows is not None and len(rows) == len(data) else self._lengths(data)
        batches = by_length(lengths, self.eval_mb_size)
        self._order = [row for batch in batches for row in batch]
        self.dataloader = DataLoader(
            data,
            batch_sampler=batches,
            collate_fn=data.collate_fn,
            num_workers=num_workers,
            generator=torch.Generator(),  # evaluation during training must not draw from it either
        )

    def _before_eval_exp(self, **kwargs: Any) -> None:
        self._in_evaluation = self.task
        self.task_model.current_task = self._in_evaluation.label
        if self._task_is_withheld():
            if self.taskwise:
                self._answer_for_all()
            elif self._in_training is None:  # during training, the model as it is
                self.enter_evaluation(self.task)
        elif self._in_training is not self.task:
            if self._in_training is not None:
                self._suspended = self.snapshot()
                self.suspend()
            self.enter_evaluation(self.task)
        self._collected = []
        super()._before_eval_exp(**kwargs)

    def _task_is_withheld(self) -> bool:
        return self.stream.scenario != "task"

    def _answer_for_all(self) -> None:
        """Make the model one that answers whatever the task; during training, the task in training is the last."""
        self._readout_in_training = tensors_of(self.task_model.readout_module(0))
        self._routing = self.options.task_inference == "router" and bool(self.learned)
        if self._routing:
            if self._in_training is not None:
                self._suspended = self.snapshot()
        else:
            if self._in_training is None and self.learned:
                self.enter_evaluation(self.learned[-1])
            self._assemble_readout()

    @torch.no_grad()
    def _assemble_readout(self) -> None:
        """Each label's row from the last task that has it; labels of no learned task are to get the lowest logit."""
        readouts = [(task, self._readouts[task.name]) for task in self.learned]
        if self._in_training is not None and self._readout_in_training is not None:
            readouts.append((self._in_training, self._readout_in_training))
        if not readouts:
            return
        for name, tensor in self.task_model.readout_module(0).state_dict(keep_vars=True).items():
            for task, readout in readouts:
                rows = list(task.classes)
                tensor[rows] = readout[name][rows].to(tensor.device)
        seen = {label for task, _ in readouts for label in task.classes}
        self._unseen = [label for label in range(self.task_model.heads[0].n_labels) if label not in seen]

    def _route(self) -> Tensor:
        """Each row's logits by the task whose answer has the least entropy, as a share of its labels' largest entropy."""
        answers, entropies = [], []
        candidates = [*self.learned, *([] if self._in_training is None else [self._in_training])]
        for task in candidates:
            with self._answering(task):
                logits = self._answer()
            hidden = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
            hidden[list(task.classes)] = False
            logits = logits.masked_fill(hidden, LOWEST)
            chances = logits.softmax(1)
            entropies.append(torch.special.entr(chances).sum(1) / math.log(max(2, len(task.classes))))
            answers.append(logits)
        best = torch.stack(entropies).argmin(0)
        return torch.stack(answers)[best, torch.arange(len(best), device=best.device)]

    @contextmanager
    def _answering(self, task: EncodedTask) -> Iterator[None]:
        """The model of one candidate of the router, inside."""
        if task is self._in_training:
            yield  # the model as it is
            return
        if self._suspended is not None:
            self.suspend()
        try:
            self.enter_evaluation(task)
            load_tensors_(self.task_model.readout_module(0), self._readouts[task.name])
            yield
        finally:
            self.leave_evaluation(task)
            if self._suspended is not None:
                self.resume(self._suspended)

    def _end_evaluation(self) -> None:
        if self._in_evaluation is None:
            return
        withheld, training = self._task_is_withheld(), self._in_training
        if not self._routing and (training is None if withheld else training is not self._in_evaluation):
            self.leave_evaluation(self._in_evaluation)
        if self._readout_in_training is not None:
            load_tensors_(self.task_model.readout_module(0), self._readout_in_training)
        if self._suspended is not None:
            self.resume(self._suspended)
        self._suspended = self._in_evaluation = self._readout_in_training = None
        self.task_model.current_task = None if training is None else training.label
        self._routing, self._unseen = False, []

    def eval_epoch(self, **kwargs: Any) -> None:
        """Evaluation of one task."""
        with self.phase("evaluate", self.task, len(self.dataloader)) as self._on_evaluated:
            super().eval_epoch(**kwargs)

    def _after_eval_iteration(self, **kwargs: Any) -> None:
        self._collected.append((self.mb_output.cpu(), self.mb_y.cpu()))
        self._on_evaluated(len(self._collected), math.nan)
        super()._after_eval_iteration(**kwargs)

    def _after_eval_exp(self, **kwargs: Any) -> None:
        in_order = torch.argsort(torch.tensor(self._order))
        logits, labels = (torch.cat(column)[in_order].numpy() for column in zip(*self._collected, strict=True))
        self.predictions[self.task.name] = Predictions(logits, labels)
        self._end_evaluation()
        super()._after_eval_exp(**kwargs)


#: What a forward pass takes of a batch that is not cut.
_WHOLE = Part((), 1.0, True, True)


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _silent_evaluator() -> EvaluationPlugin:
    with warnings.catch_warnings():  # it warns that it will not log anything: so it is meant
        warnings.simplefilter("ignore")
        return EvaluationPlugin()


def _check_learned(names: Any) -> None:
    right = isinstance(names, list) and all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    check("the content", names, right, "a list of different task names")
