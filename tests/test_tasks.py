"""The registered tasks and streams, each as a whole."""

from __future__ import annotations

import re

import pytest

from forgetfree import registry
from forgetfree.tasks import DEFAULT_CAUSAL_TEMPLATE, DEFAULT_TEMPLATE, SPLITS, Kind, TaskDefinition

TASKS = registry.tasks()
EVERY_TASK = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
SLOTS: dict[Kind, list[str]] = {"single": ["text"], "pair": ["text_a", "text_b"]}


def slots(template: str) -> list[str]:
    return sorted(re.findall(r"\{(\w+)(?::(?:bare|lower))?\}", template))


def test_the_papers_thirteen_tasks_are_there() -> None:
    """§3 of Panigrahi et al., 2023."""
    paper = "sst2 cr mr mpqa subj trec ag_news qnli rte mnli snli mrpc qqp"
    assert set(paper.split()) <= set(TASKS)


def test_the_papers_metrics() -> None:
    assert {name for name, task in TASKS.items() if task.metric == "f1"} == {"mrpc", "qqp"}


@EVERY_TASK
def test_a_task_stands_under_its_name(task: TaskDefinition) -> None:
    assert TASKS[task.name] is task
    assert re.fullmatch(r"[a-z0-9_]+", task.name)  # a folder, and an item of a comma-separated list


@EVERY_TASK
def test_labels_and_label_words_are_distinct_and_as_many(task: TaskDefinition) -> None:
    assert len(set(task.labels)) == len(task.labels) >= 2
    assert len(set(task.label_words)) == len(task.label_words) == len(task.labels)


@EVERY_TASK
def test_the_prompt_holds_every_text_and_one_mask(task: TaskDefinition) -> None:
    assert slots(task.template) == sorted(["mask", *SLOTS[task.kind]])
    assert list(task.text_columns) == SLOTS[task.kind]


@EVERY_TASK
def test_the_causal_prompt_ends_where_the_label_word_follows(task: TaskDefinition) -> None:
    assert slots(task.causal_template) == SLOTS[task.kind]
    assert not task.causal_template.endswith(("}", " "))


@EVERY_TASK
def test_f1_needs_two_labels(task: TaskDefinition) -> None:
    assert task.metric == "accuracy" or len(task.labels) == 2


@EVERY_TASK
def test_the_hub_gives_a_column_for_every_text_and_what_cannot_be_held_out(task: TaskDefinition) -> None:
    if task.hub is None:
        pytest.skip(f"{task.name} is not on the hub")
    assert len(task.hub.columns) == len(task.text_columns)
    assert {"train", "test"} <= set(task.hub.splits) <= set(SPLITS)
    assert len(set(task.hub.splits.values())) == len(task.hub.splits)
    if task.hub.labels:
        assert sorted(task.hub.labels.values()) == list(range(len(task.labels)))


@pytest.mark.parametrize("kind", ["single", "pair"])
def test_the_default_prompts_are_prompts(kind: Kind) -> None:
    assert slots(DEFAULT_TEMPLATE[kind]) == sorted(["mask", *SLOTS[kind]])
    assert slots(DEFAULT_CAUSAL_TEMPLATE[kind]) == SLOTS[kind]


@pytest.mark.parametrize("stream", registry.streams())
def test_a_stream_names_known_tasks_once(stream: str) -> None:
    names = registry.streams()[stream]
    assert set(names) <= set(TASKS)
    assert len(set(names)) == len(names) > 0


def test_no_stream_has_the_name_of_a_task() -> None:
    assert not set(registry.streams()) & set(TASKS)


def test_the_papers_stream() -> None:
    """Table 4."""
    assert registry.streams()["qnli-agnews-sst2"] == ("qnli", "ag_news", "sst2")
