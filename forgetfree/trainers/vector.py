"""A region's free values as the one trainable vector of a model, which any trainer may train.

The vector is a parameter of the model, whose tensors are frozen. After each step of an optimiser, and before each forward
pass, the values are written into the tensors. In that pass each tensor hands the gradients of its entries on to the vector, in
autograd's graph. So optimisers, clipping, accumulation and DistributedDataParallel see an ordinary parameter, and no other
entry can change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from forgetfree.core.parameters import ParameterSpace, at_least_float32, values_at, write_
from forgetfree.core.readout_model import body_prefix
from forgetfree.core.regions import Region
from forgetfree.core.sampled_gradients import EntriesOfProduct, Leaves, SampledWeight, sampled
from forgetfree.core.trained import trainable
from forgetfree.errors import TrainingError

#: The name of the vector among the model's parameters.
NAME = "region_values"


class RegionVector:
    """The values of a region in a model, as one parameter ``(s,)`` in float32 or wider.

    Args:
        model: what is trained.
        body: its part that the space is of; the model itself, if it has no head.
        space: the parameter space of the body.
        region: what is trained of it; its values are those of the body now.
    """

    def __init__(self, model: nn.Module, body: nn.Module, space: ParameterSpace, region: Region) -> None:
        self.values = nn.Parameter(space.gather(body, region.indices).to(at_least_float32(space.dtype)))
        self._model, self._body = model, body
        tensors = space.parameters(body)
        self._pieces = [(tensors[i], local) for i, local, _ in space.split(region.indices)]
        self._homes = [_home(body, space.tensors[i].name) for i, _, _ in space.split(region.indices)]
        self._dtypes = [(tensor.dtype, tensor.shape) for tensor, _ in self._pieces]
        self._names = [body_prefix(model, body) + space.tensors[i].name for i, _, _ in space.split(region.indices)]
        self._places: list[Any] = []  # where the tensors lay when leaves were made
        self._apart = False  # whether the trainer took tensors out of the model
        self._passes = 0  # of the model and its body that have begun and not ended

    @contextmanager
    def attached(self, heads: Sequence[nn.Module] = ()) -> Iterator[None]:
        """Let the model have this vector as its trainable parameter inside, with the parameters of ``heads``, and no other."""
        model: Any = self._model
        with ExitStack() as stack:
            stack.callback(self._put_back)
            stack.enter_context(trainable(model, [each for head in heads for each in head.parameters()]))
            stack.enter_context(sampled(self._sampled()))
            model.register_parameter(NAME, self.values)
            stack.callback(model._parameters.pop, NAME)
            for module in dict.fromkeys((model, self._body)):
                for hook in (
                    module.register_forward_pre_hook(_Hook(self._begin)),
                    module.register_forward_hook(_Hook(self._end), always_call=True),
                ):
                    stack.callback(hook.remove)
            embeddings = getattr(model, "get_input_embeddings", lambda: None)()
            if embeddings is not None:
                stack.callback(embeddings.register_forward_hook(_Hook(self._reach_embeddings)).remove)
            # So that the tensors are as trained whenever somebody reads them; fused optimisers tell nobody that they wrote.
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            stack.callback(model.register_state_dict_pre_hook(_Hook(lambda *_: self.write())).remove)
            stack.callback(model.register_state_dict_post_hook(_Hook(self._leave_out)).remove)
            stack.callback(model.register_load_state_dict_pre_hook(_Hook(self._take_in)).remove)
            yield

    def write(self) -> None:
        """Write the values into the model's tensors, of which a graph may still hold earlier ones."""
        self._follow()
        with torch._C.DisableTorchFunctionSubclass():
            write_([(tensor.data, local) for tensor, local in self._pieces], self.values.data)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(each is self.values for group in optimizer.param_groups for each in group["params"]):
            self.write()

    def _sampled(self) -> Iterator[tuple[nn.Parameter, Tensor, Tensor, EntriesOfProduct | None]]:
        """Yield each tensor with the leaf that gets the gradients of its entries, all on the device of the values."""
        self._places = self._memory()
        homes = [module._parameters for module in self._model.modules()]
        self._whole = [
            (home, name, each, each.data)
            for home in homes
            for name, each in home.items()
            if each is not None and each is not self.values
        ]
        self._pieces = [(tensor, local.to(self.values.device)) for tensor, local in self._pieces]
        pieces = [(tensor.data if tensor.dim() == 1 else None, local) for tensor, local in self._pieces]
        for (tensor, local), leaf in zip(self._pieces, Leaves.apply(self.values, pieces), strict=True):
            products = EntriesOfProduct(tensor.shape, local, self.values.dtype) if tensor.dim() == 2 else None
            yield tensor, leaf, local, products

    def _memory(self) -> list[Any]:
        """Return where the values and the tensors lie."""
        with torch._C.DisableTorchFunctionSubclass():
            return [self.values.device, *(tensor.data_ptr() for tensor, _ in self._pieces)]

    def _follow(self) -> None:
        """Make the leaves anew where the trainer moved the model."""
        if self._memory() != self._places:
            with torch.inference_mode(False), torch.enable_grad():
                for tensor, leaf, local, products in self._sampled():
                    weight: Any = tensor
                    weight.leaf, weight.local, weight.entries = leaf, local, products

    def _put_back(self) -> None:
        """Give the model the parameters back that a trainer replaced, which it did before they could be trained."""
        if self._apart:
            for home, name, tensor, data in self._whole:
                home[name], tensor.data = tensor, data

    # -- Before and after a forward pass ------------------------------------------------------------------

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._passes += 1
        if self._passes == 1:
            with torch._C.DisableTorchFunctionSubclass():
                self._check()
            self.write()

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._passes -= 1

    def _check(self) -> None:
        """Raise ``TrainingError`` where the trainer took the tensors apart, or changed their precision or place."""
        reason = ""
        if torch.compiler.is_compiling():
            reason = "compiles the model, and a compiled model does not see which entries are trained. Leave torch_compile out."
        elif self._model._parameters.get(NAME) is not self.values or any(
            type(tensor) is not SampledWeight or home.get(name) is not tensor or tensor.shape != shape
            for (tensor, _), (home, name), (_, shape) in zip(self._pieces, self._homes, self._dtypes, strict=True)
        ):
            self._apart = True
            reason = (
                "replaced the model's parameters, as FSDP, DeepSpeed's ZeRO-3 and torchao do, and a region needs them whole. "
                "Train with DistributedDataParallel (accelerate's MULTI_GPU), or on one device, and quantise no weights."
            )
        elif any(tensor.dtype != dtype for (tensor, _), (dtype, _) in zip(self._pieces, self._dtypes, strict=True)):
            reason = (
                "changed the dtype of the weights, which the ledger's values belong to. Load the model with the dtype wanted "
                "(dtype=torch.bfloat16) before Ledger.of_model, or use mixed precision (bf16=True)."
            )
        elif len(devices := {tensor.device for tensor, _ in self._pieces} | {self.values.device}) > 1:
            reason = f"spread the model over {', '.join(sorted(map(str, devices)))}. Put it on one device."
        if reason:
            raise TrainingError(f"Inside learning(…), the trainer {reason}")

    def _reach_embeddings(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Let a reentrant checkpoint back-propagate: it needs an input that has a gradient."""
        if torch.is_grad_enabled() and isinstance(output, Tensor) and not output.requires_grad and self._is_reentrant():
            output.requires_grad_(True)

    def _is_reentrant(self) -> bool:
        checkpoints = (each for each in self._body.modules() if getattr(each, "gradient_checkpointing", False))
        functions = (getattr(each, "_gradient_checkpointing_func", None) for each in checkpoints)
        return any(getattr(function, "keywords", {}).get("use_reentrant") for function in functions)

    # -- What a trainer saves and loads in the midst is a plain model --------------------------------------

    @property
    def _is_exact(self) -> bool:
        """Whether the tensors hold the values without rounding, so that a file of them is enough."""
        return all(dtype == self.values.dtype for dtype, _ in self._dtypes)

    def _leave_out(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if self._is_exact:
            state.pop(prefix + NAME, None)

    def _take_in(self, module: nn.Module, state: dict[str, Any], prefix: str, *more: Any) -> None:
        """Take the values from the tensors of a state that lacks them."""
        if prefix + NAME in state or not all(prefix + name in state for name in self._names):
            return
        pairs = zip(self._names, self._pieces, strict=True)
        state[prefix + NAME] = torch.cat(
            [values_at(state[prefix + name], local).to(self.values) for name, (_, local) in pairs]
        )


class _Hook:
    """A hook that copies of the model do not have: such a copy, a reference model say, stays as it was copied."""

    def __init__(self, action: Any = None) -> None:
        self._action = action

    def __call__(self, *arguments: Any) -> None:
        if self._action is not None:
            self._action(*arguments)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


def _home(body: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the dictionary that a tensor stands in, and its name there."""
    path, _, last = name.rpartition(".")
    return body.get_submodule(path)._parameters, last
