"""The ledger: ownership, the file and every kind of damage to it, and the switch between tasks."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from compared import assert_same, state_of
from damage import Change, accepted_flips, drop, note, put, rewrite, sealed, told, u16, u32
from torch import Tensor, nn

from forgetfree.cli.ledger import render_ledger
from forgetfree.core.fingerprint import fingerprint_of
from forgetfree.core.parameters import ParameterSpace, TensorSpec
from forgetfree.core.regions import Region
from forgetfree.core.trained import RegionParameters
from forgetfree.errors import LedgerError, RegionError, TaskError
from forgetfree.ledger.binding import Binding
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.ledger import Ledger, Record
from forgetfree.ledger.owners import OwnersBelow
from forgetfree.ledger.switch import LedgerSwitch, changed_buffers
from forgetfree.tasks import TaskDefinition


class Toy(nn.Module):
    """A model with 26 entries (a.weight 0–11, a.bias 12–15, b.weight 16–23, b.bias 24–25) and the buffers of a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4, affine=False)
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_((torch.arange(parameter.numel()) * 0.1 + i).view(parameter.shape))


#: γ of three tasks, and the entries each task owns: γ minus the entries of earlier tasks.
REGIONS = {"one": [0, 5, 13], "two": [5, 6, 20], "three": [13, 20, 24, 25]}
OWNED = {"one": [0, 5, 13], "two": [6, 20], "three": [24, 25]}
#: The parent on which each task stands.
PARENTS = {
    "union": {"one": "", "two": "one", "three": "two"},
    "selection": dict.fromkeys(REGIONS, ""),
    "alone": dict.fromkeys(REGIONS, ""),
    "tree": {"one": "", "two": "", "three": "one"},
}


def record(task: str, **changes: Any) -> Record:
    """Return the record of one of the three tasks, with values 100, 101 … (200 …, 300 …) and its own readout."""
    base = 100.0 * (1 + list(REGIONS).index(task))
    owned = Region.of(OWNED[task])
    values = torch.arange(len(owned)) + base
    readout = {"weight": torch.full((2, 3), base), "bias": torch.tensor([base, -base])}
    buffers = {"norm.running_mean": torch.full((4,), base)} if task != "one" else {}
    parent = PARENTS["union"][task]
    made = Record(task, Region.of(REGIONS[task]), Graft(owned, values), 0.15, readout, buffers, parent=parent)
    return replace(made, **changes)


def ledger_of(model: nn.Module, tasks: list[str] | None = None) -> Ledger:
    ledger = Ledger(ParameterSpace.of(model), fingerprint_of(model))
    for task in REGIONS if tasks is None else tasks:
        ledger.append(record(task))
    return ledger


def composed(way: str, tasks: list[str] | None = None) -> Ledger:
    """Return a ledger of the three tasks composed in one ``way``; each task owns the free entries of its γ."""
    model = Toy()
    made = Ledger(ParameterSpace.of(model), fingerprint_of(model), "selection" if way == "selection" else "parents")
    for task in REGIONS if tasks is None else tasks:
        parent = PARENTS[way][task]
        free = made.free(Region.of(REGIONS[task]), parent)
        values = torch.arange(len(free)) + 100.0 * (1 + list(REGIONS).index(task))
        made.append(record(task, owned=Graft(free, values), parent=parent))
    return made


#: The values written onto θ_pre for each task. γ of three is 13, 20, 24, 25; one owns 13, two owns 20.
INFERRED: dict[str, dict[str, dict[int, float]]] = {
    "union": {
        "one": {0: 100, 5: 101, 13: 102},
        "two": {0: 100, 5: 101, 6: 200, 13: 102, 20: 201},
        "three": {0: 100, 5: 101, 6: 200, 13: 102, 20: 201, 24: 300, 25: 301},
    },
    "selection": {
        "one": {0: 100, 5: 101, 13: 102},
        "two": {5: 101, 6: 200, 20: 201},
        "three": {13: 102, 20: 201, 24: 300, 25: 301},
    },
    "alone": {
        "one": {0: 100, 5: 101, 13: 102},
        "two": {5: 200, 6: 201, 20: 202},
        "three": {13: 300, 20: 301, 24: 302, 25: 303},
    },
    "tree": {  # two does not use entries of three
        "one": {0: 100, 5: 101, 13: 102},
        "two": {5: 200, 6: 201, 20: 202},
        "three": {0: 100, 5: 101, 13: 102, 20: 300, 24: 301, 25: 302},
    },
}


