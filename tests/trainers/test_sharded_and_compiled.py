"""Tasks beside weights that FSDP2 takes apart, and beside those of compiled models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from loops import language_model, texts, train
from quantised import counting, llama, load, sft
from torch import Tensor

from forgetfree import Ledger
from forgetfree.testing.tiny import pre_trained
from forgetfree.trainers.learning import answering, learning


@pytest.mark.slow
def test_two_processes_with_sharded_weights_learn_as_one(tmp_path: Path) -> None:
    """Region and differences are those of one process with whole weights, within rounding; tasks keep their bits."""
    said = ""
    for count in (1, 2):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        command = [*launch, str(Path(__file__).parents[1] / "sharded.py"), str(tmp_path / str(count))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        said = done.stdout
    assert "ignored_params={skill.values}" in said
    for kind in ("texts", "labels"):
        one, two = (Ledger.load(tmp_path / f"{count}.{kind}") for count in (1, 2))
        assert one.fingerprint == two.fingerprint and one.effect == two.effect == "beside"
        for alone, sharded in zip(one.records, two.records, strict=True):
            assert alone.region == sharded.region and len(alone.owned.region) > 100
            torch.testing.assert_close(alone.owned.values, sharded.owned.values)
            torch.testing.assert_close(dict(alone.readout), dict(sharded.readout))
            assert bool(alone.readout) == (kind == "labels")


# -- Compiled models ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def seen_in_three_tasks(when: str) -> list[Tensor]:
    """Losses and answers, where the model is compiled ``inside`` of each block, ``before`` all of them, or not at all."""
    model, seen, x = pre_trained(llama), list[Tensor](), texts(9)[0]
    ledger = Ledger.of_model(model, effect="beside")
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if when == "before" else model
    with torch.no_grad():
        seen.append(called.eval()(**x).logits)
    for task in ("one", "two", "three"):
        first = graphs()
        with learning(model, ledger, task, batches=texts(1), sparsity=0.05) as skill:
            if when == "inside":
                called = torch.compile(model, backend="aot_eager", fullgraph=True)
            optimizer = torch.optim.AdamW([skill.values], lr=1e-2)
            for batch in texts(2):
                loss = called.train()(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.detach())
        with torch.no_grad():
            seen.append(called.eval()(**x).logits)
            assert torch.equal(seen[-1], seen[0])  # the base again
            for known in ledger.tasks:
                with answering(model, ledger, known):
                    seen.append(called(**x).logits)
        print(when, task, "graphs:", graphs() - first)
        if when == "before":
            assert graphs() - first <= 3  # one to train, and some to answer
    assert not torch._dynamo.utils.counters["graph_break"]
    return seen


@pytest.mark.sampled("before", share=0.5)
@pytest.mark.slow
@pytest.mark.parametrize("when", ["inside", "before"])
def test_a_compiled_model_learns_as_one_that_is_not(when: str) -> None:
    """The whole model is one graph, `fullgraph`, with the differences in it; hooks that come and go are noticed."""
    expected = seen_in_three_tasks("never")
    torch._dynamo.reset()
    for one, other in zip(seen_in_three_tasks(when), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled("True", share=0.5)
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of libraries that call one another
@pytest.mark.parametrize("quantised", [False, True])
def test_a_trainer_that_compiles(quantised: bool, tmp_path: Path) -> None:
    found = []
    compiling = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    for compiles in (False, True):
        model = load(llama, "nf4", tmp_path / "base") if quantised else pre_trained(llama)
        ledger, losses = Ledger.of_model(model, effect="beside"), []
        how = {"max_steps": 5, "logging_steps": 1, "gradient_checkpointing": False} | (compiling if compiles else {})
        for step, task in enumerate(("one", "two"), 1):
            with learning(model, ledger, task, batches=texts(1), sparsity=0.02):
                losses += sft(model, counting(step), tmp_path, **how)
        found.append(losses)
        assert (graphs() > 0) == compiles
    assert found[1] == pytest.approx(found[0], rel=1e-4) and found[1][4] < found[1][0]


def test_a_model_that_was_compiled_answers_with_its_tasks() -> None:
    """In evaluation, as somebody serves it: compiled and called before there was a ledger."""
    model, x = language_model().eval(), texts(9)[0]
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        base = compiled(**x).logits
    ledger = Ledger.of_model(model, effect="beside")
    with learning(model, ledger, "one", batches=texts(1), sparsity=0.05):
        train(model, texts(2))
    with answering(model, ledger, "one"), torch.no_grad():
        answer = compiled(**x).logits
        torch.testing.assert_close(answer, model(**x).logits)
    assert not torch.allclose(answer, base)
