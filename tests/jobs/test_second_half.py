"""The experiments of the paper's second half: what each adds to those before, on tiny models and on rows made by hand."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forgetfree import cli
from forgetfree.benchmarks.paper import published
from forgetfree.benchmarks.paper.bottlenecks import bottlenecks
from forgetfree.benchmarks.paper.bound import SCALE_NATS, certified_error, described, region_nats
from forgetfree.benchmarks.paper.model_labels import own_labels
from forgetfree.benchmarks.paper.multi_task import groups, purified, train_together, with_gains
from forgetfree.core.regions import Region
from forgetfree.data.rows import Rows, put_together
from forgetfree.data.sources import load_task
from forgetfree.errors import ModelError, UsageError
from forgetfree.jobs.experiments import ExperimentContext, TunedTask, adjusted, load_experiment
from forgetfree.models.state import StateStore

STEPS = {"steps": "4", "mask_steps": "1", "mask_batch_size": "8", "precision": "fp32", "max_gradient_norm": "1"}


@pytest.fixture
def context(data_directory: Path, model_directory, tmp_path: Path):
    """What an experiment's units are measured with, on the tiny BERT."""

    def make(name: str, **changes: Any) -> ExperimentContext:
        changes = {
            "model": str(model_directory("bert")),
            "readout": "linear",
            "tasks": ("sst2",),
            "sparsities": (0.1,),
            **changes,
        }
        experiment = load_experiment(name)
        preset = adjusted(experiment.presets["small"], changes, STEPS)
        return ExperimentContext(
            preset, str(data_directory), "cpu", StateStore(tmp_path), tmp_path, merged=experiment.merged
        )

    return make


# -- multi-task ------------------------------------------------------------------------------------------


def test_one_model_learns_all_tasks_and_is_theta_pre_again(context) -> None:
    here = context("multi-task", tasks=("sst2", "ag_news"))
    loaded = here.model()
    benches = [here.bench({"task": task, "shots": 4, "seed": 0}, loaded) for task in here.preset.tasks]
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


def test_unions_are_of_kinds_of_pairs_and_of_all() -> None:
    assert groups(("snli", "mnli", "sst2", "cr", "qqp")) == {
        "NLI": ("snli", "mnli"),
        "sentiment": ("sst2", "cr"),
        "NLI + paraphrase": ("snli", "mnli", "qqp"),
        "all": ("snli", "mnli", "sst2", "cr", "qqp"),
    }
    assert groups(("snli", "mnli", "mine")) == {"NLI": ("snli", "mnli"), "all": ("snli", "mnli", "mine")}
    assert groups(("sst2", "qnli")) == {"all": ("sst2", "qnli")}


def multi_task_rows(kin: float, union: float, pure: float) -> list[dict[str, Any]]:
    """SST-2 and CR are kin, QNLI is a stranger; training lifts each score from 50 to 90 %."""
    tasks, common = ("sst2", "cr", "qnli"), {"seed": 0, "shots": 4}
    rows = []
    for task in tasks:
        of = {**common, "task": task}
        rows += [
            {**of, "region": name, "model": name, "score": s} for name, s in (("no graft", 0.5), ("whole model", 0.9))
        ]
        for region in tasks:
            gain = 0.9 if region == task else kin if {region, task} == {"sst2", "cr"} else 0.1
            rows.append({**of, "region": region, "model": "graft", "score": 0.5 + 0.4 * gain, "overlap": gain / 2})
        for region in ("sentiment", "all") if task != "qnli" else ("all",):
            for model, gain in (("union", union), ("purified", pure)):
                rows.append({**of, "region": region, "model": model, "score": 0.5 + 0.4 * gain})
    return rows


def test_multi_task_weighs_kin_and_strangers_and_unions() -> None:
    claims = load_experiment("multi-task").claims(multi_task_rows(0.6, 0.75, 0.85))
    assert [claim.holds for claim in claims] == [True, True, True, True, True, None]  # no MRPC, no QQP
    assert [claim.ours for claim in claims[1:5]] == ["30.0 against 5.0", "60.0 against 10.0", "75.0", "85.0"]
    claims = load_experiment("multi-task").claims(multi_task_rows(0.05, 0.65, 0.7))
    assert [claim.holds for claim in claims] == [True, False, False, False, False, None]


def test_no_share_is_told_of_a_gain_that_is_noise() -> None:
    rows = [row | ({"score": 0.52} if row["model"] == "whole model" else {}) for row in multi_task_rows(0.6, 0.7, 0.8)]
    assert all(math.isnan(row["gain"]) for row in with_gains(rows))


def on_sst2(experiment: str, data: Path, out: Path) -> list[str]:
    """The command line of an experiment on one task."""
    return ["experiment", experiment, "--data", str(data), "--task", "sst2", "--out", str(out)]


