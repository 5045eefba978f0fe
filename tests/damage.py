"""Damage to a file, and the flipped bits that a reader does not notice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from forgetfree.tensor_file import checksum

Tensors = dict[str, Tensor]
Header = dict[str, str]
Change = Callable[[Tensors, Header], object]


def rewrite(path: Path, change: Change) -> None:
    """Change tensors or metadata of a safetensors file and write it as a well-formed one."""
    with safe_open(path, "pt") as source:
        header, tensors = dict(source.metadata()), {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
    change(tensors, header)
    path.write_bytes(save(tensors, header))


def put(name: str, value: Tensor) -> Change:
    return lambda tensors, header: tensors.update({name: value})


def drop(name: str) -> Change:
    return lambda tensors, header: (tensors.pop(name, None), header.pop(name, None))


def note(name: str, value: str) -> Change:
    return lambda tensors, header: header.update({name: value})


def sealed(*changes: Change) -> Change:
    """Apply changes to a file by task and make all its checksums right again, as a forger would."""

    def change(tensors: Tensors, header: Header) -> None:
        for each in changes:
            each(tensors, header)
        rows = json.loads(header["tasks"])
        for k, row in enumerate(rows):
            own = {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{k}/")}
            row["checksum"] = checksum(own)
        header["tasks"] = json.dumps(rows)
        header["checksum"] = checksum({}, header)

    return change


def told(k: int, **fields: Any) -> Change:
    """Change fields of task ``k``."""

    def change(tensors: Tensors, header: Header) -> None:
        rows = json.loads(header["tasks"])
        rows[k]["fields"] |= fields
        header["tasks"] = json.dumps(rows)

    return change


def u16(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(torch.uint16)


def u32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(torch.uint32)


def accepted_flips(
    file: Path, load: Callable[[Path], Any], error: type[Exception], positions: Iterable[int]
) -> list[int]:
    """Return the bytes in which a bit may be flipped without an ``error`` from ``load``; any other exception is raised."""
    sound, accepted = file.read_bytes(), []
    for position in positions:
        flipped = bytearray(sound)
        flipped[position] ^= 1 << (position % 8)
        file.write_bytes(flipped)
        try:
            load(file)
        except error:
            continue
        accepted.append(position)
    return accepted
