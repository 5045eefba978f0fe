"""Selects the model that answers the rows of a task: its own, or a common one where the stream withholds the task at inference.

Where the task is withheld (the stream's ``scenario`` is ``class`` or ``domain``), a strategy with one model for all tasks
answers with it. A strategy with a model per task (`taskwise`) answers with the model of the last task, where each label has the
readout of the last task with that label; or it infers a task for each row and answers with this task's model:

- ``task_inference=router``: the task whose answer, among its own labels, has the lowest entropy as a share of its maximum; for
  a sentence whose words are labelled, the mean over its words.
- ``task_inference=lda``: the most likely task by θ_pre's features (`forgetfree.training.task_features`).

Then no row is answered with labels of two tasks, so a task is also learned among its own labels alone (`among_own_labels`).
During training, the task in training is the last. Labels of no learned task get the lowest logit; before the first task, the
untrained model answers.

Where texts are the answers, there are no labels to distinguish: the last task's model writes, or with ``lda`` the model of the
task with the most similar prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from forgetfree.continual.strategy_parts import Answer
from forgetfree.continual.stream import Stream
from forgetfree.core.parameters import load_tensors_, tensors_of
from forgetfree.core.readout_model import LOWEST, among
from forgetfree.data.rows import by_length, representative
from forgetfree.errors import OptionError
from forgetfree.options import option
from forgetfree.training.encoded_task import EncodedTask, share_of_entropy
from forgetfree.training.monitor import Monitor
from forgetfree.training.training_options import TrainingOptions

if TYPE_CHECKING:
    from forgetfree.training.task_features import TaskFeatures

#: Maximum number of training rows per task for lda.
LDA_ROWS = 400
#: How the task of a row is inferred; ``last``: it is not, and the last task's model answers.
Inference = Literal["last", "router", "lda"]


class TaskwiseOptions(TrainingOptions):
    """Options of strategies with a model per task, in addition to those of training."""

    task_inference: Inference = option(
        "last",
        "which task's model predicts when the task is unknown; last: that of the last task (for unions, the model "
        "with all tasks); router: for each example, that of the task whose prediction has the lowest entropy; lda: "
        "that of the task whose examples are most similar in the middle layer of θ_pre",
    )


def inference_of(options: TrainingOptions, stream: Stream) -> Inference:
    """Return how a strategy with these options infers the task of a row, where the stream withholds it."""
    if stream.scenario == "task":
        return "last"
    inference: Inference = getattr(options, "task_inference", "last")  # a plug-in's own field counts, too
    return inference


def check_inference(options: TrainingOptions, stream: Stream) -> None:
    """Raise ``OptionError`` if tasks would be inferred by the entropy of answers that are texts."""
    written = [task.name for task in stream.tasks if task.kind.answer == "text"]
    if written and inference_of(options, stream) == "router":
        raise OptionError(
            f"task_inference=router uses the entropy of label predictions, but {written[0]!r} is a generation task. "
            "Use task_inference=lda, which uses the prompt."
        )


def features_for(strategy: Any) -> TaskFeatures | None:
    """Return the `TaskFeatures` of θ_pre, which the model holds now; ``None`` unless the options ask for ``lda``."""
    options, stream = strategy.options, strategy.stream
    if inference_of(options, stream) != "lda":
        return None
    from forgetfree.training.task_features import TaskFeatures

    return TaskFeatures(strategy.model, stream.loaded.fingerprint)


def learn_features(features: TaskFeatures, task: EncodedTask, batch_size: int) -> None:
    """Add the features of a task that is about to be learned."""
    rows = representative(task.train.targets, LDA_ROWS)
    features.learn(task.name, task.train.subset(rows), batch_size)


def among_own_labels(strategy: Any, task: EncodedTask) -> AbstractContextManager[object]:
    """Return a context in which the model answers with a task's labels alone, if it also does so at inference."""
    alone = strategy.stream.scenario == "class" and _infers_tasks(strategy)
    labels = (task.classes or None) if alone else None
    context: AbstractContextManager[object] = strategy.model.answering_with(labels)
    return context


def among_labels_of_batch(strategy: Any, labels: Tensor) -> AbstractContextManager[object]:
    """Return `among_own_labels` for a batch of training with these labels.

    If the training has its own loss, or a plug-in added rows of other tasks, all labels are possible answers.
    """
    training = strategy.training
    if training is None or training.loss is not None or not _infers_tasks(strategy):
        return nullcontext()
    if not set(labels.tolist()) <= set(training.task.classes):
        return nullcontext()
    return among_own_labels(strategy, training.task)


