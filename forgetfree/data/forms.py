"""Forms of tasks that cannot be learned here, recognised by a cell, so that one message says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: What is told and refused.
NO_TASK = (
    "several labels a row, a number to predict, a chat, answers or summaries to write, or parts of a text as in SQuAD"
)
#: Said wherever data have another form.
TASKS = (
    "A task here has one label a row, for a text or a pair of texts, or a tag for each word of a sentence; see "
    "'forgetfree list kinds'. "
)
_REMEDY = "Make such rows, or name other columns."
#: Keys of what stands in columns of other forms.
_KEYS = {
    "a chat, with its messages": ({"role", "content"}, {"from", "value"}),
    "answers that are parts of a text, as in SQuAD": ({"answer_start"}, {"start", "text"}),
    "answers": ({"answer"}, {"answers"}, {"text"}, {"aliases"}),
}


def form_of(value: Any) -> str:
    """Return what a cell holds that no task reads; empty if it is not recognised.

    >>> form_of([{"role": "user", "content": "Hello"}])
    'a chat, with its messages'
    """
    value = plain(value)
    if isinstance(value, Mapping):
        return next((form for form, known in _KEYS.items() if any(keys <= value.keys() for keys in known)), "objects")
    if not isinstance(value, list | tuple) or not value:
        return ""
    inner = [plain(each) for each in value]
    if all(isinstance(each, Mapping) for each in inner):
        return form_of(inner[0])
    return "several labels, or values, a row" if all(isinstance(each, str | int | float) for each in inner) else ""


def refusal_of(form: str) -> str:
    """Return the sentences that refuse a form; nothing where there is none."""
    return f"The column seems to hold {form}, which no task here reads. {TASKS}{_REMEDY}" if form else ""


def other_form(columns: Mapping[str, Sequence[Any]]) -> str:
    """Return the sentences that refuse the first column of objects; nothing where all columns hold plain values or lists."""
    for name, cells in columns.items():
        value = plain(next((cell for cell in cells if cell is not None), None))
        if isinstance(value, Mapping) or (isinstance(value, list) and value and isinstance(value[0], Mapping)):
            return f"Column {name!r} seems to hold {form_of(value)}, which no task here reads. {TASKS}{_REMEDY}"
    return ""


def plain(value: Any) -> Any:
    """Return a number of numpy or torch as one of Python, and an array of one dimension as a list; else the value."""
    is_array = type(value).__module__ in ("numpy", "torch") and getattr(value, "ndim", 2) < 2
    return value.tolist() if is_array else value
