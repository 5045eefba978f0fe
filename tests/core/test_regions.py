"""Regions as sets, and the positions of their entries. All numbers can be checked by hand."""

from __future__ import annotations

import pytest
import torch

from forgetfree.core.families import layer_of, role_of
from forgetfree.core.parameters import ParameterSpace, TensorSpec
from forgetfree.core.regions import Region, distribution, region_of, stored_indices
from forgetfree.errors import RegionError


def test_a_region_is_sorted_and_without_repeats() -> None:
    assert Region.of([5, 1, 5, 3]).indices.tolist() == [1, 3, 5]
    assert Region.of(torch.tensor([2, 2], dtype=torch.int32)).indices.dtype == torch.int64
    assert len(Region.of([5, 1, 5, 3])) == 3


def test_algebra_agrees_with_pythons_sets() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        one, other = (torch.randint(0, 30, (12,), generator=generator).tolist() for _ in range(2))
        a, b = Region.of(one), Region.of(other)
        assert (a | b).indices.tolist() == sorted(set(one) | set(other))
        assert (a & b).indices.tolist() == sorted(set(one) & set(other))
        assert (a - b).indices.tolist() == sorted(set(one) - set(other))


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (torch.tensor([[1, 2]]), r"got torch.int64 of shape \(1, 2\)"),
        (torch.tensor([1, 2], dtype=torch.int32), "got torch.int32"),
        (torch.tensor([1.0]), "got torch.float32"),
        (torch.tensor([2, 1]), "sorted"),
        (torch.tensor([1, 1]), "without repeats"),
        (torch.tensor([-1, 1]), "non-negative"),
    ],
)
def test_an_invalid_region_is_refused_with_the_remedy(indices: torch.Tensor, message: str) -> None:
    with pytest.raises(RegionError, match=message) as caught:
        Region(indices)
    assert "Region.of(...)" in str(caught.value)


def test_a_mask_is_not_taken_for_indices_nor_indices_for_a_mask() -> None:
    for mask in (torch.tensor([False, True, True]), [False, True], torch.tensor([0.0, 1.0])):
        with pytest.raises(RegionError, match=r"needs integers as indices.*from_mask"):
            Region.of(mask)
    with pytest.raises(RegionError, match=r"must be boolean, got torch.int64.*Region\.of"):
        Region.from_mask(torch.tensor([5, 9]))
    assert Region.of([]) == Region.empty()


def test_distribution_counts_every_group_in_the_spaces_order() -> None:
    """Tensors of 4, 2 and 3 entries: indices 0–3, 4–5, 6–8. The region takes 2, 0 and 1 of them."""
    f32 = torch.float32
    space = ParameterSpace(
        (
            TensorSpec("layer.1.query.weight", (2, 2), f32, 0),
            TensorSpec("layer.0.query.weight", (2,), f32, 4),
            TensorSpec("layer.1.key.bias", (3,), f32, 6),
        )
    )
    region = Region.of([0, 3, 8])
    assert list(distribution(region, space, layer_of).items()) == [("1", 3), ("0", 0)]
    assert list(distribution(region, space, role_of).items()) == [("query weight", 2), ("key bias", 1)]


@pytest.mark.parametrize(
    ("size", "indices", "dtype", "stored"),
    [
        # Gaps of 7, 65,534, 65,535, 70,000 and 1: a gap from 65,535 on takes two words or more.
        (2**20, [7, 65_541, 131_076, 201_076, 201_077], torch.uint16, "0700 feff ffff0000 ffff7111 0100"),
        (2**33, [7, 65_541, 131_076, 201_076, 201_077], torch.uint16, "0700 feff ffff0000 ffff7111 0100"),
        (2**20, [200_000, 400_000], torch.uint32, "400d0300 801a0600"),  # gaps would take eight words
        (2**20, [70_000], torch.uint32, "70110100"),  # two words are no shorter
        (2**33, [2**32 + 1], torch.int64, "0100000001000000"),
        (26, [], torch.uint32, ""),
    ],
)
def test_a_files_indices_are_gaps_of_two_bytes_where_these_are_shorter(
    size: int, indices: list[int], dtype: torch.dtype, stored: str
) -> None:
    space, region = ParameterSpace((TensorSpec("weight", (size,), torch.float32, 0),)), Region.of(indices)
    written = stored_indices(space, region)
    assert (written.dtype, written.numpy().tobytes()) == (dtype, bytes.fromhex(stored))
    assert region_of(space, {"index": written}, "index") == region
