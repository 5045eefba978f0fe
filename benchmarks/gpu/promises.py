"""Promises: properties that must hold to the bit, on a model of MiniLM's shape."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, random_region, same
from benchmarks.gpu.results import Measurement, SectionResults, Value, promise
from benchmarks.speed.ledger_growth import ledger_of
from forgetfree import LedgerSwitch, MixedBatchModel, registry
from forgetfree.checkpoint import Checkpoint
from forgetfree.continual.region_strategy import StandsOn
from forgetfree.continual.stream import make_stream
from forgetfree.core.regions import Region
from forgetfree.core.trained import RegionParameters
from forgetfree.jobs.checkpoints import pack, unpack
from forgetfree.kinds.decoding import write_greedily
from forgetfree.options import build
from forgetfree.recipes import ModelDtype
from forgetfree.training.encoded_task import predict
from forgetfree.training.single_task import SingleTask
from forgetfree.training.step import deterministic, fine_tune
from forgetfree.training.training_options import TrainingOptions


def measurements(bench: Bench, results: SectionResults) -> Iterator[Measurement]:
    """Yield every promise; the most important first."""
    for precision in ("fp32", "bf16"):
        yield Measurement(f"later tasks, {precision}", 20, partial(later_tasks, bench, precision))
    ways: tuple[StandsOn, ...] = ("union", "alone")
    for stands_on in ways:
        yield Measurement(f"switches, {stands_on}", 10, partial(switches, bench, stands_on))
    yield Measurement("a region", 10, partial(region, bench))
    dtypes: tuple[ModelDtype, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        yield Measurement(f"texts, {dtype}", 15, partial(texts, bench, dtype))
    for precision in ("fp32", "bf16"):
        yield Measurement(f"training again and resumed, {precision}", 15, partial(again_and_resumed, bench, precision))


def later_tasks(bench: Bench, precision: str) -> Iterator[Value]:
    """Learn three tasks, and compare the answers to each with its answers right after it was learned."""
    stream = make_stream("promises", [bench.rows(name, 30) for name in "abc"], bench.bert())
    cls = registry.strategy("grafting-continual")
    how: dict[str, Any] = {"steps": 10, "sparsity": 1e-3, "mask_steps": 2, "mask_batch_size": 32, "optimizer": "adamw"}
    options = build(cls.Options, how | {"learning_rate": 1e-3, "precision": precision}, "the promises")
    strategy = cls(stream=stream, options=options, device=bench.device)
    before, first = strategy.evaluate(), dict[str, Any]()
    for task, experience in zip(stream.tasks, stream.benchmark.train_stream, strict=True):
        strategy.train(experience)
        first[task.name] = strategy.evaluate([task])[task.name]
    now = strategy.evaluate()
    yield promise(
        "later tasks leave every logit of earlier ones as it is", all(now[name].same_as(first[name]) for name in now)
    )
    yield promise("learning a task changes the answers to it", not any(now[name].same_as(before[name]) for name in now))


def switches(bench: Bench, stands_on: StandsOn) -> Iterator[Value]:
    """Switch from task to task and back, and predict after each switch; then predict rows of many tasks at once."""
    loaded = bench.bert()
    single = SingleTask.of(loaded, bench.rows("alpha", 30), device=bench.device)
    model, space, test = single.model, single.space, single.task.test
    ledger = ledger_of(space, 8, max(8, len(space) // 10_000), stands_on)
    for name in ledger.tasks:
        model.add_task(name, 2)
    model.to(bench.device)
    before = space.flatten(model.backbone)
    switch = LedgerSwitch(ledger, model.backbone, check=False)
    first, kept = dict[int, Tensor](), True
    for stage in (1, 5, 8, 3, 0, 8, 1, 3, 5):
        switch.to(stage)
        logits = predict(model, test)
        kept &= same(first.setdefault(stage, logits), logits)
    switch.to(0)
    yield promise("a task answers with the same bits after any switches", kept and not same(first[1], first[5]))
    yield promise("θ_pre is back after nine switches, bit for bit", same(space.flatten(model.backbone), before))
    asked = [test.batch([row])[0][0] for row in range(8)]
    mixed, exact = (
        MixedBatchModel(model, switch, pad=loaded.pad, smallest_group=least).answer(asked, ledger.tasks)
        for least in (4, 1)
    )
    worst = max(
        float(((ours - theirs).abs() / theirs.abs().clamp(min=1)).max())
        for ours, theirs in zip(mixed, exact, strict=True)
    )
    yield promise("rows of eight tasks at once are within 1e-4 of exact answers", worst < 1e-4)
    yield Value("the largest difference of rows of eight tasks at once", worst)
    switch.to(0)
    alone = predict(model, test.subset([7]), batch_size=1)
    yield promise("a row that is read alone has the same bits", same(alone[0], predict(model, test, batch_size=1)[7]))


def region(bench: Bench) -> Iterator[Value]:
    """Train a region, and check the entries outside it."""
    single = SingleTask.of(bench.bert(), bench.rows("alpha", 30), device=bench.device)
    model, space = single.model, single.space
    before, chosen = space.flatten(model.backbone), random_region(len(space), 1e-3)
    with single.holding(single.pre):
        trained = RegionParameters(model.backbone, space, chosen)
        fine_tune(model, single.task.train, bench.options(), steps=10, seed=0, trained=trained)
        after = space.flatten(model.backbone)
    moved = (after != before).nonzero().flatten().cpu()
    yield promise(
        "training a region moves entries, and none outside it",
        0 < len(moved) == int(torch.isin(moved, chosen.indices).sum()),
    )
    yield promise("θ_pre is back after training, bit for bit", same(space.flatten(model.backbone), before))


class Kept(Checkpoint):
    """Keeps the state after one step, packed as in a file, and resumes from it the next time."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._state: tuple[str, dict[str, Tensor]] | None = None

    def begin(self, steps: int, state: Any, *about: Any) -> int:
        """Resume from the state, if there is one."""
        if self._state is None:
            return 0
        state.load_state_dict(unpack(*self._state))
        return self._at

    def after(self, step: int, steps: int, state: Any) -> None:
        """Keep the state."""
        if step == self._at and self._state is None:
            text, tensors = pack(state.state_dict())
            self._state = text, {name: tensor.clone() for name, tensor in tensors.items()}


