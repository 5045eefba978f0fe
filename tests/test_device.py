"""``--device`` takes what torch finds here, and nothing else."""

from __future__ import annotations

import pytest
import torch

from forgetfree import device
from forgetfree.device import devices, find_device, processor_of
from forgetfree.errors import UnknownNameError, UsageError
from forgetfree.jobs.config import JobConfig


def machine(monkeypatch: pytest.MonkeyPatch, accelerator: str | None, count: int = 0) -> None:
    """As if torch found so many accelerators of a kind."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(accelerator or "cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("accelerator", "count", "found"),
    [
        (None, 0, {"auto": "cpu", "cpu": "cpu", "cpu:0": "cpu"}),
        ("cuda", 2, {"auto": "cuda", "cuda": "cuda", "cuda:0": "cuda:0", "cuda:1": "cuda:1", "cpu": "cpu"}),
        ("mps", 1, {"auto": "cpu", "mps": "mps", "mps:0": "mps:0"}),
    ],
)
def test_what_is_there_is_taken(
    accelerator: str | None, count: int, found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, accelerator, count)
    assert {name: find_device(name) for name in found} == found
    assert devices() == ["cpu", *(f"{accelerator}:{index}" for index in range(count))]


@pytest.mark.parametrize("name", ["cuda:2", "mps", "meta", "xpu:0"])
def test_what_is_not_there_is_refused_with_what_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "cuda", 2)
    expected = rf"--device {name} is asked for, and torch finds here: cpu, cuda:0, cuda:1\. Give one, or auto\."
    with pytest.raises(UsageError, match=expected):
        find_device(name)


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "cuda 1"])
def test_what_is_no_device_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "cuda", 1)
    with pytest.raises(UnknownNameError, match="Known: auto, cpu, cuda:0"):
        find_device(name)


def test_a_gpu_is_told_its_names_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "cuda", 1)
    with pytest.raises(UnknownNameError, match="torch calls a GPU cuda, cuda:1, mps or xpu"):
        find_device("gpu")


def test_a_device_is_checked_with_all_other_options(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, None)
    with pytest.raises(UsageError, match=r"--steps must be at least 1, got 0\.\n- --device cuda:1 is asked for"):
        JobConfig(steps=0, device="cuda:1").faults().report()


def test_a_cpu_that_rounds_otherwise_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    here, gelu, threads = processor_of("cpu"), torch.nn.functional.gelu, torch.get_num_threads()
    torch.set_num_threads(3)
    device._rounding.cache_clear()
    assert processor_of("cpu") == here
    assert torch.get_num_threads() == 3
    torch.set_num_threads(threads)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "gelu", lambda x: gelu(x).double().mul(1 + 1e-7).to(x.dtype))
        device._rounding.cache_clear()
        assert processor_of("cpu") != here
    device._rounding.cache_clear()
