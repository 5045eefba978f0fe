"""Loads a `TaskModel` and its tokenizer by a name or from a directory, with a readout that suits its configuration."""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from forgetfree import registry
from forgetfree.core.families import (
    CAUSAL_HEAD,
    DISCRIMINATORS,
    ENCODER_DECODERS,
    TWO_WAYS,
    WRITING_HEAD,
    head_dropout,
    positions_of,
)
from forgetfree.core.fingerprint import fingerprint_of
from forgetfree.core.parameters import ParameterSpace, load_tensors_
from forgetfree.core.readout import Pooling, Readout, empty_linear
from forgetfree.core.readout_model import BY_WORDS, LINEAR, READOUTS, ReadoutKind, ReadoutModel
from forgetfree.data.encoding import Encoder, check_label_words, label_word_ids, words_without_token
from forgetfree.display import listed
from forgetfree.errors import LedgerError, ModelError, UsageError
from forgetfree.ledger.binding import Binding, network_of, tokenizer_digest
from forgetfree.ledger.ledger import Ledger
from forgetfree.models.location import locate
from forgetfree.models.model_files import check_weights, explained, quiet, read_config, read_tokenizer, read_weights
from forgetfree.models.task_model import TaskModel
from forgetfree.models.token_inputs import TokenLayout
from forgetfree.recipes import ModelDtype
from forgetfree.tasks import MAX_LENGTH, TaskDefinition

#: The class that loads a language model, by its readout; see `loader_of`.
LANGUAGE_MODELS = {
    "prompt": "AutoModelForMaskedLM",
    "causal": "AutoModelForCausalLM",
    "generate": "AutoModelForCausalLM",
}


def language_model(config: Any) -> Literal["prompt", "causal"] | None:
    """Return the readout of an architecture's language model: ``prompt`` if masked, ``causal``, or none."""
    masked = config.model_type in _masked_kinds()
    for architecture in config.architectures or ():
        if architecture.endswith("WithLMHeadModel"):  # XLM's and FlauBERT's may be either
            return "causal" if config.causal else "prompt"
        if "ForMaskedLM" in architecture:
            return "prompt"
        if "ForPreTraining" in architecture and masked and architecture not in DISCRIMINATORS:
            return "prompt"
        # In BERT's kinds and in XLNet, tokens attend to later tokens, unless config.json says otherwise.
        if (
            re.search(CAUSAL_HEAD, architecture)
            and (_is_decoder(config) or not masked)
            and config.model_type not in TWO_WAYS
        ):
            return "causal"
    return None


def writes_texts(config: Any) -> bool:
    """Return whether an architecture's language model writes texts: a causal one, or an encoder-decoder with its head."""
    named = any(re.search(WRITING_HEAD, each) for each in config.architectures or ())
    return language_model(config) == "causal" or (bool(config.is_encoder_decoder) and named)


def loader_of(config: Any, readout: str, name: str) -> str:
    """Return the class of ``transformers`` that loads the network for a readout.

    Raises:
        ModelError: it is an encoder-decoder of a type without a known place to read it.
    """
    if readout == "generate" and config.is_encoder_decoder:
        return "AutoModelForSeq2SeqLM"
    return LANGUAGE_MODELS.get(readout) or body_loader(config, name)


def body_loader(config: Any, name: str) -> str:
    """Return the class of ``transformers`` that loads the network for a linear readout.

    Raises:
        ModelError: it is an encoder-decoder of a type without a known place to read it.
    """
    if config.is_encoder_decoder and config.model_type not in ENCODER_DECODERS:
        raise ModelError(
            f"Model {name!r} is an encoder-decoder of the type {config.model_type!r}, and of these only "
            f"{', '.join(ENCODER_DECODERS)} are read. Give one of them, an encoder, or a causal model."
        )
    return ENCODER_DECODERS.get(config.model_type, "AutoModel")


