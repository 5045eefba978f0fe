"""The tree of errors."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from forgetfree import errors
from forgetfree.errors import ForgetfreeError, UnknownNameError, UsageError, names_arguments


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


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ("Give an existing one to --data, or a file.", "Give an existing one to data=, or a file."),
        ("--out 'runs/x' is not empty. Add --resume.", "out='runs/x' is not empty. Add resume=True."),
        ("--threads 2 and --jobs 3. Leave --seed out.", "threads=2 and jobs=3. Leave seeds= out."),
        ("fewer than --shots 4. Set --set dropout=true.", "fewer than shots=4. Set dropout=True."),
        ("Use --readout causal, or --model NAME.", "Use readout='causal', or model=NAME."),
        ("See 'forgetfree run --help'; add --strategy ewc.", "See 'forgetfree run --help'; add strategies='ewc'."),
    ],
)
@pytest.mark.parametrize("kind", [errors.SeveralFaultsError, errors.BadDataError])
def test_callers_from_python_are_told_of_arguments(kind: type[Any], flags: str, arguments: str) -> None:
    """Commands in a message stay as they are typed, and a function's parameters say which of them is a plural."""

    @names_arguments
    def call(seeds: int = 0, strategies: str = "", shots: int = 0) -> None:
        raise kind([flags, flags])

    with pytest.raises(kind) as refused:
        call()
    assert refused.value.faults == (arguments, arguments) and str(refused.value).endswith(arguments)
