"""Predictions, exported models and switches of a run: all equal to the run's own predictions on its test rows."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cards import pipeline_probabilities
from compared import run_logits
from safetensors.torch import load_file
from task_files import write_rows

from forgetfree import (
    Graft,
    Ledger,
    LedgerSwitch,
    ParameterSpace,
    Predictor,
    Region,
    TaskSwitch,
    cli,
    load_model,
    load_results,
)
from forgetfree.core.fingerprint import body_fingerprint, fingerprint_of
from forgetfree.core.readout_model import body_of
from forgetfree.data.rows import Rows
from forgetfree.data.sources import load_tasks
from forgetfree.errors import LedgerError, RunError, TaskError, UsageError
from forgetfree.ledger.ledger import Record
from forgetfree.tasks import TaskDefinition

pytestmark = pytest.mark.long

MakeRun = Callable[..., Path]
TASKS = ("qnli", "ag_news", "sst2")
#: Strategies for each way of storing tasks: ledgers of three compositions, adapters, one model, a model a task, a merged model.
MERGED = ("merge-task-arithmetic", "merge-ties", "merge-stitch")
STRATEGIES = ("grafting-continual", "wsn", "bitfit", "lora", "o-lora", "continual-ft", "fine-tune", *MERGED)
#: Models, and the strategies of a run with each; one has a linear readout, two read label words.
RUNS = {
    "bert": STRATEGIES,
    "roberta-mlm": ("grafting-continual", "lora"),
    "gpt2-lm": ("grafting-continual", "fine-tune"),
}
EACH = [(kind, strategy) for kind, strategies in RUNS.items() for strategy in strategies]
each = pytest.mark.parametrize(("kind", "strategy"), EACH)


def run_of(finished_run: MakeRun, kind: str) -> Path:
    return finished_run(kind, *RUNS[kind])


@pytest.fixture(scope="module")
def rows(data_directory: Path) -> dict[str, Rows]:
    return {each.task.name: each.test for each in load_tasks(",".join(TASKS), str(data_directory))}


# -- Predictor -------------------------------------------------------------------------------------------


@pytest.mark.sampled("bert-o-lora", "bert-continual-ft", "bert-fine-tune", "bert-lora", "gpt2-lm-grafting-continual")
@each
def test_every_strategy_is_answered_from_bit_for_bit(
    finished_run: MakeRun, rows: dict[str, Rows], kind: str, strategy: str
) -> None:
    run = run_of(finished_run, kind)
    predictor = Predictor.of_run(run, strategy=strategy)
    assert tuple(predictor.tasks) == TASKS
    for task in (*TASKS[::-1], *TASKS):  # in any order, forwards and backwards
        assert torch.equal(predictor.logits(task, rows[task].texts), run_logits(run, strategy, task))
    answer = predictor.answer("ag_news", ["a lovely film"])[0]
    assert list(answer.probabilities) == ["World", "Sports", "Business", "Sci/Tech"]
    assert sum(answer.probabilities.values()) == pytest.approx(1, abs=1e-6)
    assert (answer.task, answer.probability) == ("ag_news", max(answer.probabilities.values()))
    mixed = predictor.answer_mixed(["sst2", "qnli", "sst2"], ["a film", ("who", "it was"), "a dull story"])
    alone = [predictor.answer("sst2", ["a film"])[0], predictor.answer("qnli", [("who", "it was")])[0]]
    assert [each.label for each in mixed[:2]] == [each.label for each in alone]
    for one, other in zip(mixed, alone, strict=False):
        assert one.probability == pytest.approx(other.probability, abs=1e-5)


def test_another_base_model_is_refused(
    finished_run: MakeRun, model_directory: Callable[[str], Path], capsys: Any
) -> None:
    run, other = run_of(finished_run, "bert"), str(model_directory("bert-mlm"))
    for strategy in ("continual-ft", "fine-tune", "lora", "wsn"):
        assert cli.main(["predict", str(run), "--task", "sst2", "--strategy", strategy, "--model", other, "a"]) == 1
        assert "other weights" in capsys.readouterr().err


# -- Unknown tasks ---------------------------------------------------------------------------------------


@pytest.mark.sampled("bitfit-lda", "bitfit-router", "fine-tune-router")
@pytest.mark.parametrize("inference", ["router", "lda"])
@pytest.mark.parametrize("strategy", ["lora", "fine-tune", "bitfit"])
def test_the_router_of_the_run_finds_the_task(
    finished_run: MakeRun, rows: dict[str, Rows], strategy: str, inference: str, capsys: Any
) -> None:
    """With scenario=class, the run's own predictions are among the labels of all tasks."""
    more = ("--set", "scenario=class", "--set", f"task_inference={inference}")
    more += ("--set", "readout_learning_rate=0.02")  # at a larger rate, one task would be chosen for every row
    run = finished_run("bert", "lora", "fine-tune", "bitfit", more=more)
    predictor = Predictor.of_run(run, strategy=strategy)
    labels = [(task, label) for task, each in predictor.tasks.items() for label in each.labels]
    found = set()
    for task in TASKS:
        texts = list(zip(rows[task].first, rows[task].second, strict=True)) if task == "qnli" else rows[task].first
        answers = predictor.route(texts)
        expected = [labels[best] for best in run_logits(run, strategy, task).argmax(1).tolist()]
        assert [(answer.task, answer.label) for answer in answers] == expected
        found |= {answer.task for answer in answers}
    assert (run / strategy / "seed-0" / "task-features.safetensors").is_file() == (inference == "lda")
    assert len(found) > 1
    with pytest.raises(UsageError, match="reads pairs of texts, got 3"):
        predictor.route([("a", "b", "c")])
    asked = ["predict", str(run), "--strategy", strategy, "--task", "auto", "--json"]
    assert cli.main([*asked, "a film " * 80, "who\tit was"]) == 0
    shown = capsys.readouterr()
    said = [json.loads(line) for line in shown.out.splitlines()]
    assert "warning: 1 text longer than max_length=" in shown.err
    assert said[0]["cut_tokens"] > 0 == said[1]["cut_tokens"]
    assert f"{said[0]['cut_tokens']} tokens cut off" in shown.err
    assert [set(each) - {"task", "label", "probability", "probabilities", "cut_tokens"} for each in said] == [
        {"text"},
        {"text_a", "text_b"},
    ]
    assert {each["task"] for each in said} <= set(TASKS)
    assert cli.main([*asked[:-1], "a film", "who\tit was"]) == 0
    told = [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()]
    assert told == [answer.task for answer in predictor.route(["a film", ("who", "it was")])]


