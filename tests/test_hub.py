"""Ledgers, grafts, models and data on the hub, by the real client, against a server on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hub_server import Hub, hub_server

from forgetfree import Ledger, cli
from forgetfree.errors import HubError, UsageError
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.ledger import Record


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub_server(monkeypatch, tmp_path / "cache") as server:
        yield server


@pytest.fixture(scope="module")
def run(model_directory: Callable[[str], Path], data_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory written by `forgetfree run`."""
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


def test_a_ledger_and_a_graft_go_there_and_back(hub: Hub, ledger: Ledger) -> None:
    """A graft and a ledger are pushed and loaded again; the repository of the ledger has a model card."""
    graft = ledger.graft("sst2")
    graft.push_to_hub("me/films")
    back = Graft.from_pretrained("me/films")
    assert back.region == graft.region and back.values.equal(graft.values) and back.origin == graft.origin
    assert f"{hub.endpoint}/me/two/commit/" in str(ledger.push_to_hub("me/two"))
    files = hub.repositories["models/me/two"]
    assert files.keys() == {"README.md", "config.json", "ledger.safetensors"}
    card = files["README.md"].decode()
    about = yaml.safe_load(card.split("---")[1])
    assert about["library_name"] == "forgetfree" and {"forgetfree", "ledger"} <= {*about["tags"]}
    assert '    {"task": "sst2", "labels": ["negative", "positive"], "entries": ' in card and ledger.fingerprint in card
    again = Ledger.from_pretrained("me/two")
    assert (again.tasks, again.fingerprint, again.owned()) == (["qnli", "sst2"], ledger.fingerprint, ledger.owned())


def test_a_directory_holds_the_same_as_a_repository(ledger: Ledger, tmp_path: Path) -> None:
    for _ in range(2):  # it may be written twice
        ledger.save_pretrained(tmp_path / "two")
    assert Ledger.from_pretrained(tmp_path / "two").owned() == ledger.owned()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"config\.json belongs to something else"):
        ledger.save_pretrained(tmp_path)


def test_names_of_others_stay_names_in_the_card(ledger: Ledger) -> None:
    first = ledger.records[0]
    assert first.definition is not None
    bad = replace(first.definition, name="a`b|c\nd<img src=x>[e](http://f){{ 7 * 7 }}", labels=("---\n# x", "```"))
    named = Ledger(ledger.space, ledger.fingerprint, binding=ledger.binding)
    named.append(Record(bad.name, first.region, first.owned, 0.1, first.readout, definition=bad, classes=(0, 1)))
    (line,) = [line for line in str(named.generate_model_card()).splitlines() if "img" in line]
    assert line.startswith("    {") and json.loads(line)["labels"] == ["---\n# x", "```"]
    assert json.loads(line)["task"] == bad.name


def test_refusals_of_the_hub_are_explained(hub: Hub, ledger: Ledger) -> None:
    with pytest.raises(HubError, match=r"me/none cannot be read from the hub: .*\. Check the name and the revision"):
        Graft.from_pretrained("me/none")
    ledger.push_to_hub("me/two")
    with pytest.raises(HubError, match="me/two cannot be read from the hub: 404"):
        Ledger.from_pretrained("me/two", revision="v2")


#: The card of a data set with configurations, like GLUE's.
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


@pytest.mark.slow
@pytest.mark.sampled(share=0.3)
def test_a_stream_of_the_hub_is_learned_on_a_model_of_the_hub(
    hub: Hub, tmp_path: Path, model_directory: Callable[[str], Path]
) -> None:
    """The run is a process of its own, whose client finds the hub by HF_ENDPOINT."""
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
    # Files read once are in the cache and need no hub.
    forgetfree(*how, "--strategy", "continual-ft", "--out", "again", HF_HUB_OFFLINE="1")
