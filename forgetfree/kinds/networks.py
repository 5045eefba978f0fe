"""A task's model as a network of transformers, for each kind of tasks: the network, its tokenizer, and how to call them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from forgetfree.core.parameters import load_tensors_
from forgetfree.core.readout import Pooling, Readout, empty_linear
from forgetfree.core.readout_model import BY_WORDS, body_of, body_prefix
from forgetfree.data.prompts import PromptEncoder
from forgetfree.data.rows import Rows
from forgetfree.errors import GraftError
from forgetfree.ledger.binding import set_network_
from forgetfree.ledger.graft import GraftOrigin
from forgetfree.models.heads import classifier_class, linear_head, reads_alike, sequence_classifier
from forgetfree.models.loading import LoadedModel, body_loader, plain_generation
from forgetfree.models.location import locate
from forgetfree.models.model_files import explained, quiet

#: The file of a linear readout that is stored beside a body.
READOUT = "readout.safetensors"
#: The classes that load the network of a task that labels texts, and of a task that labels words.
SEQUENCE_CLASSIFIER, TOKEN_CLASSIFIER = "AutoModelForSequenceClassification", "AutoModelForTokenClassification"


@dataclass(frozen=True)
class Parts:
    """The parts of a network.

    Attributes:
        loaded: the base model, which holds the task's weights.
        config: its configuration, which is modified in place to the network's.
        body: the body's tensors; a network may have fewer.
        readout: the tensors of the task's readout.
        origin: the task, and its readout and architecture.
    """

    loaded: LoadedModel
    config: Any
    body: Mapping[str, Tensor]
    readout: Mapping[str, Tensor]
    origin: GraftOrigin


@dataclass(frozen=True)
class TaskNetwork:
    """A task's model as a network of transformers, and how to call it.

    Attributes:
        network: the network, with body and head.
        tokenizer: its tokenizer.
        loader: the class of ``transformers`` that loads it, such as ``AutoModelForMaskedLM``.
        readout: a phrase for the part that gives answers, for the model card.
        call: the pipeline call of transformers that answers as the task's own model does, with ``{}`` for the directory; empty
            if there is none.
        own_readout: whether the linear layer is in a separate file.
        generation: the ``GenerationConfig``, if the network generates texts.
    """

    network: Any
    tokenizer: Any
    loader: str
    readout: str
    call: str = ""
    own_readout: bool = False
    generation: Any = None


def tokenizer_of(loaded: LoadedModel, inputs: list[str]) -> Any:
    """Return the model's tokenizer, set to encode texts as our encoder does, where it can.

    Args:
        loaded: the model.
        inputs: the names of the model's inputs.
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
    if tokenizer.pad_token_id is None:  # the pipeline needs one for batches
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(loaded.pad)
    return tokenizer


def name_labels_(config: Any, labels: tuple[str, ...], classes: tuple[int, ...] = ()) -> None:
    """Write the names of the classes into ``config``; without labels, remove all classes."""
    numbers = classes or tuple(range(len(labels)))
    if sorted(numbers) != list(range(len(labels))):
        raise GraftError(
            f"The graft's classes {numbers} are not those of its {len(labels)} labels. Make the graft again."
        )
    config.id2label = dict(sorted(zip(numbers, labels, strict=True)))
    config.label2id = {label: number for number, label in config.id2label.items()}


@contextmanager
def naming_labels(config: Any, labels: tuple[str, ...]) -> Iterator[None]:
    """Let ``config`` name the labels inside the context, for transformers' pipelines."""
    before = config.id2label, config.label2id
    name_labels_(config, labels)
    try:
        yield
    finally:
        config.id2label, config.label2id = before