def pooling_of(readout: ReadoutKind, config: Any) -> Pooling:
    """Return the pooling for a linear layer: the mean for the readout ``mean``, else a row's first or last state.

    It is the last if tokens attend only to earlier tokens (by the head, or else by the purpose of the kind of model), and in
    encoder-decoders, which are trained to end a text with a special token and not to begin it with one.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.model_type
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in _masked_kinds()
    last = causal or language_model(config) == "causal" or _is_decoder(config) or kind in ENCODER_DECODERS
    return "mean" if readout == "mean" else "last" if last else "first"


def _is_decoder(config: Any) -> bool:
    return bool(getattr(config, "is_decoder", False)) and not config.is_encoder_decoder


def _masked_kinds() -> Container[str]:
    """Return the kinds of models that have a masked language model in ``transformers``."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return MODEL_FOR_MASKED_LM_MAPPING_NAMES


def choose_readout(config: Any, readout: str, name: str) -> ReadoutKind:
    """Return the readout of a model: the requested one, or for ``auto`` the model's own.

    Raises:
        ModelError: the model has no head for the requested readout, or is an encoder-decoder that `body_loader` refuses or that
            names no start token for its decoder.
    """
    if readout == "generate" and writes_texts(config):
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            raise ModelError(
                f"Model {name!r} is an encoder-decoder, and its config.json does not say which token its decoder begins with: "
                "expected decoder_start_token_id. Set it (T5 has pad_token_id there, BART eos_token_id)."
            )
        return "generate"
    body_loader(config, name)  # refuses before tokenizer and weights are read
    own = language_model(config)
    if readout == "mean":
        return "mean"
    if readout == "linear" or (readout == "auto" and own is None):
        return "linear"
    if readout in ("auto", own):
        assert own is not None
        return own
    needed = "a masked" if readout == "prompt" else "a causal"
    architectures = " ".join(config.architectures or ()) or "without a head"
    if readout == "causal" and re.search(CAUSAL_HEAD, architectures):
        architectures += ", in which a token also attends to later tokens"
    remedy = "Give one, or another readout."
    if readout == "generate":
        remedy = "Give one to --model, such as smollm2, which 'forgetfree fetch smollm2' gets."
    raise ModelError(
        f"The readout {readout!r} needs {needed} language model{' or an encoder-decoder' * (readout == 'generate')}, and "
        f"{name!r} is {architectures}. {remedy}"
    )


def loader_arguments(config: Any, readout: str) -> dict[str, Any]:
    """Return more arguments for the loader: a linear readout leaves out the pooler, which some checkpoints lack."""
    from transformers import MODEL_MAPPING

    network: Any = MODEL_MAPPING.get(type(config), None)
    takes = inspect.signature(network).parameters if isinstance(network, type) else {}
    return {"add_pooling_layer": False} if readout in LINEAR and "add_pooling_layer" in takes else {}


