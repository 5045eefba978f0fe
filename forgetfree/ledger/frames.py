"""Frames: tensors as one block of zstd, without loss.

A frame holds its tensors as planes: all first bytes, then all second bytes, and so on, lowest first, each plane with a code
of its own. The high bytes of weights are signs and exponents, which are much alike, and take a few bits; the low bytes of a
mantissa are noise, which zstd leaves as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache

import torch
import zstandard
from torch import Tensor

from forgetfree.errors import RegionError, first_line

#: The longest text that a file may hold: names, labels and prompts of 10,000 tasks take a fiftieth of it.
MOST_TEXT = 2**27
#: How many bytes a byte of a frame holds at the most, beyond `_FREE`. zstd itself packs zeros 32,000-fold, so that a small
#: file could ask for any memory. Trained values are noise, which does not shrink; the gaps of a region that owns a whole
#: tensor are zeros, but its values stand beside them. Only what shares a whole large space is packed better, or values that
#: are all equal: then `compressed` ends a block often enough to stay below.
_MOST_RATIO = 2000
#: The bytes that even the smallest frame may hold: all of a small model.
_FREE = 2**24
#: The bytes of a block then; it takes four or more.
_SHORT = 4096


@cache
def _parameters() -> zstandard.ZstdCompressionParameters:
    # Short repeats in noise are chance, and cost more than they save.
    return zstandard.ZstdCompressionParameters.from_level(1, strategy=zstandard.STRATEGY_FAST, min_match=7)


def compressed(tensors: Sequence[Tensor]) -> bytes:
    """Return the frame of tensors on the CPU, of any dtypes and shapes.

    Raises:
        RegionError: this machine puts high bytes first.
    """
    _check_byte_order()
    planes = [plane for tensor in tensors if tensor.numel() for plane in _planes(tensor)]
    frame, size = _in_blocks(planes), sum(map(len, planes))
    if size > _most(frame):
        frame = _in_blocks([plane[i : i + _SHORT] for plane in planes for i in range(0, len(plane), _SHORT)])
    return frame


def _in_blocks(pieces: Sequence[bytes]) -> bytes:
    """Return the frame of pieces, each with a code of its own."""
    compressor = zstandard.ZstdCompressor(compression_params=_parameters())
    stream = compressor.compressobj(size=sum(map(len, pieces)))
    parts = []
    for piece in pieces:
        parts += [stream.compress(piece), stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*parts, stream.flush()])


def _most(frame: bytes) -> int:
    """Return the most bytes that a frame may hold."""
    return _FREE + _MOST_RATIO * len(frame)


def restored(frame: bytes, kinds: Sequence[tuple[torch.dtype, int]]) -> list[Tensor]:
    """Return the tensors of a frame, flat.

    Args:
        frame: what `compressed` returned.
        kinds: dtype and number of entries of each tensor.

    Raises:
        RegionError: the frame is damaged, or holds something else; or this machine puts high bytes first.
    """
    _check_byte_order()
    data = bytes_tensor(_content(frame, sum(dtype.itemsize * count for dtype, count in kinds)))
    tensors, begin = [], 0
    for dtype, count in kinds:
        end = begin + dtype.itemsize * count
        planes = data[begin:end].view(dtype.itemsize, count)
        tensors.append(planes.T.clone(memory_format=torch.contiguous_format).view(-1).view(dtype))
        begin = end
    return tensors


def compressed_text(text: str) -> Tensor:
    """Return the frame of a text as uint8 ``(n,)``."""
    return bytes_tensor(zstandard.ZstdCompressor(level=9).compress(text.encode()))


def restored_text(frame: Tensor) -> str:
    """Return the text of a frame.

    Raises:
        RegionError: the frame is damaged, or its text is too long.
        UnicodeDecodeError: it holds no text.
    """
    data = frame.numpy().tobytes()
    try:
        size = zstandard.frame_content_size(data)
    except zstandard.ZstdError as error:
        raise RegionError(f"it cannot be decompressed ({first_line(error)}).") from error
    if not 0 <= size <= MOST_TEXT:
        raise RegionError(f"it claims a text of {size} bytes, expected at most {MOST_TEXT}.")
    return _content(data, size).decode()


def bytes_tensor(data: bytes) -> Tensor:
    """Return bytes as uint8 ``(n,)``."""
    if not data:  # of which frombuffer makes nothing
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _check_byte_order() -> None:
    if sys.byteorder != "little":
        raise RegionError("frames are written and read on little-endian machines only. Use such a machine.")


def _planes(tensor: Tensor) -> list[bytes]:
    each = tensor.detach().reshape(-1, 1).contiguous().view(torch.uint8)  # (s, bytes of an entry)
    return [plane.tobytes() for plane in each.numpy().T]


def _content(frame: bytes, size: int) -> bytes:
    """Return the ``size`` bytes that a frame holds."""
    try:
        if (stated := zstandard.frame_content_size(frame)) != size:  # before memory is taken for it
            raise RegionError(f"a frame holds {stated} bytes, expected {size}.")
        if size > _most(frame):
            raise RegionError(f"a frame of {len(frame)} bytes claims to hold {size}, expected at most {_most(frame)}.")
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RegionError(f"it cannot be decompressed ({first_line(error)}).") from error
