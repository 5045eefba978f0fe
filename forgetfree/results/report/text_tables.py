"""Tables of texts: a few test rows of each task, with what every strategy wrote."""

from __future__ import annotations

from collections.abc import Iterator

from forgetfree.results.comparison import Comparison
from forgetfree.results.report.page import Table
from forgetfree.results.unit_folder import Units

#: How many rows of a task are shown, and how many characters of a text.
_ROWS, _CHARACTERS = 3, 200


def text_tables(comparison: Comparison, units: Units) -> Iterator[Table]:
    """Yield for each task that is answered by texts a few rows, by the first seed of each strategy at the end of the stream."""
    first = {label: of_seeds[0].texts for label, of_seeds in units.items() if of_seeds}
    for task in comparison.tasks:
        written = {label: texts[task] for label, texts in first.items() if task in texts}
        if not written:
            continue
        one, *others = written.values()
        if any(other.right != one.right for other in others):  # on other test rows
            continue
        count = min(_ROWS, len(one.right))
        places = [i * len(one.right) // count for i in range(count)]
        lines = [("prompt", one.prompts)] if one.prompts else []
        lines += [("right text", [texts[0] for texts in one.right])]
        lines += [(label, each.texts) for label, each in written.items()]
        yield Table(
            f"Texts of {task} at the end, by the first seed",
            ("", *(f"test row {place + 1}" for place in places)),
            tuple((name, *(_cut(texts[place]) for place in places)) for name, texts in lines),
        )


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return (line if len(line) <= _CHARACTERS else f"{line[:_CHARACTERS]}…") or "(empty)"