@dataclass(frozen=True)
class LoadedModel:
    """A pre-trained model with its tokenizer, its readout and its fingerprint.

    Attributes:
        name: the name that the user gave.
        model: backbone and readouts; no tasks yet.
        tokenizer: the Hugging Face tokenizer; none for models that read no text.
        readout: the kind of its readout.
        fingerprint: the SHA-256 of the backbone's weights and buffers.
        max_length: the maximum length of a row, in tokens.
        note: a remark on the choice of the readout; empty if there is none.
    """

    name: str
    model: ReadoutModel
    tokenizer: Any
    readout: ReadoutKind
    fingerprint: str
    max_length: int = MAX_LENGTH
    note: str = ""

    @cached_property
    def tokenizer_digest(self) -> str:
        """The SHA-256 of the tokenizer's behaviour; empty if there is none."""
        return "" if self.tokenizer is None else tokenizer_digest(self.tokenizer, chats=self.readout == "generate")

    def binding(self) -> Binding:
        """Return the dependencies of answers besides weights."""
        max_length = 0 if self.tokenizer is None else self.max_length
        network, architecture = network_of(self.model.backbone), self.model.architecture
        return Binding(network, self.tokenizer_digest, self.readout, max_length, architecture)

    @property
    def pad(self) -> int:
        """The token id that fills short rows."""
        tokens: Any = self.model.tokens
        return int(tokens.pad)

    def encoder(self, task: TaskDefinition) -> Encoder:
        """Return the encoder of the texts of ``task`` for this model's readout."""
        kind = registry.kind(task.kind)
        kind.check_readout(task, self.readout)
        task_encoder: Encoder = kind.encoder(task, self)
        return task_encoder

    def add_task(self, task: TaskDefinition, seed: int = 0, *, width: int | None = None) -> int:
        """Add a task's readout to the model, and return its task label.

        Args:
            task: the task.
            seed: the seed of the initial weights.
            width: the number of logits, if they include other tasks' labels; default: the task's own.
        """
        kind, columns = registry.kind(task.kind), list[int]()
        if self.readout in BY_WORDS:
            kind.check_readout(task, self.readout)
            columns = label_word_ids(self.tokenizer, task.label_words, task.name)
        elif (head := getattr(self.model, "head", None)) is not None:
            columns = head.classes
        outputs = width or kind.outputs(task, self)
        return self.model.add_task(task.name, outputs, columns, seed, yes_or_no=kind.answer == "labels")

    @property
    def writes_apart(self) -> bool:
        """Whether the model is an encoder-decoder that writes texts: the encoder reads prompts, and the decoder writes."""
        return self.model.writes_apart

    def check_words(self, tasks: Iterable[TaskDefinition]) -> None:
        """Raise ``ModelError``, with the faults of all tasks, unless every label word of the readout is a single token."""
        if self.readout in BY_WORDS:
            check_label_words(self.tokenizer, {task.name: task.label_words for task in tasks})


def plain_generation(tokenizer: Any, pad: int, config: Any) -> Any:
    """Return a generation configuration of transformers, without a model's own settings, such as temperature or repetition.

    Args:
        tokenizer: names the tokens that begin and end a text.
        pad: the id that fills short rows.
        config: the model's configuration; for an encoder-decoder it names the decoder's start token.
    """
    from transformers import GenerationConfig

    start = getattr(config, "decoder_start_token_id", None)
    return GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=pad,
        decoder_start_token_id=start,
    )


def usual_max_length(tasks: Iterable[TaskDefinition]) -> int:
    """Return the default maximum length of a row, in tokens, for a model that learns these tasks."""
    return max((registry.kind(task.kind).max_length for task in tasks), default=MAX_LENGTH)


