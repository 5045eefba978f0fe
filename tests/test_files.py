"""A file has either its old or its new content, never a part."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from forgetfree import cli
from forgetfree.errors import RunError, UsageError
from forgetfree.files import (
    is_unfinished,
    locked,
    make_directory,
    new_directory,
    remove_unfinished,
    write_atomically,
)
from forgetfree.jobs.run_directory import LOCK, exclusive, refuse_used


@pytest.mark.parametrize(("step", "error"), [("fsync", KeyboardInterrupt), ("replace", OSError), ("chmod", OSError)])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: type[BaseException]
) -> None:
    def fail(*_: object) -> None:
        raise error

    path = tmp_path / "file"
    write_atomically(path, "old")
    monkeypatch.setattr(os, step, fail)
    with pytest.raises(error):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_the_new_name_appears_only_after_the_content_is_synced_and_is_synced_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("sync"), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("rename"), replace(a, b)))
    write_atomically(tmp_path / "file", "new")
    assert done == ["sync", "rename", "sync"]


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    """Files of other programs stay; `new_directory` removes only unfinished directories of the same name."""
    kept = ["a.unfinished", ".other.settings", ".vim.abcdefgh", ".lock", ".file.TOOLONG99.unfinished"]
    for name in (*kept, ".new.abcdefgh.unfinished"):
        (tmp_path / name).touch()
    os.symlink(tmp_path / "nowhere", tmp_path / ".link.abcdefgh.unfinished")
    (tmp_path / ".older.abcdefgh.unfinished").mkdir()
    (tmp_path / ".older.abcdefgh.unfinished" / "model.safetensors").touch()
    with new_directory(tmp_path / "older") as inside:
        assert is_unfinished(inside) and not (tmp_path / ".older.abcdefgh.unfinished").exists()
    assert (tmp_path / ".new.abcdefgh.unfinished").exists()
    remove_unfinished(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, ".link.abcdefgh.unfinished", "older"])
    remove_unfinished(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_told_with_what_to_do(error: Exception) -> None:
    told = cli._message_of(error)
    assert "fault of forgetfree" not in told and "No space left" in told and "TMPDIR" in told


@pytest.mark.parametrize("wait", [True, False])
def test_a_place_without_locks_is_named_and_nothing_is_left_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    code = errno.ENOLCK

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(RunError) as caught, locked(tmp_path / ".lock", wait=wait):
        pass
    told = str(caught.value)
    assert str(tmp_path) in told and os.strerror(code) in told and "local disk" in told
    assert os.listdir(tmp_path) == []


def test_a_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    umask = 0o022
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "file", "new")
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def test_a_new_directory_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    with new_directory(tmp_path / "deep" / "new") as inside:
        (inside / "file").write_text("text")
        assert not (tmp_path / "deep" / "new").exists()
    assert (tmp_path / "deep" / "new" / "file").read_text() == "text"
    assert (tmp_path / "deep" / "new").stat().st_mode == (tmp_path / "deep").stat().st_mode
    with pytest.raises(ZeroDivisionError), new_directory(tmp_path / "other") as inside:
        (inside / "file").write_text("text")
        raise ZeroDivisionError
    with pytest.raises(OSError), new_directory(tmp_path / "deep") as inside:  # not empty
        (inside / "file").write_text("text")
    assert sorted(os.listdir(tmp_path)) == ["deep"]


def test_of_a_directory_nothing_is_left_that_was_made_for_nothing(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for out in (own, own / "a" / "b"):
        with pytest.raises(ZeroDivisionError), exclusive(out):
            raise ZeroDivisionError
        assert own.is_dir() and not any(own.iterdir())
    with exclusive(own / "a" / "b"):
        (own / "a" / "file").touch()
    assert os.listdir(own / "a") == ["file"]


def test_a_directory_is_made_and_what_it_holds_is_told(tmp_path: Path) -> None:
    make_directory(out := tmp_path / "a" / "b")
    (out / LOCK).touch()
    refuse_used(out, "Give another.")
    (out / "file").touch()
    with pytest.raises(UsageError, match=r"is not empty: it contains file\. Give another\."):
        refuse_used(out, "Give another.")
    with pytest.raises(UsageError, match="cannot be written"):
        make_directory(out / "file")
