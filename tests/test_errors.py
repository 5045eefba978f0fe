"""The tree of errors."""

from __future__ import annotations

import inspect
import re

import pytest

from forgetfree import errors
from forgetfree.errors import ForgetfreeError, UnknownNameError, UsageError


def test_the_tree_at_the_top_of_the_file_is_the_tree() -> None:
    drawn, parents = [], {-1: "Exception"}
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"([ │├└─]*)(\w+Error)\b", line):
            depth = len(match[1]) // 4
            parents[depth] = match[2]
            drawn.append((match[2], parents[depth - 1] if depth > 1 else "Exception"))
    real = [
        (name, cls.__base__.__name__)
        for name, cls in vars(errors).items()
        if inspect.isclass(cls) and issubclass(cls, ForgetfreeError)
    ]
    assert sorted(drawn) == sorted(real)


def test_wrong_usage_is_told_from_failure_by_the_exit_code() -> None:
    for cls in vars(errors).values():
        if inspect.isclass(cls) and issubclass(cls, ForgetfreeError):
            assert cls.exit_code == (2 if issubclass(cls, UsageError) else 1)


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("qnil", ["sst2", "qnli"], "Unknown task 'qnil'. Did you mean 'qnli'? Known: qnli, sst2."),
        ("zzz", ["sst2", "qnli"], "Unknown task 'zzz'. Known: qnli, sst2."),
        ("zzz", [], "Unknown task 'zzz'. Known: none."),
    ],
)
def test_an_unknown_name_is_told_its_neighbour_if_it_has_one(name: str, known: list[str], expected: str) -> None:
    assert str(UnknownNameError("task", name, known)) == expected


def test_an_unknown_name_may_bring_a_hint() -> None:
    assert str(UnknownNameError("task", "a", ["z"], "Add it.")) == "Unknown task 'a'. Known: z. Add it."
