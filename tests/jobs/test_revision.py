"""A run on top of another equals, by the hashes of its files, a run that had the same tasks from the start."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from edited import change_config

import forgetfree
from forgetfree import Ledger, cli
from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.errors import UsageError
from forgetfree.jobs.checkpoints import LearnedStream
from forgetfree.strategies.grafting_continual import GraftingContinual

pytestmark = pytest.mark.long

#: Ledgers with unions, with reused entries, and with tasks that stand alone; and one model for all tasks.
STRATEGIES = ("grafting-continual", "packnet", "wsn", "bitfit", "merge-stitch")
TASKS = ("qnli", "ag_news", "sst2")
OPTIONS = ("--shots", "4", "--steps", "3", "--set", "learning_rate=0.3", "--sparsity", "0.01", "--set", "mask_steps=1")
#: Files that depend on the clock.
TIMED = (
    "history.jsonl",
    "outcome.json",
    "unit.json",
    "report.md",
    "report.html",
    "results.json",
)
MakeRun = Callable[..., Path]
AGAIN: dict[str, Any] = {"strategies": ("grafting-continual", "bitfit")}
LEDGER = Path("grafting-continual/seed-0/ledger.safetensors")


@pytest.fixture(scope="module")
def run(
    model_directory: Callable[[str], Path], data_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> MakeRun:
    """Return a cached run by ``forgetfree run``: ``run(*tasks, strategies=…, more=…)``."""
    made: dict[tuple[object, ...], Path] = {}

    def make(
        *tasks: str,
        strategies: tuple[str, ...] = STRATEGIES,
        options: tuple[str, ...] = OPTIONS,
        more: tuple[str, ...] = (),
    ) -> Path:
        key = (tasks, strategies, options, more)
        if key not in made:
            out = tmp_path_factory.mktemp("run") / "out"
            chosen = [word for name in strategies for word in ("--strategy", name)]
            places = ["--data", str(data_directory), "--model", str(model_directory("bert")), "--out", str(out)]
            with redirect_stdout(io.StringIO()):
                assert cli.main(["run", ",".join(tasks), *places, *chosen, *options, *more]) == 0
            made[key] = out
        return made[key]

    return make


def remove(run: Path, task: str, out: Path, *more: str) -> int:
    with redirect_stdout(io.StringIO()):
        return cli.main(["run", "--on", str(run), "--without", task, "--out", str(out), *more])


def extend(run: Path, tasks: str, out: Path, *more: str) -> int:
    with redirect_stdout(io.StringIO()):
        return cli.main(["run", tasks, "--on", str(run), "--out", str(out), *more])


@pytest.fixture(scope="module")
def removed(run: MakeRun, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the run of all tasks after one was taken back, made once: ``removed(task)``."""

    @cache
    def make(task: str) -> Path:
        out = tmp_path_factory.mktemp("removed") / "out"
        assert remove(run(*TASKS), task, out) == 0
        return out

    return make


