"""Avalanche's work: its training template around our batches, steps and evaluation.

The author of a strategy needs only `forgetfree.continual.strategy`. This module has the methods that Avalanche calls: data
loaders, the optimiser, the loops with their callbacks. Their order is Avalanche's own; a test compares every baseline with
Avalanche's loop bit by bit.
"""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from avalanche.models import DynamicModule
from avalanche.models.utils import is_multi_task_module
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.plugins.clock import Clock
from avalanche.training.templates import SupervisedTemplate
from avalanche.training.templates.base_sgd import PeriodicEval
from avalanche.training.utils import cycle
from torch import Tensor
from torch.utils.data import DataLoader

from forgetfree.continual.strategy_parts import Training, training_of, undo_on_error
from forgetfree.continual.stream import Owner, Stream
from forgetfree.continual.task_inference import (
    among_labels_of_batch,
    among_own_labels,
    answer_for,
    learn_features,
    writer_of,
)
from forgetfree.core.parameters import tensors_of
from forgetfree.core.trained import in_training
from forgetfree.data.rows import by_length
from forgetfree.display import brief
from forgetfree.errors import ConformanceError
from forgetfree.ledger.ledger import Ledger
from forgetfree.results.answers import Answers
from forgetfree.seeds import derive_seed
from forgetfree.training.encoded_task import EncodedTask, counts_tokens
from forgetfree.training.monitor import Monitor
from forgetfree.training.step import (
    WHOLE,
    Part,
    TrainingStep,
    deterministic,
    layer_checkpoints,
    parts,
    plan,
    training_mode,
)

if TYPE_CHECKING:
    from forgetfree.training.task_features import TaskFeatures


