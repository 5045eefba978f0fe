"""The parameter space: it holds the right tensors, and reads and writes them exactly."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import nn

from forgetfree.core.linear_layers import space_of_layers
from forgetfree.core.parameters import ParameterSpace, weight_matrices
from forgetfree.errors import RegionError


class Toy(nn.Module):
    """A model with two graftable tensors of 6 and 3 entries, and an excluded tensor between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.classifier = nn.Linear(2, 2)
        self.second = nn.Parameter(torch.tensor([10.0, 11.0, 12.0]))


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def space(toy: Toy) -> ParameterSpace:
    return ParameterSpace.of(toy)


# -- Layout ----------------------------------------------------------------------------------------------


def test_tensors_are_in_the_models_order_with_their_offsets(space: ParameterSpace) -> None:
    assert [(t.name, t.shape, t.dtype, t.offset, t.size) for t in space.tensors] == [
        ("first", (2, 3), torch.float32, 0, 6),
        ("second", (3,), torch.float32, 6, 3),
    ]
    assert len(space) == 9
    assert space.boundaries.tolist() == [0, 6, 9]


def test_the_layout_is_canonical_json_and_its_hash_tells_layouts_apart(space: ParameterSpace) -> None:
    assert space.layout == '[["first",[2,3],"float32"],["second",[3],"float32"]]'
    assert space.layout_hash == ParameterSpace.of(Toy()).layout_hash
    assert space.layout_hash != ParameterSpace.of(Toy().to(torch.bfloat16)).layout_hash
    assert space.layout_hash != ParameterSpace.of(Toy(), include=["first"]).layout_hash
    reshaped = Toy()
    reshaped.first = nn.Parameter(torch.zeros(3, 2))
    assert space.layout_hash != ParameterSpace.of(reshaped).layout_hash


def test_patterns_choose_tensors(toy: Toy) -> None:
    assert [t.name for t in ParameterSpace.of(toy, include=["first", "bias"]).tensors] == ["first"]
    rest = ParameterSpace.of(toy, exclude=["first"])
    assert [t.name for t in rest.tensors] == ["second", "classifier.weight", "classifier.bias"]
    toy.counts = nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)
    assert [t.name for t in ParameterSpace.of(toy).tensors] == ["first", "second"]


@pytest.mark.parametrize(("second", "names"), [("other", ["body.weight", "body.bias"]), ("lm_head", ["body.bias"])])
def test_tied_weights_are_one_tensor_and_out_if_one_of_their_names_is(second: str, names: list[str]) -> None:
    model = nn.ModuleDict({"body": nn.Linear(2, 2), second: nn.Linear(2, 2, bias=False)})
    model[second].weight = model["body"].weight  # type: ignore[union-attr, assignment]
    assert [t.name for t in ParameterSpace.of(model).tensors] == names


def test_an_embedding_is_not_grafted_whatever_its_name_is() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(3, 2), "body": nn.Linear(2, 2), "out": nn.Linear(2, 3)})
    model["out"].weight = model["table"].weight  # type: ignore[union-attr, assignment]
    names = ["body.weight", "body.bias"]
    assert [t.name for t in ParameterSpace.of(model).tensors] == [*names, "out.bias"]
    assert [t.name for t in space_of_layers(model).tensors] == names
    assert [
        t.name for t in ParameterSpace.of(model, exclude=["out"]).tensors
    ] == names  # the tied table has an excluded name


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("bert", "119975a4c897435883163a4233c3d1a24eb7b591d1b843491c7faf5b683ae8b4"),
        ("bert-pooler", "119975a4c897435883163a4233c3d1a24eb7b591d1b843491c7faf5b683ae8b4"),
        ("bert-mlm", "4ff8987f5d557686a66cb2dca4d6da34ca8a2532a1200bffb89ef0baf492dc39"),
        ("roberta", "119975a4c897435883163a4233c3d1a24eb7b591d1b843491c7faf5b683ae8b4"),
        ("roberta-mlm", "e057007d0ec9fddc5cc5fb9a515173289cb0f7cc4705d2c44214eff30b1cae22"),
        ("gpt2", "48637a3e405015a8003e8d222c55d220ad40a50cd89fb738c4011fecc4eaaef1"),
        ("gpt2-lm", "f033dad2d4c7bac715e940a12b8901b81a8c82d86f82565f5490406821c700c2"),
    ],
)
def test_a_space_stays_the_same_across_versions(kind: str, layout: str) -> None:
    """Ledgers and grafts on disk refer to entries by their index in this space."""
    assert ParameterSpace.of(tiny.build(kind)[0]).layout_hash == layout


# -- Values ----------------------------------------------------------------------------------------------


def test_flatten_and_load_are_inverse_and_exact(toy: Toy, space: ParameterSpace) -> None:
    flat = space.flatten(toy)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12]
    other = torch.randn(9)
    head = toy.classifier.weight.detach().clone()
    space.load_(toy, other)
    assert torch.equal(space.flatten(toy), other)
    assert torch.equal(toy.classifier.weight, head)
    space.load_(toy, flat)
    assert torch.equal(toy.first, torch.arange(6.0).view(2, 3))


def test_gather_and_scatter_touch_only_the_named_entries(toy: Toy, space: ParameterSpace) -> None:
    indices = torch.tensor([1, 5, 6])
    pieces = [(i, local.tolist(), where) for i, local, where in space.split(indices)]
    assert pieces == [(0, [1, 5], slice(0, 2)), (1, [0], slice(2, 3))]
    assert list(space.split(torch.tensor([], dtype=torch.int64))) == []
    assert space.gather(toy, indices).tolist() == [1, 5, 10]
    space.scatter_(toy, indices, torch.tensor([-1.0, -5.0, -10.0]))
    assert space.flatten(toy).tolist() == [0, -1, 2, 3, 4, -5, -10, 11, 12]


@pytest.mark.parametrize("indices", [[9], [-1, 3], [0, 100]])
def test_indices_outside_the_space_are_refused_before_anything_is_written(
    toy: Toy, space: ParameterSpace, indices: list[int]
) -> None:
    before = space.flatten(toy)
    with pytest.raises(RegionError, match="do not fit a parameter space of 9 entries"):
        space.gather(toy, torch.tensor(indices))
    with pytest.raises(RegionError, match="belongs to another model"):
        space.scatter_(toy, torch.tensor(indices), torch.zeros(len(indices)))
    with pytest.raises(RegionError, match=r"one value for each of 2 entries, got values of shape \(3,\)"):
        space.scatter_(toy, torch.tensor([0, 1]), torch.full((3,), 7.0))
    assert torch.equal(space.flatten(toy), before)


def test_another_models_tensors_are_refused(space: ParameterSpace) -> None:
    with pytest.raises(RegionError, match=r"expected 'first' of shape \(2, 3\), got no such tensor"):
        space.flatten(nn.Linear(2, 2))
    other = Toy()
    other.second = nn.Parameter(torch.zeros(4))
    with pytest.raises(RegionError, match=r"expected 'second' of shape \(3,\), got shape \(4,\)"):
        space.flatten(other)


def test_weight_matrices_have_entries() -> None:
    model = nn.ParameterDict({"none": torch.zeros(0, 4), "bias": torch.zeros(2), "matrix": torch.zeros(2, 3)})
    space = ParameterSpace.of(model)
    assert [space.tensors[i].name for i in weight_matrices(space)] == ["matrix"]
