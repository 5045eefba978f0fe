"""Seeded damage to files: to their bytes, to the headers of safetensors files, and to JSON.

A mutation takes the content of a file and a random generator, and returns other content. Mutations of a safetensors file
compute its checksum again if it has one, so that only the meaning of the content can still be refused.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from damage import sealed
from safetensors.torch import load, save

from forgetfree.tensor_file import checksum

Mutation = Callable[[bytes, random.Random], bytes]

# -- Bytes -----------------------------------------------------------------------------------------------


def flip(data: bytes, rng: random.Random) -> bytes:
    """Flip one bit."""
    content = bytearray(data)
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def zero(data: bytes, rng: random.Random) -> bytes:
    start, length = rng.randrange(len(data)), rng.randint(1, 64)
    return data[:start] + bytes(len(data[start : start + length])) + data[start + length :]


def insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randint(1, 16)) + data[at:]


BYTES: dict[str, Mutation] = {"flip": flip, "truncate": truncate, "zero": zero, "insert": insert}

# -- JSON ------------------------------------------------------------------------------------------------

_MARK = "\x01mark\x01"
#: Hostile JSON texts to replace any value.
HOSTILE = (
    *("null", "true", "false", "-1", "0", "1", "3.5", "-0.0", '""', '"x"', "[]", "{}", "[[1]]", '{"a": {"b": []}}'),
    *("NaN", "Infinity", "-Infinity", "1e999", "1e308", "1" * 400, "9" * 5000, "9223372036854775808", "4294967296"),
    *(r'"\ud800"', r'"\u0000"', r'"\u001b[31m"', '"../../x"', '"/"', f'"{"long" * 2000}"', '["a", "a"]', '[null, "a"]'),
    *("[" * 200 + "]" * 200, "[" * 100_000 + "]" * 100_000, '{"a":' * 200 + "1" + "}" * 200, '{"a":' * 100_000),
)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container with the key of every value in it."""
    found: list[tuple[Any, Any]] = []
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        found += [(value, key), *_places(inner)]
    return found


def _rewritten(data: bytes, rng: random.Random, new: Callable[[Any, Any], str]) -> bytes:
    """Return the JSON with one value replaced by the text ``new(container, key)``."""
    root = [json.loads(data)]
    container, key = rng.choice(_places(root))
    text = new(container, key)
    container[key] = _MARK
    return json.dumps(root[0], ensure_ascii=False).replace(json.dumps(_MARK), text, 1).encode()


def replace_value(data: bytes, rng: random.Random) -> bytes:
    return _rewritten(data, rng, lambda container, key: rng.choice(HOSTILE))


def change_value(data: bytes, rng: random.Random) -> bytes:
    """Change a value to another of its type, as a user might edit it."""

    def changed(container: Any, key: Any) -> str:
        value = container[key]
        if isinstance(value, bool) or value is None:
            return rng.choice(["true", "false", "null"])
        if isinstance(value, int):
            return str(rng.choice([value + 1, value - 1, -value, 10 * value, value + 10**12]))
        if isinstance(value, float):
            return repr(rng.choice([-value, value + 1, value / 2, value * 1e30]))
        if isinstance(value, str):
            cut = rng.randrange(len(value) + 1)
            return json.dumps(rng.choice([value[:cut], value + "x", value.upper(), value[cut:] + value[:cut]]))
        if isinstance(value, list):
            return json.dumps(rng.sample(value, len(value)))
        return json.dumps({f"{name}x": inner for name, inner in value.items()})

    return _rewritten(data, rng, changed)


def drop_value(data: bytes, rng: random.Random) -> bytes:
    root = [json.loads(data)]
    places = [place for place in _places(root) if place[0] is not root]
    if not places:
        return b"null"
    container, key = rng.choice(places)
    del container[key]
    return json.dumps(root[0]).encode()


def double_value(data: bytes, rng: random.Random) -> bytes:
    """Repeat a key or an item."""

    def twice(container: Any, key: Any) -> str:
        text = json.dumps(container[key])
        return f"{text}, {json.dumps(key)}: {text}" if isinstance(container, dict) else f"{text}, {text}"

    return _rewritten(data, rng, twice)


JSON: dict[str, Mutation] = {
    "replaced value": replace_value,
    "changed value": change_value,
    "dropped value": drop_value,
    "doubled value": double_value,
}

# -- Safetensors files, signed again ------------------------------------------------------------------------

Header = dict[str, Any]
_DTYPES = (
    *(["F64", "F32", "F16", "BF16", "I64", "I32", "U32", "U8", "BOOL", "F8_E4M3", "F8_E8M0", "F4", "C64", "X"]),
    3,
    None,
)
_NUMBERS = (-1, 0, 1, 2, 2**31, 2**40, 2**62, 2**63, 2**64, 0.5, "4", None, [])