def load_model(
    name: str | nn.Module,
    readout: str = "auto",
    *,
    tokenizer: Any = None,
    graftable: str | None = None,
    max_length: int | None = None,
    dtype: ModelDtype = "float32",
    tasks: Iterable[TaskDefinition] = (),
    binding: Binding | None = None,
    quantised: bool = False,
) -> LoadedModel:
    """Load a pre-trained model.

    >>> load_model("minilm").model.readout  # doctest: +SKIP
    'linear'

    Args:
        name: ``minilm``, ``smollm2``, a directory in Hugging Face layout, or a name on the hub; or a ``PreTrainedModel``, which
            is copied as ``save_pretrained`` writes it.
        readout: ``linear``, ``mean``, ``prompt``, ``causal``, ``generate``, or ``auto``: by the model's head (masked LM →
            ``prompt``, causal LM → ``causal``, none → ``linear``); ``linear`` if label words are not single tokens.
        tokenizer: the tokenizer of a ``PreTrainedModel``.
        graftable: see `TaskModel`.
        max_length: the maximum length of a row, in tokens, limited by the model's positions. Default: `usual_max_length` of
            ``tasks``.
        dtype: the dtype of the backbone's weights, whatever its files have; readouts are in float32.
        tasks: the tasks to learn; ``auto`` checks their label words.
        binding: gives readout and maximum length in place of ``readout`` and ``max_length``, and the class of the heads.
        quantised: whether the files' weights may be quantised.

    Raises:
        UsageError: the name is not known anywhere, or the readout is none of the five.
        ModelError: the model is damaged, or has no head for the readout; or a part of one in memory is frozen, and
            ``graftable`` is not given.
    """
    architecture = ""
    if binding is not None:
        readout, max_length, architecture = binding.readout, binding.max_length, binding.architecture
    headed = readout == "classifier" and bool(architecture)
    if readout not in ("auto", *READOUTS) and not headed:
        raise UsageError(f"Unknown readout {readout!r}. Known: auto, {', '.join(READOUTS)}.")
    tasks = list(tasks)
    if max_length is None:
        max_length = usual_max_length(tasks)
    with _files_of(name, tokenizer, graftable) as (path, called):
        config = read_config(path, called, quantised=quantised)
        kind = choose_readout(config, "linear" if headed else readout, called)
        tokenizer = read_tokenizer(path, called)
        if note := _words_note(tokenizer, readout, kind, tasks):
            kind = "linear"
        loader = loader_of(config, kind, called)
        more = loader_arguments(config, kind)
        backbone, missing = read_weights(path, loader, called, getattr(torch, dtype), quantised=quantised, **more)
    check_weights(backbone, missing, tokenizer, kind, called)
    fingerprint = fingerprint_of(backbone)
    tokens = TokenLayout(
        pad=_filler(tokenizer, kind, called),
        mask=tokenizer.mask_token_id,
        separator=tokenizer.sep_token_id if getattr(config, "type_vocab_size", 0) > 1 else None,
    )
    if kind == "generate":
        backbone.generation_config = plain_generation(tokenizer, tokens.pad, backbone.config)
    pooling, dropout, head = pooling_of(kind, config), head_dropout(config), None
    if headed:
        from forgetfree.models.heads import Head, classifier_class

        classifier_class(architecture, backbone.config)
        kind, head = "classifier", Head(architecture)
    model = TaskModel(backbone, tokens, kind, pooling=pooling, head=head, dropout=dropout, graftable=graftable)
    return LoadedModel(called, model, tokenizer, kind, fingerprint, min(max_length, positions_of(backbone)), note)


def load_bound(name: str, ledger: Ledger) -> LoadedModel:
    """Load the model of a ledger with the readout and length of its binding; without a binding, with the defaults.

    >>> load_bound("DIR", Ledger.load("skills.safetensors"))  # doctest: +SKIP

    Args:
        name: see `load_model`.
        ledger: gives binding and dtype; if its tasks take effect beside the weights, these may be quantised.
    """
    dtype: Any = ledger.dtype or dtype_of(ledger.space)
    return load_model(name, binding=ledger.binding, dtype=dtype, quantised=ledger.effect == "beside")


def readout_of(ledger: Ledger, task: str, config: Any) -> Readout:
    """Return the readout of a ledger's task, with the tensors in its record, for the body of a configuration.

    Raises:
        LedgerError: the record has neither a linear layer nor a definition with a classifier's head.
    """
    record, binding = ledger.records[ledger.position(task)], ledger.binding or Binding("")
    tensors, definition = record.own_readout, record.definition
    if "weight" in tensors:
        labels, width = tensors["weight"].shape
        words = definition is not None and registry.kind(definition.kind).answer == "tags"
        pooling = "all" if words else pooling_of(binding.readout, config)
        readout = Readout(task, labels, empty_linear(width, labels), pooling=pooling)
    elif binding.readout == "classifier" and definition is not None:
        from forgetfree.models.heads import make_head

        labels = len(definition.labels)
        readout = Readout(task, labels, make_head(binding.architecture, config, labels, config.pad_token_id))
    else:
        raise LedgerError(missing_definition(task))
    load_tensors_(readout.layer, tensors)
    return readout


