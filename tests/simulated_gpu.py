"""A simulated GPU: its tensors report ``cuda:0``, lie in ordinary memory, and must not be mixed with those of the CPU.

``pytest --simulated-gpu tests/core`` runs tests on it: wherever the library chooses a device by ``auto``, it is ``cuda``. In
a test, ``with simulated_gpu.present():`` does the same. Computed values have the bits of the CPU.

The storage of each tensor "on the GPU" is recorded. Two of torch's modes watch: `_Words` the calls from Python that name
devices (``device=``, ``.to``, ``.cpu``, ``.device``, ``.numpy``), and `_Operations` each operation beneath, backward passes
included: its tensors must be on one device, and its results are there, too; `traffic` counts copies between the two. As on
a real GPU, a number without dimensions may be on the CPU, a tensor may be copied into one elsewhere, and indices of a tensor
on the GPU may be on the CPU.

It cannot simulate CUDA kernels and their rounding, concurrency, memory use, or the threads and processes that a test
starts.
"""

from __future__ import annotations

import unittest.mock
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda", 0)
MEMORY = 80 * 2**30
#: Copies "in" and "out", and "waits": values that the CPU reads from the GPU at once, so that it must wait for them.
traffic: Counter[str] = Counter()

# -- Which tensors are on it -----------------------------------------------------------------------------

#: Storages on the GPU by their address; another storage may reuse the address once they are freed.
_storages: dict[int, StorageWeakRef] = {}


def is_on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on the simulated GPU."""
    with torch._C.DisableTorchFunction():
        try:
            held = _storages.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # a sparse tensor has no storage of its own
            return False
    return held is not None and not held.expired()


def _put(tensor: Tensor, on_gpu: bool) -> Tensor:
    """Record the device of a tensor's storage."""
    with torch._C.DisableTorchFunction():
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return tensor
    if not on_gpu:
        _storages.pop(storage._cdata, None)
    elif not is_on_gpu(tensor):
        _storages[storage._cdata] = StorageWeakRef(storage)
        if len(_storages) % 4096 == 0:
            for key in [key for key, held in _storages.items() if held.expired()]:
                del _storages[key]
    return tensor


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


# -- Checks of operations --------------------------------------------------------------------------------

_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default, _aten.copy.default}
_READS = {_aten.index.Tensor, _aten._unsafe_index.Tensor}
_WRITES = {_aten.index_put_.default, _aten._index_put_impl_.default}
#: The backward pass of an index makes zeros for it, in C++, where no mode sees the device.
_UNSEEN = {_aten.index_put.default}


#: Operations whose result depends on values, which the CPU reads.
WAITS = {"_local_scalar_dense", "_unique2", "equal", "is_nonzero", "masked_select", "nonzero", "unique_dim"}


def waits(func: Any, args: Any) -> bool:
    """Return whether the CPU waits for an operation on the GPU."""
    name = func._schema.name.partition("::")[2]
    if name in WAITS:
        return True
    places = args[1] if name in ("index", "index_put_", "_index_put_impl_") else ()
    return any(each is not None and each.dtype == torch.bool for each in places)


class _Operations(TorchDispatchMode):
    #: Whether a tensor is being moved, and whether an operation without input tensors makes its result on the GPU.
    is_moving = makes_there = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        places = [is_on_gpu(each) for each in tensors]
        if any(places) and waits(func, args):
            traffic["waits"] += 1
        if func is _aten.copy_.default and len(places) == 2 and places[0] != places[1]:
            _count_copy(places[0], len(args) > 2 and args[2])
        if any(places) and not all(places) and _mixes(func, args, tensors, places):
            found = ", ".join(
                f"{'cuda:0' if on else 'cpu'} {tuple(t.shape)}" for t, on in zip(tensors, places, strict=True)
            )
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {found} in {func.name()}.")
        made = func(*args, **kwargs)
        if any(places) and func is not _aten.copy_.default:
            for each in _tensors(made):
                _put(each, True)
        return made


def _mixes(func: Any, args: Any, tensors: list[Tensor], places: list[bool]) -> bool:
    """Return whether CUDA refuses an operation on tensors of both devices."""
    if func in _COPIES or func in _UNSEEN:
        return False
    if func in _READS:  # a tensor on the CPU needs its indices there, too
        return not places[0]
    if func in _WRITES:
        return not places[0] or bool(args[2].dim() and not is_on_gpu(args[2]))
    if (
        tensors[0].dim() == 0 and not places[0] and func._schema.is_mutable
    ):  # a number on the CPU cannot take the result
        return True
    return any(not on and each.dim() for each, on in zip(tensors, places, strict=True))


# -- Devices in calls from Python ------------------------------------------------------------------------


