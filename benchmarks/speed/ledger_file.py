"""The size of a ledger's file, over the entropy of uniform regions and 32-bit values.

python -m forgetfree.benchmarks.speed ledger_file

The bound of one task is log2 C(N, s) bits for which s of N entries it owns, as if every choice were as likely as any other, and
32 bits for each value. The file holds all that it needs besides: the layout, names, checksums. Real regions are the entries
of minilm that fine-tuning on a task of the demo moved most; synthetic ones are random, with values of one normal distribution.
"""

from __future__ import annotations

import io
import math

import torch
from torch import Tensor

from forgetfree.benchmarks.speed.ledger_growth import ledger_of
from forgetfree.benchmarks.speed.measurement import Figure
from forgetfree.benchmarks.speed.training_loop import bare_loop
from forgetfree.continual.streams import load_stream
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region
from forgetfree.ledger import Ledger, Record
from forgetfree.ledger.graft import Graft

STEPS, TASKS = 20, 10


def bound(space: int, entries: int) -> float:
    """Return the bytes of the uniform entropy bound of one task."""
    choices = math.lgamma(space + 1) - math.lgamma(entries + 1) - math.lgamma(space - entries + 1)
    return choices / math.log(2) / 8 + 4 * entries


def ledger_of_moves(space: ParameterSpace, before: Tensor, thetas: list[Tensor], entries: int) -> Ledger:
    """Return a ledger whose tasks own the entries that they moved most."""
    ledger = Ledger(space, "f" * 64, "alone")
    for number, theta in enumerate(thetas):
        region = Region((theta - before).abs().topk(entries).indices.sort().values)
        ledger.append(Record(f"task-{number}", region, Graft(region, theta[region.indices]), entries / len(space)))
    return ledger


def moves() -> tuple[ParameterSpace, Tensor, list[Tensor]]:
    """Return minilm's space, its values, and those after fine-tuning it, again and again, from θ_pre on other batches."""
    stream = load_stream("qnli", data="demo", model="minilm", readout="linear")
    model, space = stream.model.backbone, stream.model.space()
    before, thetas = space.flatten(model), []
    for number in range(3):
        torch.manual_seed(number)
        bare_loop(stream, STEPS + 5 * number)
        thetas.append(space.flatten(model))
        space.load_(model, before)
    return space, before, thetas


def figures(turns: int = 9) -> list[Figure]:
    """Count bytes; they are the same in every turn."""
    space, before, thetas = moves()
    found = []
    for share, entries in (("1e-3", 10_646), ("1e-4", 1_064)):
        real = ledger_of_moves(space, before, thetas, entries)
        for kind, ledger in (("real", real), (f"{TASKS} random", ledger_of(space, TASKS, entries, "alone"))):
            least = sum(bound(len(space), len(record.region)) for record in ledger.records)
            what = f"{kind} regions, s = {share}"
            found.append(Figure(f"file / bound, {what}", ledger.size_in_bytes / least, at_most=0.9))
            plain = sum(_saved(record) for record in ledger.records)
            found.append(Figure(f"torch.save of indices (int32) and values / bound, {what}", plain / least))
    return found


def _saved(record: Record) -> int:
    file = io.BytesIO()
    torch.save({"index": record.owned.region.indices.int(), "value": record.owned.values.clone()}, file)
    return file.tell()
