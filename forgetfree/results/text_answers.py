"""Texts that answer a task's rows, as they are scored, compared to the bit, and kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from forgetfree import registry
from forgetfree.errors import MetricError
from forgetfree.json_file import check
from forgetfree.results.answers import WrittenTexts
from forgetfree.results.calibration import expected_calibration_error
from forgetfree.results.metrics import sign

#: How many of the commonest right texts are tried as an answer to all rows.
_CONSTANTS = 20
#: The arrays of answers, and those of closed answers alone.
_OF_ALL, _OF_CLOSED = ("ids", "lengths", "losses", "counts"), ("logits", "labels")


@dataclass(frozen=True, eq=False)
class TextAnswers:
    """Texts that a model wrote, and its losses on the right ones.

    Attributes:
        ids: the token ids of all texts, one after another: int64 ``(n,)``.
        lengths: how many of them each text has: int64 ``(rows,)``.
        losses: the cross-entropy of each token of the right texts, with that which ends them, in nats: float32 ``(m,)``.
        counts: how many of those each row has: int64 ``(rows,)``.
        texts: what was written.
        right: of each row the texts that are right.
        prompts: what each row asks, as far as a report shows it.
        logits: of a task with closed answers the log-probability of each of them ``(rows, answers)``; their softmax is the
            probability of an answer, given that it is one of them.
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
    def ece(self) -> float | None:
        """Expected calibration error, in [0, 1]; ``None`` where texts are free, and none has a probability among others."""
        if self.logits is None or self.labels is None:
            return None
        return expected_calibration_error(self.logits, self.labels)

    def score(self, metric: str) -> float:
        """Return the score by a registered metric.

        Raises:
            MetricError: there are no texts, because a plugin put the rows together.
        """
        if not self.texts or len(self.texts) != len(self.right):
            raise MetricError(
                f"The metric {metric!r} scores texts, and none were written for these rows, which a plugin or a caller put "
                "together. Evaluate the rows of the stream."
            )
        score: float = registry.metric(metric).score(self)
        return score

    def more_scores(self) -> dict[str, float]:
        """Return the mean loss of a token of the right texts, in nats, its exponential, the perplexity, and an ECE, if any."""
        loss, ece = float(self.losses.astype(np.float64).mean()), self.ece
        scores = {"loss": loss, "perplexity": float(np.exp(min(loss, 700.0)))}
        return scores if ece is None else {"ece": ece, **scores}

    def constant_score(self, metric: str) -> float:
        """Return the score where all rows have the commonest of the texts, as where a strategy is not asked at all."""
        ((text, _),) = Counter(self.texts).most_common(1)
        return replace(self, texts=[text] * len(self.texts)).score(metric)

    def best_constant(self, metric: str) -> str:
        """Return the text that scores best as the answer to all rows, among the commonest right ones; 20 are tried."""
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
        return self._numbers | {"texts": WrittenTexts(self.texts, self.right, self.prompts).array}

    @property
    def _numbers(self) -> dict[str, npt.NDArray[Any]]:
        arrays = {name: getattr(self, name) for name in (*_OF_ALL, *_OF_CLOSED)}
        return {name: array for name, array in arrays.items() if array is not None}

    @classmethod
    def of_tensors(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Return answers from what `tensors` gave; raise ``ValueError`` where they do not belong together."""
        texts = WrittenTexts.of_array(arrays["texts"])
        ids, lengths, losses, counts = (arrays[name] for name in _OF_ALL)
        closed = {name: arrays[name] for name in _OF_CLOSED if name in arrays}
        rows = {len(texts.texts), len(lengths), len(counts), *map(len, closed.values())}
        sound = len(rows) == 1 and (len(ids), len(losses)) == (lengths.sum(), counts.sum())
        check("texts, token ids and losses", sorted(rows), sound, "those of the same rows")
        return cls(ids, lengths, losses, counts, texts.texts, texts.right, texts.prompts, **closed)
