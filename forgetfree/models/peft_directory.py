"""Adapters of PEFT on disk: `adapter_config.json` and `adapter_model.safetensors`, as PEFT's `save_pretrained` writes them."""

from __future__ import annotations

import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from forgetfree.errors import ForgetfreeError, ModelError, UsageError
from forgetfree.files import read_tensors
from forgetfree.json_file import read_json
from forgetfree.models.checkpoint import explained, quiet, read_weights
from forgetfree.models.loading import locate

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: The file of a linear readout that stands beside a body, or beside an adapter on one.
READOUT = "readout.safetensors"
#: The last layer of a classification head.
_HEAD = r"\.(classifier|score)(\.out_proj)?\.weight$"
#: How PEFT names the tensors of the network that it wraps.
PREFIX = "base_model.model."
_REMEDY = "Save the adapter again, with save_pretrained of PEFT."
#: The classes of transformers by PEFT's `task_type`.
_LOADERS = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "FEATURE_EXTRACTION": "AutoModel",
}


def is_adapter(directory: str | Path) -> bool:
    """Return whether a directory holds an adapter of PEFT."""
    return (Path(directory) / CONFIG).is_file()


def adapter_config(directory: str | Path) -> dict[str, Any]:
    """Return the content of `adapter_config.json`.

    Raises:
        ModelError: it is damaged.
    """
    found: Any = read_json(Path(directory) / CONFIG, ModelError, _REMEDY)
    if not isinstance(found, dict) or not isinstance(found.get("peft_type"), str):
        raise ModelError(f"{Path(directory) / CONFIG} names no peft_type. {_REMEDY}")
    return found


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
    from peft import PeftModel, get_peft_model_state_dict

    name = str(directory)
    if not (Path(directory) / WEIGHTS).is_file():  # a .bin would be a pickle
        raise ModelError(f"The adapter {name!r} has no {WEIGHTS}. {_REMEDY}")
    # Of indices beyond a matrix, PEFT's sparse tensors would read foreign memory.
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    with explained(name), quiet(transformers), warnings.catch_warnings(), checks(True):
        warnings.simplefilter("ignore")
        _, tensors = read_tensors(Path(directory) / WEIGHTS)
        try:
            adapted: Any = PeftModel.from_pretrained(network, name, torch_device="cpu")
        except (ValueError, RuntimeError) as error:  # other modules, or other shapes
            reason = re.sub(r":\s*\n\s*", ": ", str(error)).splitlines()[0].partition(". ")[0].rstrip(".")
            raise ModelError(
                f"The adapter {name!r} does not fit this {type(network).__name__}: {reason}. Give the model that it was made "
                "from."
            ) from error
        placed = get_peft_model_state_dict(adapted)
        if differ := sorted(placed.keys() ^ tensors.keys()):
            raise ModelError(
                f"The adapter {name!r} does not fit this {type(network).__name__}: {differ[0]!r} is "
                f"{'in the file and not in the network' if differ[0] in tensors else 'not in the file'}. Give the model that "
                "it was made from."
            )
        return adapted.merge_and_unload()


@contextmanager
def merged_directory(directory: str, model: str, *, whole: bool = True) -> Iterator[str]:
    """Give a directory in Hugging Face layout with ``model`` and the adapter merged into it; it is gone after the block.

    Args:
        directory: the adapter's.
        model: the model that it was made from.
        whole: refuse an adapter without the head that it was trained with; else that may be random.

    Raises:
        UsageError, ModelError: the adapter does not belong to it, is damaged, or lacks a head.
    """
    import transformers

    loader, extra = adapter_loader(directory), {}
    with explained(directory):
        _, tensors = read_tensors(Path(directory) / WEIGHTS) if (Path(directory) / WEIGHTS).is_file() else ({}, {})
    heads = [tensor for name, tensor in tensors.items() if re.search(_HEAD, name)]
    if "Classification" in loader and heads:
        extra["num_labels"] = len(heads[0])
    network, missing = read_weights(locate(model), loader, model, **extra)
    if whole and (random := [name for name in missing if f"{PREFIX}{name}" not in tensors]):
        raise UsageError(
            f"The adapter {directory!r} does not hold {random[0]!r}, which {model!r} lacks, too: it would be random. Give the "
            "model that it was made from to --model, and save the head with the adapter (modules_to_save of PEFT)."
        )
    with tempfile.TemporaryDirectory() as merged:
        with quiet(transformers):
            put_on(network, directory).save_pretrained(merged)
        if (readout := Path(directory) / READOUT).is_file():
            shutil.copyfile(readout, Path(merged) / READOUT)
        try:
            yield merged
        except ForgetfreeError as error:  # the user knows the adapter
            raise type(error)(str(error).replace(merged, directory)) from error
