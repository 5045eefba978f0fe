"""Ledgers, grafts, models and data of the hub, by the real client, against a server on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hub_server import Hub, hub_server, point_at
from huggingface_hub import constants

from forgetfree import Ledger, Predictor, cli
from forgetfree.errors import GraftError, HubError, LedgerError, UsageError
from forgetfree.ledger import Record
from forgetfree.ledger.graft import Graft


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub_server(monkeypatch, tmp_path / "cache") as server:
        yield server


@pytest.fixture(scope="module")
def run(model_directory: Callable[[str], Path], data_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `forgetfree run` writes."""
    out = tmp_path_factory.mktemp("made") / "run"
    how = [
        "--data",
        str(data_directory),
        "--model",
        str(model_directory("bert-pooler")),
        "--shots",
        "4",
        "--steps",
        "2",
    ]
    strategy = ["--strategy", "grafting-continual", "--sparsity", "0.05"]
    assert cli.main(["run", "qnli,sst2", *how, *strategy, "--out", str(out)]) == 0
    return out


@pytest.fixture
def ledger(run: Path) -> Ledger:
    return Ledger.load(run / "grafting-continual" / "seed-0" / "ledger.safetensors")


def test_a_ledger_goes_there_and_back(
    hub: Hub, ledger: Ledger, run: Path, model_directory: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """With a card, and the commands take it by its name."""
    assert f"{hub.endpoint}/me/two/commit/" in str(ledger.push_to_hub("me/two", private=True))
    files = hub.repositories["models/me/two"]
    assert files.keys() == {"README.md", "config.json", "ledger.safetensors"} and hub.private == {"models/me/two"}
    card = files["README.md"].decode()
    about = yaml.safe_load(card.split("---")[1])
    assert about["library_name"] == "forgetfree" and {"forgetfree", "ledger"} <= {*about["tags"]}
    assert '    {"task": "sst2", "labels": ["negative", "positive"], "entries": ' in card and ledger.fingerprint in card
    again = Ledger.from_pretrained("me/two")
    assert (again.tasks, again.fingerprint, again.owned()) == (["qnli", "sst2"], ledger.fingerprint, ledger.owned())
    model, capture = str(model_directory("bert-pooler")), capsys.readouterr
    capture()
    assert cli.main(["predict", "me/two", "--task", "sst2", "--model", model, "--json", "a lovely film"]) == 0
    (expected,) = Predictor.of_run(run).answer("sst2", ["a lovely film"])
    assert json.loads(capture().out)["probabilities"] == expected.probabilities
    assert cli.main(["ledger", "show", "me/two", "--json"]) == 0
    assert [each["task"] for each in json.loads(capture().out)["tasks"]] == ["qnli", "sst2"]
    assert cli.main(["ledger", "verify", "me/two", "--model", model]) == 0


def test_a_graft_goes_there_and_back(
    hub: Hub, ledger: Ledger, tmp_path: Path, model_directory: Callable[[str], Path]
) -> None:
    graft, model = ledger.graft("sst2"), str(model_directory("bert-pooler"))
    graft.push_to_hub("me/films")
    again = Graft.from_pretrained("me/films")
    assert again.region == graft.region and again.values.equal(graft.values) and again.origin == graft.origin
    graft.save(tmp_path / "graft.safetensors")
    for source, out in ((str(tmp_path / "graft.safetensors"), "one"), ("me/films", "two")):
        assert cli.main(["apply", source, "--model", model, "--out", str(tmp_path / out)]) == 0
    one, two = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("one", "two"))
    assert one == two


def test_a_directory_holds_the_same_as_a_repository(ledger: Ledger, tmp_path: Path) -> None:
    for _ in range(2):  # it may be written again
        ledger.save_pretrained(tmp_path / "two")
    assert Ledger.from_pretrained(tmp_path / "two").owned() == ledger.owned()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"config\.json belongs to something else"):
        ledger.save_pretrained(tmp_path)


def test_names_of_others_stay_names_in_the_card(ledger: Ledger) -> None:
    first = ledger.records[0]
    assert first.definition is not None
    bad = replace(first.definition, name="a`b|c\nd<img src=x>[e](http://f){{ 7 * 7 }}", labels=("---\n# x", "```"))
    named = Ledger(ledger.space, ledger.fingerprint, "alone", ledger.binding)
    named.append(Record(bad.name, first.region, first.owned, 0.1, first.readout, definition=bad, classes=(0, 1)))
    (line,) = [line for line in str(named.generate_model_card()).splitlines() if "img" in line]
    assert line.startswith("    {") and json.loads(line)["labels"] == ["---\n# x", "```"]
    assert json.loads(line)["task"] == bad.name


