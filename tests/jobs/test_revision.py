"""A task that is taken back leaves the run that would have been without it, by the hashes of its files; one that is met again
gets a further version, and the first keeps every bit.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forgetfree import Ledger, Predictor, cli
from forgetfree.data.sources import load_tasks
from forgetfree.jobs.stream_learner import StreamCheckpoint
from forgetfree.json_file import sign
from forgetfree.strategies.grafting_continual import GraftingContinual
from forgetfree.training.single_task import SingleTask

pytestmark = pytest.mark.long

#: Unions, entries that later tasks use again, tasks that stand alone; and one model for all tasks.
STRATEGIES = ("grafting-continual", "packnet", "wsn", "bitfit", "merge-stitch")
TASKS = ("qnli", "ag_news", "sst2")
OPTIONS = ("--shots", "4", "--steps", "3", "--set", "learning_rate=0.3", "--sparsity", "0.01", "--set", "mask_steps=1")
#: What depends on the clock.
TIMED = (
    "history.jsonl",
    "seconds-per-task.json",
    "unit.json",
    "report.md",
    "report.html",
    "results.json",
    "audit.jsonl",
)
MakeRun = Callable[..., Path]
AGAIN: dict[str, Any] = {"strategies": ("grafting-continual", "bitfit")}
LEDGER = Path("grafting-continual/seed-0/ledger.safetensors")


@pytest.fixture(scope="module")
def run(
    model_directory: Callable[[str], Path], data_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> MakeRun:
    """``run(*tasks, strategies=…, more=…)``: what ``forgetfree run`` wrote, made once."""
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
                assert cli.main(["run", ",".join(tasks), *places, *chosen, *options, *more, "--quiet"]) == 0
            made[key] = out
        return made[key]

    return make


def remove(run: Path, task: str, out: Path, *more: str) -> int:
    with redirect_stdout(io.StringIO()):
        return cli.main(["ledger", "remove", str(run), "--task", task, "--out", str(out), "--quiet", *more])


@pytest.fixture(scope="module")
def removed(run: MakeRun, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``removed(task)``: the run of all tasks after one was taken back, made once."""

    @cache
    def make(task: str) -> Path:
        out = tmp_path_factory.mktemp("removed") / "out"
        assert remove(run(*TASKS), task, out) == 0
        return out

    return make


