"""Loads θ_ft from the directory of a model in Hugging Face layout that was fine-tuned elsewhere.

The head of the model determines its readout: for a sequence classifier, its own head, which does not change; for masked and
causal language models, label words; for a token classifier, its linear layer at the first token (causal models: the last).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgetfree.core.families import POOLER, TEXT_ENCODER, UNSEEN_SETTINGS
from forgetfree.core.fingerprint import fingerprint_of
from forgetfree.core.parameters import align_, persistent_buffers, tensors_of
from forgetfree.core.readout_model import ReadoutKind, body_of
from forgetfree.display import counted
from forgetfree.errors import ModelError, UsageError
from forgetfree.models.heads import Head, own_readout, reads_alike
from forgetfree.models.loading import LANGUAGE_MODELS, LoadedModel, body_loader, language_model, load_model
from forgetfree.models.model_files import read_config, read_weights, weight_files
from forgetfree.models.state import ModelState, StateStore
from forgetfree.models.task_model import TaskModel
from forgetfree.tasks import TaskDefinition

#: A part of an architecture's name for each head, the kind of its readout, and the class that loads it.
_HEADS: tuple[tuple[str, ReadoutKind, str], ...] = (
    ("ForSequenceClassification", "classifier", "AutoModelForSequenceClassification"),
    ("ForTokenClassification", "linear", "AutoModelForTokenClassification"),
)


@dataclass(frozen=True)
class FineTunedModel:
    """A fine-tuned model and the pre-trained model from which it was made.

    Attributes:
        architecture: its Hugging Face class.
        fingerprint: the fingerprint of all its weights.
        loaded: the pre-trained model, with the fine-tuned model's kind of readout.
        theta: θ_ft, ``(N,)``.
        head: the tensors of the readout; for a linear one, in the order of the task's labels; empty for label words.
        left_out: tensors that differ and are neither graftable nor in the head. A graft does not have them.
    """

    architecture: str
    fingerprint: str
    loaded: LoadedModel
    theta: Tensor
    head: Mapping[str, Tensor]
    left_out: tuple[str, ...]

    def put_into(self, store: StateStore, key: str, pre: ModelState) -> None:
        """Put θ_ft and its readout into a store of fine-tuned models, under a key.

        Args:
            store: the store.
            key: the key of a model that is fine-tuned on this one task.
            pre: the pre-trained state with the task's readout.
        """
        with store.making(key) as known:
            if known is None:
                store.put(key, replace(pre, theta=self.theta, readouts=dict.fromkeys(pre.readouts, self.head)))

    @property
    def note(self) -> str:
        """A sentence on the tensors that a graft of it lacks; an empty text if it lacks none."""
        if not self.left_out:
            return ""
        return (
            f"{counted(len(self.left_out), 'tensor')} of the fine-tuned model that cannot be grafted differ from the "
            f"pre-trained one's, and are its own here: {', '.join(self.left_out[:3])}{', …' * (len(self.left_out) > 3)}."
        )


def load_fine_tuned(
    directory: str,
    model: str,
    task: TaskDefinition,
    *,
    readout: str = "auto",
    graftable: str | None = None,
    max_length: int | None = None,
) -> FineTunedModel:
    """Load a fine-tuned model, and the pre-trained one with the same readout.

    Args:
        directory: in Hugging Face layout; a tokenizer is not needed.
        model: the pre-trained model's name or directory.
        task: the task that it was fine-tuned on; labels are matched by name.
        readout: the requested readout: ``auto``, or the one that the head determines.
        graftable: see `ReadoutModel`.
        max_length: see `load_model`.

    Raises:
        UsageError: it cannot be the pre-trained model fine-tuned on the task; the message says why.
        ModelError: one of the two cannot be loaded.
    """
    kind, loader = _head(directory)
    if readout not in ("auto", kind):
        reader = "its own head" if kind == "classifier" else f"--readout {kind}"
        raise UsageError(
            f"--readout {readout} does not suit {directory!r}, which is read by {reader}. Leave --readout out."
        )
    config = read_config(directory, directory)
    # Label words need no classes; labels are checked before any weight is loaded.
    classes = label_order(config.id2label, task, directory) if kind in ("classifier", "linear") else ()
    as_body = "linear" if kind == "classifier" else kind
    loaded = load_model(model, as_body, graftable=graftable, max_length=max_length, tasks=[task])
    backbone, missing = read_weights(directory, loader, directory)
    if missing:
        raise ModelError(
            f"The fine-tuned model {directory!r} lacks {counted(len(missing), 'weight')} of a {type(backbone).__name__}, e.g. "
            f"{missing[0]!r}: they would be random. Save the model again with save_pretrained."
        )
    architecture, fingerprint = type(backbone).__name__, fingerprint_of(backbone)
    pre, space = loaded.model.backbone, loaded.model.space()
    body: Any = body_of(backbone) if classes else backbone
    _check_same_body(pre, body, model, directory)
    if torch.equal(space.flatten(pre), space.flatten(body)):
        raise UsageError(
            f"{directory!r} is not fine-tuned: all {len(space)} graftable entries are those of {model!r}. Give the "
            "fine-tuned model's directory to --fine-tuned, and the one it was made from to --model."
        )
    graftable_names = {spec.name for spec in space.tensors}
    tensors, others = {**dict(pre.named_parameters()), **persistent_buffers(pre)}, body.state_dict()
    left_out = tuple(
        name
        for name, tensor in tensors.items()
        if not (name in graftable_names or re.search(POOLER, name) or torch.equal(tensor, others[name]))
    )
    theta, head = space.flatten(body), dict[str, Tensor]()
    if classes:
        head = _head_apart(backbone, loaded.tokenizer, directory)
    if kind == "linear":
        head = {name: tensor[list(classes)] for name, tensor in head.items()}
    elif kind == "classifier":
        tokens: Any = loaded.model.tokens
        tuned = TaskModel(body, tokens, "classifier", head=Head(architecture, classes, head), graftable=graftable)
        body.load_state_dict(pre.state_dict(), strict=False)  # all but the pooler, a part of the head
        loaded = replace(loaded, model=tuned, readout="classifier", fingerprint=fingerprint_of(body))
    return FineTunedModel(architecture, fingerprint, loaded, theta, head, left_out)


def _head_apart(backbone: Any, tokenizer: Any, directory: str) -> dict[str, Tensor]:
    """Return the tensors of a fine-tuned classifier's head, see `own_readout`; raise ``UsageError`` if it has none."""
    align_(backbone)  # like the separate head: at other addresses the last bits may differ
    own = own_readout(backbone)
    if own is None or not reads_alike(own, backbone, tokenizer("What is it?", return_tensors="pt")):
        raise UsageError(
            f"The head of {directory!r} is not read from the body's last hidden states alone, or labels words by more than one "
            "linear layer, so no graft of the body can be read by it. Save the model as another …ForSequenceClassification or "
            "…ForTokenClassification."
        )
    return tensors_of(own.layer)


