"""A row's logits in any batch: equal to the bit with ``deterministic``, else within a bound that is measured here."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from compared import run_logits
from torch import Tensor

from forgetfree import Predictor, cli
from forgetfree.data.rows import Rows
from forgetfree.data.sources import load_task
from forgetfree.kinds.kind import kind_of
from forgetfree.tasks import TaskDefinition

pytestmark = pytest.mark.long

MakeRun = Callable[..., Path]
TASKS = ("qnli", "ag_news", "sst2")
SIZES = (1, 2, 3, 8, 17, 64)
#: The largest difference of a logit from that of its row alone; relative for logits above 1.
BATCHED = 1e-5
WORDS = ["the", "lovely", "awful", "film", "story", "river", "city", "moon", "was", "is", "dull", "goal", "war", "bank"]
#: Tiny models, one for each kind of readout.
MODELS = ("bert", "bert-mlm", "gpt2-lm")


@pytest.fixture(params=MODELS)
def run(request: pytest.FixtureRequest, finished_run: MakeRun) -> Path:
    return finished_run(request.param, "grafting-continual")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def shuffled(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(count), count)


def batched(order: Sequence[int], size: int) -> list[list[int]]:
    return [list(order[i : i + size]) for i in range(0, len(order), size)]


def rows_of(predictor: Predictor, task: str) -> Rows:
    """Return rows of 1 to 30 words of the tiny vocabulary, or pairs; sst2 gets enough rows for the largest batch."""
    draw, count = random.Random(task), 66 if task == "sst2" else 9
    columns = [
        tuple(" ".join(draw.choices(WORDS, k=draw.randint(1, 30))) for _ in range(count))
        for _ in predictor.definition(task).text_columns
    ]
    return Rows(columns[0], columns[1] if len(columns) == 2 else (), (0,) * count)


def texts_of(rows: Rows) -> list[tuple[str, ...]]:
    return list(zip(rows.first, rows.second, strict=True)) if rows.second else [(text,) for text in rows.first]


def in_order(predictor: Predictor, task: str, rows: Rows, order: Sequence[int], size: int) -> Tensor:
    """Return the logits of the rows with these numbers, in batches of ``size``."""
    return torch.cat([predictor.logits(task, rows.take(part).texts, batch_size=size) for part in batched(order, size)])


def in_batches(predictor: Predictor, task: str, rows: Rows, order: Sequence[int], size: int) -> Tensor:
    """Return the logits of all rows, read in another order in batches of ``size``."""
    logits = in_order(predictor, task, rows, order, size)
    return logits[torch.tensor(order).argsort()]


def apart(logits: Tensor, alone: Tensor) -> float:
    """Return the largest difference, relative for logits above 1."""
    return float(((logits - alone).abs() / alone.abs().clamp(min=1)).max())


def check_labels(logits: Tensor, alone: Tensor, bound: float) -> None:
    """Check that labels differ only where the two largest logits are closer to each other than twice the bound."""
    best = alone.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * bound * alone.abs().max(1).values.clamp(min=1)
    assert clear.float().mean() > 0.9
    assert torch.equal(logits.argmax(1)[clear], alone.argmax(1)[clear])


# -- With deterministic -----------------------------------------------------------------------------------


@pytest.mark.sampled("gpt2-lm-2")
def test_a_row_has_the_same_bits_in_any_company(run: Path, threads: int) -> None:
    """Batches have 1 to 64 rows in another order, or mix tasks."""
    predictor = Predictor.of_run(run, deterministic=True)
    rows = {task: rows_of(predictor, task) for task in TASKS}
    alone = {task: in_batches(predictor, task, rows[task], range(len(rows[task])), 1) for task in TASKS}
    for number, task in enumerate(TASKS):
        for size in SIZES[1:]:
            order = shuffled(len(rows[task]), size + number)[: size + 2]  # a whole batch, and the rest
            assert torch.equal(in_order(predictor, task, rows[task], order, size), alone[task][order])
    asked = [(task, text) for task in TASKS for text in texts_of(rows[task])]
    expected = [answer for task in TASKS for text in texts_of(rows[task]) for answer in predictor.answer(task, [text])]
    order = shuffled(len(asked), 0)
    for size in (3, 64):
        for part in batched(order, size):
            answers = predictor.answer_mixed([asked[i][0] for i in part], [asked[i][1] for i in part])
            assert answers == [expected[i] for i in part]


@pytest.mark.sampled("bert")
@pytest.mark.parametrize("kind", ["bert", "gpt2-lm"])
def test_a_run_and_what_answers_from_it_have_the_same_bits(
    finished_run: MakeRun, kind: str, data_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This holds for each way of storing tasks; predict and serve use the option of the run."""
    strategies, tasks = ("grafting-continual", "continual-ft", "lora"), ("qnli", "sst2")
    one = finished_run(kind, *strategies, stream=",".join(tasks), more=("--set", "evaluation_batch_size=1"))
    for strategy in strategies:
        predictor = Predictor.of_run(one, strategy=strategy)
        assert predictor.deterministic
        for task in tasks:
            rows = load_task(task, str(data_directory)).test
            assert torch.equal(predictor.logits(task, rows.texts), run_logits(one, strategy, task))
            texts = texts_of(rows)[:5]
            mixed = predictor.answer_mixed([task] * 5, texts)
            assert mixed == [predictor.answer(task, [text])[0] for text in texts]


def test_the_label_is_that_of_the_largest_logit_where_shares_are_equal() -> None:
    """A run scores by logits, and its saved files must not predict another label."""
    low = torch.tensor(0.01)
    logits = torch.stack([low, torch.nextafter(low, torch.tensor(1.0))])
    assert logits.softmax(0).unique().numel() == 1 and logits.argmax() == 1
    mood = TaskDefinition("mood", "single", ("sad", "glad"))
    (answer,) = kind_of(mood).replies(mood, ["fine"], logits[None], [0])
    assert (answer.label, answer.probability) == ("glad", 0.5)


def test_the_flag_of_predict(finished_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A text has the same probabilities alone and in a file with other texts."""
    run = finished_run("bert", "grafting-continual")
    texts = ["the lovely film", "dull", "the story was awful and " * 6 + "dull", "moon"]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    usual = ["predict", str(run), "--task", "sst2", "--deterministic", "--json"]
    assert cli.main([*usual, "--file", str(tmp_path / "texts.txt")]) == 0
    together = capsys.readouterr().out.splitlines()
    for text, line in zip(texts, together, strict=True):
        assert cli.main([*usual, text]) == 0
        assert capsys.readouterr().out.splitlines() == [line]


# -- Without it -------------------------------------------------------------------------------------------


@pytest.mark.sampled("bert-mlm")
def test_logits_stay_within_the_bound_and_labels_stay(run: Path) -> None:
    predictor = Predictor.of_run(run)
    assert not predictor.deterministic
    rows = {task: rows_of(predictor, task) for task in TASKS}
    alone = {task: in_batches(predictor, task, rows[task], range(len(rows[task])), 1) for task in TASKS}
    for task in TASKS:
        for size in SIZES[1:]:
            order = shuffled(len(rows[task]), size)
            logits = in_batches(predictor, task, rows[task], order, size)
            assert apart(logits, alone[task]) <= BATCHED
            check_labels(logits, alone[task], BATCHED)
