"""Fingerprints of weights, cached for a model object as long as its tensors do not change.

A change shows in the version of a tensor, which PyTorch raises at every operation in place, or in its memory. A fused
optimiser raises no version, so a step of any optimiser drops the fingerprints of the models whose tensors it holds. Writes
through ``tensor.data``, NumPy and torch.distributed are not noticed: ``anew`` reads the weights again.
"""

from __future__ import annotations

import hashlib
import json
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

from forgetfree.core.families import POOLER
from forgetfree.core.readout_model import body_of
from forgetfree.errors import ModelError
from forgetfree.tensor_file import bytes_of


def body_fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of the body's weights and persistent buffers; a head or a pooler does not change it."""
    return fingerprint_of(body_of(model), without=POOLER)


def fingerprint_of(model: nn.Module, *, without: str | None = None, anew: bool = False) -> str:
    """Return the SHA-256 over names, shapes, dtypes and bytes of all weights and persistent buffers.

    A quantised tensor counts by its codes and scales, together with the quantisation config. Sharded tensors are gathered
    one by one, in all processes at once.

    Args:
        model: any module.
        without: regular expression; tensors with a matching name do not count.
        anew: read the weights even if no change was noticed.

    Raises:
        ModelError: a tensor is offloaded, so its bytes are not in memory.
    """
    tensors = {
        name: tensor
        for name, tensor in sorted(model.state_dict(keep_vars=True).items())
        if not (without and re.search(without, name))
    }
    if elsewhere := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise ModelError(
            f"The tensor {elsewhere[0]!r} is not in memory: the model is offloaded. Load it whole and on one device."
        )
    return digest_of_tensors(model, tensors, anew=anew, settings=_quantisation(model))


def _digest(tensors: Mapping[str, Tensor], settings: str) -> str:
    digest = hashlib.sha256()
    for name, tensor in _plain(tensors, full=True):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(bytes_of(tensor))
    digest.update(settings.encode())
    return digest.hexdigest()


def _plain(tensors: Mapping[str, Any], *, full: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by name; for a tensor that consists of others, such as codes and scales, yield these.

    For a sharded tensor, yield its part in this process, or the whole tensor if ``full``.
    """
    for name, tensor in tensors.items():
        if hasattr(tensor, "full_tensor"):
            yield name, tensor.full_tensor() if full else tensor.to_local()
        elif is_traceable_wrapper_subclass(tensor):
            parts, how = tensor.__tensor_flatten__()
            yield from _plain(
                {f"{name}.{part} of {type(tensor).__name__} {how}": getattr(tensor, part) for part in parts}
            )
        else:
            yield name, tensor


def _quantisation(model: nn.Module) -> str:
    """Return the quantisation config of a model of transformers as JSON; empty if it has none."""
    config: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    content = config.to_dict() if hasattr(config, "to_dict") else config
    return json.dumps(content, sort_keys=True, default=str) if content else ""


# -- The cache of digests -----------------------------------------------------------------------------------


class _Known:
    """The digest of some tensors, with their versions and memory at that time."""

    def __init__(self, tensors: Mapping[str, Tensor], watched: Mapping[str, Tensor], digest: str) -> None:
        self.names, self.digest = tuple(tensors), digest
        self.ids, self.marks = {id(each) for each in watched.values()}, _marks(watched)
        # While these references exist, no new memory gets the same storage id.
        self._memory = [StorageWeakRef(each.untyped_storage()) for _, each in _plain(watched)]  # type: ignore[no-untyped-call]


#: An optimiser may step in one thread while another asks.
_LOCK = Lock()
#: The cached digests of each model, by the names of the tensors.
_KNOWN: WeakKeyDictionary[nn.Module, dict[tuple[str, ...], _Known]] = WeakKeyDictionary()


def digest_of_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], *, anew: bool = False, settings: str = ""
) -> str:
    """Return the SHA-256 of some tensors of a model, from the cache if they have not changed.

    Args:
        model: the owner of the tensors.
        tensors: by their names in the model, in order.
        anew: as in `fingerprint_of`.
        settings: further text to hash.
    """
    key, watched = tuple(tensors), _watched(model, tensors)
    with _LOCK:
        found = _KNOWN.setdefault(model, {}).get(key)
    if found is None or anew or found.marks != _marks(watched):
        found = _Known(tensors, watched, _digest(tensors, settings))
        if not any(each.is_inference() for each in watched.values()):  # inference tensors have no versions
            with _LOCK:
                _KNOWN.setdefault(model, {})[key] = found
    return found.digest


@contextmanager
def restored(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Keep the cached digests of a model over a block that changes some tensors and puts them back.

    They are kept if the other tensors have not changed, and not after an error.

    Args:
        model: the model with cached digests.
        names: the tensors that the caller changes and puts back, in the same memory.
    """
    with _LOCK:
        of_model = _KNOWN.setdefault(model, {})
    before = _marks(_own_tensors(model))
    known = [each for each in of_model.values() if each.marks.items() <= before.items()]
    yield
    if _KNOWN.get(model) is not of_model:  # an optimiser has stepped it
        return
    tensors, after = model.state_dict(keep_vars=True), _marks(_own_tensors(model))
    same = {name for name in before if before[name] == after.get(name)}
    same |= {name for name in names if name in before and before[name][1:] == after.get(name, ())[1:]}
    with _LOCK:
        for each in known:
            if same >= each.marks.keys():
                own = {name: tensors[name] for name in each.names}
                of_model[each.names] = _Known(own, _watched(model, own), each.digest)


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a model itself holds."""
    return dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))


def _watched(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors to watch for changes: the given ones, or all of the model's own if some are not its own.

    A state dictionary may hold tensors that were made for it, such as copies, or the scales of quantised weights.
    """
    own = _own_tensors(model)
    return dict(tensors) if all(own.get(name) is each for name, each in tensors.items()) else own


def _marks(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    """Return for each tensor its versions and its place and layout in memory, including the tensors that it consists of."""
    marks = {}
    for name, tensor in tensors.items():
        parts = [each for _, each in _plain({name: tensor})]
        versions = [0 if each.is_inference() else each._version for each in (tensor, *parts)]
        memory = [
            (each.untyped_storage()._cdata, each.data_ptr(), each.shape, each.stride(), each.dtype) for each in parts
        ]
        marks[name] = (versions, *memory)
    return marks


def _forget(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Forget the models whose tensors an optimiser holds, after its step."""
    if _KNOWN:
        stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
        with _LOCK:
            for model, own in list(_KNOWN.items()):
                if any(not each.ids.isdisjoint(stepped) for each in own.values()):
                    del _KNOWN[model]


register_optimizer_step_post_hook(_forget)
