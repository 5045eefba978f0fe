"""Streams of tasks with texts as answers, alone and beside tasks with labels: the memories of strategies, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from forgetfree import registry
from forgetfree.continual.stream import Stream, make_stream
from forgetfree.errors import OptionError, UsageError
from forgetfree.results.answers import TextAnswers
from forgetfree.testing.tiny import tiny_model, tiny_task, tiny_texts
from forgetfree.training.encoded_task import answers_of
from forgetfree.training.monitor import Monitor


def mixed() -> Stream:
    """Return a stream of texts, labels, and texts again, for one language model."""
    labels = tiny_task("sst2")
    labels = replace(labels, task=replace(labels.task, causal_template="{text} it was"))
    tasks = [tiny_texts("qnli"), labels, tiny_texts("ag_news")]
    return make_stream("mixed", tasks, tiny_model(readout="generate"))


class Batches:
    """A plugin that checks whether each batch holds rows of the stream, with their own labels and their own task."""

    def __init__(self, stream: Stream) -> None:
        self._rows = {
            (task.label, *task.train[i][0].tolist()): torch.as_tensor(task.train[i][1]).reshape(-1)
            for task in stream.tasks
            for i in range(len(task.train))
        }
        #: For each task in training, the tasks of the rows in its batches.
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
        torch.testing.assert_close(strategy.criterion(), sum(losses) / place)  # all labels of the batch weigh the same


@pytest.mark.parametrize("name", ["replay", "agem", "gdumb", "joint"])
def test_rows_of_several_tasks_keep_their_tokens_and_their_task(name: str) -> None:
    """The loss equals a slow loss by row. The memory has equally many rows of each task, or of each label."""
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


# -- Without the task at inference ------------------------------------------------------------------------


def withheld(scenario: Any = "class") -> Stream:
    tasks = [tiny_texts(name) for name in ("qnli", "sst2", "ag_news")]
    return make_stream("withheld", tasks, tiny_model(readout="generate"), scenario=scenario)


def learned(name: str, stream: Stream, **more: Any) -> Any:
    options = registry.strategy(name).Options
    chosen: dict[str, Any] = {"steps": 8, "batch_size": 8, "optimizer": "adamw", "learning_rate": 0.01} | more
    if "sparsity" in options.model_fields:
        chosen |= {"sparsity": 0.2, "mask_steps": 2, "mask_batch_size": 8}
    strategy = registry.strategy(name)(stream=stream, options=options(**chosen), device="cpu")
    strategy.train(stream.benchmark.train_stream)
    return strategy


def row(answers: TextAnswers, i: int) -> tuple[Any, Any]:
    """Return losses and ids of one row."""
    losses, ids = (
        np.split(a, np.cumsum(n)[:-1]) for a, n in ((answers.losses, answers.counts), (answers.ids, answers.lengths))
    )
    return losses[i], ids[i]


@pytest.mark.sampled("grafting-continual-class")
@pytest.mark.parametrize(
    ("name", "scenario"), [("grafting-continual", "class"), ("fine-tune", "domain"), ("lora", "class")]
)
def test_the_prompt_alone_tells_whose_model_answers(name: str, scenario: str) -> None:
    """The reference answers each row alone, by the model of the task with the most similar prompts."""
    strategy = learned(name, withheld(scenario), task_inference="lda")
    tasks, found, right = strategy.stream.tasks, strategy.evaluate(), 0
    for task in tasks:
        for i in range(len(task.test)):
            alone = task.test.subset([i])
            other = replace(alone, tokens=torch.where(alone.tokens < 0, ~torch.tensor(7).int(), alone.tokens))
            other.tokens[(alone.tokens < 0).nonzero()[0]] = alone.tokens[alone.tokens < 0][0]
            of_row, of_other = (
                int(nearest)
                for nearest in strategy.task_features.nearest(
                    (rows.batch([0])[0] for rows in (alone, other)), [each.name for each in tasks]
                )
            )
            assert of_row == of_other  # for any right answer
            right += of_row == task.label
            with strategy.answering(tasks[of_row]):
                expected = answers_of(strategy.model, task, alone, strategy.options)
            losses, ids = row(found[task.name], i)
            np.testing.assert_allclose(losses, expected.losses, atol=1e-4)
            assert ids.tolist() == expected.ids.tolist()
    assert right > 0.6 * sum(len(task.test) for task in tasks)


def test_else_the_last_task_answers_all() -> None:
    strategy = learned("grafting-continual", withheld())
    found = strategy.evaluate()
    with strategy.answering(strategy.stream.tasks[-1]):
        for task in strategy.stream.tasks:
            assert found[task.name].same_as(answers_of(strategy.model, task, task.test, strategy.options))


def test_labels_and_texts_are_not_withheld_together_and_entropy_tells_nothing_of_texts() -> None:
    labels = tiny_task("sst2")
    labels = replace(labels, task=replace(labels.task, causal_template="{text} it was"))
    for scenario in ("class", "domain"):
        with pytest.raises(UsageError, match=f"scenario={scenario} .*'qnli' is answered by texts, 'sst2' by labels"):
            make_stream("x", [tiny_texts("qnli"), labels], tiny_model(readout="generate"), scenario=scenario)  # type: ignore[arg-type]
    with pytest.raises(
        OptionError, match=r"entropy of label predictions, but 'qnli' is a generation task. Use task_inference=lda"
    ):
        learned("grafting-continual", withheld(), task_inference="router")


def test_the_tokens_of_an_evaluation_are_counted() -> None:
    """Counts grow after each batch; tasks with labels have none."""
    counts = list[tuple[int, int]]()

    class Counting(Monitor):
        def log_tokens(self, tokens: int, most: int) -> None:
            counts.append((tokens, most))

    stream, cls = mixed(), registry.strategy("continual-ft")
    strategy = cls(stream=stream, options=cls.Options(), monitor=Counting(), device="cpu")
    answers = strategy.evaluate(stream.tasks[1:])["ag_news"]
    assert isinstance(answers, TextAnswers)
    written, most = int(answers.lengths.sum()), 4 * len(stream.tasks[2].test)
    assert counts == sorted(counts) and counts[-1] == (written, most)
    assert 0 < written <= most
