"""The demo tasks: their rows are the same everywhere."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from forgetfree.data.demo import TAGGED, TASKS, TEXTS, load
from forgetfree.data.streams import STREAMS
from forgetfree.jobs.config import RunConfig
from forgetfree.jobs.option_file import read_options

#: SHA-256 of the rows of each task. These rows were checked when they were pinned: no row occurs twice, and no name is in two
#: splits; a bag of words, one answer to all rows, and the answer of the most similar row score low.
ROWS_SHA256 = {
    "qnli": "4d52e257aff62e8cf09a3a5f15b84af17da1110939080b5f98b3ce69f3dcfc26",
    "ag_news": "5533eeb2f717bfe498d8ec58950f9cda5f7e87260a3ac1deb2f47c3424cdefd6",
    "sst2": "3439f9bf98724d0c3e0a45a5d8c236649eb3a908805438a33bbad6ea1a1bd8bb",
    "who_did_it": "5a01e78698893dd3e10a8b1edfbcd434679470394a49a9f470176d819241c242",
    "was_it_kind": "928609912c55b7bf47035ce48faa7fb8ccf81508e2b8fd00f6022179ecea155d",
    "ner_people_places": "70644d185465bc8d6141aad8a824cefd4d6cf5fff0b162c20a3410bbfeb6adde",
    "ner_products": "8c3d38983c50429f5a3b5e06cfff3042bfca3d8a8fe034724fc3a6325005e1af",
    "when_is_it": "f66c791d6a60cd14068c0f8ba4e0b16189dc104e4685be1b51612cc317fb782a",
    "who_and_where": "2ca2f7067226656f52f6d37df31ecafa41303ad96e7dad92c034b9be1f328526",
    "in_one_line": "3c28d1fc70e51df37826e77f6977ac9cb8dac5d5a983d2a86b5a087949b7f9af",
}


def test_unknown_task_names_the_known() -> None:
    with pytest.raises(KeyError, match=r"no task 'mnli'\. It has: qnli, ag_news, sst2, who_did_it"):
        load("mnli")


@pytest.mark.parametrize("task", ROWS_SHA256)
def test_rows_are_pinned(task: str) -> None:
    rows = json.dumps(load(task), ensure_ascii=True)
    assert hashlib.sha256(rows.encode()).hexdigest() == ROWS_SHA256[task]


def test_streams_are_of_these_tasks() -> None:
    assert (*TASKS, *TAGGED, *TEXTS) == tuple(ROWS_SHA256)
    assert (STREAMS["ner-demo"], STREAMS["generation-demo"]) == (TAGGED, TEXTS)


# -- The run: make demo ----------------------------------------------------------------------------------


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments by which the Makefile runs the demo, without ``--out``, in the repository's directory."""
    repository = Path(__file__).parents[2]
    monkeypatch.chdir(repository)
    (line,) = re.findall(r"/forgetfree (run .*) --out ", (repository / "Makefile").read_text(encoding="utf-8"))
    return line.split()


def test_make_demo_gives_all_strategies_the_same_training(typed: list[str]) -> None:
    run, flag, file, *how = typed
    assert (run, flag, *how) == ("run", "--config", "--jobs", "auto")
    config = RunConfig.of(read_options(Path(file)))
    assert (config.stream, config.data, config.model) == ("demo", "demo", "minilm")
    assert STREAMS["demo"] == ("who_did_it", "ag_news", "was_it_kind")
    options = config.check().options
    assert list(options) == ["fine-tune", "continual-ft", "grafting-continual"]
    alike = ("steps", "batch_size", "optimizer", "learning_rate", "readout_learning_rate", "schedule", "dropout")
    for name in alike:
        assert len({getattr(each, name) for each in options.values()}) == 1, name
