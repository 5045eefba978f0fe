"""Experiments of the paper as scripts, on tiny models: measurements, files, and resuming."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from benchmarks.paper.bottlenecks import bottlenecks
from benchmarks.paper.bound import SCALE_NATS, described, region_nats
from benchmarks.paper.context import Context, TunedTask
from benchmarks.paper.experiment import main, read_rows
from benchmarks.paper.model_labels import own_labels
from benchmarks.paper.multi_task import purified, train_together
from benchmarks.paper.ood import target_rows
from benchmarks.paper.overview import EXPERIMENTS
from benchmarks.paper.where import Where
from forgetfree.core.regions import Region
from forgetfree.errors import TrainingError
from forgetfree.results.report.page import render_page

pytestmark = pytest.mark.long

STEPS = {"steps": "4", "mask_steps": "1", "mask_batch_size": "8", "precision": "fp32", "max_gradient_norm": "1"}
#: The tiny tasks on which each experiment runs.
TASKS = {name: ["sst2"] for name in EXPERIMENTS} | {"ood": ["qnli"], "adapters": ["qnli"]}
TASKS |= {name: ["qnli", "ag_news", "sst2"] for name in ("continual", "multi-task")}
Run = Callable[..., int]


@pytest.fixture(scope="module")
def data(data_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny tasks, with mnli and snli, which have qnli's rows and a third label."""
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
def run(data: Path, model_directory: Any) -> Run:
    """Return a function that calls an experiment as its script does."""

    def call(name: str, out: Path, *more: str, seeds: tuple[int, ...] = (0, 1), data: Path = data) -> int:
        words = ["--data", str(data), "--model", str(model_directory("bert")), "--out", str(out), "--shots", "4"]
        words += [part for task in TASKS[name] for part in ("--task", task)]
        words += [part for seed in seeds for part in ("--seed", str(seed))]
        words += [
            "--sparsity",
            "0.1",
            *(["--sparsity", "0.02"] if "sparsities" not in EXPERIMENTS[name].single else []),
        ]
        settings = ("steps=2", "mask_steps=1", "mask_batch_size=8")
        return main(EXPERIMENTS[name], [*words, *(part for each in settings for part in ("--set", each)), *more])

    return call


