"""Which model answers the rows of a task: its own, or, where the stream withholds the task at inference, one for all.

Where the task is withheld (the stream's ``scenario`` is ``class`` or ``domain``), a strategy with one model for all tasks
answers with it. One with a model per task (`taskwise`) answers with that of the last task, every label read by the readout
of the last task that has it; or each row with the model of one task. With ``task_inference=router`` that is the task whose
answer, among its own labels, has the least entropy as a share of the largest they could have (of a sentence whose words are
labelled: on average over them); with ``lda``, the task to which θ_pre's features say that the row belongs
(`forgetfree.training.task_features`), and no other task answers. Since no row is then answered with labels of two tasks, a task
is also learned among its own labels alone (`among_own_labels`). During training, the task in training is the last. Labels of
no such task get the lowest logit there is; before any task, the untrained model answers.

Where texts are the answers, there are no labels to tell apart: the last task's model writes, or by ``lda`` that of the task
whose prompts are most like the row's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from forgetfree.continual.strategy_parts import Answer, Learner
from forgetfree.continual.stream import Stream
from forgetfree.core.parameters import load_tensors_, tensors_of
from forgetfree.core.readout_model import LOWEST, among
from forgetfree.data.rows import by_length, representative
from forgetfree.errors import OptionError
from forgetfree.options import option
from forgetfree.training.encoded_task import EncodedTask
from forgetfree.training.monitor import Monitor
from forgetfree.training.task_features import TaskFeatures, share_of_entropy
from forgetfree.training.training_options import TrainingOptions

#: Bytes of features that a strategy keeps, of test rows mostly: about 87,000 rows of 384 numbers.
_ROOM = 2**28
#: Training rows of a task that lda learns from, at most.
LDA_ROWS = 400
#: How the task of a row is found out; ``last``: it is not, and the last task's model answers.
Inference = Literal["last", "router", "lda"]


@dataclass(frozen=True, kw_only=True)
class TaskwiseOptions(TrainingOptions):
    """Options that strategies with a model per task take beside those of training."""

    task_inference: Inference = option(
        "last",
        "where the stream withholds the task: the model of the last task (for unions, the one with all tasks); for each row "
        "that of the task whose answer has the least entropy; or, by lda, that of the task whose rows are most like it in the "
        "middle layer of θ_pre",
    )


def inference_of(options: TrainingOptions, stream: Stream) -> Inference:
    """Return how a strategy with these options finds out the task of a row, where the stream withholds it."""
    if stream.scenario == "task":
        return "last"
    inference: Inference = getattr(options, "task_inference", "last")  # a plug-in's own field counts, too
    return inference


def check_inference(options: TrainingOptions, stream: Stream) -> None:
    """Raise ``OptionError`` where a task is to be found out by the entropy of answers that are texts."""
    written = [task.name for task in stream.tasks if not task.classes]
    if written and inference_of(options, stream) == "router":
        raise OptionError(
            f"task_inference=router goes by the entropy of labels, and {written[0]!r} is answered by texts. Use "
            "task_inference=lda, which goes by the prompt."
        )


def features_for(strategy: Learner) -> TaskFeatures | None:
    """Return what tells tasks apart by θ_pre's features, which the model holds now; ``None`` where nothing asks for it."""
    options, stream = strategy.options, strategy.stream
    if inference_of(options, stream) != "lda":
        return None
    return TaskFeatures(strategy.model, stream.loaded.fingerprint, room=_ROOM)


def learn_features(features: TaskFeatures, task: EncodedTask, batch_size: int) -> None:
    """Let a task that is going to be learned be told from the others."""
    rows = representative(task.train.targets, LDA_ROWS)
    features.learn(task.name, task.train.subset(rows), batch_size)


def among_own_labels(strategy: Learner, task: EncodedTask) -> AbstractContextManager[object]:
    """Return a context in which the model answers with a task's labels alone, if that is how the task is answered later."""
    alone = strategy.stream.scenario == "class" and _infers_tasks(strategy)
    return strategy.model.answering_with(task.classes or None if alone else None)


def among_labels_of_batch(strategy: Learner, labels: Tensor) -> AbstractContextManager[object]:
    """Return `among_own_labels` for a batch of training with these labels.

    With a loss of one's own, and where a plug-in added rows of other tasks, all labels are meant.
    """
    training = strategy.training
    if training is None or training.loss is not None or not _infers_tasks(strategy):
        return nullcontext()
    if not set(labels.tolist()) <= set(training.task.classes):
        return nullcontext()
    return among_own_labels(strategy, training.task)


def _infers_tasks(strategy: Learner) -> bool:
    """Say whether it is found out which task a row belongs to, whose labels alone are then its possible answers."""
    return inference_of(strategy.options, strategy.stream) != "last"


