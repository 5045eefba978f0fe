"""Adapters of PEFT on disk: read, and merged into their model.

An adapter is `adapter_config.json` and `adapter_model.safetensors`, as PEFT's `save_pretrained` writes them.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forgetfree.display import brief
from forgetfree.errors import ForgetfreeError, ModelError, UsageError
from forgetfree.json_file import check, read_json
from forgetfree.models.checkpoint import check_labels, explained, quiet, read_weights
from forgetfree.models.location import locate

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: The last layer of a classification head.
_HEAD = r"\.(classifier|score)(\.out_proj)?\.weight$"
#: How PEFT names the tensors of the network that it wraps.
PREFIX = "base_model.model."
_REMEDY = "Save the adapter again, with save_pretrained of PEFT."
#: The largest `adapter_config.json` that is read, in bytes; the most rounds of its starting values (PiSSA); how many times as
#: many numbers as its network an adapter may have.
MOST_BYTES, MOST_ROUNDS, MOST_TIMES = 4 * 2**20, 100, 10
#: How long the patterns of an adapter may take on the names of a network, in seconds: some back-track for ever.
MOST_SECONDS = 5
#: What PEFT makes of values, and not of shapes alone. It holds their sizes against the network's by itself.
_BY_VALUE = ("SHIRA", "BOFT")
#: Matches the patterns on the names as PEFT does, whatever that comes to.
_MATCHING = r"""
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    for form in ("@", r"(.*\.)?(@)$", r".*\.@$", r"(^|.*\.)@($|\..*)", r"(?:^|.*?\.)@\.(?P<idx>\d+)\."):
        try:
            found = re.compile(form.replace("@", pattern))
        except (re.error, OverflowError, RecursionError):
            continue  # PEFT tells it
        for name in names:
            found.match(name), found.fullmatch(name)
"""
#: The classes of transformers by PEFT's `task_type`.
_LOADERS = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "FEATURE_EXTRACTION": "AutoModel",
}


def is_adapter(directory: str | Path) -> bool:
    """Return whether a directory holds an adapter of PEFT."""
    return (Path(directory) / CONFIG).is_file()


def adapter_config(directory: str | Path) -> dict[str, Any]:
    """Return the content of `adapter_config.json`.

    Raises:
        ModelError: it is damaged, or asks for layers that the network does not have.
    """
    path = Path(directory) / CONFIG
    if path.is_file() and (size := path.stat().st_size) > MOST_BYTES:
        raise ModelError(f"{path} has {size:,} bytes, and at most {MOST_BYTES:,} are read. {_REMEDY}")
    config: dict[str, Any] = read_json(path, ModelError, _REMEDY, _check_config)
    if config.get("layer_replication"):
        raise ModelError(
            f"The adapter {str(directory)!r} repeats layers of its model (layer_replication), which makes another network of "
            "it. Merge the adapter by PEFT, and give what it saves to --model."
        )
    return config


def _check_config(config: Any) -> None:
    check("the content", config, isinstance(config, dict), "an object")
    kind = config.get("peft_type")
    check("peft_type", kind, isinstance(kind, str), "a name of PEFT")
    rounds = re.fullmatch(r"pissa_niter_(\d+)", start := str(config.get("init_lora_weights")))
    few = rounds is None or (len(rounds[1]) < 4 and int(rounds[1]) <= MOST_ROUNDS)
    check("init_lora_weights", start, few, f"at most {MOST_ROUNDS} rounds")


def adapter_shapes(directory: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors by name, from the header of its file alone.

    Raises:
        ModelError: there is no file of weights in safetensors, or it is damaged.
    """
    from safetensors import safe_open

    name = str(directory)
    if not (Path(directory) / WEIGHTS).is_file():  # a .bin would be a pickle, and a pipe might never end
        raise ModelError(f"The adapter {name!r} has no {WEIGHTS} that is a file. {_REMEDY}")
    with explained(name), safe_open(Path(directory) / WEIGHTS, "pt") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118  # no dict


def adapter_loader(directory: str | Path) -> str:
    """Return the class of ``transformers`` that loads the network an adapter belongs to.

    Raises:
        UsageError: the adapter does not say it.
    """
    config = adapter_config(directory)
    mapping = config.get("auto_mapping")
    named = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    loader = _LOADERS.get(str(config.get("task_type"))) or named
    import transformers

    if not isinstance(loader, str) or not hasattr(getattr(transformers, loader, None), "from_pretrained"):
        raise UsageError(
            f"The adapter {str(directory)!r} does not say which network it belongs to: expected the task_type "
            f"{', '.join(_LOADERS)}, got {config.get('task_type')!r}. Write it into {CONFIG}, or merge the adapter by PEFT."
        )
    return loader


def put_on(network: Any, directory: str | Path) -> Any:
    """Return the network with the adapter merged into its weights, by PEFT's own `merge_and_unload`.

    Raises:
        ModelError: the files are damaged, or belong to another network.
    """
    import transformers
    from peft import PeftModel

    name, shapes = str(directory), adapter_shapes(directory)
    config = adapter_config(directory)
    # Of indices beyond a matrix, PEFT's sparse tensors would read foreign memory.
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    with explained(name), quiet(transformers), warnings.catch_warnings(), checks(True):
        warnings.simplefilter("ignore")
        _check_patterns(network, config, name)
        if config["peft_type"] not in _BY_VALUE:
            shell = _on_shapes(network, name)
            if config["peft_type"] != "ADALORA":  # whose ranks are cut by values
                _check_places(shell, shapes, network, name)
            _check_size(shell, network, name)
        with _fitting(network, name):
            adapted: Any = PeftModel.from_pretrained(network, name, torch_device="cpu")
        _check_places(adapted, shapes, network, name)
        return adapted.merge_and_unload()