def test_without_a_router_the_task_must_be_named(finished_run: MakeRun, capsys: Any) -> None:
    assert cli.main(["predict", str(run_of(finished_run, "bert")), "--task", "auto", "a film"]) == 2
    assert "has no router" in (error := capsys.readouterr().err) and "task_inference=router" in error


# -- Export ----------------------------------------------------------------------------------------------


@pytest.mark.sampled("bert-merge-ties", "gpt2-lm-grafting-continual", "roberta-mlm-lora")
@each
def test_an_exported_task_answers_as_the_run_did(
    finished_run: MakeRun, rows: dict[str, Rows], tmp_path: Path, kind: str, strategy: str
) -> None:
    """The call on the model card, if there is one, gives the same probabilities; the hidden states are equal to the bit."""
    run = run_of(finished_run, kind)
    for task in ("qnli", "sst2"):
        out = tmp_path / task
        assert cli.main(["export", str(run), "--strategy", strategy, "--task", task, "--out", str(out)]) == 0
        labels = Predictor.of_run(run, strategy=strategy).definition(task).labels
        expected = run_logits(run, strategy, task).softmax(1)
        got = pipeline_probabilities(out, rows[task], labels)
        assert (got is not None) == (kind == "bert")
        if got is not None:
            assert torch.allclose(got, expected, rtol=0, atol=1e-5)
            assert torch.equal(got.argmax(1), expected.argmax(1))
        config = transformers.AutoConfig.from_pretrained(out)
        if kind == "bert":
            assert config.id2label == dict(enumerate(labels))
    predictor = Predictor.of_run(run, strategy=strategy)
    model = transformers.AutoModel.from_pretrained(tmp_path / "sst2").eval()
    ids = torch.tensor([predictor.loaded.tokenizer("a lovely film")["input_ids"]])
    with torch.no_grad(), predictor.weights.answering("sst2"):
        ours = body_of(predictor.loaded.model)(input_ids=ids).last_hidden_state
        theirs = model(input_ids=ids).last_hidden_state
    if "lora" in strategy:  # W x + B A x against (W + B A) x
        assert torch.allclose(ours, theirs, atol=1e-5)
    else:
        assert torch.equal(ours, theirs)


