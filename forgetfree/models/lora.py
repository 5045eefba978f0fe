"""LoRA adapters by the PEFT library, beside a backbone whose own modules and tensors stay as they are; and their file.

An adapter adds (α/r)·B·A to the weight of a linear layer, with A ``(r, in)`` drawn at random and B ``(out, r)`` zero at
first (Hu et al., 2021, eq. 3).

The file is one safetensors file without pickle. For task ``k``:

    adapter/k/name         A and B of each layer, as `peft.get_peft_model_state_dict` names them
    readout/k/name         the task's own readout tensors
    buffer/k/name          buffers that training changed (BatchNorm's, say)

and as metadata: schema, task names in order, PEFT's configuration of each adapter, whether the adapters act together, the
base model's fingerprint, what else its answers depend on (`forgetfree.core.binding`), and a checksum of all of the above.
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.functional import (
    delete_adapter,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_adapter,
    set_peft_model_state_dict,
)
from peft.tuners.lora import LoraLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL_TARGETS
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from forgetfree.core.binding import Binding
from forgetfree.core.parameters import ParameterSpace
from forgetfree.display import brief, is_text
from forgetfree.errors import RunError
from forgetfree.files import read_signed, signed_bytes, write_atomically
from forgetfree.json_file import check, check_fields, is_number, parse_json

FORMAT, SCHEMA = "forgetfree.lora", 1
_REMEDY = "Restore it from a copy, or run the stream again."

# -- Which layers ----------------------------------------------------------------------------------------


def linear_layers(backbone: nn.Module, space: ParameterSpace) -> list[str]:
    """Names of the linear layers whose weight may be trained: neither embeddings nor heads."""
    weights = {spec.name for spec in space.tensors}
    # In evaluation torch's own encoder reads the weights of its layers without calling them: past any adapter.
    passed_by = {
        id(inner)
        for module in backbone.modules()
        if isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer))
        for inner in module.modules()
    }
    return [
        name
        for name, module in backbone.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and f"{name}.weight" in weights and id(module) not in passed_by
    ]


def targets(backbone: nn.Module, space: ParameterSpace, pattern: str | None = None) -> list[str]:
    """The linear layers that get adapters.

    Args:
        backbone: the model.
        space: the entries of it that may be trained.
        pattern: regular expression; a layer is taken if it is found in its name. Default: the layers that PEFT takes for
            the architecture (query and value in BERT and RoBERTa), or all where it knows none.
    """
    layers = linear_layers(backbone, space)
    if pattern is not None:
        return [name for name in layers if re.search(pattern, name)]
    config: Any = getattr(backbone, "config", None)
    usual = USUAL_TARGETS.get(getattr(config, "model_type", ""), [])
    expression = usual if isinstance(usual, str) else rf"(.*\.)?({'|'.join(map(re.escape, usual))})"
    return [name for name in layers if usual and re.fullmatch(expression, name)] or layers


# -- Adapters --------------------------------------------------------------------------------------------


class LoraAdapters:
    """Adapters by name, for one backbone.

    PEFT replaces the layers it adapts. So that the backbone keeps its modules and the names of its tensors, that happens
    in a copy of its modules which shares every tensor with it: `model` takes the backbone's place where adapters act.
    """

    def __init__(self, backbone: nn.Module) -> None:
        shared = {id(tensor): tensor for tensor in (*backbone.parameters(), *backbone.buffers())}
        self.model = copy.deepcopy(backbone, shared)

    def add(self, name: str, config: LoraConfig, seed: int) -> None:
        """A new adapter, in place of one of the same name; its first weights are drawn by ``seed``, on the CPU."""
        with self._flags_kept(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # That there are several adapters is meant; GPT-2's transposed layers are seen without our saying.
            warnings.filterwarnings("ignore", "Already found a `peft_config`|fan_in_fan_out is set to")
            torch.default_generator.manual_seed(seed)
            if name in getattr(self.model, "peft_config", {}):
                delete_adapter(self.model, name, prefix="lora_")
            inject_adapter_in_model(config, self.model, name)

    def activate(self, names: Sequence[str]) -> nn.Module:
        """`model`, with the sum of these adapters."""
        with self._flags_kept():
            set_adapter(self.model, list(names))
        return self.model

    def parameters(self, name: str) -> list[nn.Parameter]:
        """Of every layer, A ``(r, in)`` and B ``(out, r)``."""
        return [part[name].weight for layer in self._layers(name).values() for part in (layer.lora_A, layer.lora_B)]

    def projections(self, name: str) -> dict[str, Tensor]:
        """Of every layer, by its name, A ``(r, in)``."""
        return {key: layer.lora_A[name].weight for key, layer in self._layers(name).items()}

    def config(self, name: str) -> dict[str, Any]:
        """PEFT's configuration of an adapter."""
        configs: Any = self.model.peft_config
        found: dict[str, Any] = configs[name].to_dict()
        return found

    def tensors(self, name: str) -> dict[str, Tensor]:
        """A and B of all layers, as PEFT names them: themselves, not copies."""
        found: dict[str, Tensor] = get_peft_model_state_dict(self.model, adapter_name=name)
        return found

    def load_(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Copy what `tensors` gave into the adapter, bit for bit.

        Raises:
            RunError: they are not of this adapter's names and shapes.
        """
        check_shapes("the adapter", self.tensors(name), tensors)
        with torch.no_grad():
            set_peft_model_state_dict(self.model, dict(tensors), adapter_name=name)

    def _layers(self, name: str) -> dict[str, Any]:
        return {
            key: layer
            for key, layer in self.model.named_modules()
            if isinstance(layer, LoraLayer) and name in layer.lora_A
        }

    @contextmanager
    def _flags_kept(self) -> Iterator[None]:
        """PEFT says of every tensor whether it wants a gradient, the backbone's included: undo that."""
        before = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        try:
            yield
        finally:
            for parameter, flag in before:
                parameter.requires_grad_(flag)


def overlap(earlier: Mapping[str, Tensor], newest: Mapping[str, Tensor]) -> Tensor:
    """How far two subspaces are from orthogonal: Σ_jk (A_i·A_tᵀ)²_jk, summed over layers.

    Args:
        earlier: A_i ``(r_i, in)`` by layer; several tasks' may be stacked, which sums their overlaps.
        newest: A_t ``(r, in)`` by layer. PEFT's A is the transpose of that in Wang et al. (2023), whose product is A_iᵀ·A_t.
    """
    shared = [key for key in newest if key in earlier]
    return torch.stack([(earlier[key] @ newest[key].T).square().sum() for key in shared]).sum()


# -- The file --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LoraRecord:
    """What is kept of one task.

    Attributes:
        task: its name.
        config: PEFT's configuration of its adapter.
        adapter: A and B of all layers.
        readout: its readout's tensors.
        buffers: those of the backbone that training changed.
    """

    task: str
    config: Mapping[str, Any]
    adapter: Mapping[str, Tensor]
    readout: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    @property
    def size_in_bytes(self) -> int:
        """Of all its tensors."""
        tensors = [*self.adapter.values(), *self.readout.values(), *self.buffers.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def save_records(
    path: Path, records: Sequence[LoraRecord], *, together: bool, fingerprint: str, binding: Binding
) -> None:
    """Write the file, atomically.

    Args:
        path: where.
        records: of every task, in order.
        together: whether all adapters act together, rather than each alone.
        fingerprint: of the base model.
        binding: what else answers depend on.
    """
    tensors = {
        f"{kind}/{k}/{name}": tensor.detach().cpu().contiguous()
        for k, record in enumerate(records)
        for kind, named in (("adapter", record.adapter), ("readout", record.readout), ("buffer", record.buffers))
        for name, tensor in named.items()
    }
    header = {
        "format": FORMAT,
        "schema": str(SCHEMA),
        "tasks": json.dumps([record.task for record in records]),
        "configs": json.dumps([dict(record.config) for record in records], sort_keys=True),
        "together": json.dumps(together),
        "fingerprint": fingerprint,
        "binding": binding.json,
    }
    write_atomically(path, signed_bytes(tensors, header))


def load_records(path: Path, *, together: bool, fingerprint: str, binding: Binding) -> list[LoraRecord]:
    """Read what `save_records` wrote with the same arguments.

    Raises:
        RunError: the file is missing or damaged, or belongs to another model or strategy.
    """
    if not path.exists():
        raise RunError(f"There are no adapters at {path}. Give the directory that `save` wrote.")
    header, tensors = read_signed(path, RunError, _REMEDY, format=FORMAT)
    if header.get("schema") != str(SCHEMA):
        raise _unsound(path, f"it has schema {brief(header.get('schema'))}, and this version reads schema {SCHEMA}")
    if missing := {"tasks", "configs", "together", "fingerprint"} - set(header):
        raise _unsound(path, f"its metadata lacks {', '.join(sorted(missing))}")
    if header["fingerprint"] != fingerprint:
        raise RunError(
            f"The adapters in {path} belong to other weights: expected a model with fingerprint "
            f"{header['fingerprint'][:12]}…, got {fingerprint[:12]}…. Load the model they were trained on."
        )
    if header["together"] != json.dumps(together):
        ways = {True: "all together (o-lora)", False: "each alone (lora)"}
        raise RunError(
            f"The adapters in {path} act {ways[not together]}, and this strategy lets them act {ways[together]}. Load them "
            "into the strategy that saved them."
        )

    if "binding" in header:  # files of version 0.2 do not say it
        try:
            differ = Binding.of_json(header["binding"]).differences(binding)
        except ValueError as error:
            raise _unsound(path, f"its binding cannot be read ({error})") from error
        if differ:
            raise RunError(
                f"The adapters in {path} would not answer as they did: {'; '.join(differ)}. Use the model's own config.json "
                "and tokenizer, and the options that the stream was trained with."
            )

    try:
        return _records(header, tensors)
    except ValueError as error:
        raise _unsound(path, str(error)) from error


def _records(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> list[LoraRecord]:
    """The records of a file; ``ValueError`` where they are not sound."""
    tasks, configs = parse_json(header["tasks"]), parse_json(header["configs"])
    right = isinstance(tasks, list) and all(map(is_text, tasks)) and len(set(tasks)) == len(tasks)
    check("tasks", tasks, right, "a list of different task names")
    right = isinstance(configs, list) and len(configs) == len(tasks)
    check("configs", configs, right, f"a list of {len(tasks)} configurations")
    named: dict[str, dict[str, Tensor]] = {
        f"{kind}/{k}": {} for kind in ("adapter", "readout", "buffer") for k in range(len(tasks))
    }
    for key, tensor in tensors.items():
        kind, _, rest = key.partition("/")
        number, _, name = rest.partition("/")
        if f"{kind}/{number}" not in named or not name:
            raise ValueError(f"it holds the unexpected tensor {brief(key)}")
        if kind != "buffer" and not (tensor.is_floating_point() and bool(torch.isfinite(tensor).all())):
            raise ValueError(f"{brief(key)} holds what is no finite number")
        named[f"{kind}/{number}"][name] = tensor
    for k, config in enumerate(configs):
        _check_config(f"configs[{k}]", config, named[f"adapter/{k}"])
    return [
        LoraRecord(task, config, *(named[f"{kind}/{k}"] for kind in ("adapter", "readout", "buffer")))
        for k, (task, config) in enumerate(zip(tasks, configs, strict=True))
    ]


def lora_config(*, rank: int, alpha: int, dropout: float, pattern: str) -> LoraConfig:
    """PEFT's configuration of an adapter of ours.

    Args:
        rank: r.
        alpha: α; the adapter acts with weight α/r.
        dropout: before the adapter, while training.
        pattern: regular expression; the layers whose whole name it matches get an adapter.
    """
    return LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=pattern)


def config_of(stored: Mapping[str, Any]) -> LoraConfig:
    """The configuration that a record holds as JSON."""
    return lora_config(
        rank=stored["r"],
        alpha=stored["lora_alpha"],
        dropout=stored["lora_dropout"],
        pattern=stored["target_modules"],
    )


def _check_config(key: str, stored: Any, adapter: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` unless `config_of` gives the configuration again, and the adapter's tensors have its rank.

    PEFT's other options would change how the adapter acts, or the backbone's weights.
    """
    check_fields(key, stored, {"r": int, "lora_alpha": int, "target_modules": str})
    check(f"{key}.lora_alpha", stored["lora_alpha"], stored["lora_alpha"] >= 1, "at least 1")
    dropout = stored.get("lora_dropout")
    check(f"{key}.lora_dropout", dropout, is_number(dropout, 0.0, 1.0), "a number in [0, 1]")
    for name, tensor in adapter.items():
        ranks = tuple(tensor.shape)[-1 if "lora_B" in name else 0 :][:1]
        check(f"{key}.r", stored["r"], ranks == (stored["r"],), f"the rank of {name!r}, which has {ranks}")
    try:
        usual = json.loads(json.dumps(config_of(stored).to_dict()))  # type: ignore[no-untyped-call]
        re.compile(stored["target_modules"])
    except (ValueError, TypeError, re.error) as error:
        raise ValueError(f"{key} is refused by PEFT: {error}") from error
    for name, value in stored.items():
        # Of transposed layers PEFT notes that they are; its own version changes nothing.
        if name not in ("fan_in_fan_out", "peft_version") and (name not in usual or value != usual[name]):
            expected = brief(usual[name]) if name in usual else "nothing"
            raise ValueError(
                f"{key}.{name} must be {expected}, as forgetfree and this version of PEFT have it, got {brief(value)}"
            )


def check_shapes(what: str, expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raise ``RunError`` unless both have tensors of the same names and shapes."""
    shapes = [{name: tuple(tensor.shape) for name, tensor in each.items()} for each in (expected, given)]
    if shapes[0] != shapes[1]:
        raise RunError(
            f"The saved tensors do not fit {what}: expected {shapes[0]}, got {shapes[1]}. Load the model, readout and tasks "
            "they were trained with."
        )


def _unsound(path: Path, what: str) -> RunError:
    return RunError(f"{path} is not a sound file of adapters: {what}. {_REMEDY}")
