"""Frames of tensors: no bit is lost, whatever the dtype and the shape."""

from __future__ import annotations

import sys

import pytest
import torch
import zstandard
from torch import Tensor

from forgetfree.errors import RegionError
from forgetfree.ledger.frames import compressed, compressed_text, restored, restored_text


def bits(tensor: Tensor) -> list[int]:
    return tensor.reshape(-1, 1).contiguous().view(torch.uint8).flatten().tolist()


TENSORS = [
    torch.tensor([True, False, True]),
    torch.tensor([1e-40, -0.0, 0.1, float("nan"), float("-inf")]),
    torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).t(),
    torch.tensor(7),
    torch.empty(0, 5),
    torch.tensor([1, 2**32 - 1]).to(torch.uint32),
    torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    torch.randn(1, generator=torch.Generator().manual_seed(2)).bfloat16(),
    torch.randn(9, generator=torch.Generator().manual_seed(3)).half(),
    torch.full((200_000,), 3, dtype=torch.int16),
]


@pytest.mark.parametrize("shift", range(len(TENSORS)))
def test_tensors_come_back_bit_for_bit_in_any_order(shift: int) -> None:
    tensors = TENSORS[shift:] + TENSORS[:shift]
    frame = compressed(tensors)
    back = restored(frame, [(each.dtype, each.numel()) for each in tensors])
    for one, other in zip(back, tensors, strict=True):
        assert one.dtype == other.dtype
        assert bits(one) == bits(other)
    assert compressed(tensors) == frame
    assert len(frame) < 1000  # the long one is all alike


def test_what_is_all_alike_comes_back_from_any_size() -> None:
    """Such as the gaps of a region that shares a whole model."""
    tensor = torch.zeros(2**23 + 5)
    frame = compressed([torch.ones(3), tensor])
    assert torch.equal(restored(frame, [(torch.float32, 3), (torch.float32, len(tensor))])[1], tensor)
    assert len(frame) < 2**16


def test_a_frame_that_holds_more_than_tensors_can_is_refused() -> None:
    for size in (2**25, 2**40):
        stream = zstandard.ZstdCompressor().compressobj(size=size)
        frame = b"".join(stream.compress(bytes(2**20)) for _ in range(32)) + (stream.flush() if size == 2**25 else b"")
        with pytest.raises(RegionError, match=f"a frame of {len(frame)} bytes claims to hold {size}"):
            restored(frame, [(torch.uint8, size)])
    with pytest.raises(RegionError, match="bytes claims to hold 33554432"):
        restored_text(compressed_text("[" * 2**25))
    with pytest.raises(RegionError, match="it claims a text of"):
        restored_text(compressed_text("[" * (2**27 + 1)))


def test_a_machine_that_puts_high_bytes_first_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = compressed([torch.ones(3)])
    monkeypatch.setattr(sys, "byteorder", "big")
    for call in (lambda: compressed([torch.ones(3)]), lambda: restored(frame, [(torch.float32, 3)])):
        with pytest.raises(RegionError, match="little-endian machines only"):
            call()


def test_nothing_is_a_frame_too() -> None:
    assert restored(compressed([]), []) == []
    assert [restored_text(compressed_text(text)) for text in ("", "täglich\n" * 9)] == ["", "täglich\n" * 9]


def test_a_frame_of_something_else_is_refused() -> None:
    frame = compressed([torch.arange(5)])
    for kinds in ([], [(torch.int64, 4)], [(torch.int64, 2**40)]):
        with pytest.raises(RegionError, match="a frame holds 40 bytes, expected"):
            restored(frame, kinds)
    for damaged in (b"", b"x" * 20, frame[:-2], frame + b"x"):
        with pytest.raises(RegionError, match=r"cannot be decompressed|holds"):
            restored(damaged, [(torch.int64, 5)])
