"""Tensor files are read whole or not at all, and say why not."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from forgetfree.errors import RegionError, RunError
from forgetfree.tensor_file import TensorFile, read_tensors, tensor_bytes

OURS, THEIRS = (TensorFile(RunError, "Make it again.", name) for name in ("ours", "theirs"))


def test_tensors_are_written_as_they_are_signed(tmp_path: Path) -> None:
    """Views of one storage, a matrix that is not contiguous, one without entries, and several dtypes."""
    vector = torch.arange(8, dtype=torch.float64)
    tensors = {"a": vector[:3], "b": vector[3:], "c": torch.ones(2, 3, dtype=torch.bfloat16).t(), "d": torch.empty(0)}
    OURS.write_large(tmp_path / "file", tensors, {"about": "Grüße"})
    header, back = OURS.read(tmp_path / "file")
    assert header["about"] == "Grüße" and all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert os.listdir(tmp_path) == ["file"]


def test_equal_tensors_and_metadata_are_equal_bytes(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {"b": whole.T, "a": whole[0], "a/ü": torch.tensor([True]), "none": torch.empty(0)}
    metadata = {f"key {i}": f"„{i}“" for i in range(8)}
    assert len({save({"a": whole[0]}, metadata) for _ in range(20)}) > 1  # else this file needs no function of ours
    (written,) = {tensor_bytes(tensors, metadata) for _ in range(20)}
    path = tmp_path / "tensors.safetensors"
    path.write_bytes(written)
    read, found = read_tensors(path)
    assert read == metadata and found.keys() == tensors.keys()
    for each in (found, load_file(path)):
        assert all(torch.equal(each[name], tensor) for name, tensor in tensors.items())


def test_a_file_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path, tensors = tmp_path / "tensors.safetensors", {"a": torch.arange(3.0)}
    OURS.write(path, tensors)
    header, found = OURS.read(path)
    assert header["format"] == "ours" and torch.equal(found["a"], tensors["a"])
    assert OURS.is_at(path) and not THEIRS.is_at(path) and not OURS.is_at(tmp_path / "none")
    with pytest.raises(RunError, match=r"is another file: expected the format 'theirs', got 'ours'\. Make it again\."):
        THEIRS.read(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"is damaged: its contents do not match its checksum\. Make it again\."):
        OURS.read(path)
    path.write_bytes(content[:-1])
    with pytest.raises(RunError, match=r"cannot be read: .*\. Make it again\."):
        OURS.read(path)
    with pytest.raises(RunError, match="cannot be read: No such file"):
        OURS.read(tmp_path / "none")


def test_what_the_checksum_leaves_out_may_change(tmp_path: Path) -> None:
    path, kind = tmp_path / "tensors.safetensors", replace(OURS, apart=("a",))
    kind.write(path, {"a": torch.arange(3.0)})
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert kind.read(path)[1]["a"].tolist() != [0.0, 1.0, 2.0]


def test_a_file_that_a_user_names_is_called_what_they_call_it(tmp_path: Path) -> None:
    path, kind = tmp_path / "x.safetensors", replace(OURS, name="box")
    with pytest.raises(RunError, match=r"There is no box at .*x.safetensors\. Give the path of a box.safetensors\."):
        kind.load(path, dict.__or__)
    path.write_text("no tensors")
    with pytest.raises(RunError, match=r"is not a readable safetensors file .*cut short\. Make it again\."):
        kind.load(path, lambda *_: None)
    THEIRS.write(path, {"a": torch.zeros(2)})
    with pytest.raises(RunError, match="is no box: expected the format 'ours', got 'theirs'"):
        kind.load(path, lambda *_: None)
    kind.write(path, {"a": torch.zeros(2)})

    def refuse(*_: object) -> None:
        raise RegionError("it is too small.")

    with pytest.raises(RunError, match=r"is not a sound box: it is too small\. Make it again\."):
        kind.load(path, refuse)
    assert kind.load(path, lambda header, tensors: sorted(tensors)) == ["a"]
    path.write_bytes(tensor_bytes({"a": torch.zeros(2)}, {"format": "ours"}))
    with pytest.raises(RunError, match="is not a sound box: its contents do not match its checksum"):
        kind.load(path, lambda *_: None)
