"""Which entries a task may train: γ by the gradients of its loss at θ_pre, by what fine-tuning moved, or drawn (paper, §2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch import distributed as dist

from forgetfree.checkpoint import derive_seed
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.readout_model import body_prefix
from forgetfree.core.regions import Region
from forgetfree.core.selection import budget, mean_gradient, most_moved, most_salient, saliency
from forgetfree.core.trained import trainable
from forgetfree.display import brief
from forgetfree.errors import TrainingError, UnknownNameError, UsageError

#: How γ is chosen, see `forgetfree.core.selection.saliency`.
Source = Literal["gradient", "snip", "gallop", "random", "movement"]
#: The mean loss of a batch, with its graph.
Loss = Callable[[nn.Module, Any], Tensor]


def loss_of_model(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that the model itself computes of a batch, as transformers' models do where they get labels."""
    loss = getattr(model(**batch), "loss", None) if isinstance(batch, Mapping) else None
    if not isinstance(loss, Tensor):
        raise UsageError(
            "The batches give no loss: expected dictionaries with labels, of which model(**batch).loss is the loss. Give "
            "batches as the trainer's own loader makes them (trainer.get_train_dataloader()), or the loss as "
            "loss=function(model, batch)."
        )
    return loss


def choose_region(
    model: nn.Module,
    body: nn.Module,
    space: ParameterSpace,
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
) -> Region:
    """Return γ: ``⌊sparsity · N⌋`` of the N entries of the space; where several processes train, the same in all of them.

    It is sought among the entries that are free, because tasks of one kind have their largest gradients at the same ones.

    Args:
        model: holds θ_pre.
        body: its part that the space is of.
        space: of N entries.
        task: which a random region is drawn by, with ``seed``.
        source: by what entries are chosen.
        sparsity: the share of the entries.
        batches: for sources that read gradients.
        rows: how many rows of them are read, in whole batches.
        loss: the mean loss of a batch.
        fine_tuned: θ_ft, for ``movement``: a state dictionary, with names of the body or of the model.
        seed: of what is drawn.
        taken: entries that earlier tasks own.
    """
    if source not in get_args(Source):
        raise UnknownNameError("region_from", source, get_args(Source))
    count = budget(len(space), sparsity)
    if source == "movement":
        if not isinstance(fine_tuned, Mapping):
            raise UsageError(
                f"region_from='movement' needs a fine-tuned model, got fine_tuned={brief(fine_tuned)}. Give its state dict: "
                f"fine_tuned={type(model).__name__}.from_pretrained(DIRECTORY).state_dict()."
            )
        theta, tuned = space.flatten(body), _theta(model, body, space, fine_tuned)
        tuned[taken.indices] = theta[taken.indices]
        region = most_moved(theta, tuned, count)
    elif source == "random":
        generator = torch.Generator("cpu").manual_seed(derive_seed(seed, "region", task))
        drawn = torch.randperm(len(space), generator=generator, device="cpu")
        region = Region.of(drawn[~torch.isin(drawn, taken.indices)][:count])
    else:
        if batches is None:
            raise UsageError(
                f"region_from={source!r} reads the gradients of some batches, and none are given. Give batches=…, such as "
                "trainer.get_train_dataloader(), or region=… itself."
            )
        with trainable(model, []):
            model.eval()
            read = _Rows(model, loss, rows)
            score, _ = mean_gradient(body, space, batches, read)  # type: ignore[arg-type]
        if _several():
            counted = torch.tensor(read.scale, device=score.device)
            score *= read.scale
            dist.all_reduce(counted)
            dist.all_reduce(score)
            score /= counted
        theta = space.flatten(body)
        region = most_salient(saliency(source, score, theta, theta), count, taken)
    return _same_in_all(region)


class _Rows:
    """The mean loss over rows of a trainer's batches, see `forgetfree.core.trained.BatchLoss`.

    Args:
        model: computes it.
        loss: the mean loss of a batch.
        rows: how many are read, at least.
    """

    def __init__(self, model: nn.Module, loss: Loss, rows: int) -> None:
        self._model, self._loss, self._rows = model, loss, rows
        self._device = next(model.parameters()).device
        self.scale = 0.0  # the rows so far: gradients are those of a sum

    def __call__(self, batches: Iterable[Any]) -> float:
        """Return the mean loss."""
        total = 0.0
        for batch in batches:
            count = _size_of(batch)
            loss = self._loss(self._model, _on(batch, self._device)) * count
            total += (value := float(loss.detach()))
            if not math.isfinite(value):
                raise TrainingError(
                    f"The loss of a batch by which the region is chosen is {value}, expected a finite one. Look for rows "
                    "without labels, or choose the region in float32."
                )
            loss.backward()  # type: ignore[no-untyped-call]
            self.scale += count
            if self.scale >= self._rows:
                break
        if not self.scale:
            raise UsageError(
                "The batches hold no row, expected some by which to choose the region. Give others as batches=…."
            )
        return total / self.scale


def _theta(model: nn.Module, body: nn.Module, space: ParameterSpace, state: Mapping[str, Tensor]) -> Tensor:
    """Return θ_ft ``(N,)`` of a state dictionary."""
    prefix = body_prefix(model, body)
    pieces = []
    for spec in space.tensors:
        tensor = state.get(prefix + spec.name, state.get(spec.name))
        if tensor is None or tuple(tensor.shape) != spec.shape:
            got = "none" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise UsageError(
                f"The fine-tuned model is no fine-tuned {type(model).__name__} of this size: expected {spec.name!r} of shape "
                f"{spec.shape}, got {got}. Give the model that was fine-tuned from the same weights."
            )
        pieces.append(tensor.detach().reshape(-1))
    return torch.cat([piece.to(space.dtype) for piece in pieces]).to(next(body.parameters()).device)


def _on(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    if isinstance(batch, Mapping):
        return {key: _on(value, device) for key, value in batch.items()}
    return batch.to(device) if isinstance(batch, Tensor) else batch


def _size_of(batch: Any) -> int:
    """Return how many rows a batch has: the length of its first tensor."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else [batch]
    return next((len(value) for value in values if isinstance(value, Tensor) and value.dim()), 1)


def _several() -> bool:
    """Return whether several processes train one model."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _same_in_all(region: Region) -> Region:
    """Return the first process's region in all of them."""
    if not _several():
        return region
    regions = [region]
    dist.broadcast_object_list(regions, src=0)
    return regions[0]
