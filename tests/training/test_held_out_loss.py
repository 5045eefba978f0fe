"""The loss on held-out texts, before a stream and after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from torch.nn import functional as F

import forgetfree
from forgetfree.data.columns import ReadOptions
from forgetfree.data.sources import load_tasks
from forgetfree.errors import DataError, RunError, UsageError
from forgetfree.models.loading import load_model
from forgetfree.training.held_out_loss import HeldOutTexts
from forgetfree.training.training_options import TrainingOptions

TEXTS = ["great film", "the movie was a terrible movie", "", "a great movie of a film"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write("Llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks of prompts and answers."""
    directory = tmp_path_factory.mktemp("tasks")
    for task in ("first", "last", "other"):
        (directory / task).mkdir()
        rows = [{"prompt": f"{task} film {i}", "target": TEXTS[i % 2]} for i in range(8)]
        for split in ("train", "validation", "test"):
            (directory / task / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    return path


@torch.no_grad()
def test_the_loss_is_the_mean_over_all_next_tokens(model: Path, lines: Path, tmp_path: Path) -> None:
    loaded = load_model(str(model), "generate", max_length=24)
    network: Any = loaded.model.backbone.eval()
    losses = []
    for text in filter(None, TEXTS):
        ids = torch.tensor([loaded.tokenizer(text)["input_ids"]])
        losses.append(F.cross_entropy(network(ids).logits[0, :-1], ids[0, 1:], reduction="none"))
    expected = float(torch.cat(losses).mean())
    table = tmp_path / "texts.jsonl"
    table.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for place in (lines, table):
        texts = HeldOutTexts.of(str(place), "demo", loaded)
        assert texts.counts == {"texts": 3, "tokens": len(torch.cat(losses))}
        assert texts.loss(loaded.model, TrainingOptions()) == pytest.approx(expected, rel=1e-5)


def test_grafts_leave_it_as_it_was_to_the_last_bit(model: Path, data: Path, lines: Path, tmp_path: Path) -> None:
    """Without a task, the pre-trained model answers; continual fine-tuning has only its own model."""
    how: dict[str, Any] = {"steps": 2, "sparsity": 0.2, "optimizer": "adamw", "learning_rate": 1e-2}
    names = ("grafting-continual", "lora", "continual-ft")
    forgetfree.run(
        "first,last", strategies=names, data=str(data), model=str(model), out=tmp_path / "out", held_out=lines, **how
    )
    found = {run.strategy: run.facts.held_out for run in forgetfree.load_results(tmp_path / "out").runs}
    fresh = load_model(str(model), "generate")
    before = HeldOutTexts.of(str(lines), str(data), fresh).loss(fresh.model, TrainingOptions())
    assert (found["grafting-continual"].after, found["lora"].after) == (before, None)  # LoRA needs a task
    for name in names[:-1]:
        assert found[name].before == before
        assert len(found[name].by_task) == 2
        assert before not in found[name].by_task
    naive = found["continual-ft"]
    assert (naive.before, naive.by_task) == (before, None)
    assert naive.after != before
    report = (tmp_path / "out" / "report.md").read_text()
    assert "Loss on held-out texts (nats per token)" in report
    assert "\n| grafting-continual | " in report.partition("on held-out texts")[2]


def test_a_task_may_be_set_aside(model: Path, data: Path) -> None:
    loaded = load_model(str(model), "generate")
    named = HeldOutTexts.of("other", str(data), loaded)
    assert named.counts["tokens"] < sum(named.rows.lengths)  # the loss covers the answers only, not the prompts
    in_folder = HeldOutTexts.of(str(data / "other"), "demo", loaded)
    assert torch.equal(in_folder.rows.tokens, named.rows.tokens)
    assert len(HeldOutTexts.of("other", str(data), loaded, 3).rows) == 3
    reader = load_model(str(model), "causal")
    reviews = HeldOutTexts.of("sst2", "demo", reader, 4)
    lengths = [len(reader.tokenizer(text)["input_ids"]) for text in texts(4)]
    assert reviews.counts["tokens"] + 4 == sum(min(length, reader.max_length) for length in lengths)


def texts(count: int) -> list[str]:
    from forgetfree.data.rows import evenly
    from forgetfree.data.sources import load_task

    rows = load_task("sst2", "demo").test
    return [rows.first[i] for i in evenly(len(rows), count)]


@pytest.mark.parametrize(
    ("family", "readout", "place", "error", "message"),
    [
        ("Llama", "linear", "other", UsageError, "the readout 'linear' does not predict. Use --readout causal or g"),
        ("T5", "generate", "sst2", UsageError, "which an encoder-decoder needs"),
        ("Llama", "generate", "nowhere", UsageError, "nowhere is neither a file or folder of texts nor a task of"),
        ("Llama", "generate", "EMPTY", DataError, "contains no text. Give one text per line, or a column 'text'"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    family: str, readout: str, place: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    loaded = load_model(str(families.write(family, tmp_path / "model")), readout)
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(error, match=message):
        HeldOutTexts.of(place.replace("EMPTY", str(tmp_path / "empty.txt")), "demo", loaded)


def test_rows_without_a_text_are_told(model: Path, tmp_path: Path) -> None:
    """In a text file, empty lines separate texts."""
    loaded = load_model(str(model), "generate")
    table, lines = tmp_path / "texts.jsonl", tmp_path / "texts.txt"
    table.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("great film", " ", None, "a movie")))
    lines.write_text("great film\n\na movie\n")
    note = HeldOutTexts.of(str(table), "demo", loaded).note
    assert note == f"Rows of --held-out {table} were left out: no text of two tokens or more (2)."
    assert HeldOutTexts.of(str(lines), "demo", loaded).note == ""
    with table.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(DataError, match=r"texts\.jsonl, row 5: expected a JSON object, .* --skip-bad-rows skips such"):
        HeldOutTexts.of(str(table), "demo", loaded)
    note = HeldOutTexts.of(str(table), "demo", loaded, options=ReadOptions(skip_bad_rows=True)).note
    assert note == f"Rows of --held-out {table} were left out: no text of two tokens or more (2), no JSON object (1)."


def test_bad_rows_and_rows_that_do_not_fit_are_refused_or_left_out(model: Path, tmp_path: Path) -> None:
    loaded, folder = load_model(str(model), "generate", max_length=24), tmp_path / "aside"
    folder.mkdir()
    good = [{"prompt": "film", "target": text} for text in ("great film", "a movie")]
    for split, more in (("train", []), ("validation", []), ("test", [{"prompt": "film", "target": "film " * 40}])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*good, *more]))
    with pytest.raises(DataError, match=r"test\.jsonl, row 3: .* --skip-bad-rows skips such rows"):
        HeldOutTexts.of(str(folder), "demo", loaded)
    with (folder / "test.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "film", "target": ""}) + "\n")
    with pytest.raises(DataError, match=r"test\.jsonl, row 4, column 'target': expected .* --skip-bad-rows skips such"):
        HeldOutTexts.of(str(folder), "demo", loaded)
    texts = HeldOutTexts.of(str(folder), "demo", loaded, options=ReadOptions(skip_bad_rows=True))
    assert (texts.counts["texts"], len(texts.texts)) == (2, 2)
    assert texts.note == f"Rows of --held-out {folder} were left out: answer does not fit (1), no target (1)."


def test_texts_that_a_task_trains_are_told_or_refused(model: Path, data: Path, tmp_path: Path) -> None:
    loaded, tasks = load_model(str(model), "generate"), load_tasks("first", str(data))
    with pytest.raises(UsageError, match="All 8 texts of --held-out are also training rows"):
        HeldOutTexts.of(str(data / "first"), "demo", loaded).notes(tasks)
    mixed = tmp_path / "mixed.txt"
    mixed.write_text("first film 3\ngreat film\na great movie of a film\n")
    notes = HeldOutTexts.of(str(mixed), "demo", loaded).notes(tasks)  # a prompt, a right text, and neither
    assert notes == ["2 of 3 texts of --held-out are also training rows. Remove them."]
    assert HeldOutTexts.of("other", str(data), loaded).notes(tasks) == []


def test_other_texts_are_noticed_on_resume(model: Path, data: Path, lines: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"strategies": "continual-ft", "data": str(data), "model": str(model), "held_out": lines}
    forgetfree.run("first", out=tmp_path / "out", steps=1, **how)
    lines.write_text("a movie\n")
    with pytest.raises(RunError, match="the texts of --held-out changed since it was started"):
        forgetfree.run("first", out=tmp_path / "out", steps=1, resume=True, **how)


def test_a_task_of_the_stream_is_refused(model: Path, data: Path) -> None:
    with pytest.raises(UsageError, match="first is a task of the stream, so its texts are trained on"):
        forgetfree.run("first,last", data=str(data), model=str(model), held_out="first", steps=1)
