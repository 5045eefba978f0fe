"""Loads θ_ft from a model directory in Hugging Face layout that was fine-tuned elsewhere.

Its head determines how it is read: a sequence classifier by its own head, which does not change; masked and causal
language models by label words; a token classifier by its linear layer at the first token (the last, for causal models).
A body with a separate file of a linear readout, as ``forgetfree apply`` may write it, is read by that layer in the same way,
or on the mean of all tokens where the file says so.
An adapter of PEFT (LoRA, say) is merged into the pre-trained model, and then read as that model is.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forgetfree.core.body import POOLER, body_of, check_same_body, differing_tensors, fingerprint_of
from forgetfree.core.readout_model import LINEAR, ReadoutKind, ReadoutModel
from forgetfree.display import counted
from forgetfree.errors import ModelError, UsageError
from forgetfree.files import StrPath
from forgetfree.json_file import check, parse_json
from forgetfree.models.checkpoint import TEXT_ENCODER, read_config, read_weights, weight_files
from forgetfree.models.loading import LANGUAGE_MODELS, LoadedModel, body_loader, language_model, load_model
from forgetfree.models.peft_adapter import adapter_loader, is_adapter, merged_directory
from forgetfree.models.state import ModelState, StateStore
from forgetfree.models.task_model import ClassifierModel, head_names
from forgetfree.tasks import TaskDefinition
from forgetfree.tensor_file import TensorFile

#: The part of an architecture's name that names its head, how that is read, and the class that loads it.
_HEADS: tuple[tuple[str, ReadoutKind, str], ...] = (
    ("ForSequenceClassification", "classifier", "AutoModelForSequenceClassification"),
    ("ForTokenClassification", "linear", "AutoModelForTokenClassification"),
)
#: The file of a linear readout that stands beside a body.
READOUT = "readout.safetensors"
_READOUT = TensorFile(ModelError, "Write the directory again with `forgetfree apply`.")


@dataclass(frozen=True)
class FineTunedModel:
    """A fine-tuned model and the pre-trained model that it was made from.

    Attributes:
        architecture: its Hugging Face class.
        fingerprint: that of all its weights.
        loaded: the pre-trained model with the fine-tuned model's readout; that may be its classification head.
        model: the fine-tuned model, with all its own tensors.
        head: the tensors of a linear readout, in the order of the task's labels; empty for other readouts.
        left_out: tensors that differ and are neither graftable nor of the head. A graft does not have them.
    """

    architecture: str
    fingerprint: str
    loaded: LoadedModel
    model: ReadoutModel
    head: Mapping[str, Tensor]
    left_out: tuple[str, ...]

    @property
    def theta(self) -> Tensor:
        """θ_ft, ``(N,)``."""
        return self.model.space().flatten(self.model.backbone)

    def put_into(self, store: StateStore, key: str, pre: ModelState) -> None:
        """Put θ_ft and its readout into a store of fine-tuned models, as the one of a key.

        Args:
            store: the store.
            key: of a model that is fine-tuned on the one task.
            pre: the pre-trained state, of that task.
        """
        with store.making(key) as known:
            if known is None:
                store.put(key, replace(pre, theta=self.theta, readouts=dict.fromkeys(pre.readouts, self.head)), 0.0)

    @property
    def note(self) -> str:
        """What a graft of it lacks; an empty text where it lacks nothing."""
        if not self.left_out:
            return ""
        return (
            f"{counted(len(self.left_out), 'tensor')} of the fine-tuned model that cannot be grafted differ from the "
            f"pre-trained one's, and are its own here: {', '.join(self.left_out[:3])}{', …' * (len(self.left_out) > 3)}."
        )


def check_readout(readout: str, directory: str) -> None:
    """Raise ``UsageError`` if a readout is asked for that the fine-tuned model does not have."""
    kind = readout_of(directory)
    if readout not in ("auto", kind):
        reader = "its own head" if kind == "classifier" else f"--readout {kind}"
        raise UsageError(
            f"--readout {readout} does not suit {directory!r}, which is read by {reader}. Leave --readout out."
        )


def readout_of(directory: str) -> ReadoutKind:
    """Return how a fine-tuned model is read.

    Raises:
        UsageError: it is no model directory, or the model has no head.
        ModelError: its config.json is damaged.
    """
    return _head(directory)[0]


def load_fine_tuned(
    directory: str,
    model: str,
    task: TaskDefinition,
    *,
    graftable: str | None = None,
    max_length: int | None = None,
) -> FineTunedModel:
    """Load a fine-tuned model, and the pre-trained one with the same readout.

    Args:
        directory: in Hugging Face layout; a tokenizer is not needed. Or an adapter of PEFT.
        model: the pre-trained model's name or directory.
        task: what it was fine-tuned on; labels are matched by name.
        graftable: see `ReadoutModel`.
        max_length: see `load_model`.

    Raises:
        UsageError: it cannot be the pre-trained model fine-tuned on the task; the message says why.
        ModelError: one of the two cannot be loaded.
    """
    if is_adapter(directory):
        with merged_directory(directory, model) as merged:
            return load_fine_tuned(merged, model, task, graftable=graftable, max_length=max_length)
    kind, loader = _head(directory)
    bare = loader == "AutoModel"  # a body, with its readout in a separate file
    own: dict[str, Tensor] = {}
    classes: tuple[int, ...] = ()  # label words need none
    if kind in ("classifier", *LINEAR):  # what the labels tell comes before any weight is loaded
        names: Mapping[int, str]
        if bare:
            labels, own = read_readout(Path(directory) / READOUT)
            names = dict(enumerate(labels))
        else:
            names = read_config(directory, directory).id2label
        classes = label_order(names, task, directory)
    readout = "linear" if kind == "classifier" else kind
    loaded = load_model(model, readout, graftable=graftable, max_length=max_length, tasks=[task])
    backbone = _read_whole(directory, loader, pooled=not bare)
    architecture, fingerprint = type(backbone).__name__, fingerprint_of(backbone)
    pre, space = loaded.model.backbone, loaded.model.space()
    body: Any = body_of(backbone) if kind in ("classifier", *LINEAR) else backbone
    check_same_body(pre, body, model, directory)
    if torch.equal(space.flatten(pre), space.flatten(body)):
        raise UsageError(
            f"{directory!r} is not fine-tuned: all {len(space)} graftable entries are those of {model!r}. Give the "
            "fine-tuned model's directory to --fine-tuned, and the one it was made from to --model."
        )
    left_out = differing_tensors(pre, body, {spec.name for spec in space.tensors})
    head: dict[str, Tensor] = {}
    tuned: ReadoutModel
    if kind == "classifier":
        tokens: Any = loaded.model.tokens
        tuned = ClassifierModel(backbone, tokens, classes, graftable=graftable)
        # The pooler, which is the head's, stays the fine-tuned one.
        pre_trained = copy.deepcopy(tuned)
        body_of(pre_trained).load_state_dict(pre.state_dict(), strict=False)
        fingerprint_pre = fingerprint_of(pre_trained.backbone)
        loaded = replace(loaded, model=pre_trained, readout="classifier", fingerprint=fingerprint_pre)
    else:
        if kind in LINEAR:
            head = _linear_head(own or _outside(backbone), classes, loaded.model.hidden_size, directory)
        tuned = copy.deepcopy(loaded.model)
        tuned.backbone.load_state_dict(body.state_dict(), strict=False)
    return FineTunedModel(architecture, fingerprint, loaded, tuned, head, left_out)


def _read_whole(directory: str, loader: str, *, pooled: bool) -> Any:
    """Read the model of a directory, of which no weight may be missing; the pooler may, unless ``pooled``."""
    backbone, missing = read_weights(directory, loader, directory)
    missing = [name for name in missing if pooled or not re.search(POOLER, name)]
    if missing:
        raise ModelError(
            f"The fine-tuned model {directory!r} lacks {counted(len(missing), 'weight')} of a {type(backbone).__name__}, e.g. "
            f"{missing[0]!r}: they would be random. Save the model again with save_pretrained."
        )
    return backbone


def label_order(names: Mapping[int, str], task: TaskDefinition, directory: str) -> tuple[int, ...]:
    """Return for each of the task's labels the number of the model's class: by name, or else by position.

    Args:
        names: the model's classes, ``id2label`` of its config.json.
        task: the task whose labels are matched.
        directory: the model's, for the message.

    Raises:
        UsageError: there are more or fewer classes than labels, or their names are others.
    """
    numbers = sorted(names)
    classes, labels = [str(names[number]) for number in numbers], list(task.labels)
    if len(classes) == len(labels):
        for plain in (str.casefold, _plain):
            ours, theirs = [plain(name) for name in labels], [plain(name) for name in classes]
            if len(set(theirs)) == len(theirs) and sorted(ours) == sorted(theirs):
                return tuple(theirs.index(name) for name in ours)
        if all(re.fullmatch(r"(label_?)?\d+", name.casefold()) for name in classes):
            return tuple(range(len(labels)))
    raise UsageError(
        f"The classes of {directory!r} are not the labels of task {task.name!r}: it has {', '.join(classes)}; the task has "
        f"{', '.join(labels)}. Give the task it was fine-tuned on, or name its classes so under id2label in its config.json."
    )


def _head(directory: str) -> tuple[ReadoutKind, str]:
    """Return how a fine-tuned model is read, and the class that loads it."""
    path = Path(directory)
    if is_adapter(path):
        loader = adapter_loader(path)
        kinds: tuple[tuple[str, ReadoutKind], ...] = tuple((part, kind) for part, kind, _ in _HEADS)
        kinds = (*kinds, ("ForMaskedLM", "prompt"), ("CausalLM", "causal"), ("LMHead", "causal"))
        return next((kind for part, kind in kinds if part in loader), "linear"), loader
    weighed = any(path.glob("model*.safetensors")) or any(path.glob("pytorch_model*.bin"))
    if not weighed or not (path / "config.json").is_file():
        raise UsageError(
            f"--fine-tuned {directory!r} is no model. Expected a directory in Hugging Face layout: config.json and weights, as "
            "save_pretrained writes them; or an adapter of PEFT."
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
    if (path / READOUT).is_file():
        return _kind_of_readout(path / READOUT), body_loader(config, directory)
    if readout := language_model(config):
        return readout, LANGUAGE_MODELS[readout]
    raise UsageError(
        f"--fine-tuned {directory!r} is {architectures or 'a model'} without a head, so nothing says how it answers. Save it "
        "with the head it was fine-tuned with: as …ForSequenceClassification, …ForMaskedLM or …ForCausalLM."
    )


def _outside(backbone: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model with a head that lie outside its body."""
    named = backbone.state_dict()
    return {name: named[name] for name in head_names(backbone)}


