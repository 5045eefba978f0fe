"""The process of a command: threads, libraries and signals; its versions and machine, as recorded in files."""

from __future__ import annotations

import logging
import os
import platform
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from forgetfree import __version__
from forgetfree.errors import UsageError

_PACKAGES = ("torch", "transformers", "datasets", "avalanche-lib", "peft", "safetensors", "numpy")


def check_precision(precisions: Iterable[str], device: str) -> None:
    """Raise ``UsageError`` for fp16 on the CPU, which is too slow to be intended."""
    if device == "cpu" and "fp16" in precisions:
        raise UsageError(
            "precision=fp16 is for GPUs; on this run's device, the CPU, it is many times slower than fp32. Set "
            "precision=bf16 or fp32, or give --device cuda."
        )


def set_threads(threads: int | None) -> None:
    """Set the number of CPU threads, if one is given."""
    import torch

    if threads:
        torch.set_num_threads(threads)


def machine_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory(device: str) -> int:
    """Return the bytes that are free on a GPU, or the memory of this machine for any other device."""
    from forgetfree.device import device_type

    if device_type(device) != "cuda":
        return machine_memory()
    import torch

    return torch.cuda.mem_get_info(device)[0]


def threads_of_each(processes: int) -> int:
    """Return the CPU threads of each of several processes."""
    import torch

    return max(1, torch.get_num_threads() // processes)


@contextmanager
def threads_as_before() -> Iterator[None]:
    """Restore the number of CPU threads after the block."""
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def caller_untouched() -> Iterator[None]:
    """Run the block with the settings of a fresh process, and restore the caller's generators and torch settings afterwards."""
    import random

    import numpy as np
    import torch

    dtype, python, arrays = torch.get_default_dtype(), random.getstate(), np.random.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    cpu = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with torch.random.fork_rng(gpus), torch.inference_mode(False), torch.enable_grad(), cpu:
        try:
            torch.set_default_dtype(torch.float32)
            yield
        finally:
            torch.set_default_dtype(dtype)
            random.setstate(python)
            np.random.set_state(arrays)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def quiet_libraries() -> None:
    """Silence third-party warnings and bars, which would break up the progress display; errors still come through."""
    for library in ("huggingface_hub", "datasets", "matplotlib"):
        logging.getLogger(library).setLevel(logging.ERROR)
    # Messages from torchao, which peft imports if installed, and from bitsandbytes. Torch resets levels on import.
    for module in ("torch.utils._pytree", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(module).addFilter(_is_error)
    warnings.filterwarnings(
        "ignore", module=r"(avalanche|torch|torchvision|transformers|datasets|GPUtil|qpsolvers)(\..*)?$"
    )
    # Warnings from torch's C++ code are attributed to the calling module, which may be ours.
    warnings.filterwarnings("ignore", message=r"(?s).*Triggered internally at")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def circumstances(device: str) -> dict[str, Any]:
    """Return the versions and the machine that the bits of a unit's results may depend on."""
    from forgetfree.device import device_type

    about = environment(device)
    machine = {key: value for key, value in about["machine"].items() if key != "system"}
    return {"versions": about["versions"], "machine": machine | {"device": device_type(device)}}


def environment(device: str) -> dict[str, Any]:
    """Return versions, code, machine and command for config.json and outcome.json."""
    import torch

    from forgetfree.device import processor_of

    return {
        "versions": versions(),
        "code": code(),
        "machine": {
            "device": device,
            "system": platform.platform(),
            "threads": torch.get_num_threads(),
            "processor": processor_of(device),
        },
        "command": " ".join(["forgetfree", *sys.argv[1:]]),
    }


@cache
def code() -> str | None:
    """Return the commit of this code, with ``-dirty`` if files differ from it; ``None`` outside a git checkout."""

    def git(*words: str) -> str:
        here = str(Path(__file__).parent)
        return subprocess.run(
            ["git", "-C", here, *words], capture_output=True, text=True, timeout=10, check=True
        ).stdout

    try:
        git("ls-files", "--error-unmatch", "environment.py")
        return git("describe", "--always", "--abbrev=40", "--dirty").strip()
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    """Return versions of forgetfree, Python and the installed packages; grafting needs no Avalanche or datasets."""
    numbers = {package: _version(package) for package in _PACKAGES}
    here = {package: number for package, number in numbers.items() if number is not None}
    return {"forgetfree": __version__, "python": platform.python_version(), **here}


@cache
def _version(package: str) -> str | None:
    """Return the version of a package, ``None`` if it is not installed; cached, because all its metadata are read."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


@contextmanager
def terminable() -> Iterator[None]:
    """Treat SIGTERM, which schedulers send, like Ctrl-C; only in the main thread, which alone receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
