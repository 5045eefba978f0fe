"""Experiments as a user meets them: units, results.json, claims, tables, figures, and what goes wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from tiny import SIZES

from forgetfree import cli, registry
from forgetfree.benchmarks.paper.ood import matched, target_rows
from forgetfree.errors import TrainingError, UsageError
from forgetfree.jobs.experiments import (
    SCORE,
    ExperimentContext,
    TunedTask,
    adjusted,
    load_experiment,
    load_experiment_results,
    outcome,
    pivot,
    rows_of,
)
from forgetfree.models.state import StateStore
from forgetfree.options import build
from forgetfree.results.answers import LabelAnswers
from forgetfree.results.records import CONSTANT
from forgetfree.results.report.page import render_page
from forgetfree.training.localization import LocalizationOptions
from forgetfree.training.monitor import Monitor
from forgetfree.training.single_task import SingleTask

pytestmark = pytest.mark.long

QUICK = ["--shots", "4", "--readout", "linear"]
QUICK += [part for setting in ("steps=2", "mask_steps=1", "mask_batch_size=8") for part in ("--set", setting)]
#: Which of the tiny tasks an experiment is tried on.
TASKS = {name: ["sst2"] for name in registry.EXPERIMENTS}
TASKS |= {"ood": ["qnli"], "adapters": ["qnli"]}
TASKS |= {name: ["qnli", "ag_news", "sst2"] for name in ("continual", "multi-task")}


@pytest.fixture(scope="module")
def data(data_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny tasks, with mnli and snli: qnli's rows with a third label."""
    root = tmp_path_factory.mktemp("data") / "tasks"
    shutil.copytree(data_directory, root)
    for name in ("mnli", "snli"):
        shutil.copytree(data_directory / "qnli", root / name)
        (root / name / "source.json").unlink()
        for split in ("train", "validation", "test"):
            file = root / name / f"{split}.jsonl"
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            file.write_text("".join(json.dumps(row | {"label": i % 3}) + "\n" for i, row in enumerate(rows)))
    return root


@pytest.fixture(scope="module")
def measured(data: Path, model_directory, tmp_path_factory: pytest.TempPathFactory):
    """The directory of an experiment that was run once, by name."""
    root, done = tmp_path_factory.mktemp("experiments"), {}

    def run(name: str) -> Path:
        if name not in done:
            done[name] = root / name
            kind = "bert-mlm" if name == "prompt-against-linear" else "bert"  # it needs a head for label words
            assert cli.main(arguments(name, data, model_directory(kind), root / name)) == 0
        return done[name]

    return run


def arguments(name: str, data: Path, model: Path, out: Path, *more: str, seeds: tuple[int, ...] = (0, 1)) -> list[str]:
    tasks = [part for task in TASKS[name] for part in ("--task", task)]
    fixed = ["--data", str(data), "--model", str(model), "--out", str(out), "--jobs", "1"]
    fixed += [part for seed in seeds for part in ("--seed", str(seed))]
    several = "sparsities" not in load_experiment(name).single
    sparsities = ["--sparsity", "0.1", *(["--sparsity", "0.02"] if several else [])]
    words = ["experiment", name, *fixed, *tasks, *sparsities, *QUICK, *more]
    return tiny.last_of_each(words, "--data", "--model", "--readout", "--out", "--jobs")


def results_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def without_times(results: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in results.items() if key not in ("seconds", "made_of", "checksum")}


# -- Every experiment ------------------------------------------------------------------------------------


#: Those that together reach what all reach.
MEASURED = (
    *("adapters", "continual", "fish", "localization", "model-labels", "multi-task", "optimizers"),
    *("prompt-against-linear", "sparsity-curve", "what-fails"),
)


@pytest.mark.sampled(*MEASURED)
@pytest.mark.parametrize("name", registry.EXPERIMENTS)
def test_an_experiment_writes_results_report_and_figure(name: str, measured, capsys: pytest.CaptureFixture) -> None:
    out = measured(name)
    results = results_of(out)
    assert (results["schema"], results["experiment"], results["preset"]) == (1, name, "small")
    assert results["complete"] is True and results["skipped"] == {}
    rows = rows_of(results)
    assert {row["seed"] for row in rows} == {0, 1}
    for key in ("score", "ece", "agreement", "share"):
        assert all(0 <= row[key] <= 1 for row in rows if key in row)
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / f"{name}.svg").read_text()
    page = outcome(load_experiment_results(out))
    assert (out / "report.md").read_text() == render_page(page, "markdown")
    assert page.tables[0].title == "What the paper claims"
    assert results["claims"] and all(claim["text"] and claim["ours"] for claim in results["claims"])
    capsys.readouterr()
    assert cli.main(["report", str(out)]) == 0
    printed = capsys.readouterr().out
    assert all(table.title in printed for table in page.tables)


