"""Errors: their exit codes, the hints for an unknown name, and errors from other processes."""

from __future__ import annotations

import inspect
import pickle

import pytest

from forgetfree import errors
from forgetfree.errors import ForgetfreeError, UnknownNameError, UsageError


def test_wrong_usage_is_told_from_failure_by_the_exit_code() -> None:
    for cls in vars(errors).values():
        if inspect.isclass(cls) and issubclass(cls, ForgetfreeError):
            assert cls.exit_code == (2 if issubclass(cls, UsageError) else 1)


def test_errors_come_back_from_other_processes_as_they_were() -> None:
    of_their_own = {"UnknownNameError": ("task", "sst", ["sst2"]), "ConformanceError": ("mine", ["a fault"])}
    for name, cls in vars(errors).items():
        if inspect.isclass(cls) and issubclass(cls, ForgetfreeError):
            error = cls(*of_their_own.get(name, ("What is wrong.",)))
            back = pickle.loads(pickle.dumps(error))
            assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("qnil", ["sst2", "qnli"], "Unknown task 'qnil'. Did you mean 'qnli'? Known: qnli, sst2. Add it."),
        ("zzz", ["sst2", "qnli"], "Unknown task 'zzz'. Known: qnli, sst2. Add it."),
        ("zzz", [], "Unknown task 'zzz'. Known: none. Add it."),
    ],
)
def test_an_unknown_name_is_told_its_neighbour_if_it_has_one(name: str, known: list[str], expected: str) -> None:
    assert str(UnknownNameError("task", name, known, "Add it.")) == expected
