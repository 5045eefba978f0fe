"""`forgetfree.run` and `forgetfree.graft`: the Python calls do the same as the command line."""

from __future__ import annotations

import inspect
import json
import random
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from transformers import AutoModel

import forgetfree
from forgetfree import cli, registry
from forgetfree.cli.calls import GraftArguments
from forgetfree.cli.settings import Settings
from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.errors import DataError, RunError, UnknownNameError, UsageError
from forgetfree.files import StrPath
from forgetfree.jobs.config import RunConfig, RunOptions
from forgetfree.options import option
from forgetfree.results.table import Results
from forgetfree.training.training_options import TrainingOptions

Json = dict[str, Any]
BOTH = ["fine-tune", "grafting-continual"]


class NaiveOptions(TrainingOptions):
    """Training options with one more."""

    pull: float = option(0.0, "share of the way back", at_least=0, at_most=1)


class Naive(ContinualStrategy):
    """Trains everything, like a plug-in under development."""

    Options = NaiveOptions

    def begin(self, task: Any) -> Any:
        return self.everything(task)

    def answering(self, task: Any) -> Any:
        return nullcontext()


class Failing(Naive):
    """Raises when a task is committed."""

    def commit(self, task: Any, training: Any) -> None:
        raise ZeroDivisionError("of its own")


@pytest.fixture(scope="module")
def asked(data_directory: Path, model_directory: Any) -> Json:
    """Return settings of a run that takes a second or so."""
    common = {"data": data_directory, "model": model_directory("bert"), "shots": 4, "steps": 2, "threads": 1}
    return common | {"progress": False}


@pytest.fixture(scope="module")
def grafting(asked: Json) -> Json:
    return asked | {"sparsity": 0.05, "mask_steps": 1, "mask_batch_size": 8}


def words(asked: Json, *more: str) -> list[str]:
    """Return the same settings as command-line flags."""
    given = {key: value for key, value in asked.items() if key != "progress"}
    flags = {f"--{key}": given.pop(key) for key in ("data", "model", "shots", "steps", "sparsity") if key in given}
    sets = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    return [*(str(word) for pair in flags.items() for word in pair), *sets, *more]