def _infers_tasks(strategy: Any) -> bool:
    """Return whether the task of each row is inferred; only this task's labels are then possible answers."""
    return inference_of(strategy.options, strategy.stream) != "last"


def answer_for(
    strategy: Any, task: EncodedTask, batches: Iterable[tuple[Tensor, Any]] = ()
) -> AbstractContextManager[Answer | None]:
    """Return a context in which the model answers for ``task``; it yields ``None``, or a function to call instead of the model.

    Args:
        strategy: a `ContinualStrategy`, between tasks or during training.
        task: the task of the rows.
        batches: inputs and task labels to be answered, in their order, as far as they are known. They are answered task by
            task, so that the model is switched once per task and not once per batch and task.
    """
    training = strategy.training
    if strategy.stream.scenario != "task" and strategy.taskwise:
        if _infers_tasks(strategy) and strategy.learned:
            # The logits of texts are wide, and are computed batch by batch.
            return _by_task(strategy, () if task.kind.answer == "text" else batches)
        return _texts_by_last(strategy) if task.kind.answer == "text" else _by_last(strategy)
    if training is not None and (training.task is task or strategy.stream.scenario != "task"):
        return nullcontext(training.answer)
    answering: AbstractContextManager[Answer | None] = strategy.answering(task)
    return answering


def _known_tasks(strategy: Any) -> list[EncodedTask]:
    """Return the learned tasks, followed by the task in training."""
    return [*strategy.learned, *([] if strategy.training is None else [strategy.training.task])]


@contextmanager
def _model_of(strategy: Any, number: int) -> Iterator[Answer]:
    """Inside, use model and readout of a known task, unchanged before the first; yield the function that answers."""
    training, learned = strategy.training, strategy.learned
    if training is not None and number == len(learned):
        yield training.answer or strategy.model
    elif not learned:
        yield strategy.model
    else:
        with _restoring_readout(strategy), strategy.answering(learned[number]) as answer:
            load_tensors_(strategy.model.readout_module(0), strategy.readouts[learned[number].name])
            yield answer or strategy.model


@contextmanager
def _restoring_readout(strategy: Any) -> Iterator[None]:
    """Restore the readout that all tasks share after the block."""
    readout = strategy.model.readout_module(0)
    before = tensors_of(readout)
    try:
        yield
    finally:
        load_tensors_(readout, before)


@contextmanager
def _texts_by_last(strategy: Any) -> Iterator[Answer | None]:
    """Write texts with the last task's model."""
    with _model_of(strategy, len(_known_tasks(strategy)) - 1) as answer:
        yield None if answer is strategy.model else answer


@contextmanager
def _by_last(strategy: Any) -> Iterator[Answer]:
    """Answer with the last task's model; each label's row of the readout comes from the last task with that label."""
    with _restoring_readout(strategy), _model_of(strategy, len(_known_tasks(strategy)) - 1) as answer:
        readout = strategy.model.readout_module(0)
        readouts = [(task, strategy.readouts[task.name]) for task in strategy.learned]
        if strategy.training is not None:
            readouts.append((strategy.training.task, tensors_of(readout)))
        with torch.no_grad():
            for name, tensor in readout.state_dict(keep_vars=True).items():
                for task, its_own in readouts:
                    rows = list(task.classes)
                    tensor[rows] = its_own[name][rows].to(tensor.device)
        seen = {label for task, _ in readouts for label in task.classes}
        unseen = [label for label in range(strategy.model.readout_of(0).n_labels) if readouts and label not in seen]

        def read(x: Tensor, labels: Any) -> Tensor:
            logits: Tensor = answer(x, labels)
            if unseen:
                logits[:, unseen] = LOWEST
            return logits

        yield read


@contextmanager
def _by_task(strategy: Any, batches: Iterable[tuple[Tensor, Any]]) -> Iterator[Answer]:
    """Answer each row by the task that it most likely belongs to."""
    with ExitStack() as scope:
        yield TaskByTask(strategy, scope, list(batches))


