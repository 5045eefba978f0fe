"""The files of a model in Hugging Face layout, read as data only and refused if they do not fit its network.

Nothing here runs code that comes with a model: weights are read from safetensors files and never unpickled, and no class is
loaded from a model's own files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forgetfree.core.families import HEADS, OLD_BUFFERS, POOLER, TEXT_ENCODER
from forgetfree.core.linear_layers import is_plain
from forgetfree.core.readout_model import LINEAR
from forgetfree.display import counted
from forgetfree.errors import ModelError
from forgetfree.files import is_full, size_of
from forgetfree.json_file import check, check_fields, read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: The types that weights may have in files, as safetensors names them.
_FLOATS = ("F64", "F32", "F16", "BF16")
#: The implementations of attention that transformers itself has.
_ATTENTION = ("eager", "sdpa", "flex_attention")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model.pt", "model.pt", "model.bin")
#: The most layers of any kind, and the most labels, that a config.json may ask for; transformers makes a name for each label.
MOST_LAYERS, MOST_LABELS = 1000, 100_000


def read_config(path: str, name: str, *, quantised: bool = False) -> Any:
    """Read the Hugging Face configuration of a directory or hub name.

    Args:
        path: directory or hub name.
        name: the model's name, for messages.
        quantised: whether weights may be quantised.

    Raises:
        ModelError: it cannot be read, or asks for too many layers or labels, attention code from elsewhere, quantized weights,
            or weights in files of other names.
    """
    import transformers

    file = Path(path) / "config.json"
    if file.is_file():  # before anything of that size is made
        read_json(file, ModelError, "Put back the config.json that was saved with the weights.", _check_config)
    with explained(name), quiet(transformers):
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    parts = [config, *(getattr(config, part, None) for part in config.sub_configs)]
    for attention in filter(None, (getattr(part, "_attn_implementation", None) for part in parts)):
        if attention not in _ATTENTION:
            raise ModelError(
                f"The config.json of model {name!r} asks for the attention {attention!r} (attn_implementation), which is code "
                f"from elsewhere, such as a kernel of the hub, and forgetfree runs none. Known: {', '.join(_ATTENTION)}. Take "
                "attn_implementation out of it."
            )
    if not quantised and (quantization := getattr(config, "quantization_config", None)):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise _quantized(name, f"its config.json has a quantization_config{f' ({method})' if method else ''}")
    if files := getattr(config, "transformers_weights", None):
        raise ModelError(
            f"The config.json of model {name!r} names other weights ({files!r}); expected {WEIGHTS} or {INDEX}. Save the "
            "model again with save_pretrained."
        )
    return config


def _check_config(config: Any) -> None:
    check_fields("", config, {})
    _check_counts(config)
    architectures = config.get("architectures") or []
    named = isinstance(architectures, list) and all(isinstance(each, str) for each in architectures)
    check("architectures", architectures, named, "a list of names")


def _check_counts(config: Mapping[str, Any]) -> None:
    """Check the numbers of layers and labels, also of a part that has a configuration of its own."""
    for key, value in config.items():
        most = MOST_LAYERS if "layer" in key else MOST_LABELS if key.endswith("num_labels") else None
        if most is not None and isinstance(value, int | float):
            check(key, value, value <= most, f"at most {most:,}")
        if isinstance(value, dict) and key.endswith("config"):
            _check_counts(value)
    if isinstance(names := config.get("id2label"), dict):
        check("id2label", f"{len(names):,} names", len(names) <= MOST_LABELS, f"at most {MOST_LABELS:,} names")


def read_tokenizer(path: str, name: str) -> Any:
    """Read the Hugging Face tokenizer of a directory or hub name.

    Raises:
        ModelError: there is none, or its class is code that comes with its files.
    """
    import transformers

    with explained(name), quiet(transformers):
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        tokenizer("a text", truncation=True)  # its settings are used for the first time here
    # For a class that it does not know, transformers still reads the vocabulary.
    known = type(tokenizer) is not transformers.PreTrainedTokenizerFast
    if not known and "AutoTokenizer" in (tokenizer.init_kwargs.get("auto_map") or ()):
        raise _needs_code(name)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # transformers makes this without files
        raise ModelError(
            f"Model {name!r} has no tokenizer: there is no vocabulary beside its weights. Save the "
            "model's tokenizer there, too, with save_pretrained."
        )
    return tokenizer


def read_weights(
    path: str, loader: str, name: str, dtype: torch.dtype = torch.float32, *, quantised: bool = False, **extra: Any
) -> tuple[Any, list[str]]:
    """Read a Hugging Face model, and return it with the names of its tensors that the files lack.

    Args:
        path: directory or hub name.
        loader: a class of ``transformers``, e.g. ``AutoModel``.
        name: the model's name, for messages.
        dtype: the dtype of its weights, whatever the files have.
        quantised: whether the files' weights may be quantised; ``dtype`` then applies to the others.
        extra: more arguments for the loader.

    Raises:
        ModelError: the files cannot be read, do not fit their config.json, or hold weights that are not finite floats.
    """
    import transformers

    files, cls = weight_files(path, name), getattr(transformers, loader)
    dtypes = _dtypes(files, name)
    with explained(name), quiet(transformers):
        if hasattr(cls, "from_config"):
            _check_size(cls.from_config, read_config(path, name, quantised=quantised), files, name)
        backbone, info = cls.from_pretrained(
            path,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **extra,
        )
    if mismatched := sorted(info["mismatched_keys"], key=str):
        key, got, expected = mismatched[0]
        raise ModelError(
            f"The weights of model {name!r} do not fit its config.json: {key!r} should have shape "
            f"{tuple(expected)}, got {tuple(got)}. Put back the config.json that was saved with the weights."
        )
    left = info["unexpected_keys"]
    if loader == TEXT_ENCODER:  # of an encoder-decoder
        left = [key for key in left if not re.search(r"(^|\.)decoder\.", key)]
    _check_tensors(backbone, dtypes, left, name)
    backbone.config.return_dict = True  # its outputs are read by name, even if its config.json says otherwise
    if hasattr(backbone.base_model, "set_attention_type"):  # BigBird would change it for good at the first short batch
        backbone.base_model.set_attention_type("original_full")
    return backbone, sorted(map(str, info["missing_keys"]))


def weight_files(path: str, name: str) -> list[str]:
    """Return the safetensors files of a directory or hub name.

    Raises:
        ModelError: it has none, or is a PEFT adapter.
    """
    import transformers
    from transformers.utils.hub import get_checkpoint_shard_files, has_file

    with explained(name), quiet(transformers):
        adapter, files = _find(path, "adapter_config.json"), list(filter(None, [_find(path, WEIGHTS)]))
        if not files and (index := _find(path, INDEX)):
            files, _ = get_checkpoint_shard_files(path, index)  # type: ignore[no-untyped-call]
    if adapter:
        raise ModelError(
            f"Model {name!r} is a PEFT adapter, or holds one beside its weights (adapter_config.json). Merge it into its model "
            "first, with merge_and_unload, and save that with save_pretrained."
        )
    if files:
        return files
    with explained(name):
        pickled = [file for file in _PICKLED if has_file(path, file)]
    if pickled:
        raise ModelError(
            f"Model {name!r} has its weights pickled ({', '.join(pickled)}), and reading such a file may run any code, so "
            f"safetensors alone are read. If you trust the file, load it by transformers once, and save_pretrained writes "
            f"{WEIGHTS}."
        )
    raise ModelError(
        f"Model {name!r} has no weights: expected {WEIGHTS} or {INDEX}, found neither. Save the model with "
        "save_pretrained; hub names need a connection."
    )


def model_files(path: str, name: str) -> list[str]:
    """Return the files of a model itself, without its tokenizer: weights, configuration, and index of weights.

    Args, Raises: as `weight_files`.
    """
    others = (_find(path, file) for file in ("config.json", "generation_config.json", INDEX))
    return [*weight_files(path, name), *filter(None, others)]


def _find(path: str, file: str) -> str | None:
    """Return the path of a file in a directory or under a hub name; ``None`` if there is none."""
    from transformers.utils.hub import cached_file

    place: str | None = cached_file(path, file, _raise_exceptions_for_missing_entries=False)
    return place


def _check_size(make: Callable[..., nn.Module], config: Any, files: Iterable[str], name: str) -> None:
    """Raise ``ModelError`` if config.json asks for a network far larger than its weights, before it is made."""
    stored = sum(Path(file).stat().st_size for file in files)
    with torch.device("meta"):
        wanted = sum(parameter.numel() for parameter in make(config, trust_remote_code=False).parameters())
    if wanted > 8 * stored:  # a parameter takes half a byte at least
        raise ModelError(
            f"Model {name!r} cannot be loaded: its config.json asks for {wanted:,} parameters, and its weights have {stored:,} "
            "bytes. Put back the files that were saved together."
        )


# -- The content of the files ----------------------------------------------------------------------------


def _dtypes(files: Iterable[str], name: str) -> dict[str, str]:
    """Return the dtype of each tensor in the files, from the headers alone."""
    from safetensors import safe_open

    dtypes: dict[str, str] = {}
    with explained(name):
        for path in files:
            size_of(Path(path))
            with safe_open(path, "pt") as file:
                dtypes |= {key: str(file.get_slice(key).get_dtype()) for key in file.keys()}  # noqa: SIM118  # no dict
    return dtypes


def _quantized(name: str, reason: str) -> ModelError:
    return ModelError(
        f"The weights of model {name!r} are quantized: {reason}; expected float32, float16 or bfloat16. A graft is written "
        "into entries, so give the model as it was before it was quantized; or let tasks take effect beside its weights, by "
        "forgetfree.learning."
    )


@torch.no_grad()
def _check_tensors(backbone: Any, dtypes: Mapping[str, str], unexpected: Iterable[str], name: str) -> None:
    """Raise ``ModelError`` if a float is stored in another type, the body has no place for a tensor, or one is not finite.

    In the file of a model with a head, the names of the body's tensors have a prefix; in the file of a body they have none.
    """
    prefix, tensors = f"{backbone.base_model_prefix}.", backbone.state_dict(keep_vars=True)
    floats = {key.removeprefix(prefix) for key, tensor in tensors.items() if is_plain(tensor)}
    for key, dtype in dtypes.items():
        if dtype not in _FLOATS and key.removeprefix(prefix) in floats:
            raise _quantized(name, f"{key!r} is of type {dtype}")
    headed = any(key.startswith(prefix) for key in dtypes)
    fine = f"{POOLER}|{OLD_BUFFERS}" if headed else f"{POOLER}|{OLD_BUFFERS}|{HEADS}"
    unused = sorted(key for key in unexpected if (not headed or key.startswith(prefix)) and not re.search(fine, key))
    if unused:
        raise ModelError(
            f"The weights of model {name!r} do not fit its config.json: the network has no place for {len(unused)} of their "
            f"tensors, e.g. {unused[0]!r}, and would answer as another model. Put back the config.json that was saved with the "
            "weights."
        )
    for key, tensor in {id(tensor): (key, tensor) for key, tensor in tensors.items()}.values():
        # Minimum and maximum are finite only if all entries are: a NaN becomes both.
        if is_plain(tensor) and tensor.numel() and not bool(torch.stack(tensor.aminmax()).isfinite().all()):
            raise ModelError(
                f"The weights of model {name!r} are damaged: {key!r} holds NaN or infinity. Save the model again, or download "
                "it again."
            )


def check_weights(backbone: Any, missing: list[str], tokenizer: Any, readout: str, name: str) -> None:
    """Raise ``ModelError`` unless every weight was loaded and every token id has an embedding."""
    if missing:
        remedy = (
            "Save the model whole" if readout in LINEAR else "Use --readout linear, or a model saved with its LM head"
        )
        raise ModelError(
            f"Model {name!r} lacks {counted(len(missing), 'weight')} that --readout {readout} needs, e.g. "
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


def _needs_code(name: str) -> ModelError:
    return ModelError(
        f"Model {name!r} needs code from its own files, which forgetfree does not run. Give a model whose architecture and "
        "tokenizer are part of transformers."
    )


# -- While reading ---------------------------------------------------------------------------------------


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Raise every error inside the block as a ``ModelError`` about the model ``name``."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if is_full(error):  # of a temporary directory
            raise
        if "trust_remote_code" in str(error):
            raise _needs_code(name) from error
        reason = re.sub(r":\s*\n\s*", ": ", str(error).strip()) or type(error).__name__
        reason = reason.splitlines()[0].rstrip(".")
        if not isinstance(error, OSError | ValueError | ImportError):
            reason = f"its files are not as transformers expects them ({type(error).__name__}: {reason})"
        raise ModelError(
            f"Model {name!r} cannot be loaded: {reason}. Give a directory in Hugging Face layout that "
            "holds config.json, weights and tokenizer, or 'minilm'; hub names need a connection."
        ) from error


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Silence progress bars and notes about missing weights, for which we raise our own error."""
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
