"""Edited model directories, and the message of the error when one is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forgetfree.errors import ModelError

#: Words that no message may contain.
_INTERNALS = ("Traceback", "Error(", "KeyError", "<class", "ignore_mismatched_sizes")


def message(load: Callable[[], Any], kind: type[Exception] = ModelError) -> str:
    """Return the error message of loading, which must be one paragraph."""
    with pytest.raises(kind) as caught:
        load()
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".")
    assert not [word for word in _INTERNALS if word in text], text
    return text


def change_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