def expected_theta(task: str, way: str = "union") -> Tensor:
    theta = ParameterSpace.of(Toy()).flatten(Toy())
    for index, value in INFERRED[way][task].items():
        theta[index] = value
    return theta


@pytest.fixture
def model() -> Toy:
    return Toy()


@pytest.fixture
def ledger(model: Toy) -> Ledger:
    return ledger_of(model)


def assert_same_ledger(one: Ledger, other: Ledger) -> None:
    assert one.space == other.space
    assert one.fingerprint == other.fingerprint
    assert one.tasks == other.tasks
    for a, b in zip(one.records, other.records, strict=True):
        assert_same_record(a, b)


def assert_same_record(a: Record, b: Record) -> None:
    same = ("task", "sparsity", "definition", "classes", "parent")
    assert [getattr(a, each) for each in same] == [getattr(b, each) for each in same]
    assert a.region == b.region
    assert a.owned.region == b.owned.region
    assert torch.equal(a.owned.values, b.owned.values)
    for mine, theirs in ((a.readout, b.readout), (a.buffers, b.buffers)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype for name in mine)


# -- Who owns what ---------------------------------------------------------------------------------------


def test_every_entry_has_one_owner_or_none(ledger: Ledger) -> None:
    """The regions have 3, 3 and 4 entries, with one ∩ two = {5}, one ∩ three = {13} and two ∩ three = {20}."""
    assert ledger.tasks == ["one", "two", "three"] and ledger.position("two") == 1
    assert ledger.taken("one").indices.tolist() == [0, 5, 13]
    assert ledger.taken("two").indices.tolist() == [0, 5, 6, 13, 20]
    assert ledger.owned().indices.tolist() == [0, 5, 6, 13, 20, 24, 25]
    every, asked = [0, 1, 5, 6, 13, 20, 24, 25], Region.of([0, 1, 6, 25])
    for parent, free, owners in (  # back and forth in the chain of parents
        ("three", [1], [0, -1, 0, 1, 0, 1, 2, 2]),
        ("one", [1, 6, 25], [0, -1, 0, -1, 0, -1, -1, -1]),
        ("two", [1, 25], [0, -1, 0, 1, 0, 1, -1, -1]),
        ("", [0, 1, 6, 25], [-1] * 8),
    ):
        assert ledger.free(asked, parent).indices.tolist() == free
        assert ledger.owners(Region.of(every), parent).tolist() == owners
        assert len(ledger.taken(parent)) == sum(owner >= 0 for owner in owners)
    with pytest.raises(RegionError):
        ledger.owners(Region.of([26]))
    with pytest.raises(TaskError, match=r"holds no task 'four'\. It holds: one, two, three"):
        ledger.taken("four")
    third, quarter = pytest.approx(1 / 3), pytest.approx(1 / 4)
    assert ledger.overlap() == [[1, third, quarter], [third, 1, quarter], [third, third, 1]]


# -- Appending -------------------------------------------------------------------------------------------


