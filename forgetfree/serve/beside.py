"""Exports of a task beside the weights: its unchanged base with the ledger, or a plain model with its differences added."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forgetfree.core.families import is_conv1d
from forgetfree.core.linear_layers import LinearLayers, dense_weight, is_linear
from forgetfree.core.readout_model import part_named
from forgetfree.files import new_directory, write_atomically
from forgetfree.ledger.ledger import Ledger
from forgetfree.models.loading import LoadedModel, load_model
from forgetfree.models.location import locate
from forgetfree.models.model_files import model_files, quiet
from forgetfree.results.run_folder import LEDGER

_CARD = """---
tags: [forgetfree, continual-learning]
---

# A task beside its base model

- the base model, unchanged: {base}
- `{file}`: the differences of {tasks}
- what loads it: transformers and forgetfree{needs}

```python
from transformers import {loader}
from forgetfree import Ledger, answering

model, ledger = {loader}.from_pretrained("DIRECTORY"{labels}), Ledger.load("DIRECTORY/{file}")
with answering(model, ledger, {task}):
    ...  # the model answers the task
```

On the command line: `forgetfree predict DIRECTORY/{file} --model DIRECTORY --task NAME TEXT`; `forgetfree serve` likewise.
"""


def write_beside(loaded: LoadedModel, ledger: Ledger, task: str, out: Path) -> None:
    """Write the base of a ledger of tasks beside the weights, the records that answer a task, and a card.

    Args:
        loaded: the base.
        ledger: the ledger.
        task: the name of a task of the ledger.
        out: a directory that does not exist or is empty.
    """
    import transformers

    backbone: Any = loaded.model.backbone
    names = [ledger.tasks[part] for part in ledger.parts(ledger.position(task) + 1)]
    definition = ledger.records[ledger.position(task)].definition
    method = getattr(getattr(backbone.config, "quantization_config", None), "quant_method", "")
    with new_directory(out) as directory:
        with quiet(transformers):
            for file in model_files(locate(loaded.name), loaded.name):  # byte by byte, heads included
                shutil.copy(file, directory)
            loaded.tokenizer.save_pretrained(directory)
        ledger.of_tasks(names).save(directory / LEDGER)
        card = _CARD.format(
            base=json.dumps(loaded.name),
            file=LEDGER,
            tasks=", ".join(map(json.dumps, names)),
            needs=f", and the package of {getattr(method, 'value', method)}" if method else "",
            loader=(ledger.binding and ledger.binding.architecture) or type(backbone).__name__,
            labels=f", num_labels={count}" if (count := len(definition.labels if definition else ())) > 2 else "",
            task=json.dumps(task),
        )
        write_atomically(directory / "README.md", card)


@contextmanager
def merged(loaded: LoadedModel, ledger: Ledger, task: str) -> Iterator[LoadedModel]:
    """Yield a plain model that answers a task as the ledger's model does, up to rounding.

    Args:
        loaded: the ledger's model, which holds θ_pre.
        ledger: a ledger of tasks beside the weights.
        task: one of its tasks.
    """
    import transformers

    backbone: Any = loaded.model.backbone
    with tempfile.TemporaryDirectory() as directory:  # so that it is loaded as any other model
        with quiet(transformers):
            plain_model(backbone).save_pretrained(directory)
            loaded.tokenizer.save_pretrained(directory)
        dtype: Any = str(backbone.dtype).removeprefix("torch.")
        plain = load_model(directory, binding=loaded.binding(), dtype=dtype)
        add_(part_named(plain.model, ledger.space), ledger, task)
        yield plain


@torch.no_grad()
def plain_model(quantised: Any) -> Any:
    """Return a transformers model with the dequantised weights of ``quantised``, in its dtype."""
    config = copy.deepcopy(quantised.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(quantised)(config).to(quantised.dtype)
    tensors = plain.state_dict(keep_vars=True)
    for name, module in quantised.named_modules():
        own = {each: tensor for each, tensor in (*module._parameters.items(), *module._buffers.items())}
        if is_linear(module):
            own["weight"] = dense_weight(module).t() if is_conv1d(module) else dense_weight(module)
        for each, tensor in own.items():
            if (there := tensors.get(f"{name}.{each}" if name else each)) is not None and tensor is not None:
                there.copy_(tensor)
    return plain


@torch.no_grad()
def add_(body: nn.Module, ledger: Ledger, task: str) -> None:
    """Add the differences of a task to the weights of linear layers."""
    layers = LinearLayers(body, ledger.space)
    for part in ledger.parts(ledger.position(task) + 1):
        graft = ledger.records[part].owned
        for number, local, where in ledger.space.split(graft.region.indices):
            module: Any = layers.module(number)
            shape, values = ledger.space.tensors[number].shape, graft.values[where]
            if len(shape) == 1:
                module.bias[local] += values.to(module.bias)
            else:
                weight = module.weight.t() if is_conv1d(module) else module.weight
                weight[local // shape[1], local % shape[1]] += values.to(weight)
