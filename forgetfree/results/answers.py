"""The answers of a model to a task's rows, in the form of the task's kind: labels, of rows or of words, or texts."""

from __future__ import annotations

import base64
import json
import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from forgetfree import registry
from forgetfree.errors import MetricError
from forgetfree.json_file import check, parse_json
from forgetfree.results.metrics import Metric, agreement, expected_calibration_error, measured, sign

if TYPE_CHECKING:
    import pandas as pd

#: The number of most frequent right texts that are tried as an answer to all rows.
_CONSTANTS = 20
#: The arrays of all text answers, and the further arrays of closed answers.
_OF_ALL, _OF_CLOSED = ("ids", "lengths", "losses", "counts"), ("logits", "labels")


def pack_rows(right: npt.NDArray[np.bool_]) -> str:
    """Return the mask of right rows ``(n,)`` as a text: one bit per row, in base64."""
    return base64.b64encode(np.packbits(right).tobytes()).decode()


def unpack_rows(text: str, count: int) -> npt.NDArray[np.bool_]:
    """Return the mask of right rows ``(count,)``: the inverse of `pack_rows`.

    Raises:
        ValueError: the text does not belong to ``count`` rows.
    """
    packed = base64.b64decode(text, validate=True)
    if len(packed) != -(-count // 8):
        raise ValueError(f"{len(packed)} bytes are not a bit for each of {count} rows")
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=count).astype(bool)


