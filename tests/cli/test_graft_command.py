"""`forgetfree graft` as a user meets it: what it measures, what it writes, what it takes, what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
)

from forgetfree import cli, recipes
from forgetfree.core.base_regions import most_moved
from forgetfree.core.regions import Region, biases, distribution, kind_of, layer_of
from forgetfree.data.sources import load_task
from forgetfree.errors import ForgetfreeError
from forgetfree.jobs.running import progress
from forgetfree.ledger.graft import Graft
from forgetfree.models.fine_tuned_directory import label_order, load_fine_tuned
from forgetfree.models.loading import load_model
from forgetfree.models.task_model import ClassifierModel
from forgetfree.recipes import ModelEntry
from forgetfree.results import calibration, metrics
from forgetfree.results.answers import LabelAnswers
from forgetfree.results.records import GraftResults
from forgetfree.results.report.graft_report import lay_out_graft
from forgetfree.results.report.page import render_page
from forgetfree.results.stored import load_graft_results
from forgetfree.tensor_file import TensorFile
from forgetfree.training.localization import LocalizationOptions
from forgetfree.training.single_task import SingleTask

#: Tensors and metadata of any format, with their checksum.
ANY_FILE = TensorFile(ForgetfreeError, "")

LABELS = {0: "negative", 1: "positive"}


class GraftCommand:
    """Runs the command on tiny data and a tiny model."""

    def __init__(self, data: Path, directory: Callable[[str], Path], root: Path) -> None:
        self.data, self.directory, self.root = data, directory, root
        self.count = 0

    def arguments(self, *more: str, kind: str = "bert", task: str = "sst2") -> list[str]:
        given = list(more)
        for flag, value in (
            ("--data", self.data),
            ("--model", self.directory(kind)),
            ("--shots", 4),
            ("--steps", 3),
            ("--sparsity", 0.05),
            ("--out", self.root / f"out-{self.count}"),
        ):
            given += [] if flag in given else [flag, str(value)]
        self.count += 1
        return ["graft", task, *given]

    def __call__(self, *more: str, kind: str = "bert", task: str = "sst2") -> Path:
        arguments = self.arguments(*more, kind=kind, task=task)
        assert cli.main(arguments) == 0
        return Path(arguments[arguments.index("--out") + 1])


@pytest.fixture(scope="module")
def graft(data_directory: Path, model_directory: Any, tmp_path_factory: pytest.TempPathFactory) -> GraftCommand:
    return GraftCommand(data_directory, model_directory, tmp_path_factory.mktemp("grafts"))


LEARN = ("--shots", "8", "--steps", "20", "--set", "optimizer=adamw", "--set", "learning_rate=0.01")
TWICE = ("--seed", "0", "--seed", "3", "--sparsity", "0.05", "--sparsity", "0.01", *LEARN)


@pytest.fixture(scope="module")
def finished(graft: GraftCommand) -> Path:
    """Two seeds, two sparsities, a linear readout."""
    return graft(*TWICE)


def results_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def row_of(out: Path, model: str, **wanted: Any) -> dict[str, Any]:
    (row,) = [r for r in results_of(out)["rows"] if r["model"] == model and all(r[k] == v for k, v in wanted.items())]
    return row


def figures(row: dict[str, Any]) -> tuple[float, float, float]:
    return row["score"], row["ece"], row["agreement"]


# -- What it writes --------------------------------------------------------------------------------------


@pytest.mark.sampled(share=0.4)
def test_results_by_the_schema(finished: Path, graft: GraftCommand) -> None:
    results = results_of(finished)
    assert (results["schema"], results["task"], results["metric"], results["base"]) == (
        1,
        "sst2",
        "accuracy",
        "movement",
    )
    assert set(results["model"]) == {"name", "fingerprint", "readout", "parameters", "graftable"}
    assert results["data"] | {"fingerprint": ""} == {**{"shots": 8, "steps": 20, "fingerprint": "", "test_rows": 16}}
    assert set(results["seconds"]) == {"fine_tune", "localize", "evaluate"}
    assert [(r["seed"], r["model"], r["sparsity"]) for r in results["rows"]] == [
        (seed, *row)
        for seed in (0, 3)
        for row in (
            ("pre-trained", None),
            ("readout alone", None),
            ("fine-tuned", None),
            ("grafted", 0.05),
            ("grafted", 0.01),
        )
    ]
    entries = {0.05: int(0.05 * results["model"]["graftable"]), 0.01: int(0.01 * results["model"]["graftable"])}
    for row in results["rows"]:
        if row["model"] == "grafted":
            assert 0 < row["entries"] <= entries[row["sparsity"]]
        else:
            assert row["entries"] is None
        assert all(0 <= row[key] <= 1 for key in ("score", "ece", "agreement"))
        assert row["agreement"] == 1 or row["model"] != "fine-tuned"
    grafted = [row["entries"] for row in results["rows"] if row["model"] == "grafted"]
    assert [sum(region["layers"].values()) for region in results["regions"]] == grafted
    assert [sum(region["kinds"].values()) for region in results["regions"]] == grafted
    assert sum(results["space"]["layers"].values()) == results["model"]["graftable"]


def test_the_regions_are_those_of_the_files(finished: Path) -> None:
    results = results_of(finished)
    assert [g["file"] for g in results["grafts"]] == [
        f"graft-seed-{seed}-sparsity-{sparsity}.safetensors" for seed in (0, 3) for sparsity in (0.05, 0.01)
    ]
    for written, where in zip(results["grafts"], results["regions"], strict=True):
        path = finished / written["file"]
        saved = Graft.load(path)
        assert written["bytes"] == path.stat().st_size
        assert (written["seed"], written["sparsity"]) == (where["seed"], where["sparsity"])
        assert where["layers"] == distribution(saved.region, saved.space, layer_of)
        assert where["kinds"] == distribution(saved.region, saved.space, kind_of)
        assert saved.origin.sparsity == written["sparsity"] and saved.origin.task.name == "sst2"


def test_config_json_says_what_repeats_it(finished: Path, graft: GraftCommand) -> None:
    config = json.loads((finished / "config.json").read_text())
    assert set(config) == {
        *("schema", "graft", "options", "versions", "machine", "command", "model", "fine_tuned", "base_file", "tasks"),
        *("data", "about", "units", "code", "checksum"),
    }
    assert config["graft"]["seed"] == [0, 3] and config["graft"]["set"] == {
        "optimizer": "adamw",
        "learning_rate": "0.01",
    }
    assert [options["sparsity"] for options in config["options"]] == [0.05, 0.01]
    assert {"forgetfree", "python", "torch", "transformers"} <= set(config["versions"])
    sizes = {key: config["data"]["sst2"][key] for key in ("train", "validation", "test")}
    assert sizes == {"train": 16, "validation": 12, "test": 16}


def test_the_report_shows_means_over_seeds_and_where_the_region_lies(
    graft: GraftCommand, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(progress, "_INTERVAL", 0.0)  # every message has a line
    out = graft(*TWICE, "--verbose")
    printed = capsys.readouterr()
    report = (out / "report.md").read_text()
    for text in (printed.out, report):
        for words in ("pre-trained", "readout alone", "grafted, sparsity 0.05", "by layer", "by kind", "query weight"):
            assert words in text
        assert "mean (standard deviation, n - 1) over 2 seeds" in text
    scores = [row["score"] for row in results_of(out)["rows"] if row["model"] == "fine-tuned"]
    cell = f"{100 * np.mean(scores):.1f} ({100 * np.std(scores, ddof=1):.1f})"
    assert cell in report
    assert f"({(out / 'graft-seed-3-sparsity-0.01.safetensors').stat().st_size:,} bytes)" in printed.out
    assert " · seed 3 · sst2 · localize" in printed.err
    by_layer = results_of(out)["regions"]
    shares = [r["layers"]["0"] / sum(r["layers"].values()) for r in by_layer if r["sparsity"] == 0.01]
    assert f"{100 * np.mean(shares):.1f}" in report.split("by layer")[1].splitlines()[4]


def test_a_floor_out_of_bounds_is_refused(finished: Path) -> None:
    results = results_of(finished)
    results["floors"]["constant"] = 77.0
    with pytest.raises(ValueError, match=r"floors\.constant must be a number in \[0, 1\], got 77"):
        GraftResults.of(results)


def test_one_seed_and_one_sparsity_make_one_plain_file(graft: GraftCommand, capsys: Any) -> None:
    out = graft("--sparsity", "0.02")
    assert sorted(path.name for path in out.iterdir()) == [
        *("config.json", "fine-tuned", "graft.safetensors", "report.md", "results.json", "seed-0")
    ]
    assert f"Graft: {out / 'graft.safetensors'} (" in capsys.readouterr().out
    capsys.readouterr()
    assert cli.main(["report", str(out)]) == 0  # the tables again, without any training
    assert capsys.readouterr().out.split() == render_page(lay_out_graft(load_graft_results(out)), "rich").split()
    assert results_of(graft("--base", str(out)))["base"] == out.name  # the directory that holds one graft serves, too


def test_same_seed_same_results(graft: GraftCommand, finished: Path) -> None:
    again = graft(*TWICE)
    apart = dict.fromkeys(("seconds", "made_of", "checksum"))
    assert results_of(again) | apart == results_of(finished) | apart
    for path in finished.glob("*.safetensors"):
        one, other = Graft.load(path), Graft.load(again / path.name)
        assert one.region == other.region and torch.equal(one.values, other.values) and one.origin == other.origin
        assert all(torch.equal(tensor, other.readout[name]) for name, tensor in one.readout.items())


def test_fine_tuned_models_are_shared(graft: GraftCommand, finished: Path, tmp_path: Path) -> None:
    out = graft(*TWICE, "--set", f"cache={finished / 'fine-tuned'}")
    assert "fine_tune" not in results_of(out)["seconds"] and not (out / "fine-tuned").exists()
    assert results_of(out)["rows"] == results_of(finished)["rows"]


def test_what_is_finished_survives_an_interrupt(graft: GraftCommand, monkeypatch: Any, capsys: Any) -> None:
    def interrupted(self: SingleTask, *_: Any, **__: Any) -> None:
        if self.seed == 3:
            raise KeyboardInterrupt
        return localized(self, *_, **__)

    localized = SingleTask.localized
    monkeypatch.setattr(SingleTask, "localized", interrupted)
    arguments = graft.arguments("--seed", "0", "--seed", "3")
    assert cli.main(arguments) == 1
    out = Path(arguments[arguments.index("--out") + 1])
    assert (
        f"(finished: seed 0; will start again: seed 3); the same command with --resume --out {out}"
        in capsys.readouterr().err
    )
    assert {row["seed"] for row in results_of(out)["rows"]} == {0}
    assert [path.name for path in out.glob("*.safetensors")] == ["graft-seed-0-sparsity-0.05.safetensors"]


# -- What it measures ------------------------------------------------------------------------------------


@pytest.mark.sampled("gpt2-lm")
@pytest.mark.parametrize("kind", ["bert", "bert-mlm", "gpt2-lm"])
def test_the_figures_are_those_of_the_models(graft: GraftCommand, kind: str) -> None:
    """θ put together by hand, and the metrics of its answers."""
    out = graft("--seed", "3", *LEARN, kind=kind)
    options = LocalizationOptions(steps=20, sparsity=0.05, optimizer="adamw", learning_rate=0.01)
    bench = SingleTask.of(load_model(str(graft.directory(kind))), load_task("sst2", str(graft.data)), shots=8, seed=3)
    ft = bench.fine_tuned(options)
    reference = bench.answers(ft)
    saved = Graft.load(out / "graft.safetensors")
    expected = {"pre-trained": bench.answers(bench.pre), "fine-tuned": reference}
    with bench.holding(bench.pre):
        saved.apply_(bench.model)
        theta = bench.space.flatten(bench.model.backbone)
    assert int((theta != bench.pre.theta).sum()) == len(saved.region)
    expected["grafted"] = bench.answers(type(ft)(theta, ft.readouts, ft.buffers))
    if kind == "bert":
        expected["readout alone"] = bench.answers(type(ft)(bench.pre.theta, ft.readouts, ft.buffers))
    assert [row["model"] for row in results_of(out)["rows"]] == [
        model for model in ("pre-trained", "readout alone", "fine-tuned", "grafted") if model in expected
    ]
    for model, answers in expected.items():
        assert figures(row_of(out, model)) == (
            float(np.mean(answers.logits.argmax(1) == answers.labels)),
            calibration.expected_calibration_error(answers.logits, answers.labels),
            float(np.mean(answers.logits.argmax(1) == reference.logits.argmax(1))),
        )


@pytest.mark.sampled("bert")
@pytest.mark.parametrize("kind", ["bert", "bert-mlm", "gpt2-lm"])
def test_a_graft_of_all_that_moved_answers_as_the_fine_tuned_model(graft: GraftCommand, kind: str) -> None:
    out = graft("--sparsity", "1", "--set", "base_fraction=1", *LEARN, kind=kind)
    assert figures(row_of(out, "grafted")) == figures(row_of(out, "fine-tuned"))
    assert row_of(out, "pre-trained")["ece"] != row_of(out, "fine-tuned")["ece"]


def test_tasks_of_pairs_and_of_four_labels(graft: GraftCommand) -> None:
    assert results_of(graft("--sparsity", "0.01", task="qnli"))["task"] == "qnli"
    assert results_of(graft("--sparsity", "0.01", task="ag_news"))["data"]["test_rows"] == 16


# -- Bases -----------------------------------------------------------------------------------------------


def fine_tuned_of(graft: GraftCommand, **options: Any) -> tuple[SingleTask, Any]:
    bench = SingleTask.of(load_model(str(graft.directory("bert"))), load_task("sst2", str(graft.data)), shots=4)
    return bench, bench.fine_tuned(LocalizationOptions(steps=3, **options))


@pytest.mark.sampled("bias")
@pytest.mark.parametrize("base", ["movement", "random", "fisher", "bias"])
def test_without_mask_steps_the_base_itself_is_grafted(graft: GraftCommand, base: Any) -> None:
    out = graft("--base", base, "--set", "mask_steps=0")
    bench, ft = fine_tuned_of(graft)
    region = bench.base(base, ft, int(0.05 * len(bench.space)))
    moved = Region.from_mask(ft.theta != bench.pre.theta)
    assert Graft.load(out / "graft.safetensors").region == region & moved
    assert len(region & moved) > 0
    assert base != "bias" or len(region - biases(bench.space)) == 0
    assert results_of(out)["base"] == base


def test_a_region_is_chosen_by_name(graft: GraftCommand) -> None:
    """By gradients at θ_pre, and with the values of θ_ft, which is here to compare with."""
    out = graft("--set", "region_from=snip", "--sparsity", "0.05", "--sparsity", "0.01")
    bench, ft = fine_tuned_of(graft)
    options = LocalizationOptions(region_from="snip")
    for sparsity, region in zip((0.05, 0.01), bench.regions(ft, options, (0.05, 0.01)), strict=True):
        made = Graft.load(out / f"graft-seed-0-sparsity-{sparsity}.safetensors")
        assert made.region == region and len(region) == int(sparsity * len(bench.space))
        assert torch.equal(made.values, ft.theta[region.indices])
    assert results_of(out)["base"] == "snip"


@pytest.mark.sampled("empty")
@pytest.mark.parametrize("base", ["empty", "fisher", "bias"])
def test_mask_steps_start_from_the_base(graft: GraftCommand, base: str) -> None:
    out = graft("--base", base, "--set", "mask_steps=2", "--set", "fisher_rows=3")
    assert 0 < row_of(out, "grafted")["entries"] <= 0.05 * results_of(out)["model"]["graftable"]


def test_the_region_of_another_graft_is_a_base(graft: GraftCommand, finished: Path) -> None:
    """Of one within the budget all of its entries; of a larger one those that moved most."""
    file = finished / "graft-seed-3-sparsity-0.05.safetensors"
    region = Graft.load(file).region
    bench, ft = fine_tuned_of(graft)
    for sparsity in ("0.05", "0.01"):
        out = graft("--base", str(file), "--set", "mask_steps=0", "--sparsity", sparsity)
        count = int(float(sparsity) * len(bench.space))
        moved = region & Region.from_mask(ft.theta != bench.pre.theta)
        expected = moved if count >= len(region) else most_moved(bench.pre.theta, ft.theta, count, among=region)
        assert Graft.load(out / "graft.safetensors").region == expected
        assert results_of(out)["base"] == file.name


def test_the_models_recipe_counts_and_gives_way(graft: GraftCommand, monkeypatch: Any, capsys: Any) -> None:
    from forgetfree.jobs.graft_config import GraftConfig

    recipe = {"base": "random", "sparsity": 0.5, "mask_steps": 7}
    streams = {"base": "empty", "ewc.ewc_lambda": 3.0}  # for strategies that train the region afterwards
    monkeypatch.setitem(recipes.MODELS, "toy", ModelEntry("a toy", streams, recipe))
    config = GraftConfig(task="sst2", model="toy", sparsities=(0.1, 0.2), settings={"mask_steps": "5"})
    assert config.recipe() == {"base": "random"}
    assert [(o.sparsity, o.mask_steps, o.base) for o in config.checked().options] == [
        *((0.1, 5, "random"), (0.2, 5, "random"))
    ]
    (options,) = GraftConfig(task="sst2", model="toy").checked().options
    assert (options.sparsity, options.mask_steps, options.base) == (0.5, 7, "random")
    assert GraftConfig(task="sst2", model="toy", settings={"optimizer": "sgd"}).recipe() == {}
    monkeypatch.setitem(recipes.MODELS, "toy", ModelEntry("a toy", streams, recipe | {"learning_rate": 0.5}))
    assert GraftConfig(task="sst2", model="toy", fine_tuned="elsewhere").recipe() == recipe  # nothing is trained
    assert GraftConfig(task="sst2", model="toy").recipe()["learning_rate"] == 0.5


def test_a_graft_knows_how_far_its_rows_were_read(graft: GraftCommand, tmp_path: Path, capsys: Any) -> None:
    out = graft("--set", "max_length=10")
    assert Graft.load(out / "graft.safetensors").origin.max_length == 10
    assert json.loads((out / "config.json").read_text())["model"]["max_length"] == 10
    assert cli.main(["apply", str(out), "--out", str(tmp_path / "model")]) == 0
    assert "Rows are read up to 10 tokens" in (tmp_path / "model" / "README.md").read_text()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer("a film " * 20, truncation=True)["input_ids"]) == 10
    longer = graft("--set", "max_length=4000")
    assert Graft.load(longer / "graft.safetensors").origin.max_length == tiny.POSITIONS  # as far as the model reads


# -- Fine-tuned elsewhere --------------------------------------------------------------------------------


def test_what_would_train_has_no_effect_on_a_model_that_is_trained(
    graft: GraftCommand, bert: nn.Module, tmp_path: Path, capsys: Any
) -> None:
    classifier(bert, LABELS).save_pretrained(tmp_path)
    more = ["--fine-tuned", str(tmp_path), "--set", "learning_rate=99", "--set", "optimizer=adamw"]
    error = refused(graft, capsys, *more)
    assert "--set learning_rate has no effect with --fine-tuned" in error and "--set optimizer has no effect" in error


def moved(model: nn.Module, pre: nn.Module | None = None, seed: int = 0, everything: bool = False) -> nn.Module:
    """``model`` with the tensors of ``pre`` where it has them, its encoder (or ``everything``) moved a little."""
    generator = torch.Generator().manual_seed(seed)
    if pre is not None:
        getattr(model, "base_model", model).load_state_dict(getattr(pre, "base_model", pre).state_dict(), strict=False)
        if hasattr(pre, "get_output_embeddings") and type(pre) is type(model):
            model.load_state_dict(pre.state_dict())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if everything or re.search(r"encoder|\.h\.|ln_f|classifier|score|pooler", name):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


@pytest.fixture(scope="module")
def bert(model_directory: Any) -> nn.Module:
    return AutoModel.from_pretrained(model_directory("bert"), add_pooling_layer=False)


def classifier(bert: nn.Module, labels: dict[int, str], **changes: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = BertConfig(**{**bert.config.to_dict(), "id2label": labels, "architectures": None, **changes})
        return moved(BertForSequenceClassification(config), bert if not changes else None)


def answers_of(model: nn.Module, tokenizer: Any, data: Path, order: list[int]) -> LabelAnswers:
    """Row by row, through transformers alone."""
    rows = [json.loads(line) for line in (data / "sst2" / "test.jsonl").read_text().splitlines()]
    with torch.no_grad():
        logits = [model(**tokenizer(row["text"], return_tensors="pt")).logits[0, order] for row in rows]
    return LabelAnswers(torch.stack(logits).numpy(), np.array([row["label"] for row in rows]))


@pytest.mark.sampled("labels3-order3")
@pytest.mark.parametrize(
    ("labels", "order"),
    [
        (LABELS, [0, 1]),
        ({0: "Positive", 1: "NEGATIVE"}, [1, 0]),
        ({0: "LABEL_0", 1: "LABEL_1"}, [0, 1]),
        ({0: "0", 1: "1"}, [0, 1]),
    ],
)
def test_a_sequence_classifier_is_read_by_its_own_head(
    graft: GraftCommand, bert: nn.Module, tmp_path: Path, labels: dict[int, str], order: list[int]
) -> None:
    """What transformers makes of the files: of the given model, of the pre-trained body, and of the graft in it."""
    model = classifier(bert, labels)
    model.save_pretrained(tmp_path / "given")  # no tokenizer beside it
    out = graft("--fine-tuned", str(tmp_path / "given"))
    results = results_of(out)
    assert results["model"]["readout"] == "classifier"
    assert results["fine_tuned"]["architecture"] == "BertForSequenceClassification"
    assert results["fine_tuned"]["left_out"] == [] and "fine_tune" not in results["seconds"]
    assert not (out / "fine-tuned").exists()

    tokenizer = AutoTokenizer.from_pretrained(graft.directory("bert"))
    saved = Graft.load(out / "graft.safetensors")
    assert set(saved.readout) == {f"bert.pooler.dense.{p}" for p in ("weight", "bias")} | {
        f"classifier.{p}" for p in ("weight", "bias")
    }
    assert (saved.origin.architecture, list(saved.origin.classes)) == ("BertForSequenceClassification", order)
    given = AutoModelForSequenceClassification.from_pretrained(tmp_path / "given").eval()
    reference = answers_of(given, tokenizer, graft.data, order)
    given.bert.load_state_dict(bert.state_dict(), strict=False)
    pre_trained = answers_of(given, tokenizer, graft.data, order)
    saved.apply_(given)
    grafted = answers_of(given, tokenizer, graft.data, order)
    for name, answers in (("pre-trained", pre_trained), ("fine-tuned", reference), ("grafted", grafted)):
        row = row_of(out, name)
        assert row["score"] == answers.score("accuracy")
        assert row["ece"] == pytest.approx(answers.ece, abs=1e-5)
        assert row["agreement"] == metrics.agreement(answers.logits, reference.logits)
    assert [row["model"] for row in results["rows"]] == ["pre-trained", "fine-tuned", "grafted"]


def test_a_graft_of_all_of_a_classifier_answers_as_it_does(
    graft: GraftCommand, bert: nn.Module, tmp_path: Path
) -> None:
    classifier(bert, LABELS).save_pretrained(tmp_path)
    out = graft("--fine-tuned", str(tmp_path), "--sparsity", "1", "--set", "mask_steps=0")
    assert figures(row_of(out, "grafted")) == figures(row_of(out, "fine-tuned"))


@pytest.mark.sampled(share=0.4)
def test_every_base_and_seed_goes_with_a_fine_tuned_model(graft: GraftCommand, bert: nn.Module, tmp_path: Path) -> None:
    classifier(bert, LABELS).save_pretrained(tmp_path)
    for base in ("fisher", "bias", "empty"):
        out = graft("--fine-tuned", str(tmp_path), "--base", base, "--seed", "0", "--seed", "1")
        rows = [row for row in results_of(out)["rows"] if row["model"] == "fine-tuned"]
        assert len(rows) == 2 and figures(rows[0]) == figures(rows[1])


def test_what_a_graft_does_not_carry_is_said(graft: GraftCommand, bert: nn.Module, tmp_path: Path, capsys: Any) -> None:
    """An embedding moved, too: the fine-tuned row has it, a graft of everything else has not."""
    model = classifier(bert, LABELS)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight.mul_(-1)
    model.save_pretrained(tmp_path)
    out = graft("--fine-tuned", str(tmp_path), "--sparsity", "1", "--set", "mask_steps=0")
    assert results_of(out)["fine_tuned"]["left_out"] == ["embeddings.word_embeddings.weight"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 tensor of the fine-tuned model that cannot be grafted differ" in printed
    assert row_of(out, "grafted")["ece"] != row_of(out, "fine-tuned")["ece"]


@pytest.mark.sampled("gpt2-lm-GPT2LMHeadModel-causal")
@pytest.mark.parametrize(
    ("kind", "make", "readout"), [("bert-mlm", BertForMaskedLM, "prompt"), ("gpt2-lm", GPT2LMHeadModel, "causal")]
)
def test_language_models_are_read_by_label_words(
    graft: GraftCommand, tmp_path: Path, kind: str, make: Any, readout: str
) -> None:
    pre, _ = tiny.build(kind)
    given = moved(make(pre.config), pre)
    given.save_pretrained(tmp_path)
    out = graft("--fine-tuned", str(tmp_path), "--sparsity", "1", "--set", "mask_steps=0", kind=kind)
    assert results_of(out)["model"]["readout"] == readout
    assert figures(row_of(out, "grafted")) == figures(row_of(out, "fine-tuned"))
    given.save_pretrained(tmp_path / "whole")
    load_model(str(graft.directory(kind))).tokenizer.save_pretrained(tmp_path / "whole")
    bench = SingleTask.of(load_model(str(tmp_path / "whole")), load_task("sst2", str(graft.data)), shots=4)
    answers = bench.answers(bench.pre)
    assert figures(row_of(out, "fine-tuned"))[:2] == (answers.score("accuracy"), answers.ece)


def test_a_token_classifier_is_a_linear_readout_at_the_first_token(
    graft: GraftCommand, bert: nn.Module, tmp_path: Path
) -> None:
    config = BertConfig(**{**bert.config.to_dict(), "id2label": {0: "positive", 1: "negative"}, "architectures": None})
    model = moved(BertForTokenClassification(config), bert)
    model.save_pretrained(tmp_path)
    out = graft("--fine-tuned", str(tmp_path), "--sparsity", "1", "--set", "mask_steps=0")
    tokenizer = AutoTokenizer.from_pretrained(graft.directory("bert"))

    class AtFirst(nn.Module):
        def forward(self, **inputs: Any) -> Any:
            output = model(**inputs)
            output.logits = output.logits[:, 0]
            return output

    expected = answers_of(AtFirst(), tokenizer, graft.data, [1, 0])
    assert row_of(out, "fine-tuned")["score"] == expected.score("accuracy")
    assert row_of(out, "fine-tuned")["ece"] == pytest.approx(expected.ece, abs=1e-5)
    assert figures(row_of(out, "grafted")) == figures(row_of(out, "fine-tuned"))
    saved = Graft.load(out / "graft.safetensors")
    assert torch.equal(saved.readout["weight"], model.classifier.weight.detach()[[1, 0]])
    assert saved.origin.readout == "linear"


@pytest.mark.sampled("gpt2-sst2-classifier")
@pytest.mark.parametrize(
    ("kind", "task", "readout"),
    [
        ("bert", "sst2", "classifier"),  # a sequence classifier: tanh
        ("gpt2", "sst2", "classifier"),  # … without a bias, at the last token
        ("gpt2", "qnli", "linear"),  # the body, and a file of the readout
        ("bert-mlm", "sst2", "prompt"),
        ("gpt2-lm", "qnli", "causal"),
    ],
)
def test_what_apply_writes_is_taken_back(
    graft: GraftCommand, tmp_path: Path, kind: str, task: str, readout: str
) -> None:
    """A grafted model is a fine-tuned one that moved at its region alone, which its own graft gives back whole."""
    how = {"kind": kind, "task": task}
    finished = graft("--set", "learning_rate=0.5", **how)
    file = finished / "graft.safetensors"
    assert cli.main(["apply", str(file), "--model", str(graft.directory(kind)), "--out", str(tmp_path / "whole")]) == 0
    out = graft("--fine-tuned", str(tmp_path / "whole"), "--sparsity", "1", "--set", "mask_steps=0", **how)
    assert results_of(out)["model"]["readout"] == readout
    saved, again = Graft.load(file), Graft.load(out / "graft.safetensors")
    assert again.region == saved.region and torch.equal(again.values, saved.values)
    pairs = [("grafted", "fine-tuned"), ("grafted", "grafted")]
    if kind != "gpt2" or readout == "linear":  # GPT-2's head holds the bias by the last norm, which is grafted
        pairs.append(("pre-trained" if readout in ("prompt", "causal") else "readout alone", "pre-trained"))
    for before, after in pairs:
        expected, got = figures(row_of(finished, before)), figures(row_of(out, after))
        assert got[0] == expected[0] and got[1] == pytest.approx(expected[1], abs=1e-6)
    assert cli.main(["apply", str(out / "graft.safetensors"), "--out", str(tmp_path / "twice")]) == 0
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "twice"))
    assert first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_damaged_readout_file_is_said(graft: GraftCommand, bert: nn.Module, tmp_path: Path, capsys: Any) -> None:
    moved(BertModel(bert.config, add_pooling_layer=False), bert).save_pretrained(tmp_path)
    layer = {"weight": torch.zeros(2, 16), "bias": torch.zeros(2)}
    signed = bytearray(ANY_FILE.content(layer, {"labels": '["negative", "positive"]'}))
    signed[-1] ^= 1
    for content, message in (
        (b"{}", "cannot be read: Error while deserializing header"),
        (signed, "is damaged: its contents do not match its checksum"),
        (ANY_FILE.content(layer, {}), "labels must be a list of different names, got None"),
        (ANY_FILE.content(layer, {"labels": "3"}), "labels must be a list of different names, got 3"),
        (
            ANY_FILE.content({"weight": torch.zeros(2, 16)}, {"labels": '["a", "b"]'}),
            "its tensors must be one linear layer",
        ),
    ):
        (tmp_path / "readout.safetensors").write_bytes(content)
        assert cli.main(graft.arguments("--fine-tuned", str(tmp_path))) == 1
        assert message in capsys.readouterr().err
    (tmp_path / "readout.safetensors").write_bytes(ANY_FILE.content(layer, {"labels": '["good", "bad"]'}))
    assert cli.main(graft.arguments("--fine-tuned", str(tmp_path))) == 2
    assert "it has good, bad; the task has negative, positive" in " ".join(capsys.readouterr().err.split())
    narrow = {"weight": torch.zeros(2, 1), "bias": torch.zeros(2)}
    (tmp_path / "readout.safetensors").write_bytes(ANY_FILE.content(narrow, {"labels": '["negative", "positive"]'}))
    assert cli.main(graft.arguments("--fine-tuned", str(tmp_path))) == 2
    assert (
        "is not one linear layer on its body, of shape (2, 16): it has bias (2,), weight (2, 1)"
        in capsys.readouterr().err
    )


def test_a_causal_classifier_is_read_at_the_last_token(graft: GraftCommand, tmp_path: Path) -> None:
    """Rows of unlike length in one batch: GPT-2 finds each row's end by the padding id, which the files leave out."""
    pre, tokenizer = tiny.build("gpt2-lm")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = moved(GPT2ForSequenceClassification(pre.config), pre)
    model.config.id2label, model.config.pad_token_id = LABELS, None
    model.save_pretrained(tmp_path)
    out = graft("--fine-tuned", str(tmp_path), kind="gpt2-lm")
    expected = answers_of(model, tokenizer, graft.data, [0, 1])
    assert row_of(out, "fine-tuned")["score"] == expected.score("accuracy")
    assert row_of(out, "fine-tuned")["ece"] == pytest.approx(expected.ece, abs=1e-5)