def hashes(run: Path) -> dict[str, str]:
    """The SHA-256 of every file that does not depend on the clock, as those do which stand beside fine-tuned models."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name not in TIMED]
    files = [path for path in files if path.parent.name != "fine-tuned" or path.suffix != ".json"]
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if not path.name.startswith(".") and path.name != "config.json"  # which says the command
    }


def results(run: Path) -> Any:
    """results.json without seconds."""
    found = json.loads((run / "results.json").read_text())
    del found["made_of"], found["checksum"]  # of seconds, too
    return found | {"runs": [{key: value for key, value in each.items() if key != "seconds"} for each in found["runs"]]}


def same(one: Path, other: Path) -> None:
    """Both hold the same files, and the same results."""
    assert hashes(one) == hashes(other)
    assert results(one) == results(other)
    ours, theirs = (json.loads((each / "config.json").read_text()) for each in (one, other))
    for config in (ours, theirs):
        del config["command"]
        config["run"]["data"] = config["run"]["model"] = ""  # relative to the directory
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
    assert before.records[2].region == after.records[1].region  # γ is that of the task alone
    phases = [json.loads(line) for line in (out / unit / "history.jsonl").read_text().splitlines()]
    assert [each["task"] for each in phases if each["phase"] == "fine_tune"] == ["qnli"] * 3  # taken over
    assert {each["phase"] for each in phases if each["task"] == "sst2"} == {"localize", "train"}


@pytest.mark.sampled(share=0.3)
def test_a_later_version_is_trained_again_without_the_first(run: MakeRun, tmp_path: Path) -> None:
    """Though tasks stand alone: a version starts from the readout of the one before it."""
    how: dict[str, Any] = {"strategies": ("grafting-continual",), "more": ("--set", "composition=alone")}
    out = tmp_path / "out"
    assert remove(run("qnli", "ag_news", "qnli", **how), "qnli@1", out) == 0
    assert hashes(out) == hashes(run("ag_news", *Ledger.load(out / LEDGER).tasks[1:], **how))


def test_nothing_of_the_task_is_left(removed: Callable[[str], Path]) -> None:
    out = removed("ag_news")
    naming = {path.name for path in out.rglob("*") if path.is_file() and b"ag_news" in path.read_bytes()}
    assert naming <= {"audit.jsonl", "config.json", "unit.json"}  # the latter two in the command alone
    for path in (out / "config.json", *out.glob("*/seed-0/unit.json")):
        content = json.loads(path.read_text())
        del content["command"]
        assert "ag_news" not in json.dumps(content)
    assert not list(out.rglob("*ag_news*"))
    assert {path.name.partition("-")[0] for path in (out / "fine-tuned").glob("*.safetensors")} == {"qnli", "sst2"}


GRAFTING: dict[str, Any] = {"strategies": ("grafting-continual",)}


def logged(run: Path) -> list[str]:
    """The logged steps of the one unit, without their seconds; a reused search stands before all else."""
    lines = (run / "grafting-continual/seed-0/history.jsonl").read_text().splitlines()
    return sorted(json.dumps(json.loads(line) | {"seconds": 0}) for line in lines)


@pytest.mark.sampled("ag_news")
@pytest.mark.parametrize("task", TASKS[:2])
def test_regions_of_later_tasks_are_not_sought_again(
    run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    whole, expected = run(*TASKS, **GRAFTING), run(*(each for each in TASKS if each != task), **GRAFTING)
    monkeypatch.setattr(SingleTask, "localized", lambda *_: pytest.fail("a region is sought again"))
    assert remove(whole, task, tmp_path / "out") == 0
    same(tmp_path / "out", expected)
    assert [line for line in logged(tmp_path / "out") if "fine_tune" not in line] == [
        line for line in logged(expected) if "fine_tune" not in line
    ]


@pytest.mark.sampled("localize_at=union")
@pytest.mark.parametrize(
    "more",
    [
        ("region_start=scaled", "composition=alone"),
        ("region_start=scaled", "final_union=true"),
        ("localize_at=union",),
    ],
    ids=" ".join,
)
def test_options_of_grafting_leave_the_run_without_the_task(
    run: MakeRun, tmp_path: Path, more: tuple[str, ...]
) -> None:
    how: dict[str, Any] = {**GRAFTING, "more": tuple(word for each in more for word in ("--set", each))}
    assert remove(run(*TASKS, **how), "ag_news", tmp_path / "out") == 0
    same(tmp_path / "out", run("qnli", "sst2", **how))


@pytest.mark.sampled(share=0.3)
def test_one_that_is_cut_short_goes_on(
    run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, expected = run("qnli", "ag_news", "sst2", "qnli", **AGAIN), run("qnli", "sst2", "qnli", **AGAIN)
    out = tmp_path / "out"
    learn, begin, cut, learned = StreamCheckpoint.learn, GraftingContinual.begin, [2], list[str]()

    def learning(self: StreamCheckpoint, done: int) -> None:
        learn(self, done)
        if done in cut:
            raise KeyboardInterrupt

    def beginning(self: GraftingContinual, task: Any) -> Any:
        learned.append(task.name)
        return begin(self, task)

    monkeypatch.setattr(StreamCheckpoint, "learn", learning)
    monkeypatch.setattr(GraftingContinual, "begin", beginning)
    assert remove(whole, "ag_news", out) == 1  # qnli is carried over, and sst2 is learned
    assert "goes on: grafting-continual seed 0 after 2 of 3 tasks" in capsys.readouterr().err
    cut.clear()
    assert remove(whole, "ag_news", out) == 2
    assert "--resume to go on with a cut remove" in capsys.readouterr().err
    other = run("qnli", "ag_news", "qnli", **AGAIN)
    assert remove(other, "ag_news", out, "--resume") == 2
    assert "these differ: stream" in capsys.readouterr().err
    assert remove(whole, "ag_news", tmp_path / "nowhere", "--resume") == 2
    assert "There is nothing to resume" in capsys.readouterr().err
    learned.clear()
    for begins in (["qnli@2"], []):  # the second time, nothing is left to do
        assert remove(whole, "ag_news", out, "--resume") == 0
        assert learned == begins
        assert hashes(out) == hashes(expected)
        assert results(out)["runs"] == results(expected)["runs"]
        assert len((out / LEDGER).with_name("audit.jsonl").read_text().splitlines()) == 1
        learned.clear()


@pytest.mark.sampled(share=0.4)
def test_where_tasks_stand_alone_neither_data_nor_model_are_needed(run: MakeRun, tmp_path: Path) -> None:
    whole, moved = run(*TASKS, strategies=("bitfit", "graft-retrain")), tmp_path / "moved"
    shutil.copytree(whole, moved)
    config = json.loads((moved / "config.json").read_text())
    config["run"] |= {"data": "/nowhere", "model": "/nowhere"}
    (moved / "config.json").write_text(json.dumps(sign(config)))
    assert remove(moved, "qnli", tmp_path / "out") == 0
    for strategy in ("bitfit", "graft-retrain"):
        unit = Path(strategy) / "seed-0"
        for file in ("ledger.safetensors", "predictions.safetensors", "scores.csv"):
            expected = run("ag_news", "sst2", strategies=("bitfit", "graft-retrain")) / unit / file
            assert (tmp_path / "out" / unit / file).read_bytes() == expected.read_bytes()


def test_what_is_left_out_is_trained_by_the_command_that_is_told(run: MakeRun, tmp_path: Path) -> None:
    how: dict[str, Any] = {"strategies": ("bitfit", "continual-ft"), "options": OPTIONS[:6]}
    out, said = tmp_path / "one out", io.StringIO()
    with redirect_stdout(said):
        line = ["ledger", "remove", str(run("sst2", "qnli", **how)), "--task", "qnli", "--out", str(out), "--quiet"]
        assert cli.main(line) == 0
        (told,) = re.findall(r"continual-ft seed 0\. forgetfree (.*) trains them", said.getvalue())
        assert cli.main([*shlex.split(told), "--quiet"]) == 0
    assert hashes(out / "continual-ft") == hashes(run("sst2", **how) / "continual-ft")


def test_options_of_what_is_left_out_are_told_with_its_command(run: MakeRun, tmp_path: Path) -> None:
    options = (*OPTIONS[:6], "--sparsity", "0.01", "--set", "region_steps=1")
    how: dict[str, Any] = {"strategies": ("bitfit", "lotto"), "options": options}
    out, said = tmp_path / "out", io.StringIO()
    with redirect_stdout(said):
        line = ["ledger", "remove", str(run("sst2", "qnli", **how)), "--task", "qnli", "--out", str(out), "--quiet"]
        assert cli.main(line) == 0
        (told,) = re.findall(r"lotto seed 0\. forgetfree (.*) trains them", said.getvalue())
        assert cli.main([*shlex.split(told), "--quiet"]) == 0
    expected = hashes(run("sst2", **how) / "lotto")  # where another unit has the floors
    assert expected and hashes(tmp_path / "out-others" / "lotto").items() >= expected.items()


@pytest.mark.sampled(share=0.3)
def test_where_the_task_is_withheld_all_is_trained_again(run: MakeRun, tmp_path: Path) -> None:
    how: dict[str, Any] = {"strategies": ("grafting-continual",), "more": ("--set", "scenario=class")}
    assert remove(run(*TASKS, **how), "sst2", tmp_path / "out") == 0
    same(tmp_path / "out", run("qnli", "ag_news", **how))


@pytest.mark.sampled(share=0.4)
def test_two_tasks_leave_two_lines_of_audit(run: MakeRun, removed: Callable[[str], Path], tmp_path: Path) -> None:
    whole, once, twice = run(*TASKS), removed("qnli"), tmp_path / "twice"
    assert remove(once, "sst2", twice) == 0
    same(twice, run("ag_news"))
    unit = Path("wsn/seed-0")
    first, second = (json.loads(line) for line in (twice / unit / "audit.jsonl").read_text().splitlines())
    assert [each["action"] for each in (first, second)] == ["remove", "remove"]
    assert (first["task"], first["trained_again"]) == ("qnli", ["ag_news", "sst2"])
    assert (second["task"], second["trained_again"]) == ("sst2", [])

    def digest(run: Path) -> str:
        return hashlib.sha256((run / unit / "ledger.safetensors").read_bytes()).hexdigest()

    ledgers = [each[when]["ledger.safetensors"]["sha256"] for each in (first, second) for when in ("before", "after")]
    assert ledgers == [digest(whole), digest(once), digest(once), digest(twice)]


def test_what_cannot_be_taken_back_is_refused(run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, out = run(*TASKS), tmp_path / "out"

    def refusal(code: int, run: Path, task: str, out: Path = out) -> str:
        assert remove(run, task, out) == code
        assert not out.exists() or any(out.iterdir())
        return capsys.readouterr().err

    assert "did not learn a task 'sst'. Did you mean 'sst2'?" in refusal(1, whole, "sst")
    assert "learned nothing but 'sst2'" in refusal(1, run("sst2", strategies=("graft-retrain",)), "sst2")
    without = run("qnli", "sst2", strategies=("continual-ft",), options=OPTIONS[:6])
    assert "keeps no ledger" in refusal(1, without, "sst2")
    assert "is not empty" in refusal(2, whole, "sst2", whole)
    assert "is a file" in refusal(2, whole / "wsn/seed-0/ledger.safetensors", "sst2")
    damaged = tmp_path / "damaged"
    shutil.copytree(whole, damaged)
    (damaged / "wsn/seed-0/scores.csv").write_text("")
    assert "is not finished, or its files are not as they were" in refusal(1, damaged, "sst2")


# -- A task met again ------------------------------------------------------------------------------------


def update(run: Path, task: str, out: Path, *more: str) -> int:
    with redirect_stdout(io.StringIO()):
        return cli.main(["ledger", "update", str(run), "--task", task, "--out", str(out), "--quiet", *more])


def test_every_version_keeps_its_bits_and_builds_on_what_was_learned_since(
    run: MakeRun, data_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = run("qnli", "ag_news", **AGAIN), run("qnli", "ag_news", "qnli", **AGAIN)
    ledger = Ledger.load(after / LEDGER)
    assert ledger.tasks == ["qnli", "ag_news", "qnli@2"]
    first, _, second = (set(record.owned.region.indices.tolist()) for record in ledger.records)
    assert second and not second & first  # new entries; the first version's are frozen, and in the union
    assert ledger.records[2].region == ledger.records[2].owned.region

    predictor, rows = Predictor.of_run(after), load_tasks("qnli", str(data_directory))[0].test
    for asked, exact in (("qnli@1", "qnli"), ("qnli", "qnli@2"), ("qnli@2", "qnli@2")):
        stored = load_file(after / "grafting-continual/seed-0/predictions.safetensors")[f"{exact}/logits"]
        assert torch.equal(predictor.logits(asked, rows), stored)
    assert not torch.equal(predictor.logits("qnli", rows), predictor.logits("qnli@1", rows))
    then = load_file(before / "grafting-continual/seed-0/predictions.safetensors")["qnli/logits"]
    assert torch.equal(predictor.logits("qnli@1", rows), then)
    (grafting, *_) = results(after)["runs"]
    assert grafting["summary"]["forgetting"] == 0

    capsys.readouterr()
    assert cli.main(["report", str(after), "--format", "json"]) == 0
    (table,) = (each for each in json.loads(capsys.readouterr().out)["report"]["tables"] if "Transfer" in each["title"])
    matrix = grafting["matrix"]
    shown = dict(zip(table["header"], table["rows"][0], strict=True))
    assert shown["BWT to qnli@2"].strip("*") == f"{100 * (matrix[3][2] - matrix[1][0]):.1f}"
    assert {shown[f"forgetting {task}"].strip("*") for task in ledger.tasks} == {"0.0"}


def test_an_update_is_a_run_that_names_the_task_again(run: MakeRun, tmp_path: Path) -> None:
    two, three, out = run("qnli", "ag_news", **AGAIN), run("qnli", "ag_news", "qnli", **AGAIN), tmp_path / "out"
    assert update(two, "qnli", out) == 0
    assert hashes(out) == hashes(three)
    assert results(out)["runs"] == results(three)["runs"]
    line = json.loads((out / LEDGER).with_name("audit.jsonl").read_text())
    assert (line["action"], line["task"], line["trained_again"]) == ("update", "qnli@2", ["qnli@2"])
    assert remove(out, "qnli@2", tmp_path / "back") == 0
    same(tmp_path / "back", two)
    assert remove(out, "qnli", tmp_path / "gone") == 0  # with all versions
    assert Ledger.load(tmp_path / "gone" / LEDGER).tasks == ["ag_news"]


def test_an_update_may_have_rows_of_its_own(
    run: MakeRun, data_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(data_directory / "qnli", tmp_path / "data" / "qnli")
    (train,) = (tmp_path / "data" / "qnli").glob("train.*")
    lines = train.read_text().splitlines(keepends=True)
    train.write_text("".join(lines[:-3]))
    two, out = run("qnli", "ag_news", **AGAIN), tmp_path / "out"
    assert update(two, "qnli", out, "--data", str(tmp_path / "data")) == 0
    rows = json.loads((out / "config.json").read_text())["data"]
    assert rows["qnli@2"]["fingerprint"] != rows["qnli"]["fingerprint"]
    capsys.readouterr()
    assert cli.main(["export", str(out), "--task", "qnli@1", "--out", str(tmp_path / "model")]) == 0
    for words, code, message in (
        (("qnly",), 1, "did not learn a task 'qnly'. Did you mean 'qnli'?"),
        (("qnli@4",), 1, "did not learn a task 'qnli@4'."),
        (("qnli", "--data", "/nowhere"), 2, "'/nowhere' does not exist"),
    ):
        assert update(two, words[0], tmp_path / "other", *words[1:]) == code
        assert message in capsys.readouterr().err
        assert not (tmp_path / "other").exists()
    shutil.copytree(two, tmp_path / "older")
    config = json.loads((tmp_path / "older" / "config.json").read_text())
    config["versions"]["torch"] = "1.0"
    (tmp_path / "older" / "config.json").write_text(json.dumps(sign(config)))
    assert update(tmp_path / "older", "qnli", tmp_path / "other") == 1
    assert "the version of torch (was 1.0" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_version_has_the_labels_of_the_first_and_may_have_few_rows_of_one(
    run: MakeRun, data_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two, out, place = run("qnli", "ag_news", **AGAIN), tmp_path / "out", tmp_path / "data"
    rows = [json.loads(line) for line in (data_directory / "qnli" / "train.jsonl").read_text().splitlines()]
    for folder in (place / "qnli", place / "qnli@2"):
        folder.mkdir(parents=True)
    rare = [row for row in rows if row["label"]][:5]  # of which one is a test row, and one for validation
    few = [row for row in rows if not row["label"]] + rare + [{**rare[0], "label": None}]
    (place / "qnli@2" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in few))
    skip = "--skip-bad-rows"
    for names, words, code, message in (
        (
            None,
            (),
            1,
            "expected an integer from 0, got nothing. Fix or remove the row. --skip-bad-rows leaves such rows out",
        ),
        (
            "qnli@2",
            (skip,),
            1,
            "'qnli@2' has the labels no, yes, and 'qnli' has entailment, not_entailment: they are no",
        ),
        ("qnli", (skip,), 1, "'qnli@2' has the labels no, yes, and 'qnli' has"),
        (
            None,
            (skip,),
            2,
            "3 training rows of label 'not_entailment', fewer than --shots 4. Give more rows of it by --data, or",
        ),
        (None, (skip, "--or-fewer"), 0, ""),
    ):
        for source in place.rglob("source.json"):
            source.unlink()
        if names:
            (place / names / "source.json").write_text('{"label_names": ["no", "yes"]}')
        assert update(two, "qnli", out, "--data", str(place), *words) == code
        assert message in capsys.readouterr().err
        assert out.exists() == (code == 0)
    assert results(out)["set"]["or_fewer"] == "true"


def test_one_model_for_all_tasks_is_trained_on_it_again(run: MakeRun) -> None:
    out = run("sst2", "qnli", "sst2", strategies=("continual-ft",), options=OPTIONS[:6])
    (entry,) = results(out)["runs"]
    assert [len(row) for row in entry["matrix"]] == [3] * 4
