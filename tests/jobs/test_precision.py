"""``precision=auto`` is measured once and recorded, and a resumed run uses the recorded precision."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forgetfree.core import precision
from forgetfree.core.precision import faster_precision
from forgetfree.core.readout_model import autocast
from forgetfree.errors import OptionError, UsageError
from forgetfree.jobs.config import Execution, RunConfig, prepared, with_precision
from forgetfree.jobs.run import run as perform
from forgetfree.registry import strategy
from forgetfree.testing import tiny_stream
from forgetfree.training.encoded_task import predict
from forgetfree.training.training_options import TrainingOptions, for_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache of measurements."""
    monkeypatch.setenv("FORGETFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(precision, "_measured", {})
    return tmp_path / "cache" / "precision"


@pytest.fixture
def bf16_takes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Let a pass in bf16 take these milliseconds, turn by turn, and one in fp32 one; return the list of passes so far."""

    def takes(*seconds: float | Exception) -> list[str]:
        passes, now = list[str](), [0.0]

        def compute(model: Any, x: Tensor, name: str) -> None:
            turn = passes.count(name)
            passes.append(name)
            took = 1.0 if name == "fp32" else seconds[turn % len(seconds)]
            if isinstance(took, Exception):
                raise took
            now[0] += took / 1000

        monkeypatch.setattr(precision, "_pass", compute)
        monkeypatch.setattr(precision.time, "process_time", lambda: now[0])
        return passes

    return takes


@pytest.fixture(params=["bf16", "fp32"])
def faster(request: pytest.FixtureRequest, bf16_takes: Callable[..., list[str]]) -> str:
    bf16_takes(0.5 if request.param == "bf16" else 2.0)
    return request.param


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        ([0.84], "bf16"),
        ([0.86], "fp32"),
        ([9.0, 9.0, 9.0, 0.8, 9.0, 9.0], "bf16"),  # other work on the machine makes turns slower, never faster
        ([0.8, 2000.0, 0.8], "bf16"),  # a single slow turn does not decide
    ],
    ids=["faster", "no clear difference", "noise", "a slow turn"],
)
def test_bf16_is_taken_where_it_is_clearly_faster(seconds: Any, taken: str, bf16_takes: Any, cache: Path) -> None:
    passes, model = bf16_takes(*seconds), tiny_stream().model
    assert faster_precision(model) == taken
    count, (file,) = len(passes), cache.iterdir()
    precision._measured.clear()
    assert faster_precision(model) == taken and len(passes) == count
    assert json.loads(file.read_text())["precision"] == taken


def test_where_bf16_cannot_be_computed_now_it_is_tried_again_another_time(bf16_takes: Any, cache: Path) -> None:
    bf16_takes(RuntimeError("out of memory"))
    model = tiny_stream().model
    assert faster_precision(model) == "fp32" and not cache.exists()


def test_another_machine_model_or_number_of_threads_is_measured_anew(
    bf16_takes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, model, threads = bf16_takes(0.5), tiny_stream().model, torch.get_num_threads()

    def is_measured() -> bool:
        before = len(passes)
        faster_precision(model)
        return len(passes) > before

    assert is_measured() and not is_measured()
    monkeypatch.setattr(precision, "processor_of", lambda device: "another processor")
    assert is_measured() and not is_measured()
    torch.set_num_threads(threads + 1)
    try:
        assert is_measured() and not is_measured()
    finally:
        torch.set_num_threads(threads)
    model.backbone.register_parameter("more", torch.nn.Parameter(torch.zeros(2)))
    assert is_measured() and not is_measured()


def test_measuring_leaves_a_model_and_the_generator_as_they_were() -> None:
    model = tiny_stream().model
    model.train()
    first = next(model.backbone.parameters())
    first.requires_grad_(False)
    before, drawn = {name: each.clone() for name, each in model.state_dict().items()}, torch.get_rng_state()
    assert faster_precision(model) in ("fp32", "bf16")
    assert torch.equal(torch.get_rng_state(), drawn) and model.training and not first.requires_grad
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())


def test_a_pass_does_not_decide() -> None:
    with pytest.raises(OptionError, match=r"decided once for a model, before its first pass\. Give fp32, bf16"):
        autocast("auto", "cpu")


def test_a_strategy_knows_what_was_taken(faster: str) -> None:
    cls = strategy("grafting-continual")
    made = cls(stream=tiny_stream(), options=cls.Options(precision="auto", sparsity=0.05))
    assert made.options.precision == faster
    assert for_model(TrainingOptions(precision="fp16"), made.model).precision == "fp16"
    assert TrainingOptions().precision == "fp32"


def test_what_was_taken_is_written_and_repeated(faster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(
        stream="sst2", set={"precision": "auto", "fine-tune.precision": "auto"}, device="cpu", out=str(tmp_path)
    )
    config = config.model_copy(update={"strategy": ("fine-tune",), "data": "demo"})
    assert with_precision(config).set == {"precision": faster, "fine-tune.precision": faster}
    begun = {"precision": "fp32" if faster == "bf16" else "bf16"}  # measured on another machine
    with monkeypatch.context() as patch:
        patch.setattr("forgetfree.jobs.config.load_run", lambda out: {"run": {"set": begun}})
        assert with_precision(config).set == begun | {"fine-tune.precision": faster}
    (tmp_path / "config.json").write_text('{"run": {"set": 1}}')
    assert with_precision(config).set["precision"] == faster
    given = RunConfig(stream="sst2", set={"precision": "fp32"}, out=str(tmp_path))
    assert with_precision(given) is given


def test_a_run_that_goes_on_computes_as_it_began(bf16_takes: Any, tmp_path: Path) -> None:
    config = RunConfig(
        stream="sst2",
        strategy=("fine-tune",),
        set={"precision": "auto", "floors": "constant", "test_limit": 4, "steps": 1},
        data="demo",
        shots=2,
        device="cpu",
        out=str(tmp_path / "out"),
    )
    bf16_takes(0.5)
    perform(prepared(config))
    passes = bf16_takes(2.0)
    precision._measured.clear()
    for file in (tmp_path / "cache" / "precision").iterdir():
        file.unlink()
    perform(prepared(config.model_copy(update={"seed": (0, 1)})), Execution(resume=True))
    recorded = json.loads((tmp_path / "out" / "config.json").read_text())
    units = [json.loads(each.read_text()) for each in (tmp_path / "out").glob("*/*/outcome.json")]
    assert recorded["run"]["set"]["precision"] == "bf16" and not passes
    assert [each["details"]["options"]["precision"] for each in units] == ["bf16"] * 2


def test_the_recipe_of_a_model_may_say_auto(faster: str, tmp_path: Path) -> None:
    config = RunConfig(stream="sst2", model="minilm", strategy=("fine-tune",), device="cpu", out=str(tmp_path))
    assert with_precision(config).set == {"precision": faster}
    assert with_precision(config.model_copy(update={"set": {"precision": "fp32"}})).set == {"precision": "fp32"}
    assert with_precision(config.model_copy(update={"model": "bert-base-uncased"})).set == {}


def test_the_options_are_checked_before_a_model_is_loaded(tmp_path: Path) -> None:
    config = RunConfig(stream="sst2", model="nowhere/at/all", set={"precision": "auto", "steps": 0}, out=str(tmp_path))
    with pytest.raises(UsageError, match="steps must be at least 1"):
        with_precision(config)


def test_training_in_bf16_answers_in_the_dtype_of_the_weights() -> None:
    stream, cls = tiny_stream(), strategy("grafting-continual")
    made = cls(stream=stream, options=cls.Options(precision="bf16", sparsity=0.05, steps=4))
    for experience in stream.benchmark.train_stream:
        made.train(experience)
    made.eval(stream.benchmark.test_stream)
    for task in stream.tasks:
        with made.answering(task):
            expected = predict(made.model, task.test, precision="fp32")
        assert torch.equal(torch.as_tensor(made.predictions[task.name].logits), expected)
