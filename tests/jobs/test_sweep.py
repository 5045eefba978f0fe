"""``forgetfree sweep``: options are chosen on validation rows, and the best of them is run once on test rows."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

from forgetfree import cli
from forgetfree.errors import UsageError
from forgetfree.jobs.sweep_config import Range, SweepConfig
from forgetfree.results.scores import SCORES_FILE, read_scores

pytestmark = pytest.mark.long

Json = dict[str, Any]
SGD = ["--set", "optimizer=sgd", "--sparsity", "0.1"]
GRID = ["--set", "sparsity=0.01,0.1", "--set", "learning_rate=0.01,0.3", "--seed", "0", "--seed", "1"]


def read(path: Path) -> Json:
    """A file without checksums, which are of seconds, too."""
    return {key: each for key, each in json.loads(path.read_text()).items() if key not in ("made_of", "checksum")}


@pytest.fixture(scope="module")
def given(model_directory: Any) -> list[str]:
    return ["sweep", "qnli,sst2", "--model", str(model_directory("bert")), "--shots", "4", "--steps", "3", "--quiet"]


@pytest.fixture(scope="module")
def swept(given: list[str], data_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four settings with two seeds each."""
    out = tmp_path_factory.mktemp("sweep") / "out"
    assert cli.main([*given, *GRID, "--data", str(data_directory), "--out", str(out)]) == 0
    return out


def test_all_combinations_are_tried_and_the_best_mean_is_chosen(swept: Path) -> None:
    results = read(swept / "results.json")
    assert [trial["values"] for trial in results["trials"]] == [
        {"sparsity": sparsity, "learning_rate": rate} for sparsity in ("0.01", "0.1") for rate in ("0.01", "0.3")
    ]
    assert results["evaluated_on"] == "validation"
    for trial in results["trials"]:
        averages = []
        for seed in (0, 1):
            scores = read_scores(swept / "trials" / str(trial["trial"]) / f"seed-{seed}" / SCORES_FILE)
            last = [score for score in scores if score.after == 2]
            assert [score.task for score in last] == ["qnli", "sst2"]
            assert sum(score.rows for score in last) == trial["rows"]
            averages.append(statistics.fmean(score.value for score in last))
        assert trial["mean"] == pytest.approx(statistics.fmean(averages))
        assert trial["std"] == pytest.approx(statistics.stdev(averages))
    means = [trial["mean"] for trial in results["trials"]]
    assert results["chosen"] == means.index(max(means))


@pytest.mark.sampled(share=0.4)
def test_the_chosen_setting_is_an_ordinary_run_on_test_rows(
    swept: Path, given: list[str], data_directory: Path, tmp_path: Path
) -> None:
    results, chosen = read(swept / "results.json"), read(swept / "chosen" / "results.json")
    setting = results["trials"][results["chosen"]]["values"]
    words = [word for key, value in setting.items() for word in ("--set", f"{key}={value}")]
    words += ["--seed", "0", "--seed", "1", "--strategy", "grafting-continual", "--data", str(data_directory)]
    assert cli.main(["run", *given[1:], *words, "--out", str(tmp_path / "run")]) == 0
    alone = read(tmp_path / "run" / "results.json")
    assert [run["matrix"] for run in chosen["runs"]] == [run["matrix"] for run in alone["runs"]]
    assert chosen["evaluated_on"] == "test" and chosen["data"]["test_rows"] != results["data"]["test_rows"]
    notes = (swept / "chosen" / "report.md").read_text().replace("\\", "").partition("\n## ")[0]
    assert all(
        f"{key}={value}" in notes or f"{key.replace('_', ' ')} {value}" in notes for key, value in setting.items()
    )


@pytest.mark.sampled(share=0.2)
def test_the_test_rows_decide_nothing(swept: Path, given: list[str], data_directory: Path, tmp_path: Path) -> None:
    """With all labels of the test rows turned round, every trial and the choice are the same; the chosen run is not."""
    data = Path(shutil.copytree(data_directory, tmp_path / "data"))
    for task in ("qnli", "sst2"):
        (path,) = (data / task).glob("test.*")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        turned = [{**row, "label": (0, 1)[row["label"] == 0]} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in turned))
    assert cli.main([*given, *GRID, "--data", str(data), "--out", str(tmp_path / "out")]) == 0
    before, after = read(swept / "results.json"), read(tmp_path / "out" / "results.json")
    assert (after["trials"], after["chosen"]) == (before["trials"], before["chosen"])
    one, other = (read(out / "chosen" / "results.json")["runs"][0]["matrix"] for out in (swept, tmp_path / "out"))
    assert one != other


