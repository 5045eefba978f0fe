"""The simulated GPU refuses the same mixes of devices as CUDA, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import simulated_gpu
import torch
from torch import Tensor, nn

Mix = Callable[[Tensor, Tensor], object]


@pytest.fixture
def tensors() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one tensor ``(3, 3)`` on the GPU, and one on the CPU."""
    with simulated_gpu.present():
        yield torch.rand(3, 3, device="cuda"), torch.rand(3, 3)


REFUSED: dict[str, Mix] = {
    "sum": lambda gpu, cpu: gpu + cpu,
    "into a number": lambda gpu, cpu: torch.tensor(0.0).add_(gpu[0, 0]),
    "indices on the GPU": lambda gpu, cpu: cpu[(gpu > 0).nonzero()[:, 0]],
    "optimizer": lambda gpu, cpu: _step(gpu, cpu),
}


def _step(gpu: Tensor, cpu: Tensor) -> None:
    gpu.requires_grad_().grad = torch.ones(3, 3, device="cuda")
    adam = torch.optim.Adam([gpu], foreach=False)
    adam.step()
    adam.state[gpu]["exp_avg"] = cpu
    adam.step()


@pytest.mark.parametrize("mix", REFUSED)
def test_a_mix_of_devices_is_refused(mix: str, tensors: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        REFUSED[mix](*tensors)


def test_numpy_needs_a_tensor_on_the_cpu(tensors: tuple[Tensor, Tensor]) -> None:
    gpu, cpu = tensors
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        gpu.numpy()
    assert gpu.cpu().numpy().shape == cpu.numpy().shape


TAKEN: dict[str, tuple[Mix, str]] = {
    "moved": (lambda gpu, cpu: gpu + cpu.to("cuda"), "cuda"),
    "copied": (lambda gpu, cpu: cpu.copy_(gpu), "cpu"),
    "a number of the CPU": (lambda gpu, cpu: gpu * cpu.sum(), "cuda"),
    "indices on the CPU": (lambda gpu, cpu: gpu[torch.tensor([0, 2])], "cuda"),
    "made there": (lambda gpu, cpu: torch.zeros(3, device=gpu.device) + gpu, "cuda"),
    "module": (lambda gpu, cpu: nn.Linear(3, 3).to("cuda")(gpu), "cuda"),
    "gradient": (lambda gpu, cpu: torch.autograd.grad(gpu.requires_grad_()[[0, 1]].sum(), gpu)[0], "cuda"),
    "autocast": (lambda gpu, cpu: _halved(gpu), "cuda"),
}


def _halved(gpu: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        product = gpu @ gpu
    assert product.dtype == torch.bfloat16
    return product


@pytest.mark.parametrize("name", TAKEN)
def test_what_cuda_takes_is_taken(name: str, tensors: tuple[Tensor, Tensor]) -> None:
    do, device = TAKEN[name]
    made = do(*tensors)
    assert isinstance(made, Tensor) and made.device.type == device and made.is_cuda == (device == "cuda")
