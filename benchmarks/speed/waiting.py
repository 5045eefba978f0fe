"""PyTorch threads that sleep while waiting, as the command line sets them (OMP_WAIT_POLICY), compared with threads that spin.

python -m benchmarks.speed waiting --threads 2

The policy is read when OpenMP is loaded, so each contender is a process of its own, and they take turns. Other load of the
machine affects all of them. The least times of all turns are nearest to the times of an idle machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from benchmarks.speed.measurement import Figure, alternate, ratio

#: The work of one turn, and its repetitions.
WORK = {"a step of training": 1, "steps of a tiny model": 10, "one text": 2, "eight texts": 1}
CONTENDERS: dict[str, dict[str, str]] = {"asleep": {"OMP_WAIT_POLICY": "PASSIVE"}, "spinning": {}}
CONTEXT = get_context("spawn")


def work() -> dict[str, Callable[[], Any]]:
    """Return one piece of each kind of work: a step of fine-tuning minilm, one of a tiny BERT, and answers of minilm."""
    from transformers import BertModel

    from forgetfree.continual.stream import load_stream
    from forgetfree.testing.tiny import bert_config
    from forgetfree.training.step import fine_tune
    from forgetfree.training.training_options import TrainingOptions

    stream = load_stream("qnli,sst2", data="demo", model="minilm", readout="linear")
    options = TrainingOptions(batch_size=8, optimizer="adamw", learning_rate=1e-5, schedule="constant")
    tiny = BertModel(bert_config(100))
    ids = torch.arange(8 * 16).view(8, 16) % 100
    rows = torch.arange(8 * 24).view(8, 24) + 2000

    @torch.no_grad()
    def answer(texts: int) -> None:
        stream.model.backbone.eval()(input_ids=rows[:texts])

    return {
        "a step of training": lambda: fine_tune(stream.model, stream.tasks[1].train, options, steps=1, seed=0),
        "steps of a tiny model": lambda: tiny(input_ids=ids).last_hidden_state.square().mean().backward(),
        "one text": partial(answer, 1),
        "eight texts": partial(answer, 8),
    }


def contender(calls: Connection, threads: int) -> None:
    """Do the requested work, until an empty request."""
    torch.set_num_threads(threads)
    known = work()
    while kind := calls.recv():
        for _ in range(WORK[kind]):
            known[kind]()
        calls.send(kind)


def spin() -> None:
    """Keep one core busy."""
    while True:
        pass


@contextmanager
def process(target: Callable[..., None], *arguments: Any, **variables: str) -> Iterator[None]:
    """Run a process beside the block; these are its only variables on waiting threads."""
    before = dict(os.environ)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    made = CONTEXT.Process(target=target, args=arguments, daemon=True)
    try:
        made.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    try:
        yield
    finally:
        made.kill()
        made.join()


def figures(turns: int = 9) -> list[Figure]:
    """Measure on minilm and a tiny model, with the threads that the process has, alone and beside a process that spins."""
    found = []
    with ExitStack() as stack:
        calls: dict[str, Connection] = {}
        for name, variables in CONTENDERS.items():
            calls[name], theirs = CONTEXT.Pipe()
            stack.enter_context(process(contender, theirs, torch.get_num_threads(), **variables))

        def once(name: str, kind: str) -> None:
            calls[name].send(kind)
            calls[name].recv()

        for beside in ("alone", "beside a busy process"):
            if beside != "alone":
                stack.enter_context(process(spin))
            for kind in WORK:
                seconds = alternate({name: partial(once, name, kind) for name in CONTENDERS}, turns=turns)
                what = f"{kind}, {beside}"
                found.append(ratio(f"{what}: asleep / spinning", seconds, "asleep", "spinning"))
                least = {name: np.array([each.min()]) for name, each in seconds.items()}
                found.append(replace(ratio(f"{what}, least times", least, "asleep", "spinning"), low=None, high=None))
    return found