def answer_for(
    strategy: Learner, task: EncodedTask, batches: Iterable[tuple[Tensor, Any]] = ()
) -> AbstractContextManager[Answer | None]:
    """Return a context in which the model answers for ``task``; it yields what answers in the model's place, if anything.

    Args:
        strategy: a `ContinualStrategy`, at rest or during training.
        task: whose rows.
        batches: inputs and task labels that are going to be answered, in their order, as far as that is known. The router
            answers them task by task, and so switches models once a task and not once a batch and task.
    """
    training = strategy.training
    if strategy.stream.scenario != "task" and strategy.taskwise:
        if not task.classes:  # texts are the answers
            return _texts(strategy)
        return _by_router(strategy, batches) if _infers_tasks(strategy) and strategy.learned else _by_last(strategy)
    if training is not None and (training.task is task or strategy.stream.scenario != "task"):
        return nullcontext(training.answer)
    return strategy.answering(task)


@contextmanager
def _by_last(strategy: Learner) -> Iterator[Answer]:
    """Answer with the last task's model; each label's row of the readout is that of the last task that has it."""
    with _restoring_readout(strategy), _model_of(strategy, strategy.learned[-1:]) as answer:
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
        unseen = [label for label in range(strategy.model.heads[0].n_labels) if readouts and label not in seen]

        def read(x: Tensor, labels: Any) -> Tensor:
            logits: Tensor = answer(x, labels)
            if unseen:
                logits[:, unseen] = LOWEST
            return logits

        yield read


@contextmanager
def _texts(strategy: Learner) -> Iterator[Answer | None]:
    """Write texts with the last task's model, or each with that of the task which its prompt most likely belongs to."""
    features = strategy.task_features
    if features is None or not strategy.learned:
        with _model_of(strategy, strategy.learned[-1:]) as answer:
            yield None if answer is strategy.model else answer
    else:
        with ExitStack() as scope:
            yield TaskByTask(strategy, features, scope)


class TaskByTask:
    """Answers each row by the task that its prompt looks like; the model is that of one task at a time.

    Args:
        strategy: has a model for each task.
        features: tell the tasks apart.
        scope: in which a task's model is in place; at its end the model is as it was.
    """

    def __init__(self, strategy: Learner, features: TaskFeatures, scope: ExitStack) -> None:
        self._strategy, self._features, self._scope = strategy, features, scope
        self._tasks = _known_tasks(strategy)
        self._place: int | None = None  # of the task whose model is in place
        self._answer: Answer | None = None

    def __call__(self, x: Tensor, labels: Any) -> Tensor:
        """Return the logits ``(n, V)`` of a batch's tokens."""
        model = self._strategy.model
        of_rows = self._nearest(x).to(x.device)
        of_lines = of_rows.repeat_interleave(model.counts(x))
        logits: Tensor | None = None
        for number in sorted(set(of_rows.tolist())):
            lines = of_lines == number
            its_labels = labels[lines] if isinstance(labels, Tensor) else labels
            part = (self._model_of(number) or model)(x[of_rows == number], its_labels)
            logits = part.new_empty(len(lines), part.shape[1]) if logits is None else logits
            logits[lines] = part
        assert logits is not None
        return logits

    def turns(self, prompts: Sequence[Sequence[int]], batch_size: int) -> Iterator[tuple[list[int], Answer | None]]:
        """Yield the numbers of the prompts of one task after another, with what answers them; see `Turns`."""
        of_prompts = torch.empty(len(prompts), dtype=torch.int64, device="cpu")
        for batch in by_length([len(prompt) for prompt in prompts], batch_size):
            marked = [torch.tensor([*prompts[i][:-1], ~prompts[i][-1]], device="cpu") for i in batch]
            pad: Any = self._strategy.stream.loaded.pad
            of_prompts[batch] = self._nearest(torch.nn.utils.rnn.pad_sequence(marked, True, pad))
        for number in sorted(set(of_prompts.tolist())):
            yield (of_prompts == number).nonzero().flatten().tolist(), self._model_of(number)

    def _nearest(self, x: Tensor) -> Tensor:
        return self._features.nearest(x, [task.name for task in self._tasks])

    def _model_of(self, number: int) -> Answer | None:
        """Put the model of a task in place, and return what answers in its stead, if anything."""
        if number != self._place:
            self._scope.close()
            self._place, training = None, self._strategy.training
            if training is not None and number == len(self._tasks) - 1:
                self._answer = training.answer
            else:
                self._answer = self._scope.enter_context(self._strategy.answering(self._tasks[number]))
            self._place = number
        return self._answer


def writer_of(answer: Answer | None, monitor: Monitor) -> dict[str, Any]:
    """Return who writes texts, from what `answer_for` yields, and who logs it: arguments of `Kind.with_texts`."""
    who: dict[str, Any] = {"turns": answer.turns} if isinstance(answer, TaskByTask) else {"answer": answer}
    return who | {"wrote": monitor.log_tokens}