def linear_readout(parts: Parts, pooling: Pooling) -> Readout:
    """Return the linear readout of a network; raise ``GraftError`` unless it fits the task's labels and the body's width."""
    task, layer = parts.origin.task, empty_linear(parts.loaded.model.hidden_size, len(parts.origin.task.labels))
    readout = Readout(task.name, layer.out_features, layer, pooling=pooling)
    if misfit := readout.misfit(parts.readout):
        raise GraftError(f"The graft's linear readout does not fit its task and model: {misfit}. Make the graft again.")
    load_tensors_(layer, parts.readout)
    return readout


# -- One label a text ----------------------------------------------------------------------------------


def label_network(parts: Parts, *, several: bool = False) -> TaskNetwork:
    """Return the network of a task that labels texts; with ``several``, of a task with any number of labels per row.

    A linear readout becomes the head of a sequence classifier, if the architecture has one that computes it and its tokenizer
    encodes as our encoder does. Otherwise the configuration of the network has no classes.
    """
    loaded, config, origin = parts.loaded, parts.config, parts.origin
    task, backbone, own = origin.task, loaded.model.backbone, loaded.tokenizer
    if origin.binding.readout in BY_WORDS:
        name_labels_(backbone.config, ())
        prompt = origin.binding.readout == "prompt"
        words = ", ".join(f"{label}: {word!r}" for label, word in zip(task.labels, task.label_words, strict=False))
        where = f"at the mask of {task.template!r}" if prompt else f"after {task.causal_template!r}"
        loader = "AutoModelForMaskedLM" if prompt else "AutoModelForCausalLM"
        return TaskNetwork(backbone, own, loader, f"the logits of label words {where} ({words})")
    pooling, network, tokenizer = loaded.model.pooling, None, None
    if pooling != "mean":  # no sequence classifier reads the mean
        network, tokenizer = _classifying(parts)
    chosen = ", whose labels are those with a sigmoid above 0.5" if several else ""
    if network is not None:
        network.config.problem_type = f"{'multi' if several else 'single'}_label_classification"
        every = ", top_k=None" if several else ""
        call = f'pipeline("text-classification", model={{}}, truncation=True{every})' if tokenizer else ""
        return TaskNetwork(network, tokenizer or own, SEQUENCE_CLASSIFIER, f"the model's head{chosen}", call)
    name_labels_(backbone.config, ())
    where = "on the mean of all tokens" if pooling == "mean" else f"at the {pooling} token"
    loader = body_loader(config, loaded.name)
    return TaskNetwork(backbone, own, loader, f"the linear layer in {READOUT} {where}{chosen}", own_readout=True)


def _classifying(parts: Parts) -> tuple[Any, Any]:
    """Return a sequence classifier, and the tokenizer if its usual call encodes as our encoder does; either may be ``None``."""
    loaded, config, origin = parts.loaded, parts.config, parts.origin
    task, model = origin.task, cast(Any, loaded.model)
    rows = _probes(loaded, pair=len(task.text_columns) == 2)
    inputs = [model.inputs(torch.tensor([ids], device="cpu")) for ids in loaded.encoder(task)(rows)]
    tokenizer = tokenizer_of(loaded, list(inputs[0]))
    if not _reads_alike(tokenizer, rows, inputs):
        tokenizer = None
    config.pad_token_id = model.tokens.pad  # causal models find a row's last token by it
    if hasattr(config, "use_mems_eval"):
        config.use_mems_eval = False  # XLNet's memory of earlier calls does not work with the pipeline's batches
    name_labels_(config, task.labels, origin.classes)
    if origin.binding.readout == "classifier":
        return _classifier(config, parts.body, parts.readout, origin), tokenizer
    readout = linear_readout(parts, model.pooling)
    if tokenizer is None:
        return None, None
    return sequence_classifier(config, parts.body, readout, inputs[:-1]), tokenizer


def _probes(loaded: LoadedModel, *, pair: bool) -> Rows:
    """Return rows that show whether a tokenizer encodes texts as ours does: long texts, and texts with special tokens."""
    long = "it was " * min(loaded.max_length, 10_000)
    texts = ("a", "What was it?", " ".join(loaded.tokenizer.all_special_tokens), long)
    return Rows(texts, texts[::-1] if pair else (), (0,) * len(texts))