class TaskByTask:
    """Answers each row by the task that it most likely belongs to.

    Args:
        strategy: has a model for each task.
        scope: restores the model at its end.
        batches: inputs and task labels, which are answered at once.
    """

    def __init__(self, strategy: Any, scope: ExitStack, batches: Sequence[tuple[Tensor, Any]]) -> None:
        self._strategy, self._scope = strategy, scope
        self._tasks = _known_tasks(strategy)
        self._ahead = deque(zip((x for x, _ in batches), self._answers(batches), strict=True))

    def __call__(self, x: Tensor, labels: Any) -> Tensor:
        """Return the logits of a batch."""
        if self._ahead and torch.equal(x, self._ahead[0][0]):
            return self._ahead.popleft()[1]
        return self._answers([(x, labels)])[0]

    def turns(self, prompts: Sequence[Sequence[int]], batch_size: int) -> Iterator[tuple[list[int], Answer | None]]:
        """Yield, for one task after another, the numbers of its prompts and the function that answers them; see `Turns`."""
        pad: Any = self._strategy.stream.loaded.pad

        def filled(batch: Sequence[int]) -> Tensor:
            marked = [torch.tensor([*prompts[i][:-1], ~prompts[i][-1]], device="cpu") for i in batch]
            return torch.nn.utils.rnn.pad_sequence(marked, True, pad)

        of_prompts = torch.empty(len(prompts), dtype=torch.int64, device="cpu")
        batches = by_length([len(prompt) for prompt in prompts], batch_size)
        for batch, nearest in zip(batches, self._nearest(map(filled, batches)), strict=True):
            of_prompts[batch] = nearest
        for number in sorted(set(of_prompts.tolist())):
            self._scope.close()
            answer = self._scope.enter_context(_model_of(self._strategy, number))
            yield (
                (of_prompts == number).nonzero().flatten().tolist(),
                None if answer is self._strategy.model else answer,
            )

    def _nearest(self, batches: Iterable[Tensor]) -> list[Tensor]:
        nearest: list[Tensor] = self._strategy.task_features.nearest(batches, [task.name for task in self._tasks])
        return nearest

    def _answers(self, batches: Sequence[tuple[Tensor, Any]]) -> list[Tensor]:
        """Return the logits of each batch."""
        answers = self._by_entropy if self._strategy.task_features is None else self._by_features
        with self._strategy.model.answering_with(None):  # a strategy may evaluate within `begin` or `commit`
            return answers(batches)

    def _by_entropy(self, batches: Sequence[tuple[Tensor, Any]]) -> list[Tensor]:
        """Return the logits of each batch; each row is answered by the task whose answer has the lowest entropy."""
        answers = list[list[Tensor]]()
        for number, task in enumerate(self._tasks):
            with _model_of(self._strategy, number) as answer:
                answers.append([among(answer(x, labels), task.classes) for x, labels in batches])
        return [
            _surest(self._tasks, torch.stack(of_batch), self._strategy.model.counts(x))
            for of_batch, (x, _) in zip(zip(*answers, strict=True), batches, strict=True)
        ]

    def _by_features(self, batches: Sequence[tuple[Tensor, Any]]) -> list[Tensor]:
        """Return the logits of each batch; each row, with all its words, is answered by the nearest task by features."""
        nearest = self._nearest(x for x, _ in batches)
        found: list[Tensor | None] = [None] * len(batches)
        for number in sorted({number for of_rows in nearest for number in of_rows.tolist()}):
            with _model_of(self._strategy, number) as answer:
                for place, ((x, labels), of_rows) in enumerate(zip(batches, nearest, strict=True)):
                    rows = (of_rows == number).to(x.device)
                    if rows.any():
                        lines = rows.repeat_interleave(self._strategy.model.counts(x).to(x.device))
                        logits = answer(
                            x[rows], labels[lines.to(labels.device)] if isinstance(labels, Tensor) else labels
                        )
                        if classes := self._tasks[number].classes:
                            logits = among(logits, classes)
                        if (whole := found[place]) is None:
                            found[place] = whole = logits.new_empty(len(lines), logits.shape[1])
                        whole[lines] = logits
        return cast(list[Tensor], found)


def writer_of(answer: Answer | None, monitor: Monitor) -> dict[str, Any]:
    """Return arguments of `Kind.with_texts`: the writing function, from the ``answer`` of `answer_for`, and its logger."""
    who: dict[str, Any] = {"turns": answer.turns} if isinstance(answer, TaskByTask) else {"answer": answer}
    return who | {"wrote": monitor.log_tokens}


def _surest(tasks: Sequence[EncodedTask], answers: Tensor, counts: Tensor) -> Tensor:
    """Return, for each row of answers ``(tasks, n, labels)``, the answer with the lowest entropy ``(n, labels)``.

    Where words are labelled, one task answers all words of a sentence: the task with the lowest mean entropy over them.

    Args:
        tasks: the tasks of the answers.
        answers: for each task, a line per predicted label.
        counts: the number of lines of each row ``(rows,)``.
    """
    entropies = torch.stack(
        [share_of_entropy(logits, len(task.classes)) for task, logits in zip(tasks, answers, strict=True)]
    )
    row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    of_rows = entropies.new_zeros(len(tasks), len(counts)).index_add_(1, row, entropies) / counts
    best = of_rows.argmin(0)[row]
    return answers[best, torch.arange(len(best), device=best.device)]
