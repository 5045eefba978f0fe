"""Files are the old ones or the new ones, never a part."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from forgetfree import cli, files
from forgetfree.errors import RunError
from forgetfree.files import (
    is_leftover,
    locked,
    new_directory,
    remove_unfinished,
    sweep,
    write_atomically,
    write_json,
)


def test_bytes_and_texts_are_written_with_their_folders(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "b" / "file", b"\x00\xff")
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"\x00\xff"
    write_atomically(tmp_path / "a" / "b" / "file", "Grüße\n")
    assert (tmp_path / "a" / "b" / "file").read_bytes() == "Grüße\n".encode()
    assert os.listdir(tmp_path / "a" / "b") == ["file"]


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    path = tmp_path / "file"
    write_atomically(path, "old")
    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", "new")
    assert os.listdir(tmp_path) == []


def test_the_new_name_appears_only_after_the_content_is_synced_and_is_synced_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("sync"), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("rename"), replace(a, b)))
    write_atomically(tmp_path / "file", "new")
    assert done == ["sync", "rename", "sync"]


def test_the_longest_names_there_are_can_be_written(tmp_path: Path) -> None:
    """Of 255 bytes: by letters of one byte, and of four."""
    for name in ("a" * 255, "😀" * 63 + "abc"):
        write_atomically(tmp_path / name, "new")
        with new_directory(tmp_path / "in" / name):
            pass
        assert os.listdir(tmp_path / "in") == [name] and (tmp_path / name).read_text() == "new"
        (tmp_path / "in" / name).rmdir()


def test_what_another_process_is_about_to_remove_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, tried = files._lock, list[int]()

    def taken_once(handle: int) -> None:
        tried.append(handle)
        if len(tried) == 1:
            raise BlockingIOError(errno.EAGAIN, "another process has it")
        lock(handle)

    monkeypatch.setattr(files, "_lock", taken_once)
    write_atomically(tmp_path / "file", "new")
    assert len(tried) == 2 and (tmp_path / "file").read_text() == "new"


def test_what_killed_writers_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    kept = ["file", ".lock", ".hidden", ".gitignore", ".a.b.c", ".config.json.TOOLONG99"]
    for name in (*kept, ".config.json.a1b2_3d4", ".other.safetensors.abcdefgh"):
        (tmp_path / name).touch()
    (tmp_path / ".learned-3.abcd_fgh").mkdir()
    (tmp_path / ".learned-3.abcd_fgh" / "ledger.safetensors").touch()
    sweep(tmp_path, of="config.json")
    assert not (tmp_path / ".config.json.a1b2_3d4").exists() and (tmp_path / ".other.safetensors.abcdefgh").exists()
    sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
    sweep(tmp_path / "nowhere")


def test_a_new_directory_removes_what_a_killed_writer_left_there_and_nothing_else(tmp_path: Path) -> None:
    kept = [".other.settings", ".vim.abcdefgh", "a.unfinished", "new"]
    for name in (*kept[:-1], ".new.abcdefgh.unfinished", ".older.abcdefgh.unfinished"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    with new_directory(tmp_path / "new") as first:
        assert is_leftover(first.name)
        with new_directory(tmp_path / "second") as second:
            (first / "file").touch()
            (second / "file").touch()
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "second"])
    assert os.listdir(tmp_path / "new") == ["file"]


def test_files_that_killed_writers_left_are_removed_and_those_being_written_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / ".new.safetensors.abcdefgh.unfinished"
    left.touch()
    os.symlink(tmp_path / "nowhere", tmp_path / ".link.abcdefgh.unfinished")
    (tmp_path / ".new.safetensors.abcdefgh").touch()  # perhaps an editor's
    replace = os.replace

    def meanwhile(temporary: Path, path: Path) -> None:
        assert is_leftover(temporary.name)
        remove_unfinished(tmp_path)
        replace(temporary, path)

    monkeypatch.setattr(os, "replace", meanwhile)
    write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == [".link.abcdefgh.unfinished", ".new.safetensors.abcdefgh", "file"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_told_with_the_place_and_leaves_nothing(tmp_path: Path, error: Exception) -> None:
    def fill(directory: Path) -> None:
        (directory / "begun").write_bytes(bytes(1234))
        raise error

    with pytest.raises(RunError) as caught, new_directory(tmp_path / "new") as directory:
        fill(directory)
    told = str(caught.value)
    assert (
        str(tmp_path / "new") in told and "1,234 bytes" in told and "No space left" in told and "another disk" in told
    )
    assert os.listdir(tmp_path) == []
    told = cli._message_of(error)
    assert "fault of forgetfree" not in told and "No space left" in told and "TMPDIR" in told


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES])
@pytest.mark.parametrize("wait", [True, False])
def test_a_place_without_locks_is_named_and_nothing_is_left_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, wait: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(RunError) as caught, locked(tmp_path / ".lock", wait=wait):
        pass
    told = str(caught.value)
    assert (
        str(tmp_path) in told and os.strerror(code) in told and "local disk" in told and "another process" not in told
    )
    assert os.listdir(tmp_path) == []
    with new_directory(tmp_path / "new"):  # which needs none
        pass
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_file_has_the_permissions_of_any_new_file(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "file", "new")
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_json_is_readable_and_ends_in_a_newline(tmp_path: Path) -> None:
    write_json(tmp_path / "file.json", {"a": [1, 0.1], "b": "Grüße", "c": None})
    text = (tmp_path / "file.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"a": [1, 0.1], "b": "Grüße", "c": None}
    assert "Grüße" in text
    assert text.endswith("}\n")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}])
def test_what_json_cannot_hold_is_refused_and_the_old_file_stays(tmp_path: Path, value: object) -> None:
    path = tmp_path / "file.json"
    write_json(path, 1)
    with pytest.raises((ValueError, TypeError)):
        write_json(path, {"a": value})
    assert json.loads(path.read_text()) == 1


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
