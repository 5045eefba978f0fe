"""Where a command writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from forgetfree.errors import UsageError
from forgetfree.output import LOCK, make_directory, refuse_content


def test_a_directory_is_made_and_what_it_holds_is_told(tmp_path: Path) -> None:
    make_directory(out := tmp_path / "a" / "b")
    (out / LOCK).touch()
    refuse_content(out, "Give another.")
    (out / "file").touch()
    with pytest.raises(UsageError, match=r"is not empty: it holds file\. Give another\."):
        refuse_content(out, "Give another.")
    with pytest.raises(UsageError, match="cannot be written"):
        make_directory(out / "file")
