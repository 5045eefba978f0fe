"""Times as ratios between contenders that take turns: a step, a search, waits and texts, with random weights."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from peft import LoraConfig

from benchmarks.gpu.bench import Bench, random_region
from benchmarks.gpu.operations import Launches
from benchmarks.gpu.results import Measurement, SectionResults, Value
from benchmarks.speed.measurement import alternate
from benchmarks.speed.region_step import (
    adapted,
    all_of,
    found_region,
    our_step,
    plain_step,
    region_step,
    whole,
)
from forgetfree.core.trained import RegionParameters, WholeTensors
from forgetfree.data.rows import Rows, TaskRows
from forgetfree.models.loading import LoadedModel
from forgetfree.recipes import ModelDtype
from forgetfree.tasks import TaskDefinition
from forgetfree.training.single_task import SingleTask
from forgetfree.training.step import fine_tune, layer_checkpoints, training_mode

#: All matrices of a layer, in BERT and in Llama.
MATRICES = r".*layers?\.\d+\..*(query|key|value|dense|_proj)"
#: Bytes per entry in bfloat16: while both loops train all weights (with θ_pre, the models of a region and of LoRA, and our
#: loop's float32 copies, gradients and moments), and during a mask search (θ, θ_pre and θ_ft twice, S, a gradient).
TRAINED, SEARCHED = 4 + (2 + 4 + 4 + 8) + (2 + 2 + 4) + 4, 2 + 8 + 4 + 2
#: By name: a function that makes a model, and the number of words per row.
Models = dict[str, tuple[Callable[[], LoadedModel], int]]


def measurements(bench: Bench, results: SectionResults) -> Iterator[Measurement]:
    """Yield the times of a model of MiniLM's shape, of texts, and of larger models."""
    models: Models = {"MiniLM's shape": (bench.bert, 30)}
    for size in ("1 billion", "8 billion"):
        models[size] = partial(bench.llama, size, "linear", "bfloat16"), 500
    (small, (load, length)), *large = models.items()
    for precision in ("fp32", "bf16"):
        yield Measurement(f"{small}, {precision}", 25, partial(steps, bench, load, length, precision))
    yield Measurement(f"{small}, waits", 10, partial(waits, bench))
    yield Measurement(f"{small}, a search", 20, partial(search, bench, load, length, 1024))
    dtypes: tuple[ModelDtype, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        yield Measurement(f"texts, {dtype}", 40, partial(texts, bench, dtype))
    for (size, (load, length)), seconds in zip(large, (40.0, 90.0), strict=True):
        yield Measurement(f"{size}, bfloat16", seconds, partial(steps, bench, load, length, "fp32"))
        yield Measurement(f"{size}, bfloat16, a search", seconds, partial(search, bench, load, length, 16))


def ratio(seconds: Mapping[str, np.ndarray], ours: str, other: str) -> Value:
    """Return the median ratio of two contenders."""
    return Value(f"{ours} / {other}", float(np.median(seconds[ours] / seconds[other])), shown=True)


def milliseconds(seconds: Mapping[str, np.ndarray], each: int) -> list[Value]:
    """Return the median milliseconds per step of every contender, with ``each`` steps per turn."""
    return [Value(name, 1e3 * float(np.median(times)) / each, "ms") for name, times in seconds.items()]


def left_out(bench: Bench, what: str, entries: int, each: int) -> list[Value]:
    """Return a note if a measurement needs more bytes than the card has, with 20 % more for activations; else nothing."""
    needed = 1.2 * each * entries
    return [Value(what, f"left out: it takes about {needed / 1e9:.0f} GB")] if needed > bench.memory else []


def steps(bench: Bench, load: Callable[[], LoadedModel], length: int, precision: str) -> Iterator[Value]:
    """Time steps of 8 rows: regions and LoRA, and if they fit, fine-tuning and PyTorch's own loop.

    One region is random; for the small model, another one is distributed as after fine-tuning. Large models compute in their
    weights' bfloat16, with gradient checkpointing.
    """
    base, large = SingleTask.of(load(), bench.rows("alpha", length), device=bench.device), length > 100
    model: Any = base.model
    training_mode(model, dropout=False)
    options = bench.options(precision=precision, dropout=False)
    count = 2 if bench.tiny else 4 if large else 24
    batches: Any = [model.on_device(base.task.train.batch(range(8 * i % 64, 8 * i % 64 + 8))) for i in range(count)]
    regions = {"random region": random_region(len(base.space), 1e-4 if large else 1e-3)}
    if not large:
        regions["found region"] = found_region(base.space)
    with ExitStack() as stack:

        def copied() -> Any:
            return checkpointing(copy.deepcopy(model))

        def checkpointing(made: Any) -> Any:
            stack.enter_context(layer_checkpoints(made, large))
            return made

        lora, adapters = adapted(model, LoraConfig(r=8, target_modules=MATRICES))
        contenders = {
            **{name: region_step(stack, copied(), region, options) for name, region in regions.items()},
            "LoRA (PEFT)": plain_step(stack, checkpointing(lora), adapters, "adamw", precision),
        }
        if missing := left_out(bench, "fine-tune", len(base.space), TRAINED):
            yield from missing
        else:
            ours, plain = copied(), copied()
            trained = WholeTensors(ours.space().parameters(ours.backbone))
            contenders["fine-tune"] = our_step(stack, ours, trained, options)
            contenders["PyTorch's loop"] = plain_step(stack, plain, whole(plain), "adamw", precision)
        turns = 2 if bench.tiny else 3 if large else 9
        seconds = alternate({name: partial(all_of, step, batches) for name, step in contenders.items()}, turns=turns)
        of_host = [value for name, step in contenders.items() for value in host(name, step, batches, seconds[name])]
    if "fine-tune" in seconds:
        yield ratio(seconds, "fine-tune", "PyTorch's loop")
        yield from (ratio(seconds, name, "fine-tune") for name in regions)
    yield from (ratio(seconds, name, "LoRA (PEFT)") for name in regions)
    yield from milliseconds(seconds, len(batches))
    yield from of_host


def host(name: str, step: Callable[[Any], None], batches: Any, seconds: np.ndarray) -> list[Value]:
    """Return the operations of a step, the time of one operation, and the processor's share of the step's time.

    The share is the time until all operations are launched, over the step's time. At 1, the GPU waits for the processor.
    """
    with Launches() as counted:
        step(batches[0])
    begin = time.perf_counter()
    all_of(step, batches)
    given, took = time.perf_counter() - begin, float(np.median(seconds))
    return [
        Value(f"operations of a step, {name}", counted.count, shown=True),
        Value(f"time of an operation, {name}", 1e6 * took / len(batches) / counted.count, "µs", shown=True),
        Value(f"the processor's share, {name}", min(1.0, given / took), shown=True),
    ]


def search(bench: Bench, load: Callable[[], LoadedModel], length: int, count: int) -> Iterator[Value]:
    """Time two steps of the mask search against two region steps of 8 rows."""
    count = 16 if bench.tiny else count
    loaded = load()
    if missing := left_out(bench, "a search", len(loaded.model.space()), SEARCHED):
        yield from missing
        return
    single = SingleTask.of(loaded, bench.rows("beta", length, count), device=bench.device)
    options = bench.options(dropout=False, mask_batch_size=count, gradient_checkpointing=length > 100)
    tuned = replace(single.pre, theta=single.pre.theta + 1e-3)
    step, mask_step = "region step", f"mask step of {count:,} rows"
    trained = RegionParameters(single.model.backbone, single.space, random_region(len(single.space), 1e-4))
    contenders: dict[str, Callable[[], object]] = {
        mask_step: partial(single.region, tuned, options),
        step: partial(fine_tune, single.model, single.task.train, options, steps=2, seed=0, trained=trained),
    }
    seconds = alternate(contenders, turns=1 if bench.tiny else 2)
    yield ratio(seconds, mask_step, step)
    yield from milliseconds(seconds, 2)


def waits(bench: Bench) -> Iterator[Value]:
    """Count how often a step makes the processor wait for the GPU, without the set-up of a training, and where."""
    few, single = 4, SingleTask.of(bench.bert(), bench.rows("alpha", 30), device=bench.device)
    region = RegionParameters(single.model.backbone, single.space, random_region(len(single.space), 1e-3))
    options = bench.options(dropout=False)
    for name, trained in (("fine-tune", None), ("random region", region)):
        train = partial(fine_tune, single.model, single.task.train, options, seed=0, trained=trained)
        train(steps=few)
        some, more = (bench.waits(partial(train, steps=steps)) for steps in (few, 3 * few))
        if some is None or more is None:
            yield Value(f"waits of a step, {name}", "only a GPU tells")
            continue
        step = (more.total() - some.total()) / (2 * few)
        yield Value(f"waits of a step, {name}", step, shown=True)
        yield Value(f"waits of the set-up, {name}", some.total() - few * step, shown=True)
        yield from (
            Value(f"{place}, waits of {2 * few} steps, {name}", times) for place, times in (more - some).most_common(12)
        )


def texts(bench: Bench, dtype: ModelDtype) -> Iterator[Value]:
    """Time texts of 48 tokens against transformers' ``generate``, with random weights and with a model sure of its texts."""
    many, new = (2, 4) if bench.tiny else (16, 48)
    draw, known = random.Random(0), bench.rows("story", 40, 2).train.first[0].split()
    story = " ".join((known * 2)[:new])

    def split(count: int) -> Rows:
        return Rows(tuple(" ".join(draw.choices(known, k=40)) for _ in range(count)), (), ((story,),) * count)

    task = TaskDefinition("story", "generation", (), metric="exact_match", max_new_tokens=new)
    loaded = bench.llama("135 million", "generate", dtype)
    single = SingleTask.of(loaded, TaskRows(task, split(64), split(8), split(many)), device=bench.device)
    model: Any = single.model
    test: Any = single.task.test
    steps = 2 if bench.tiny else 60
    options = bench.options(dropout=False, steps=steps, learning_rate=3e-4, evaluation_batch_size=many)
    how: Any = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": loaded.pad}
    for name, state in (("random weights", single.pre), ("sure of its texts", single.fine_tuned(options))):
        with single.holding(state):
            inputs = model.to_continue([(prompt, []) for prompt in test.prompts])
            plain = torch.no_grad()(partial(model.backbone.eval().generate, **inputs, **how))
            ours, passes = partial(single.answers, state, options=options), list[int]()
            seconds = alternate({f"texts, {name}": ours, "transformers' generate": plain}, turns=1)
            hook = model.backbone.base_model.register_forward_hook(lambda *_, passes=passes: passes.append(1))
            ours()
            hook.remove()
        yield ratio(seconds, f"texts, {name}", "transformers' generate")
        yield Value(f"passes for {new} tokens, {name}", len(passes), expected=f"about {new + 1}")
        yield from milliseconds(seconds, 1)