def test_one_task_alone_is_refused(data_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(on_sst2("multi-task", data_directory, tmp_path / "out")) == 2
    assert "multi-task needs two tasks or more, got sst2." in capsys.readouterr().err


def test_without_smollm2_the_remedy_is_told(
    data_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGETFREE_CACHE", str(tmp_path / "cache"))
    assert cli.main(on_sst2("causal", data_directory, tmp_path / "out")) == 2
    assert "Get it by: forgetfree fetch smollm2" in capsys.readouterr().err


# -- bound -----------------------------------------------------------------------------------------------


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


@pytest.mark.sampled(share=0.3)
def test_a_certificate_is_given_from_all_training_rows(model_directory, tmp_path: Path) -> None:
    """Six hundred rows of each label, and words that tell it, certify a model of the tiny BERT."""
    draw = random.Random(0)
    for split, count in (("train", 1200), ("validation", 100), ("test", 100)):
        file = tmp_path / "data" / "sst2" / f"{split}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            {"text": f"{('bad', 'good')[i % 2]} {draw.choice('abcdefgh')} {i}", "label": i % 2} for i in range(count)
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    arguments = [
        "experiment",
        "bound",
        "--data",
        str(tmp_path / "data"),
        "--model",
        str(model_directory("bert")),
        "--task",
        "sst2",
    ]
    arguments += [
        "--readout",
        "linear",
        "--shots",
        "600",
        "--sparsity",
        "1e-3",
        "--sparsity",
        "0.5",
        "--seed",
        "0",
        "--jobs",
        "1",
        "--out",
        str(out),
    ]
    arguments += [part for s in ("steps=80", "learning_rate=1e-2", "validation_rows=64") for part in ("--set", s)]
    assert cli.main(arguments) == 0
    results = json.loads((out / "results.json").read_text())
    (unit,) = results["units"]
    rows = unit["rows"]
    (certified,) = [row for row in rows if row["model"] == "described"]  # half of all entries cannot be described
    assert certified["sparsity"] == 1e-3 and certified["train_rows"] == 1200
    errors = round(certified["train_error"] * 1200)
    assert certified["certificate"] == pytest.approx(certified_error(errors, 1200, certified["nats"], 0.05), abs=1e-4)
    assert certified["train_error"] < certified["certificate"] < 0.5
    assert certified["test_error"] < certified["certificate"]
    assert [row["printed"] > 1 for row in rows if row["model"] == "re-trained"] == [False, True]
    assert "at most, with 95%" in (out / "report.md").read_text()


# -- adapters --------------------------------------------------------------------------------------------


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


def test_a_network_of_another_kind_has_no_place_for_bottlenecks() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(2, 2))
    refused = pytest.raises(ModelError, match="Sequential has no layer to put adapters after")
    with refused, bottlenecks(network, "Pfeiffer", 1, seed=0):
        pass


# -- full-data, model-labels, fish -----------------------------------------------------------------------


def test_the_tasks_of_sentiment_are_one(data_directory: Path) -> None:
    sst2 = load_task("sst2", str(data_directory))
    other = replace(sst2, task=replace(sst2.task, name="mr"), train=Rows(("fine",), (), (1,)))
    merged = put_together("sentiment", [sst2, other])
    assert merged.task.name == "sentiment" and merged.task.labels == sst2.task.labels
    assert merged.train.first == (*sst2.train.first, "fine") and merged.train.labels == (*sst2.train.labels, 1)
    assert len(merged.test) == 2 * len(sst2.test)
    three = replace(sst2, task=replace(sst2.task, name="mine", labels=("bad", "so-so", "good")))
    with pytest.raises(UsageError, match=r"need the labels of 'sst2' \(negative, positive\), and 'mine' has others"):
        put_together("sentiment", [sst2, three])


def test_of_sentiment_the_tasks_without_data_are_left_out(context) -> None:
    here = context("full-data", tasks=("sentiment",))
    assert load_experiment("full-data").tasks(here.preset) == [("sst2",), ("mr",), ("cr",), ("mpqa",)]
    assert here.rows("sentiment").train.first == here.rows("sst2").train.first  # mr, cr and mpqa are not here


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


def test_fish_compares_scores_and_shared_entries() -> None:
    def rows(fisher: float, shared: float) -> list[dict[str, Any]]:
        common = {"task": "a", "seed": 0, "sparsity": 1e-4}
        scores = {"learned": (0.9, 1.0), "fisher": (fisher, shared), "random": (0.5, 0.0)}
        return [{**common, "region": name, "score": score, "overlap": of} for name, (score, of) in scores.items()]

    claims = load_experiment("fish").claims(rows(0.8, 0.05))
    assert [(c.holds, c.ours) for c in claims] == [(True, "90.0 against 80.0"), (True, "5.0")]
    assert claims[0].paper == "by about 10 points"
    assert [claim.holds for claim in load_experiment("fish").claims(rows(0.95, 0.2))] == [False, False]


# -- The paper's numbers ---------------------------------------------------------------------------------


def test_the_papers_tables_are_whole() -> None:
    tables = [published.TABLE_5, published.TABLE_6, published.TABLE_7, published.TABLE_8, published.TABLE_9]
    assert [len(table.rows) for table in tables] == [4, 16, 16, 12, 11]
    for table in tables:
        assert table.title.endswith("in the paper")
        assert all(len(row) == len(table.header) for row in table.rows)
        assert all(0 <= float(cell) <= 100 for row in table.rows for cell in row[1:])
    rows = {row[0]: row for row in published.TABLE_6.rows}
    assert rows["graft 0.01 %"][1:3] == ("92.4", "3.2") and rows["LoRA 8"][-2:] == ("79.7", "14.3")
    assert next(row for row in published.TABLE_8.rows if row[0] == "qqp 0.01 %")[1] == "11.4"