class StrategyTemplate(SupervisedTemplate):
    """The Avalanche side of `ContinualStrategy`, which has the constructor."""

    options: Any
    stream: Stream
    seed: int
    monitor: Monitor
    seconds: dict[str, float]
    updates: Counter[str]
    predictions: dict[str, Answers]
    owner: Owner
    ledger: Ledger | None
    task_features: TaskFeatures | None
    _step: TrainingStep
    #: The current training, between a task's `begin` and the end of its `commit`.
    training: Training | None
    #: Contexts that `begin` enters and that end after `commit`; an error, or an interrupt, in between passes through them.
    scope: ExitStack
    #: Chooses the batches of a task to evaluate; none: all.
    choose_batches: Callable[[EncodedTask, list[list[int]]], list[list[int]]] | None = None

    # -- Training --------------------------------------------------------------------------------------------

    def train(self, experiences: Any, eval_streams: Any = None, **kwargs: Any) -> Any:
        """Train on one experience, or on several in turn; see Avalanche."""
        try:
            with _at_work(self, self.options.precision), self.scope:
                return super().train(experiences, eval_streams, **kwargs)
        finally:
            self.training = self.model.current_task = None

    def avalanche_arguments(self) -> dict[str, Any]:
        """Return the constructor arguments of an Avalanche strategy that is also a base class, see `TemplateStrategy`."""
        return {}

    def check_experience(self, experience: Any) -> EncodedTask:
        """Return the task of an experience to be trained on.

        Raises:
            UsageError: it is not one of the stream's training experiences.
            TaskError: the ledger has the task already.
        """
        task = self.stream.task_of(experience, training=True)
        if self.ledger is not None:
            self.ledger.check_new(task.name)
        return task

    def _before_training_exp(self, **kwargs: Any) -> None:
        task = self.check_experience(self.experience)
        if self.task_features is not None:
            self.scope.enter_context(undo_on_error(self.task_features.undo()))
            learn_features(self.task_features, task, self.options.evaluation_batch_size)
        seed_generators(self.phase_seed("train", task))
        with among_own_labels(self, task):
            training = self.begin(task)
        if not isinstance(training, Training):
            raise ConformanceError(
                type(self).__name__,
                [
                    f"begin(task): expected a Training, got {brief(training)}. Return one, such as self.everything(task)."
                ],
            )
        self.training = training
        self.model.current_task = task.label
        self._updates = training.steps
        seed_generators(self.phase_seed(training.phase, task))  # Avalanche's plugins draw from them
        super()._before_training_exp(**kwargs)

    def _after_training_exp(self, **kwargs: Any) -> None:
        training = training_of(self.training)
        if training.finish is not None:
            self.training = training = training.finish()
        readout = tensors_of(self.model.readout_module(training.task.label))
        with among_own_labels(self, training.task):
            self.commit(training.task, training)
        for task in training.learns or (training.task,):
            self.note_learned(task, readout if task is training.task else {})
        self.training = None
        super()._after_training_exp(**kwargs)  # plugins still see which parameters are trained
        self.scope.close()

    def make_train_dataloader(self, num_workers: int = 0, **kwargs: Any) -> None:
        """Plan the batches of this task, split into parts where gradients are accumulated."""
        training, data = training_of(self.training), self.adapted_dataset
        lengths, counts = sizes_of(data, self.model)  # a plugin or a strategy may have put other rows into it
        seed = self.phase_seed(training.phase, training.task)
        batches = plan(lengths, training.options, self._updates, seed)
        self._parts = [part for batch in batches for part in parts(batch, training.options.accumulation, counts)]
        self._planned = self.dataloader = data_loader(data, [part.rows for part in self._parts], num_workers)

    def check_model_and_optimizer(self, **kwargs: Any) -> None:
        """Create a fresh optimiser for every task, over the strategy's trained parameters and nothing else."""
        training = training_of(self.training)
        self.model = self.model_adaptation()
        readout = list(training.readout)
        self._step = TrainingStep(
            self.model,
            training.trained,
            readout,
            training.options,
            self._updates,
            optimizer=training.optimizer,
            schedule=training.schedule,
        )
        self.optimizer = self._step.optimizer
        self.scope.enter_context(in_training(self.model, training.trained, readout, sampling=alone(self.plugins)))

    def training_epoch(self, **kwargs: Any) -> None:
        """Take all steps of one task, with Avalanche's callbacks around each.

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
                    self._step.zero_grad()
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
                if self._part.last:
                    self._step.keep()

    def _batches(self) -> Iterator[tuple[Any, Part]]:
        """Return the remaining mini-batches of the training, each with its `Part`."""
        loader, parts = self.dataloader, self._parts
        if loader is not self._planned:  # a plugin's own, such as replay's: repeated for the same number of steps
            return ((batch, WHOLE) for batch in islice(cycle(loader), self._updates))
        if done := self._step.done:
            ends = [number for number, part in enumerate(parts, 1) if part.last]
            parts = parts[ends[done - 1] :]
            loader = data_loader(loader.dataset, [part.rows for part in parts], loader.num_workers)
        return zip(loader, parts, strict=False)

    @contextmanager
    def training_steps(self) -> Iterator[None]:
        """Set up all steps of one task: the mode, the seed of dropout, the checkpoint to resume from, and the monitor."""
        training = training_of(self.training)
        training_mode(self.model, bool(training.options.dropout))
        seed = self.phase_seed(training.phase, training.task)
        torch.manual_seed(derive_seed(seed, "dropout"))
        with self.monitor.phase(training.task.name, training.phase, self._updates) as self._step.on_step:
            self._part = WHOLE
            resumes = alone(self.plugins) and self.resumable
            self._step.begin(self.monitor.checkpoint() if resumes else None, seed)
            self.monitor.log_rate(lambda step: self._step.rate)
            with (
                layer_checkpoints(self.model, training.options.gradient_checkpointing),
                deterministic(training.options.deterministic_training),
            ):
                yield
            self._step.finish()

    def _before_training_iteration(self, **kwargs: Any) -> None:
        super()._before_training_iteration(**kwargs)
        # Avalanche's RWalk leaves evaluation mode on, A-GEM training mode; without dropout, the model's flag shows neither.
        dropout = bool(training_of(self.training).options.dropout)
        if not (dropout and self.model.training):
            training_mode(self.model, dropout)

    def _unpack_minibatch(self) -> None:
        """Copy the mini-batch to the device once, with the inputs as the model prepares them."""
        x, y, *others = self.mbatch
        self._counts = self.model.counts(x)
        inputs, y, *_ = self.model.on_device((x, y, y))
        x = inputs if isinstance(inputs, Tensor) else inputs.x
        others = [*(each.to(self.device) for each in others[:-1]), *others[-1:]]  # but for the task labels
        self._inputs, self.mbatch = (x, inputs), [x, y, *others]

    def forward(self) -> Tensor:
        """Return logits of the mini-batch in float32, computed in the precision of the options."""
        answer = training_of(self.training).answer if self.is_training else self._answer
        task_labels = self.mbatch[-1] if len(self.mbatch) > 2 else 0
        x, inputs = self._inputs
        with among_labels_of_batch(self, self.mb_y) if self.is_training else nullcontext():
            if answer is not None:
                return answer(self.mb_x, task_labels)
            if self.mb_x is not x:  # a plugin's own
                inputs = self.mb_x
            # Avalanche would call the model without task labels, even where the batch has them.
            multi_task = not hasattr(self.experience, "task_labels") or is_multi_task_module(self.model)
            return cast(Tensor, self.model(inputs, task_labels) if multi_task else self.model(inputs))

    def criterion(self) -> Any:
        """Return the loss of the mini-batch."""
        own = training_of(self.training).loss if self.is_training else None
        return own(self.mb_output, self.mb_y) if own else super().criterion()

    def backward(self) -> None:
        """Compute the gradients of this part of the batch, weighted by its share."""
        self._step.backward(self.loss, self._part.share)

    def optimizer_step(self) -> None:
        """Update the weights."""
        self._step.update()

    # -- Evaluation ------------------------------------------------------------------------------------------

    def eval(self, experiences: Any, **kwargs: Any) -> Any:
        """Evaluate on one experience, or on several in turn; see Avalanche."""
        current = self.model.current_task  # during training, the task in training
        self.model.to(self.device)  # once: a search through all modules for every task takes longer with every readout
        self._grows = any(isinstance(module, DynamicModule) for module in self.model.modules())
        try:
            with _at_work(self, "fp32"):
                return super().eval(experiences, **kwargs)
        finally:
            self.model.current_task = current

    def model_adaptation(self, model: Any = None) -> Any:
        """Let modules grow with the classes, and put the model on its device; in evaluation only if a module can grow."""
        return super().model_adaptation(model) if self.is_training or self._grows else self.model

    def make_eval_dataloader(self, num_workers: int = 0, **kwargs: Any) -> None:
        """Plan all rows once, rows of similar length together."""
        data = self.adapted_dataset
        rows = getattr(self.task, self.experience.origin_stream.name, None)
        self._rows = rows if rows is not None and len(rows) == len(data) else None
        lengths = sizes_of(data, self.model)[0] if self._rows is None else self._rows.lengths
        batches = by_length(lengths, self.eval_mb_size, by_tokens=counts_tokens(self.model))
        if self.choose_batches is not None:
            batches = self.choose_batches(self.task, batches)
        batches = batches[::-1]  # longest rows first, so that the largest memory is allocated once
        self._order = [row for batch in batches for row in batch]
        self.dataloader = data_loader(data, batches, num_workers)

    def _before_eval_exp(self, **kwargs: Any) -> None:
        self.model.current_task = self.task.label
        super()._before_eval_exp(**kwargs)

    def eval_epoch(self, **kwargs: Any) -> None:
        """Answer all rows of one task with the task's model, and store the answers in the rows' order."""
        self._collected: list[tuple[Tensor, Tensor, Tensor]] = []
        batches = ((b[0].to(self.device), b[-1].to(self.device) if len(b) > 2 else 0) for b in self.dataloader)
        showing = self.monitor.phase(self.task.name, "evaluate", len(self.dataloader))
        kind, rows = self.task.kind, self._rows
        if rows is not None and len(self._order) < len(rows):
            rows = rows.subset(sorted(self._order))
        with showing as self._on_evaluated, answer_for(self, self.task, batches) as self._answer:
            super().eval_epoch(**kwargs)
            logits, labels, counts = (torch.cat(each).cpu() for each in zip(*self._collected, strict=True))
            order = torch.argsort(torch.tensor(self._order, device="cpu").repeat_interleave(counts), stable=True)
            answers = kind.answers(self.task.definition, logits[order], labels[order], rows)
            if rows is not None:
                passes = {"batch_size": self.eval_mb_size, "precision": "fp32"} | writer_of(self._answer, self.monitor)
                answers = kind.with_texts(answers, self.task.definition, self.model, rows, **passes)
        self.predictions[self.task.name] = answers

    def _after_eval_iteration(self, **kwargs: Any) -> None:
        kept = self.task.kind.collected(self.mb_output, self.mb_y)
        self._collected.append((kept, self.mb_y, self._counts * self.model.readout_of(self.task.label).lines))
        self._on_evaluated(len(self._collected), math.nan)
        super()._after_eval_iteration(**kwargs)


@contextmanager
def _at_work(strategy: StrategyTemplate, precision: str) -> Iterator[None]:
    model = strategy.model
    before = model.precision
    model.precision = precision  # of every forward pass, also of Avalanche's plugins
    try:
        # A data loader draws on the CPU. If that is the default device, a context would only slow down each operation.
        with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
            yield
    finally:
        model.precision = before


def silent_evaluator() -> EvaluationPlugin:
    """Return Avalanche's evaluation without metrics and loggers, the default of a strategy."""
    with warnings.catch_warnings():  # it warns that it will not log anything, which is intended
        warnings.simplefilter("ignore")
        return EvaluationPlugin()


# -- Batches --------------------------------------------------------------------------------------------


def data_loader(data: Any, batches: Sequence[Sequence[int]], num_workers: int) -> Any:
    """Return a data loader of the batches, each a list of row numbers."""
    return DataLoader(
        data,
        batch_sampler=[list(batch) for batch in batches],
        collate_fn=data.collate_fn,
        num_workers=num_workers,
        generator=torch.Generator(),  # the loader must draw neither from dropout's generator nor during training
    )


def sizes_of(data: Any, model: Any) -> tuple[list[int], list[int] | None]:
    """Return the numbers of tokens and of labels of each row of a data set; 0 and ``None`` where rows are no texts."""
    if getattr(model, "tokens", None) is None:
        return [0] * len(data), None
    rows = [data[i] for i in range(len(data))]
    counts = [torch.as_tensor(row[1]).numel() for row in rows]
    return [int(model.tokens.attention_mask(row[0].unsqueeze(0)).sum()) for row in rows], counts


def alone(plugins: Iterable[Any]) -> bool:
    """Return whether there are only Avalanche's default plugins; any other may read and change batches and gradients."""
    return all(isinstance(plugin, (EvaluationPlugin, PeriodicEval, Clock)) for plugin in plugins)


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
