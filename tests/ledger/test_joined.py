"""Ledgers of one base model, trained apart, become one: the first decides, and everything else keeps its bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from forgetfree import Ledger
from forgetfree.core.body import fingerprint_of
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region
from forgetfree.errors import LedgerError, TaskError
from forgetfree.ledger import Composition, LedgerSwitch, Record, joined_ledger
from forgetfree.ledger.binding import Binding
from forgetfree.ledger.graft import Graft


def base() -> nn.Module:
    """Twelve weights 0, 1, … 11 and three biases."""
    model = nn.Sequential(nn.Linear(4, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
    return model


def ledger(composition: Composition = "union", **tasks: dict[int, float]) -> Ledger:
    """A ledger whose tasks own these entries with these values, in this order."""
    made = Ledger(ParameterSpace.of(base()), fingerprint_of(base()), composition)
    for name, entries in tasks.items():
        region = Region.of(sorted(entries))
        values = torch.tensor([entries[i] for i in sorted(entries)])
        made.append(Record(name, region, Graft(region, values), 0.5, {"weight": torch.full((2, 3), values[0])}))
    return made


def theta(of: Ledger, task: str) -> list[float]:
    """All entries of the model that answers for a task."""
    model = base()
    LedgerSwitch(of, model).to_task(task)
    return of.space.flatten(model).tolist()


FIRST = {"a": {0: 10.0, 3: 13.0}, "b": {5: 15.0}}
SECOND = {"c": {3: 33.0, 7: 37.0}, "d": {5: 35.0, 8: 38.0}}


def test_the_first_keeps_every_bit_and_the_second_loses_what_both_own(tmp_path: Path) -> None:
    one, two = ledger(**FIRST), ledger(**SECOND)
    joined, told = joined_ledger({"one": one, "two": two})
    joined.save(tmp_path / "joined.safetensors")
    joined = Ledger.load(tmp_path / "joined.safetensors")
    assert joined.tasks == ["a", "b", "c", "d"]
    for task in "ab":
        assert theta(joined, task) == theta(one, task)
    # Of c and d, the entries 3 and 5 are those of a and b; b's entry 5 is not in the model of c, which never had it.
    assert theta(joined, "c") == [0, 1, 2, 13, 4, 5, 6, 37, 8, 9, 10, 11, 0, 1, 2]
    assert theta(joined, "d") == [0, 1, 2, 13, 4, 15, 6, 37, 38, 9, 10, 11, 0, 1, 2]
    assert [(each.task, each.entries, each.overlap, each.changed) for each in told] == [
        *(("a", 2, 0, 0), ("b", 3, 0, 0), ("c", 2, 1, 1), ("d", 4, 2, 2)),
    ]
    owned = [set(record.owned.region.indices.tolist()) for record in joined.records]
    assert owned == [{0, 3}, {5}, {7}, {8}]
    assert [float(record.readout["weight"][0, 0]) for record in joined.records] == [10, 15, 33, 35]


def test_the_order_decides() -> None:
    one, two = ledger(**FIRST), ledger(**SECOND)
    joined, _ = joined_ledger({"two": two, "one": one})
    assert [theta(joined, task) for task in "cd"] == [theta(two, task) for task in "cd"]
    assert theta(joined, "a")[3] == 33 and theta(joined, "b")[5] == 35


def test_nothing_is_lost_without_overlap_and_where_tasks_stand_alone() -> None:
    one, two = ledger(**FIRST), ledger(c={1: 21.0}, d={2: 22.0, 9: 29.0})
    joined, told = joined_ledger({"one": one, "two": two})
    for part, tasks in ((one, "ab"), (two, "cd")):
        assert [theta(joined, task) for task in tasks] == [theta(part, task) for task in tasks]
    assert not any(each.overlap or each.changed for each in told)

    for first, second in (("alone", "alone"), ("auto", "auto"), ("auto", "alone")):
        one, two = ledger(first, **FIRST), ledger(second, **SECOND)
        joined, told = joined_ledger({"one": one, "two": two})
        assert joined.composition == "alone"
        for part, tasks in ((one, "ab"), (two, "cd")):
            assert [theta(joined, task) for task in tasks] == [theta(part, task) for task in tasks]
        assert not any(each.overlap or each.changed for each in told)


def test_equal_values_cost_nothing() -> None:
    _, told = joined_ledger({"one": ledger(a={3: 13.0}), "two": ledger(b={3: 13.0, 4: 1.0})})
    assert (told[1].overlap, told[1].changed) == (1, 0)


def test_a_task_of_both_is_refused_or_becomes_a_version() -> None:
    three = {"one": ledger(a={0: 1.0}), "two": ledger(a={1: 2.0}), "three": ledger(a={2: 3.0}, b={3: 4.0})}
    with pytest.raises(
        TaskError, match=r"Task 'a' of two is in an earlier ledger, too\. Add --as-versions to have it as 'a@2'"
    ):
        joined_ledger(three)
    joined, told = joined_ledger(three, as_versions=True)
    assert joined.tasks == ["a", "a@2", "a@3", "b"]
    assert [(each.task, each.ledger, each.name) for each in told][1:3] == [("a@2", "two", "a"), ("a@3", "three", "a")]
    assert theta(joined, "a@2")[:3] == [0, 2, 2] and theta(joined, "b")[:4] == [0, 1, 3, 4]


def test_what_does_not_fit_is_refused() -> None:
    other = base()
    with torch.no_grad():
        other[0].bias.add_(1)  # type: ignore[index]
    foreign = Ledger(ParameterSpace.of(other), fingerprint_of(other))
    with pytest.raises(LedgerError, match="one and two belong to different base models"):
        joined_ledger({"one": ledger(), "two": foreign})
    with pytest.raises(LedgerError, match="Tasks stand alone in one of"):
        joined_ledger({"one": ledger("alone"), "two": ledger("union")})
    bound = [Ledger(ledger().space, ledger().fingerprint, "union", Binding("{}", max_length=n)) for n in (64, 128)]
    with pytest.raises(LedgerError, match=r"differ: max_length \(expected 64, got 128\)"):
        joined_ledger({"one": bound[0], "two": bound[1]})
    with pytest.raises(LedgerError, match="does not say what its answers depend on"):
        joined_ledger({"one": bound[0], "two": ledger()})
