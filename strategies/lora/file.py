"""The file of adapters: one safetensors file without pickle.

For task ``k`` it holds

    adapter/k/name         A and B of each layer, as `peft.get_peft_model_state_dict` names them
    readout/k/name         the task's own readout tensors
    buffer/k/name          buffers that training changed (BatchNorm's, say)

and as metadata: schema, task names in order, PEFT's configuration of each adapter, whether the adapters act together, the
base model's fingerprint, what else its answers depend on (`forgetfree.ledger.binding`), and a checksum of all of the above.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from forgetfree.display import brief, is_text
from forgetfree.errors import RunError
from forgetfree.json_file import check, check_fields, is_number, parse_json
from forgetfree.ledger.binding import Binding
from forgetfree.models.lora_adapters import lora_config
from forgetfree.tensor_file import TensorFile

FORMAT, SCHEMA = "forgetfree.lora", 1
FILE = TensorFile(RunError, "Restore it from a copy, or run the stream again.", FORMAT)


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
        """Return the size of all its tensors, in bytes."""
        tensors = [*self.adapter.values(), *self.readout.values(), *self.buffers.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def save_records(path: Path, records: Sequence[LoraRecord], *, joint: bool, fingerprint: str, binding: Binding) -> None:
    """Write the file, atomically.

    Args:
        path: where.
        records: of every task, in order.
        joint: whether all adapters act together, rather than each alone.
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
        "schema": str(SCHEMA),
        "tasks": json.dumps([record.task for record in records]),
        "configs": json.dumps([dict(record.config) for record in records], sort_keys=True),
        "together": json.dumps(joint),
        "fingerprint": fingerprint,
        "binding": binding.json,
    }
    FILE.write(path, tensors, header)


def load_records(path: Path, *, joint: bool, fingerprint: str, binding: Binding) -> list[LoraRecord]:
    """Read what `save_records` wrote with the same arguments.

    Raises:
        RunError: the file is missing or damaged, or belongs to another model or strategy.
    """
    if not path.exists():
        raise RunError(f"There are no adapters at {path}. Give the directory that `save` wrote.")
    header, tensors = FILE.read(path)
    if header.get("schema") != str(SCHEMA):
        raise _unsound(path, f"it has schema {brief(header.get('schema'))}, and this version reads schema {SCHEMA}")
    if missing := {"tasks", "configs", "together", "fingerprint"} - set(header):
        raise _unsound(path, f"its metadata lacks {', '.join(sorted(missing))}")
    if header["fingerprint"] != fingerprint:
        raise RunError(
            f"The adapters in {path} belong to other weights: expected a model with fingerprint "
            f"{header['fingerprint'][:12]}…, got {fingerprint[:12]}…. Load the model they were trained on."
        )
    if header["together"] != json.dumps(joint):
        ways = {True: "all together (o-lora)", False: "each alone (lora)"}
        raise RunError(
            f"The adapters in {path} act {ways[not joint]}, and this strategy lets them act {ways[joint]}. Load them "
            "into the strategy that saved them."
        )

    try:
        differ = Binding.of_json(header["binding"]).differences(binding)
    except ValueError as error:
        raise _unsound(path, f"its binding cannot be read ({error})") from error
    if differ:
        raise RunError(
            f"The adapters in {path} would not answer as they did: {'; '.join(differ)}. Use the model's own config.json "
            "and tokenizer, and the options that the stream was trained with."
        )

    with FILE.sound(path, "is not a sound file of adapters"):
        return _records(header, tensors)


def _records(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> list[LoraRecord]:
    """Return the records of a file; raise ``ValueError`` where they are not sound."""
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


def config_of(stored: Mapping[str, Any]) -> LoraConfig:
    """Return the configuration that a record holds as JSON."""
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


def _unsound(path: Path, what: str) -> RunError:
    return RunError(f"{path} is not a sound file of adapters: {what}. {FILE.remedy}")
