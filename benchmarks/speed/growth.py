"""How time grows with tasks, parameters and rows: seconds at each size, and the exponent between them.

python -m benchmarks.speed growth

An exponent p means that the time grows as size^p: 0 not at all, 1 in proportion. It is the slope of the line through the
logarithms. Times of steps with 1 and 8 billion parameters are extrapolated from smaller models, with equal time per parameter.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from time import process_time

import numpy as np

from benchmarks.speed.ledger_growth import ENTRIES, encoder, ledger_of, next_records
from benchmarks.speed.measurement import Figure
from benchmarks.speed.region_step import all_of, found_region, our_step, region_step
from forgetfree.continual.stream import load_stream
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.trained import WholeTensors
from forgetfree.data import demo
from forgetfree.data.sources import load_task
from forgetfree.errors import ForgetfreeError
from forgetfree.ledger.ledger import Ledger, Record
from forgetfree.ledger.switch import LedgerSwitch
from forgetfree.models.loading import load_model
from forgetfree.models.location import locate
from forgetfree.training.step import plan, training_mode
from forgetfree.training.training_options import TrainingOptions

TASKS = (10, 100, 1_000, 10_000)
ROWS = (1_000, 10_000, 100_000, 1_000_000)
#: The most rows that are encoded here; a run encodes fewer of a task.
MOST_ENCODED = 100_000
MODELS = ("minilm", "smollm2")
LARGE = (1_000_000_000, 8_000_000_000)


def cpu_time(call: Callable[[], object], turns: int) -> float:
    """Return the median CPU time of a call, in seconds."""
    times = []
    for _ in range(turns):
        begin = process_time()
        call()
        times.append(process_time() - begin)
    return float(np.median(times))


def growth(what: str, seconds: Mapping[int, float], more: Mapping[str, float] | None = None) -> Figure:
    """Return the exponent of times by size, and the times."""
    sizes, times = np.log(list(seconds)), np.log(list(seconds.values()))
    exponent = float(np.polyfit(sizes, times, 1)[0]) if len(seconds) > 1 else float("nan")
    return Figure(
        f"{what}: exponent", exponent, seconds={f"{n:,}": each for n, each in seconds.items()} | dict(more or {})
    )


def by_tasks(turns: int) -> list[Figure]:
    """Measure a ledger of tasks with 2,000 entries each."""
    model = encoder()
    space = ParameterSpace.of(model)
    append, switch, save, load = (dict[int, float]() for _ in range(4))
    with tempfile.TemporaryDirectory() as directory:
        for tasks in TASKS:
            ledger, file = ledger_of(space, tasks, ENTRIES), Path(directory) / f"{tasks}.safetensors"
            save[tasks] = cpu_time(partial(ledger.save, file), 1)
            load[tasks] = cpu_time(partial(Ledger.load, file), 1)
            switches = LedgerSwitch(ledger, model, check=False)
            switches.to(7)
            switch[tasks] = cpu_time(partial(_to_the_next_and_back, switches), turns)
            switches.to(0)
            records = next_records(ledger, turns)
            append[tasks] = cpu_time(partial(_append_next, ledger, records), turns)
    return [
        growth("T, append a task to a ledger", append),
        growth("T, to the next task and back", switch),
        growth("T, save all tasks", save),
        growth("T, load and check all tasks", load),
    ]


def _append_next(ledger: Ledger, records: Iterator[Record]) -> None:
    ledger.append(next(records))


def _to_the_next_and_back(switch: LedgerSwitch) -> None:
    switch.to(8)
    switch.to(7)


def by_parameters(turns: int) -> list[Figure]:
    """Measure a step of 8 rows; models that have not been fetched are left out."""
    whole, region = dict[int, float](), dict[int, float]()
    for name in MODELS:
        try:
            locate(name)
        except ForgetfreeError:
            continue
        stream = load_stream("qnli", data="demo", model=name, readout="linear")
        model, rows = stream.model, stream.tasks[0].train
        training_mode(model, dropout=False)
        options = TrainingOptions(optimizer="adamw", learning_rate=1e-5, schedule="constant")
        batches = [rows.batch(batch) for batch in plan(rows.lengths, options, 1, 0)]
        size = sum(each.numel() for each in model.backbone.parameters())
        for times, make in (
            (region, partial(region_step, region=found_region(model.space()), options=options)),
            (whole, partial(our_step, trained=WholeTensors(model.space().parameters(model.backbone)), options=options)),
        ):
            with ExitStack() as stack:
                step = make(stack, model)
                all_of(step, batches)
                times[size] = cpu_time(partial(all_of, step, batches), turns)
    return [
        growth(f"N, a step of {what}", times, {f"{n:,} by arithmetic": _scaled(times, n) for n in LARGE})
        for what, times in (("the whole model, fp32", whole), ("a region, s = 0.001, fp32", region))
    ]


def _scaled(seconds: Mapping[int, float], size: int) -> float:
    """Return the time at a size, in proportion to the largest measured size."""
    largest = max(seconds)
    return seconds[largest] * size / largest


def by_rows(turns: int) -> list[Figure]:
    """Measure reading and checking a CSV file, and encoding its texts."""
    texts = [(text, ("negative", "positive")[label == 1]) for text, _, label in demo.load("sst2")["train"]]
    loaded, reading, encoding = load_model("minilm", "linear"), dict[int, float](), dict[int, float]()
    with tempfile.TemporaryDirectory() as place:
        for count in ROWS:
            folder = Path(place) / f"reviews-{count}"
            folder.mkdir()
            for split, rows in (("train", count), ("test", 100)):
                made = ((f"{text} {split} {i}", label) for i, (text, label) in enumerate(islice(cycle(texts), rows)))
                with (folder / f"{split}.csv").open("w", newline="") as file:
                    csv.writer(file).writerows([("text", "label"), *made])
            read = partial(load_task, folder.name, place)
            reading[count] = cpu_time(read, turns if count < ROWS[-1] else 1)
            if count <= MOST_ENCODED:
                task = read()
                encoding[count] = cpu_time(partial(loaded.encoder(task.task), task.train), 1)
    return [growth("rows, read and check a CSV file", reading), growth("rows, encode their texts", encoding)]


def figures(turns: int = 9) -> list[Figure]:
    """Measure CPU time, which a busy machine changes least."""
    turns = min(turns, 3)
    return [*by_tasks(turns), *by_parameters(turns), *by_rows(turns)]
