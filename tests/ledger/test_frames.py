"""Frames of tensors: no bit is lost, whatever the dtype and the shape."""

from __future__ import annotations

import pytest
import torch
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