def test_the_pre_trained_row_has_no_tensor_of_the_fine_tuned_body(
    bert: nn.Module, graft: GraftCommand, tmp_path: Path
) -> None:
    moved(classifier(bert, LABELS), everything=True).save_pretrained(tmp_path)
    found = load_fine_tuned(str(tmp_path), str(graft.directory("bert")), load_task("sst2", str(graft.data)).task)
    assert isinstance(found.loaded.model, ClassifierModel) and isinstance(found.model, ClassifierModel)
    for name, tensor in bert.state_dict().items():
        assert torch.equal(found.loaded.model.backbone.bert.state_dict()[name], tensor)
    for name, tensor in found.model.head_tensors().items():
        assert torch.equal(found.loaded.model.head_tensors()[name], tensor)
    assert len(found.left_out) == sum(name.startswith("embeddings.") for name, _ in bert.named_parameters())


@pytest.mark.parametrize(
    ("classes", "labels", "order"),
    [
        (["a", "b", "c"], ["c", "a", "b"], (2, 0, 1)),
        (["Sci/Tech", "World"], ["world", "sci_tech"], (1, 0)),
        (["+", "-"], ["-", "+"], (1, 0)),
        (["LABEL_0", "LABEL_1"], ["yes", "no"], (0, 1)),
    ],
)
def test_labels_by_name(classes: list[str], labels: list[str], order: tuple[int, ...]) -> None:
    from forgetfree.tasks import TaskDefinition

    task = TaskDefinition("toy", "single", tuple(labels))
    assert label_order(dict(enumerate(classes)), task, "DIR") == order