def hashes(run: Path) -> dict[str, str]:
    """Return the SHA-256 of every file that does not depend on the clock; the JSON files of fine-tuned models do."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name not in TIMED]
    files = [path for path in files if path.parent.name != "fine-tuned" or path.suffix != ".json"]
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if not path.name.startswith(".") and path.name != "config.json"  # it contains the command
    }


def results(run: Path) -> Any:
    """Return results.json without seconds."""
    found = json.loads((run / "results.json").read_text())
    return found | {"runs": [{key: value for key, value in each.items() if key != "seconds"} for each in found["runs"]]}


def same(one: Path, other: Path) -> None:
    """Check that both runs have the same files and the same results."""
    assert hashes(one) == hashes(other)
    assert results(one) == results(other)
    ours, theirs = (json.loads((each / "config.json").read_text()) for each in (one, other))
    for config in (ours, theirs):
        del config["command"]
        config["run"]["data"] = config["run"]["model"] = ""  # they are relative to the directory
        config["run"]["readout"] = config["model"]["readout"]  # the readout chosen by ``auto``
    assert ours == theirs


@pytest.mark.sampled("ag_news")
@pytest.mark.parametrize("task", TASKS)
def test_it_is_the_run_without_the_task(run: MakeRun, removed: Callable[[str], Path], task: str) -> None:
    others, out = tuple(each for each in TASKS if each != task), removed(task)
    same(out, run(*others))
    for strategy in STRATEGIES:
        assert (out / strategy / "seed-0" / "ledger.safetensors").is_file()


def test_earlier_tasks_keep_every_bit_and_nothing_is_fine_tuned_again(
    run: MakeRun, removed: Callable[[str], Path]
) -> None:
    whole, out = run(*TASKS), removed("ag_news")
    unit = Path("grafting-continual/seed-0")
    before, after = (Ledger.load(each / unit / "ledger.safetensors") for each in (whole, out))
    assert after.tasks == ["qnli", "sst2"]
    assert torch.equal(before.records[0].owned.values, after.records[0].owned.values)
    assert before.records[0].owned.region == after.records[0].owned.region
    assert before.records[2].region == after.records[1].region  # γ of the task alone
    phases = [json.loads(line) for line in (out / unit / "history.jsonl").read_text().splitlines()]
    assert [each["task"] for each in phases if each["phase"] == "fine_tune"] == ["qnli"] * 3  # carried over
    assert {each["phase"] for each in phases if each["task"] == "sst2"} == {"localize", "train"}


def test_nothing_of_the_task_is_left(removed: Callable[[str], Path]) -> None:
    out = removed("ag_news")
    naming = {path.name for path in out.rglob("*") if path.is_file() and b"ag_news" in path.read_bytes()}
    assert naming <= {"config.json", "outcome.json"}  # only in the command
    for path in (out / "config.json", *out.glob("*/seed-0/outcome.json")):
        content = json.loads(path.read_text())
        del content["command"]
        assert "ag_news" not in json.dumps(content)
    assert not list(out.rglob("*ag_news*"))
    assert {path.name.partition("-")[0] for path in (out / "fine-tuned").glob("*.safetensors")} == {"qnli", "sst2"}


GRAFTING: dict[str, Any] = {"strategies": ("grafting-continual",)}


@pytest.mark.parametrize(
    "more",
    [
        ("region_start=pre-trained", "composition=alone"),
        ("region_start=pre-trained", "final_union=true"),
        ("region_from=movement", "composition=alone", "warm_start=true"),
    ],
    ids=" ".join,
)
def test_options_of_grafting_leave_the_run_without_the_task(
    run: MakeRun, tmp_path: Path, more: tuple[str, ...]
) -> None:
    how: dict[str, Any] = {**GRAFTING, "more": tuple(word for each in more for word in ("--set", each))}
    assert remove(run(*TASKS, **how), "ag_news", tmp_path / "out") == 0
    same(tmp_path / "out", run("qnli", "sst2", **how))


@pytest.mark.sampled(share=0.15)
def test_one_that_is_cut_short_goes_on(
    run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, expected, out = run(*TASKS, **AGAIN), run("ag_news", "sst2", **AGAIN), tmp_path / "out"
    learn, begin, cut, learned = LearnedStream.keep, GraftingContinual.begin, [1], list[str]()

    def learning(self: LearnedStream, done: int) -> None:
        learn(self, done)
        if done in cut:
            raise KeyboardInterrupt

    def beginning(self: GraftingContinual, task: Any) -> Any:
        learned.append(task.name)
        return begin(self, task)

    monkeypatch.setattr(LearnedStream, "keep", learning)
    monkeypatch.setattr(GraftingContinual, "begin", beginning)
    assert remove(whole, "qnli", out) == 1
    told = capsys.readouterr().err
    assert "Trained again: ag_news, sst2 (grafting-continual); nothing (bitfit)\n" in told
    assert "0 of 2 units finished" in told
    cut.clear()
    assert remove(whole, "qnli", out) == 2
    assert "or resume that run with --resume" in capsys.readouterr().err
    assert remove(run("qnli", "ag_news", **AGAIN), "qnli", out, "--resume") == 2
    assert "these differ: stream" in capsys.readouterr().err
    assert remove(whole, "qnli", tmp_path / "nowhere", "--resume") == 2
    assert "There is nothing to resume" in capsys.readouterr().err
    learned.clear()
    for begins in (["sst2"], []):  # the second time, all is done
        assert remove(whole, "qnli", out, "--resume") == 0
        assert learned == begins
        assert hashes(out) == hashes(expected)
        assert results(out)["runs"] == results(expected)["runs"]
        learned.clear()


def test_other_rows_than_those_of_the_run_are_refused(
    run: MakeRun, data_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = shutil.copytree(data_directory, tmp_path / "data"), tmp_path / "out"
    lines = (data / "sst2" / "train.jsonl").read_text().splitlines(keepends=True)
    (data / "sst2" / "train.jsonl").write_text("".join(lines[:-1]))
    assert remove(run(*TASKS), "qnli", out, "--data", str(data)) == 1
    assert "data of 'sst2' changed since. Restore the old files" in capsys.readouterr().err
    assert not out.exists()


def test_what_keeps_no_ledger_is_trained_again(run: MakeRun, tmp_path: Path) -> None:
    how: dict[str, Any] = {"strategies": ("bitfit", "continual-ft", "ewc"), "options": OPTIONS[:6]}
    assert remove(run("sst2", "qnli", **how), "qnli", tmp_path / "out") == 0
    same(tmp_path / "out", run("sst2", **how))


def test_what_is_trained_again_is_named_before_and_in_a_dry_run(
    run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategies = ("bitfit", "grafting-continual")
    told = "Trained again: nothing (bitfit); sst2 (grafting-continual)\n"
    words = [
        "run",
        "--on",
        str(run(*TASKS, strategies=strategies)),
        "--without",
        "ag_news",
        "--out",
        str(tmp_path / "out"),
    ]
    assert cli.main([*words, "--check"]) == 0
    assert told in capsys.readouterr().out
    assert cli.main(words) == 0
    assert told in capsys.readouterr().err


@pytest.mark.sampled(share=0.15)
def test_where_the_task_is_withheld_all_is_trained_again(run: MakeRun, tmp_path: Path) -> None:
    how: dict[str, Any] = {"strategies": ("grafting-continual",), "more": ("--set", "scenario=class")}
    assert remove(run(*TASKS, **how), "sst2", tmp_path / "out") == 0
    same(tmp_path / "out", run("qnli", "ag_news", **how))


def test_what_cannot_be_taken_back_is_refused(run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, out = run(*TASKS), tmp_path / "out"

    def refusal(code: int, run: Path, task: str, out: Path = out) -> str:
        assert remove(run, task, out) == code
        assert not out.exists() or any(out.iterdir())
        return capsys.readouterr().err

    assert "did not learn a task 'sst'. Did you mean 'sst2'?" in refusal(1, whole, "sst")
    assert "learned only 'sst2'" in refusal(1, run("sst2", strategies=("graft-retrain",)), "sst2")
    assert "is not empty" in refusal(2, whole, "sst2", whole)
    damaged = tmp_path / "damaged"
    shutil.copytree(whole, damaged)
    (damaged / "wsn/seed-0/scores.csv").write_text("")
    assert "is not finished, or its files have changed" in refusal(1, damaged, "sst2")


# -- Further tasks ---------------------------------------------------------------------------------------

#: Strategies that store a ledger, a model for each task, one model, adapters, or nothing.
KEPT = ("grafting-continual", "packnet", "fine-tune", "continual-ft", "lora", "ewc")
FEW = (*OPTIONS[:6], "--sparsity", "0.01")
GROWN: dict[str, Any] = {"strategies": KEPT, "options": FEW}


def test_further_tasks_are_learned_as_if_they_had_been_in_the_stream(
    run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, three, learned = run("qnli", **GROWN), run(*TASKS, **GROWN), list[tuple[str, str]]()
    train = ContinualStrategy.train

    def training(self: Any, experience: Any, *more: Any, **named: Any) -> Any:
        learned.append(
            (self.NAME if hasattr(self, "NAME") else type(self).__name__, self.stream.task_of(experience).name)
        )
        return train(self, experience, *more, **named)

    monkeypatch.setattr(ContinualStrategy, "train", training)
    assert extend(one, "ag_news,sst2", tmp_path / "out") == 0
    same(tmp_path / "out", three)
    again = {name for name, task in learned if task == "qnli"}
    assert len(again) == 1  # EWC stores nothing to continue from
    monkeypatch.undo()
    assert extend(run("qnli", "ag_news", **GROWN), "sst2", tmp_path / "again", "--jobs", "2") == 0
    assert hashes(tmp_path / "again") == hashes(three)


def test_a_warm_start_is_one_from_what_the_run_fine_tuned(run: MakeRun, tmp_path: Path) -> None:
    how: dict[str, Any] = {**GRAFTING, "more": ("--set", "region_from=movement", "--set", "warm_start=true")}
    assert extend(run("qnli", "ag_news", **how), "sst2", tmp_path / "out") == 0
    same(tmp_path / "out", run(*TASKS, **how))
    history = (tmp_path / "out/grafting-continual/seed-0/history.jsonl").read_text().splitlines()
    steps = [(each["task"], each["phase"], each["step"]) for each in map(json.loads, history)]
    assert len(steps) == len({*steps})  # qnli and ag_news are not fine-tuned again


def test_their_rows_may_lie_in_a_file_beside_those_of_the_run(
    run: MakeRun, data_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (data_directory / "sst2" / "train.jsonl").read_text()
    (tmp_path / "billing.jsonl").write_text(lines)
    one, out, file = run("qnli", **GRAFTING), tmp_path / "out", str(tmp_path / "billing.jsonl")
    with redirect_stdout(io.StringIO()):
        assert cli.main(["run", "--data", file, "--on", str(one), "--out", str(out)]) == 0
    assert Ledger.load(out / LEDGER).tasks == ["qnli", "billing"]
    command = ["run", "--config", str(out), "--out", str(tmp_path / "repeated")]
    with redirect_stdout(io.StringIO()):
        assert cli.main(command) == 0
    assert hashes(tmp_path / "repeated") == hashes(out)


def test_plain_flags_are_for_the_new_task_and_a_dry_run_says_what_is_trained(
    run: MakeRun, data_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = map(json.loads, (data_directory / "sst2" / "train.jsonl").read_text().splitlines())
    renamed = [{"message": row["text"], "priority": row["label"]} for row in rows]
    (tmp_path / "billing.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in renamed))
    one, out = run("qnli", strategies=("grafting-continual", "ewc")), tmp_path / "out"
    columns = ("--text-column", "message", "--label-column", "priority")
    words = ["run", "billing", "--data", str(tmp_path / "billing.jsonl"), *columns, "--on", str(one), "--out", str(out)]
    assert cli.main([*words, "--check"]) == 0
    units = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Unit: ")]
    assert len(units) == 2 and not out.exists()
    assert "grafting-continual/seed-0, 6 updates" in units[0] and units[0].endswith("; reused: qnli")
    assert "ewc/seed-0, 6 updates" in units[1] and "carried" not in units[1]  # 3 updates for each task
    assert cli.main(words) == 0
    assert Ledger.load(out / LEDGER).tasks == ["qnli", "billing"]
    section = json.loads((out / "config.json").read_text())["run"]
    assert (section["text_column"], section["label_column"]) == (["billing=message"], ["billing=priority"])
    capsys.readouterr()
    other = shutil.copytree(data_directory, tmp_path / "other")
    (other / "qnli" / "train.jsonl").write_text((other / "qnli" / "validation.jsonl").read_text())
    assert cli.main([*words[:-1], str(tmp_path / "not"), "--data", str(other), "--check"]) == 1
    assert "data of 'qnli' changed since" in capsys.readouterr().err


def test_only_the_units_that_are_carried_over_must_be_finished(
    run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = shutil.copytree(run("qnli", strategies=("bitfit", "fine-tune"), options=FEW[:6]), tmp_path / "base")
    (base / "fine-tune/seed-0/scores.csv").unlink()
    assert extend(base, "sst2", tmp_path / "out") == 1
    assert "fine-tune/seed-0 is not finished" in capsys.readouterr().err
    assert extend(base, "sst2", tmp_path / "out", "--strategy", "bitfit") == 0


def test_some_strategies_of_the_run_or_others_and_more_seeds(run: MakeRun, tmp_path: Path) -> None:
    whole = run(
        "qnli", "sst2", strategies=("bitfit", "fine-tune"), options=FEW[:6], more=("--seed", "0", "--seed", "1")
    )
    own = ("--set", "lora.rank=2")  # no strategy of the other run has this option
    base = run("qnli", strategies=("lora", "bitfit"), options=FEW[:6], more=own)
    more = ("--strategy", "bitfit", "--strategy", "fine-tune", "--seed", "0", "--seed", "1")
    assert extend(base, "sst2", tmp_path / "out", *more) == 0
    assert hashes(tmp_path / "out") == hashes(whole)


@pytest.mark.sampled(share=0.15)
def test_tasks_that_are_answered_before_they_are_learned_have_the_same_scores(run: MakeRun, tmp_path: Path) -> None:
    how: dict[str, Any] = {
        "strategies": ("grafting-continual", "continual-ft"),
        "more": ("--set", "upper_triangle=true"),
    }
    assert extend(run("qnli", "ag_news", **how), "sst2", tmp_path / "out") == 0
    same(tmp_path / "out", run(*TASKS, **how))


def test_what_cannot_be_learned_on_top_is_refused(
    run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = run("qnli", **GRAFTING), tmp_path / "out"
    for code, message, words in (
        (1, "has already learned 'qnli'. To learn new data for it, give the task another name", ("qnli",)),
        (2, "Unknown task 'ag_new'. Did you mean 'ag_news'?", ("ag_new",)),
        (2, "steps cannot be given with --on: the run continues with its own options", ("sst2", "--steps", "9")),
        (2, "--config cannot be given with --on", ("sst2", "--config", str(base))),
        (2, "--without qnli removes a task, but sst2 would be added", ("sst2", "--without", "qnli")),
        (2, "'nowhere.csv' does not exist", ("sst2", "--data", "nowhere.csv", "--data", "nor.csv")),
    ):
        assert cli.main(["run", *words, "--on", str(base), "--out", str(out)]) == code
        assert message in capsys.readouterr().err
        assert not out.exists()
    assert cli.main(["run", "--on", str(base), "--out", str(out)]) == 2
    assert "Name one, or give its file with --data" in capsys.readouterr().err
    assert cli.main(["run", "--without", "qnli"]) == 2
    assert "Give it with --on RUN" in capsys.readouterr().err
    shutil.copytree(base, tmp_path / "older")
    change_config(tmp_path / "older", lambda config: config["versions"].update(torch="1.0"))
    assert extend(tmp_path / "older", "sst2", out) == 0  # the earlier answers are the same, bit for bit
    (changed,) = json.loads((out / "config.json").read_text())["changed"]
    assert changed.startswith("torch (was 1.0")


def test_python_has_the_same_words(run: MakeRun, tmp_path: Path) -> None:
    base = run("qnli", **GRAFTING)
    named = {"strategies": "grafting-continual", "progress": False}
    results = forgetfree.run("sst2", on=base, out=tmp_path / "more", **named)
    assert results.tasks == ["qnli", "sst2"]
    same(tmp_path / "more", run("qnli", "sst2", **GRAFTING))
    forgetfree.run(on=tmp_path / "more", without="sst2", out=tmp_path / "less", progress=False)
    same(tmp_path / "less", base)
    for message, arguments in (
        ("steps cannot be given with --on: the run continues with its own options", {"on": base, "steps": 9}),
        ("mask_steps cannot be given with --on", {"on": base, "mask_steps": 2}),
        ("needs the run that learned the task", {"without": "qnli"}),
        ("--without qnli removes a task, but sst2 would be added", {"on": base, "without": "qnli"}),
    ):
        with pytest.raises(UsageError, match=message):
            forgetfree.run("sst2", **arguments, progress=False)