def missing_definition(task: str) -> str:
    """Return the message about a task without a definition in its record."""
    return (
        f"The ledger has no definition of task {task!r}: it was learned without labels= and tokenizer=, or its rows are not "
        "texts. Learn it with them, or answer by forgetfree.answering(model, ledger, task)."
    )


@contextmanager
def _files_of(model: str | nn.Module, tokenizer: Any, graftable: str | None) -> Iterator[tuple[str, str]]:
    """Yield the directory or hub name of a model, and its name in messages; a model in memory is saved inside the block."""
    if isinstance(model, str) and tokenizer is None:
        yield locate(model), model
        return
    check_in_memory(model, tokenizer)
    import transformers

    network: Any = model
    called = type(network).__name__
    if graftable is None:
        ParameterSpace.of(network).check_trainable(network, called)
    with tempfile.TemporaryDirectory() as directory:  # so it is checked like any other, and not touched
        with explained(called), quiet(transformers):
            network.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
        yield directory, called


def check_in_memory(model: Any, tokenizer: Any) -> None:
    """Raise ``UsageError`` unless a model in memory is one of transformers, with its tokenizer."""
    from transformers import PreTrainedModel

    if tokenizer is None or not isinstance(model, PreTrainedModel):
        raise UsageError(
            "A model in memory is a PreTrainedModel and its tokenizer, got model="
            f"{repr(model) if isinstance(model, str) else f'a {type(model).__name__}'} and "
            f"tokenizer={type(tokenizer).__name__}. Give both, or the name or directory of a model alone. Any other network "
            "learns an Avalanche benchmark: see forgetfree.continual.stream.benchmark_stream."
        )


def dtype_of(space: ParameterSpace) -> ModelDtype:
    """Return the dtype that a model was loaded in, by its parameter space."""
    return "bfloat16" if torch.bfloat16 in space.dtypes else "float32"  # a family may keep some tensors in float32


def config_of(backbone: nn.Module) -> Any:
    """Return the configuration that training depends on besides weights, as JSON.

    Unlike `network_of`, it includes keys that do not affect answers, such as dropout.
    """
    config = getattr(backbone, "config", None)
    if config is None:
        return repr(backbone)
    return {key: value for key, value in config.to_diff_dict().items() if key != "transformers_version"}


def _words_note(tokenizer: Any, readout: str, kind: ReadoutKind, tasks: Iterable[TaskDefinition]) -> str:
    """Return why ``auto`` falls back to ``linear``: label words are not single tokens; an empty text if it does not."""
    if readout != "auto" or kind not in LANGUAGE_MODELS:
        return ""
    wrong = [
        f"{word!r} of {each.name!r}" for each in tasks for word in words_without_token(tokenizer, each.label_words)
    ]
    if not wrong:
        return ""
    return (
        f"The readout is 'linear', because '{kind}' needs one token for each label, and in this model's vocabulary, these "
        f"label words are not single tokens: {listed(wrong, 5)}. To use '{kind}', set label_words in the task's source.json."
    )


def _filler(tokenizer: Any, kind: ReadoutKind, name: str) -> int:
    """Return the token id that fills short rows: no row may end with it, because a row's end is found by it.

    It is the padding token or the end-of-text token, unless rows end with that token, or it also stands for unknown words.
    """
    special = set(tokenizer.all_special_ids) - {tokenizer.mask_token_id}
    end = tokenizer("a")["input_ids"][-1]
    ending = end if kind not in ("causal", "generate") and end in special else tokenizer.unk_token_id
    named = [i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None]
    candidates = [i for i in (*named, *sorted(special)) if i != ending]
    if not candidates and ending == tokenizer.unk_token_id:
        candidates = named  # GPT-2's only special token: it stands for unknown words, and there are none
    if not candidates:
        raise ModelError(
            f"The tokenizer of model {name!r} has no token to fill short rows with: expected a special token that no row ends "
            f"with, got {tokenizer.convert_ids_to_tokens(sorted(special))}. Give it a pad_token, and save it again."
        )
    return int(candidates[0])
