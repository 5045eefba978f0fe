"""The command line in use: written files, messages, exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from edited import change_config

from forgetfree import __version__, cli, recipes, registry
from forgetfree.cli.calls import recipe_of
from forgetfree.jobs import progress
from forgetfree.jobs.config import RunConfig
from forgetfree.jobs.continuation import merged_config
from forgetfree.jobs.environment import quiet_libraries
from forgetfree.ledger.ledger import Ledger

TASKS = ["qnli", "ag_news", "sst2"]
STRATEGIES = ["fine-tune", "continual-ft", "grafting-continual"]


class Tiny:
    """Runs the command line on tiny data and a tiny model."""

    def __init__(self, data: Path, model: Path, root: Path) -> None:
        self.data, self.model, self.root = data, model, root

    def arguments(self, out: Path, *more: str, stream: str = "qnli,ag_news,sst2") -> list[str]:
        fixed = {"--data": self.data, "--model": self.model, "--shots": 4, "--steps": 3, "--sparsity": 0.01}
        given = [str(word) for flag, value in fixed.items() if flag not in more for word in (flag, value)]
        return ["run", stream, *given, "--out", str(out), *more]

    def run(self, out: Path, *more: str, stream: str = "qnli,ag_news,sst2") -> int:
        return cli.main(self.arguments(out, *more, stream=stream))


@pytest.fixture(scope="module")
def tiny_cli(data_directory: Path, model_directory, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(data_directory, model_directory("bert"), tmp_path_factory.mktemp("runs"))


#: Tasks are also evaluated before they are learned.
BEFORE = ("--set", "upper_triangle=true")


@pytest.fixture(scope="module")
def finished(tiny_cli: Tiny) -> Path:
    """Return a run directory with two seeds of the three strategies."""
    out = tiny_cli.root / "finished"
    assert tiny_cli.run(out, "--seed", "0", "--seed", "1", *BEFORE, "--set", "final_union=true") == 0
    return out


def results_of(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())


def without_times(results: dict) -> dict:
    return results | {"runs": [{k: v for k, v in run.items() if k != "seconds"} for run in results["runs"]]}


# -- run -------------------------------------------------------------------------------------------------


def test_results_json_has_every_unit(finished: Path) -> None:
    results = results_of(finished)
    assert (results["stream"], results["tasks"]) == ("qnli,ag_news,sst2", TASKS)
    assert [(run["strategy"], run["seed"]) for run in results["runs"]] == [(s, n) for n in (0, 1) for s in STRATEGIES]
    for run in results["runs"]:
        for table in (run["matrix"], run["ece"]):
            assert len(table) == 4 and all(len(row) == 3 for row in table)
            assert all(0 <= value <= 1 for row in table for value in row)
        grafting = run["strategy"] == "grafting-continual"
        assert ("union" in run) == (run["ledger"] is not None) == grafting
        assert run["updates"] == [6 if grafting else 3] * 3  # fine-tuning, and those of the region
        assert run["strategy"] != "fine-tune" or run["agreement"] == [1.0, 1.0, 1.0]
    assert results["unfinished"] == [] and results["failed"] == []


def test_the_forget_free_strategies_keep_every_figure(finished: Path) -> None:
    """Once a task is learned, its accuracy and calibration error do not change in any digit."""
    for run in results_of(finished)["runs"]:
        if run["strategy"] in ("fine-tune", "grafting-continual"):
            for task in range(3):
                for table in (run["matrix"], run["ece"]):
                    assert len({row[task] for row in table[task + 1 :]}) == 1
            assert run["summary"]["forgetting"] == run["summary"]["bwt"] == 0


def test_config_json_repeats_the_run(finished: Path, tmp_path: Path) -> None:
    assert cli.main(["run", "--config", str(finished / "config.json"), "--out", str(tmp_path / "again")]) == 0
    assert without_times(results_of(tmp_path / "again")) == without_times(results_of(finished))


def test_a_toml_file_configures_and_flags_override_it(tiny_cli: Tiny, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'stream = "sst2"\nmodel = "{tiny_cli.model}"\ndata = "{tiny_cli.data}"\nshots = 4\nsteps = 2\nseed = 3\n'
        'strategy = "continual-ft"\n[set]\nlearning_rate = 0.5\n'
    )
    assert cli.main(["run", "--config", str(config), "--steps", "1", "--out", str(tmp_path / "out")]) == 0
    (run,) = results_of(tmp_path / "out")["runs"]
    assert (run["strategy"], run["seed"]) == ("continual-ft", 3)
    assert (run["options"]["steps"], run["options"]["learning_rate"]) == (1, 0.5)


def test_a_file_serves_other_strategies_than_its_own(tiny_cli: Tiny, tmp_path: Path, capsys) -> None:
    """Options that only the file's own strategies have are left out; an option that no strategy has is still an error."""
    config = tmp_path / "run.toml"
    text = (
        f'stream = "sst2"\nmodel = "{tiny_cli.model}"\ndata = "{tiny_cli.data}"\nshots = 4\nsteps = 1\nsparsity = 0.1\n'
    )
    text += '[set]\nbatch_size = 4\nmask_steps = 1\nupper_triangle = false\n"grafting-continual.base_fraction" = 0.5\n'
    config.write_text(text)
    run = ["run", "--config", str(config), "--strategy", "continual-ft", "--out"]
    assert cli.main([*run, str(tmp_path / "out")]) == 0
    (found,) = results_of(tmp_path / "out")["runs"]
    assert found["strategy"] == "continual-ft" and found["options"]["batch_size"] == 4
    asked = json.loads((tmp_path / "out" / "config.json").read_text())["run"]
    assert asked["set"] == {"steps": 1, "batch_size": 4, "upper_triangle": False}
    assert cli.main([*run, str(tmp_path / "out"), "--resume"]) == 0
    config.write_text(text + "mask_stepz = 1\n")
    assert cli.main([*run, str(tmp_path / "other")]) == 2
    assert "Unknown option 'mask_stepz'" in capsys.readouterr().err
    assert cli.main([*run, str(tmp_path / "other"), "--strategy", "continual-fd"]) == 2
    assert "Did you mean 'continual-ft'?" in capsys.readouterr().err


