"""The digits benchmark: its rows, its streams, and a small run of the script."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.paper.rows import rows_of_csv
from benchmarks.vision import digits


def test_no_row_is_in_two_parts_and_each_digit_is_in_all() -> None:
    parts = digits.rows()
    assert sum(len(y) for _, y in parts.values()) == 1797
    assert [round(len(parts[part][1]) / 1797, 1) for part in ("train", "validation", "test")] == [0.6, 0.2, 0.2]
    seen = [{x.numpy().tobytes() for x in parts[part][0]} for part in parts]
    assert [len(one & other) for one, other in ((seen[0], seen[1]), (seen[0], seen[2]), (seen[1], seen[2]))] == [
        0,
        0,
        0,
    ]
    assert all(set(y.tolist()) == set(range(10)) for _, y in parts.values())


@pytest.mark.sampled("split-class-class")
@pytest.mark.parametrize(("name", "scenario"), list(zip(digits.STREAMS, ("domain", "task", "class"), strict=True)))
def test_the_streams_are_of_the_three_scenarios(name: str, scenario: str) -> None:
    stream = digits.make_stream(name, 0)
    assert (stream.scenario, len(stream.tasks)) == (scenario, 5)
    for task in stream.tasks:
        assert len(task.validation) < len(task.train)
        assert len({task.train.digest, task.validation.digest, task.test.digest}) == 3


def test_permuted_tasks_are_the_same_images_in_another_order_of_pixels() -> None:
    first, *others = digits.make_stream("permuted", 0).tasks
    plain = first.test.batch(range(20))[0].flatten(1)
    for task in others:
        other = task.test.batch(range(20))[0].flatten(1)
        assert not torch.equal(plain, other)
        assert torch.equal(plain.sort(1).values, other.sort(1).values)


def test_tuning_reads_validation_rows_only() -> None:
    tasks, tuned = digits.make_stream("split-class", 0).tasks, digits.make_stream("split-class", 0, "validation").tasks
    for task, other in zip(tasks, tuned, strict=True):
        assert other.test.digest == task.validation.digest != task.test.digest


@pytest.mark.sampled(share=0.15)
def test_the_script_writes_a_table_and_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "digits.csv"
    chosen = ["--strategies", "continual-ft", "grafting-continual", "--streams", "split-task", "split-class"]
    digits.main(["--seeds", "0", "1", "--steps", "3", *chosen, "--out", str(out)])
    header, found = rows_of_csv(out.read_text(encoding="utf-8"))
    assert header == {"steps": 3, "common": digits.COMMON}
    assert [row["seed"] for row in found] == [0, 1] * 6
    lines = list(dict.fromkeys((row["stream"], row["strategy"]) for row in found))
    assert lines == [
        ("split-task", "continual-ft"),
        ("split-task", "grafting-continual"),
        ("split-class", "continual-ft"),
        ("split-class", "grafting-continual"),
        ("split-class", "grafting-continual, router"),
        ("split-class", "grafting-continual, lda"),
    ]
    assert [row["forgetting"] for row in found[2:4]] == [0.0, 0.0]
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert table[0] == (
        "| strategy | split-task: accuracy | split-task: forgetting | split-class: accuracy | split-class: forgetting |"
    )
    assert len(table) == 7
    assert table[6] == "| a constant answer | 50.5 | – | 50.5 | – |"
    assert table[4].startswith("| grafting-continual, router | – | – |")
    assert table[5].startswith("| grafting-continual, lda | – | – |")
