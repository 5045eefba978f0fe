"""A task's model as transformers has it: for each kind its network and tokenizer, and how both are read."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forgetfree.core.readout_model import BY_WORDS, body_of, body_prefix
from forgetfree.data.encoding import Encoder
from forgetfree.data.prompts import PromptEncoder
from forgetfree.data.rows import Rows
from forgetfree.errors import DataError, GraftError
from forgetfree.ledger.binding import set_network_
from forgetfree.ledger.graft import GraftOrigin
from forgetfree.models.architecture import body_loader, reads_last
from forgetfree.models.heads import classifier_class, sequence_classifier
from forgetfree.models.loading import LoadedModel, plain_generation
from forgetfree.models.location import locate
from forgetfree.models.model_files import explained, quiet

#: The file of a linear readout that stands beside a body.
READOUT = "readout.safetensors"
#: What loads the network of a task that labels words.
TOKEN_CLASSIFIER = "AutoModelForTokenClassification"


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


# -- One label a text ----------------------------------------------------------------------------------


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
    """Return a sequence classifier, and the tokenizer by which the usual call reads as our encoder; either may be none."""
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


# -- A label a word ------------------------------------------------------------------------------------


def tagging_network(parts: Parts) -> TaskNetwork:
    """Return the token classifier of a task that labels words.

    Raises:
        GraftError: transformers has none for this architecture, or one that computes something else.
    """
    loaded, task = parts.loaded, parts.origin.task
    encoder = loaded.encoder(task)
    ids = encoder(Rows(("What was it ?",), (), ((0,) * 4,)))
    inputs = cast(Any, loaded.model).inputs(torch.tensor(ids, device="cpu"))
    name_labels_(parts.config, task.labels, parts.origin.classes)
    check_linear(parts.readout, len(task.labels), loaded.model.hidden_size)
    network = _token_classifier(parts.config, parts.body, parts.readout, inputs)
    reading = Reading(TOKEN_CLASSIFIER, encoder, position=-1 if reads_last(parts.config) else 0, usual=True)
    return TaskNetwork(network, tokenizer_of(loaded, list(inputs)), reading)


def _token_classifier(
    config: Any, body: Mapping[str, Tensor], readout: Mapping[str, Tensor], row: Mapping[str, Tensor]
) -> Any:
    """Return the architecture's token classifier, which computes W h + b at each token: compared on a row ``(1, L)``."""
    import transformers

    try:
        loader: Any = transformers.AutoModelForTokenClassification
        network = loader.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    except ValueError as error:
        raise _refusal(config, "there is none") from error
    inside = {*body_of(network).modules()}
    heads = [module for module in network.modules() if isinstance(module, nn.Linear) and module not in inside]
    lacking = body_of(network).load_state_dict(dict(body), strict=False).missing_keys
    if lacking or len(heads) != 1 or heads[0].bias is None or heads[0].weight.shape != readout["weight"].shape:
        raise _refusal(config, f"{type(network).__name__} has another head")
    heads[0].load_state_dict(dict(readout))
    with torch.no_grad():
        expected = F.linear(body_of(network)(**row).last_hidden_state, readout["weight"], readout["bias"])
        if not torch.equal(network(**row).logits, expected):
            raise _refusal(config, f"{type(network).__name__} computes other logits")
    return network


def _refusal(config: Any, why: str) -> GraftError:
    return GraftError(
        f"A graft that labels words is written as a token classifier with one linear layer, and for a model of type "
        f"{config.model_type!r} {why}. Answer from the run itself: forgetfree predict."
    )


# -- Texts ---------------------------------------------------------------------------------------------


def writing_network(parts: Parts) -> TaskNetwork:
    """Return the language model of a task that writes texts.

    Whoever asks it by a chat template, such as ``pipeline("text-generation")``, asks as the task's prompts do: its tokenizer's
    template holds their instruction and form. It writes as the task's texts are, up to the token that ends them.
    """
    loaded, task = parts.loaded, parts.origin.task
    encoder = cast(PromptEncoder, loaded.encoder(task))
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = encoder.chat_template
    tokenizer.padding_side = "right" if loaded.writes_apart else "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(loaded.pad)
    backbone: Any = loaded.model.backbone
    generation = plain_generation(tokenizer, loaded.pad, backbone.config)
    generation.update(eos_token_id=encoder.end, max_new_tokens=task.max_new_tokens, num_beams=1, do_sample=False)
    loader = "AutoModelForSeq2SeqLM" if loaded.writes_apart else "AutoModelForCausalLM"
    usual = _reads_prompts_alike(tokenizer, encoder, chats=task.form == "messages")
    name_labels_(backbone.config, ())
    return TaskNetwork(backbone, tokenizer, Reading(loader, encoder, usual=usual), generation)


def _reads_prompts_alike(tokenizer: Any, encoder: PromptEncoder, *, chats: bool) -> bool:
    """Return whether a tokenizer, asked by its chat template, makes the same token ids of prompts as an encoder."""
    texts = ("a", "What is it?", "é, 漢,\nand 12 more.", " a", "a ", "\n\na\n")
    probes = [[{"role": "user", "content": text}] for text in texts]
    if chats:
        probes.append([*probes[0], {"role": "assistant", "content": " b\n"}, *probes[0]])
        probes.append([{"role": "system", "content": "Say it. "}, *probes[0]])
    return all(_reads_chat_alike(tokenizer, encoder, each, chats=chats) for each in probes)


def _reads_chat_alike(tokenizer: Any, encoder: PromptEncoder, turns: Sequence[dict[str, str]], *, chats: bool) -> bool:
    """Return whether both make the same token ids of a chat; one that a template refuses, or that is cut, does not count."""
    prompt = json.dumps(turns, ensure_ascii=False) if chats else turns[0]["content"]
    try:
        (row,) = encoder(Rows((prompt,), (), ((),)))
    except DataError:
        return True
    ids = [~token if token < 0 else token for token in row]
    return bool(encoder.cut[-1]) or ids_of_chat(tokenizer, turns, apart=encoder.apart) == ids


def ids_of_chat(tokenizer: Any, turns: Sequence[Mapping[str, str]], *, apart: bool) -> list[int]:
    """Return the token ids of a chat as callers of transformers make them; a decoder apart needs those around texts, too."""
    text = tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=apart)["input_ids"]
    return ids
