"""``--device`` accepts the devices that torch finds here, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forgetfree import device
from forgetfree.device import devices, find_device, give_device, processor_of, spread
from forgetfree.errors import UnknownNameError, UsageError
from forgetfree.jobs.config import RunConfig
from forgetfree.ledger.ledger import Ledger
from forgetfree.ledger.switch import LedgerSwitch
from forgetfree.options import build
from forgetfree.registry import strategy
from forgetfree.testing import tiny_stream


def machine(monkeypatch: pytest.MonkeyPatch, accelerator: str | None, count: int = 0) -> None:
    """Let torch find so many accelerators of a kind."""
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


@pytest.mark.parametrize("name", ["cuda:2", "mps", "meta"])
def test_what_is_not_there_is_refused_with_what_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "cuda", 2)
    expected = rf"--device {name}: torch does not find this device; it finds cpu, cuda:0, cuda:1\. Give one, or auto\."
    with pytest.raises(UsageError, match=expected):
        find_device(name)


@pytest.mark.parametrize("name", ["cuda:x", "gpu"])
def test_what_is_no_device_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "cuda", 1)
    with pytest.raises(UnknownNameError, match=r"Known: auto, cpu, cuda:0") as caught:
        find_device(name)
    assert ("torch calls a GPU cuda, cuda:1, mps or xpu" in str(caught.value)) is (name == "gpu")


def test_a_device_is_checked_with_all_other_options(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, None)
    with pytest.raises(
        UsageError, match=r"--device cuda:1: torch does not find this device(.|\n)* steps must be at least 1, got 0\."
    ):
        RunConfig(set={"steps": 0}, device="cuda:1").faults().report()


def test_a_processor_is_told_from_another_and_not_by_its_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def processor(text: str) -> str:
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
        processor_of.cache_clear()
        return processor_of("cpu")

    one = processor("model name : A\ncpu MHz : 1\n\nmodel name : A\n")
    assert processor("model name : A\ncpu MHz : 2\n") == one != processor("model name : B\ncpu MHz : 1\n")
    processor_of.cache_clear()


@pytest.mark.parametrize(
    ("name", "how"), [("grafting-continual", {"sparsity": 0.05}), ("wsn", {"capacity": 0.3}), ("replay", {})]
)
def test_a_default_device_of_the_caller_changes_nothing(name: str, how: dict[str, float], tmp_path: Path) -> None:
    def learned(where: str) -> dict[str, torch.Tensor]:
        with torch.device("cpu"):
            stream, fresh = tiny_stream(), tiny_stream()
        with torch.device(where):  # meta: no value can be computed on it
            cls = strategy(name)
            made = cls(stream=stream, device="cpu", options=build(cls.Options, {"steps": 2} | how, name))
            for experience in stream.benchmark.train_stream:
                made.train(experience)
            made.eval(stream.benchmark.test_stream)
            made.save(tmp_path)
            if made.ledger is not None:
                ledger = Ledger.load(tmp_path / "ledger.safetensors")
                LedgerSwitch(ledger, fresh.model.backbone).to_task(stream.tasks[0].name)
            return {task: torch.as_tensor(answers.logits, device="cpu") for task, answers in made.predictions.items()}

    expected, got = learned("cpu"), learned("meta")
    assert expected and all(torch.equal(expected[task], got[task]) for task in expected)


def test_each_process_takes_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "devices", lambda: ["cpu", "cuda:0", "cuda:1"])
    monkeypatch.setattr(device, "_own_number", None)
    assert [spread(name) for name in ("cuda:*", "cuda:1", "cuda", "cpu")] == [[0, 1], [], [], []]
    give_device(1)
    names = {"auto": "cuda:1", "cuda": "cuda:1", "cuda:*": "cuda:1", "cuda:0": "cuda:0", "cpu": "cpu"}
    assert {name: find_device(name) for name in names} == names
