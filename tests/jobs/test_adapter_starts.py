"""A task of a stream that starts from somebody's adapter: where θ_ft begins, what it is known by, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import write_adapter
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel

import forgetfree
from forgetfree import cli
from forgetfree.core.body import body_of
from forgetfree.data.sources import load_task
from forgetfree.errors import ModelError, UsageError
from forgetfree.jobs.run_config import tell_starts
from forgetfree.models import peft_adapter
from forgetfree.models.fine_tuned_directory import load_fine_tuned
from forgetfree.models.loading import load_model
from forgetfree.models.peft_adapter import AdapterStart
from forgetfree.models.state import ModelState, StateStore
from forgetfree.results.comparison import merge
from forgetfree.results.stored import load_run_results
from forgetfree.seeds import derive_seed
from forgetfree.strategies.continual_ft import ContinualFT
from forgetfree.strategies.fine_tune import FineTune
from forgetfree.strategies.grafting_continual import GraftingContinual, GraftingOptions
from forgetfree.training.loop import fine_tune

pytestmark = pytest.mark.long

ModelDirectory = Callable[[str], Path]
LEDGER = Path("grafting-continual/seed-0/ledger.safetensors")
OPTIONS = GraftingOptions(steps=3, learning_rate=0.1, sparsity=0.05, mask_steps=2)


@pytest.fixture
def lora(model_directory: ModelDirectory, tmp_path: Path) -> tuple[Path, Any]:
    """The directory of an adapter, and the network with it merged, by PEFT."""
    return tmp_path / "lora", write_adapter("classifier", model_directory("bert-pooler"), tmp_path / "lora")


def command(model: Path, data: Path, *words: str) -> list[str]:
    usual = ["--data", str(data), "--model", str(model), "--shots", "4", "--steps", "2"]
    return ["run", "qnli,sst2", *usual, "--strategy", "grafting-continual", "--sparsity", "0.05", *words]


def sha256(directory: Path) -> str:
    files = (directory / "adapter_config.json", directory / "adapter_model.safetensors")
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@pytest.mark.sampled(share=0.4)
def test_fine_tuning_begins_at_the_merged_adapter_and_all_else_at_theta_pre(
    tiny_stream: Callable[..., Any], model_directory: ModelDirectory, lora: tuple[Path, Any], tmp_path: Path
) -> None:
    """By both loops, in one store with models that begin at θ_pre; and what was learned before stays as it was."""

    def make() -> Any:
        return tiny_stream("bert-pooler", "linear", stream="qnli,sst2")

    starts = {"sst2": AdapterStart.of(str(lora[0]), str(model_directory("bert-pooler")))}
    store, thetas = StateStore(tmp_path / "store"), dict[Any, torch.Tensor]()
    for strategy in (GraftingContinual, FineTune, GraftingContinual):
        for begun in (starts, {}):
            learner = strategy(stream=replace(make(), starts=begun), options=OPTIONS, store=store)
            stream, first = learner.stream, None
            for experience in stream.benchmark.train_stream:
                learner.train(experience)
                answers = learner.evaluate([stream.tasks[0]])["qnli"].logits
                assert first is None or (answers == first).all()
                first = answers
            for task in stream.tasks:
                held = store.get(learner.bench(task).key(learner.options))
                assert held is not None
                assert torch.equal(thetas.setdefault((task.name, bool(begun)), held.theta), held.theta)
            if learner.ledger:
                record = learner.ledger.records[1]
                inside = learner.space.gather(stream.model.backbone, record.owned.region.indices)
                learner.regions._switch.to(0)  # θ_pre, but for what is recorded
                assert torch.equal(learner.space.flatten(stream.model.backbone), stream.pre_trained.theta)
                assert torch.equal(inside, record.owned.values)
    assert len(list((tmp_path / "store").glob("*.safetensors"))) == 3  # one of qnli, two of sst2
    assert torch.equal(thetas["qnli", True], thetas["qnli", False])
    for begun in (True, False):
        core = make()
        if begun:
            body_of(core.model.backbone).load_state_dict(lora[1].base_model.state_dict(), strict=False)
        fine_tune(core.model, core.tasks[1].train, OPTIONS, steps=3, seed=derive_seed(0, "fine_tune", "sst2"))
        assert torch.equal(ModelState.of(core.model).theta, thetas["sst2", begun])


@pytest.mark.sampled(share=0.4)
def test_a_run_is_known_by_its_adapters(
    model_directory: ModelDirectory,
    data_directory: Path,
    lora: tuple[Path, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, out = model_directory("bert-pooler"), tmp_path / "out"
    words = command(model, data_directory, "--out", str(out))
    assert cli.main([*words, "--start", f"sst2={lora[0]}"]) == 0
    starts = {"sst2": sha256(lora[0])}
    for name in ("config.json", "results.json"):
        assert json.loads((out / name).read_text())["starts"] == starts
    again = ["run", "--config", str(out / "config.json"), "--out", str(tmp_path / "again")]
    assert cli.main(again) == 0
    assert (out / LEDGER).read_bytes() == (tmp_path / "again" / LEDGER).read_bytes()

    moved = shutil.copytree(lora[0], tmp_path / "moved")
    assert cli.main([*words, "--start", f"sst2={moved}", "--resume"]) == 0
    config = json.loads((moved / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 99}))
    capsys.readouterr()
    for other in (["--start", f"sst2={moved}"], ["--start", f"qnli={lora[0]}"], []):
        assert cli.main([*words, *other, "--resume"]) == 1
        assert "which adapters tasks start from (--start), or what these hold, changed" in capsys.readouterr().err


def losses(unit: Path) -> list[float]:
    """The losses of fine-tuning SST-2 in a unit."""
    steps = [json.loads(line) for line in (unit / "history.jsonl").read_text().splitlines()]
    return [step["loss"] for step in steps if (step["task"], step["phase"]) == ("sst2", "fine_tune")]


@pytest.mark.sampled(share=0.3)
def test_from_python_and_taken_back(
    model_directory: ModelDirectory, data_directory: Path, lora: tuple[Path, Any], tmp_path: Path
) -> None:
    how: dict[str, Any] = {"data": str(data_directory), "model": str(model_directory("bert-pooler")), "shots": 4}
    how |= {"steps": 2, "sparsity": 0.05, "strategies": "grafting-continual", "progress": False}
    starts = {"sst2": lora[0]}
    for name, stream, begun in (("both", "qnli,sst2", starts), ("alone", "sst2", starts), ("plain", "sst2", {})):
        forgetfree.run(stream, starts=begun, out=tmp_path / name, **how)
    for task, left in (("qnli", {"sst2": sha256(lora[0])}), ("sst2", {})):
        out = tmp_path / f"without-{task}"
        assert cli.main(["ledger", "remove", str(tmp_path / "both"), "--task", task, "--out", str(out), "--quiet"]) == 0
        config = json.loads((out / "config.json").read_text())
        assert config.get("starts", {}) == config["about"].get("starts", {}) == left
        assert config["run"].get("start", {}).keys() == left.keys()
    assert (tmp_path / "without-qnli" / LEDGER).read_bytes() == (tmp_path / "alone" / LEDGER).read_bytes()
    # A report does not take the two for runs of one kind.
    labels = [row.label for row in merge([load_run_results(tmp_path / each) for each in ("alone", "plain")]).strategies]
    assert labels == [f"grafting-continual (starts={each})" for each in (f"sst2:{sha256(lora[0])[:8]}", "θ_pre")]


@pytest.mark.sampled(share=0.3)
def test_what_is_no_start_is_refused(
    model_directory: ModelDirectory,
    data_directory: Path,
    lora: tuple[Path, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything is trained, with or without ``--check``."""
    model = model_directory("bert-pooler")

    def refusal(code: int, place: Path, model: Path = model, task: str = "sst2") -> str:
        words = command(model, data_directory, "--start", f"{task}={place}", "--out", str(tmp_path / "out"))
        for more, expected in (([], code), (["--check"], 2)):
            capsys.readouterr()
            assert cli.main([*words, *more]) == expected
            assert not (tmp_path / "out").exists()
        error = capsys.readouterr().err
        assert error.count("forgetfree: error: ") == 1 and "faults:" not in error and "Traceback" not in error
        return error

    assert "is no adapter of PEFT. Expected a directory with" in refusal(2, model)
    assert "Unknown task in --start 'sst3'. Did you mean 'sst2'?" in refusal(2, lora[0], task="sst3")
    assert "sst2@2 is of a task that is met again" in refusal(2, lora[0], task="sst2@2")
    assert "does not fit this GPT2ForSequenceClassification" in refusal(1, lora[0], model_directory("gpt2"))
    untrained: Any = get_peft_model(
        AutoModel.from_pretrained(model), LoraConfig(r=2, target_modules=["query"], task_type="FEATURE_EXTRACTION")
    )
    untrained.save_pretrained(tmp_path / "untrained")
    assert "changes none of the 4448 graftable entries" in refusal(2, tmp_path / "untrained")
    (lora[0] / "adapter_model.safetensors").unlink()
    assert "has no readable adapter_model.safetensors" in refusal(1, lora[0])
    with pytest.raises(UsageError, match="the model is in memory"):
        forgetfree.run(
            "sst2",
            data=str(data_directory),
            model=AutoModel.from_pretrained(model),
            tokenizer=load_model(str(model)).tokenizer,
            starts={"sst2": tmp_path / "untrained"},
            progress=False,
        )