def write_readout(
    path: Path, readout: Mapping[str, Tensor], labels: Sequence[str], kind: ReadoutKind = "linear"
) -> None:
    """Write the file of a linear readout: its ``weight`` and ``bias``, the labels of their rows, and ``mean`` if it is one."""
    pooled = {"readout": kind} if kind == "mean" else {}
    _READOUT.write(path, readout, {"labels": json.dumps(labels), **pooled})


def _kind_of_readout(path: Path) -> ReadoutKind:
    """Return what the layer of a file that `write_readout` wrote stands on."""
    header, _ = _READOUT.read(path)
    return "mean" if header.get("readout") == "mean" else "linear"


def read_readout(path: StrPath) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """Read labels and tensors from the file that `write_readout` wrote.

    Raises:
        ModelError: the file is damaged.
    """
    path = Path(path)
    header, tensors = _READOUT.read(path)
    with _READOUT.sound(path, "cannot be read as a linear readout with its labels"):
        labels = parse_json(header.get("labels", "null"))
        named = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
        check("labels", labels, named and 1 < len(set(labels)) == len(labels), "a list of different names")
        got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        width = tensors["weight"].shape[-1] if "weight" in tensors and tensors["weight"].dim() == 2 else "H"
        shapes = {"weight": (len(labels), width), "bias": (len(labels),)}
        check("its tensors", got, got == shapes, f"one linear layer, {shapes}")
        finite = all(each.is_floating_point() and bool(torch.isfinite(each).all()) for each in tensors.values())
        check("its tensors", got, finite, "finite floating-point numbers")
    return tuple(labels), tensors


def _linear_head(named: Mapping[str, Tensor], order: tuple[int, ...], width: int, directory: str) -> dict[str, Tensor]:
    """Return the linear layer ``(n, width)`` in ``named``, with rows in the order of the task's labels."""
    layer = {name.rpartition(".")[2]: tensor for name, tensor in named.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.items()}
    if len(named) != 2 or shapes != {"weight": (len(order), width), "bias": (len(order),)}:
        layers = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in named.items())
        raise UsageError(
            f"The head of {directory!r} is not one linear layer on its body, of shape ({len(order)}, {width}): it has {layers}"
            ". Save the model as …ForSequenceClassification."
        )
    rows = list(order)
    return {"weight": layer["weight"][rows].clone(), "bias": layer["bias"][rows].clone()}


def _plain(label: str) -> str:
    """Return a label name without case and punctuation."""
    return re.sub(r"[\W_]+", "", label).casefold()