@pytest.fixture(scope="module")
def measured(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that runs an experiment once, and returns its directory."""
    root, done = tmp_path_factory.mktemp("experiments"), dict[str, Path]()

    def once(name: str) -> Path:
        if name not in done:
            done[name] = root / name
            assert run(name, root / name) == 0
        return done[name]

    return once


def rows_of(out: Path) -> list[dict[str, Any]]:
    (file,) = out.glob("*.csv")
    return read_rows(file)[1]


@pytest.fixture
def context(data: Path, model_directory: Any, tmp_path: Path) -> Callable[..., Context]:
    """Return a function that makes the context of an experiment's units, with the tiny BERT."""

    def make(name: str, **changes: Any) -> Context:
        usual = {"model": str(model_directory("bert")), "tasks": ("sst2",), "shots": (4,), "sparsities": (0.1,)}
        setting = replace(EXPERIMENTS[name].setting, **{**usual, **changes}, fixed=STEPS)
        return Context(setting, str(data), "cpu", tmp_path, tmp_path)

    return make


# -- As a script -----------------------------------------------------------------------------------------


@pytest.mark.sampled("adapters", "continual", "multi-task", "ood", "what-fails", share=0.15)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_script_writes_rows_report_and_figure(name: str, measured: Callable[[str], Path], capsys: Any) -> None:
    out = measured(name)
    header, rows = read_rows(out / f"{name}.csv")
    assert header["experiment"] == name and header["skipped"] == {} and {row["seed"] for row in rows} == {0, 1}
    assert sum(len(json.loads(file.read_text())) for file in (out / "units").iterdir()) == len(rows) > 2
    for key in ("score", "ece", "agreement", "share"):
        assert all(0 <= row[key] <= 1 for row in rows if key in row)
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page = EXPERIMENTS[name].page(header, rows)
    assert (out / "report.md").read_text() == render_page(page, "markdown")
    assert page.tables[0].title == "What the paper claims" and page.tables[0].rows
    for key, value in (("model", "fine-tuned"), ("region", "learned"), ("strategy", "fine-tune"), ("by", "kind")):
        left = [row for row in rows if row.get(key) != value]  # without its measurements, a claim is undecided
        if len(left) < len(rows):
            claims = EXPERIMENTS[name].claims(left)
            assert all("nan" not in claim.ours for claim in claims)
            assert any(claim.holds is None for claim in claims)


def test_units_that_are_there_are_not_measured_again_and_more_are_added(
    run: Run, measured: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A run interrupted in its second unit has, once resumed, the rows of an uninterrupted run; --task may add units."""
    whole, measure, calls = measured("where") / "where.csv", Where.measure, list[Any]()

    def cut_short(self: Where, context: Context, unit: dict[str, Any]) -> Any:
        calls.append((unit["task"], unit["seed"]))
        if len(calls) == 2:
            raise TrainingError("The loss became nan.")
        return measure(self, context, unit)

    monkeypatch.setattr(Where, "measure", cut_short)
    assert run("where", tmp_path / "out") == 1
    assert "where: error: The loss became nan." in capsys.readouterr().err
    assert run("where", tmp_path / "out") == 0
    assert calls == [("sst2", 0), ("sst2", 1), ("sst2", 1)]
    assert (tmp_path / "out" / "where.csv").read_text() == whole.read_text()
    assert run("where", tmp_path / "out", "--task", "qnli") == 0
    assert calls[3:] == [("qnli", 0), ("qnli", 1)] and {row["task"] for row in rows_of(tmp_path / "out")} == {
        "sst2",
        "qnli",
    }


def test_another_setting_other_data_or_another_model_are_refused(
    run: Run, measured: Callable[[str], Path], data: Path, model_directory: Any, tmp_path: Path, capsys: Any
) -> None:
    out = Path(shutil.copytree(measured("where"), tmp_path / "out"))
    other = Path(shutil.copytree(data, tmp_path / "other"))
    (other / "sst2" / "test.jsonl").write_text((data / "sst2" / "validation.jsonl").read_text())
    for how, told in (
        ({"more": ("--set", "steps=3")}, "setting.fixed"),
        ({"data": other}, "data of sst2"),
        ({"more": ("--model", str(model_directory("roberta")))}, "model"),
    ):
        assert run("where", out, *how.pop("more", ()), **how) == 1
        error = " ".join(capsys.readouterr().err.split())
        assert "was begun otherwise: these differ: " in error and told in error and "Give another --out." in error


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("where", ["--set", "stepz=3"], "stepz"),
        ("where", ["--set", "steps"], "--set takes KEY=VALUE, got 'steps'."),
        ("where", ["--set", "sparsity=0.3"], "--set sparsity: this experiment varies this option itself."),
        ("optimizers", ["--set", "optimizer=adamw"], "--set optimizer: this experiment varies this option itself."),
        ("where", ["--sparsity", "0.2"], "where looks at one of sparsities, got 0.1, 0.2. Give one."),
        ("where", ["--task", "sst22"], "Unknown stream or task 'sst22'"),
        ("where", ["--data", "/nowhere"], "/nowhere"),
        ("where", ["--model", "nothing"], "Unknown model 'nothing'"),
        ("ood", ["--task", "ag_news"], "Unknown source for ood"),
        ("sparsity-curve", ["--sparsity", "1e-9"], "leaves no entry"),
    ],
)
def test_what_is_wrong_is_told_in_one_paragraph(
    name: str, more: list[str], message: str, run: Run, tmp_path: Path, capsys: Any
) -> None:
    assert run(name, tmp_path / "out", *more) != 0
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"{name}: error: ") and message in error


# -- Measurements ----------------------------------------------------------------------------------------


def test_the_shares_of_a_region_add_up(measured) -> None:
    rows = rows_of(measured("where"))
    for seed in (0, 1):
        for by in ("layer", "kind"):
            those = [row for row in rows if row["seed"] == seed and row["by"] == by]
            assert sum(row["share"] for row in those) == pytest.approx(1)
            assert sum(row["of_model"] for row in those) == pytest.approx(1)


def test_the_reliability_diagram_is_that_of_the_answers(measured) -> None:
    """The bins alone give the accuracy, and an ECE that is no larger, since these bins are coarser."""
    for row in rows_of(measured("calibration")):
        counts, right, confidence = (np.array(row[key]) for key in ("counts", "right", "confidence"))
        assert counts.sum() == tiny.SIZES["test"]
        assert right.sum() / counts.sum() == pytest.approx(row["score"])
        assert (
            abs(right.sum() - confidence.sum()) / counts.sum() <= row["ece"] + 1e-4
        )  # gaps of bins may cancel, but not add up


def test_of_nli_targets_contradiction_and_entailment_alone_are_answered(context: Callable[..., Context]) -> None:
    here = context("ood", tasks=("qnli",))
    tuned = TunedTask(bench := here.bench({"task": "qnli", "shots": 4, "seed": 0}), bench.pre, here.options())
    target, rows = target_rows(here, tuned, "mnli"), here.rows("mnli").test
    expected = [(text, label) for text, label in zip(rows.first, rows.labels, strict=True) if label != 1]
    assert 0 < len(target) == len(expected) < len(rows)
    assert target.labels.tolist() == [0 if label == 0 else 1 for _, label in expected]


def test_one_model_learns_all_tasks_and_is_theta_pre_again(context) -> None:
    here = context("multi-task", tasks=("sst2", "ag_news"))
    loaded = here.model()
    benches = [here.bench({"task": task, "shots": 4, "seed": 0}, loaded) for task in here.setting.tasks]
    first, again = (train_together(benches, here.options()) for _ in range(2))
    assert torch.equal(first.theta, again.theta) and not torch.equal(first.theta, benches[0].pre.theta)
    for bench in benches:
        for name, tensor in bench.pre.readouts[bench.task.name].items():
            assert not torch.equal(first.readouts[bench.task.name][name], tensor)
        assert torch.equal(bench.space.flatten(bench.model.backbone), bench.pre.theta)
    union = Region(torch.arange(0, 60, 2))
    pure = purified(benches, first, union, here.options(mask_learning_rate=1e12), steps=3)
    assert 0 < len(pure) <= len(union) and pure != union
    assert purified(benches, first, union, here.options(mask_learning_rate=1e-12), steps=3) == union
    assert torch.equal(benches[0].space.flatten(benches[0].model.backbone), benches[0].pre.theta)


def test_a_described_model_has_few_values_and_its_length_is_what_they_cost(context) -> None:
    here = context("bound")
    bench = here.bench({"task": "sst2", "shots": 4, "seed": 0})
    tuned = TunedTask(bench, bench.fine_tuned(here.options(learning_rate=0.1)), here.options())
    region = Region(torch.tensor([3, 50, 51, 400]))
    state, nats = described(tuned, tuned.fine_tuned, region, 2, 4)
    changed = (state.theta != bench.pre.theta).nonzero().squeeze(1)
    assert set(changed.tolist()) <= set(region.indices.tolist())
    moves = (state.theta - bench.pre.theta)[region.indices].abs()
    assert float(moves.max() - moves.min()) < 1e-6  # one magnitude, two signs
    weight, bias = state.readouts["sst2"]["weight"], state.readouts["sst2"]["bias"]
    assert not weight[0].any() and len(weight[1].unique()) <= 4
    by_hand = (
        region_nats(len(bench.space), 4) + 4 * math.log(2) + (weight[1].numel() + 1) * math.log(4) + 3 * SCALE_NATS
    )
    assert nats == pytest.approx(by_hand) and bias.shape == (2,)


@pytest.mark.parametrize(
    ("kind", "model", "layers"), [("Houlsby", "bert", 2), ("Pfeiffer", "roberta", 1), ("Houlsby", "gpt2", 2)]
)
def test_bottlenecks_change_nothing_at_first_and_nothing_of_the_backbone_ever(
    kind, model, layers, context, model_directory
) -> None:
    here = context("adapters", model=str(model_directory(model)))
    bench = here.bench({"task": "sst2", "shots": 4, "seed": 0})
    backbone = bench.model.backbone
    depth = backbone.config.num_hidden_layers
    before = bench.answers(bench.pre).logits
    with bottlenecks(backbone, kind, 3, seed=0) as parameters:
        assert len(parameters) == 4 * layers * depth
        width = backbone.config.hidden_size
        assert {tuple(p.shape) for p in parameters} == {(3, width), (width, 3), (3,), (width,)}
        assert (bench.answers(bench.pre).logits == before).all()
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(0.5)
        assert (bench.answers(bench.pre).logits != before).any()
    assert (bench.answers(bench.pre).logits == before).all()
    assert torch.equal(bench.space.flatten(backbone), bench.pre.theta)


def test_a_region_by_the_models_own_labels_is_that_of_rows_with_these_labels(context) -> None:
    here = context("model-labels")
    bench = here.bench({"task": "sst2", "shots": 4, "seed": 0})
    tuned = TunedTask(bench, bench.fine_tuned(here.options(learning_rate=0.1)), here.options())
    task = bench.task
    (own,) = own_labels(tuned, [0.05])
    assert bench.task is task
    answers = torch.from_numpy(bench.answers(tuned.fine_tuned, task.train).logits.argmax(1))
    flipped = replace(task.train, labels=1 - task.train.labels)
    assert (own == tuned.learned(0.05)[0]) is bool((answers == task.train.labels).all())
    bench.task = replace(task, train=flipped)
    assert own_labels(tuned, [0.05]) == [own]  # whatever the true labels are


def test_options_set_by_hand_reach_the_stream(measured: Callable[[str], Path]) -> None:
    """Each task has two updates instead of the setting's two hundred."""
    assert {row["steps"] for row in rows_of(measured("continual"))} == {2}


def test_a_graft_of_everything_is_the_fine_tuned_model(run: Run, tmp_path: Path) -> None:
    more = ["--sparsity", "1.0", "--set", "mask_steps=0"]
    assert run("localization", tmp_path / "out", *more, seeds=(0,)) == 0
    (row,) = [row for row in rows_of(tmp_path / "out") if row["model"] == "grafted" and row["sparsity"] == 1.0]
    assert row["agreement"] == 1.0