# -- Refusals: exit code 2, one paragraph, nothing trained -------------------------------------------------


def refused(graft: GraftCommand, capsys: Any, *more: str, code: int = 2, **where: str) -> str:
    arguments = graft.arguments(*more, **where)
    assert cli.main(arguments) == code
    error = capsys.readouterr().err
    assert "Traceback" not in error and error.count("error:") == 1
    assert not (Path(arguments[arguments.index("--out") + 1]) / "results.json").exists()
    return " ".join(error.split())


@pytest.mark.sampled("arguments12---set needs key=value")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shots", "0"], r"--shots must be at least 1, got 0"),
        (["--steps", "0"], r"--steps must be at least 1, got 0"),
        (["--shots", "5000"], r"'sst2' has 12 training rows of label 'negative', fewer than --shots 5000"),
        (["--seed", "1", "--seed", "1"], r"names the same seed twice"),
        (["--sparsity", "0.1", "--sparsity", "0.1"], r"names the same sparsity twice"),
        (["--sparsity", "2"], r"sparsity must be at most 1, got 2\.0"),
        (["--sparsity", "1e-9"], r"leaves no entry of the \d+ graftable ones"),
        (["--sparsity", "0.1", "--set", "sparsity=0.2"], r"--sparsity and --set sparsity=0\.2 are both given"),
        (
            ["--base", "fischer"],
            r"Unknown --base 'fischer'\. Did you mean 'fisher'\? .* The file of a graft also serves",
        ),
        (["--base", "empty", "--set", "mask_steps=0"], r"leaves no region"),
        (["--set", "learning_rat=1"], r"Unknown option 'learning_rat'\. Did you mean 'learning_rate'\?"),
        (["--set", "scenario=class"], r"Unknown option 'scenario'"),
        (["--set", "steps"], r"--set needs key=value"),
        (["--set", "fisher_rows=0"], r"fisher_rows must be at least 1"),
        (["--model", "minilmm"], r"Unknown model 'minilmm'"),
        (["--data", "no/such"], r"The data directory 'no/such' does not exist"),
        (["--fine-tuned", "no/such"], r"--fine-tuned 'no/such' is no directory"),
        (["--readout", "classifier"], r"Unknown --readout 'classifier'"),
    ],
)
def test_wrong_usage(graft: GraftCommand, capsys: Any, arguments: list[str], message: str) -> None:
    assert re.search(message, refused(graft, capsys, *arguments))