def test_a_damaged_file_and_one_of_another_format_are_refused(
    hub: Hub, ledger: Ledger, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (run / "grafting-continual" / "seed-0" / "ledger.safetensors").read_bytes()
    changed = bytearray(whole)
    changed[-1] ^= 1
    hub.repositories["models/me/odd"] = {"ledger.safetensors": bytes(changed), "config.json": b'{"space": 1}'}
    with pytest.raises(LedgerError, match="not a sound ledger"):
        Ledger.from_pretrained("me/odd")
    hub.repositories["models/me/graft"] = {"graft.safetensors": whole, "model.pkl": b"", "code.py": b""}
    with pytest.raises(GraftError, match="is no graft: expected the format"):
        Graft.from_pretrained("me/graft")
    assert cli.main(["apply", "me/graft", "--model", "minilm", "--out", "nowhere"]) == 1
    assert not [each for each in hub.asked if "model.pkl" in each or "code.py" in each]


def test_refusals_of_the_hub_are_explained(
    hub: Hub, ledger: Ledger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(name: str) -> str:
        assert cli.main(["ledger", "show", name]) == 1
        error = capsys.readouterr().err
        assert error.count("forgetfree: error: ") == 1 and "Traceback" not in error
        return error

    assert "There is no me/none here, and none on the hub that you may see" in refusal("me/none")
    hub.repositories["models/me/else"] = {"model.safetensors": b""}
    assert "me/else holds neither a ledger.safetensors nor a graft.safetensors" in refusal("me/else")
    with pytest.raises(HubError, match="has no such revision"):
        ledger.push_to_hub("me/two")
        Ledger.from_pretrained("me/two", revision="v2")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        point_at(f"http://127.0.0.1:{closed.getsockname()[1]}", monkeypatch)
    assert "me/new is not here, and cannot be read from the hub" in refusal("me/new")
    assert constants.HF_HUB_OFFLINE
    assert cli.main(["ledger", "show", "me/else/more"]) == 1 and cli.main(["ledger", "show", "nosuch"]) == 1


#: The card of a data set with configurations, as GLUE's is.
GLUE = """---
dataset_info:
- config_name: sst2
  features:
  - {name: sentence, dtype: string}
  - {name: label, dtype: {class_label: {names: {'0': negative, '1': positive}}}}
  - {name: idx, dtype: int32}
configs:
- config_name: sst2
  data_files: [{split: train, path: sst2/train-*}, {split: validation, path: sst2/validation-*}]
---
"""


@pytest.mark.sampled(share=0.4)
def test_a_stream_of_the_hub_is_learned_on_a_model_of_the_hub(
    hub: Hub, tmp_path: Path, model_directory: Callable[[str], Path]
) -> None:
    """In a process of its own, whose client finds the hub by HF_ENDPOINT."""
    words = ["a lovely film", "an awful film", "the story was lovely", "the story was awful"]
    texts = pa.array(words * 10)
    glue = pa.table({"sentence": texts, "label": pa.array([1, 0] * 20), "idx": pa.array(range(40), pa.int32())})
    news = pa.table({"text": texts, "label": pa.array([0, 1, 2, 3] * 10)})
    (tmp_path / "glue/sst2").mkdir(parents=True)
    (tmp_path / "news/data").mkdir(parents=True)
    (tmp_path / "glue/README.md").write_text(GLUE)
    for split in ("train", "validation"):
        pq.write_table(glue, tmp_path / f"glue/sst2/{split}-00000-of-00001.parquet")
    for split in ("train", "test"):
        pq.write_table(news, tmp_path / f"news/data/{split}-00000-of-00001.parquet")
    hub.put("datasets/nyu-mll/glue", tmp_path / "glue")
    hub.put("datasets/fancyzhx/ag_news", tmp_path / "news")
    hub.put("models/me/tiny", model_directory("bert"))
    clean = {name: value for name, value in os.environ.items() if "proxy" not in name.lower() and name[:3] != "HF_"}
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}

    def forgetfree(*words: str, **more: str) -> None:
        command = [sys.executable, "-m", "forgetfree", *words]
        done = subprocess.run(command, env=clean | variables | more, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr

    how = ["run", "sst2,ag_news", "--data", "hub", "--model", "me/tiny", "--shots", "4", "--steps", "2"]
    forgetfree(*how, "--strategy", "grafting-continual", "--sparsity", "0.05", "--out", "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert [task["name"] for task in config["tasks"]] == ["sst2", "ag_news"]
    # What was read once is there without the hub.
    forgetfree(*how, "--strategy", "continual-ft", "--out", "again", HF_HUB_OFFLINE="1")
