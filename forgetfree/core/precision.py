"""The precision ``auto``: bf16 if the passes of a model take clearly less time in it than in fp32, else fp32.

The times are measured once for a model, a machine and its number of threads, and kept as a file in the cache. A processor's
instructions for bf16 do not predict them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgetfree.core.readout_model import Precision, ReadoutModel, autocast
from forgetfree.device import processor_of
from forgetfree.errors import RunError
from forgetfree.files import cache_directory, write_json
from forgetfree.json_file import read_json

#: bf16 is chosen if it needs at most this share of the time of fp32, so that noise does not decide.
AT_MOST = 0.85
#: The most and the fewest timed turns, after one for warm-up; no turn beyond the fewest begins after this many seconds.
TURNS, LEAST, SECONDS = 5, 3, 1.0
#: The rows of a pass.
ROWS = 8
#: The results of this process, for the case that no file can keep them.
_measured: dict[Path, Precision] = {}


def faster_precision(model: ReadoutModel, rows: Any = None) -> Precision:
    """Return the precision ``auto`` as measured before, or measure it now.

    Args:
        model: the model, on the device where it will compute.
        rows: rows that the model can read; a language model needs none.
    """
    x = model.example(ROWS)
    if x is None:
        if rows is None:
            return "fp32"
        x = rows.batch(range(min(ROWS, len(rows))))[0]
    device = next(model.parameters()).device
    # The computation of a pass depends on these, not on the values of the weights.
    weights = [(name, str(each.dtype), *each.shape) for name, each in model.backbone.named_parameters()]
    about = {
        "hardware": processor_of(str(device)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "model": hashlib.sha256(json.dumps([type(model.backbone).__qualname__, weights]).encode()).hexdigest(),
        "input": [str(x.dtype), *x.shape],
    }
    cache = cache_directory() or Path(os.devnull)  # no file is kept there
    file = cache / "precision" / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]}.json"
    if (known := _read(file)) is None:
        seconds = _seconds(model, x.to(device))
        # The quickest turn of each; bf16 has none if the device cannot compute it.
        ratio = min(seconds["bf16"], default=math.inf) / min(seconds["fp32"], default=1.0)
        taken: Precision = "bf16" if ratio <= AT_MOST else "fp32"
        known = _measured[file] = _read(file) or taken  # another process may have been first
        with suppress(OSError):
            if all(seconds.values()):
                write_json(file, {"precision": known, "seconds": seconds, **about})
    return known


def _read(file: Path) -> Precision | None:
    """Return the precision measured before, or ``None``; a damaged file is ignored."""
    with suppress(RunError, LookupError, TypeError, OSError):
        if (precision := read_json(file, RunError, "")["precision"]) in ("fp32", "bf16"):
            return precision  # type: ignore[no-any-return]
    return _measured.get(file)


def _seconds(model: ReadoutModel, x: Tensor) -> dict[str, list[float]]:
    """Return the seconds of forward and backward passes in each precision, turn by turn."""
    seconds: dict[str, list[float]] = {"fp32": [], "bf16": []}
    # On a CPU, the time of other processes does not count; other devices run asynchronously.
    clock = time.process_time if x.device.type == "cpu" else time.perf_counter
    with suppress(Exception):  # a device without bf16, or without free memory; training reports the rest
        for turn in range(TURNS + 1):
            for precision, times in seconds.items():
                begin = clock()
                _pass(model, x, precision)
                if turn:  # the first prepares memory and kernels
                    times.append(clock() - begin)
            if turn >= LEAST and sum(map(sum, seconds.values())) > SECONDS:
                break
    return seconds


def _pass(model: ReadoutModel, x: Tensor, precision: str) -> None:
    """Compute the gradients of all weights, as fine-tuning does, and change nothing in the model."""
    training, weights = model.training, [each for each in model.backbone.parameters() if each.is_floating_point()]
    trained = [each.requires_grad for each in weights]
    model.eval()  # dropout would draw from the global generator
    for each in weights:
        each.requires_grad_(True)
    try:
        with torch.enable_grad():
            with autocast(precision, x.device.type):
                loss = model.pooled(x, -1).float().square().mean()
            torch.autograd.grad(loss, weights, allow_unused=True)
        if x.device.type != "cpu":
            torch.accelerator.synchronize(x.device)
    finally:
        torch.clear_autocast_cache()
        model.train(training)
        for each, was in zip(weights, trained, strict=True):
            each.requires_grad_(was)