@pytest.fixture(scope="module")
def by_command(grafting: Json, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run made by the command line, with two seeds."""
    out = tmp_path_factory.mktemp("command") / "out"
    both = [word for name in BOTH for word in ("--strategy", name)]
    seeds = ["--seed", "0", "--seed", "3"]
    assert cli.main(["run", tiny.STREAM, *words(grafting, *both, *seeds, "--out", str(out))]) == 0
    return out


@pytest.fixture(scope="module")
def in_memory(grafting: Json) -> Results:
    """Return the same run made from Python."""
    return forgetfree.run(tiny.STREAM.split(","), **grafting, strategies=BOTH, seeds=[0, 3])


# -- The same as the command line ---------------------------------------------------------------------------


@pytest.mark.sampled(share=0.3)
def test_it_writes_what_the_command_line_writes(by_command: Path, grafting: Json, tmp_path: Path) -> None:
    results = forgetfree.run(tiny.STREAM, **grafting, strategies=BOTH, seeds=[0, 3], out=tmp_path / "out")

    def files(out: Path) -> dict[str, bytes]:
        kept = [path for path in out.rglob("*") if path.name == "scores.csv" or path.suffix == ".safetensors"]
        return {path.relative_to(out).as_posix(): path.read_bytes() for path in kept}

    assert files(tmp_path / "out") == files(by_command) != {}
    assert repr(results).startswith("forgetfree: qnli, ag_news, sst2")
    ours, theirs = (json.loads((out / "config.json").read_text()) for out in (tmp_path / "out", by_command))
    assert ours["run"]["set"].keys() == theirs["run"]["set"].keys()
    assert "objects" not in ours
    # The command line repeats the run from its config.json.
    assert cli.main(["run", "--config", str(tmp_path / "out" / "config.json"), "--out", str(tmp_path / "again")]) == 0
    assert files(tmp_path / "again") == files(by_command)


def test_a_graft_is_that_of_the_command_line(grafting: Json, tmp_path: Path) -> None:
    results = forgetfree.graft("sst2", **grafting)
    assert cli.main(["graft", "sst2", *words(grafting, "--out", str(tmp_path / "out"))]) == 0
    theirs = forgetfree.Graft.load(tmp_path / "out" / "bare-graft/seed-0/graft.safetensors")
    assert torch.equal(results.graft().values, theirs.values)
    assert torch.equal(results.graft(0).region.indices, theirs.region.indices)
    pd.testing.assert_frame_equal(results.scores, forgetfree.load_results(tmp_path / "out").scores, check_exact=True)
    assert "bare-graft" in repr(results)
    with pytest.raises(RunError, match=r"bare-graft has no seed 7; its seeds are 0\."):
        results.graft(7)


@pytest.mark.parametrize(
    ("wrong", "line", "message"),
    [
        ({"strategies": ["grafting"]}, ["--strategy", "grafting"], "Unknown strategy 'grafting'"),
        (
            {"seeds": [1, 1]},
            ["--seed", "1", "--seed", "1"],
            "--seed names the same seed twice: 1, 1. Give each only once.",
        ),
        ({"learning_rat": 1.0}, ["--set", "learning_rat=1.0"], "Did you mean 'learning_rate'?"),
        ({"optimizer": "torch.optim:Sgd"}, ["--set", "optimizer=torch.optim:Sgd"], "cannot be imported: module"),
        (
            {"optimizer": "sdg"},
            ["--set", "optimizer=sdg"],
            "must be sgd or momentum or adamw or package.module:function, got 'sdg'",
        ),
        ({"model": "/nowhere/at/all"}, ["--model", "/nowhere/at/all"], "does not exist"),
    ],
)
def test_wrong_arguments_are_refused_in_the_same_words(
    asked: Json, tmp_path: Path, capsys: Any, wrong: Json, line: list[str], message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        forgetfree.run("sst2", **(asked | {"strategies": ["continual-ft"]} | wrong), out=tmp_path / "out")
    assert message in str(refused.value)
    assert not (tmp_path / "out").exists()
    flags = words(asked, "--strategy", "continual-ft", *line, "--out", str(tmp_path / "out"))
    last = tiny.last_of_each(flags, "--shots", "--model", *(["--strategy"] * ("--strategy" in line)))
    assert cli.main(["run", "sst2", *last]) == 2
    assert str(refused.value) in capsys.readouterr().err


def test_signatures_name_every_option_with_its_type() -> None:
    """Options of rows, runs, training and our strategies appear once; a graft takes nearly all options of a run."""
    known = {**RunConfig.model_fields, **RunOptions.model_fields}
    for name in registry.STRATEGIES:
        known |= registry.strategy(name).Options.model_fields
    types, named = get_type_hints(Settings), inspect.signature(forgetfree.run).parameters.keys() - {"settings"}
    in_python = {"strategy": "strategies", "seed": "seeds"}
    beside = {"tokenizer", "options", "on", "without", "resume", "jobs", "progress", "debug"}
    assert named | types.keys() == {in_python.get(key, key) for key in known.keys() - {"set", "objects"}} | beside
    assert not named & types.keys()
    as_given = {tuple[str, ...]: str | Sequence[str], str | Path | None: StrPath | None}
    for name, hint in types.items():
        assert hint == as_given.get(known[name].annotation, known[name].annotation), name
    lacks = {"stream", "strategies", "held_out", "on", "without"}
    assert GraftArguments.__annotations__.keys() == (named | types.keys()) - lacks


def test_an_argument_with_a_slip_is_told_the_right_name() -> None:
    with pytest.raises(UsageError, match=r"Unknown option 'shot'\..* Did you mean 'shots'\?"):
        forgetfree.run("sst2", data="demo", shot=16)
    with pytest.raises(UsageError, match=r"Unknown option 'sparsty'\. Did you mean 'sparsity'\? Known: [^?]*$"):
        forgetfree.run("sst2", data="demo", sparsty=0.1)
    with pytest.raises(UsageError, match=r"Unknown option 'text_columns'\. Did you mean 'text_column'\?"):
        forgetfree.run("sst2", data="demo", text_columns=["text"])
    with pytest.raises(UsageError, match=r"^strategy is strategies in Python\. Write strategies=\.$"):
        forgetfree.run("sst2", data="demo", strategy="bitfit")


def test_what_only_python_can_get_wrong(asked: Json) -> None:
    with pytest.raises(UsageError, match="Expected one task, got the 2 of 'qnli,sst2'"):
        forgetfree.graft("qnli,sst2", **asked)
    with pytest.raises(UsageError, match="expected a subclass of ContinualStrategy, got <class 'int'>"):
        forgetfree.run("sst2", **asked, strategies=[int])
    with pytest.raises(UsageError, match="No stream was given"):
        forgetfree.run(**asked)
    with pytest.raises(UsageError, match="No stream was given"):
        forgetfree.run(data={}, progress=False)
    for seeds in ({0, 1}, np.arange(2)):
        with pytest.raises(UsageError, match=r"--seed must be a whole number, got [{a]"):
            forgetfree.run("sst2", **asked, seeds=seeds)
    with pytest.raises(UsageError, match=r"--shots must be a whole number or none, got np\.int64"):
        forgetfree.run("sst2", **asked | {"shots": np.int64(2)})
    frame = pd.DataFrame({"text": ["a", "b"], "label": [0, 1]})
    for call in (forgetfree.run, forgetfree.graft):
        with pytest.raises(UsageError, match=r"as data=\{'NAME': ROWS\}, got a DataFrame\."):
            call("sst2", **asked | {"data": frame})
    with pytest.raises(UsageError, match=r"as data=\{'NAME': ROWS\}, got a DataFrame\."):
        forgetfree.load_stream("sst2", data=frame, model=asked["model"])  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"data\['demo'\]"):  # the given rows are read, not the registered stream
        forgetfree.run(["demo"], **asked | {"data": {"demo": frame.assign(text="")}})
    for none, flag in (("seeds", "seed"), ("strategies", "strategy")):
        with pytest.raises(UsageError, match=f"--{flag} names no {flag}. Give one, or leave it out."):
            forgetfree.run("sst2", **asked | {none: []})
    made = torch.optim.RMSprop(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r": optimizer=RMSprop\(…\) holds the parameters of one model"):
        forgetfree.run("sst2", **asked, optimizer=made)
    with pytest.raises(UsageError, match="resume=True needs out"):
        forgetfree.run("sst2", **asked, resume=True)
    with pytest.raises(UsageError, match=r"the strategy Naive \(a class\). Leave jobs at 1"):
        forgetfree.run("sst2", **asked, strategies=[Naive], jobs=2)


# -- In memory ----------------------------------------------------------------------------------------------


def test_nothing_stays_on_disk_and_all_that_results_need_is_there(
    grafting: Json, by_command: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    results = forgetfree.run(tiny.STREAM, **grafting, strategies=BOTH, seeds=3)
    assert list(tmp_path.iterdir()) == []
    assert "grafting-continual" in repr(results)
    ours, theirs = results.ledger(seed=3), forgetfree.load_results(by_command).ledger("grafting-continual", 3)
    assert ours.tasks == theirs.tasks == tiny.STREAM.split(",")
    for mine, other in zip(ours.records, theirs.records, strict=True):
        assert torch.equal(mine.owned.values, other.owned.values)
    assert repr(ours).startswith("Ledger(owned_entries={'qnli': ")
    assert repr(ours).endswith(", parents={'ag_news': 'qnli', 'sst2': 'ag_news'})")
    with pytest.raises(RunError, match=r"no ledger of fine-tune with seed 3\. Choose a strategy that stores one\."):
        results.ledger("fine-tune", 3)
    with pytest.raises(UnknownNameError):
        results.ledger("wsn")


def test_progress_and_recipe_are_told_on_stderr(asked: Json, capsys: Any) -> None:
    forgetfree.run("sst2", **(asked | {"progress": True}), strategies="continual-ft")
    told = capsys.readouterr()
    assert told.err.startswith("Running sst2\n") and "continual-ft" in told.err and told.out == ""
    forgetfree.run("sst2", **asked, strategies="continual-ft")
    assert capsys.readouterr() == ("", "")


def test_callers_settings_of_torch_and_random_generators_count_for_nothing_and_stay(
    grafting: Json, in_memory: Results
) -> None:
    """Another default dtype or disabled gradients change no bit, and the caller's random numbers stay the same."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)
    expected = random.random(), np.random.rand(), torch.rand(1, dtype=torch.float32).item()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.no_grad():
            results = forgetfree.run(tiny.STREAM, **grafting, strategies=["grafting-continual"], seeds=3)
            assert torch.get_default_dtype() == torch.bfloat16 and not torch.is_grad_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    for mine, other in zip(results.ledger(seed=3).records, in_memory.ledger(seed=3).records, strict=True):
        assert torch.equal(mine.owned.values, other.owned.values)


# -- Objects ------------------------------------------------------------------------------------------------


def test_a_class_under_development_is_a_strategy(asked: Json) -> None:
    own = {"Naive": {"pull": 0.5}, "continual-ft": {"batch_size": 4}}
    results = forgetfree.run("sst2,qnli", **asked, strategies=[Naive, "continual-ft"], options=own)
    assert results.strategies == ["Naive", "continual-ft"]
    theirs = forgetfree.run("sst2,qnli", **asked, strategies=["continual-ft"])
    assert results.matrix("Naive").equals(theirs.matrix("continual-ft"))
    with pytest.raises(UsageError, match=r"Unknown option 'Naive.push'"):
        forgetfree.run("sst2", **asked, strategies=[Naive], options={"Naive": {"push": 1}})


def test_a_strategy_that_fails_costs_no_results(asked: Json, capsys: Any) -> None:
    results = forgetfree.run("sst2", **asked, strategies=["continual-ft", Failing])
    assert results.strategies == ["continual-ft"]
    assert "Failing, seed 0: It stopped with ZeroDivisionError: of its own" in capsys.readouterr().err
    assert "Failed and left out: Failing" in repr(results) and "(results" not in repr(results)
    with pytest.raises(RunError, match=r"No unit finished\. Failing, seed 0: It stopped with ZeroDivisionError"):
        forgetfree.run("sst2", **asked, strategies=[Failing])
    with pytest.raises(ZeroDivisionError):
        forgetfree.run("sst2", **asked, strategies=[Failing], debug=True)


def test_what_no_file_can_name_is_recorded_and_not_repeated_from_the_file(
    asked: Json, tmp_path: Path, capsys: Any
) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(parameters, lr=1e-3)

    out, call = tmp_path / "out", asked | {"strategies": [Naive], "optimizer": make, "schedule": lambda done: 0.5**done}
    first = forgetfree.run("sst2", **call, out=out)
    config = json.loads((out / "config.json").read_text())
    here = f"{__name__}:test_what_no_file_can_name_is_recorded_and_not_repeated_from_the_file.<locals>"
    assert config["objects"] == [
        "the strategy Naive (a class)",
        f"optimizer={here}.make (a function)",
        f"schedule={here}.<lambda> (a function)",
    ]
    assert config["run"]["set"]["optimizer"] == config["options"]["Naive"]["optimizer"] == f"{here}.make"
    assert cli.main(["run", "--config", str(out / "config.json"), "--out", str(tmp_path / "again")]) == 2
    assert "cannot be repeated from this file alone, because it was started from Python" in capsys.readouterr().err
    assert cli.main(["run", "sst2", *words(asked, "--strategy", "continual-ft", "--resume", "--out", str(out))]) == 2
    assert "was started from Python with the strategy Naive (a class), optimizer=" in capsys.readouterr().err
    longer = forgetfree.run("sst2", **call, out=out, resume=True, seeds=[0, 1])
    assert longer.matrix("Naive").equals(first.matrix("Naive")) and longer.matrix("Naive", 1).shape == (2, 1)


def test_a_model_in_memory_goes_to_what_copies_it_for_every_seed(
    asked: Json, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    from forgetfree.cli import hub
    from forgetfree.models import loading

    rows = [{"text": f"the film is {word} {i}", "label": i % 2} for i, word in enumerate(["dull", "lovely"] * 20)]
    given = asked | {"data": {"sst2": rows}, "strategies": "continual-ft", "seeds": [0, 1]}
    with pytest.raises(UsageError, match="Any other network learns an Avalanche benchmark"):
        forgetfree.run(
            **given | {"data": {"sst2": (torch.zeros(4, 2), torch.arange(4) % 2)}, "model": torch.nn.Linear(2, 2)}
        )
    network, told = AutoModel.from_pretrained(asked["model"]), []
    load_model = loading.load_model
    monkeypatch.setattr(
        loading,
        "load_model",
        lambda model, readout, tokenizer=None, **how: (
            told.append((model, tokenizer)) or load_model(str(asked["model"]), readout, **how)
        ),
    )
    monkeypatch.setattr(hub, "go_offline_if_cut_off", lambda: told.append("the hub"))
    forgetfree.run(**given | {"model": network, "tokenizer": "its own"}, out=tmp_path / "out")
    assert told == [(network, "its own")] * 2
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["objects"] == ["data in memory", "a BertModel in memory"] and config["run"]["stream"] == "sst2"
    monkeypatch.undo()
    assert cli.main(["predict", str(tmp_path / "out"), "--task", "sst2", "x"]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("forgetfree: error: The model was a BertModel in memory, which")
    )


# -- Optimisers of the user -------------------------------------------------------------------------------------


def test_a_class_of_optimisers_gets_the_rates_and_can_be_repeated(grafting: Json, tmp_path: Path) -> None:
    """An optimiser given by name on the command line or as a class from Python gives the same scores."""
    rates = {"learning_rate": 1e-3, "readout_learning_rate": 1e-2}
    results = forgetfree.run(
        "sst2", **grafting, **rates, strategies=BOTH, optimizer=torch.optim.RMSprop, out=tmp_path / "a"
    )
    line = words(grafting | rates | {"optimizer": "torch.optim:RMSprop"}, "--out", str(tmp_path / "b"))
    both = [word for name in BOTH for word in ("--strategy", name)]
    assert cli.main(["run", "sst2", *both, *line]) == 0
    assert results.scores.equals(forgetfree.load_results(tmp_path / "b").scores)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["run"]["set"]["optimizer"] == "torch.optim.rmsprop:RMSprop" and "objects" not in config
    assert cli.main(["run", "--config", str(tmp_path / "a" / "config.json"), "--out", str(tmp_path / "c")]) == 0
