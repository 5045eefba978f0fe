"""`forgetfree graft` in use: its measurements, files, options and refusals."""

from __future__ import annotations

import json
import re
import shutil
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
    BertForSequenceClassification,
    GPT2ForSequenceClassification,
)

from forgetfree import cli, recipes
from forgetfree.data.sources import load_task
from forgetfree.jobs.config import RunConfig
from forgetfree.ledger.graft import Graft
from forgetfree.models.fine_tuned_directory import label_order, load_fine_tuned
from forgetfree.models.loading import load_model
from forgetfree.recipes import ModelEntry
from forgetfree.results import metrics
from forgetfree.results.answers import LabelAnswers
from forgetfree.results.table import load_results
from forgetfree.training.single_task import SingleTask
from forgetfree.training.training_options import LocalizationOptions

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
TWICE = ("--seed", "0", "--seed", "3", "--sparsity", "0.05", *LEARN)


@pytest.fixture(scope="module")
def finished(graft: GraftCommand) -> Path:
    """Return a graft with two seeds and a linear readout."""
    return graft(*TWICE)


def results_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def run_of(out: Path, strategy: str, seed: int = 0) -> dict[str, Any]:
    (run,) = [r for r in results_of(out)["runs"] if (r["strategy"], r["seed"]) == (strategy, seed)]
    return run


def figures(out: Path, strategy: str, seed: int = 0) -> tuple[float, float, float]:
    run = run_of(out, strategy, seed)
    return run["matrix"][-1][0], run["ece"][-1][0], run["agreement"][0]


def saved(out: Path, seed: int = 0) -> Graft:
    return Graft.load(out / "bare-graft" / f"seed-{seed}" / "graft.safetensors")


# -- Files and measurements ------------------------------------------------------------------------------


@pytest.mark.sampled("gpt2-lm")
@pytest.mark.parametrize("kind", ["bert", "bert-mlm", "gpt2-lm"])
def test_the_figures_are_those_of_the_models(graft: GraftCommand, kind: str) -> None:
    """θ is put together step by step, and its predictions have the same metrics."""
    out = graft("--seed", "3", *LEARN, kind=kind)
    options = LocalizationOptions(steps=20, sparsity=0.05, optimizer="adamw", learning_rate=0.01)
    bench = SingleTask.of(load_model(str(graft.directory(kind))), load_task("sst2", str(graft.data)), shots=8, seed=3)
    ft = bench.fine_tuned(options)
    reference, file = bench.answers(ft), saved(out, 3)
    assert file.region == bench.region(ft, options) and file.origin.sparsity == 0.05
    with bench.holding(bench.pre):
        file.apply_(bench.model)
        theta = bench.space.flatten(bench.model.backbone)
    assert (
        int((theta != bench.pre.theta).sum())
        == len(file.region)
        == run_of(out, "bare-graft", 3)["ledger"]["region_size"][0]
    )
    grafted = bench.answers(type(ft)(theta, ft.readouts, ft.buffers))
    for strategy, answers in (("fine-tune", reference), ("bare-graft", grafted)):
        assert figures(out, strategy, 3) == (
            float(np.mean(answers.logits.argmax(1) == answers.labels)),
            metrics.expected_calibration_error(answers.logits, answers.labels),
            float(np.mean(answers.logits.argmax(1) == reference.logits.argmax(1))),
        )
    ledger = load_results(out).ledger("bare-graft", 3)
    assert torch.equal(ledger.records[0].owned.values, file.values)


def test_it_is_a_run_of_two_strategies(graft: GraftCommand, finished: Path, capsys: Any) -> None:
    config = json.loads((finished / "config.json").read_text())
    assert config["run"]["strategy"] == ["fine-tune", "bare-graft"] and config["run"]["seed"] == [0, 3]
    again = graft("--seed", "0", *LEARN)
    assert f"Graft: {again / 'bare-graft/seed-0/graft.safetensors'} (" in capsys.readouterr().out
    assert saved(again).region == saved(finished).region and torch.equal(saved(again).values, saved(finished).values)
    words = [str(again), "--task", "sst2", "a joy"]
    assert cli.main(["predict", *words]) == 0 and cli.main(["report", str(again)]) == 0
    assert "agreement sst2" in (again / "report.md").read_text()


def test_a_graft_of_all_that_moved_answers_as_the_fine_tuned_model(graft: GraftCommand) -> None:
    out = graft("--sparsity", "1", "--set", "base_fraction=1", *LEARN)
    assert figures(out, "bare-graft") == figures(out, "fine-tune")