def _reads_alike(tokenizer: Any, rows: Rows, inputs: Sequence[Mapping[str, Tensor]]) -> bool:
    """Return whether ``tokenizer``, called as in the pipeline, encodes ``rows`` as ``inputs``."""
    texts = zip(rows.first, rows.second, strict=True) if rows.second else zip(rows.first)
    return all(
        dict(tokenizer(*each, truncation=True)) == {name: tensor[0].tolist() for name, tensor in expected.items()}
        for each, expected in zip(texts, inputs, strict=True)
    )


def _classifier(config: Any, body: Mapping[str, Tensor], readout: Mapping[str, Tensor], origin: GraftOrigin) -> Any:
    """Return the sequence classifier whose head is the readout, with the base model's body."""
    kind = classifier_class(origin.binding.architecture, config)
    if origin.binding.network:  # the base model's config lacks the head's settings
        set_network_(config, origin.binding.network)
    network = kind(config).float().eval()
    own = network.state_dict()
    lacking = sorted(own.keys() - readout.keys() - {f"{body_prefix(network)}{name}" for name in body})
    unknown = sorted(name for name, tensor in readout.items() if name not in own or own[name].shape != tensor.shape)
    if lacking or unknown:
        raise GraftError(
            f"The graft's readout is no head of this {origin.binding.architecture}: "
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
        GraftError: transformers has none for this architecture, or its classifier computes something else.
    """
    loaded, task = parts.loaded, parts.origin.task
    encoder = loaded.encoder(task)
    ids = encoder(Rows(("What was it ?",), (), ((0,) * 4,)))
    inputs = cast(Any, loaded.model).inputs(torch.tensor(ids, device="cpu"))
    name_labels_(parts.config, task.labels, parts.origin.classes)
    network = _token_classifier(parts, inputs)
    readout = "the model's head, at the first token of each word"
    call = 'pipeline("token-classification", model={}, aggregation_strategy="first")'
    return TaskNetwork(network, tokenizer_of(loaded, list(inputs)), TOKEN_CLASSIFIER, readout, call)


def _token_classifier(parts: Parts, row: Mapping[str, Tensor]) -> Any:
    """Return the architecture's token classifier, checked on a row ``(1, L)`` to compute W h + b at each token."""
    import transformers

    config, readout = parts.config, linear_readout(parts, "all")
    try:
        loader: Any = transformers.AutoModelForTokenClassification
        network = loader.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    except ValueError as error:
        raise _refusal(config, "there is none") from error
    _, head = linear_head(network) or ("", None)
    if not _load_body(network, parts.body) or head is None or readout.misfit(head.state_dict()):
        raise _refusal(config, f"{type(network).__name__} has another head")
    load_tensors_(head, parts.readout)
    if not reads_alike(readout, network, row):
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

    A caller that uses the chat template, such as ``pipeline("text-generation")``, builds the task's prompts: the tokenizer's
    template has their instruction and form. Generation ends at the token that ends the task's texts.
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
    loader, call = "AutoModelForCausalLM", 'pipeline("text-generation", model={})'
    if loaded.writes_apart:  # no pipeline applies a chat template to an encoder-decoder
        loader, call = "AutoModelForSeq2SeqLM", ""
    name_labels_(backbone.config, ())
    readout = f"at most {task.max_new_tokens:,} tokens, greedily"
    if task.stop:
        readout += f", up to one of {json.dumps(task.stop, ensure_ascii=False)}"
    if task.closed_answers:
        closed = ", ".join(task.closed_answers)
        readout += f"; forgetfree predict takes the likeliest of {closed}, and here texts are written freely"
    return TaskNetwork(backbone, tokenizer, loader, readout, call, generation=generation)