def test_set_reaches_one_strategy_or_all(tiny_cli: Tiny, tmp_path: Path) -> None:
    more = ["--set", "batch_size=2", "--set", "continual-ft.batch_size=4", "--set", "optimizer=adamw"]
    assert tiny_cli.run(tmp_path / "out", *more, stream="sst2") == 0
    sizes = {run["strategy"]: run["options"]["batch_size"] for run in results_of(tmp_path / "out")["runs"]}
    assert sizes == {"fine-tune": 2, "continual-ft": 4, "grafting-continual": 2}


def test_no_temporary_files_are_left(finished: Path) -> None:
    assert not [path for path in finished.rglob("*") if path.name.startswith(".")]


@pytest.mark.sampled(share=0.3)
@pytest.mark.figures
def test_progress_names_stream_strategy_task_and_phase(
    tiny_cli: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(progress, "_INTERVAL", 0.0)  # every message is printed
    assert tiny_cli.run(tmp_path / "out", stream="sst2") == 0
    printed = capsys.readouterr()
    assert " · fine-tune seed 0 · sst2 · fine-tune 3/3 loss " in printed.err
    for phase in ("localize", "train 3/3 loss", "evaluate"):  # grafting starts from the stored fine-tuned model
        assert f" · grafting-continual seed 0 · sst2 · {phase}" in printed.err
    assert printed.err.startswith(f"Running sst2 into {tmp_path / 'out'}\n")
    assert "After the last task" in printed.out and str(tmp_path / "out" / "report.md") in printed.out
    assert str(tmp_path / "out" / "report.html") in printed.out and (tmp_path / "out" / "report.html").is_file()


# -- Wrong usage: exit code 2, one paragraph, no traceback, nothing written ---------------------------------


def test_all_stands_for_every_strategy_of_ours() -> None:
    assert RunConfig(strategy=("all", "mine")).strategy == (*registry.STRATEGIES, "mine")


# -- Failing: exit code 1, and nothing that was computed is lost -------------------------------------------


@pytest.mark.sampled(share=0.15)
@pytest.mark.figures
def test_ctrl_c_leaves_a_readable_directory_and_resume_finishes_it(
    tiny_cli: Tiny, finished: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forgetfree.strategies.grafting_continual import GraftingContinual

    out, seeds = tmp_path / "out", ["--seed", "0", "--seed", "1", *BEFORE, "--set", "final_union=true"]
    commit = GraftingContinual.commit

    def interrupted(self, task, training) -> None:
        if task.name == "ag_news":
            raise KeyboardInterrupt
        commit(self, task, training)

    monkeypatch.setattr(GraftingContinual, "commit", interrupted)
    assert tiny_cli.run(out, *seeds) == 1
    error = capsys.readouterr().err
    assert "2 of 6 units finished" in error
    assert "--resume" in error
    assert cli.main(["report", str(out)]) == 0
    assert "grafting-continual" in capsys.readouterr().out
    assert cli.main(["report", str(out), "--format", "html"]) == 0
    page = capsys.readouterr().out
    assert "Unfinished and left out: grafting-continual, seed 0, after 1 of 3 tasks" in page and "<svg" in page

    monkeypatch.undo()
    assert cli.main(["run", "--resume", "--out", str(out)]) == 0  # config.json has all other settings
    resumed = results_of(out)
    assert without_times(resumed) == without_times(results_of(finished))


@pytest.mark.parametrize(("scenario", "told"), [("domain", 1), ("task", 0)])
def test_labels_that_share_a_readout_under_other_names_are_told(
    tiny_cli: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], scenario: str, told: int
) -> None:
    how = ["--strategy", "grafting-continual", "--readout", "linear", "--set", f"scenario={scenario}"]
    assert tiny_cli.run(tmp_path / "run", *how, stream="qnli,sst2") == 0
    note = "(qnli: entailment, not_entailment; sst2: negative, positive)"
    assert capsys.readouterr().err.count(note) == told


@pytest.mark.sampled(share=0.3)
def test_rows_that_are_tested_and_trained_on_are_told_once_a_task(tiny_cli: Tiny, tmp_path: Path, capsys) -> None:
    """One note counts the test rows whose texts are also training rows; results.json keeps the counts."""
    data = Path(shutil.copytree(tiny_cli.data, tmp_path / "data"))
    train, test = (data / "sst2" / f"{split}.jsonl" for split in ("train", "test"))
    rows = [json.loads(line) for line in test.read_text().splitlines()]
    flipped = [row | {"label": 1 - row["label"]} for row in rows[:5]]
    train.write_text(train.read_text() + "".join(json.dumps(row) + "\n" for row in flipped))
    tiny = Tiny(data, tiny_cli.model, tmp_path)
    many = ["--strategy", "grafting-continual", "--seed", "0", "--seed", "1"]
    capsys.readouterr()
    assert tiny.run(tmp_path / "run", *many, stream="qnli,sst2") == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1
    assert notes[0].startswith(
        "note: Of 16 test rows of task 'sst2', the texts of 5 are also in the training rows (whatever"
    )
    nothing = {"train": 0, "validation": 0}
    assert results_of(tmp_path / "run")["shared_rows"] == {"qnli": nothing, "sst2": nothing | {"train": 5}}


def test_graftable_tensors_can_be_chosen_by_pattern(tiny_cli: Tiny, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert tiny_cli.run(out, "--set", r"graftable=intermediate\.dense", stream="sst2") == 0
    capsys.readouterr()
    shown = []
    for place in (out, out / "grafting-continual" / "seed-0" / "ledger.safetensors"):
        assert cli.main(["ledger", "show", str(place), "--json"]) == 0
        shown.append(json.loads(capsys.readouterr().out)["roles"])
    assert shown[0] == shown[1] and {key for key in shown[0][0] if "first feed-forward" not in key} == set()
    assert cli.main(["predict", str(out), "--task", "sst2", "a lovely film"]) == 0
    assert tiny_cli.run(tmp_path / "bad", "--set", "graftable=(", stream="sst2") == 2
    assert "graftable must be a regular expression" in capsys.readouterr().err


def test_resume_refuses_another_configuration(tiny_cli: Tiny, finished: Path, capsys) -> None:
    assert tiny_cli.run(finished, "--resume", *BEFORE, "--set", "batch_size=2") == 2
    expected = "these differ: --set final_union (was true, now not given), --batch-size (was not given, now 2)"
    assert expected in capsys.readouterr().err


def test_sigterm_is_ctrl_c_in_every_command(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("forgetfree.cli._parsed", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert cli.main(["list", "tasks"]) == 1
    assert "forgetfree: error: Interrupted." in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


# -- report, ledger, predict, list -------------------------------------------------------------------------


@pytest.mark.sampled(share=0.15)
@pytest.mark.figures
def test_report_merges_directories_in_every_format(tiny_cli: Tiny, finished: Path, tmp_path: Path, capsys) -> None:
    more = tmp_path / "more"
    assert tiny_cli.run(more, "--seed", "2", "--set", "final_union=true") == 0
    capsys.readouterr()
    for form in ("rich", "markdown", "json", "html", "latex"):
        assert cli.main(["report", str(finished), str(more), "--format", form]) == 0
        assert "grafting-continual" in capsys.readouterr().out


def test_ledger_show_and_verify(tiny_cli: Tiny, finished: Path, capsys) -> None:
    path = str(finished / "grafting-continual" / "seed-0" / "ledger.safetensors")
    assert cli.main(["ledger", "show", path]) == 0
    shown = capsys.readouterr().out
    for text in (*TASKS, "Owners", "bytes"):
        assert text in shown
    assert cli.main(["ledger", "verify", path, "--model", str(tiny_cli.model)]) == 0
    assert "sound" in capsys.readouterr().out


def test_predict_answers_single_texts_and_pairs(finished: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["predict", str(finished), "--task", "sst2", "a lovely film", "an awful film"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[2] for line in lines] == ["a lovely film", "an awful film"]
    assert all(line.split("\t")[0] in ("negative", "positive") for line in lines)
    assert cli.main(["predict", str(finished), "--task", "qnli", "who was it", "it was the river"]) == 0
    as_arguments = capsys.readouterr().out
    assert cli.main(["predict", str(finished), "--task", "qnli", "who was it\tit was the river"]) == 0
    assert capsys.readouterr().out == as_arguments
    monkeypatch.setattr("sys.stdin", io.StringIO("who was it\tit was the river\n"))
    assert cli.main(["predict", str(finished), "--task", "qnli"]) == 0
    assert capsys.readouterr().out == as_arguments
    monkeypatch.setattr("sys.stdin", io.StringIO("a film\n \nanother film\n"))
    assert cli.main(["predict", str(finished), "--task", "sst2"]) == 1
    assert "stdin, line 2 has an empty text. Write the text, or remove the row." in capsys.readouterr().err


@pytest.mark.sampled(share=0.15)
@pytest.mark.slow
def test_predict_imports_only_what_answers(finished: Path) -> None:
    """Libraries that read data sets, train or draw would slow down every start."""
    arguments = ["predict", str(finished), "--task", "sst2", "a lovely film"]
    code = (
        "import sys\n"
        "from forgetfree.cli import main\n"
        f"assert main({arguments!r}) == 0\n"
        "idle = ('avalanche', 'datasets', 'pandas', 'pyarrow', 'sklearn', 'matplotlib', 'peft')\n"
        "print(*(name for name in idle if name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [""]


def test_list_strategies_in_full(capsys) -> None:
    """Every option is listed once: at its strategy, or among the options of all strategies."""
    from forgetfree import registry
    from forgetfree.options import describe
    from forgetfree.training.training_options import TrainingOptions

    assert cli.main(["list", "strategies", "--verbose"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    own, shared = shown.split("options of all strategies:")
    assert "scenario = task (task or class or domain)" in " ".join(shared.split("options of a run:")[1].split())
    parts = own.split("\n\n")
    own, shared = " ".join(own.split()), " ".join(shared.split())
    for option in describe(TrainingOptions):
        line = "{name} = {default} ({type}) {help}".format(**option)
        assert line in shared and line not in own
    for name in registry.strategies():
        cls = registry.strategy(name)
        assert (
            f"{name}: {registry.strategies()[name].summary} {'forget-free' if cls.forget_free else 'may forget'}" in own
        )
    assert "sparsity = 0.0001 (a number) size of a region, as a share of the graftable entries" in own
    bare = {name for name in registry.strategies() if registry.strategy(name).Options is TrainingOptions}
    assert {part.split(":")[0] for part in parts if part.endswith("  no options of its own")} == bare


@pytest.mark.sampled(share=0.15)
@pytest.mark.figures
def test_the_task_may_be_withheld_and_is_still_answered_by_name(tiny_cli: Tiny, tmp_path: Path) -> None:
    """With scenario=class there is one readout of 2 + 4 + 2 labels; predict uses the part of the named task."""
    out = tmp_path / "out"
    assert tiny_cli.run(out, "--strategy", "grafting-continual", "--set", "scenario=class") == 0
    floors = results_of(out)["floors"]["constant"]
    assert sum(floor > 0 for floor in floors) == 1  # one constant answer for all tasks is a label of one of them
    from forgetfree.serve.inference import Predictor

    predictor = Predictor.of_run(out, 0)
    ledger = Ledger.load(out / "grafting-continual" / "seed-0" / "ledger.safetensors")
    for name, labels in (("qnli", 2), ("ag_news", 4), ("sst2", 2)):
        text = ("a lovely film", "x") if name == "qnli" else "a lovely film"
        assert predictor.logits(name, [text]).shape == (1, labels)
        assert ledger.records[ledger.position(name)].readout["weight"].shape[0] == 8


# -- Several ledgers, older runs, recipes ------------------------------------------------------------------


def one_seed(data: Path, model: Path, out: Path, *more: str) -> list[str]:
    """Return the words for continual-ft on sst2, by prompts if the model has an LM head."""
    given = ["--data", str(data), "--model", str(model), "--shots", "4", "--steps", "3", "--out", str(out)]
    return ["run", "sst2", "--strategy", "continual-ft", *given, *more]


@pytest.mark.sampled(share=0.3)
def test_a_run_whose_model_and_data_were_moved_is_resumed(tiny_cli: Tiny, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    model, data = (Path(shutil.copytree(each, tmp_path / each.name)) for each in (tiny_cli.model, tiny_cli.data))
    assert cli.main(one_seed(tiny_cli.data, tiny_cli.model, out)) == 0
    assert cli.main(one_seed(data, model, out, "--seed", "0", "--seed", "1", "--resume")) == 0
    assert [run["seed"] for run in results_of(out)["runs"]] == [0, 1]
    assert json.loads((out / "config.json").read_text())["run"]["model"] == str(model)
    assert cli.main(one_seed(data, model, tmp_path / "other", "--seed", "2")) == 0
    assert cli.main(["report", str(out), str(tmp_path / "other")]) == 0  # it is one model, at either path
    capsys.readouterr()
    assert cli.main(one_seed(data, Path("minilm"), out, "--resume")) == 2  # minilm brings a recipe
    assert "model (was" in capsys.readouterr().err


def change_notes(data: Path, model: Path) -> None:
    notes = data / "sst2" / "source.json"
    notes.write_text(json.dumps(json.loads(notes.read_text()) | {"label_words": ["lovely", "awful"]}))


def change_tokenizer(data: Path, model: Path) -> None:
    tokenizer = model / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    vocabulary = content["model"]["vocab"]
    one, other = sorted(vocabulary)[-2:]
    for a, b in zip(sorted(vocabulary)[-30:], reversed(sorted(vocabulary)[-30:]), strict=True):
        if a < b:
            vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    assert vocabulary[one] != vocabulary[other]
    tokenizer.write_text(json.dumps(content))


@pytest.mark.sampled(share=0.25)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_notes, "labels, label words, templates or metrics of 'sst2'"),
        (change_tokenizer, "the tokenizer"),
    ],
)
def test_resuming_refuses_what_no_fingerprint_of_weights_or_rows_tells(
    tiny_cli: Tiny, model_directory, tmp_path: Path, capsys, change, message: str
) -> None:
    """Changed label words or a changed tokenizer are refused, though model and data were moved as well."""
    out, data, model = tmp_path / "out", tmp_path / "data", tmp_path / "model"
    shutil.copytree(tiny_cli.data, data)
    shutil.copytree(model_directory("bert-mlm"), model)
    assert cli.main(one_seed(data, model, out)) == 0
    before = results_of(out)
    data, model = data.rename(tmp_path / "elsewhere"), model.rename(tmp_path / "other")
    change(data, model)
    capsys.readouterr()
    assert cli.main(one_seed(data, model, out, "--seed", "0", "--seed", "1", "--resume")) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "cannot be resumed: " in error and message in error
    assert results_of(out) == before


@pytest.mark.sampled(share=0.3)
def test_a_run_that_grows_keeps_the_options_of_all_strategies(tiny_cli: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    region = ["--strategy", "grafting-continual"]
    assert tiny_cli.run(out, "--strategy", "fine-tune", *region, stream="sst2") == 0
    before = json.loads((out / "config.json").read_text())
    assert tiny_cli.run(out, *region, "--strategy", "continual-ft", "--resume", stream="sst2") == 0
    after = json.loads((out / "config.json").read_text())
    assert set(after["run"]["strategy"]) == {"fine-tune", "grafting-continual", "continual-ft"}
    assert list(after["options"]) == ["fine-tune", "grafting-continual", "continual-ft"]
    assert after["options"]["fine-tune"] == before["options"]["fine-tune"]
    assert after["about"]["data"]["steps"] == before["about"]["data"]["steps"]
    before["options"]["lora"] = {"steps": 10**6}
    assert merged_config(out, before, after)["about"]["data"]["steps"] is None


def test_a_run_of_another_version_is_resumed_with_a_note(tiny_cli: Tiny, tmp_path: Path, capsys) -> None:
    """A note says that the results come from two versions, because their batches may differ."""
    out = tmp_path / "out"
    assert cli.main(one_seed(tiny_cli.data, tiny_cli.model, out)) == 0
    change_config(out, lambda config: config["versions"].update(forgetfree="0.2.0"))
    capsys.readouterr()
    assert cli.main(one_seed(tiny_cli.data, tiny_cli.model, out, "--seed", "0", "--seed", "1", "--resume")) == 0
    expected = f"note: forgetfree (was 0.2.0, is {__version__}) changed since {out} was started"
    assert expected in capsys.readouterr().err


def test_resuming_a_finished_run_leaves_its_results_as_they_are(tiny_cli: Tiny, tmp_path: Path, capsys) -> None:
    """Resuming prints a note and the headline with one table again; results.json keeps its bytes."""
    out = tmp_path / "out"
    assert cli.main(one_seed(tiny_cli.data, tiny_cli.model, out)) == 0
    said = capsys.readouterr()
    assert "Resuming" not in said.err and "one task" in said.out and "After the last task" in said.out
    assert "Time per phase" not in said.out and "Time per phase" in (out / "report.md").read_text()
    before = (out / "results.json").read_bytes()
    assert cli.main(one_seed(tiny_cli.data, tiny_cli.model, out, "--resume")) == 0
    assert (out / "results.json").read_bytes() == before
    said = capsys.readouterr()
    assert f"Resuming {out}; " in said.err
    assert "After the last task" in said.out


def test_a_recipe_may_be_for_one_strategy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from forgetfree.recipes import ModelEntry

    recipe = {"learning_rate": 0.5, "ewc.ewc_lambda": 7.0}
    monkeypatch.setitem(recipes.MODELS, "toy", ModelEntry("a toy", recipe))

    def options(**settings: Any) -> dict[str, Any]:
        config = RunConfig(stream="sst2", strategy=("ewc", "rwalk"), model="toy", set=settings)
        return dict(config.check().options)

    given = options()
    assert (given["ewc"].ewc_lambda, given["ewc"].learning_rate) == (7.0, 0.5)
    assert given["rwalk"].ewc_lambda == registry.strategy("rwalk").Options().ewc_lambda
    assert options(ewc_lambda=3.0)["ewc"].ewc_lambda == 3.0
    assert options(**{"ewc.ewc_lambda": 2.0})["ewc"].ewc_lambda == 2.0
    assert options(optimizer="adamw")["ewc"].learning_rate != 0.5
    assert RunConfig(stream="sst2", strategy=("rwalk",), model="toy").recipe() == {"learning_rate": 0.5}


def test_the_list_of_kinds_is_the_table_of_the_documents(capsys) -> None:
    assert cli.main(["list", "kinds"]) == 0
    shown = capsys.readouterr().out
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    table = re.findall(r"^\| (.+) \| (.+) \|$", page.partition("| a row of a task is |")[2], flags=re.M)
    rows = [row for row in table if "`" in row[1]][:5]
    assert [f"{row}; columns {columns.replace('`', '')}" in shown for row, columns in rows] == [True] * 5


def test_the_default_strategies_share_models_read_by_label_words(
    data_directory: Path, model_directory, tmp_path: Path
) -> None:
    """Fine-tuned models are passed through files, and a readout by label words has no tensors in them."""
    tiny = Tiny(data_directory, model_directory("gpt2-lm"), tmp_path)
    assert tiny.run(tmp_path / "out", "--readout", "causal", stream="qnli,sst2") == 0
    assert len(results_of(tmp_path / "out")["runs"]) == 3


def test_a_terminal_that_cannot_show_a_character_gets_its_number() -> None:
    """An old locale may have no such character."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "forgetfree", "list", "strategies"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert r"trains it again from \u03b8_pre" in done.stdout


def test_warnings_of_torch_stay_out_of_stderr() -> None:
    """This includes warnings of torch's C++ code, which Python attributes to the calling module."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        quiet_libraries()
        warnings.warn("The array is not writable. (Triggered internally at tensor_numpy.cpp:203.)", stacklevel=1)
        warnings.warn("A warning of this module.", stacklevel=1)
    assert [str(each.message) for each in told] == ["A warning of this module."]


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_threads_wait_asleep_unless_the_user_says_otherwise(
    given: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    assert cli.main(["list", "streams"]) == 0
    assert os.environ["OMP_WAIT_POLICY"] == (given or "PASSIVE")


def test_a_fault_of_several_strategies_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "batch_size=x", "--set", "fine-tune.learning_rate=-2", "--steps", "-3"]
    assert cli.main(["run", "sst2", "--data", "demo", *words]) == 2
    told = capsys.readouterr().err.splitlines()[1:]
    assert sorted(told) == [
        "- Options of fine-tune, continual-ft, grafting-continual: batch_size must be a whole number, got 'x'.",
        "- Options of fine-tune, continual-ft, grafting-continual: steps must be at least 1, got -3.",
        "- Options of fine-tune: learning_rate must be above 0, got -2.0.",
    ]


def test_who_has_no_recipe_and_sets_no_optimizer_is_told_what_trains() -> None:
    config = RunConfig(stream="sst2", model="gpt2", strategy=("fine-tune",))
    assert recipe_of(config).startswith("No recipe for gpt2: using the paper's options, with SGD")
    for key in ("optimizer", "fine-tune.optimizer"):
        assert recipe_of(config.model_copy(update={"set": {key: "adamw"}})) == ""
