"""The device on which tensors are computed."""

from __future__ import annotations

import platform
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch

from forgetfree.errors import UnknownNameError, UsageError

#: The number of this process's own accelerator among several.
_own_number: int | None = None


def give_device(number: int) -> None:
    """Let this process use the accelerator with this number wherever a device is given without a number."""
    global _own_number
    _own_number = number


def devices() -> list[str]:
    """Return the devices that torch finds here, such as ``cpu``, ``cuda:0`` and ``cuda:1``."""
    names = ["cpu"]
    if torch.accelerator.is_available() and (accelerator := torch.accelerator.current_accelerator()):
        names += [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    return names


def spread(name: str) -> list[int]:
    """Return the numbers of the devices that ``cuda:*`` spreads units over; empty for the name of one device."""
    type_ = name.removesuffix(":*")
    return [] if type_ == name else [int(each.rpartition(":")[2]) for each in devices() if device_type(each) == type_]


def find_device(name: str) -> str:
    """Return the name of an available device: for ``auto``, ``cuda`` or else ``cpu``; any other name unchanged.

    If this process has its own device (`give_device`) of that type, return this device, unless ``name`` has a number.

    Raises:
        UsageError: there is no such device.
    """
    known = devices()
    if name == "auto":  # other accelerators must be named
        name = "cuda" if "cuda:0" in known else "cpu"
    if name.endswith(":*"):
        name = name.removesuffix(":*")
    if _own_number is not None and f"{name}:{_own_number}" in known:
        return f"{name}:{_own_number}"
    try:
        device = torch.device(name)
    except RuntimeError:
        hint = "torch calls a GPU cuda, cuda:1, mps or xpu." if name.lower() == "gpu" else ""
        raise UnknownNameError("--device", name, ("auto", *known), hint) from None
    if device.type == "cpu":
        return "cpu"
    if f"{device.type}:{device.index or 0}" not in known:
        raise UsageError(
            f"--device {name}: torch does not find this device; it finds {', '.join(known)}. Give one, or auto."
        )
    return name


def device_type(name: str) -> str:
    """Return the type of a device, as torch calls it: ``cuda`` for ``cuda:1``."""
    return name.partition(":")[0]


#: Fields of /proc/cpuinfo on the processor, without those on its clock or on one core; first on x86, then on ARM.
_OF_A_PROCESSOR = {
    *("vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "flags"),
    *("CPU implementer", "CPU variant", "CPU part", "Features"),
}


@cache
def processor_of(device: str) -> str:
    """Return the properties that bits and speed depend on: the GPU's name, or a digest of the processor's properties."""
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name(device)}, {torch.cuda.get_device_capability(device)}"
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
        named = dict(line.partition(":")[::2] for line in first.splitlines())
        about = [value.strip() for name, value in named.items() if name.strip() in _OF_A_PROCESSOR]
    except OSError:  # not Linux
        about = [platform.processor(), torch.backends.cpu.get_cpu_capability()]
    digest = sha256(" ".join(about).encode()).hexdigest()[:16]
    return f"{device_type(device)}, {platform.machine()}, {digest}"
