"""What a task's model is made of where it is written as a network of transformers, and how that is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from forgetfree.data.encoding import Encoder
from forgetfree.errors import GraftError
from forgetfree.ledger.graft import GraftOrigin
from forgetfree.models.loading import LoadedModel
from forgetfree.models.location import locate
from forgetfree.models.model_files import explained, quiet

#: The file of a linear readout that stands beside a body.
READOUT = "readout.safetensors"


@dataclass(frozen=True)
class Parts:
    """What a network is made of.

    Attributes:
        loaded: the base model, which holds the task's weights.
        config: its configuration, which is changed to the network's.
        body: the body's tensors; there may be more than a network has.
        readout: the tensors that read the task out.
        origin: the task, and how it is read.
    """

    loaded: LoadedModel
    config: Any
    body: Mapping[str, Tensor]
    readout: Mapping[str, Tensor]
    origin: GraftOrigin


@dataclass(frozen=True)
class Reading:
    """How a written network is read.

    Attributes:
        loader: the class of ``transformers`` that loads it: ``AutoModelForMaskedLM``, say.
        encoder: encodes the task's texts.
        position: of the token that a linear readout is on: 0, or −1 for causal models.
        separator: the token between two texts, for models with token types that tell them apart; else ``None``.
        own_readout: whether the linear layer is in a separate file.
        usual: whether the usual call of transformers reads it so, too: a pipeline, or ``generate`` after a chat template.
    """

    loader: str
    encoder: Encoder
    position: int = 0
    separator: int | None = None
    own_readout: bool = False
    usual: bool = False


@dataclass(frozen=True)
class TaskNetwork:
    """A task's model as transformers has it.

    Attributes:
        network: with body and head.
        tokenizer: its tokenizer.
        reading: how both are used.
        generation: how it writes, a ``GenerationConfig``, if it does.
    """

    network: Any
    tokenizer: Any
    reading: Reading
    generation: Any = None


def tokenizer_of(loaded: LoadedModel, inputs: list[str]) -> Any:
    """Return the model's tokenizer, set to read texts as our encoder does, if it can.

    Args:
        loaded: the model.
        inputs: names of what the model is called with.
    """
    import transformers

    with explained(loaded.name), quiet(transformers):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            locate(loaded.name),
            model_max_length=loaded.max_length,
            model_input_names=inputs,
            split_special_tokens=True,
            truncation_side="right",
            trust_remote_code=False,
        )
    if tokenizer.pad_token_id is None:  # the pipeline reads no batches without one
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(loaded.pad)
    return tokenizer


def name_labels_(config: Any, labels: tuple[str, ...], classes: tuple[int, ...] = ()) -> None:
    """Write into ``config`` which class is which label; without labels, that there are no classes."""
    numbers = classes or tuple(range(len(labels)))
    if sorted(numbers) != list(range(len(labels))):
        raise GraftError(
            f"The graft's classes {numbers} are not those of its {len(labels)} labels. Make the graft again."
        )
    config.id2label = dict(sorted(zip(numbers, labels, strict=True)))
    config.label2id = {label: number for number, label in config.id2label.items()}


def check_linear(readout: Mapping[str, Tensor], labels: int, width: int) -> None:
    """Raise ``GraftError`` unless a readout is a linear layer of this many labels, on states of this width."""
    got = {name: tuple(tensor.shape) for name, tensor in readout.items()}
    expected = {"weight": (labels, width), "bias": (labels,)}
    if got != expected:
        raise GraftError(
            f"The graft's linear readout does not fit its task and model: expected {expected}, got {got}. Make the graft again."
        )
