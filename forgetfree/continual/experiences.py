"""What Avalanche's experiences say of themselves: where they stand, what they were cut from, which task label they have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from forgetfree.errors import UsageError

if TYPE_CHECKING:
    from forgetfree.learning.encoded_task import EncodedTask


def check_experiences(experiences: Any) -> None:
    """Raise ``UsageError`` unless an experience, or several, are given."""
    if not isinstance(experiences, Iterable):
        experiences = (experiences,)
    for each in experiences if isinstance(experiences, Sequence) else ():  # an iterator can be read once
        if not hasattr(each, "logging"):
            raise UsageError(
                f"Expected an experience or several, got {type(each).__name__}. Give those of the stream's benchmark, such as "
                "stream.benchmark.train_stream[0]."
            )


def part_of(experience: Any) -> int | None:
    """Return the number of a sub-experience in its online stream (`avalanche.benchmarks.split_online_stream`).

    ``None`` for an experience that is whole.
    """
    shown = experience.logging()  # in training, an experience hides where it is from
    return place_of(shown) if hasattr(shown, "origin_experience") else None


def whole(experience: Any) -> Any:
    """Return the experience, or the one that it was cut from.

    Raises:
        UsageError: it was cut from several.
    """
    shown = experience.logging()
    if not hasattr(shown, "origin_experience"):
        return shown
    if shown.origin_experience is None:
        raise UsageError(
            f"{named(shown)} has rows of several experiences, so it is of no task. Train on experiences of one task each: "
            "those of stream.benchmark.train_stream, or parts of them by split_online_stream."
        )
    return whole(shown.origin_experience)


def place_of(experience: Any) -> int | None:
    """Return the place of an experience in its stream."""
    number: int | None = experience._current_experience  # the public property fails where there is none
    return number


def named(experience: Any) -> str:
    """Return the name of an experience for a message."""
    return f"Experience {place_of(experience)} of the stream {getattr(experience._origin_stream, 'name', None)!r}"


def check_streams(benchmark: Any) -> None:
    """Raise unless there are streams to train and to test on, of sizes that go together."""
    names = sorted(benchmark.streams)
    if missing := {"train", "test"} - set(names):
        raise UsageError(
            f"The benchmark has the streams {', '.join(names)}, expected train and test, got no {' and no '.join(missing)}. "
            "Give the benchmark itself; of an online scenario, the one it was made from: parts of its experiences can be "
            "trained on."
        )
    train, test = (len(list(benchmark.streams[split])) for split in ("train", "test"))
    if test not in (1, train):
        raise UsageError(
            f"The benchmark has {train} training and {test} test experiences. Give a benchmark with one test experience for "
            "each training experience, or with one for all."
        )
    validation = len(list(getattr(benchmark, "valid_stream", range(train))))
    if validation != train:
        raise UsageError(
            f"The benchmark has {train} training and {validation} validation experiences. Give a benchmark with one "
            "validation experience for each training experience, or without a valid_stream."
        )


def task_label(experience: Any) -> int:
    """Return the task label of all rows of an experience; 0 where there is none."""
    # Not every experience that has them says so: after benchmark_with_validation_stream only the data set does.
    labels = set(getattr(experience, "task_labels", getattr(experience.dataset, "targets_task_labels", [0])))
    if len(labels) > 1:
        raise UsageError(
            f"Experience {place_of(experience)} has rows of task labels {sorted(map(int, labels))}. Give each "
            "experience one task label, or none."
        )
    return int(labels.pop())


def check_whole(strategy: str, task: EncodedTask, experience: Any) -> None:
    """Raise ``UsageError`` for a part of a task, where the strategy of this name learns whole tasks."""
    if (part := part_of(experience)) is not None:
        raise UsageError(
            f"{strategy} learns a task at once, from all of its rows, got part {part} of {task.name} "
            f"({len(experience.dataset)} of {len(task.train)} rows). Train on the experience that it was cut from, or by a "
            "strategy that learns in parts: continual-ft, replay, der, cumulative."
        )
