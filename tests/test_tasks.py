"""The registered tasks and streams."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import real_data

from forgetfree import registry
from forgetfree.data.sources import load_tasks
from forgetfree.tasks import SPLITS, HubSource, TaskDefinition

TASKS = registry.tasks()
EVERY_TASK = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
TEXT_TASKS = {name: task for name, task in TASKS.items() if task.kind in ("single", "pair")}
EVERY_TEXT_TASK = pytest.mark.parametrize("task", TEXT_TASKS.values(), ids=TEXT_TASKS)
SLOTS: dict[str, list[str]] = {"single": ["text"], "pair": ["text_a", "text_b"]}


def slots(template: str) -> list[str]:
    return sorted(re.findall(r"\{(\w+)(?::(?:bare|lower))?\}", template))


def test_the_papers_thirteen_tasks_are_there() -> None:
    """The tasks are in §3 of Panigrahi et al., 2023."""
    paper = "sst2 cr mr mpqa subj trec ag_news qnli rte mnli snli mrpc qqp"
    assert set(paper.split()) <= set(TASKS)


@EVERY_TASK
def test_a_task_stands_under_its_name_and_passes_the_check_that_plugins_meet(task: TaskDefinition) -> None:
    assert TASKS[task.name] is task
    assert re.fullmatch(r"[a-z0-9_]+", task.name)  # it is a folder name, and an item of a comma-separated list
    assert registry.faults_of(task) == []


@EVERY_TEXT_TASK
def test_the_causal_prompt_ends_where_the_label_word_follows(task: TaskDefinition) -> None:
    assert slots(task.causal_template) == SLOTS[task.kind]
    assert not task.causal_template.endswith(("}", " "))


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.hub])
def test_the_hub_gives_a_column_for_every_text_and_what_cannot_be_split_off(name: str) -> None:
    task = TASKS[name]
    assert task.hub is not None
    assert len(task.hub.columns) == len(task.text_columns)
    assert {"train", "test"} <= set(task.hub.splits) <= set(SPLITS)
    assert len(set(task.hub.splits.values())) == len(task.hub.splits)
    if task.hub.labels:
        assert sorted(task.hub.labels.values()) == list(range(len(task.labels)))


@pytest.mark.parametrize("stream", registry.streams())
def test_a_stream_names_known_tasks_once(stream: str) -> None:
    names = registry.streams()[stream]
    assert set(names) <= set(TASKS) and stream not in TASKS
    assert len(set(names)) == len(names) > 0


def test_the_papers_stream() -> None:
    """The stream is in Table 4 of the paper."""
    assert registry.streams()["qnli-agnews-sst2"] == ("qnli", "ag_news", "sst2")


@pytest.mark.parametrize(
    ("names", "count"),
    [
        ([f"standard-{order}" for order in (1, 2, 3, 4)], 5),
        ([f"progressive-{order}" for order in (8, 9, 10)], 15),
        (["superni-1", "superni-2"], 14),
    ],
    ids=["standard", "progressive", "superni"],
)
def test_the_orders_of_a_stream_differ_in_order_only(names: list[str], count: int) -> None:
    """The orders are from De Masson d'Autume et al., 2019, and Razdaibiedina et al., 2023."""
    orders = [registry.streams()[name] for name in names]
    assert len({frozenset(order) for order in orders}) == 1 and len({*orders}) == len(orders)
    assert len(orders[0]) == count


@pytest.mark.sampled("cr")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=real_data.needs(name)) for name in registry.streams()["long"]]
)
def test_the_long_stream_fits_the_real_data(name: str) -> None:
    """The label names in the data are those of the definition, in the same order."""
    (rows,) = load_tasks(name, str(real_data.DIRECTORY))
    names = json.loads((real_data.DIRECTORY / name / "source.json").read_text(encoding="utf-8"))["label_names"]
    assert rows.task == TASKS[name]
    assert names == list(TASKS[name].labels)
    assert bool(rows.train.second) == (TASKS[name].kind == "pair")


def test_a_definition_comes_back_from_its_fields_as_json() -> None:
    """All fields come back except ``hub``, which says where rows are."""
    task = TaskDefinition(
        "own", "pair", ("a", "b"), "{text_a} {mask} {text_b}", ("no", "yes"), metric="f1", hub=HubSource("x")
    )
    assert TaskDefinition.of_fields(json.loads(json.dumps(task.fields))) == replace(task, hub=None)