@contextmanager
def _by_router(strategy: Learner, batches: Iterable[tuple[Tensor, Any]]) -> Iterator[Answer]:
    """Answer each row by the task that it most likely belongs to."""
    known = list(batches)
    ahead = deque(zip((x for x, _ in known), _routed(strategy, known), strict=True))

    def route(x: Tensor, labels: Any) -> Tensor:
        if ahead and torch.equal(x, ahead[0][0]):
            return ahead.popleft()[1]
        return _routed(strategy, [(x, labels)])[0]

    yield route


def _routed(strategy: Learner, batches: Sequence[tuple[Tensor, Any]]) -> list[Tensor]:
    """Return the logits of each batch, every row's by the task that it most likely belongs to."""
    with strategy.model.answering_with(None):  # also where a strategy evaluates in the midst of `begin` or `commit`
        if strategy.task_features is None:
            return _by_entropy(strategy, batches)
        return _by_features(strategy, strategy.task_features, batches)


def _by_entropy(strategy: Learner, batches: Sequence[tuple[Tensor, Any]]) -> list[Tensor]:
    """Return the logits of each batch, every row's by the task whose answer has the least entropy."""
    tasks, answers = _known_tasks(strategy), list[list[Tensor]]()

    def answer_all(number: int, answer: Answer) -> None:
        answers.append([among(answer(x, labels), tasks[number].classes) for x, labels in batches])

    _by_each_task(strategy, range(len(tasks)), answer_all)
    counts = (strategy.model.counts(x) for x, _ in batches)
    return [
        _surest(tasks, torch.stack(of_batch), each)
        for of_batch, each in zip(zip(*answers, strict=True), counts, strict=True)
    ]


def _by_features(strategy: Learner, features: TaskFeatures, batches: Sequence[tuple[Tensor, Any]]) -> list[Tensor]:
    """Return the logits of each batch; a task answers those rows alone that look like its own, with all their words."""
    tasks = _known_tasks(strategy)
    nearest = [features.nearest(x, [task.name for task in tasks]) for x, _ in batches]
    counts = [strategy.model.counts(x) for x, _ in batches]
    n_labels = strategy.model.heads[0].n_labels
    answers = [
        torch.empty(int(each.sum()), n_labels, device=x.device) for each, (x, _) in zip(counts, batches, strict=True)
    ]

    def answer_rows(number: int, answer: Answer) -> None:
        for (x, labels), of_rows, each, logits in zip(batches, nearest, counts, answers, strict=True):
            rows = (of_rows == number).to(x.device)
            if rows.any():
                lines = rows.repeat_interleave(each.to(x.device))
                its_labels = labels[lines] if isinstance(labels, Tensor) else labels
                logits[lines] = among(answer(x[rows], its_labels), tasks[number].classes)

    _by_each_task(strategy, sorted({number for of_rows in nearest for number in of_rows.tolist()}), answer_rows)
    return answers


def _known_tasks(strategy: Learner) -> list[EncodedTask]:
    """Return the learned tasks, and at last the one in training."""
    return [*strategy.learned, *([] if strategy.training is None else [strategy.training.task])]


def _by_each_task(strategy: Learner, numbers: Iterable[int], visit: Callable[[int, Answer], None]) -> None:
    """Call ``visit`` with the number of each known task and what answers for it; the model and readout are then the task's."""
    training, tasks = strategy.training, list(strategy.learned)
    for number in numbers:
        if training is not None and number == len(tasks):
            visit(number, training.answer or strategy.model)
        else:
            with _restoring_readout(strategy), strategy.answering(tasks[number]) as answer:
                load_tensors_(strategy.model.readout_module(0), strategy.readouts[tasks[number].name])
                visit(number, answer or strategy.model)


def _surest(tasks: Sequence[EncodedTask], answers: Tensor, counts: Tensor) -> Tensor:
    """Return of answers ``(tasks, n, labels)`` each row's with the least entropy ``(n, labels)``.

    Where words are labelled, all words of a sentence are answered by one task: that with the least mean entropy over them.

    Args:
        tasks: whose answers.
        answers: a line for each label that is asked for.
        counts: how many lines each row has ``(rows,)``.
    """
    entropies = torch.stack(
        [share_of_entropy(logits, len(task.classes)) for task, logits in zip(tasks, answers, strict=True)]
    )
    row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    of_rows = entropies.new_zeros(len(tasks), len(counts)).index_add_(1, row, entropies) / counts
    best = of_rows.argmin(0)[row]
    return answers[best, torch.arange(len(best), device=best.device)]


@contextmanager
def _model_of(strategy: Learner, last: list[EncodedTask]) -> Iterator[Answer]:
    """Make the model that of the last task; during training, and before any task, leave it as it is."""
    if strategy.training is not None:
        yield strategy.training.answer or strategy.model
    elif not last:
        yield strategy.model
    else:
        with strategy.answering(last[0]) as answer:
            yield answer or strategy.model


@contextmanager
def _restoring_readout(strategy: Learner) -> Iterator[None]:
    """Restore the readout that all tasks share, at the end."""
    readout = strategy.model.readout_module(0)
    before = tensors_of(readout)
    try:
        yield
    finally:
        load_tensors_(readout, before)