def test_what_cannot_be_grafted_and_another_base_are_told(
    model_directory: ModelDirectory, lora: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(model_directory("bert-mlm"))
    changes = {"target_modules": ["query", "word_embeddings"], "task_type": None}
    write_adapter("prompt", Path(model), tmp_path / "lora-mlm", **changes)
    pre = load_model(model, "linear").model
    start = AdapterStart.of(str(tmp_path / "lora-mlm"), model)
    capsys.readouterr()
    strategies = {"fine-tune": FineTune, "continual-ft": ContinualFT}
    assert tell_starts({"sst2": start}, pre, strategies) == {"sst2": sha256(tmp_path / "lora-mlm")}
    note, other = capsys.readouterr().err.splitlines()
    assert other == "note: --start has no effect on continual-ft: no task is fine-tuned on its own there."
    assert "changes 1 tensor that cannot be grafted, such as embeddings.word_embeddings.weight" in note
    (note,) = replace(AdapterStart.of(str(lora[0]), model)).check(pre)  # of the same shapes
    assert f"and is merged into {model!r}" in note
    (tmp_path / "lora-mlm" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="has changed since it was first read"):
        start.theta(pre)


@pytest.mark.sampled(share=0.3)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_modules": "((.*)*)*x"}, "such as '((.*)*)*x', take more than"),
        ({"rank_pattern": {"((.*)*)*x": 4}}, "such as '((.*)*)*x', take more than"),
        ({"target_modules": ["query"] * 1000}, "names 1,000 modules (target_modules)"),
        ({"r": 10**8}, "query.lora_A.weight' should have shape (100000000, 16), got (2, 16)"),
        ({"rank_pattern": {"query": 10**8}}, "should have shape (100000000, 16), got (2, 16)"),
        ({"peft_type": "VERA", "r": 10**9}, "is in the file and not in the network"),
        ({"layer_replication": [[0, 2]] * 500}, "repeats layers of its model"),
        ({"init_lora_weights": "pissa_niter_1000000000"}, "must be at most 100 rounds"),
    ],
)
def test_an_adapter_that_asks_for_endless_time_or_memory_is_refused(
    model_directory: ModelDirectory,
    lora: tuple[Path, Any],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.setattr(peft_adapter, "MOST_SECONDS", 0.5)
    model, file = str(model_directory("bert-pooler")), lora[0] / "adapter_config.json"
    pre = load_model(model, "linear").model
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelError) as caught:
        AdapterStart.of(str(lora[0]), model).check(pre)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "how",
    [{"target_modules": r".*\.(query|value|intermediate\.dense)"}, {"init_lora_weights": "pissa"}, {"use_dora": True}],
)
def test_patterns_and_other_kinds_of_lora_are_read(
    model_directory: ModelDirectory, tmp_path: Path, how: dict[str, Any]
) -> None:
    model = model_directory("bert-pooler")
    write_adapter("classifier", model, tmp_path / "lora", **how)
    assert AdapterStart.of(str(tmp_path / "lora"), str(model)).check(load_model(str(model), "linear").model) == ()


def test_weights_that_are_a_pipe_or_a_head_without_end_are_refused(
    model_directory: ModelDirectory, lora: tuple[Path, Any]
) -> None:
    model, weights = str(model_directory("bert-pooler")), lora[0] / "adapter_model.safetensors"
    tensors = load_file(weights)
    (head,) = (name for name in tensors if name.endswith("classifier.weight"))
    save_file(tensors | {head: torch.zeros(10**9, 0)}, weights)
    with pytest.raises(ModelError, match="has 1,000,000,000 labels"):
        AdapterStart.of(str(lora[0]), model).check(load_model(model, "linear").model)
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(ModelError, match=r"no readable adapter_model\.safetensors"):
        AdapterStart.of(str(lora[0]), model)
    with pytest.raises(ModelError, match=r"no adapter_model\.safetensors that is a file"):
        load_fine_tuned(str(lora[0]), model, load_task("sst2", "demo").task)