def _check_patterns(network: nn.Module, config: Mapping[str, Any], name: str) -> None:
    """Raise ``ModelError`` if an adapter names more than its network has, or its patterns take too long.

    They are tried in a process of their own: nothing stops a pattern that back-tracks in this one.
    """
    layers = [each for each, _ in (*network.named_modules(), *network.named_parameters())]
    for key, value in config.items():
        if isinstance(value, list) and len(value) > len(layers) and all(isinstance(each, str) for each in value):
            raise ModelError(
                f"The adapter {name!r} names {len(value):,} modules ({key}), and a {type(network).__name__} has {len(layers):,}"
                ". Give the model that it was made from."
            )
    patterns = sorted({text for text in _texts(config) if not re.fullmatch(r"[\w.:/@ -]*", text)})
    if not patterns:
        return
    names = json.dumps([patterns, [*layers, *(PREFIX + each for each in layers)]])
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCHING],
            input=names,
            text=True,
            capture_output=True,
            timeout=MOST_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"The patterns in {CONFIG} of the adapter {name!r}, such as {brief(patterns[0])}, take more than {MOST_SECONDS} "
            "seconds on the names of the network's layers. List the layers by their names there."
        ) from error


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _on_shapes(network: nn.Module, name: str) -> Any:
    """Return the network with the adapter in it as PEFT makes it, of shapes alone: no size takes any memory."""
    from peft import PeftConfig, PeftModel

    shared: dict[int, Any] = {id(each): nn.Parameter(each.to("meta")) for each in network.parameters()}
    shared |= {id(each): each.to("meta") for each in network.buffers()}
    config = PeftConfig.from_pretrained(name)
    config.inference_mode = True
    with _fitting(network, name), torch.device("meta"):
        return PeftModel(copy.deepcopy(network, shared), config)


def _check_size(shell: nn.Module, network: nn.Module, name: str) -> None:
    """Raise ``ModelError`` if an adapter is far larger than its network: some draw tensors that their files do not hold."""
    there, wanted = (sum(each.numel() for each in (*net.parameters(), *net.buffers())) for net in (network, shell))
    if wanted > (1 + MOST_TIMES) * there:
        raise ModelError(
            f"The adapter {name!r} would take {wanted - there:,} numbers, and its {type(network).__name__} has {there:,}. Look "
            f"at the ranks in its {CONFIG}, and give the model that it was made from."
        )


@contextmanager
def _fitting(network: nn.Module, name: str) -> Iterator[None]:
    """Raise what PEFT says of other modules or shapes as ``ModelError``."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        reason = re.sub(r":\s*\n\s*", ": ", str(error)).splitlines()[0].partition(". ")[0].rstrip(".")
        raise ModelError(
            f"The adapter {name!r} does not fit this {type(network).__name__}: {reason}. Give the model that it was made from."
        ) from error


def _check_places(adapted: Any, shapes: Mapping[str, tuple[int, ...]], network: nn.Module, name: str) -> None:
    """Raise ``ModelError`` unless the adapter's tensors are those of the file, in their shapes."""
    from peft import get_peft_model_state_dict

    expected = {key: tuple(tensor.shape) for key, tensor in get_peft_model_state_dict(adapted).items()}
    for key in sorted(expected.keys() | shapes.keys()):
        if expected.get(key) == shapes.get(key):
            continue
        fault = f"should have shape {expected.get(key)}, got {shapes.get(key)}"
        if key not in expected or key not in shapes:
            fault = f"is {'in the file and not in the network' if key in shapes else 'not in the file'}"
        raise ModelError(
            f"The adapter {name!r} does not fit this {type(network).__name__}: {key!r} {fault}. Give the model that it was "
            "made from."
        )


@contextmanager
def merged_directory(directory: str, model: str) -> Iterator[str]:
    """Give a directory in Hugging Face layout with ``model`` and the adapter merged into it; it is gone after the block.

    Args:
        directory: the adapter's.
        model: the model that it was made from.

    Raises:
        UsageError, ModelError: the adapter does not belong to it, is damaged, or lacks a head.
    """
    import transformers

    loader, tensors, extra = adapter_loader(directory), adapter_shapes(directory), dict[str, Any]()
    heads = [shape for name, shape in tensors.items() if re.search(_HEAD, name) and shape]
    if "Classification" in loader and heads:
        check_labels(heads[0][0], f"The adapter {directory!r}", _REMEDY)
        extra["num_labels"] = heads[0][0]
    try:
        network, missing = read_weights(locate(model), loader, model, **extra)
    except ModelError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise ModelError(
            f"The adapter {directory!r} is for {loader}, and {model!r} is no such network. Give the model that it was made "
            "from."
        ) from error
    if random := [name for name in missing if f"{PREFIX}{name}" not in tensors]:
        raise UsageError(
            f"The adapter {directory!r} does not hold {random[0]!r}, which {model!r} lacks, too: it would be random. Give the "
            "model that it was made from to --model, and save the head with the adapter (modules_to_save of PEFT)."
        )
    with tempfile.TemporaryDirectory() as merged:
        with quiet(transformers):
            put_on(network, directory).save_pretrained(merged)
        try:
            yield merged
        except ForgetfreeError as error:  # the user knows the adapter
            raise type(error)(str(error).replace(merged, directory)) from error
