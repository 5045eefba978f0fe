"""A tensor file is read whole or refused with a reason."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from damage import Change, accepted_flips, note, put, rewrite, sealed, told
from safetensors.torch import load_file, save

from forgetfree.errors import RunError
from forgetfree.tensor_file import StoredTasks, TaskFile, TaskTensors, TensorFile, checksum

OURS, THEIRS = (TensorFile(RunError, "Make it again.", name) for name in ("ours", "theirs"))


def test_equal_tensors_and_metadata_are_equal_bytes_and_come_back(tmp_path: Path) -> None:
    """The tensors are views of one storage, a non-contiguous matrix, one without entries, and of several dtypes."""
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {"b": whole.T, "a": whole[0], "a/ü": torch.tensor([True]), "c": whole.bfloat16(), "none": torch.empty(0)}
    metadata = {f"key {i}": f"„{i}“" for i in range(8)}
    assert len({save({"a": whole[0]}, metadata) for _ in range(20)}) > 1  # else `safetensors` alone would do
    (written,) = {OURS.content(tensors, metadata) for _ in range(20)}
    path = tmp_path / "tensors.safetensors"
    OURS.write(path, tensors, metadata)
    assert path.read_bytes() == written and os.listdir(tmp_path) == [path.name]
    header, found = OURS.read(path)
    assert header.items() > metadata.items() and found.keys() == tensors.keys()
    for each in (found, load_file(path)):
        assert all(torch.equal(each[name], tensor) for name, tensor in tensors.items())


def test_a_file_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path, tensors = tmp_path / "tensors.safetensors", {"a": torch.arange(3.0)}
    OURS.write(path, tensors)
    header, found = OURS.read(path)
    assert header["format"] == "ours" and torch.equal(found["a"], tensors["a"])
    with pytest.raises(
        RunError, match=r"is no file of a run: expected the format 'theirs', got 'ours'\. Make it again\."
    ):
        THEIRS.read(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"is damaged: its contents do not match its checksum\. Make it again\."):
        OURS.read(path)
    path.write_bytes(content[:-1])
    with pytest.raises(RunError, match=r"cannot be read as a file of a run: .*\. Make it again\."):
        OURS.read(path)
    with pytest.raises(RunError, match="as a file of a run: No such file"):
        OURS.read(tmp_path / "none")


# -- Files by task ---------------------------------------------------------------------------------------

BOX = TaskFile(RunError, "Make it again.", "box", "box", keys=("about",), groups=("value", "readout", "buffer"))
TASKS = [
    TaskTensors("", {"value": torch.arange(3.0), "buffer/count": torch.tensor([math.inf])}, {"of": "all"}),
    TaskTensors("qnli", {"value": torch.ones(2), "readout/a.weight": torch.zeros(2, 2), "readout/b": torch.zeros(1)}),
    TaskTensors("sst2", {}),
]


@pytest.fixture
def box(tmp_path: Path) -> Path:
    BOX.write_tasks(tmp_path / "x.safetensors", TASKS, {"about": "toys"})
    return tmp_path / "x.safetensors"


def all_of(stored: StoredTasks) -> list[TaskTensors]:
    return list(stored)


def test_tasks_come_back_as_they_were(box: Path) -> None:
    for one, other in zip(BOX.load(box, all_of), TASKS, strict=True):
        assert (one.task, one.fields, one.checksum) == (other.task, other.fields, other.checksum)
        assert one.size_in_bytes == other.size_in_bytes
    assert BOX.load(box, lambda stored: (stored.tasks, stored.metadata["about"])) == (["", "qnli", "sst2"], "toys")
    readout = BOX.load(box, lambda stored: stored.read(1)).group("readout")
    assert readout.keys() == {"a.weight", "b"}
    content = box.read_bytes()
    BOX.write_tasks(box, TASKS, {"about": "toys"})
    assert box.read_bytes() == content


def test_a_task_is_read_without_the_others(box: Path) -> None:
    rewrite(box, put("0/value", torch.zeros(3)))
    assert BOX.load(box, lambda stored: stored.read(1)).task == "qnli"
    with pytest.raises(RunError, match="is not a sound box: its tensors do not match their checksum"):
        BOX.load(box, lambda stored: stored.read(0))


def rows(text: str) -> Change:
    return note("tasks", text)


TWICE = json.dumps([{"task": "a", "checksum": "", "fields": {}}] * 2)
DAMAGE: dict[str, tuple[Change, str]] = {
    "another value": (put("1/value", torch.zeros(2)), "the tensors of task 'qnli' do not match their checksum"),
    "a tensor too many": (put("2/value", torch.ones(2)), "the tensors of task 'sst2' do not match their checksum"),
    "a tensor of no task": (put("3/value", torch.ones(2)), "it holds the unexpected tensor '3/value'"),
    "other fields": (told(0, of="none"), "its metadata do not match their checksum"),
    "tasks that are none": (
        lambda tensors, header: header.update(tasks='["a"]', checksum=checksum({}, header | {"tasks": '["a"]'})),
        "its tasks cannot be read",
    ),
    "NaN": (sealed(put("1/value", torch.tensor([1.0, math.nan]))), "of task 'qnli' hold NaN or infinity, in 'value'"),
    "nothing noted": (
        lambda tensors, header: [header.pop(name) for name in set(header) - {"format"}],
        "its metadata lacks about, checksum, schema, tasks",
    ),
    "another schema": (sealed(note("schema", "6")), "it has schema '6', and this version reads schema 5"),
    "a task twice": (
        lambda tensors, header: (tensors.clear(), sealed(rows(TWICE))(tensors, header)), "two records of task 'a'"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_with_the_reason(box: Path, damage: str) -> None:
    change, reason = DAMAGE[damage]
    rewrite(box, change)
    with pytest.raises(RunError, match=reason) as caught:
        BOX.load(box, all_of)
    assert str(caught.value).startswith(f"{box} is not a sound box: ")


def test_a_flipped_bit_anywhere_is_noticed_and_so_is_a_cut(box: Path) -> None:
    sound = box.read_bytes()
    assert accepted_flips(box, lambda path: BOX.load(path, all_of), RunError, range(len(sound))) == []
    for content in (*(sound[:length] for length in range(0, len(sound), 97)), sound[:-1], sound + b"\0"):
        box.write_bytes(content)
        with pytest.raises(RunError, match=r"cannot be read as a box: .*\. Make it again\."):
            BOX.load(box, all_of)


def test_a_file_that_a_user_names_is_called_what_they_call_it(box: Path) -> None:
    with pytest.raises(RunError, match="none cannot be read as a box: No such file"):
        BOX.load(box.with_name("none"), all_of)
    THEIRS.write(box, {"a": torch.zeros(2)})
    with pytest.raises(RunError, match="is no box: expected the format 'box', got 'theirs'"):
        BOX.load(box, all_of)
