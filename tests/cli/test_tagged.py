"""Named entities at the command line: from files to a run, its answers, its ledger, and an exported model directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tagged import PEOPLE, TOPICS, tagged_task

from forgetfree import cli
from forgetfree.data.examples import EncodedRows
from forgetfree.errors import UsageError
from forgetfree.kinds.tagging import words_of
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.mixed_batch import MixedBatchModel
from forgetfree.ledger.switch import LedgerSwitch
from forgetfree.models.loading import load_model
from forgetfree.serve.inference import Predictor
from forgetfree.training.encoded_task import predict

STRATEGIES = ("fine-tune", "continual-ft", "grafting-continual")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of two tasks with different kinds of entities."""
    root = tmp_path_factory.mktemp("tagged")
    for name, kinds in (("people", PEOPLE), ("topics", TOPICS)):
        rows, folder = tagged_task(name, kinds, train=160), root / name
        folder.mkdir()
        (folder / "source.json").write_text(json.dumps({"kind": "tokens", "entities": list(kinds)}))
        for split in ("train", "validation", "test"):
            part = getattr(rows, split)
            lines = [
                {"tokens": text.split(), "tags": [rows.task.labels[tag] for tag in tags]}
                for text, tags in zip(part.first, part.labels, strict=True)
            ]
            (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return root


@pytest.fixture(scope="module")
def arguments(data: Path, model_directory) -> list[str]:
    words = ["--data", str(data), "--model", str(model_directory("bert")), "--steps", "70", "--learning-rate", "2e-2"]
    return [
        *words,
        "--sparsity",
        "0.1",
        "--batch-size",
        "16",
        "--set",
        "optimizer=adamw",
        "--set",
        "readout_learning_rate=0.1",
        "--set",
        "mask_steps=5",
    ]


@pytest.fixture(scope="module")
def run(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    strategies = [word for name in STRATEGIES for word in ("--strategy", name)]
    assert cli.main(["run", "people,topics", *arguments, *strategies, "--out", str(out)]) == 0
    return out


@pytest.mark.figures
def test_a_run_scores_entities_and_forgets_as_claimed(run: Path) -> None:
    results = json.loads((run / "results.json").read_text())
    runs = {each["strategy"]: each for each in results["runs"]}
    assert all(each["metric"] == ["f1", "f1"] for each in runs.values())
    assert results["data"]["test_rows"] == {"people": 17, "topics": 17}  # sentences
    assert all(0 < floor < 1 for floor in results["floors"]["constant"])
    for name in ("fine-tune", "grafting-continual"):
        matrix = runs[name]["matrix"]
        assert (
            runs[name]["summary"]["forgetting"] == 0 and matrix[1][0] == matrix[2][0] > results["floors"]["constant"][0]
        )
    assert runs["fine-tune"]["agreement"] == [1.0, 1.0]
    scores = (run / "grafting-continual" / "seed-0" / "scores.csv").read_text()
    assert "word_accuracy" in scores and "people (F1)" in (run / "report.md").read_text()


def test_predict_prints_each_entity(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    word = PEOPLE["PER"][0]
    texts = [f"the film was {word}", json.dumps(["the", word]), "the film", "and was it"]
    assert cli.main(["predict", str(run), "--task", "people", *texts]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert ("PER", word, f"the film was {word}") in [(kind, entity, text) for kind, _, entity, text in lines]
    expected = []
    sentences = [[*["the", "film", "was"], word], ["the", word], *map(str.split, texts[2:])]
    for tagged in Predictor.of_run(run).answer("people", sentences):
        text = " ".join(tagged.words)
        found = [[each.kind, f"{each.probability:.3f}", each.text, text] for each in tagged.entities]
        expected += found or [["-", "-", "-", text]]
    assert lines == expected


@pytest.mark.parametrize(
    ("name", "content", "more"),
    [
        ("rows.jsonl", '{"id": 1, "tokens": ["the", "W"], "tags": ["O", "O"]}\n', []),
        ("rows.csv", "tokens,tags\nthe W,O O\n", []),
        ("rows.conll", "the DT O\nW NNP B-PER\n", []),
        ("rows.csv", "said,about\nthe W,x\n", ["--text-column", "said"]),
    ],
)
def test_predict_reads_the_files_of_the_training(
    run: Path, tmp_path: Path, name: str, content: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    word = PEOPLE["PER"][0]
    (tmp_path / name).write_text(content.replace("W", word))
    assert cli.main(["predict", str(run), "--task", "people", "--file", str(tmp_path / name), *more, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    (tagged,) = Predictor.of_run(run).answer("people", [["the", word]])
    assert (said["words"], said["tags"]) == (["the", word], list(tagged.tags))


def test_predict_refuses_a_column_without_words(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"tokens": ["a"]}\n{"tokens": [3]}\n')
    assert cli.main(["predict", str(run), "--task", "people", "--file", str(tmp_path / "rows.jsonl")]) == 1
    assert "row 2, column 'tokens': expected a text or a list of words, got [3]" in capsys.readouterr().err


def test_predict_refuses_what_has_no_words(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["predict", str(run), "--task", "people", "fine", "[]"]) == 2
    assert "Sentence 2: expected a list of words" in capsys.readouterr().err


def test_a_graft_becomes_a_token_classifier(arguments: list[str], tmp_path: Path, capsys, model_directory) -> None:
    """The pipeline finds the same entities as the graft on its base model, read at each word's first token."""
    graft, model = tmp_path / "graft", tmp_path / "model"
    assert cli.main(["graft", "people", *arguments, "--out", str(graft)]) == 0
    assert cli.main(["apply", str(graft), "--model", str(model_directory("bert")), "--out", str(model)]) == 0
    assert 'pipeline("token-classification"' in capsys.readouterr().out
    card = (model / "README.md").read_text()
    assert "AutoModelForTokenClassification" in card and 'aggregation_strategy="first"' in card
    find = transformers.pipeline("token-classification", model=str(model), aggregation_strategy="first")
    task = tagged_task("people", PEOPLE, train=160)
    loaded = load_model(str(model_directory("bert")), "linear")
    held = Graft.load(graft / "bare-graft/seed-0/graft.safetensors")
    label = loaded.add_task(task.task)
    loaded.model.readout_module(label).load_state_dict(dict(held.readout))
    held.apply_(loaded.model)
    found = 0
    for text, tags in zip(task.test.first, task.test.labels, strict=True):
        rows = EncodedRows.of(
            loaded.encoder(task.task)(task.test.take([task.test.first.index(text)])), [tags], label, 0
        )
        ours = predict(loaded.model, rows)
        ids = rows.batch([0])[0]
        with torch.no_grad():
            theirs = find.model(**find.tokenizer(text, return_tensors="pt")).logits[0]
        # The exported layer reads all tokens, and ours only the words: the shapes differ, and so do the last bits.
        torch.testing.assert_close(theirs[(ids[0] < 0).nonzero().flatten()], ours, rtol=1e-5, atol=1e-6)
        kinds = [task.task.labels[label][2:] for label in ours.argmax(1) if label % 2]  # each begins an entity
        got = [each["entity_group"] for each in find(text)]
        assert got == kinds
        found += len(got)
    assert found


@pytest.mark.sampled("gpt2-lm")
@pytest.mark.parametrize("kind", ["roberta-mlm", "gpt2-lm"])
def test_a_graft_of_a_language_model_labels_words_unless_told_otherwise(
    data: Path, model_directory, tmp_path: Path, kind: str
) -> None:
    words = ["--data", str(data), "--model", str(model_directory(kind)), "--steps", "1", "--sparsity", "0.1"]
    assert cli.main(["graft", "people", *words, "--readout", "auto", "--out", str(tmp_path / "graft")]) == 0
    assert json.loads((tmp_path / "graft" / "results.json").read_text())["model"]["readout"] == "linear"


def test_a_batch_of_many_tasks_refuses_words(run: Path) -> None:
    predictor = Predictor.of_run(run)
    rows = tagged_task("people", PEOPLE, train=160).test.take([3])
    ids = torch.tensor(predictor.loaded.encoder(predictor.definition("people"))(rows)[0])
    switch = LedgerSwitch(predictor.ledger, predictor.loaded.model.backbone)
    with pytest.raises(UsageError, match="Task 'people' labels words, and a batch of many tasks has one label a row"):
        MixedBatchModel(predictor.loaded.model, switch).answer([ids], ["people"])


@pytest.mark.sampled(share=0.3)
def test_a_token_classifier_fine_tuned_elsewhere_is_grafted(
    arguments: list[str], tmp_path: Path, model_directory
) -> None:
    """Its F1 is that of the graft from which it was made, and a region of all entries restores it exactly."""
    first, model, again = tmp_path / "first", tmp_path / "model", tmp_path / "again"
    base = str(model_directory("bert"))
    whole = ["1" if word == "0.1" else word for word in arguments]
    assert cli.main(["graft", "people", *whole, "--out", str(first)]) == 0
    assert cli.main(["apply", str(first), "--model", base, "--out", str(model)]) == 0
    words = ["--data", arguments[1], "--model", base, "--fine-tuned", str(model), "--sparsity", "1"]
    assert cli.main(["graft", "people", *words, "--set", "mask_steps=0", "--out", str(again)]) == 0
    scores = [
        {run["strategy"]: run["matrix"][1] for run in json.loads((out / "results.json").read_text())["runs"]}
        for out in (first, again)
    ]
    assert (
        scores[1]["fine-tune"] == scores[1]["bare-graft"] == scores[0]["bare-graft"] and scores[0]["bare-graft"][0] > 0
    )


@pytest.fixture(scope="module")
def mixed_run(data: Path, model_directory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run over words, single texts, and words."""
    place = tmp_path_factory.mktemp("mixed")
    for name in ("people", "topics"):
        (place / name).symlink_to(data / name)
    (place / "mood").mkdir()
    for split in ("train", "validation", "test"):
        (place / "mood" / f"{split}.csv").write_text("text,label\n" + "a good film,1\na bad film,0\n" * 4)
    words = ["--data", str(place), "--model", str(model_directory("bert")), "--steps", "20", "--batch-size", "4"]
    more = ["--learning-rate", "2e-2", "--strategy", "grafting-continual", "--sparsity", "0.1", "--set", "mask_steps=1"]
    assert cli.main(["run", "people,mood,topics", *words, *more, "--out", str(place / "run")]) == 0
    return place / "run"


def test_a_server_answers_words_and_texts_at_once(mixed_run: Path) -> None:
    """Simultaneous requests for three tasks get the same answers as single requests."""
    pytest.importorskip("fastapi", reason="the server is not installed: pip install 'forgetfree[serve]'")
    from concurrent.futures import ThreadPoolExecutor

    from fastapi.testclient import TestClient

    from forgetfree.serve.server import application

    predictor, person = Predictor.of_run(mixed_run), PEOPLE["PER"][0]
    texts = [f"the film was {person}", json.dumps(["the", person]), "and was it"]
    longest = predictor.loaded.max_length - 2  # without the two special tokens of a row; each word is one token here
    with TestClient(application(predictor)) as client, ThreadPoolExecutor(4) as clients:
        assert [each["kind"] for each in client.get("/tasks").json()] == ["tokens", "single", "tokens"]
        asked = [
            *({"task": task, "texts": texts} for task in ("people", "mood", "topics")),
            {"task": "people", "texts": [person]},
            {"task": "people", "texts": ["film " * 300]},
        ]
        said = [answer.json() for answer in clients.map(lambda each: client.post("/predict", json=each), asked)]
        answer = client.post("/predict", json={"task": "topics", "texts": [" "]})
        assert answer.status_code == 422 and "Sentence 1: expected a list of words" in answer.json()["error"]["message"]
    for question, given in zip(asked, said, strict=True):
        expected = predictor.answer(question["task"], question["texts"])
        if question["task"] == "mood":
            assert [each["label"] for each in given["answers"]] == [each.label for each in expected]
            continue
        assert predictor.answer(question["task"], [words_of(text) for text in question["texts"]]) == expected
        for got, tagged in zip(given["answers"], expected, strict=True):
            assert (got["words"], got["tags"]) == (list(tagged.words), list(tagged.tags))
            assert got["probabilities"] == pytest.approx(tagged.probabilities, abs=1e-5)
            assert got["cut_tokens"] == tagged.cut_tokens == max(0, len(tagged.words) - longest)
            assert [each["text"] for each in got["entities"]] == [each.text for each in tagged.entities]


def test_a_ledger_of_the_run_tags_as_the_run_did(run: Path) -> None:
    predictor = Predictor.of_run(run)
    rows = tagged_task("topics", TOPICS, train=160).test
    logits = predictor.logits("topics", rows.texts)
    kept = load_file(run / "grafting-continual" / "seed-0" / "predictions.safetensors")
    assert torch.equal(logits, kept["topics/logits"]) and kept["topics/lengths"].tolist() == [
        len(text.split()) for text in rows.first
    ]
    tagged = predictor.answer("topics", [text.split() for text in rows.first])
    assert [tag for sentence in tagged for tag in sentence.tags] == [
        tagged_task("topics", TOPICS, train=160).task.labels[number] for number in logits.argmax(1).tolist()
    ]