def _check_same_body(pre: Any, other: Any, model: str, directory: str) -> None:
    """Raise ``UsageError`` with the first difference in architecture between ``model`` and the one in ``directory``."""
    ours, theirs = (
        {name: getattr(body.config, name, None) for name in UNSEEN_SETTINGS}
        | {
            f"tensor {name!r}": tuple(each.shape)
            for name, each in body.state_dict().items()
            if not re.search(POOLER, name)
        }
        for body in (pre, other)
    )
    for what in {**ours, **theirs}:
        expected, got = ours.get(what, "absent"), theirs.get(what, "absent")
        if expected != got:
            raise UsageError(
                f"{directory!r} is not {model!r} fine-tuned: {what} is {expected} in {model!r}, and {got} in {directory!r}. "
                "Give the model it was made from to --model."
            )


def label_order(names: Mapping[int, str], task: TaskDefinition, directory: str) -> tuple[int, ...]:
    """Return for each of the task's labels the number of the model's class: by name, or else by position.

    Args:
        names: the model's classes, ``id2label`` of its config.json.
        task: the task with the labels to match.
        directory: the model's directory, for the message.

    Raises:
        UsageError: classes and labels differ in number or in their names.
    """
    numbers = sorted(names)
    classes, labels = [str(names[number]) for number in numbers], list(task.labels)
    if len(classes) == len(labels):
        for left_out in ("", r"[\W_]+"):  # without case, and then without punctuation, too
            ours, theirs = ([re.sub(left_out, "", name).casefold() for name in names] for names in (labels, classes))
            if len(set(theirs)) == len(theirs) and sorted(ours) == sorted(theirs):
                return tuple(theirs.index(name) for name in ours)
        if all(re.fullmatch(r"(label_?)?\d+", name.casefold()) for name in classes):
            return tuple(range(len(labels)))
    raise UsageError(
        f"The classes of {directory!r} are not the labels of task {task.name!r}: it has {', '.join(classes)}; the task has "
        f"{', '.join(labels)}. Give the task it was fine-tuned on, or name its classes so under id2label in its config.json."
    )


def _head(directory: str) -> tuple[ReadoutKind, str]:
    """Return the kind of a fine-tuned model's readout, and the class that loads it."""
    path = Path(directory)
    weighed = any(path.glob("model*.safetensors")) or any(path.glob("pytorch_model*.bin"))
    if not weighed or not (path / "config.json").is_file():
        raise UsageError(
            f"--fine-tuned {directory!r} is no model. Expected a directory in Hugging Face layout: config.json and weights, as "
            "save_pretrained writes them; merge an adapter of PEFT first, with merge_and_unload."
        )
    weight_files(directory, directory)
    config = read_config(directory, directory)
    architectures = " ".join(config.architectures or ())
    for part, kind, loader in _HEADS:
        if part in architectures:
            if kind == "classifier" and body_loader(config, directory) == TEXT_ENCODER:
                raise UsageError(
                    f"--fine-tuned {directory!r} is {architectures}, whose head reads the decoder, and of the type "
                    f"{config.model_type!r} the encoder alone is read. Save it as …ForTokenClassification."
                )
            return kind, loader
    if readout := language_model(config):
        return readout, LANGUAGE_MODELS[readout]
    raise UsageError(
        f"--fine-tuned {directory!r} is {architectures or 'a model'} without a head, so nothing says how it answers. Save it "
        "with the head it was fine-tuned with: as …ForSequenceClassification, …ForMaskedLM or …ForCausalLM."
    )