def again_and_resumed(bench: Bench, precision: str) -> Iterator[Value]:
    """Train with dropout twice and resumed in the middle, with PyTorch's deterministic algorithms and without them."""
    single = SingleTask.of(bench.bert(), bench.rows("alpha", 30), device=bench.device)
    model, space = single.model, single.space
    options: TrainingOptions = bench.options(dropout=True, precision=precision)

    def trained(checkpoint: Checkpoint, chosen: Region | None) -> Tensor:
        part = None if chosen is None else RegionParameters(model.backbone, space, chosen)
        with single.holding(single.pre):
            rows = single.task.train
            fine_tune(model, rows, options, steps=10, seed=0, trained=part, checkpoint=checkpoint)
            return space.flatten(model.backbone).cpu()

    ways = {"all weights": None, "a region": random_region(len(space), 1e-3)}
    for way, chosen in ways.items():
        for algorithms in ("deterministic", "usual"):
            kept = Kept(5)
            with deterministic(algorithms == "deterministic"):
                whole, again, resumed = (trained(each, chosen) for each in (kept, Checkpoint(), kept))
            told = promise if algorithms == "deterministic" else Value
            yield told(f"{way}, {algorithms} algorithms: trained again to the same bits", same(whole, again))
            yield told(f"{way}, {algorithms} algorithms: resumed after step 5 to the same bits", same(whole, resumed))


@torch.no_grad()
def texts(bench: Bench, dtype: ModelDtype) -> Iterator[Value]:
    """Generate a text alone and among others, at each place, with random weights: in half precision tokens often tie."""
    model: Any = bench.llama("135 million", "generate", dtype).model
    draw, new = random.Random(0), 4 if bench.tiny else 24
    model.to(bench.device).eval()
    model.add_task("story", 0)
    ids = range(10, 100)
    row, *others = [draw.choices(ids, k=length) for length in (40, 33, 47, 40, 52, 36, 61, 45)]
    states: list[Tensor] = []
    hook = model.backbone.register_forward_hook(lambda module, given, made: states.append(made.logits[:, -1].cpu()))

    def write(prompts: list[list[int]]) -> tuple[list[int], list[Tensor]]:
        states.clear()
        place = prompts.index(row)
        found = write_greedily(model, prompts, task=0, most=new, ends=lambda ids: False, end=-1)[place]
        return found, [each[place] for each in states if len(each) > place]

    text, alone = write([row])
    among = [write([*others[:place], row, *others[place:]]) for place in (0, 3, 7)]
    hook.remove()
    yield promise("a text is the same alone and among others, at each place", all(each[0] == text for each in among))
    if bench.device.type != "cpu" or dtype != "float32":
        kept = all(torch.equal(*pair) for _, found in among for pair in zip(found, alone, strict=True))
        yield promise("and so is every bit of its logits", kept)
