"""Compare our training loop, with Avalanche's callbacks, with a bare PyTorch loop over the same batches.

python -m benchmarks.speed training_loop
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.speed.measurement import Figure, alternate, ratio
from forgetfree import registry
from forgetfree.continual.stream import Stream, load_stream
from forgetfree.data.rows import plan_batches
from forgetfree.seeds import derive_seed
from forgetfree.training.training_options import TrainingOptions

STEPS = 30


def bare_loop(stream: Stream, steps: int) -> None:
    """Take ``steps`` SGD steps written out by hand, batches and padding included."""
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
    for batch in batches:
        x, y, _ = rows.batch(batch)
        attention = x.ne(rows.pad).long()
        separators = x.eq(model.tokens.separator or 0).long()
        types = (separators.cumsum(1) - separators).eq(1).long() * attention
        hidden = model.backbone(input_ids=x, attention_mask=attention, token_type_ids=types).last_hidden_state
        loss = F.cross_entropy(head(F.dropout(hidden[:, 0], model.dropout)), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()


def our_loop(stream: Stream, steps: int) -> None:
    """Take the same steps in the strategy ``continual-ft``."""
    strategy = registry.strategy("continual-ft")(stream=stream, options=TrainingOptions(steps=steps))
    experience = stream.benchmark.train_stream[0]
    strategy.train(experience)


def figures(turns: int = 9) -> list[Figure]:
    """Measure on the demo task QNLI with minilm."""
    stream = load_stream("qnli,ag_news", data="demo", model="minilm", readout="linear")
    contenders = {"ours": lambda: our_loop(stream, STEPS), "bare": lambda: bare_loop(stream, STEPS)}
    seconds = alternate(contenders, turns=turns)
    return [
        ratio(f"{STEPS} steps of continual-ft / the same written out by hand", seconds, "ours", "bare", at_most=1.10)
    ]
