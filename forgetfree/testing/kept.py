"""What `bytes_kept` must count at least."""

from __future__ import annotations

from typing import Any

import torch

from forgetfree.testing.faults import Faults, listed
from forgetfree.testing.runs import Run

_REMEDY = "Count in kept.bytes_kept() what kept.save() writes and what the next task needs."


def check_bytes(run: Run, said: list[Any], listed_by: dict[str, set[str]], faults: Faults) -> None:
    """Check what `bytes_kept` said before the first task and after each.

    A memory that is full may hold shorter rows later, so it may fall. It may stay as it is, too, where it is large enough
    for all numbers that were trained. Where it is smaller, numbers are kept in fewer bits, and more of them need more bytes.

    Args:
        run: a strategy that has learned the stream, looked at before the first task and after each.
        said: by `bytes_kept` at every look.
        listed_by: by task, the names of the parameters that its updates may move.
        faults: where faults are added.
    """
    whole = all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in said)
    if not whole or not all(said[1:]):
        faults.add(
            "bytes_kept: expected whole numbers, 0 or more, and above 0 once a task is learned, which is answered by what "
            f"is kept, got {', '.join(map(str, said))} before the first task and after each. {_REMEDY}"
        )
        return
    before = 0
    for count in range(1, len(said)):
        numbers, names = _trained_numbers(run, count, listed_by)
        after = f"after {', '.join(run.tasks[:count])}"
        what = f"{numbers} trained numbers other than θ_pre's answer the tasks learned (in {listed(names)})"
        if 8 * said[count] < numbers:
            fault = f"at least {numbers // 8} {after}, where {what}, one bit for each, got {said[count]}"
        elif numbers > before and said[count] <= said[count - 1] and said[count] < 4 * numbers:
            fault = (
                f"more {after} than before, where {what}, up from {before}, and 4 bytes for each are more than is counted, "
                f"got {said[count]} after {said[count - 1]}"
            )
        else:
            before = numbers
            continue
        faults.add(f"bytes_kept: expected {fault}. {_REMEDY}")
        return


def _trained_numbers(run: Run, count: int, listed_by: dict[str, set[str]]) -> tuple[int, list[str]]:
    """How many numbers other than θ_pre's answer the tasks learned after ``count``, in which of the trained tensors.

    Of each entry, every value counts once, in however many tasks' models it is.
    """
    learned = run.learned[count]
    untrained, models = run.looks[0].models, run.looks[count].models
    total, names = 0, []
    for name in dict.fromkeys(name for task in learned for name in sorted(listed_by.get(task, ()))):
        values = [model[name] for task in learned for model in (untrained[task], models[task]) if name in model]
        if len({tensor.shape for tensor in values}) == 1:
            # Of k values, k - 1 are not θ_pre's.
            number = int(torch.stack(values).sort(0).values.diff(dim=0).count_nonzero())
            total += number
            names += [name] if number else []
    return total, names
