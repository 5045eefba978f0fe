"""Tasks beside weights that FSDP2 shards, and beside the weights of compiled models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sharded
import torch
import torch._dynamo.utils
from loops import texts
from quantised import counting, llama, load, sft
from torch import Tensor

from forgetfree import Ledger
from forgetfree.testing.tiny import pre_trained
from forgetfree.trainers.learning import answering, learning


@pytest.mark.slow
def test_two_processes_with_sharded_weights_learn_as_one(tmp_path: Path) -> None:
    """Region and differences equal those of one process with whole weights, up to rounding; tasks keep their bits."""
    sharded.learn_both(str(tmp_path / "1"), rank=0, several=1)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launch, sharded.__file__, str(tmp_path / "2")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    unsharded, inside, early = done.stdout.splitlines()
    assert "ignored_params={skill.values}" in unsharded
    assert "a region that is written needs them whole" in inside
    assert "quantised or sharded" in early and "effect='beside'" in early
    for kind in ("texts", "labels"):
        one, two = (Ledger.load(tmp_path / f"{count}.{kind}") for count in (1, 2))
        assert one.fingerprint == two.fingerprint and one.effect == two.effect == "beside"
        for alone, apart in zip(one.records, two.records, strict=True):
            assert alone.region == apart.region and len(alone.owned.region) > 100
            torch.testing.assert_close(alone.owned.values, apart.owned.values)
            torch.testing.assert_close(dict(alone.readout), dict(apart.readout))
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


def seen_in_two_tasks(when: str) -> list[Tensor]:
    """Return losses and answers of a model compiled ``inside`` each block, ``before`` there is a ledger, or ``never``."""
    model, seen, x = pre_trained(lambda: llama(layers=1)), list[Tensor](), texts(9)[0]
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if when == "before" else model
    with torch.no_grad():
        seen.append(called.eval()(**x).logits)
    ledger = Ledger.of_model(model, effect="beside")
    for task in ("one", "two"):
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
            assert torch.equal(seen[-1], seen[0])  # the base model again
            for known in ledger.tasks:
                with answering(model, ledger, known):
                    seen.append(called(**x).logits)
        print(when, task, "graphs:", graphs() - first)
        if when == "before":
            assert graphs() - first <= 3  # one graph to train, and some to answer
    assert not torch._dynamo.utils.counters["graph_break"]
    return seen


@pytest.mark.sampled("before", share=0.15)
@pytest.mark.slow
@pytest.mark.parametrize("when", ["inside", "before"])
def test_a_compiled_model_learns_as_one_that_is_not(when: str) -> None:
    """The model with its differences is one graph (`fullgraph`); hooks that are added or removed are noticed."""
    expected = seen_in_two_tasks("never")
    torch._dynamo.reset()
    for one, other in zip(seen_in_two_tasks(when), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # libraries warn about each other
def test_a_trainer_that_compiles_a_quantised_model(tmp_path: Path) -> None:
    found = []
    compiling = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    for compiles in (False, True):
        model = load(llama, "nf4", tmp_path / "base")
        ledger = Ledger.of_model(model, effect="beside")
        how = {"max_steps": 5, "logging_steps": 1, "gradient_checkpointing": False} | (compiling if compiles else {})
        with learning(model, ledger, "one", batches=texts(1), sparsity=0.02):
            found.append(sft(model, counting(1), tmp_path, **how))
        assert (graphs() > 0) == compiles
    assert found[1] == pytest.approx(found[0], rel=1e-4) and found[1][4] < found[1][0]