def split(data: bytes) -> tuple[Header, bytes]:
    """Return header and payload."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def join(header: Header, payload: bytes) -> bytes:
    text = json.dumps(header, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + payload


def signed(header: Header, payload: bytes) -> bytes:
    """Return the file with a new checksum of its content, if it had one and can be read at all."""
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict) and "checksum" in metadata:
        with suppress(Exception):  # whatever error a library raises: no checksum makes the file readable
            tensors = load(join(header, payload))
            if "schema" in metadata:
                sealed()(tensors, metadata)
            else:
                metadata["checksum"] = checksum(tensors, metadata)
    return join(header, payload)


def change_metadata(data: bytes, rng: random.Random) -> bytes:
    """Cut, extend or replace a text in the metadata."""
    header, payload = split(data)
    metadata = header.get("__metadata__", {})
    key = rng.choice([key for key in metadata if key != "checksum"] or ["format"])
    value = metadata.get(key, "")
    cut = rng.randrange(len(value) + 1)
    metadata[key] = rng.choice([value[:cut], value[cut:], value + "x", "", "1", *rng.sample(HOSTILE, 2), 3, None, {}])
    return signed(header | {"__metadata__": metadata}, payload)


def change_inner_json(data: bytes, rng: random.Random) -> bytes:
    """Mutate the JSON in a value of the metadata, or in a tensor of bytes."""
    header, payload = split(data)
    metadata = header.get("__metadata__", {})
    texts = {key: text.encode() for key, text in metadata.items() if isinstance(text, str) and text[:1] in ("[", "{")}
    for name, entry in header.items():
        content = payload[slice(*entry["data_offsets"])] if entry.get("dtype") == "U8" else b""
        if content[:1] in (b"[", b"{"):
            texts[name] = content
    if not texts:
        return change_metadata(data, rng)
    key = rng.choice(sorted(texts))
    text = rng.choice(list(JSON.values()))(texts[key], rng)
    if key in metadata:
        metadata[key] = text.decode("utf-8", "surrogatepass")
        return signed(header, payload)
    tensors = load(data) | {key: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    return signed(*split(save(tensors, metadata)))


def change_entry(data: bytes, rng: random.Random) -> bytes:
    """Change the dtype, shape or offsets of a tensor in the header."""
    header, payload = split(data)
    names = [name for name in header if name != "__metadata__"]
    entry = header[rng.choice(names)]
    key = rng.choice(sorted(entry))
    if key == "dtype":
        entry[key] = rng.choice(_DTYPES)
    elif key == "shape" and rng.random() < 0.5:  # a shape of the same size
        entry[key] = rng.choice([entry[key][::-1], [*entry[key], 1], [1, *entry[key]], [math.prod(entry[key])]])
    elif key == "data_offsets" and rng.random() < 0.5:  # offsets of another tensor
        entry[key] = header[rng.choice(names)][key]
    else:
        entry[key] = [rng.choice([each, rng.choice(_NUMBERS)]) for each in entry[key]] or [rng.choice(_NUMBERS)]
    return signed(header, payload)


def change_keys(data: bytes, rng: random.Random) -> bytes:
    """Drop, copy, rename or exchange tensors or values of the metadata."""
    metadata, tensors = split(data)[0].get("__metadata__", {}), load(data)
    held: dict[str, Any] = rng.choice([each for each in (metadata, tensors) if each])
    one, other = rng.choice(sorted(held)), rng.choice(sorted(held))
    what = rng.randrange(4)
    if what == 0:
        del held[one]
    elif what == 1:
        held[one], held[other] = held[other], held[one]
    else:
        name = rng.choice([f"{one}x", one.replace("/", "."), one.replace("0", "1"), "", "x/y/z", one.upper()])
        held[name] = held[one] if what == 2 else held.pop(one)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return signed(*split(save(copies, metadata or None)))


def change_values(data: bytes, rng: random.Random) -> bytes:
    """Change values of one tensor: damage its bytes, or write values that a computation might produce."""
    header, _ = split(data)
    tensors = {name: tensor.clone() for name, tensor in load(data).items()}
    name = rng.choice(sorted(name for name, tensor in tensors.items() if tensor.numel()))
    values = tensors[name].view(-1)
    if values.is_floating_point() and rng.random() < 0.5:
        values[rng.randrange(len(values))] = rng.choice([math.nan, math.inf, -math.inf, -0.0, 1e30])
    elif rng.random() < 0.3:
        values.copy_(values.flip(0))
    else:
        content = values.view(torch.uint8)
        damaged = rng.choice([flip, zero])(content.numpy().tobytes(), rng)
        content.copy_(torch.frombuffer(bytearray(damaged), dtype=torch.uint8))
    return signed(*split(save(tensors, header.get("__metadata__"))))


SIGNED: dict[str, Mutation] = {
    "metadata": change_metadata,
    "inner JSON": change_inner_json,
    "tensor entry": change_entry,
    "keys": change_keys,
    "values": change_values,
}