def test_faults_are_reported_together(graft: GraftCommand, capsys: Any) -> None:
    error = refused(graft, capsys, "--shots", "0", "--base", "x", "--set", "y=1", "--fine-tuned", "z", "--seed", "-1")
    assert all(word in error for word in ("--shots", "--base 'x'", "option 'y'", "--fine-tuned 'z'", "--seed"))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("sst3", r"Unknown task 'sst3'\. Did you mean 'sst2'\?"),
        ("qnli-agnews-sst2", r"Expected one task, got the 3 of 'qnli-agnews-sst2'"),
        ("qnli,sst2", r"Expected one task, got the 2 of 'qnli,sst2'"),
    ],
)
def test_it_takes_one_task(graft: GraftCommand, capsys: Any, task: str, message: str) -> None:
    assert re.search(message, refused(graft, capsys, task=task))


def test_a_directory_in_use_is_refused(graft: GraftCommand, finished: Path, capsys: Any) -> None:
    before = (finished / "results.json").read_bytes()
    assert cli.main(graft.arguments("--out", str(finished))) == 2
    assert "is not empty" in capsys.readouterr().err
    assert (finished / "results.json").read_bytes() == before


def test_a_base_of_another_model_or_none(graft: GraftCommand, finished: Path, capsys: Any, tmp_path: Path) -> None:
    file = finished / "graft-seed-0-sparsity-0.01.safetensors"
    error = refused(graft, capsys, "--base", str(file), kind="gpt2-lm")
    assert "is of another parameter space" in error and "expected ('h.0.ln_1.weight', (16,))" in error
    assert "does not exist" in refused(graft, capsys, "--base", str(tmp_path / "nowhere.safetensors"))
    (tmp_path / "x.safetensors").write_bytes(b"x")
    assert "not a readable safetensors file" in refused(
        graft, capsys, "--base", str(tmp_path / "x.safetensors"), code=1
    )


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            {0: "good", 1: "bad"},
            r"are not the labels of task 'sst2': it has good, bad; the task has negative, positive",
        ),
        ({0: "negative", 1: "LABEL_1"}, r"it has negative, LABEL_1"),
        ({0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}, r"it has LABEL_0, LABEL_1, LABEL_2; the task has negative"),
    ],
)
def test_other_labels_are_refused(
    graft: GraftCommand, bert: nn.Module, tmp_path: Path, capsys: Any, labels: dict[int, str], message: str
) -> None:
    classifier(bert, labels).save_pretrained(tmp_path)
    assert re.search(message, refused(graft, capsys, "--fine-tuned", str(tmp_path)))