def test_a_task_is_appended_once(ledger: Ledger) -> None:
    with pytest.raises(TaskError, match=r"Task 'two' is already in the ledger \(record 1\).*under another name"):
        ledger.append(record("two"))
    with pytest.raises(TaskError, match="already in the ledger"):
        ledger.check_new("one")
    ledger.check_new("four")
    with pytest.raises(TaskError, match="A task needs a name"):
        ledger.check_new("")
    assert len(ledger.records) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"region": Region.of([5, 6, 26])}, "do not fit a parameter space of 26 entries"),
        ({"owned": Graft(Region.of([5, 6, 20]), torch.zeros(3))}, "takes entries that tasks below it own"),
        ({"parent": "none"}, "holds no task 'none'"),
        ({"owned": Graft(Region.of([6]), torch.zeros(1))}, "expected 2 entries, got 1"),
        ({"owned": Graft(Region.of([6, 20, 21]), torch.zeros(3))}, "expected 2 entries, got 3"),
        ({"owned": Graft(Region.of([6, 20]), torch.zeros(3))}, r"expected shape \(2,\), got \(3,\)"),
        (
            {"owned": Graft(Region.of([6, 20]), torch.tensor([1.0, float("nan")]))},
            "'values' holds NaN or infinity",
        ),
        ({"readout": {"bias": torch.tensor([float("inf")])}}, "'bias' holds NaN or infinity"),
        (
            {"buffers": {"norm.running_mean": torch.tensor([float("nan")])}},
            "running_mean' holds NaN or infinity",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_the_ledger_stays(model: Toy, changes: dict[str, Any], message: str) -> None:
    ledger = ledger_of(model, ["one"])
    with pytest.raises(LedgerError, match=message) as caught:
        ledger.append(record("two", **changes))
    assert "Record of task 'two'" in str(caught.value)
    assert ledger.tasks == ["one"]
    ledger.append(record("two"))


def test_a_value_that_the_models_dtype_does_not_hold_is_refused() -> None:
    """Append raises, before any file is written: 70,000 is infinite in float16, whose largest number is 65,504."""
    ledger = Ledger(ParameterSpace.of(Toy().half()), "f" * 64)
    region = Region.of([0, 5])
    with pytest.raises(LedgerError, match="'values' holds NaN or infinity"):
        ledger.append(Record("one", region, Graft(region, torch.tensor([1.0, 70_000.0])), 0.1))
    ledger.append(Record("one", region, Graft(region, torch.tensor([1.0, 65_504.0])), 0.1))
    assert ledger.records[0].owned.values.dtype == torch.float16


def test_what_the_caller_does_to_its_tensors_later_cannot_reach_the_ledger(model: Toy) -> None:
    made = record("one")
    ledger = ledger_of(model, [])
    ledger.append(made)
    made.owned.values.zero_()
    for tensor in made.readout.values():
        tensor.zero_()
    assert ledger.records[0].owned.values.tolist() == [100, 101, 102]
    assert ledger.records[0].readout["bias"].tolist() == [100, -100]


@pytest.mark.parametrize(("names", "there"), [(("h.0.w", "norm.w"), ("h.0.w", "norm.w")), (("gpt.h.w",), ("h.w",))])
def test_the_graft_of_a_language_model_has_names_as_in_its_body(names: tuple[str, ...], there: tuple[str, ...]) -> None:
    """The body is an attribute of the model, or the model itself."""
    space = ParameterSpace(tuple(TensorSpec(name, (2,), torch.float32, 2 * i) for i, name in enumerate(names)))
    ledger = Ledger(space, "f" * 64, binding=Binding("{}", "t", "causal", 5))
    owned = Graft(Region.of([1]), torch.ones(1))
    ledger.append(Record("own", owned.region, owned, 0.5, definition=tiny.TASK))
    graft = ledger.graft("own")
    assert graft.space and graft.origin and tuple(spec.name for spec in graft.space.tensors) == there


# -- The file --------------------------------------------------------------------------------------------


def test_saving_and_loading_loses_nothing(model: Toy, ledger: Ledger, tmp_path: Path) -> None:
    """This includes a ledger without tasks, and a task whose region is owned entirely by other tasks."""
    empty, shared = ledger_of(model, []), ledger_of(model, ["one"])
    nothing = Graft(Region.empty(), torch.empty(0))
    shared.append(Record("two", Region.of([0, 13]), nothing, 0.1, {"weight": torch.ones(1)}, parent="one"))
    assert (empty.owned(), empty.overlap()) == (Region.empty(), [])
    for made in (ledger, empty, shared):
        made.save(str(tmp_path / "deep" / "l.safetensors"))
        assert_same_ledger(Ledger.load(str(tmp_path / "deep" / "l.safetensors")), made)
    entries, shares, readouts, buffers = 7, 3, 3 * 8, 2 * 4
    assert ledger.size_in_bytes == sum(ledger.sizes) == 4 * (entries + readouts + buffers) + 2 * (entries + shares)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["l.safetensors"]  # no temporary file is left


def test_values_are_kept_to_the_last_bit_in_the_parameters_dtype(tmp_path: Path) -> None:
    """Denormals, signed zeros and values without a short decimal form survive; bfloat16 stays bfloat16."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        model = Toy().to(dtype)
        values = torch.tensor([1e-40, -0.0, 0.1]).to(dtype)
        ledger = Ledger(ParameterSpace.of(model), fingerprint_of(model))
        ledger.append(Record("one", Region.of([0, 5, 13]), Graft(Region.of([0, 5, 13]), values), 0.2))
        ledger.save(tmp_path / "l.safetensors")
        loaded = Ledger.load(tmp_path / "l.safetensors").records[0].owned.values
        assert loaded.dtype == dtype
        assert torch.equal(loaded.view(torch.uint8), values.view(torch.uint8))


def test_entries_far_apart_and_close_together_in_mixed_dtypes(tmp_path: Path) -> None:
    """A ledger and a graft keep each region exactly, in the shorter of two forms: two bytes per entry, or four."""
    model = nn.Sequential(nn.Linear(500, 400, bias=False), nn.Linear(400, 500).to(torch.bfloat16))
    space = ParameterSpace.of(model)
    ledger = Ledger(space, "f" * 64)
    regions = {
        "far": range(0, 400_000, 150_000),
        "both": [*range(9), 199_999, 200_000, 400_499],
        "close": range(400_000, 400_400, 3),
    }
    for task, indices in regions.items():
        values = torch.arange(len(indices)).to(torch.bfloat16).float()  # values that both dtypes represent exactly
        ledger.append(Record(task, Region.of(indices), Graft(Region.of(indices), values, space), 0.1))
    ledger.save(tmp_path / "ledger")
    loaded = Ledger.load(tmp_path / "ledger")
    assert_same_ledger(loaded, ledger)
    assert ledger.sizes == [3 * (4 + 4), 12 * 4 + 2 * (12 + 2 * 3), 134 * (4 + 2) + 2 * 6]
    for record in loaded.records:
        replace(record.owned, space=space).save(tmp_path / "graft")
        graft = Graft.load(tmp_path / "graft")
        assert graft.region == record.region and torch.equal(graft.values, record.owned.values)


def test_equal_ledgers_are_equal_files(model: Toy, tmp_path: Path) -> None:
    """This includes a ledger that was saved, loaded and continued."""
    first, other = tmp_path / "first.safetensors", tmp_path / "other.safetensors"
    ledger_of(model).save(first)
    ledger_of(model, ["one", "two"]).save(other)
    again = Ledger.load(other)
    again.append(record("three"))
    again.save(other)
    assert other.read_bytes() == first.read_bytes()


# -- Damage ----------------------------------------------------------------------------------------------


@pytest.fixture
def file(ledger: Ledger, tmp_path: Path) -> Path:
    path = tmp_path / "ledger.safetensors"
    ledger.save(path)
    return path


MOOD = TaskDefinition("one", "single", ("sad", "glad"))


def moved(k: int, owned: tuple[int, ...], shared: tuple[int, ...] = ()) -> Change:
    """Replace the entries of record ``k`` by as many others, with valid checksums."""
    both = {"index": u32(*owned)} | ({"shared": u32(*shared)} if shared else {})
    return sealed(*(put(f"{k}/{name}", tensor) for name, tensor in both.items()))


#: One owns 0, 5, 13; two owns 6, 20 and shares 5; three owns 24, 25 and shares 13, 20.
DAMAGE: dict[str, tuple[Change, str]] = {
    "a binding that is none": (sealed(note("binding", "[]")), r"its binding cannot be read \(the content must be an obj"),
    "a value too many": (sealed(put("0/value", torch.zeros(4))), r"'one': 'value' must be torch.float32 of shape \(3,\), got"),
    "no values": (sealed(drop("1/value")), r"task 'two': 'value' must be torch.float32 of shape \(2,\), got none"),
    "indices of another dtype": (sealed(put("0/index", torch.arange(3))), "uint16 or torch.uint32, .* got torch.int64"),
    "a gap of nothing": (sealed(put("0/index", u16(5, 0, 8))), "task 'one': .* sorted and without repeats"),
    "gaps past the end": (sealed(put("2/index", u16(24, 2))), "task 'three': Indices from 24 to 26 do not fit"),
    "gaps that end nowhere": (sealed(put("0/index", u16(0, 5, 8, 65_535))), "'one': 'index' ends with 65,535, which passes"),
    "an index out of bounds": (moved(2, (24, 26), (13, 20)), "task 'three': Indices from 24 to 26 do not fit .* 26 entries"),
    "indices in disorder": (moved(0, (5, 0, 13)), "task 'one': "),
    "two owners": (moved(1, (5, 20), (6,)), "Record of task 'two' takes entries that tasks below it own"),
    "shared with nobody": (moved(1, (6, 20), (7,)), "task 'two' shares entries that no task below it owns"),
    "a layout of nothing": (sealed(note("layout", "[]")), "its layout cannot be read"),
    "a layout of dtypes that have none in common": (
        sealed(note("layout", '[["a",[2],"float8_e5m2"],["b",[2],"float32"]]')), "its dtypes must be float8 alone"),
    "something unknown": (sealed(told(1, more=1)), "the fields of task 'two' cannot be read .more is not known"),
    "a sparsity that is a text": (sealed(told(0, sparsity="0.1")), "sparsity must be a number, got '0.1'"),
    "a definition of another task": (
        sealed(told(0, definition=replace(MOOD, name="two").fields, classes=[0, 1])), "must be that of task 'one'"),
    "labels of another number": (sealed(told(0, definition=MOOD.fields, classes=[0])), "with a class for each label"),
    "classes below 0": (sealed(told(0, classes=[-1])), r"classes\[0\] must be at least 0, got -1"),
    "no composition": (sealed(drop("composition")), "its metadata lacks composition"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_with_the_reason(file: Path, damage: str) -> None:
    change, reason = DAMAGE[damage]
    Ledger.load(file)
    rewrite(file, change)
    with pytest.raises(LedgerError, match=reason) as caught:
        Ledger.load(file)
    assert str(caught.value).startswith(f"{file} is not a sound ledger: ")
    assert str(caught.value).endswith("Restore it from a copy, or run the stream again.")


def test_a_flipped_bit_anywhere_is_noticed(file: Path) -> None:
    """One bit flips in each byte of the tensors and in each fifth byte of the header; each flip raises a ledger error."""
    sound = file.read_bytes()
    tensors = 8 + int.from_bytes(sound[:8], "little")
    positions = [*range(8), *range(8, tensors, 5), *range(tensors, len(sound))]
    assert accepted_flips(file, Ledger.load, LedgerError, positions) == []


# -- Many tasks ------------------------------------------------------------------------------------------


def many(tasks: int, entries: int) -> Ledger:
    """Return a ledger of tasks with random regions in a space of 200,000 entries, each with a readout."""
    space, generator = ParameterSpace.of(nn.Linear(500, 400, bias=False)), torch.Generator().manual_seed(tasks)
    made = Ledger(space, "f" * 64)
    for k in range(tasks):
        region = Region.of(torch.randint(0, len(space), (entries,), generator=generator))
        owned = made.free(region, made.last)
        readout = {"weight": torch.full((2, 3), float(k)), "bias": torch.zeros(2)}
        values = torch.full((len(owned),), float(k))
        made.append(Record(f"task-{k}", region, Graft(owned, values), 0.1, readout, parent=made.last))
    return made


def seconds_of(action: Callable[..., object], *arguments: object) -> float:
    """Return the processor time of an action, which other processes do not affect."""
    begin = time.process_time()
    action(*arguments)
    return time.process_time() - begin


@pytest.mark.sampled(share=0.1)
def test_time_and_size_grow_with_the_tasks_and_not_with_their_square(tmp_path: Path) -> None:
    """The test compares 100 tasks with 1,000; with quadratic cost, these would take a hundred times as long."""
    few, lots = many(100, 200), many(1000, 200)
    files = [tmp_path / "few.safetensors", tmp_path / "lots.safetensors"]
    for ledger, file in zip((few, lots), files, strict=True):
        ledger.save(file)
    assert files[1].stat().st_size < 11 * files[0].stat().st_size
    saved = [min(seconds_of(each.save, file) for _ in range(3)) for each, file in zip((few, lots), files, strict=True)]
    loaded = [min(seconds_of(Ledger.load, file) for _ in range(3)) for file in files]
    assert saved[1] < 30 * saved[0] and loaded[1] < 30 * loaded[0]
    appended = []
    for ledger in (few, lots):
        region = Region.of(range(199_000, 199_200))
        last, nothing = ledger.last, Graft(Region.empty(), torch.empty(0))
        owned = ledger.free(region, last)
        new = [Record(f"new-{k}", Region.empty(), nothing, 0.1, parent=f"new-{k - 1}") for k in range(50)]
        new[0] = Record("new-0", region, Graft(owned, torch.zeros(len(owned))), 0.1, parent=last)
        appended.append(min(seconds_of(ledger.append, record) for record in new))
    assert appended[1] < 10 * appended[0]


@pytest.mark.parametrize("way", ["line", "star", "two lines", "random"])
def test_owners_are_those_of_a_slow_reference_however_many_tasks_there_are(way: str) -> None:
    """This covers runs merged many times, tasks that own nothing, and all forms of trees, added one by one and all at once."""
    random, owners, expected = np.random.default_rng(0), OwnersBelow(), [dict[int, int]()]
    regions, parents, before = list[Region](), list[int](), list[list[int]]()
    for task in range(400):
        parent = {"line": task, "star": min(task, 100), "two lines": max(0, task - 1)}.get(
            way, int(random.integers(0, task + 1))
        )
        region = Region.of(random.integers(0, 3000, task % 5).tolist())
        before.append([expected[parent].get(index, -1) for index in region.indices.tolist()])
        own = [index for index in region.indices.tolist() if index not in expected[parent]]
        owners.add(torch.tensor(own, dtype=torch.int64), parent)
        expected.append(expected[parent] | dict.fromkeys(own, task))
        regions.append(region)
        parents.append(parent)
    asked = torch.arange(3100)
    at_once, found = OwnersBelow.of(regions, parents)
    assert [each.tolist() for each in found] == before
    for stage, each in itertools.product((0, 1, 99, 250, 400), (owners, at_once)):
        assert each.among(asked, stage).tolist() == [expected[stage].get(index, -1) for index in asked.tolist()]
        assert each.owned(stage).tolist() == sorted(expected[stage])


# -- The switch ------------------------------------------------------------------------------------------


def test_a_task_is_answered_inside_and_the_base_model_is_there_after(model: Toy, ledger: Ledger) -> None:
    before, switch = state_of(model), LedgerSwitch(ledger, model)
    with pytest.raises(ZeroDivisionError), switch.task("two") as inside:
        assert inside is model
        assert torch.equal(ledger.space.flatten(model), expected_theta("two"))
        raise ZeroDivisionError
    for stage in (-1, 4):
        with pytest.raises(LedgerError, match=f"has 3 records, there is no stage {stage}"):
            switch.to(stage)
    with pytest.raises(TaskError, match="holds no task 'four'"):
        switch.to_task("four")
    assert_same(model.state_dict(), before)


def test_a_switch_inside_a_callers_autocast_is_answered_anew(model: Toy, ledger: Ledger) -> None:
    """Autocast caches cast weights; a stale cache would give the answers of the previous task."""
    switch, x = LedgerSwitch(ledger, model), torch.eye(model.a.in_features)
    answers = {}
    for outer in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=outer):
            for stage in (0, 3, 1):
                switch.to(stage)
                with torch.autocast("cpu", torch.bfloat16):
                    answers[outer, stage] = model.a(x)
    assert not torch.equal(answers[False, 0], answers[False, 3])
    for stage in (0, 3, 1):
        assert torch.equal(answers[True, stage], answers[False, stage])


def test_a_switch_touches_only_tensors_that_hold_what_it_changes(model: Toy, ledger: Ledger) -> None:
    """Stages 1 and 2 differ in a.weight[6] and b.weight[4]; the biases are not written, not even with equal values."""
    switch = LedgerSwitch(ledger, model)
    switch.to(1)
    versions = {name: parameter._version for name, parameter in model.named_parameters()}
    switch.to(2)
    switch.to(1)
    touched = [name for name, parameter in model.named_parameters() if parameter._version != versions[name]]
    assert touched == ["a.weight", "b.weight"]
    versions = {name: parameter._version for name, parameter in model.named_parameters()}
    switch.to(1)
    assert versions == {name: parameter._version for name, parameter in model.named_parameters()}


def test_a_region_trained_in_place_is_given_back(model: Toy) -> None:
    """The parent's weights come back, with or without a record of the task; the switch then serves the task like any other."""
    before, ledger = state_of(model), ledger_of(model, ["one"])
    switch, region = LedgerSwitch(ledger, model), Region.of(OWNED["two"])
    with switch.learning(region, parent="one"):
        ledger.space.scatter_(model, region.indices, torch.tensor([7.0, 8.0]))
    assert torch.equal(ledger.space.flatten(model), expected_theta("one"))
    with pytest.raises(ZeroDivisionError), switch.learning(region, parent="one") as change:
        ledger.space.scatter_(model, region.indices, torch.tensor([7.0, 8.0]))
        with change.suspended():
            assert torch.equal(ledger.space.flatten(model), expected_theta("one"))
            switch.to(0)
        assert ledger.space.gather(model, region.indices).tolist() == [7.0, 8.0]
        1 / 0  # noqa: B018
    assert torch.equal(ledger.space.flatten(model), expected_theta("one"))
    with switch.learning(region, parent="one"):
        ledger.space.scatter_(model, region.indices, torch.tensor([200.0, 201.0]))
        ledger.append(record("two", owned=Graft.of(model, ledger.space, region)))
    assert switch.stage == 1
    assert torch.equal(ledger.space.flatten(model), expected_theta("one"))
    switch.to(2)
    assert torch.equal(ledger.space.flatten(model), expected_theta("two"))
    switch.to(0)
    assert_same(model.state_dict(), before)


def test_what_was_trained_outside_of_its_region_is_not_recorded_in_silence(model: Toy) -> None:
    """One entry outside the region is enough. The remedy in the message leads to a valid record, and back to θ_pre."""
    before, ledger = state_of(model), ledger_of(model, [])
    switch, region = LedgerSwitch(ledger, model), Region.of([6, 20])
    with (
        pytest.raises(LedgerError, match=r"'two' changed entries outside of its region, first in 'a\.weight'"),
        switch.learning(region),
    ):
        ledger.space.scatter_(model, torch.tensor([6, 7, 20]), torch.tensor([200.0, 9.0, 201.0]))
        ledger.append(record("two", region=region, owned=Graft.of(model, ledger.space, region), parent=""))
    model.load_state_dict(before)
    ledger = ledger.of_tasks(ledger.tasks[:-1])
    switch = LedgerSwitch(ledger, model)
    with switch.learning(region):
        values = RegionParameters(model, ledger.space, region)
        values.values.data = torch.tensor([200.0, 201.0])
        values.write()
        ledger.append(record("two", region=region, owned=Graft.of(model, ledger.space, region), parent=""))
    switch.to(0)
    assert_same(model.state_dict(), before)


def test_training_that_moves_anything_gives_a_task_its_own_entries_alone(model: Toy) -> None:
    before, ledger = state_of(model), ledger_of(model, ["one"])
    switch, region = LedgerSwitch(ledger, model), Region.of(OWNED["two"])
    with switch.learning(region, parent="one", moves_anything=True):
        ledger.space.load_(model, ledger.space.flatten(model) + 1)
        ledger.append(record("two", owned=Graft.of(model, ledger.space, region)))
    switch.to(1)
    assert torch.equal(ledger.space.flatten(model), expected_theta("one"))
    switch.to(0)
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize("way", ["union", "selection", "alone"])
def test_a_switch_to_a_record_that_cannot_be_read_leaves_no_half_of_it(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made = Toy(), composed(way)
    before, switch = state_of(model), LedgerSwitch(made, model)
    switch.to(1)
    monkeypatch.setattr(switch, "_graft", lambda part: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        switch.to(3)
    assert switch.stage == (1 if way == "union" else 0)
    switch.to(0)
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize("where", ["a.weight", "norm.running_var"])
def test_other_weights_are_refused_however_little_they_differ(ledger: Ledger, where: str) -> None:
    other = Toy()
    tensor = other.state_dict()[where].view(-1)
    tensor[0] = torch.nextafter(tensor[0], torch.tensor(9.0))
    with pytest.raises(LedgerError, match=r"belongs to other weights: expected fingerprint .*Load the very weights"):
        LedgerSwitch(ledger, other)
    LedgerSwitch(ledger, other, check=False)
    with pytest.raises(LedgerError, match=r"another layout: .*Load the model the stream was trained on"):
        LedgerSwitch(ledger, tiny.build("bert")[0])


def test_changed_buffers_are_those_that_training_moved(model: Toy) -> None:
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert changed_buffers(model, before) == {}
    model.train()
    model.norm(torch.randn(8, 4))
    changed = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert set(changed_buffers(model, before)) == changed


# -- Parents and selections ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", INFERRED)
def test_a_task_is_inferred_with_what_it_stands_on(way: str, tmp_path: Path) -> None:
    """This holds in any order, from memory and from the file, with buffers; θ_pre comes back bit for bit."""
    made = composed(way)
    made.save(tmp_path / "l.safetensors")
    for ledger in (made, Ledger.load(tmp_path / "l.safetensors")):
        assert ledger.composition == made.composition
        assert_same_ledger(ledger, made)
        model = Toy()
        before, switch = state_of(model), LedgerSwitch(ledger, model)
        for task in ("three", "one", "two", "two", "three", "one"):
            switch.to_task(task)
            assert torch.equal(ledger.space.flatten(model), expected_theta(task, way))
            mean = 0.0 if task == "one" else 100.0 * (1 + list(REGIONS).index(task))
            assert model.norm.running_mean is not None and model.norm.running_mean.tolist() == [mean] * 4
            graft = ledger.graft(task)
            written = dict(zip(graft.region.indices.tolist(), graft.values.tolist(), strict=True))
            assert written == INFERRED[way][task]
        switch.to(0)
        assert_same(model.state_dict(), before)


def test_a_ledger_says_what_lies_between_tasks_and_who_stands_on_whom() -> None:
    """Expected values are worked out by hand: in the tree, three stands on one, and two on θ_pre."""
    tree, union, selection = (composed(way) for way in ("tree", "union", "selection"))
    assert [tree.parts(stage) for stage in range(4)] == [[], [0], [1], [0, 2]]
    assert (tree.way(3, 2), tree.way(1, 3), tree.way(3, 1)) == (([2, 0], [1]), ([], [2]), ([2], []))
    assert (union.way(3, 1), union.way(0, 3)) == (([2, 1], []), ([], [0, 1, 2]))
    assert [selection.parts(stage) for stage in range(4)] == [[], [0], [1], [2]]
    stand = {
        name: [(a, b) for a in REGIONS for b in REGIONS if ledger.stands_on(a, b)]
        for name, ledger in (("tree", tree), ("union", union), ("selection", selection))
    }
    every = [("two", "one"), ("three", "one"), ("three", "two")]
    assert stand == {"tree": [("three", "one")], "union": every, "selection": every}
    assert [len(each.owned()) for each in (tree, union, selection)] == [7, 7, 7]  # each entry counts once
    assert tree.of_tasks(["one", "three"]).parts(2) == [0, 1]
    with pytest.raises(LedgerError, match=r"'three'.*holds no task 'one'"):
        tree.of_tasks(["two", "three"])
    assert repr(tree).endswith("owned_entries={'one': 3, 'two': 3, 'three': 3}, parents={'three': 'one'})")


@pytest.mark.parametrize("way", INFERRED)
def test_a_region_in_training_is_given_back_on_commit(way: str) -> None:
    model = Toy()
    ledger = composed(way, ["one"])
    switch, parent = LedgerSwitch(ledger, model), PARENTS[way]["two"]
    switch.to(ledger.stage(parent))
    before = state_of(model)
    region = composed(way).records[1].owned.region
    for _ in range(2):  # an interrupted task is trained again
        with switch.learning(region, parent=parent):
            ledger.space.scatter_(model, region.indices, torch.full((len(region),), 7.0))
        assert_same(model.state_dict(), before)
    with switch.learning(region, parent=parent):
        ledger.space.scatter_(model, region.indices, torch.full((len(region),), 200.0))
        owned = Graft.of(model, ledger.space, region)
        ledger.append(record("two", owned=owned, parent=parent))
    assert_same(model.state_dict(), before)
    switch.to_task("two")
    assert torch.equal(Graft.of(model, ledger.space, region).values, torch.full((len(region),), 200.0))


#: The composition (a key of `PARENTS`), the change of the file, and the reason in the error.
MISCOMPOSED: dict[str, tuple[str, Change, str]] = {
    "an unknown one": ("alone", sealed(note("composition", "sum")), "its composition is 'sum', expected one of parents, sel"),
    "overlaps with a parent": ("alone", sealed(told(1, parent="one")), "'two' takes entries that tasks below it own"),
    "a selection as parents": ("selection", sealed(note("composition", "parents")), "entries that no task below it owns"),
    "shared with nobody": ("alone", moved(1, (5, 6, 20), (0,)), "shares entries that no task below it owns"),
    "parents in a selection": ("selection", sealed(told(1, parent="one")), "no task has a parent"),
    "a parent that comes later": ("alone", sealed(told(1, parent="three")), "'two' stands on 'three', which is not before it"),
    "a parent that is not there": ("alone", sealed(told(0, parent="none")), "'one' stands on 'none', which is not before it"),
}  # fmt: skip


@pytest.mark.parametrize("damage", MISCOMPOSED)
def test_a_damaged_composition_is_refused(tmp_path: Path, damage: str) -> None:
    way, change, reason = MISCOMPOSED[damage]
    path = tmp_path / "l.safetensors"
    composed(way).save(path)
    Ledger.load(path)
    rewrite(path, change)
    with pytest.raises(LedgerError, match=reason):
        Ledger.load(path)


@pytest.mark.parametrize(
    ("way", "rows"),
    [("union", ["3", "2", "2"]), ("selection", ["3", "2", "2"]), ("alone", ["3", "3", "4"]), ("tree", ["3", "3", "3"])],
)
def test_the_view_says_who_stands_on_whom(way: str, rows: list[str], tmp_path: Path) -> None:
    """The view lists owned entries task by task; the total is 7 entries, though tasks that stand alone store 10 values."""
    path = tmp_path / "l.safetensors"
    composed(way).save(path)
    text = render_ledger(Ledger.load(path), path)
    assert ("a selection: tasks share" in text) == (way == "selection") == ("stands on" not in text)
    cells = [re.split(r"\s{2,}", line.strip()) for line in text.partition("readout values")[2].splitlines()[2:6]]
    has_parents = way != "selection"
    owned = {row[0]: row[1 if row[0] == "all" else 2 + has_parents] for row in cells}
    assert owned == dict(zip(REGIONS, rows, strict=True)) | {"all": "7"}
    if has_parents:
        assert {row[0]: row[1] for row in cells[:3]} == {task: on or "θ_pre" for task, on in PARENTS[way].items()}