def test_the_models_recipe_counts_and_gives_way(monkeypatch: Any) -> None:
    recipe = {"base_fraction": 0.3, "sparsity": 0.5, "mask_steps": 7}
    monkeypatch.setitem(recipes.MODELS, "toy", ModelEntry("a toy", {"base_fraction": 0.0}, recipe))
    asked: Any = {"stream": "sst2", "model": "toy", "strategy": recipes.GRAFT}
    options = RunConfig(**asked, set={"mask_steps": "5"}).check().options["bare-graft"]
    assert (options.sparsity, options.mask_steps, options.base_fraction) == (0.5, 5, 0.3)
    assert RunConfig(**asked, set={"optimizer": "sgd"}).recipe() == {}
    with_another = RunConfig(stream="sst2", model="toy", strategy=("bare-graft", "grafting-continual"))
    assert with_another.recipe()["base_fraction"] == 0  # the recipe of a stream, for all strategies alike


def test_a_graft_knows_how_far_its_rows_were_read(graft: GraftCommand, tmp_path: Path, capsys: Any) -> None:
    out = graft("--set", "max_length=10")
    assert saved(out).origin.binding.max_length == 10
    assert json.loads((out / "config.json").read_text())["model"]["max_length"] == 10
    assert cli.main(["apply", str(out), "--out", str(tmp_path / "model")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer("a film " * 20, truncation=True)["input_ids"]) == 10
    longer = graft("--set", "max_length=4000")
    assert saved(longer).origin.binding.max_length == tiny.POSITIONS  # at most the model's maximum length


# -- Fine-tuned elsewhere --------------------------------------------------------------------------------


def moved(model: nn.Module, pre: nn.Module | None = None, seed: int = 0, everything: bool = False) -> nn.Module:
    """Return ``model`` with the tensors of ``pre`` where it has them, its encoder (or ``everything``) moved a little."""
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
    """Return answers of transformers alone, one row at a time."""
    rows = [json.loads(line) for line in (data / "sst2" / "test.jsonl").read_text().splitlines()]
    with torch.no_grad():
        logits = [model(**tokenizer(row["text"], return_tensors="pt")).logits[0, order] for row in rows]
    return LabelAnswers(torch.stack(logits).numpy(), np.array([row["label"] for row in rows]))


def test_a_sequence_classifier_is_read_by_its_own_head(
    graft: GraftCommand, bert: nn.Module, tmp_path: Path, capsys: Any
) -> None:
    """The scores are those of transformers' own answers, for the given model and for the graft on its pre-trained body."""
    model = classifier(bert, {0: "Positive", 1: "NEGATIVE"})
    with torch.no_grad():  # a graft does not contain embeddings
        model.bert.embeddings.LayerNorm.bias.add_(0.1)
    model.save_pretrained(tmp_path / "given")  # without a tokenizer
    out = graft("--fine-tuned", str(tmp_path / "given"))
    assert "1 tensor of the fine-tuned model that cannot be grafted differ" in " ".join(capsys.readouterr().err.split())
    config = json.loads((out / "config.json").read_text())
    assert config["model"]["readout"] == "classifier" and config["fine_tuned"]["architecture"] == type(model).__name__
    tokenizer, file = AutoTokenizer.from_pretrained(graft.directory("bert")), saved(out)
    assert set(file.readout) == {f"bert.pooler.dense.{p}" for p in ("weight", "bias")} | {
        f"classifier.{p}" for p in ("weight", "bias")
    }
    assert (file.origin.binding.architecture, list(file.origin.classes)) == ("BertForSequenceClassification", [1, 0])
    given = AutoModelForSequenceClassification.from_pretrained(tmp_path / "given").eval()
    given.bert.embeddings.load_state_dict(bert.embeddings.state_dict())
    reference = answers_of(given, tokenizer, graft.data, [1, 0])
    given.bert.load_state_dict(bert.state_dict(), strict=False)
    file.apply_(given)
    grafted = answers_of(given, tokenizer, graft.data, [1, 0])
    for strategy, answers in (("fine-tune", reference), ("bare-graft", grafted)):
        score, ece, agreement = figures(out, strategy)
        assert score == answers.score("accuracy") and ece == pytest.approx(answers.ece, abs=1e-5)
        assert agreement == metrics.agreement(answers.logits, reference.logits)
    assert cli.main(["predict", str(out), "--task", "sst2", "x"]) == 2
    assert "forgetfree apply" in capsys.readouterr().err


@pytest.mark.sampled("bert-sst2-classifier")
@pytest.mark.parametrize(
    ("kind", "task", "readout"),
    [
        ("bert", "sst2", "classifier"),  # a sequence classifier: tanh
        ("gpt2-lm", "qnli", "causal"),
    ],
)
def test_what_apply_writes_is_taken_back(
    graft: GraftCommand, tmp_path: Path, kind: str, task: str, readout: str
) -> None:
    """A grafted model moved at its region alone, so grafting it again gives the same graft and the same files."""
    how = {"kind": kind, "task": task}
    made = graft("--set", "learning_rate=0.5", **how)
    model = ["--model", str(graft.directory(kind))]
    assert cli.main(["apply", str(made), *model, "--out", str(tmp_path / "whole")]) == 0
    out = graft("--fine-tuned", str(tmp_path / "whole"), "--sparsity", "1", "--set", "mask_steps=0", **how)
    again = saved(out)
    assert again.region == saved(made).region and torch.equal(again.values, saved(made).values)
    assert again.origin.binding.readout == readout
    for strategy in ("fine-tune", "bare-graft"):
        assert figures(out, strategy)[:2] == pytest.approx(figures(made, "bare-graft")[:2], abs=1e-6)
    assert cli.main(["apply", str(out), "--out", str(tmp_path / "twice")]) == 0
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "twice"))
    assert first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_causal_classifier_is_read_at_the_last_token(graft: GraftCommand, tmp_path: Path) -> None:
    """In a batch of rows of different lengths, GPT-2 finds each row's end by the padding id, which the files lack."""
    pre, tokenizer = tiny.build("gpt2-lm")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = moved(GPT2ForSequenceClassification(pre.config), pre)
    model.config.id2label, model.config.pad_token_id = LABELS, None
    model.save_pretrained(tmp_path)
    out = graft("--fine-tuned", str(tmp_path), kind="gpt2-lm")
    expected = answers_of(model, tokenizer, graft.data, [0, 1])
    assert figures(out, "fine-tune")[0] == expected.score("accuracy")
    assert figures(out, "fine-tune")[1] == pytest.approx(expected.ece, abs=1e-5)


