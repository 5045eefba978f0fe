"""Three tasks beside the weights, in one process or sharded over several: torchrun sharded.py OUT."""

from __future__ import annotations

import sys
from typing import Any

import torch
from loops import classifier, labelled, texts
from quantised import llama
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from forgetfree import Ledger, answering, learning
from forgetfree.errors import ForgetfreeError, LedgerError
from forgetfree.testing.tiny import pre_trained


def shard(model: Any, ignored: set[nn.Parameter]) -> Any:
    """Shard a model layer by layer."""
    layers = model.model.layers if hasattr(model, "model") else model.bert.encoder.layer
    for layer in layers:
        fully_shard(layer)
    return fully_shard(model, ignored_params=ignored)


def learn(model: Any, rows: Any, out: str, rank: int, several: int) -> None:
    """Train with two half batches a step, one per process or both in one; a classifier's head is trained whole."""
    x, seen = {"input_ids": rows(9)[0]["input_ids"]}, dict[str, torch.Tensor]()
    ledger = Ledger.of_model(model.eval(), effect="beside")
    halves = [[{name: part[i : i + 2] for name, part in batch.items()} for i in (0, 2)] for batch in rows(2)]
    own = [[pair[rank]] if several > 1 else pair for pair in halves]
    for task in ("one", "two", "three"):
        batches = [half for step in own for half in step]
        with learning(model, ledger, task, batches=batches, sparsity=0.05) as skill:
            if several > 1 and task == "one":
                shard(model, {skill.values})
            optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
            for step in own:
                for half in step:
                    (model(**half).loss / len(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        for known in ledger.tasks:
            with answering(model, ledger, known), torch.no_grad():
                answer = model(**x).logits.clone()
            assert torch.equal(seen.setdefault(known, answer), answer), (task, known)
        assert all(parameter.requires_grad for parameter in model.parameters())
    if rank == 0:
        ledger.save(out)
    if several > 1:
        again = Ledger.of_model(model)
        assert again.effect == "beside" and again.fingerprint == ledger.fingerprint
        try:
            with answering(model, ledger, "one"), torch.no_grad():
                next(model.parameters()).add_(1)
        except LedgerError:
            return
        raise AssertionError("nobody noticed that the weights changed")


def learn_both(out: str, rank: int, several: int) -> None:
    learn(pre_trained(llama), texts, f"{out}.texts", rank, several)
    learn(classifier(), labelled, f"{out}.labels", rank, several)


def refuse(model: Any, rank: int, effect: Any, *, early: bool = False) -> None:
    """Print the errors for sharding without the vector in ``ignored_params``, and for writing into sharded weights."""
    ledger = Ledger.of_model(model, effect=effect)
    try:
        if early:
            shard(model, set())
        with learning(model, ledger, "task", region_from="random", sparsity=0.05):
            shard(model, set())(**texts(1)[0])
    except ForgetfreeError as error:
        if rank == 0:
            print(error)


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    rank, several = distributed.get_rank(), distributed.get_world_size()
    learn_both(sys.argv[1], rank, several)
    refuse(pre_trained(llama), rank, "beside")
    refuse(pre_trained(llama), rank, "written")
    refuse(pre_trained(llama), rank, "written", early=True)
    distributed.destroy_process_group()