class Answers(ABC):
    """A model's answers on one task's rows, in order; they are scored, compared to the bit, and stored.

    Each kind of tasks defines the subclass of its answers.
    """

    @abstractmethod
    def score(self, metric: str) -> float:
        """Return the score by a metric of the kind, or by a registered one."""

    def metric(self, name: str) -> Metric:
        """Return the metric of a name, as the kind of the answers computes it."""
        registered: Metric = registry.metric(name)
        return registered

    def more_scores(self) -> dict[str, float]:
        """Return further metrics besides the score, by name."""
        return {} if (ece := self.ece) is None else {"ece": ece}

    @abstractmethod
    def constant_score(self, metric: str) -> float:
        """Return the score of the same answer to all rows, for labels of the best one: a model must beat it."""

    @abstractmethod
    def same_as(self, other: Self) -> bool:
        """Return whether both are equal, to the last bit."""

    @abstractmethod
    def agreement(self, other: Self) -> float:
        """Return the share of rows with the same answer in both, in [0, 1]."""

    @abstractmethod
    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Return the content as arrays, by name, for a file."""

    @property
    def ece(self) -> float | None:
        """Expected calibration error, in [0, 1]; ``None`` if answers have no probabilities."""
        return None if self.choices is None else expected_calibration_error(*self.choices)

    @property
    def choices(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        """Logits of all choices ``(n, n_choices)``, and the numbers of the right ones ``(n,)``; ``None`` if there are none."""
        return None

    @property
    def reference(self) -> object:
        """The right answers, which identify the rows; ``None`` if unknown."""
        return None


@dataclass(frozen=True, eq=False)
class LabelAnswers(Answers):
    """Labels, predicted by logits.

    Attributes:
        logits: ``(n, n_labels)``.
        labels: the right ones ``(n,)``.
        kind: the kind of the task, or the form of its rows; it defines the metrics.
    """

    logits: npt.NDArray[Any]
    labels: npt.NDArray[Any]
    kind: str = field(default="classification", kw_only=True)

    def score(self, metric: str) -> float:
        """Return the score by a metric of the kind, or by a registered one."""
        return measured(metric, self.metric(metric).score, self)

    def metric(self, name: str) -> Metric:
        """Return the metric of a name, as the kind of the task computes it."""
        own: Metric = registry.kind(self.kind).metric(name)
        return own

    @property
    def choices(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Logits and labels."""
        return self.logits, self.labels

    @property
    def reference(self) -> object:
        """The labels."""
        return self.labels.tolist()

    @property
    def compared(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The right and the predicted labels ``(n,)``, as scikit-learn's metrics take them."""
        return self.labels, self.logits.argmax(axis=1)

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """The mask of rows with the right label ``(n,)``."""
        right: npt.NDArray[np.bool_] = self.logits.argmax(axis=1) == self.labels
        return right

    def constant_score(self, metric: str) -> float:
        """Return the best score of one label for all rows."""
        registered = self.metric(metric)
        if registered.constant is not None:
            return measured(metric, registered.constant, self)
        scores = [self.constant(int(label)).score(metric) for label in np.unique(self.labels)]
        return max(scores) if registered.higher_is_better else min(scores)

    def constant(self, label: int) -> Self:
        """Return answers to the same rows that all have this label."""
        width = 1 + max(label, int(self.labels.max()), 1)
        return replace(self, logits=np.tile(np.eye(width)[label], (len(self.labels), 1)))

    def same_as(self, other: Self) -> bool:
        """Return whether the logits are equal, as ``torch.equal`` compares them."""
        return np.array_equal(self.logits, other.logits)

    def agreement(self, other: Self) -> float:
        """Return the share of rows whose largest logit is at the same label."""
        return agreement(self.logits, other.logits)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Return logits and labels."""
        return {"logits": self.logits, "labels": self.labels}

    @classmethod
    def of_tensors(cls, arrays: Mapping[str, npt.NDArray[Any]], rows: int | None = None, **more: Any) -> Self:
        """Return answers from the result of `tensors`.

        Args:
            arrays: the result of `tensors`.
            rows: the expected number of labels, if known.
            more: the other fields.

        Raises:
            KeyError: an array is missing.
            ValueError: the arrays are not finite logits with one label per row.
        """
        logits, labels = arrays["logits"], arrays["labels"]
        count = len(labels) if labels.ndim == 1 and rows is None else rows
        right = logits.ndim == 2 and len(logits) == count and labels.shape == (count,)
        check("logits and labels", (logits.shape, labels.shape), right, f"one row for each of {count} test rows")
        finite = np.issubdtype(logits.dtype, np.floating) and bool(np.isfinite(logits).all())
        check("logits", str(logits.dtype), finite, "finite numbers")
        within = labels.dtype == np.int64 and bool(((labels >= 0) & (labels < logits.shape[1])).all())
        check("labels", str(labels.dtype), within, f"whole numbers below {logits.shape[1]}")
        return cls(logits, labels, **more)


def label_scores(answers: LabelAnswers, names: Mapping[int, str]) -> pd.DataFrame:
    """Return precision, recall and F1 of each label, as scikit-learn defines them, and how many rows have it.

    The last line is their ``macro average``, over the labels that some row has.

    Args:
        answers: the answers on the rows of one task.
        names: the names of labels, by their numbers in the answers.
    """
    import pandas as pd
    from sklearn.metrics import precision_recall_fscore_support

    measured = precision_recall_fscore_support(*answers.compared, labels=list(names), zero_division=0.0)
    index = pd.Index(names.values(), name="label")
    table = pd.DataFrame(dict(zip(("precision", "recall", "f1", "rows"), measured, strict=True)), index)
    there = table[table["rows"] > 0]
    table.loc["macro average"] = [*there[["precision", "recall", "f1"]].mean(), table["rows"].sum()]
    return table.astype({"rows": int})


def confusion(answers: LabelAnswers, names: Mapping[int, str]) -> pd.DataFrame:
    """Return the number of rows by right label (row) and predicted label (column); arguments as for `label_scores`.

    If the task is withheld, a last column counts predictions of another task's labels.
    """
    import pandas as pd
    from sklearn.metrics import confusion_matrix

    counts = confusion_matrix(*answers.compared, labels=list(names))
    table = pd.DataFrame(counts, pd.Index(names.values(), name="right"), pd.Index(names.values(), name="answered"))
    elsewhere = np.array([(answers.labels == label).sum() for label in names]) - counts.sum(axis=1)
    return table.assign(**{"another task's": elsewhere}) if elsewhere.any() else table


def label_answers(answers: Answers) -> LabelAnswers:
    """Return answers as labels.

    Raises:
        MetricError: they are of a kind without labels.
    """
    if not isinstance(answers, LabelAnswers):
        raise MetricError(
            f"Expected predictions that are labels, got {type(answers).__name__}. Choose a task of another kind."
        )
    return answers


def array_of(content: Any) -> npt.NDArray[np.uint8]:
    """Return JSON in UTF-8, as a file of arrays keeps it."""
    return np.frombuffer(json.dumps(content).encode(), np.uint8)


def json_of(array: npt.NDArray[Any]) -> Any:
    """Return the content of `array_of`; raise ``ValueError`` if it is not JSON."""
    return parse_json(array.astype(np.uint8).tobytes().decode())


@dataclass(frozen=True, eq=False)
class TextAnswers(Answers):
    """Texts that a model generated, and its losses on the right ones.

    Attributes:
        ids: the token ids of all texts, one after another: int64 ``(n,)``.
        lengths: the number of tokens of each text: int64 ``(rows,)``.
        losses: the cross-entropy of each token of the right texts, including the end token, in nats: float32 ``(m,)``.
        counts: the number of losses of each row: int64 ``(rows,)``.
        texts: the generated texts.
        right: the right texts of each row.
        prompts: the prompts of rows, as a report shows them.
        logits: for a task with closed answers, their log-probabilities ``(rows, answers)``; the softmax is the probability of
            an answer, given that it is one of them.
        labels: the numbers of right answers among them ``(rows,)``.
    """

    ids: npt.NDArray[Any]
    lengths: npt.NDArray[Any]
    losses: npt.NDArray[Any]
    counts: npt.NDArray[Any]
    texts: Sequence[str]
    right: Sequence[Sequence[str]]
    prompts: Sequence[str] = ()
    logits: npt.NDArray[Any] | None = None
    labels: npt.NDArray[Any] | None = None

    @property
    def choices(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        """Log-probabilities of closed answers and the numbers of right ones; ``None`` for free texts."""
        return None if self.logits is None or self.labels is None else (self.logits, self.labels)

    @property
    def reference(self) -> object:
        """The right texts."""
        return [list(texts) for texts in self.right]

    def score(self, metric: str) -> float:
        """Return the score by a registered metric.

        Raises:
            MetricError: there are no texts, because a plugin made the rows.
        """
        if not self.texts or len(self.texts) != len(self.right):
            raise MetricError(
                f"The metric {metric!r} scores texts, but no texts were generated for these rows, which a plugin or "
                "a caller put together. Evaluate the rows of the stream."
            )
        return measured(metric, self.metric(metric).score, self)

    def more_scores(self) -> dict[str, float]:
        """Return the ECE, if any, the mean loss per token of the right texts, in nats, and its exponential, the perplexity."""
        loss = float(self.losses.astype(np.float64).mean())
        return super().more_scores() | {"loss": loss, "perplexity": float(np.exp(min(loss, 700.0)))}

    def constant_score(self, metric: str) -> float:
        """Return the score if all rows have the most frequent of the texts: for placeholder answers, the constant floor."""
        ((text, _),) = Counter(self.texts).most_common(1)
        return replace(self, texts=[text] * len(self.texts)).score(metric)

    def best_constant(self, metric: str) -> str:
        """Return the best-scoring single answer to all rows, among the 20 most frequent right texts."""
        common = [text for text, _ in Counter(texts[0] for texts in self.right).most_common(_CONSTANTS)]
        scores = [sign(metric) * replace(self, texts=[text] * len(self.right)).score(metric) for text in common]
        return common[int(np.argmax(scores))]

    def same_as(self, other: Self) -> bool:
        """Return whether the token ids, the losses and the log-probabilities are equal, to the last bit."""
        one, two = self._numbers, other._numbers
        return one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)

    def agreement(self, other: Self) -> float:
        """Return the share of rows with the same text."""
        return float(np.mean([one == another for one, another in zip(self.texts, other.texts, strict=True)]))

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Return token ids, losses, log-probabilities, and all texts as JSON in UTF-8."""
        content = {"texts": list(self.texts), "right": [list(each) for each in self.right]}
        return self._numbers | {"texts": array_of(content | ({"prompts": list(self.prompts)} if self.prompts else {}))}

    @property
    def _numbers(self) -> dict[str, npt.NDArray[Any]]:
        arrays = {name: getattr(self, name) for name in (*_OF_ALL, *_OF_CLOSED)}
        return {name: array for name, array in arrays.items() if array is not None}

    @classmethod
    def of_tensors(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Return answers from the result of `tensors`; raise ``ValueError`` if the arrays do not belong together."""
        content = json_of(arrays["texts"])
        texts, right, prompts = content["texts"], content["right"], content.get("prompts", [])
        ids, lengths, losses, counts = (arrays[name] for name in _OF_ALL)
        closed = {name: arrays[name] for name in _OF_CLOSED if name in arrays}
        rows = {*map(len, (texts, right, lengths, counts, prompts or texts, *closed.values()))}
        sound = len(rows) == 1 and (len(ids), len(losses)) == (lengths.sum(), counts.sum())
        check("texts, token ids and losses", sorted(rows), sound, "those of the same rows")
        return cls(ids, lengths, losses, counts, texts, right, prompts, **closed)


def same_rows(one: Answers, other: Answers) -> bool:
    """Return whether two answers have equal right answers, and so the same rows; false if these are unknown."""
    return one.reference is not None and one.reference == other.reference


def constant_scores(answers: Sequence[Answers], metrics: Sequence[str], *, task_known: bool = True) -> list[float]:
    """Return the constant score of each task of a stream.

    Args:
        answers: any answers on each task, with labels numbered as in the readout.
        metrics: the metric of each task.
        task_known: whether the answer may depend on the task. If not, one label answers all tasks, the one with the best mean
            score; a score for which lower is better counts negatively. Without labels, each task has its own constant.
    """
    labelled = [each for each in answers if isinstance(each, LabelAnswers)]
    if task_known or len(labelled) < len(answers):
        return [each.constant_score(metric) for each, metric in zip(answers, metrics, strict=True)]
    signs = [sign(metric) for metric in metrics]
    candidates = [
        [each.constant(label).score(metric) for each, metric in zip(labelled, metrics, strict=True)]
        for label in range(1 + max(int(each.labels.max()) for each in labelled))
    ]
    return max(candidates, key=lambda scores: sum(map(operator.mul, signs, scores)))


def tensors_by_task(answers: Mapping[str, Answers]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of the answers on several tasks, named ``TASK/ARRAY``."""
    return {f"{task}/{name}": array for task, each in answers.items() for name, array in each.tensors().items()}
