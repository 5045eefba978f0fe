"""Fingerprints of weights, each computed once for a model object and what its tensors hold.

Whether they hold the same is told by what PyTorch counts: the version of a tensor, which every operation in place raises, and
its memory. A fused optimiser raises no version, so after a step of any optimiser nothing is known of the models whose tensors
it holds. Nobody counts what ``tensor.data``, NumPy and torch.distributed write: ``anew`` sees that, too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from forgetfree.core.readout_model import POOLER, body_of
from forgetfree.errors import ModelError


def body_fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of the body's weights and persistent buffers, the same with a head or a pooler and without."""
    return fingerprint_of(body_of(model), without=POOLER)


def fingerprint_of(model: nn.Module, *, without: str | None = None, anew: bool = False) -> str:
    """Return the SHA-256 over names, shapes, dtypes and bytes of all weights and persistent buffers.

    Args:
        model: any module.
        without: regular expression; tensors in whose name it is found do not count.
        anew: read the weights, even if nothing is known to have changed them since.

    Raises:
        ModelError: a tensor is quantised, sharded or offloaded, and so has no bytes of its own.
    """
    tensors = {
        name: tensor
        for name, tensor in sorted(model.state_dict(keep_vars=True).items())
        if not (without and re.search(without, name))
    }
    for name, tensor in tensors.items():
        if tensor.is_meta or is_traceable_wrapper_subclass(tensor):
            got = "is not in memory" if tensor.is_meta else f"is a {type(tensor).__name__}"
            raise ModelError(
                f"The tensor {name!r} {got}, expected a plain one: the model is quantised, sharded or offloaded. Load it whole "
                "and on one device, without quantization."
            )
    return digest_of_tensors(model, tensors, anew=anew)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        data = tensor.detach().cpu().contiguous()
        digest.update(f"{name}{tuple(data.shape)}{data.dtype}".encode())
        digest.update(data.view(-1).view(torch.uint8).numpy().data if data.numel() else b"")
    return digest.hexdigest()


# -- What is known of a model, and until when --------------------------------------------------------------


class _Known:
    """The digest of some tensors, and what PyTorch counted of them then."""

    def __init__(self, tensors: Mapping[str, Tensor], digest: str) -> None:
        self.digest, self.ids, self.marks = digest, {id(each) for each in tensors.values()}, _marks(tensors)
        # As long as these are there, no other memory has the numbers of theirs.
        self._memory = [StorageWeakRef(each.untyped_storage()) for each in tensors.values()]  # type: ignore[no-untyped-call]


#: An optimiser may step in one thread while another asks.
_LOCK = Lock()
#: Of each model, by the names of the tensors.
_KNOWN: WeakKeyDictionary[nn.Module, dict[tuple[str, ...], _Known]] = WeakKeyDictionary()


def digest_of_tensors(model: nn.Module, tensors: Mapping[str, Tensor], *, anew: bool = False) -> str:
    """Return the SHA-256 of some tensors of a model, from memory where they hold what they held.

    Args:
        model: whose tensors they are.
        tensors: by their names in the model, in order.
        anew: as in `fingerprint_of`.
    """
    key = tuple(tensors)
    with _LOCK:
        found = _KNOWN.setdefault(model, {}).get(key)
    if found is None or anew or found.marks != _marks(tensors):
        found = _Known(tensors, _digest(tensors))
        if not any(each.is_inference() for each in tensors.values()):  # which count nothing
            with _LOCK:
                _KNOWN.setdefault(model, {})[key] = found
    return found.digest


@contextmanager
def restored(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Let tensors of a model change inside, and be known again at the end, if the others are what they were.

    After an error nothing is known.

    Args:
        model: of which something is known.
        names: the tensors that the caller changes and puts back, where they lie.
    """
    with _LOCK:
        of_model = _KNOWN.setdefault(model, {})
    before = _marks_by_name(model)
    held = {key: each for key, each in of_model.items() if each.marks == [before.get(name) for name in key]}
    yield
    if _KNOWN.get(model) is not of_model:  # an optimiser has stepped it
        return
    tensors, after = model.state_dict(keep_vars=True), _marks_by_name(model)
    same = {name for name in before if before[name] == after.get(name)}
    same |= {name for name in names if name in before and before[name][1:] == after.get(name, ())[1:]}
    with _LOCK:
        for key, each in held.items():
            if same >= set(key):
                of_model[key] = _Known({name: tensors[name] for name in key}, each.digest)


def _marks_by_name(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    tensors = model.state_dict(keep_vars=True)
    return dict(zip(tensors, _marks(tensors), strict=True))


def _marks(tensors: Mapping[str, Tensor]) -> list[tuple[Any, ...]]:
    """Return of each tensor its version, and after it where and how it lies in memory."""
    return [
        (
            0 if each.is_inference() else each._version,
            each.untyped_storage()._cdata,
            each.data_ptr(),
            each.shape,
            each.stride(),
            each.dtype,
        )
        for each in tensors.values()
    ]


def _forget(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Forget the models whose tensors an optimiser holds, after its step."""
    if _KNOWN:
        stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
        with _LOCK:
            for model, own in list(_KNOWN.items()):
                if any(not each.ids.isdisjoint(stepped) for each in own.values()):
                    del _KNOWN[model]


register_optimizer_step_post_hook(_forget)
