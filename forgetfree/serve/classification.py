"""Classification in use: how a task of one label a text is asked, what is answered, and the network that it is written as."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

from forgetfree.core.body import body_of, body_prefix
from forgetfree.core.readout_model import BY_WORDS
from forgetfree.data.columns import PAIR
from forgetfree.data.rows import Rows
from forgetfree.display import brief, escaped, is_text
from forgetfree.errors import GraftError, UsageError
from forgetfree.ledger.binding import set_network_
from forgetfree.ledger.graft import GraftOrigin
from forgetfree.models.architecture import body_loader, reads_last
from forgetfree.models.heads import classifier_class
from forgetfree.models.loading import LoadedModel
from forgetfree.models.sequence_classifier import sequence_classifier
from forgetfree.serve.network import Parts, Reading, TaskNetwork, check_linear, name_labels_, tokenizer_of
from forgetfree.serve.served_task import ServedTask, Text, check_texts


@dataclass(frozen=True)
class Answer:
    """What a task's model says of one text.

    Attributes:
        label: the likeliest label.
        probability: its probability.
        probabilities: those of all labels of the task, by name, in the task's order.
        task: the task.
        cut_tokens: how many tokens of the text are beyond the longest that the model reads, and were not read.
    """

    label: str
    probability: float
    probabilities: Mapping[str, float]
    task: str
    cut_tokens: int = 0


class OneAnswer(BaseModel):
    """What a task says of one text."""

    task: str
    label: str
    probability: float
    probabilities: dict[str, float]
    cut_tokens: int = Field(description="tokens of the text that are beyond the model's longest, and were not read")


class LabelTask(ServedTask):
    """A task of one label a text, or a pair of texts."""

    def rows(self, texts: Sequence[Text]) -> Rows:
        """Return texts as rows, see `text_rows`."""
        return text_rows(texts, self.size, f"Task {self.task.name!r}")

    def answers(self, texts: Sequence[Text], said: Iterable[Tensor], cut: Iterable[int]) -> list[Answer]:
        """Return the likeliest label of each text, with all probabilities."""
        return [self.answer(logits, lost) for logits, lost in zip(said, cut, strict=True)]

    def answer(self, logits: Tensor, cut_tokens: int = 0) -> Answer:
        """Return the answer that logits ``(n_labels,)`` are."""
        shares = torch.softmax(logits, dim=0)
        best = int(logits.argmax())  # shares of logits that nearly agree may be equal
        numbers, labels = shares.tolist(), self.task.labels
        return Answer(labels[best], numbers[best], dict(zip(labels, numbers, strict=True)), self.task.name, cut_tokens)

    def network(self, parts: Parts) -> TaskNetwork:
        """Return a sequence classifier, or the model that the labels are read from."""
        return label_network(parts)

    def lines(self, texts: tuple[str, ...], answer: Answer) -> list[str]:
        """Return label, probability, text."""
        return [f"{escaped(answer.label)}\t{answer.probability:.3f}\t{escaped(' | '.join(texts))}"]

    def json(self, texts: tuple[str, ...], answer: Answer) -> dict[str, Any]:
        """Return texts, task, label, and all probabilities."""
        names = PAIR if len(texts) == 2 else ("text",)  # a router may ask a task about pairs for a single text
        return dict(zip(names, texts, strict=True)) | self.response(answer).model_dump()

    def response(self, answer: Answer) -> OneAnswer:
        """Return the answer as the server sends it."""
        return OneAnswer(**vars(answer))

    def columns(self) -> tuple[str, ...]:
        """Return task, label, and a column for the probability of each label."""
        return ("task", "label", "probability", *map(probability_column, self.task.labels))

    def cells(self, answer: Answer) -> dict[str, Any]:
        """Return task, label and probabilities."""
        shares = {probability_column(label): share for label, share in answer.probabilities.items()}
        return {"task": answer.task, "label": answer.label, "probability": answer.probability, **shares}


def probability_column(label: str) -> str:
    """Return the name of the column for the probability of a label."""
    return f"probability of {label}"


def text_rows(texts: Sequence[Text], size: int, asker: str) -> Rows:
    """Return texts as rows.

    Args:
        texts: a tuple for each row; a text alone is a tuple of one.
        size: how many texts a row has.
        asker: what reads them, for messages.

    Raises:
        UsageError: one is no text, or they are more or fewer.
    """
    check_texts(texts)
    rows = [(text,) if isinstance(text, str) else text for text in texts]
    for number, row in enumerate(rows, 1):
        if halves := [text for text in row if not is_text(text)]:
            raise UsageError(
                f"Text {number}, {brief(halves[0])}, holds half of a surrogate pair, which is no character: it was perhaps "
                "not written in UTF-8. Write it in UTF-8."
            )
        if len(row) != size:
            remedy = (
                "Give one."
                if size == 1
                else "Give the two as two arguments or with a tab between, or as a list of two."
            )
            raise UsageError(
                f"{asker} reads {'one text' if size == 1 else 'pairs of texts'}, got {len(row)} text(s) in "
                f"{row[0][:40]!r}. {remedy}"
            )
    columns = [tuple(column) for column in zip(*rows, strict=True)] or [()]
    return Rows(columns[0], columns[1] if size == 2 and rows else (), (0,) * len(rows))


# -- As a network of transformers ------------------------------------------------------------------------


def label_network(parts: Parts) -> TaskNetwork:
    """Return the network of a task that labels texts.

    A linear readout becomes the head of a sequence classifier, if the architecture has one that computes it and its tokenizer
    reads as our encoder does. What is read in another way has no classes in its configuration.
    """
    loaded, config, origin = parts.loaded, parts.config, parts.origin
    backbone, pair = loaded.model.backbone, len(origin.task.text_columns) == 2
    reading = Reading(
        "AutoModelForSequenceClassification",
        loaded.encoder(origin.task),
        position=-1 if reads_last(config) else 0,
        separator=cast(Any, loaded.model).tokens.separator if pair else None,
    )
    if origin.readout in BY_WORDS:
        name_labels_(backbone.config, ())
        loader = "AutoModelForMaskedLM" if origin.readout == "prompt" else "AutoModelForCausalLM"
        return TaskNetwork(backbone, loaded.tokenizer, replace(reading, loader=loader))
    network = tokenizer = None
    if origin.readout != "mean":  # which no sequence classifier reads
        network, tokenizer = _classifying(parts, reading.position)
    if network is None:
        name_labels_(backbone.config, ())
        reading = replace(reading, loader=body_loader(config, loaded.name), own_readout=True)
        return TaskNetwork(backbone, loaded.tokenizer, reading)
    return TaskNetwork(network, tokenizer or loaded.tokenizer, replace(reading, usual=tokenizer is not None))


def _classifying(parts: Parts, position: int) -> tuple[Any, Any]:
    """Return a sequence classifier, and the tokenizer for the usual call; either may be ``None``.

    With that tokenizer the call reads texts as our encoder does.
    """
    loaded, config, origin = parts.loaded, parts.config, parts.origin
    task, model = origin.task, cast(Any, loaded.model)
    rows = _probes(loaded, pair=len(task.text_columns) == 2)
    inputs = [model.inputs(torch.tensor([ids], device="cpu")) for ids in loaded.encoder(task)(rows)]
    tokenizer = tokenizer_of(loaded, list(inputs[0]))
    if not _reads_alike(tokenizer, rows, inputs):
        tokenizer = None
    config.pad_token_id = model.tokens.pad  # causal ones find a row's last token by it
    config.problem_type = "single_label_classification"
    if hasattr(config, "use_mems_eval"):
        config.use_mems_eval = False  # XLNet's memory of earlier calls, which batches of the pipeline cannot hold
    name_labels_(config, task.labels, origin.classes)
    if origin.readout == "classifier":
        return _classifier(config, parts.body, parts.readout, origin), tokenizer
    check_linear(parts.readout, len(task.labels), loaded.model.hidden_size)
    if tokenizer is None:
        return None, None
    return sequence_classifier(config, parts.body, parts.readout, inputs[:-1], position), tokenizer


def _probes(loaded: LoadedModel, *, pair: bool) -> Rows:
    """Return rows that show whether a tokenizer reads texts as ours: long ones, and ones with special tokens."""
    long = "it was " * min(loaded.max_length, 10_000)
    texts = ("a", "What was it?", " ".join(loaded.tokenizer.all_special_tokens), long)
    return Rows(texts, texts[::-1] if pair else (), (0,) * len(texts))


def _reads_alike(tokenizer: Any, rows: Rows, inputs: Sequence[Mapping[str, Tensor]]) -> bool:
    """Return whether ``tokenizer``, called as in the pipeline, makes ``inputs`` of ``rows``."""
    texts = zip(rows.first, rows.second, strict=True) if rows.second else zip(rows.first)
    return all(
        dict(tokenizer(*each, truncation=True)) == {name: tensor[0].tolist() for name, tensor in expected.items()}
        for each, expected in zip(texts, inputs, strict=True)
    )


def _classifier(config: Any, body: Mapping[str, Tensor], readout: Mapping[str, Tensor], origin: GraftOrigin) -> Any:
    """Return the sequence classifier whose head is the readout, with the base model's body."""
    kind = classifier_class(origin.architecture, config)
    if origin.network:  # what the head computes is not in the base model's
        set_network_(config, origin.network)
    network = kind(config).float().eval()
    own = network.state_dict()
    lacking = sorted(own.keys() - readout.keys() - {f"{body_prefix(network)}{name}" for name in body})
    unknown = sorted(name for name, tensor in readout.items() if name not in own or own[name].shape != tensor.shape)
    if lacking or unknown:
        raise GraftError(
            f"The graft's readout is no head of this {origin.architecture}: "
            f"{f'{lacking[0]!r} is not in it' if lacking else f'its {unknown[0]!r} does not fit'}. Give the model that the "
            "graft was made from."
        )
    _load_body(network, body)
    network.load_state_dict(dict(readout), strict=False)
    return network


def _load_body(network: nn.Module, body: Mapping[str, Tensor]) -> bool:
    """Load the body of ``network``, and return whether it is complete; ``body`` may have more tensors."""
    return not body_of(network).load_state_dict(body, strict=False).missing_keys
