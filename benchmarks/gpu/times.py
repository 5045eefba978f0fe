"""Times as ratios of contenders that take turns: a step, a search, a switch and texts, on weights from a configuration."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F

from forgetfree import LedgerSwitch
from forgetfree.benchmarks.gpu.bench import Bench, random_region
from forgetfree.benchmarks.gpu.promises import NAMES, random_ledger
from forgetfree.benchmarks.gpu.results import Measurement, SectionResults, Value
from forgetfree.benchmarks.speed.measurement import alternate
from forgetfree.core.readout_model import autocast
from forgetfree.core.trained import RegionParameters, TrainedParameters, WholeTensors, in_training, trainable
from forgetfree.data.rows import Rows, TaskRows
from forgetfree.learning.layers import layer_checkpoints
from forgetfree.learning.single_task import SingleTask
from forgetfree.learning.training import Update, fine_tune, predict, training_mode
from forgetfree.learning.training_options import TrainingOptions
from forgetfree.models.loading import LoadedModel
from forgetfree.recipes import ModelDtype
from forgetfree.tasks import TaskDefinition

#: All matrices of a layer, in BERT and in Llama.
MATRICES = r".*layers?\.\d+\..*(query|key|value|dense|_proj)"
#: Bytes of an entry while all weights are trained by AdamW: θ, θ_pre, a float32 copy, its gradients and moments; and while a
#: mask is searched for: θ, θ_pre and θ_ft twice, S and a gradient.
WHOLE_BYTES, SEARCH_BYTES = 2 + 2 + 4 + 4 + 8, 2 + 8 + 4 + 2


def measurements(bench: Bench, results: SectionResults) -> Iterator[Measurement]:
    """Yield the times of a model of MiniLM's shape, of generation, and of larger models."""
    for precision in ("fp32", "bf16"):
        yield Measurement(f"MiniLM's shape, {precision}", 25, partial(steps, bench, precision))
    yield Measurement("MiniLM's shape, waits", 10, partial(waits, bench))
    yield Measurement("MiniLM's shape, a search", 20, partial(search, bench))
    yield Measurement("MiniLM's shape, a switch", 8, partial(switch, bench, "MiniLM"))
    dtypes: tuple[ModelDtype, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        yield Measurement(f"texts, {dtype}", 40, partial(texts, bench, dtype))
    for size, seconds in (("1 billion", 40.0), ("8 billion", 90.0)):
        yield Measurement(f"{size}, bfloat16", seconds, partial(steps_of_large, bench, size))
        yield Measurement(f"{size}, bfloat16, a search", seconds, partial(search_of_large, bench, size))
    yield Measurement("1 billion, a switch", 10, partial(switch, bench, "1 billion"))


def ratio(seconds: Mapping[str, np.ndarray], ours: str, other: str, expected: str = "", what: str = "") -> Value:
    """Return the median ratio of two contenders."""
    return Value(
        what or f"{ours} / {other}", float(np.median(seconds[ours] / seconds[other])), expected=expected, shown=True
    )


def milliseconds(seconds: Mapping[str, np.ndarray], each: int = 1) -> list[Value]:
    """Return the median milliseconds of every contender, of one of so many steps."""
    return [Value(name, 1e3 * float(np.median(times)) / each, "ms") for name, times in seconds.items()]


# -- Steps ------------------------------------------------------------------------------------------------


class Steps:
    """Training steps of one model on the same batches: ours, PyTorch's and PEFT's, each prepared anew.

    Args:
        bench: where.
        loaded: the model.
        length: words of a row.
        options: how to train.
        count: steps that each takes.
    """

    def __init__(self, bench: Bench, loaded: LoadedModel, length: int, options: TrainingOptions, count: int) -> None:
        self.single = SingleTask.of(loaded, bench.rows("alpha", length), device=bench.device)
        self.model: Any = self.single.model
        self.options, self._device = options, bench.device
        rows, size = self.single.task.train, options.batch_size
        numbers = [range(first, first + size) for first in range(0, len(rows) - size + 1, size)]
        batches = [tuple(each.to(bench.device) for each in rows.batch(list(batch))) for batch in numbers]
        self.batches = [batches[i % len(batches)] for i in range(2 if bench.tiny else count)]

    def _loss(self, batch: Any) -> torch.Tensor:
        x, y, t = batch
        with autocast(self.options.precision, self._device.type):
            logits = self.model(x, t)
        return F.cross_entropy(logits.float(), y)

    def ours(self, trained: Callable[[], TrainedParameters]) -> Callable[[], None]:
        """Return a function that takes a step on every batch, as the loops of this library take it."""

        def run() -> None:
            part, readout = trained(), list(self.model.readout_module(0).parameters())
            with (
                in_training(self.model, part, readout),
                layer_checkpoints(self.model, self.options.gradient_checkpointing),
            ):
                update = Update(part.parameters, readout, self.options, 1000)
                training_mode(self.model, dropout=False)
                for batch in self.batches:
                    update.optimizer.zero_grad()
                    update.backward(self._loss(batch))
                    part.collect()
                    update.before_step()
                    update.step()
                    part.write()

        return run

    def plain(self, parameters: list[torch.nn.Parameter]) -> Callable[[], None]:
        """Return a function that takes the steps of PyTorch's own AdamW."""

        def run() -> None:
            with trainable(self.model, parameters), layer_checkpoints(self.model, self.options.gradient_checkpointing):
                optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
                training_mode(self.model, dropout=False)
                for batch in self.batches:
                    optimizer.zero_grad()
                    self._loss(batch).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()

        return run

    @property
    def whole(self) -> list[torch.nn.Parameter]:
        """All graftable tensors and the readout."""
        return [*self.single.space.parameters(self.model.backbone), *self.model.readout_module(0).parameters()]

    def trained_whole(self) -> TrainedParameters:
        """Return all graftable tensors, as they are trained."""
        return WholeTensors(self.single.space.parameters(self.model.backbone))

    def trained_region(self, share: float) -> Callable[[], TrainedParameters]:
        """Return what makes a region of random entries, as it is trained."""
        region = random_region(len(self.single.space), share)
        return lambda: RegionParameters(self.model.backbone, self.single.space, region)

    def with_lora(self) -> list[torch.nn.Parameter]:
        """Put PEFT's LoRA of rank 8 into the model, and return what is trained of it."""
        self.model.backbone = get_peft_model(self.model.backbone, LoraConfig(r=8, target_modules=MATRICES))
        adapters = [each for each in self.model.backbone.parameters() if each.requires_grad]
        return [*adapters, *self.model.readout_module(0).parameters()]


def steps(bench: Bench, precision: str) -> Iterator[Value]:
    """Steps of 8 rows of 30 words: fine-tuning, a region and LoRA beside PyTorch's own loop."""
    options = bench.options(precision=precision, dropout=False)
    ours, other = (Steps(bench, bench.bert(), 30, options, 24) for _ in range(2))
    contenders = {
        "fine-tune": ours.ours(ours.trained_whole),
        "PyTorch's loop": ours.plain(ours.whole),
        "region": ours.ours(ours.trained_region(1e-3)),
        "LoRA (PEFT)": other.plain(other.with_lora()),
    }
    seconds = alternate(contenders, turns=2 if bench.tiny else 9, warm_up=2)
    yield ratio(seconds, "fine-tune", "PyTorch's loop")
    yield ratio(seconds, "region", "fine-tune", "0.67 on a CPU")
    yield ratio(seconds, "region", "LoRA (PEFT)")
    yield from milliseconds(seconds, len(ours.batches))


def steps_of_large(bench: Bench, size: str) -> Iterator[Value]:
    """Steps of 8 rows of 500 words with gradient checkpointing: a region and LoRA, and fine-tuning where it fits."""
    options = bench.options(dropout=False, gradient_checkpointing=True)
    ours = Steps(bench, bench.llama(size, "linear", "bfloat16"), 16 if bench.tiny else 500, options, 6)
    entries, turns = len(ours.single.space), 1 if bench.tiny else 3
    contenders = {"region": ours.ours(ours.trained_region(1e-4))}
    if fits(bench, WHOLE_BYTES * entries):
        contenders["fine-tune"] = ours.ours(ours.trained_whole)
    else:
        yield left_out("fine-tune", WHOLE_BYTES * entries)
    seconds = alternate(contenders, turns=turns)
    bench.clear()
    seconds |= alternate(
        {"LoRA (PEFT)": ours.plain(ours.with_lora())}, turns=turns
    )  # in the same model, which it changes
    if "fine-tune" in seconds:
        yield ratio(seconds, "region", "fine-tune")
    yield ratio(seconds, "region", "LoRA (PEFT)")
    yield from milliseconds(seconds, len(ours.batches))


def search_of_large(bench: Bench, size: str) -> Iterator[Value]:
    """A search for a mask: two steps of 16 rows of 500 words, beside as many steps of fine-tuning a region."""
    options = bench.options(dropout=False, gradient_checkpointing=True, mask_batch_size=16, validation_rows=8)
    options = replace(options, mask_micro_batch_size=8, sparsity=1e-4)
    loaded = bench.llama(size, "linear", "bfloat16")
    if not fits(bench, SEARCH_BYTES * len(loaded.model.space())):
        yield left_out("a search", SEARCH_BYTES * len(loaded.model.space()))
        return
    ours = Steps(bench, loaded, 16 if bench.tiny else 500, options, 2)
    pre = ours.single.pre
    tuned = replace(pre, theta=pre.theta + 1e-3)
    contenders = {
        "search": lambda: ours.single.regions(tuned, options),
        "region": ours.ours(ours.trained_region(1e-4)),
    }
    seconds = alternate(contenders, turns=1)
    yield ratio(seconds, "search", "region", what="mask step of 16 rows / region step of 8")
    yield from milliseconds(seconds, 2)


def fits(bench: Bench, needed: float) -> bool:
    """Return whether the card has so many bytes, and a fifth more for the activations."""
    return 1.2 * needed < bench.memory


def left_out(what: str, needed: float) -> Value:
    """Return the word that something needs more bytes than the card has."""
    return Value(what, f"left out: it takes {needed / 1e9:.0f} GB and its activations, more than the card has")


def waits(bench: Bench) -> Iterator[Value]:
    """How often a step makes the processor wait for the GPU, and where."""
    few, single = 4, SingleTask.of(bench.bert(), bench.rows("alpha", 30), device=bench.device)
    model, space, options = single.model, single.space, bench.options(dropout=False)
    region = random_region(len(space), 1e-3)

    def train(chosen: Any) -> None:
        trained = None if chosen is None else RegionParameters(model.backbone, space, chosen)
        fine_tune(model, single.task.train, options, steps=few, seed=0, trained=trained)

    for name, chosen in (("fine-tune", None), ("region", region)):
        train(chosen)
        found = bench.waits(partial(train, chosen))
        if found is None:
            yield Value(f"waits of a step, {name}", "only a GPU tells")
            continue
        yield Value(f"waits of a step, {name}", found.total() / few, shown=True)
        yield from (Value(f"waits of {few} steps, {name}, {place}", count) for place, count in found.most_common(12))


def search(bench: Bench) -> Iterator[Value]:
    """Two steps of the search for a mask, and answers, by how many rows a pass reads."""
    count = 64 if bench.tiny else 1024
    single = SingleTask.of(bench.bert(), bench.rows("beta", 30, count), device=bench.device)
    options = bench.options(steps=2, mask_batch_size=count, validation_rows=8)
    fine_tuned = single.fine_tuned(options)
    sizes = [size for size in (64, 256, 1024) if size <= count]
    searches = {
        f"search, {size} rows a pass": partial(single.regions, fine_tuned, replace(options, mask_micro_batch_size=size))
        for size in sizes
    }
    seconds = alternate(searches, turns=1)
    answers = {
        f"answers, {size} rows a pass": partial(predict, single.model, single.task.train, batch_size=size)
        for size in sizes
    }
    seconds |= alternate(answers, turns=1 if bench.tiny else 3)
    step = alternate({"step": lambda: fine_tune(single.model, single.task.train, options, steps=8, seed=0)}, turns=1)
    seconds["fine-tune step"], seconds["mask step"] = step["step"] / 8, seconds[f"search, {sizes[0]} rows a pass"] / 2
    yield ratio(seconds, "mask step", "fine-tune step", what=f"mask step of {count:,} rows / fine-tune step of 8")
    for kind in ("search", "answers"):
        for size in sizes[1:]:
            yield ratio(seconds, f"{kind}, {size} rows a pass", f"{kind}, 64 rows a pass")
    yield from milliseconds(seconds)


def switch(bench: Bench, size: str) -> Iterator[Value]:
    """A switch from task to task beside ``load_state_dict`` of weights that are on the device."""
    loaded = bench.bert() if size == "MiniLM" else bench.llama(size, "linear", "bfloat16")
    backbone = loaded.model.to(bench.device).backbone
    state = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    for share in (1e-4, 1e-3):
        with ExitStack() as stack:
            made = LedgerSwitch(random_ledger(loaded.model.space(), share, "alone", NAMES), backbone, check=False)
            stack.callback(made.release)
            stack.callback(made.to, 0)

            def both(made: LedgerSwitch = made) -> None:
                made.to(1)
                made.to(2)

            contenders = {"two switches": both, "load_state_dict": partial(backbone.load_state_dict, state)}
            seconds = alternate(contenders, turns=3 if bench.tiny else 9)
            seconds["a switch"] = seconds.pop("two switches") / 2
            yield ratio(seconds, "a switch", "load_state_dict", what=f"a switch, s = {share:g} / load_state_dict")
            yield from (replace(each, what=f"{each.what}, s = {share:g}") for each in milliseconds(seconds))


# -- Texts ------------------------------------------------------------------------------------------------


def texts(bench: Bench, dtype: ModelDtype) -> Iterator[Value]:
    """Texts of 48 tokens beside transformers' ``generate``, with random weights and once the model is sure of its texts.

    In half precision, rows with two likely tokens are read again alone; a model that is sure has few.
    """
    many, new = (2, 4) if bench.tiny else (16, 48)
    draw, known = random.Random(0), bench.rows("story", 40, 2).train.first[0].split()
    story = " ".join((known * 3)[:new])

    def split(count: int) -> Rows:
        return Rows(tuple(" ".join(draw.choices(known, k=40)) for _ in range(count)), (), ((story,),) * count)

    task = TaskDefinition("story", "generation", (), metric="exact_match", max_new_tokens=new)
    loaded = bench.llama("135 million", "generate", dtype)
    single = SingleTask.of(loaded, TaskRows(task, split(64), split(8), split(many)), device=bench.device)
    model: Any = single.model
    steps = 2 if bench.tiny else 60
    options = bench.options(dropout=False, steps=steps, learning_rate=3e-4, evaluation_batch_size=many)
    test: Any = single.task.test
    for name, state in (("random weights", single.pre), ("sure of its texts", single.fine_tuned(options))):
        with single.holding(state):
            inputs = model.to_continue([(prompt, []) for prompt in test.prompts])
            how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": loaded.pad}
            count = [0]

            @torch.no_grad()
            def plain(inputs: Any = inputs, how: Any = how) -> None:
                model.backbone.eval().generate(**inputs, **how)

            ours = partial(single.answers, copy.copy(state), options=options)
            seconds = alternate({"ours": ours, "transformers' generate": plain}, turns=1)
            hook = model.backbone.base_model.register_forward_hook(
                lambda *_, count=count: count.__setitem__(0, count[0] + 1)
            )
            ours()
            hook.remove()
        yield ratio(seconds, "ours", "transformers' generate", what=f"texts, {name} / transformers' generate")
        yield Value(f"passes for {new} tokens, {name}", count[0], expected=f"about {new + 3}")
        yield from (replace(each, what=f"{each.what}, {name}") for each in milliseconds(seconds))