@pytest.mark.sampled(share=0.4)
def test_a_sweep_goes_on_where_it_was_cut_short(
    swept: Path, given: list[str], data_directory: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(swept, tmp_path / "out"))
    shutil.rmtree(out / "chosen")
    (out / "trials" / "2" / "seed-1" / "unit.json").unlink()
    kept = out / "trials" / "1" / "seed-0" / "unit.json"
    before = kept.stat().st_mtime_ns
    words = [*given, *GRID, "--data", str(data_directory), "--out", str(out), "--resume"]
    assert cli.main(words) == 0
    assert read(out / "results.json") == read(swept / "results.json")
    assert kept.stat().st_mtime_ns == before
    runs = [read(each / "chosen" / "results.json")["runs"] for each in (out, swept)]
    assert [run["matrix"] for run in runs[0]] == [run["matrix"] for run in runs[1]]


@pytest.mark.sampled(share=0.3)
def test_reports_of_chosen_runs_say_how_many_settings_each_strategy_had(
    swept: Path, given: list[str], data_directory: Path, tmp_path: Path, capsys: Any
) -> None:
    other = ["--strategy", "continual-ft", "--set", "learning_rate=0.01,0.1,0.3", "--seed", "0", "--seed", "1"]
    assert cli.main([*given, *other, "--data", str(data_directory), "--out", str(tmp_path / "naive")]) == 0
    shutil.copytree(swept / "chosen", tmp_path / "moved")  # away from its sweep
    capsys.readouterr()
    assert cli.main(["report", str(swept / "chosen"), str(tmp_path / "naive" / "chosen")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Settings that were tried on validation rows: grafting-continual 4, continual-ft 3." in said
    assert cli.main(["report", str(tmp_path / "moved"), str(tmp_path / "naive" / "chosen")]) == 0
    assert "grafting-continual not tuned, continual-ft 3." in " ".join(capsys.readouterr().out.split())
    assert cli.main(["report", str(tmp_path / "moved")]) == 0
    assert "Settings that were tried" not in capsys.readouterr().out


def test_a_report_of_a_sweep_is_its_table(swept: Path, capsys: Any) -> None:
    assert cli.main(["report", str(swept)]) == 0
    table = capsys.readouterr().out
    results = read(swept / "results.json")
    assert f"Chosen: {results['trials'][results['chosen']]['setting']}." in table
    assert f"{results['chosen']} (chosen)" in table and table.count("sparsity=") == 4 + 1
    assert cli.main(["report", str(swept), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"] == results["chosen"]
    assert cli.main(["report", str(swept), "--format", "csv"]) == 2


def test_a_setting_that_diverges_is_told_and_not_chosen(given: list[str], data_directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [
        "sweep",
        "sst2",
        *given[2:],
        "--data",
        str(data_directory),
        "--out",
        str(out),
        *SGD,
    ]
    assert cli.main([*words, "--set", "learning_rate=1e30,0.01"]) == 0
    results = read(out / "results.json")
    assert results["chosen"] == 1 and results["trials"][0]["mean"] is None
    assert "Failed: trial 0 (learning" in (out / "report.md").read_text().replace("\\", "")


def test_all_settings_diverging_is_an_error(
    given: list[str], data_directory: Path, tmp_path: Path, capsys: Any
) -> None:
    words = [
        "sweep",
        "sst2",
        *given[2:],
        "--data",
        str(data_directory),
        "--out",
        str(tmp_path / "out"),
        *SGD,
    ]
    assert cli.main([*words, "--set", "learning_rate=1e30,1e29"]) == 1
    assert "No setting could be trained with every seed: The loss became" in capsys.readouterr().err


@pytest.mark.sampled(share=0.3)
def test_optuna_draws_alike_for_one_seed_and_goes_on(given: list[str], data_directory: Path, tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'forgetfree[optuna]'")
    tried = ["--set", "learning_rate=0.001..1", "--set", "batch_size=2..8", "--set", "momentum=0,0.9"]
    words = [
        "sweep",
        "sst2",
        *given[2:],
        *tried,
        *SGD,
        "--trials",
        "6",
        "--data",
        str(data_directory),
        "--out",
    ]
    assert cli.main([*words, str(tmp_path / "a")]) == 0
    results = read(tmp_path / "a" / "results.json")
    drawn = [trial["values"] for trial in results["trials"]]
    assert len(drawn) == 6 and len({json.dumps(values) for values in drawn}) > 1
    for values in drawn:
        assert 0.001 <= values["learning_rate"] <= 1 and values["batch_size"] in range(2, 9)
        assert values["momentum"] in ("0", "0.9")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "trials" / "5" / "seed-0" / "unit.json").unlink()
    assert cli.main([*words, str(tmp_path / "b"), "--resume"]) == 0
    assert read(tmp_path / "b" / "results.json") == results


def test_what_a_setting_says() -> None:
    def tried(**settings: Any) -> Any:
        return SweepConfig(settings=settings, trials=3).candidates()

    assert tried(sparsity="1e-4, 1e-3", steps="5") == {"sparsity": ("1e-4", "1e-3")}
    assert tried(sparsity=[1e-4, 1e-3]) == {"sparsity": (1e-4, 1e-3)}  # of a file
    assert tried(learning_rate="1e-4..1e-2") == {"learning_rate": Range(1e-4, 1e-2)}
    assert tried(batch_size="2..16")["batch_size"].is_whole and not tried(momentum="0..0.9")["momentum"].is_whole
    assert tried(base="../foo", l1="0,1") == {"l1": ("0", "1")}  # no number, so no range
    assert tried(base="../foo,bar..baz") == {"base": ("../foo", "bar..baz")}
    assert tried(**{"grafting-continual.l1": "0,1"}) == {"grafting-continual.l1": ("0", "1")}


@pytest.mark.parametrize(
    ("settings", "more", "message"),
    [
        ({"steps": "5"}, {}, "Nothing is tried: give an option of the strategy several values"),
        ({"graftable": "a,b"}, {}, "Nothing is tried"),  # an option of the run, which may have commas
        ({"sparsity": "0.1,,0.2"}, {}, "has an empty value"),
        ({"sparsity": "0.1,0.1"}, {}, "names the same value twice"),
        ({"learning_rate": "0.001,1e-3"}, {}, "names the same value twice"),
        ({"batch_size": [8, "8"]}, {}, "names the same value twice"),
        ({"batch_size": [[8], [16]]}, {}, "batch_size must be a whole number, got [8]"),
        ({"sparsity": "0.1..0.2"}, {}, "is a range, of which --trials N draws"),
        ({"sparsity": "0.2..0.1"}, {"trials": 3}, "needs a number, two dots and a larger number"),
        ({"sparsity": "0.1,2"}, {}, "sparsity must be at most 1, got 2"),
        ({"sparsity": "0.1,x"}, {}, "sparsity must be a number, got 'x'"),
        ({"sparsitty": "0.1,0.2", "l1": "0,1"}, {}, "Did you mean 'sparsity'?"),
        ({"sparsity": "0.1,0.2", "evaluate_on": "test"}, {}, "Leave --set evaluate_on out"),
        ({"sparsity": "0.1,0.2"}, {"strategy": "grafting"}, "Did you mean 'grafting-continual'?"),
        ({"sparsity": "0.1,0.2"}, {"strategy": "lora"}, "Unknown option 'sparsity'"),
        ({"sparsity": "0.1,0.2"}, {"trials": 0}, "--trials must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_tried_is_told(settings: Json, more: Json, message: str) -> None:
    with pytest.raises(UsageError) as error:
        SweepConfig(stream="sst2", settings=settings, **more).checked()
    assert message in str(error.value)


def test_optuna_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--trials needs Optuna, .*: pip install 'forgetfree\[optuna\]'"):
        SweepConfig(stream="sst2", settings={"sparsity": "0.1,0.2"}, trials=2).checked()


def test_a_tie_is_told() -> None:
    from forgetfree.results.records import SweepResults
    from forgetfree.results.report.graft_and_sweep import lay_out_sweep

    def trial(number: int, mean: float) -> Json:
        return {
            "trial": number,
            "setting": f"steps={number}",
            "mean": mean,
            "std": 0.0,
            "rows": 6,
            "scores": [1],
            "errors": [],
        }

    results = {
        "stream": "s",
        "strategy": "fine-tune",
        "trials": [trial(0, 1.0), trial(1, 1.0), trial(2, 0.5)],
        "chosen": 0,
    }
    assert (
        "1 other setting scored the same, and the first was taken: 6 validation rows"
        in lay_out_sweep(SweepResults.of(results)).notes[-1]
    )
    results["trials"][1]["mean"] = 0.9
    assert "Chosen: steps=0." in lay_out_sweep(SweepResults.of(results)).notes[-1]