def test_a_model_without_a_head_is_refused(graft: GraftCommand, capsys: Any) -> None:
    error = refused(graft, capsys, "--fine-tuned", str(graft.directory("bert")))
    assert "is BertModel without a head" in error and "ForSequenceClassification" in error


def test_what_is_no_model_is_refused(graft: GraftCommand, capsys: Any, tmp_path: Path) -> None:
    assert "is no model. Expected a directory" in refused(graft, capsys, "--fine-tuned", str(tmp_path))
    shutil.copy(graft.directory("bert") / "config.json", tmp_path)  # and no weights
    (tmp_path / "training_args.bin").touch()
    assert "is no model. Expected a directory" in refused(graft, capsys, "--fine-tuned", str(tmp_path))
    (tmp_path / "adapter_config.json").touch()
    error = refused(graft, capsys, "--fine-tuned", str(tmp_path), code=1)
    assert "adapter_config.json is not valid JSON" in error and "Save the adapter again" in error


def test_another_architecture_is_refused(graft: GraftCommand, bert: nn.Module, capsys: Any, tmp_path: Path) -> None:
    for name, changes, message in (
        ("wide", {"intermediate_size": 64}, r"intermediate\.dense\.weight' is \(32, 16\) in .*, and \(64, 16\) in"),
        ("deep", {"num_hidden_layers": 3}, r"'encoder\.layer\.2\.\S+' is absent in .*, and \(16, 16\) in"),
        ("shallow", {"num_hidden_layers": 1}, r"'encoder\.layer\.1\.\S+' is \(16, 16\) in .*, and absent in"),
        ("heads", {"num_attention_heads": 4}, r"num_attention_heads is 2 in .*, and 4 in"),
        ("words", {"vocab_size": 9}, r"word_embeddings\.weight' is \(\d+, 16\) in .*, and \(9, 16\) in"),
    ):
        classifier(bert, LABELS, **changes).save_pretrained(tmp_path / name)
        error = refused(graft, capsys, "--fine-tuned", str(tmp_path / name))
        assert re.search(message, error), error
        assert "Give the model it was made from to --model" in error


