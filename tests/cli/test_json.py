"""``--json`` and ``--csv``: stdout has only the output for programs, with the content of the tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forgetfree import cli, recipes, registry
from forgetfree.ledger.ledger import Ledger


@pytest.fixture(scope="module")
def runs(data_directory: Path, model_directory: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two runs with different shots, and a graft."""
    root = tmp_path_factory.mktemp("json")
    given = [
        "--data",
        str(data_directory),
        "--model",
        str(model_directory("bert")),
        "--steps",
        "2",
        "--sparsity",
        "0.01",
    ]
    given += ["--set", "mask_steps=1"]
    for out, shots in (("few", "2"), ("many", "4")):
        words = ["run", "qnli,sst2", "--strategy", "grafting-continual", "--shots", shots, "--out", str(root / out)]
        assert cli.main([*words, *given]) == 0
    assert cli.main(["graft", "sst2", "--shots", "4", "--out", str(root / "graft"), *given]) == 0
    return root


@pytest.fixture
def read(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs a command and returns its JSON."""

    def perform(*words: object) -> Any:
        assert cli.main(list(map(str, words))) == 0
        told = capsys.readouterr()
        assert told.err == ""
        return json.loads(told.out)

    return perform


def test_lists(read: Any) -> None:
    assert [each["name"] for each in read("list", "strategies", "--json")] == list(registry.strategies())
    (grafting,) = [
        each for each in read("list", "strategies", "--verbose", "--json") if each["name"] == "grafting-continual"
    ]
    assert grafting["forget_free"] is True
    assert {"sparsity", "steps"} <= {option["name"] for option in grafting["options"]}
    assert {"name": "qnli-agnews-sst2", "tasks": ["qnli", "ag_news", "sst2"]} in read("list", "streams", "--json")
    (sst2,) = [each for each in read("list", "tasks", "--json") if each["name"] == "sst2"]
    assert sst2 == {"name": "sst2", "kind": "single", "labels": ["negative", "positive"]}
    f1 = {"higher_is_better": True, "bounds": [0.0, 1.0]}
    assert [each for each in read("list", "metrics", "--json") if each["name"] == "f1" and f1.items() <= each.items()]
    assert [each["name"] for each in read("list", "models", "--json")] == list(recipes.MODELS)


def test_a_ledger(runs: Path, read: Any) -> None:
    path = runs / "few" / "grafting-continual" / "seed-0" / "ledger.safetensors"
    ledger, shown = Ledger.load(path), read("ledger", "show", path, "--json")
    assert shown["bytes"] == path.stat().st_size and shown["fingerprint"] == ledger.fingerprint
    assert shown["tasks"] == [
        {
            "task": each.task,
            "region": len(each.region),
            "owned": len(each.owned.region),
            "parent": each.parent,
            "readout": 34,
        }
        for each in ledger.records
    ]
    assert shown["owned"] == sum(task["owned"] for task in shown["tasks"])
    for by in ("layers", "roles"):
        assert [sum(each.values()) for each in shown[by]] == [task["region"] for task in shown["tasks"]]
    checked = read("ledger", "verify", path, "--json")
    assert (checked["sound"], checked["tasks"], checked["entries"]) == (True, 2, shown["owned"])


def test_a_report(runs: Path, read: Any, capsys: Any) -> None:
    told = read("report", runs / "few", runs / "many", "--format", "json")
    assert list(dict.fromkeys(each["label"] for each in told["runs"])) == [
        "grafting-continual (shots=2)",
        "grafting-continual (shots=4)",
    ]
    assert all(each["options"]["mask_steps"] == 1 for each in told["runs"])
    assert read("report", runs / "graft", "--format", "json")["runs"]