def test_its_csv_says_what_it_was_made_with(measured, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Each way once; of a CSV file as it stands there; and nothing where no unit tells."""
    out = shutil.copytree(measured("bound"), tmp_path / "out")
    records = [json.loads(path.read_text()) for path in out.rglob("unit.json")]

    def told(path: Path) -> list[dict[str, Any]]:
        capsys.readouterr()
        assert cli.main(["report", str(path), "--format", "csv"]) == 0
        text = capsys.readouterr().out
        (tmp_path / "again.csv").write_text(text)
        return json.loads(text.splitlines()[0].removeprefix("# ")).get("made")

    (made,) = told(out)
    assert len(records) > 1
    for key in ("versions", "code", "command"):
        assert all(record[key] == made[key] for record in records)
    assert made["machine"] == {key: records[0]["machine"][key] for key in ("device", "threads", "processor")}
    shutil.move(tmp_path / "again.csv", tmp_path / "first.csv")
    assert told(tmp_path / "first.csv") == [made]
    path, *others = out.rglob("unit.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"command": "forgetfree elsewhere"}))
    assert sorted(each["command"] for each in told(out)) == sorted([made["command"], "forgetfree elsewhere"])
    assert told(out / "results.json") == told(out)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "failed"}))
    assert told(out) == [made]
    for each in (path, *others):
        each.write_text("{")
    assert told(out) is None


@pytest.mark.parametrize("name", registry.EXPERIMENTS)
@pytest.mark.parametrize("preset", ["small", "paper"])
def test_the_presets_hold_options_that_there_are(name: str, preset: str) -> None:
    setting = load_experiment(name).presets[preset]
    for choice in setting.grid:
        build(LocalizationOptions, {"sparsity": setting.sparsity, **setting.options, **choice}, "the experiment")
    assert load_experiment(name).units(setting)
    if preset == "paper":
        language_model = ("gpt2", "causal") if name == "causal" else ("roberta-base", "prompt")
        assert (setting.model, setting.readout, len(setting.seeds)) == (*language_model, 5)
        assert (50_000 if name == "full-data" else 4096) in setting.shots and setting.test_limit is None


@pytest.mark.sampled(share=0.3)
def test_the_same_seed_gives_the_same_results_and_the_same_figure(
    measured, data, model_directory, tmp_path: Path
) -> None:
    """But for seconds; and though this time all models are trained again, not taken from the cache."""
    again = tmp_path / "again"
    assert (
        cli.main(arguments("calibration", data, model_directory("bert"), again, "--cache", str(tmp_path / "cache")))
        == 0
    )
    first = measured("calibration")
    assert without_times(results_of(again)) == without_times(results_of(first))
    for suffix in ("png", "svg"):
        file = f"calibration.{suffix}"
        assert (again / file).read_bytes() == (first / file).read_bytes()


@pytest.mark.sampled(share=0.4)
def test_fine_tuned_models_are_made_once_and_shared(data, model_directory, tmp_path: Path) -> None:
    cache, model = tmp_path / "cache", model_directory("bert")
    assert cli.main(arguments("calibration", data, model, tmp_path / "one", "--cache", str(cache))) == 0
    made = {file.name: file.stat().st_mtime_ns for file in cache.iterdir()}
    assert sorted(Path(name).suffix for name in made) == [".json"] * 2 + [".safetensors"] * 2  # one a seed
    assert cli.main(arguments("where", data, model, tmp_path / "two", "--cache", str(cache))) == 0
    assert {file.name: file.stat().st_mtime_ns for file in cache.iterdir()} == made


# -- What is measured ------------------------------------------------------------------------------------


def test_a_graft_of_everything_is_the_fine_tuned_model(data, model_directory, tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = ["--sparsity", "1.0", "--set", "base=movement", "--set", "mask_steps=0"]
    assert cli.main(arguments("localization", data, model_directory("bert"), out, *more)) == 0
    for row in rows_of(results_of(out)):
        if row["model"] == "grafted" and row["sparsity"] == 1.0:
            assert row["agreement"] == 1.0


def test_the_shares_of_a_region_add_up(measured) -> None:
    rows = rows_of(results_of(measured("where")))
    for seed in (0, 1):
        for by in ("layer", "kind"):
            those = [row for row in rows if row["seed"] == seed and row["by"] == by]
            assert sum(row["share"] for row in those) == pytest.approx(1)
            assert sum(row["of_model"] for row in those) == pytest.approx(1)


def test_wise_starts_at_the_same_model(measured) -> None:
    """At α = 0 both curves are θ_pre under the fine-tuned readout."""
    rows = rows_of(results_of(measured("ood")))
    starts = [(r["seed"], r["target"], r["score"], r["ece"]) for r in rows if r["alpha"] == 0.0]
    assert len(starts) == 2 * len(set(starts)) == 12
    assert {row["target"] for row in rows} == {"qnli", "mnli", "snli"}


def test_labels_of_targets_are_matched_by_name() -> None:
    three = ("entailment", "neutral", "contradiction")
    assert matched(three, ("entailment", "not_entailment"), "mnli") == {0: 0, 2: 1}  # neutral is left out (table 3)
    assert matched(three, ("not_entailment", "entailment"), "mnli") == {0: 1, 2: 0}
    assert matched(three, three[::-1], "mnli") == {0: 2, 1: 1, 2: 0}
    assert matched(("Positive", "negative"), ("negative", "positive"), "imdb") == {0: 1, 1: 0}
    with pytest.raises(UsageError, match=r"labels of 'boolq' \(false, true\) are not those of the source"):
        matched(("false", "true"), ("negative", "positive"), "boolq")


def test_of_nli_targets_contradiction_and_entailment_alone_are_answered(data, model_directory, tmp_path: Path) -> None:
    preset = adjusted(load_experiment("ood").presets["small"], {"model": str(model_directory("bert"))}, {})
    context = ExperimentContext(preset, str(data), "cpu", StateStore(tmp_path), tmp_path, Monitor())
    tuned = TunedTask(bench := context.bench({"task": "qnli", "shots": 4, "seed": 0}), bench.pre, context.options())
    target, rows = target_rows(context, tuned, "mnli"), context.rows("mnli").test
    expected = [(text, label) for text, label in zip(rows.first, rows.labels, strict=True) if label != 1]
    assert 0 < len(target) == len(expected) < len(rows)
    assert target.labels.tolist() == [0 if label == 0 else 1 for _, label in expected]


def test_label_words_need_a_head(data: Path, model_directory, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = arguments("prompt-against-linear", data, model_directory("bert"), tmp_path / "out", seeds=(0,))
    assert cli.main(words) != 0
    assert "has no head for label words" in capsys.readouterr().err


@pytest.mark.sampled(*MEASURED)
@pytest.mark.parametrize("name", registry.EXPERIMENTS)
def test_a_constant_answers_score_stands_beside_every_score(name: str, measured) -> None:
    page, rows = outcome(load_experiment_results(measured(name))), rows_of(results_of(measured(name)))
    scored = [table for table in page.tables[1:] if table.title.startswith((SCORE, "Accuracy"))]
    assert scored or name in ("where", "bound")
    for table in scored:
        if not table.title.endswith("in the paper"):
            assert CONSTANT in table.header or CONSTANT in [row[0] for row in table.rows]
    assert all(0.5 <= row["constant"] <= 1 or row.get("task") == "ag_news" for row in rows if "score" in row)


def test_of_two_models_below_a_constant_answer_neither_is_called_better() -> None:
    rows = [
        {"task": "qnli", "target": "mnli", "model": model, "alpha": 1.0, "seed": 0, "score": score, "constant": 0.6}
        for model, score in (("fine-tuned", 0.4), ("grafted", 0.5))
    ]
    (claim,) = load_experiment("ood").claims(rows)
    assert claim.holds is None and claim.ours == "50.0 against 40.0, a constant answer 60.0"
    (claim,) = load_experiment("ood").claims([row | {"constant": 0.45} for row in rows])
    assert claim.holds is True


def test_a_missing_target_is_named_and_the_others_are_measured(data, model_directory, tmp_path: Path) -> None:
    less, out = tmp_path / "less", tmp_path / "out"
    shutil.copytree(data, less)
    shutil.rmtree(less / "snli")
    assert cli.main(arguments("ood", less, model_directory("bert"), out)) == 0
    assert {row["target"] for row in rows_of(results_of(out))} == {"qnli", "mnli"}
    assert "no data at hand for: snli" in (out / "report.md").read_text()


def test_the_reliability_diagram_is_that_of_the_answers(measured) -> None:
    """Accuracy and calibration can be computed from the bins alone: coarser bins, so an ECE no larger."""
    for row in rows_of(results_of(measured("calibration"))):
        counts, right, confidence = (np.array(row[key]) for key in ("counts", "right", "confidence"))
        assert counts.sum() == SIZES["test"]
        assert right.sum() / counts.sum() == pytest.approx(row["score"])
        assert (
            abs(right.sum() - confidence.sum()) / counts.sum() <= row["ece"] + 1e-4
        )  # the bins' gaps may cancel, not add


def test_a_grid_is_decided_on_validation_rows(data, model_directory, tmp_path: Path, monkeypatch) -> None:
    """Whatever the test rows say; only the best model is kept, and what is known is not trained again."""
    changes = {"model": str(model_directory("bert")), "tasks": ("sst2",), "shots": (4,)}
    changes["grid"] = ({"learning_rate": 1e-9}, {"learning_rate": 0.3}, {"learning_rate": 1e-8})
    preset = adjusted(load_experiment("where").presets["small"], changes, {"steps": "8", "max_gradient_norm": "none"})
    context = ExperimentContext(preset, str(data), "cpu", StateStore(tmp_path), tmp_path, Monitor())
    unit, asked = {"task": "sst2", "shots": 4, "seed": 0}, []
    answers_of = SingleTask.answers

    def answers(self: SingleTask, state: Any, rows: Any = None, options: Any = None) -> Any:
        if rows is not None:  # validation rows are given, test rows are the default
            asked.append(options.learning_rate)
            wins = options.learning_rate == 1e-8
            labels = rows.labels.numpy()
            return LabelAnswers(np.eye(2)[labels if wins else 1 - labels], labels)
        return answers_of(self, state, rows, options)

    context.bench(unit).fine_tuned(context.options(learning_rate=0.3))  # another experiment's: not ours to throw away
    monkeypatch.setattr(SingleTask, "answers", answers)
    assert context.tuned(unit).options.learning_rate == 1e-8
    assert asked == [1e-9, 0.3, 1e-8]
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    made = StateStore.put
    monkeypatch.setattr(StateStore, "put", lambda *arguments: pytest.fail("trained again"))
    assert context.tuned(unit).options.learning_rate == 1e-8
    assert asked == [1e-9, 0.3, 1e-8]
    monkeypatch.setattr(StateStore, "put", made)
    rows = context.rows("sst2")
    flipped = replace(rows.validation, labels=tuple(1 - label for label in rows.validation.labels))
    monkeypatch.setitem(context._tasks, "sst2", replace(rows, validation=flipped))
    context.tuned(unit)
    assert asked == [1e-9, 0.3, 1e-8] * 2  # of other validation rows nothing is known


def test_a_choice_that_diverges_has_lost(data, model_directory, tmp_path: Path, monkeypatch) -> None:
    def context(*rates: float) -> ExperimentContext:
        changes = {"model": str(model_directory("bert")), "tasks": ("sst2",), "shots": (4,)}
        changes["grid"] = tuple({"learning_rate": rate} for rate in rates)
        preset = adjusted(load_experiment("where").presets["small"], changes, {"steps": "4", "precision": "fp32"})
        return ExperimentContext(preset, str(data), "cpu", StateStore(tmp_path), tmp_path, Monitor())

    unit = {"task": "sst2", "shots": 4, "seed": 0}
    assert context(1e30, 1e-3, 1e29).tuned(unit).options.learning_rate == 1e-3
    trained = SingleTask.fine_tuned
    monkeypatch.setattr(
        SingleTask,
        "fine_tuned",
        lambda bench, options: trained(bench, options) if options.learning_rate < 1 else pytest.fail("diverged again"),
    )
    assert context(1e30, 1e-3, 1e29).tuned(unit).options.learning_rate == 1e-3
    with pytest.raises(TrainingError, match="diverged under each of the 2 choices"):
        context(1e30, 1e29).tuned(unit)


def test_retraining_and_bitfit_begin_with_an_untrained_readout(
    data, model_directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, retrained = [], SingleTask.retrained
    monkeypatch.setattr(
        SingleTask,
        "retrained",
        lambda bench, start, *more: begun.append(start is bench.pre) or retrained(bench, start, *more),
    )
    assert cli.main(arguments("calibration", data, model_directory("bert"), tmp_path / "out", seeds=(0,))) == 0
    assert begun == [True, True]


@pytest.mark.sampled("what-fails")
@pytest.mark.parametrize("name", ["calibration", "what-fails"])
def test_a_model_without_biases_is_measured_all_the_same(name: str, data, model_directory, tmp_path: Path) -> None:
    more = ["--set", "graftable=weight$"]
    assert cli.main(arguments(name, data, model_directory("bert"), tmp_path / "out", *more)) == 0
    models = {row["model"] for row in rows_of(results_of(tmp_path / "out"))}
    assert {"fine-tuned", "grafted"} < models and not models & {"bitfit", "biases"}


def test_what_cannot_be_localized_is_refused_before_any_training(
    data, model_directory, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(SingleTask, "fine_tuned", lambda *_: pytest.fail("trained"))
    more = ["--sparsity", "1e-9"]
    assert cli.main(arguments("sparsity-curve", data, model_directory("bert"), tmp_path / "out", *more)) == 2
    assert "leaves no entry" in capsys.readouterr().err


@pytest.mark.sampled("gpt2-lm-causal")
@pytest.mark.parametrize(("kind", "readout"), [("bert-mlm", "prompt"), ("gpt2-lm", "causal")])
def test_prompts_run_and_share_fine_tuned_models(kind, readout, data, model_directory, tmp_path: Path) -> None:
    for name in ("where", "calibration"):  # the second takes the first's models from their files
        more = ["--readout", readout, "--cache", str(tmp_path / "cache")]
        assert cli.main(arguments(name, data, model_directory(kind), tmp_path / name, *more)) == 0


def test_without_a_readout_of_its_own_there_is_no_readout_alone(
    measured, data, model_directory, tmp_path: Path
) -> None:
    assert (
        cli.main(arguments("localization", data, model_directory("bert-mlm"), tmp_path / "out", "--readout", "prompt"))
        == 0
    )
    for out, expected in ((tmp_path / "out", False), (measured("localization"), True)):
        assert ("readout alone" in {row["model"] for row in rows_of(results_of(out))}) is expected
        assert ("readout alone" in (out / "report.md").read_text()) is expected
        assert ("readout alone" in (out / "localization.svg").read_text()) is expected


def test_options_set_by_hand_reach_every_experiment(measured) -> None:
    """The stream of `continual` too: two updates a task, as --set says, and not the preset's two hundred."""
    results = results_of(measured("continual"))
    assert results["setting"]["fixed"]["steps"] == "2"
    assert {row["steps"] for row in rows_of(results)} == {2}


def test_labels_with_fewer_rows_give_all_they_have(data, model_directory, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli.main(arguments("localization", data, model_directory("bert"), out, "--shots", "4000")) == 0
    rows = rows_of(results_of(out))
    train = len((data / "sst2" / "train.jsonl").read_text().splitlines())
    assert {row["train_rows"] for row in rows if row["shots"] == 4000} == {train}
    assert {row["train_rows"] for row in rows if row["shots"] == 4} == {8}


# -- Claims on rows made by hand -------------------------------------------------------------------------


def verdicts(name: str, rows: list[dict[str, Any]]) -> dict[str, bool | None]:
    return {claim.text: claim.holds for claim in load_experiment(name).claims(rows)}


def test_localization_asks_for_95_percent_of_the_fine_tuned_score() -> None:
    def rows(grafted: float, before: float = 0.5) -> list[dict[str, Any]]:
        common = {"task": "a", "shots": 64, "seed": 0}
        return [
            {**common, "model": "pre-trained", "sparsity": 0.0, "score": before},
            {**common, "model": "fine-tuned", "sparsity": 1.0, "score": 0.8},
            {**common, "model": "grafted", "sparsity": 0.01, "score": grafted},
        ]

    assert list(verdicts("localization", rows(0.77)).values()) == [True]  # 96.25 %
    assert list(verdicts("localization", rows(0.75)).values()) == [False]  # 93.75 %
    assert list(verdicts("localization", rows(0.8, before=0.76)).values()) == [None]  # nothing was learned


def test_calibration_asks_for_an_ece_at_least_40_percent_lower() -> None:
    def rows(ece: float, retrained: float) -> list[dict[str, Any]]:
        common = {"task": "a", "seed": 0, "score": 0.9, "ece": 0.1}
        return [
            {**common, "model": "fine-tuned"},
            {**common, "model": "grafted", "ece": ece},
            {**common, "model": "retrained", "score": retrained},
            {**common, "model": "bitfit"},
        ]

    assert list(verdicts("calibration", rows(0.055, 0.91)).values()) == [True, True]  # 45 % lower
    assert list(verdicts("calibration", rows(0.07, 0.85)).values()) == [False, False]  # 30 % lower


def test_optimizers_compares_shares_kept() -> None:
    def rows(adamw: float, l1: float) -> list[dict[str, Any]]:
        kept = {"sgd": 0.9, "adamw": adamw, "adamw + ℓ1": l1}
        return [
            {"task": "a", "seed": 0, "optimizer": name, "model": model, "sparsity": sparsity, "score": score}
            for name, share in kept.items()
            for model, sparsity, score in (("fine-tuned", 1.0, 0.8), ("grafted", 0.01, 0.8 * share))
        ]

    assert list(verdicts("optimizers", rows(0.6, 0.95)).values()) == [True, True]
    assert list(verdicts("optimizers", rows(0.95, 0.9)).values()) == [False, False]


def test_sparsity_curve_tells_learned_from_moved_and_random() -> None:
    def rows(moved: float, random: float) -> list[dict[str, Any]]:
        scores = {"none": 0.5, "fine-tuned": 0.9, "learned": 0.85, "movement": moved, "random": random}
        sparsity = {"none": 0.0, "fine-tuned": 1.0}
        return [
            {"task": "a", "seed": 0, "region": name, "sparsity": sparsity.get(name, 0.01), "score": score}
            for name, score in scores.items()
        ]

    assert list(verdicts("sparsity-curve", rows(0.6, 0.55)).values()) == [True, True]
    assert list(verdicts("sparsity-curve", rows(0.84, 0.7)).values()) == [False, False]


def test_ood_compares_whole_models_by_target() -> None:
    def rows(grafted: float) -> list[dict[str, Any]]:
        return [
            {"task": "a", "seed": 0, "target": target, "model": model, "alpha": alpha, "score": score}
            for target in ("a", "b")
            for model, score in (("fine-tuned", 0.7), ("grafted", grafted))
            for alpha in (0.0, 1.0)
        ]

    assert list(verdicts("ood", rows(0.71)).values()) == [True]
    assert list(verdicts("ood", rows(0.69)).values()) == [False]


def test_what_fails_asks_whether_biases_and_tickets_fail() -> None:
    def rows(bias: float, pruned: float) -> list[dict[str, Any]]:
        scores = {
            "fine-tuned": 0.9,
            "no graft": 0.5,
            "grafted": 0.85,
            "biases": bias,
            "pruned to the graft's region": pruned,
            "pruned": pruned,
        }
        return [
            {"task": "a", "seed": 0, "model": name, "sparsity": 0.1, "score": score} for name, score in scores.items()
        ]

    assert list(verdicts("what-fails", rows(0.6, 0.5)).values()) == [True, True, True]
    assert list(verdicts("what-fails", rows(0.84, 0.61)).values()) == [False, False, False]


def test_continual_sets_the_papers_numbers_beside_ours() -> None:
    rows = [
        {"task": task, "seed": 0, "strategy": name, "score": score, "learned": score, "ece": 0.1}
        for name, score in (("fine-tune", 0.8), ("continual-ft", 0.6), ("grafting-continual", 0.79))
        for task in ("qnli", "ag_news", "sst2")
    ]
    claims = load_experiment("continual").claims(rows)
    assert [claim.holds for claim in claims] == [True, True, True]
    assert claims[0].paper == "86.5 against 67.5"
    assert claims[0].ours == "79.0 against 60.0"
    rows = [row | {"shots": 512, "train_shots": 512} for row in rows]
    titles = [table.title for table in load_experiment("continual").tables(rows)]
    assert "Accuracy after the last task, here" in titles
    fewer = [row | {"train_shots": 327} for row in rows]
    titles = [table.title for table in load_experiment("continual").tables(fewer)]
    assert "Accuracy after the last task, here (with 327 shots: a label has no more rows)" in titles
    rows[-2]["learned"] += 0.01  # one task lost, another gained as much: that is not nothing
    rows[-1]["learned"] -= 0.01
    assert [claim.holds for claim in load_experiment("continual").claims(rows)] == [True, True, False]
    others = [row | {"task": row["task"].upper()} for row in rows]
    assert load_experiment("continual").claims(others)[0].paper == "— against —"


@pytest.mark.parametrize("name", registry.EXPERIMENTS)
def test_what_was_not_measured_is_not_told(name: str, measured) -> None:
    """Every verdict rests on numbers: without the rows of one, it is open, and nothing is divided by."""
    rows = rows_of(results_of(measured(name)))
    for key, value in (("model", "fine-tuned"), ("region", "learned"), ("strategy", "fine-tune"), ("by", "kind")):
        left = [row for row in rows if row.get(key) != value]
        if len(left) < len(rows):
            claims = load_experiment(name).claims(left)
            assert all("nan" not in claim.ours for claim in claims)
            assert any(claim.holds is None for claim in claims)
    for row in rows:
        row |= {"score": 0.0, "ece": 0.0}
    load_experiment(name).claims(rows)


def test_where_weighs_kinds_and_layers() -> None:
    def rows(value: float, middle: float) -> list[dict[str, Any]]:
        kinds = {"query weight": (1 - value, 0.6), "value weight": (value, 0.4)}
        kinds |= {"first feed-forward weight": (0.0, 0.0), "LayerNorm weight": (0.0, 0.0)}
        layers = {"0": ((1 - middle) / 2, 1 / 3), "1": (middle, 1 / 3), "2": ((1 - middle) / 2, 1 / 3)}
        return [
            {"task": "a", "seed": 0, "by": by, "group": group, "share": share, "of_model": size}
            for by, groups in (("kind", kinds), ("layer", layers))
            for group, (share, size) in groups.items()
        ]

    assert list(verdicts("where", rows(0.7, 0.5)).values()) == [True, True]
    assert list(verdicts("where", rows(0.3, 0.2)).values()) == [False, False]
    fused = [row | {"group": row["group"].replace("value", "query+key+value")} for row in rows(0.7, 0.5)]
    assert list(verdicts("where", fused).values()) == [None, True]  # GPT-2's values have no tensor of their own


def test_a_table_is_mean_and_standard_deviation_over_seeds_in_percent() -> None:
    rows = [{"task": "a", "seed": seed, "model": "m", "score": score} for seed, score in enumerate((0.5, 0.7))]
    table = pivot("t", rows, "task", {"m": ("score", {"model": "m"}), "n": ("score", {"model": "n"})})
    assert (table.header, table.rows) == (("task", "m", "n"), (("a", "60.0 (14.1)", "—"),))


# -- Long runs, and what goes wrong ----------------------------------------------------------------------


def test_an_interrupted_experiment_goes_on_where_it_was(
    measured, data, model_directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from forgetfree.benchmarks.paper.where import Where

    out, model, measure, calls = tmp_path / "out", model_directory("bert"), Where.measure, []

    def interrupted(self: Where, context: ExperimentContext, unit: dict[str, Any]) -> Any:
        calls.append(unit["seed"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(self, context, unit)

    monkeypatch.setattr(Where, "measure", interrupted)
    assert cli.main(arguments("where", data, model, out)) == 1
    assert "--resume" in capsys.readouterr().err
    assert results_of(out)["complete"] is False
    assert cli.main(arguments("where", data, model, out)) == 2  # not without being told
    assert "--resume" in capsys.readouterr().err
    assert cli.main(arguments("where", data, model, out, "--resume")) == 0
    assert calls == [0, 1, 1]
    assert without_times(results_of(out)) == without_times(results_of(measured("where")))
    assert cli.main(arguments("where", data, model, out, "--resume", "--set", "steps=3")) == 2
    assert "these differ: --set steps (was 2, now 3)." in capsys.readouterr().err
    other = tmp_path / "other"
    shutil.copytree(data, other)
    (other / "sst2" / "test.jsonl").write_text((data / "sst2" / "validation.jsonl").read_text())
    assert cli.main(arguments("where", other, model, out, "--resume")) == 1
    assert "data of 'sst2' changed" in capsys.readouterr().err
    assert cli.main(arguments("where", data, model_directory("roberta"), out, "--resume")) == 1
    assert "cannot be resumed: the weights of the model changed" in capsys.readouterr().err


@pytest.mark.sampled(share=0.3)
def test_more_seeds_and_tasks_are_added_to_what_was_measured(
    measured, data, model_directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from forgetfree.benchmarks.paper.where import Where

    out, model, measure, calls = tmp_path / "out", model_directory("bert"), Where.measure, []

    def counted(self: Where, context: ExperimentContext, unit: dict[str, Any]) -> Any:
        calls.append(unit)
        return measure(self, context, unit)

    one_seed = arguments("where", data, model, out, seeds=(0,))
    monkeypatch.setattr(Where, "measure", counted)
    assert cli.main(one_seed) == 0
    assert cli.main(arguments("where", data, model, out, "--resume")) == 0
    assert [unit["seed"] for unit in calls] == [0, 1]
    assert without_times(results_of(out)) == without_times(results_of(measured("where")))
    assert cli.main(arguments("where", data, model, out, "--resume", "--task", "qnli")) == 0
    assert [(unit["task"], unit["seed"]) for unit in calls[2:]] == [("qnli", 0), ("qnli", 1)]
    assert {row["task"] for row in rows_of(results_of(out))} == {"sst2", "qnli"}
    assert cli.main([*one_seed, "--resume"]) == 2  # what was measured is not taken out
    error = capsys.readouterr().err
    assert "--task (give all there are: sst2, qnli), --seed (give all there are: 0, 1)" in error
    older = results_of(out)  # written before there was a choice
    for option in ("max_length", "evaluate_on"):
        del older["setting"][option]
    (out / "results.json").write_text(json.dumps(older))
    elsewhere = shutil.copytree(model, tmp_path / "moved")  # the same weights under another name
    assert cli.main(arguments("where", data, elsewhere, out, "--resume", "--task", "qnli")) == 0


@pytest.mark.sampled(share=0.4)
def test_an_experiment_is_not_resumed_with_other_prompts_networks_or_tokenizers(
    data, model_directory, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    here, model, out = tmp_path / "data", tmp_path / "model", tmp_path / "out"
    shutil.copytree(data, here)
    shutil.copytree(model_directory("bert"), model)
    assert cli.main(arguments("where", here, model, out, seeds=(0,))) == 0

    def refused_after_a_change_of(file: Path, change: Callable[[Any], Any]) -> str:
        before = file.read_text()
        file.write_text(json.dumps(change(json.loads(before))))
        capsys.readouterr()
        assert cli.main(arguments("where", here, model, out, "--resume")) == 1
        file.write_text(before)
        return capsys.readouterr().err

    def other_tokenizer(content: Any) -> Any:
        words = sorted(content["model"]["vocab"])
        content["model"]["vocab"] = dict(zip(words, range(len(words)), strict=True))
        return content

    template = refused_after_a_change_of(here / "sst2" / "source.json", lambda old: old | {"template": "{mask} {text}"})
    assert "resumed: labels, label words, templates or metrics of 'sst2' changed" in template
    network = refused_after_a_change_of(model / "config.json", lambda old: old | {"hidden_act": "relu"})
    assert "resumed: the model's config.json changed" in network
    tokenizer = refused_after_a_change_of(model / "tokenizer.json", other_tokenizer)
    assert "resumed: the tokenizer or the prompt of 'sst2' changed" in tokenizer
    assert cli.main(arguments("where", here, model, out, "--resume")) == 0


def test_units_that_lack_a_target_are_not_mixed_with_units_that_have_it(
    data, model_directory, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    less, out, model = tmp_path / "less", tmp_path / "out", model_directory("bert")
    shutil.copytree(data, less, ignore=shutil.ignore_patterns("snli"))
    assert cli.main(arguments("ood", less, model, out, seeds=(0,))) == 0
    assert list(results_of(out)["skipped"]) == ["snli"]
    assert cli.main(arguments("ood", data, model, out, "--resume")) == 1
    assert "data of 'snli'" in capsys.readouterr().err
    assert cli.main(arguments("ood", less, model, out, "--resume")) == 0
    assert {row["seed"] for row in rows_of(results_of(out))} == {0, 1}


def test_a_failure_says_what_is_kept(
    data, model_directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from forgetfree.benchmarks.paper.where import Where

    out, model, measure = tmp_path / "out", model_directory("bert"), Where.measure

    def measured_or(seed: int, error: BaseException) -> Any:
        def run(self: Where, context: ExperimentContext, unit: dict[str, Any]) -> Any:
            if unit["seed"] == seed:
                raise error
            return measure(self, context, unit)

        return run

    monkeypatch.setattr(Where, "measure", measured_or(0, KeyboardInterrupt()))
    assert cli.main(arguments("where", data, model, out)) == 1
    assert (
        "Interrupted." in (said := capsys.readouterr().err)
        and "finished: nothing; will start again: sst2 shots 4" in said
    )
    monkeypatch.setattr(Where, "measure", measured_or(1, TrainingError("The loss became nan.")))
    assert cli.main(arguments("where", data, model, out, "--resume")) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "sst2, shots 4, seed 1: The loss became nan." in error
    assert "finished: sst2 shots 4 seed 0)" in error and f"--resume --out {out}" in error
    (failed,) = results_of(out)["failed"]
    assert (failed["seed"], failed["error"]) == (1, "The loss became nan.")
    assert "not finished: some units are missing" in (out / "report.md").read_text()
    monkeypatch.setattr(Where, "measure", measure)
    assert cli.main(arguments("where", data, model, out, "--resume")) == 0
    assert results_of(out)["complete"] and results_of(out)["failed"] == []


def test_a_stream_is_not_lengthened_by_resuming(
    measured, data, model_directory, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    shutil.copytree(measured("continual"), out)
    more = ["--resume", "--task", "mnli"]
    assert cli.main(arguments("continual", data, model_directory("bert"), out, *more)) == 2
    assert "--task (was qnli, ag_news, sst2, now qnli, ag_news, sst2, mnli)" in capsys.readouterr().err


def test_tasks_without_data_are_left_out_and_named(data, model_directory, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli.main(arguments("where", data, model_directory("bert"), out, "--task", "trec")) == 0
    results = results_of(out)
    assert list(results["skipped"]) == ["trec"]
    assert {row["task"] for row in rows_of(results)} == {"sst2"}
    assert "no data at hand for: trec" in (out / "report.md").read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "stepz=3"], "Unknown option 'stepz'. Did you mean 'steps'?"),
        (["--seed", "0"], "names the same seed twice"),
        (["--sparsity", "0.2"], "where looks at one of sparsities, got 0.1, 0.2"),
        (["--task", "sst22"], "Unknown task 'sst22'"),
        (["--set", "sparsity=0.3"], "--set sparsity has no effect here. Give --sparsity."),
        (["--sparsity", "0.1"], "--sparsity names the same sparsity twice"),
        (["--set", "threads=none_at_all"], "threads must be"),
        (["--set", "steps=many"], "steps must be"),
        (["--sparsity", "2"], "--sparsity must be at most 1"),
        (["--shots", "0"], "--shots must be at least 1, got 0"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--set", "test_limit=0"], "test_limit must be at least 1"),
        (["--data", "/nowhere"], "/nowhere"),
        (["--model", "nothing"], "Unknown model 'nothing'"),
    ],
)
def test_wrong_usage_is_one_paragraph(
    more: list[str], message: str, data, model_directory, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    code = cli.main(arguments("where", data, model_directory("bert"), tmp_path / "out", *more))
    assert code == 2
    assert not (tmp_path / "out").exists()
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("forgetfree: error: ") and message in error


def test_what_is_compared_cannot_be_set(data, model_directory, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    more = ["--set", "optimizer=adamw"]
    assert cli.main(arguments("optimizers", data, model_directory("bert"), tmp_path / "out", *more)) == 2
    assert "optimizer is what this experiment compares" in capsys.readouterr().err


def test_resuming_needs_to_know_where(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["experiment", "where", "--resume"]) == 2
    assert "--resume needs --out DIR" in capsys.readouterr().err


def test_there_must_be_something_to_resume(
    data, model_directory, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert cli.main(arguments("where", data, model_directory("bert"), tmp_path / "typo", "--resume")) == 2
    assert "nothing to resume" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


def test_an_unknown_experiment_is_named_with_the_known(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["experiment", "calibrations"]) == 2
    assert "Did you mean 'calibration'?" in capsys.readouterr().err


def test_results_of_another_kind_are_refused(tmp_path: Path, measured, capsys: pytest.CaptureFixture) -> None:
    other = tmp_path / "results.json"
    other.write_text("{}")
    assert cli.main(["report", str(measured("where")), str(other)]) == 2
    assert "Results of experiment and run have no table in common" in capsys.readouterr().err
    other.write_text('{"experiment": "where", "schema": 2}')
    assert cli.main(["report", str(other)]) == 1
    assert "holds no results of an experiment" in capsys.readouterr().err


def test_experiments_are_listed(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["list", "experiments"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in registry.EXPERIMENTS)