def test_a_model_that_is_not_fine_tuned_is_refused(
    graft: GraftCommand, bert: nn.Module, capsys: Any, tmp_path: Path
) -> None:
    model = classifier(bert, LABELS)
    model.bert.load_state_dict(bert.state_dict(), strict=False)
    model.save_pretrained(tmp_path)
    assert "is not fine-tuned: all 4448 graftable entries are those of" in refused(
        graft, capsys, "--fine-tuned", str(tmp_path)
    )


def test_a_readout_that_the_model_does_not_have_is_refused(
    graft: GraftCommand, bert: nn.Module, capsys: Any, tmp_path: Path
) -> None:
    classifier(bert, LABELS).save_pretrained(tmp_path)
    error = refused(graft, capsys, "--fine-tuned", str(tmp_path), "--readout", "linear")
    assert "is read by its own head. Leave --readout out." in error


def test_a_damaged_model_is_refused(graft: GraftCommand, bert: nn.Module, capsys: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    classifier(bert, LABELS).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["classifier.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    error = refused(graft, capsys, "--fine-tuned", str(tmp_path), code=1)
    assert "lacks 1 weight of a BertForSequenceClassification, e.g. 'classifier.weight'" in error


def test_a_diverging_model_fails_with_the_remedy(graft: GraftCommand, capsys: Any) -> None:
    arguments = graft.arguments("--set", "learning_rate=1e30")
    assert cli.main(arguments) == 1
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert "seed 0: The loss became" in error and "Lower the learning rate" in error
    out = Path(arguments[arguments.index("--out") + 1])
    assert [failed["seed"] for failed in results_of(out)["failed"]] == [0] and results_of(out)["grafts"] == []


# -- What it needs ---------------------------------------------------------------------------------------


@pytest.mark.sampled(share=0.2)
def test_it_imports_neither_avalanche_nor_datasets(graft: GraftCommand) -> None:
    arguments = graft.arguments("--steps", "1", "--set", "mask_steps=0")
    code = (
        "import sys\nfrom forgetfree.cli import main\n"
        f"code = main({arguments!r})\n"
        "print(code, sorted({name.split('.')[0] for name in sys.modules} & {'avalanche', 'datasets', 'peft'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


def test_the_default_directory_is_the_first_free_one(graft: GraftCommand, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = graft.arguments()
    at = arguments.index("--out")
    for name in ("graft-sst2", "graft-sst2-2"):
        assert cli.main(arguments[:at] + arguments[at + 2 :]) == 0
        assert (tmp_path / "runs" / name / "graft.safetensors").is_file()
    shutil.rmtree(tmp_path / "runs")