class _Words(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        read = getattr(func, "__self__", None) if getattr(func, "__name__", "") == "__get__" else None
        if read is Tensor.device and is_on_gpu(args[0]):
            return GPU
        if read is Tensor.is_cuda or read is Tensor.is_cpu:
            return is_on_gpu(args[0]) == (read is Tensor.is_cuda)
        if func is Tensor.get_device:
            return 0 if is_on_gpu(args[0]) else -1
        if func in (Tensor.numpy, Tensor.__array__) and is_on_gpu(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if func is Tensor.cpu or func is Tensor.cuda:
            return _moved(args[0], func is Tensor.cuda)
        if func is Tensor.tolist and is_on_gpu(args[0]):
            traffic["waits"] += 1
        if func is Tensor.pin_memory:
            return args[0].clone()
        if func is Tensor.to:
            return _to(*args, **kwargs)
        if (device := kwargs.get("device")) is not None and (kind := _kind(device)) in ("cuda", "cpu"):
            _Operations.makes_there, before = kind == "cuda", _Operations.makes_there
            made = func(*args, **(kwargs | {"device": "cpu"}))
            _Operations.makes_there = before
            for each in _tensors(made):
                if any(each is given for given in args):  # as_tensor returns its argument if that is a tensor
                    made = _moved(each, kind == "cuda")
                else:
                    _put(each, kind == "cuda")
            return made
        return func(*args, **kwargs)


def _kind(device: Any) -> str:
    """Return the type of a device given in any form; a number means a GPU."""
    return "cuda" if isinstance(device, int) else torch.device(device).type


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Do what ``Tensor.to`` does, in all its forms."""
    device, other = kwargs.pop("device", None), kwargs.pop("other", None)
    rest: list[Any] = []
    for each in args:
        if isinstance(each, Tensor):
            other = each
        elif isinstance(each, str | torch.device) or (isinstance(each, int) and not isinstance(each, bool)):
            device = each
        elif isinstance(each, torch.dtype):
            kwargs["dtype"] = each
        elif each is not None:
            rest.append(each)
    kwargs |= zip(("non_blocking", "copy"), rest, strict=False)
    if other is not None:
        kwargs.setdefault("dtype", other.dtype)
        on_gpu = is_on_gpu(other)
    elif device is None:
        on_gpu = is_on_gpu(tensor)
    elif _kind(device) == "meta" or tensor.is_meta:
        made = tensor.to(device="cpu" if _kind(device) == "cuda" else device, **kwargs)
        return _put(made, _kind(device) == "cuda")
    else:
        on_gpu = _kind(device) == "cuda"
    later = kwargs.pop("non_blocking", False)
    kwargs = {key: value for key, value in kwargs.items() if value is not None}
    return _moved(Tensor.to(tensor, **kwargs) if kwargs else tensor, on_gpu, later)


def _moved(tensor: Tensor, on_gpu: bool, later: bool = False) -> Tensor:
    """Return the tensor on the requested device, itself if it is there; with ``later`` nothing waits for the copy."""
    if is_on_gpu(tensor) == on_gpu or tensor.is_meta:
        return tensor
    _count_copy(on_gpu, later)
    _Operations.is_moving = True
    try:
        return _put(tensor.clone(memory_format=torch.preserve_format), on_gpu)
    finally:
        _Operations.is_moving = False


def _count_copy(on_gpu: bool, later: bool) -> None:
    traffic["in" if on_gpu else "out"] += 1
    traffic["waits"] += not on_gpu and not later


# -- A driver --------------------------------------------------------------------------------------------


class _Autocast(torch.autocast):
    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


_SILENT = "set_rng_state set_rng_state_all manual_seed manual_seed_all empty_cache synchronize"


def _driver() -> dict[Any, dict[str, Any]]:
    """Return replacements for torch's functions about devices while the GPU is present."""
    state = torch.zeros(16, dtype=torch.uint8)
    nothing = SimpleNamespace(is_capturing=lambda: False, synchronize=lambda: None)
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    on_cpu = {
        "is_autocast_enabled": lambda device="cuda": enabled("cpu" if device == "cuda" else device),
        "get_autocast_dtype": lambda device: dtype("cpu" if device == "cuda" else device),
    }
    return {
        torch: {"autocast": _Autocast, **on_cpu},
        torch.amp: {"autocast": _Autocast},
        torch.amp.autocast_mode: {"autocast": _Autocast},
        torch.accelerator: {
            "is_available": lambda: True,
            "current_accelerator": lambda *_, **__: torch.device("cuda"),
            "device_count": lambda: 1,
            "current_stream": lambda *_: nothing,
            "synchronize": lambda *_: None,
        },
        torch.cuda: {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "is_bf16_supported": lambda *_, **__: True,
            "is_current_stream_capturing": lambda: False,
            "get_device_name": lambda *_: "a simulated GPU",
            "get_device_capability": lambda *_: (9, 0),
            "mem_get_info": lambda *_: (MEMORY, MEMORY),
            "memory_reserved": lambda *_: 0,
            "Event": lambda *_, **__: SimpleNamespace(record=lambda *_: None, synchronize=lambda: None),
            "get_rng_state": lambda *_, **__: state,
            "current_stream": lambda *_: nothing,
            "get_rng_state_all": lambda: [state],
            **{name: lambda *_, **__: None for name in _SILENT.split()},
        },
        torch.optim.Optimizer: {"_accelerator_graph_capture_health_check": lambda self: None},
    }


@contextmanager
def present() -> Iterator[None]:
    """Simulate a GPU inside the block; it is ``cuda`` and ``cuda:0``."""
    import transformers.quantizers.auto  # noqa: F401  # torchao asks the driver when it is imported

    with ExitStack() as stack:
        for place, names in _driver().items():
            stack.enter_context(unittest.mock.patch.multiple(place, create=True, **names))
        stack.enter_context(_Operations())
        stack.enter_context(_Words())
        yield
