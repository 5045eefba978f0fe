"""Answers from a finished run, by its model and the saved weights of each task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial, wraps
from pathlib import Path
from threading import RLock
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from forgetfree.core.parameters import load_tensors_
from forgetfree.core.readout_model import evaluating
from forgetfree.data.examples import EncodedRows
from forgetfree.data.rows import Rows, by_length
from forgetfree.device import find_device
from forgetfree.display import brief, counted
from forgetfree.errors import LedgerError, TaskError, UsageError, nearest
from forgetfree.files import StrPath
from forgetfree.kinds.classification import Answer
from forgetfree.kinds.kind import AS_LEARNED, GenerationOptions, Text, check_texts, kind_of, text_rows
from forgetfree.ledger.ledger import Ledger
from forgetfree.ledger.mixed_batch import MixedBatchModel
from forgetfree.models.loading import LoadedModel, load_bound, load_model, missing_definition
from forgetfree.registry import WEIGHTS
from forgetfree.serve.source import Source
from forgetfree.serve.weights import LedgerWeights, TaskWeights
from forgetfree.tasks import TaskDefinition
from forgetfree.training.encoded_task import predict, share_of_entropy
from forgetfree.training.task_features import TaskFeatures

#: The lock of each model that threads share.
_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
Asked = ParamSpec("Asked")
Said = TypeVar("Said")


def _one_at_a_time(
    method: Callable[Concatenate[Predictor, Asked], Said],
) -> Callable[Concatenate[Predictor, Asked], Said]:
    """Return the method with a lock, so that threads that share a predictor call it one after another."""

    @wraps(method)
    def call(predictor: Predictor, /, *args: Asked.args, **kwargs: Asked.kwargs) -> Said:
        with predictor.lock:
            return method(predictor, *args, **kwargs)

    return call


class Predictor:
    """Answers for every task of a run, by its model and the saved weights. Threads may share it: it answers one at a time.

    >>> predictor = Predictor.of_run("runs/first")  # doctest: +SKIP
    >>> predictor.answer("sst2", ["a joy from start to end"])[0].label  # doctest: +SKIP

    Args:
        loaded: the base model, with no tasks yet; answers are computed on its device.
        weights: a ledger, or the weights from another saved file: see `forgetfree.serve.weights`.
        routed: whether the run inferred the task of each row, see `route`.
        features: the features by which the run inferred tasks (``lda``); default: by the entropy of answers.
        deterministic: answer each row in a forward pass of its own, so that the bits of its logits do not depend on the other
            rows of a call.

    Attributes:
        loaded: the model.
        weights: the saved weights.
        ledger: the ledger; ``None`` if the strategy saved something else.

    Raises:
        LedgerError: the ledger belongs to another model, or would give other answers than before; the message names the
            difference.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        weights: Ledger | TaskWeights,
        *,
        routed: bool = False,
        deterministic: bool = False,
        features: TaskFeatures | None = None,
    ) -> None:
        self.weights = LedgerWeights(loaded, weights) if isinstance(weights, Ledger) else weights
        self.loaded, self.routed, self.deterministic = loaded, routed, deterministic
        self._features = features
        for name, definition in self.tasks.items():
            if faults := kind_of(definition).faults(definition):
                raise LedgerError(f"Task {name!r} cannot be answered as it is described: {'; '.join(faults)}.")
        self.ledger = self.weights.ledger if isinstance(self.weights, LedgerWeights) else None
        if self.ledger is not None:
            for task in self.tasks:
                self._label(task)

    @classmethod
    def of_run(
        cls,
        directory: StrPath,
        seed: int | None = None,
        strategy: str | None = None,
        model: str | None = None,
        device: str = "auto",
        deterministic: bool = False,
    ) -> Predictor:
        """Return the predictor of a run's directory, or of a ledger's file.

        Args:
            directory: the directory of ``forgetfree run --out``; or a ledger, which needs ``model``.
            seed: the seed; default: the first.
            strategy: the strategy; default: ``grafting-continual``, or else the first with a ledger, or else the first.
            model: the run's model, if it has moved; its weights must be the same.
            device: where to answer; ``auto``: on a GPU, if there is one.
            deterministic: see `Predictor`; a run with ``evaluation_batch_size=1`` is always answered so.

        Raises:
            RunError: it is no run directory, or has no saved strategy.
            LedgerError, ModelError: the saved weights do not fit the model.
        """
        return cls.of_source(Source.of(Path(directory), seed, strategy, model), device, deterministic)

    @classmethod
    def of_ledger(cls, ledger: Ledger, model: str, device: str = "auto") -> Predictor:
        """Return the predictor of a ledger, for its base model; ``device`` as for `of_run`."""
        loaded = load_bound(model, ledger)
        loaded.model.to(find_device(device))
        return cls(loaded, ledger)

    @classmethod
    def of_source(cls, source: Source, device: str = "auto", deterministic: bool = False) -> Predictor:
        """Return the predictor of a strategy's saved file: see `of_run`."""
        weights: TaskWeights
        if source.is_ledger:
            ledger = Ledger.load(source.file)
            loaded = load_bound(source.model, ledger)
        else:
            options: dict[str, Any] = {"graftable": source.graftable, "dtype": source.dtype}
            loaded = load_model(source.model, binding=source.binding, **options)
        loaded.model.to(find_device(device))
        features = None
        if source.task_inference == "lda":  # the model holds θ_pre now
            features = TaskFeatures(loaded.model, loaded.fingerprint)
            features.load(source.file.parent)
        weights = (
            LedgerWeights(loaded, ledger) if source.is_ledger else WEIGHTS[source.file.name].load()(source, loaded)
        )
        routed, deterministic = source.task_inference != "last", deterministic or source.deterministic
        return cls(loaded, weights, routed=routed, deterministic=deterministic, features=features)

    @cached_property
    def _mixed(self) -> MixedBatchModel | None:
        """The model that answers batches of many tasks; ``None`` if rows are answered one by one, or without a ledger."""
        if self.deterministic or not isinstance(self.weights, LedgerWeights):
            return None
        return MixedBatchModel(self.loaded.model, self.weights.switch, pad=self.loaded.pad)

    @property
    def lock(self) -> Any:
        """A lock of the model, held while it has the weights of a task; predictors that share the model share it."""
        return _LOCKS.setdefault(self.loaded.model, RLock())

    @property
    def tasks(self) -> Mapping[str, TaskDefinition]:
        """The definitions of the tasks that can be answered, in the order in which they were learned."""
        return self.weights.definitions

    def definition(self, task: str) -> TaskDefinition:
        """Return the task's definition.

        Raises:
            TaskError: the task was not learned.
            LedgerError: the ledger has no definition of the task.
        """
        if task not in self.tasks:
            known = list(self.tasks)
            if self.ledger and task in self.ledger.tasks:
                raise LedgerError(missing_definition(task))
            raise TaskError(
                f"There is no task {brief(task)} to answer.{nearest(task, known)} "
                f"The run learned: {', '.join(known) or 'none'}."
            )
        return self.tasks[task]

    def rows(self, task: str, texts: Sequence[Text]) -> Rows:
        """Return texts as rows of a task; raise ``UsageError`` for one that does not fit it."""
        definition = self.definition(task)
        return kind_of(definition).rows(definition, texts)

    def readout(self, task: str) -> Mapping[str, Tensor]:
        """Return the tensors of the task's readout; none for label words."""
        return self.weights.readout(self.definition(task).name)

    def logits(self, task: str, texts: Iterable[Text], *, batch_size: int = 64) -> Tensor:
        """Return the logits ``(n, n_labels)`` of texts, or of all their words, from the model for ``task``.

        Args, Raises: as `answer`.
        """
        texts = texts if isinstance(texts, str) else list(texts)
        return self.read(task, self.rows(task, texts), batch_size=batch_size)[0]

    @_one_at_a_time
    def read(self, task: str, rows: Rows, *, batch_size: int = 64) -> tuple[Tensor, list[int]]:
        """Return the logits of rows, and the number of tokens cut off from each because they exceed the model's maximum."""
        task = self.definition(task).name
        encoded, cut = self._encoded(task, rows)
        with self.weights.answering(task):
            logits = predict(self.loaded.model, encoded, **self._passes(batch_size))
        return encoded.answered(logits), cut

    def _encoded(self, task: str, rows: Rows) -> tuple[Any, list[int]]:
        """Return rows as the task's kind encodes them, and the number of tokens cut off from each."""
        definition = self.tasks[task]
        encoder = self.loaded.encoder(definition)
        encoded = kind_of(definition).encode(definition, rows, encoder, label=self._label(task), pad=self.loaded.pad)
        return encoded, encoder.cut

    def _passes(self, batch_size: int) -> dict[str, Any]:
        """Return the batch size and precision of forward passes."""
        return {"batch_size": 1 if self.deterministic else batch_size, "precision": "fp32"}

    @_one_at_a_time
    def answer(
        self, task: str, texts: Iterable[Text], *, batch_size: int = 64, options: GenerationOptions = AS_LEARNED
    ) -> list[Any]:
        """Return a task's answers to texts, in the class of its kind's answers.

        That is an `Answer`; for a task that labels words a `TaggedSentence`, for a task that writes texts a `WrittenText`.

        Args:
            task: a learned task.
            texts: for each row a text, or a tuple of one text, or of two texts for a task over pairs. The words of a sentence,
                or the turns of a chat, may also be a list.
            batch_size: rows per forward pass.
            options: how texts are written, for a task whose answers are texts.

        Raises:
            UsageError: a single text for a task over pairs, or the other way round; or a text is empty, or no text.
        """
        texts = texts if isinstance(texts, str) else list(texts)  # an iterator can be read only once
        rows = self.rows(task, texts)
        return self._answers(task, texts, rows, batch_size, options) if len(rows) else []

    @_one_at_a_time
    def answer_mixed(
        self, tasks: Sequence[str], texts: Sequence[Text], *, options: GenerationOptions = AS_LEARNED
    ) -> list[Any]:
        """Return the answers to texts of several tasks, each text answered by its own task.

        From a ledger, labels of texts take about the same time as the same number of texts of one task: see `MixedBatchModel`.
        From other files, texts are answered task by task.

        Args:
            tasks: the task of each text.
            texts: as for `answer`.
            options: as for `answer`; then all tasks must be answered by texts.

        Raises:
            UsageError: the numbers of texts and tasks differ; or a text does not fit its task.
            TaskError: a task was not learned.
        """
        if len(tasks) != len(texts):
            raise UsageError(
                f"Expected a task for each text: got {counted(len(texts), 'text')} and {counted(len(tasks), 'task')}."
            )
        tasks = [self.definition(task).name for task in tasks]
        groups = {task: [n for n, other in enumerate(tasks) if other == task] for task in dict.fromkeys(tasks)}
        own = {task: [texts[number] for number in numbers] for task, numbers in groups.items()}
        rows = {task: self.rows(task, own[task]) for task in groups}
        apart = self._mixed is None or options != AS_LEARNED
        alone = [task for task in groups if apart or kind_of(self.tasks[task]).answer != "label"]
        answers: dict[int, Any] = {}
        for task in alone:
            answers |= zip(groups[task], self._answers(task, own[task], rows[task], options=options), strict=True)
        if self._mixed is not None and not apart:
            inputs: dict[int, tuple[Tensor, int]] = {}
            for task in groups.keys() - {*alone}:
                encode = self.loaded.encoder(self.tasks[task])
                ids = map(torch.tensor, encode(rows[task]))
                inputs |= zip(groups[task], zip(ids, encode.cut, strict=True), strict=True)
            answers |= self._mixed_answers(self._mixed, inputs, tasks, texts)
        return [answers[number] for number in range(len(tasks))]

    def _mixed_answers(
        self,
        model: MixedBatchModel,
        inputs: Mapping[int, tuple[Tensor, int]],
        tasks: Sequence[str],
        texts: Sequence[Text],
    ) -> dict[int, Any]:
        """Return the answers to texts of many tasks, 64 texts per forward pass, by the numbers of the texts.

        Args:
            model: the model that answers.
            inputs: the ids of each text, and the number of tokens cut off from it.
            tasks: the task of each text.
            texts: all texts.
        """
        answers: dict[int, Any] = {}
        numbers = sorted(inputs)
        for start in range(0, len(numbers), 64):
            batch = numbers[start : start + 64]
            logits = model.answer([inputs[number][0] for number in batch], [tasks[number] for number in batch])
            for number, row in zip(batch, logits, strict=True):
                task = self.tasks[tasks[number]]
                (answers[number],) = kind_of(task).replies(task, [texts[number]], row[None], [inputs[number][1]])
        return answers

    @_one_at_a_time
    def route(self, texts: Sequence[Text]) -> list[Answer]:
        """Return each text's answer by its most likely task, inferred as in the run.

        That is the task whose answer has the lowest entropy, as a share of its maximum, or with ``task_inference=lda`` the most
        likely task by θ_pre's features.

        Args:
            texts: as for `answer`; single texts and pairs may be mixed.

        Raises:
            UsageError: the task of each row was known in the run, so it has no router; or as for `answer`.
        """
        for task in self.tasks.values():
            if (kind := kind_of(task)).answer != "label":
                raise UsageError(
                    f"The router chooses among labels of whole texts, and {task.name} has one for each {kind.label_of}. Give "
                    f"--task, one of {', '.join(self.tasks)}."
                )
        if not self.routed:
            raise UsageError(
                "The run has no router: nothing in it finds out which task a text belongs to. Give --task, one of "
                f"{', '.join(self.tasks)}; or run a strategy with a model per task with --set scenario=class (or domain) --set "
                "task_inference=router (or lda)."
            )
        check_texts(texts)
        answers: dict[int, Answer] = {}
        for size in (1, 2):
            numbers = [
                n for n, text in enumerate(texts) if size == (1 if isinstance(text, str) or len(text) == 1 else 2)
            ]
            if numbers:
                own = [texts[number] for number in numbers]
                answers |= zip(numbers, self._surest(own, text_rows(own, size, "The run")), strict=True)
        return [answers[number] for number in range(len(texts))]

    def _surest(self, texts: Sequence[Text], rows: Rows) -> list[Answer]:
        if self._features is not None:
            return self._by_features(self._features, texts, rows)
        read = {task: self.read(task, rows) for task in self.tasks}
        entropies = torch.stack([share_of_entropy(logits, logits.shape[1]) for logits, _ in read.values()])
        answers = [kind_of(task).replies(task, texts, *read[name]) for name, task in self.tasks.items()]
        return [answers[best][row] for row, best in enumerate(entropies.argmin(0).tolist())]

    def _by_features(self, features: TaskFeatures, texts: Sequence[Text], rows: Rows) -> list[Answer]:
        names, loaded = list(self.tasks), self.loaded
        encode = loaded.encoder(self.tasks[names[0]])  # a linear readout reads the texts of all tasks alike
        encoded = EncodedRows.of(encode(rows), rows.labels, self._label(names[0]), loaded.pad)
        answers: dict[int, Answer] = {}
        of_rows: dict[int, int] = {}
        batches = by_length(encoded.lengths, 1 if self.deterministic else 64)
        nearest = features.nearest((encoded.batch(batch)[0] for batch in batches), names)
        for batch, numbers in zip(batches, nearest, strict=True):
            of_rows |= zip(batch, numbers.tolist(), strict=True)
        for number, name in enumerate(names):
            own = [row for row in range(len(rows)) if of_rows[row] == number]
            if own:
                answers |= zip(own, self._answers(name, [texts[row] for row in own], rows.take(own)), strict=True)
        return [answers[row] for row in range(len(rows))]

    def _answers(
        self,
        task: str,
        texts: Sequence[Text],
        rows: Rows,
        batch_size: int = 64,
        options: GenerationOptions = AS_LEARNED,
    ) -> list[Any]:
        definition, model, passes = self.tasks[task], self.loaded.model, self._passes(batch_size)
        kind, (encoded, cut) = kind_of(definition), self._encoded(task, rows)
        logits = partial(predict, model, encoded, **passes)
        with evaluating(model, "fp32"), self.weights.answering(task):
            output = kind.output(definition, model, encoded, logits, options=options, **passes)
        return kind.replies(definition, texts, output, cut)

    def _label(self, task: str) -> int:
        """Return the model's label for a task, whose readout is added at its first use."""
        definition, model = self.tasks[task], self.loaded.model
        if task in model.task_names:
            return model.task_label(task)
        stored = self.weights.readout(task)
        label = self.loaded.add_task(definition)
        if misfit := model.readout_of(label).misfit(stored):
            raise LedgerError(
                f"The ledger's readout of task {task!r} does not fit the model: {misfit}. Load the model and readout the "
                "stream was trained with."
            )
        load_tensors_(model.readout_module(label), stored)
        return label
