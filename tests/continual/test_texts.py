"""Streams of tasks that are answered by texts, alone and beside tasks with labels: what strategies remember, and refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from forgetfree import registry
from forgetfree.continual.streams import Stream, make_stream
from forgetfree.errors import OptionError, UsageError
from forgetfree.testing.tiny import copies, tiny_model, tiny_task, tiny_texts


@copies
def mixed() -> Stream:
    """Texts, labels, and texts again, all read by one language model."""
    labels = tiny_task("sst2")
    labels = replace(labels, task=replace(labels.task, causal_template="{text} it was"))
    tasks = [tiny_texts("qnli"), labels, tiny_texts("ag_news")]
    return make_stream("mixed", tasks, tiny_model(readout="generate"))


class Batches:
    """As an Avalanche plugin: whether each batch holds rows of the stream, all with their own labels and their own task."""

    def __init__(self, stream: Stream) -> None:
        self._rows = {
            (task.label, *task.train[i][0].tolist()): torch.as_tensor(task.train[i][1]).reshape(-1)
            for task in stream.tasks
            for i in range(len(task.train))
        }
        #: By the task in training, the tasks whose rows it was trained on.
        self.tasks: dict[int, set[int]] = {}

    def after_forward(self, strategy: Any, **_: Any) -> None:
        model, place, losses = strategy.model, 0, []
        for row, count in zip(strategy.mb_x, model.counts(strategy.mb_x).tolist(), strict=True):
            lines = slice(place, place := place + count)
            (task,) = set(strategy.mb_task_id[lines].tolist())
            x = row[: int(model.tokens.attention_mask(row[None]).sum())]
            assert torch.equal(self._rows[task, *x.tolist()], strategy.mb_y[lines])
            losses.append(F.cross_entropy(model(x[None], task), strategy.mb_y[lines], reduction="sum"))
            self.tasks.setdefault(strategy.task.label, set()).add(task)
        assert place == len(strategy.mb_y)
        torch.testing.assert_close(strategy.criterion(), sum(losses) / place)  # every label of the batch counts alike


@pytest.mark.parametrize("name", ["replay", "agem", "gdumb", "joint"])
def test_rows_of_several_tasks_keep_their_tokens_and_their_task(name: str) -> None:
    """Beside a slow loss, row by row. The memory has as many rows of each task, or of each label, as of any other."""
    stream, cls = mixed(), registry.strategy(name)
    batches = Batches(stream)
    memory = {"mem_size": 12} if name in ("replay", "gdumb") else {}
    options = cls.Options(steps=6, batch_size=4, learning_rate=0.01, dropout=False, **memory)
    strategy = cls(stream=stream, options=options, plugins=[batches], device="cpu")
    strategy.train(stream.benchmark.train_stream)
    others = {"agem": {2}, "joint": set(range(3))}
    assert batches.tasks[max(batches.tasks)] == others.get(name, {0, 1, 2})
    if memory:
        groups = strategy.avalanche_plugin.storage_policy.buffer_groups.values()
        assert [len(group.buffer) for group in groups] == {"replay": [4, 4, 4], "gdumb": [3, 3, 3, 3]}[name]


@pytest.mark.parametrize("name", ["gem", "der", "lwf"])
def test_what_needs_one_label_a_row_says_so(name: str) -> None:
    with pytest.raises(UsageError, match=f"^{name} .*task 'qnli' has one for each token of a text.*grafting-continual"):
        registry.strategy(name)(stream=mixed())


def test_a_memory_has_a_row_of_each_label_and_of_each_task_of_texts() -> None:
    cls = registry.strategy("gdumb")
    with pytest.raises(OptionError, match="got mem_size=3 for 4 labels"):
        cls(stream=mixed(), options=cls.Options(mem_size=3))
