"""Compare our training loop, with Avalanche's callbacks, with a bare PyTorch loop over the same batches.

    python -m forgetfree.benchmarks.speed.training_loop [--steps 30] [--rounds 5] [--model minilm] [--data demo]

Runs alternate; the ratio of medians must stay at or below 1.10.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch.nn import functional as F

from forgetfree import registry
from forgetfree.continual.streams import Stream, load_stream
from forgetfree.data.sampling import plan_batches
from forgetfree.learning.training import TrainingOptions
from forgetfree.seeds import derive_seed

TARGET = 1.10


def bare_loop(stream: Stream, steps: int) -> float:
    """Return the seconds of ``steps`` SGD steps written out by hand, batches and padding included."""
    model: Any = stream.model
    rows: Any = stream.tasks[0].train
    head = model.readout_module(0)
    parameters = [*model.space().parameters(model.backbone), *head.parameters()]
    wanted = {id(parameter) for parameter in parameters}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in wanted)
    optimizer = torch.optim.SGD(parameters, lr=1e-2, weight_decay=1e-4)
    batches = plan_batches(rows.lengths, 8, steps, derive_seed(0, "batches"))
    model.train()
    start = time.perf_counter()
    for batch in batches:
        x, y, _ = rows.batch(batch)
        attention = x.ne(rows.pad).long()
        separators = x.eq(model.tokens.separator or 0).long()
        types = (separators.cumsum(1) - separators).eq(1).long() * attention
        hidden = model.backbone(input_ids=x, attention_mask=attention, token_type_ids=types).last_hidden_state
        loss = F.cross_entropy(head(model.dropout(hidden[:, 0])), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()
    return time.perf_counter() - start


def our_loop(stream: Stream, steps: int) -> float:
    """Return the seconds of the same steps in the strategy ``continual-ft``."""
    strategy = registry.strategy("continual-ft")(stream=stream, options=TrainingOptions(steps=steps))
    experience = stream.benchmark.train_stream[0]
    start = time.perf_counter()
    strategy.train(experience)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    stream = load_stream("qnli,ag_news", data=options.data, model=options.model, readout="linear")
    bare_loop(stream, 3), our_loop(stream, 3)  # warm up
    bare, ours = [], []
    for _ in range(options.rounds):
        bare.append(bare_loop(stream, options.steps))
        ours.append(our_loop(stream, options.steps))
    ratio = statistics.median(ours) / statistics.median(bare)
    paired = statistics.median(our / plain for our, plain in zip(ours, bare, strict=True))
    print(f"bare  {statistics.median(bare) / options.steps:.4f} s/step (median of {options.rounds})")
    print(f"ours  {statistics.median(ours) / options.steps:.4f} s/step")
    print(f"ratio {ratio:.3f} of medians, {paired:.3f} median of pairs (target: at most {TARGET})")


if __name__ == "__main__":
    main()
