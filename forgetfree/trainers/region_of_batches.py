"""The choice of a region inside a trainer: by the gradients of some of its batches, or by a fine-tuned model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch import distributed as dist

from forgetfree.core.linear_layers import LinearLayers
from forgetfree.core.parameters import ParameterSpace, TensorSpec
from forgetfree.core.readout_model import body_prefix
from forgetfree.core.regions import Region
from forgetfree.core.selection import Graftable, budget, choose
from forgetfree.core.trained import trainable
from forgetfree.display import brief
from forgetfree.errors import TrainingError, UnknownNameError, UsageError
from forgetfree.seeds import derive_seed

#: How γ is chosen, see `forgetfree.core.selection.saliency`.
Source = Literal["gradient", "snip", "gallop", "fisher", "random", "movement"]
#: The mean loss of a batch, with its graph.
Loss = Callable[[nn.Module, Any], Tensor]


def region_of_batches(
    model: nn.Module,
    body: nn.Module,
    graftable: Graftable,
    task: str,
    *,
    source: Source,
    sparsity: float,
    batches: Iterable[Any] | None,
    rows: int,
    loss: Loss,
    fine_tuned: Mapping[str, Tensor] | None,
    seed: int,
    taken: Region,
    frozen: Sequence[TensorSpec],
) -> Region:
    """Return γ: ``⌊sparsity · N⌋`` of the N entries of the space; the same γ in all processes of a distributed training.

    γ has no entry of ``taken`` or of ``frozen`` tensors. The other arguments are those of `learning`.
    """
    if source not in get_args(Source):
        raise UnknownNameError("region_from", source, get_args(Source))
    space = graftable.space
    if source == "movement" and isinstance(graftable, LinearLayers):
        raise UsageError(
            "region_from='movement' compares fine-tuned weights with those of the model, and a ledger of tasks beside the "
            "weights writes none. Choose by 'snip' or 'gradient', or give region=… itself."
        )
    read, tuned = list[Any](), list[Tensor]()
    if source == "movement":
        if not isinstance(fine_tuned, Mapping):
            raise UsageError(
                f"region_from='movement' needs a fine-tuned model, got fine_tuned={brief(fine_tuned)}. Give its state dict: "
                f"fine_tuned={type(model).__name__}.from_pretrained(DIRECTORY).state_dict()."
            )
        tuned = _tensors_of(model, body, space, fine_tuned)
    elif source != "random":
        if batches is None:
            raise UsageError(
                f"region_from={source!r} reads the gradients of some batches, and none are given. Give batches=…, such as "
                "trainer.get_train_dataloader(), or region=… itself."
            )
        read = _first_batches(batches, rows, by_one=source == "fisher")
    with trainable(model, []):
        model.eval()
        region = choose(
            source,
            graftable,
            budget(len(space), sparsity),
            batches=read,
            loss=_MeanLoss(model, loss),
            fine_tuned=tuned,
            taken=taken,
            frozen=[number for number, spec in enumerate(space.tensors) if spec in frozen],
            seed=derive_seed(seed, "region", task),
            processes=_several(),
        )
    return _same_in_all(region)


def _first_batches(batches: Iterable[Any], rows: int, *, by_one: bool) -> list[Any]:
    """Return the first batches, up to at least ``rows`` rows together."""
    read, seen = [], 0
    for batch in batches:
        if (count := _size_of(batch)) != 1 and by_one:
            raise UsageError(
                f"region_from='fisher' reads the gradient of each row by itself: expected batches of one row, got {count}. "
                "Give batches=… from a loader with batch_size=1."
            )
        read.append(batch)
        seen += count
        if seen >= rows:
            break
    if not seen:
        raise UsageError(
            "The batches hold no row, expected some by which to choose the region. Give others as batches=…."
        )
    return read


class _MeanLoss:
    """The mean loss over the rows of a trainer's batches, in the form that `choose` needs."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._model, self._loss = model, loss
        self._device = next(model.parameters()).device
        self.scale = 0.0  # the number of rows so far: gradients are summed over rows

    def __call__(self, batches: Sequence[Any]) -> float:
        """Return the mean loss."""
        total = self.scale = 0.0
        for batch in batches:
            count = _size_of(batch)
            loss = self._loss(self._model, _on_device(batch, self._device)) * count
            total += (value := float(loss.detach()))
            if not math.isfinite(value):
                raise TrainingError(
                    f"The loss of a batch by which the region is chosen is {value}, expected a finite one. Look for rows "
                    "without labels, or choose the region in float32."
                )
            self.scale += count
            loss.backward()  # type: ignore[no-untyped-call]
        return total / self.scale


def _tensors_of(model: nn.Module, body: nn.Module, space: ParameterSpace, state: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the tensors of θ_ft from a state dictionary, in the order and the dtype of the space."""
    prefix = body_prefix(model, body)
    tensors = []
    for spec in space.tensors:
        tensor = state.get(prefix + spec.name, state.get(spec.name))
        if tensor is None or tuple(tensor.shape) != spec.shape:
            got = "none" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise UsageError(
                f"The fine-tuned model is no fine-tuned {type(model).__name__} of this size: expected {spec.name!r} of shape "
                f"{spec.shape}, got {got}. Give the model that was fine-tuned from the same weights."
            )
        tensors.append(tensor.detach().to(space.dtype))
    return tensors


def _on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    if isinstance(batch, Mapping):
        return {key: _on_device(value, device) for key, value in batch.items()}
    return batch.to(device) if isinstance(batch, Tensor) else batch


def _size_of(batch: Any) -> int:
    """Return the number of rows of a batch: the length of its first tensor."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else [batch]
    return next((len(value) for value in values if isinstance(value, Tensor) and value.dim()), 1)


def _several() -> bool:
    """Return whether several processes train one model."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _same_in_all(region: Region) -> Region:
    """Return the first process's region in all processes."""
    if not _several():
        return region
    regions = [region]
    dist.broadcast_object_list(regions, src=0)
    return regions[0]