def test_the_card_of_an_exported_model_says_what_it_is(finished_run: MakeRun, tmp_path: Path) -> None:
    run = run_of(finished_run, "bert")
    assert cli.main(["export", str(run), "--strategy", "bitfit", "--task", "sst2", "--out", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    biases = 2 * (4 * 16 + 32 + 16 + 2 * 16)  # two layers: attention, feed-forward, LayerNorms
    assert "| learned by | `bitfit` |" in card and "Written by `forgetfree export`" in card and "grafted" not in card
    (moved,) = (line for line in card.splitlines() if "parameters that training may move" in line)
    assert 0 < int(moved.split()[0].replace(",", "")) <= biases
    results = load_results(run)
    score = (
        f"accuracy {100 * results.matrix('bitfit', seed=0)['sst2'].iloc[-1]:.1f} % on {results.test_rows['sst2']} rows"
    )
    assert f"| score | {score} of the test split, after {len(results.tasks)} tasks, seed 0 |" in card
    assert "| shots | 4 |" in card
    assert "| licence | not known: the base model's card names none |" in card and "license:" not in card


def test_the_card_names_the_licence_of_the_base_model(
    finished_run: MakeRun, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    run, base = run_of(finished_run, "bert"), tmp_path / "base"
    shutil.copytree(model_directory("bert"), base)
    (base / "README.md").write_text("---\ntags: [a]\nlicense: apache-2.0\n---\nlicense: mine\n")
    words = ["export", str(run), "--strategy", "bitfit", "--task", "sst2", "--model", str(base)]
    assert cli.main([*words, "--out", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "\nlicense: apache-2.0\n---\n" in card and "| licence | `apache-2.0`, that of the base model |" in card


@pytest.mark.sampled("roberta-mlm")
@pytest.mark.parametrize("kind", RUNS)
def test_a_ledger_alone_is_exported_and_its_graft_is_applied(
    finished_run: MakeRun, model_directory: Callable[[str], Path], tmp_path: Path, kind: str, capsys: Any
) -> None:
    """The run, the ledger's file and a file of its graft give the same weights."""
    run, model = run_of(finished_run, kind), str(model_directory(kind))
    ledger = run / "grafting-continual" / "seed-0" / "ledger.safetensors"
    Ledger.load(ledger).graft("ag_news").save(tmp_path / "graft.safetensors")
    flags = ["--task", "ag_news", "--out"]
    assert cli.main(["export", str(run), *flags, str(tmp_path / "run")]) == 0
    assert cli.main(["export", str(ledger), "--model", model, *flags, str(tmp_path / "ledger")]) == 0
    apply = ["apply", str(tmp_path / "graft.safetensors")]
    assert cli.main([*apply, "--model", model, "--out", str(tmp_path / "graft")]) == 0
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("run", "ledger", "graft")]
    for other in weights[1:]:
        assert other.keys() == weights[0].keys()
        assert [name for name in other if not torch.equal(other[name], weights[0][name])] == []
    capsys.readouterr()
    assert cli.main([*apply, "--out", str(tmp_path / "none")]) == 2
    assert (
        "does not name its base model (a graft from a ledger never does). Give it with --model"
        in capsys.readouterr().err
    )
    assert cli.main(["export", str(ledger), *flags, str(tmp_path / "none")]) == 2
    assert "does not name its base model" in capsys.readouterr().err


def test_a_graft_of_a_ledger_has_the_tasks_own_rows_and_knows_its_model(
    finished_run: MakeRun, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    run = finished_run("bert", "bitfit", stream="ag_news,sst2", more=("--set", "scenario=class"))
    ledger = Ledger.load(run / "bitfit" / "seed-0" / "ledger.safetensors")
    assert ledger.records[1].readout["weight"].shape == (6, 16)
    graft = ledger.graft("sst2")
    assert torch.equal(graft.readout["weight"], ledger.records[1].readout["weight"][4:])
    graft.save(tmp_path / "graft")
    other = transformers.AutoModel.from_pretrained(model_directory("bert-mlm"))
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.raises(Exception, match="other weights"):
        Graft.load(tmp_path / "graft").apply_(other)


# -- In a model of the user ------------------------------------------------------------------------------


@pytest.mark.sampled(share=0.25)
@pytest.mark.parametrize("loader", ["AutoModel", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"])
@pytest.mark.parametrize("strategy", ["grafting-continual", "wsn", "bitfit"])
def test_a_model_of_ones_own_answers_each_task_as_the_run_did(
    finished_run: MakeRun, rows: dict[str, Rows], model_directory: Callable[[str], Path], strategy: str, loader: str
) -> None:
    run, place = run_of(finished_run, "bert"), model_directory("bert")
    model = getattr(transformers, loader).from_pretrained(place).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = tokenizer("a lovely film", return_tensors="pt")
    with torch.no_grad():
        plain = model(**inputs)[0]
    predictor = Predictor.of_run(run, strategy=strategy)
    switch = TaskSwitch(run / strategy / "seed-0" / "ledger.safetensors", model)
    for task in ("sst2", "qnli", "ag_news"):
        drawn = torch.get_rng_state()
        switch.to(task)
        assert torch.equal(torch.get_rng_state(), drawn)
        texts = list(zip(rows[task].first, rows[task].second, strict=True)) if task == "qnli" else rows[task].first
        one = [tokenizer(*([text] if task != "qnli" else text), return_tensors="pt") for text in texts]
        with torch.no_grad():
            got = torch.cat([model(**each).logits for each in one])
        assert torch.equal(got, predictor.logits(task, rows[task].texts, batch_size=1))
        assert model.config.id2label == dict(enumerate(predictor.definition(task).labels))
    with pytest.raises(TaskError, match="holds no task 'sst3'"):
        switch.to("sst3")
    switch.to(None)
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])] == []
    with torch.no_grad():
        assert torch.equal(model(**inputs)[0], plain)
    with switch.task("sst2") as switched, torch.no_grad():
        assert switched(**inputs).logits.shape == (1, 2)
        with pytest.raises(UsageError, match="returned a tuple"):
            switched(**inputs, return_dict=False)
    assert model.config.id2label != {0: "negative", 1: "positive"}


def test_a_ledger_of_a_model_with_a_head_is_refused_and_one_of_its_body_is_taken(
    model_directory: Callable[[str], Path],
) -> None:
    """Both switches and a predictor check this."""
    place = model_directory("bert")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(place)
    space, region = ParameterSpace.of(model), Region.of([3, 50])
    readout = {"weight": torch.ones(2, model.config.hidden_size), "bias": torch.zeros(2)}
    task = TaskDefinition("sst2", "single", ("negative", "positive"))
    graft = Graft(region, torch.tensor([1.0, 2.0]))
    ledger = Ledger(space, fingerprint_of(model))
    ledger.append(Record("sst2", region, graft, 0.1, readout, definition=task, classes=(0, 1)))
    loaded = load_model(str(place), "linear")
    for make in (lambda: TaskSwitch(ledger, model), lambda: Predictor(loaded, ledger)):
        with pytest.raises(LedgerError, match="another layout"):
            make()
    again = Ledger(ParameterSpace.of(model.base_model), body_fingerprint(model))
    again.append(*ledger.records)
    assert Predictor(loaded, again).answer("sst2", ["a lovely film"])[0].label in task.labels
    for switch in (TaskSwitch, LedgerSwitch):
        with switch(again, model).task("sst2"):  # type: ignore[operator]
            assert space.gather(model, region.indices).tolist() == [1.0, 2.0]


def test_a_switch_takes_the_ledger_of_a_run_s_directory(
    finished_run: MakeRun, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    run, model = run_of(finished_run, "bert"), transformers.AutoModel.from_pretrained(model_directory("bert"))
    own = Ledger.load(run / "grafting-continual" / "seed-0" / "ledger.safetensors")
    held = TaskSwitch(run, model).ledger
    assert held.tasks == own.tasks
    assert all(torch.equal(held.graft(task).values, own.graft(task).values) for task in own.tasks)
    with pytest.raises(RunError, match="has no model or ledger"):
        TaskSwitch(tmp_path, model)
    kept = tmp_path / "one run" / "lora" / "seed-0"
    kept.mkdir(parents=True)
    with pytest.raises(
        RunError, match=r"interrupted: continue it with forgetfree run --config '.*' --out '.*one run' --resume"
    ):
        TaskSwitch(tmp_path / "one run", model)
    shutil.copy(run / "lora" / "seed-0" / "adapters.safetensors", kept)
    with pytest.raises(RunError, match="holds no ledger, but adapters"):
        TaskSwitch(tmp_path / "one run", model)


# -- predict: files in, tables out -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", 'label,text\n1,"a joy, truly"\n0,a dull film\n'),
        ("rows.jsonl", '{"text": "a joy, truly", "label": 1}\n\n{"text": "a dull film"}\n'),
        ("rows.txt", "a joy, truly\r\na dull film\r\n"),
    ],
)
def test_texts_come_from_a_file_and_go_into_a_table(
    finished_run: MakeRun, tmp_path: Path, capsys: Any, name: str, content: str
) -> None:
    run, file = run_of(finished_run, "bert"), tmp_path / name
    file.write_bytes(content.encode())
    expected = Predictor.of_run(run).answer("sst2", ["a joy, truly", "a dull film"])
    assert cli.main(["predict", str(run), "--task", "sst2", "--file", str(file), "--csv"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [each["text"] for each in table] == ["a joy, truly", "a dull film"]
    assert [float(each["probability of negative"]) for each in table] == [a.probabilities["negative"] for a in expected]
    assert [each["label"] for each in table] == [answer.label for answer in expected]


def test_columns_that_are_kept_stand_beside_the_answers(finished_run: MakeRun, tmp_path: Path, capsys: Any) -> None:
    run, file = run_of(finished_run, "bert"), tmp_path / "rows.jsonl"
    file.write_text('{"id": 7, "text": "a joy", "who": {"name": "Ada"}}\n{"id": null, "text": "a bore", "who": "é"}\n')
    asked = ["predict", str(run), "--task", "sst2", "--file", str(file), "--keep", "id"]
    assert cli.main([*asked, "--keep", "who", "--json"]) == 0
    said = capsys.readouterr()
    assert [(each["id"], each["who"], each["text"]) for each in map(json.loads, said.out.splitlines())] == [
        (7, {"name": "Ada"}, "a joy"),
        (None, "é", "a bore"),
    ]
    assert cli.main([*asked, "--csv"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("id,text,task,label,probability,")
    assert cli.main([*asked, "--keep", "nosuch", "--csv"]) == 1
    assert "which has 'id', 'text', 'who'" in capsys.readouterr().err


def test_what_json_has_no_word_for_is_kept_as_json(finished_run: MakeRun, tmp_path: Path, capsys: Any) -> None:
    rows = [{"text": "a joy", "size": 1.5, "when": date(2026, 1, 2)}, {"text": "dull", "size": math.nan, "when": None}]
    file = write_rows(tmp_path / "rows.parquet", rows)
    asked = ["predict", str(run_of(finished_run, "bert")), "--task", "sst2", "--file", str(file)]
    assert cli.main([*asked, "--keep", "size", "--keep", "when", "--json"]) == 0
    lines = [json.loads(line, parse_constant=pytest.fail) for line in capsys.readouterr().out.splitlines()]
    assert [(line["size"], line["when"]) for line in lines] == [(1.5, "2026-01-02"), (None, None)]


def test_pairs_come_from_a_file(finished_run: MakeRun, tmp_path: Path, capsys: Any) -> None:
    run = run_of(finished_run, "bert")
    (tmp_path / "a.csv").write_text("text_b,text_a\nit was,who\n")
    (tmp_path / "b.txt").write_text("who\tit was\n")
    (tmp_path / "d.csv").write_text("answered,by,asked\nit was,me,who\n")
    for file, *more in (["a.csv"], ["b.txt"], ["d.csv", "--text-column", "asked", "--text-column", "answered"]):
        flags = ["--task", "qnli", "--file", str(tmp_path / file), *more, "--json"]
        assert cli.main(["predict", str(run), *flags]) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["text_a"], said["text_b"]) == ("who", "it was")
    (tmp_path / "e.csv").write_text("review,sentiment\nwho,joyful\n")  # a column of labels is no second text
    assert cli.main(["predict", str(run), "--task", "qnli", "--file", str(tmp_path / "e.csv")]) == 1
    assert "has the columns 'review', 'sentiment', but the task reads text_a and text_b" in capsys.readouterr().err


def test_a_stream_is_answered_line_by_line(finished_run: MakeRun, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prediction is printed before the next line is read."""
    said: list[str] = []

    class Lines(io.StringIO):
        def __iter__(self) -> Iterator[str]:
            for text in ("a lovely film", "a dull film", "a film"):
                yield f"{text}\n"
                said.append(capsys.readouterr().out)

    monkeypatch.setattr("sys.stdin", Lines())
    assert cli.main(["predict", str(run_of(finished_run, "bert")), "--task", "sst2", "-"]) == 0
    assert [line.split("\t")[2] for line in said] == ["a lovely film\n", "a dull film\n", "a film\n"]