def test_the_pre_trained_row_has_no_tensor_of_the_fine_tuned_body(
    bert: nn.Module, graft: GraftCommand, tmp_path: Path
) -> None:
    moved(classifier(bert, LABELS), everything=True).save_pretrained(tmp_path)
    found = load_fine_tuned(str(tmp_path), str(graft.directory("bert")), load_task("sst2", str(graft.data)).task)
    for name, tensor in bert.state_dict().items():
        assert torch.equal(found.loaded.model.backbone.state_dict()[name], tensor)
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


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            {0: "good", 1: "bad"},
            r"are not the labels of task 'sst2': it has good, bad; the task has negative, positive",
        ),
        ({0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}, r"it has LABEL_0, LABEL_1, LABEL_2; the task has negative"),
    ],
)
def test_other_labels_are_refused(
    graft: GraftCommand, bert: nn.Module, tmp_path: Path, capsys: Any, labels: dict[int, str], message: str
) -> None:
    classifier(bert, labels).save_pretrained(tmp_path)
    assert re.search(message, refused(graft, capsys, "--fine-tuned", str(tmp_path)))


def test_what_is_no_model_is_refused(graft: GraftCommand, capsys: Any, tmp_path: Path) -> None:
    shutil.copy(graft.directory("bert") / "config.json", tmp_path)  # without weights
    (tmp_path / "training_args.bin").touch()
    assert "is no model. Expected a directory" in refused(graft, capsys, "--fine-tuned", str(tmp_path))
    (tmp_path / "adapter_config.json").touch()
    assert "merge an adapter of PEFT first" in refused(graft, capsys, "--fine-tuned", str(tmp_path))


def test_another_architecture_is_refused(graft: GraftCommand, bert: nn.Module, capsys: Any, tmp_path: Path) -> None:
    for name, changes, message in (
        ("wide", {"intermediate_size": 64}, r"intermediate\.dense\.weight' is \(32, 16\) in .*, and \(64, 16\) in"),
        ("heads", {"num_attention_heads": 4}, r"num_attention_heads is 2 in .*, and 4 in"),
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


# -- Directories -----------------------------------------------------------------------------------------


def test_the_default_directory_is_the_first_free_one(graft: GraftCommand, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = graft.arguments()
    at = arguments.index("--out")
    for name in ("graft-sst2", "graft-sst2-2"):
        assert cli.main(arguments[:at] + arguments[at + 2 :]) == 0
        assert (tmp_path / "runs" / name / "bare-graft/seed-0/graft.safetensors").is_file()
    shutil.rmtree(tmp_path / "runs")
