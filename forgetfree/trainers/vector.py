"""A region's free values as the one trainable vector of a model, which any trainer may train.

The vector is a parameter of the model, whose tensors are frozen. After each step of an optimiser, and before each forward
pass, the values are written into the tensors. In that pass each tensor hands the gradients of its entries on to the vector, in
autograd's graph. So optimisers, clipping, accumulation and DistributedDataParallel see an ordinary parameter, and no other
entry can change.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from forgetfree.core.parameters import ParameterSpace, at_least_float32, embeddings_of, values_at, write_
from forgetfree.core.readout_model import body_prefix
from forgetfree.core.regions import Region
from forgetfree.core.sampled_gradients import EntriesOfProduct, Leaves, SampledWeight, sampled
from forgetfree.core.trained import trainable
from forgetfree.display import listed
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

    Attributes:
        values: the parameter.
        steps: the number of steps that optimisers have made on it.
        passes: the number of the model's forward passes with gradients.
        reached: the numbers of the tensors whose entries have had a gradient.
    """

    def __init__(self, model: nn.Module, body: nn.Module, space: ParameterSpace, region: Region) -> None:
        self.values = nn.Parameter(space.gather(body, region.indices).to(at_least_float32(space.dtype)))
        self.steps = self.passes = 0
        self.reached: set[int] = set()
        self._model, self._body = model, body
        tensors = space.parameters(body)
        self._pieces = [(tensors[i], local) for i, local, _ in space.split(region.indices)]
        self._homes = [_home(body, space.tensors[i].name) for i, _, _ in space.split(region.indices)]
        self._dtypes = [(tensor.dtype, tensor.shape) for tensor, _ in self._pieces]
        self._names = [body_prefix(model, body) + space.tensors[i].name for i, _, _ in space.split(region.indices)]
        self._places: list[Any] = []  # where the tensors lay when leaves were made
        self._apart = False  # whether the trainer took tensors out of the model, or changed their values
        self._running = 0  # passes of the model and its body that have begun and not ended
        self._missed: set[int] = set()  # of those with a gradient in plain training that did not reach their entries
        self._watches: list[Any] = []  # hooks of the first pass
        self._optimizer: torch.optim.Optimizer | None = None  # the last one that has made a step
        self._searched = _in_a_search()

    @contextmanager
    def attached(self, heads: Sequence[nn.Parameter] = ()) -> Iterator[None]:
        """Let the model have this vector as its trainable parameter inside, with the parameters ``heads``, and no other.

        Afterwards the model's tensors hold the trained values, and lie where they lay, in the dtype that they had.
        """
        model: Any = self._model
        with ExitStack() as stack:
            stack.callback(self._put_back)
            stack.enter_context(trainable(model, heads))
            stack.enter_context(sampled(self._sampled(), hands_on=True))
            model.register_parameter(NAME, self.values)
            stack.callback(model._parameters.pop, NAME)
            stack.callback(setattr, self.values, "has_ended", True)
            for module in dict.fromkeys((model, self._body)):
                for hook in (
                    module.register_forward_pre_hook(_Hook(self._begin)),
                    module.register_forward_hook(_Hook(self._end), always_call=True),
                ):
                    stack.callback(hook.remove)
            stack.callback(self._end_first_pass)
            self._watch_first_pass()
            if (embeddings := embeddings_of(model, "input")) is not None:
                stack.callback(embeddings.register_forward_hook(_Hook(self._reach_embeddings)).remove)
            frozen = {id(tensor) for tensor in self._body.parameters()} - {id(tensor) for tensor in heads}
            stack.callback(
                register_optimizer_step_pre_hook(partial(self._before_step, frozen - {id(self.values)})).remove
            )
            # So that the tensors are as trained whenever somebody reads them; fused optimisers tell nobody that they wrote.
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            stack.callback(model.register_state_dict_pre_hook(_Hook(lambda *_: self.write())).remove)
            stack.callback(model.register_state_dict_post_hook(_Hook(self._leave_out)).remove)
            stack.callback(model.register_load_state_dict_pre_hook(_Hook(self._take_in)).remove)
            yield
            self._check_gradients()
            if not self._is_cast():
                self.write()

    @property
    def unreached(self) -> list[str]:
        """The names of the tensors of which no entry has had a gradient."""
        return [name for number, name in enumerate(self._names) if number not in self.reached]

    def write(self) -> None:
        """Write the values into the model's tensors, of which a graph may still hold earlier ones."""
        self._follow()
        with torch._C.DisableTorchFunctionSubclass():
            write_([(tensor.data, local) for tensor, local in self._pieces], self.values.data)

    def _sampled(self) -> Iterator[tuple[nn.Parameter, Tensor, Tensor, EntriesOfProduct | None]]:
        """Yield each tensor with the leaf that gets the gradients of its entries, all on the device of the values."""
        self._places = self._memory()
        modules = list(self._model.modules())
        self._whole = [
            (home, name, each, each.data)
            for home in (module._parameters for module in modules)
            for name, each in home.items()
            if each is not None and each is not self.values
        ]
        self._buffers = [
            (home, name, each)
            for home in (module._buffers for module in modules)
            for name, each in home.items()
            if each is not None
        ]
        self._pieces = [(tensor, local.to(self.values.device)) for tensor, local in self._pieces]
        pieces = [(tensor.data if tensor.dim() == 1 else None, local) for tensor, local in self._pieces]
        leaves = Leaves.apply(self.values, pieces)
        for number, ((tensor, local), leaf) in enumerate(zip(self._pieces, leaves, strict=True)):
            self._note_gradient(number, leaf)
            products = EntriesOfProduct(tensor.shape, local, self.values.dtype) if tensor.dim() == 2 else None
            yield tensor, leaf, local, products

    def _memory(self) -> list[Any]:
        """Return where the values and the tensors lie."""
        with torch._C.DisableTorchFunctionSubclass():
            return [self.values.device, *(tensor.data_ptr() for tensor, _ in self._pieces)]

    def _follow(self) -> None:
        """Make the leaves anew where the trainer moved the model.

        Raises:
            TrainingError: its weights are not what they were before.
        """
        if self._memory() == self._places or self._is_cast():  # of a cast the next pass tells
            return
        with torch._C.DisableTorchFunctionSubclass():
            if not all(torch.equal(each.data.to(data.device), data) for _, _, each, data in self._whole):
                self._apart = True
                raise TrainingError(
                    "Inside learning(…), the trainer changed weights when it moved the model, as by model.half().float(). Load "
                    "the model with the dtype wanted before Ledger.of_model, and let nothing else write into its weights."
                )
        with torch.inference_mode(False), torch.enable_grad():
            for tensor, leaf, local, products in self._sampled():
                weight: Any = tensor
                weight.leaf, weight.local, weight.entries = leaf, local, products

    def _is_cast(self) -> bool:
        """Return whether the trainer changed the dtype of a tensor of the model."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(each.dtype != data.dtype for _, _, each, data in self._whole)

    def _put_back(self) -> None:
        """Give the model the tensors back that a trainer replaced, changed or cast."""
        if self._apart or self._is_cast():
            for home, name, tensor, data in self._whole:
                home[name], tensor.data = tensor, data
            for buffers, name, buffer in self._buffers:
                buffers[name] = buffer

    # -- In the first pass: does each entry have the gradient of plain training? ---------------------------------

    def _note_gradient(self, number: int, leaf: Tensor) -> None:
        """Note the first gradient that the entries of a tensor get."""
        if number not in self.reached:

            def reached(gradient: Tensor | None) -> None:
                if gradient is not None:
                    self.reached.add(number)
                    hook.remove()

            hook: Any = leaf.register_hook(reached)  # type: ignore[no-untyped-call]

    def _watch_first_pass(self) -> None:
        """Let the tensors require gradients while a module runs, until the first step, as they do in plain training.

        A tensor that then gets one, past its entries, takes part in the model in a way that they do not see. Each module is
        watched, since checkpoints run some again by themselves.
        """
        tensors = [tensor for tensor, _ in self._pieces]
        running = 0

        def require(flag: bool) -> None:
            with torch._C.DisableTorchFunctionSubclass():
                for tensor in tensors:
                    tensor.requires_grad_(flag)

        def begin(*_: Any) -> None:
            nonlocal running
            if not self._watches:  # ended by a hook before this one
                return
            running += 1
            if running == 1 and torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
                require(True)

        def end(*_: Any) -> None:
            nonlocal running
            running -= 1
            if not running and not torch._C._are_functorch_transforms_active():
                require(False)

        def missed(number: int, gradient: Tensor | None) -> None:
            if gradient is not None and bool(values_at(gradient, self._pieces[number][1]).count_nonzero()):
                self._missed.add(number)

        require(True)
        with torch._C.DisableTorchFunctionSubclass():
            self._watches = [tensor.register_hook(partial(missed, n)) for n, tensor in enumerate(tensors)]  # type: ignore[no-untyped-call]
        require(False)
        for module in self._model.modules():
            self._watches.append(module.register_forward_pre_hook(_Hook(begin)))
            self._watches.append(module.register_forward_hook(_Hook(end), always_call=True))

    def _end_first_pass(self) -> None:
        while self._watches:
            self._watches.pop().remove()

    def _check_gradients(self) -> None:
        """Raise ``TrainingError`` for tensors whose entries did not get the gradients of plain training."""
        if names := [self._names[number] for number in sorted(self._missed)]:
            raise TrainingError(
                f"Inside learning(…), {listed(names)} would get a gradient in plain training, of which the region's entries "
                "got none or a part: the model reads such a weight as w.T, in an in-place operation, or in a kernel of its "
                "own. Leave these tensors out by graftable=…, a regular expression, of Ledger.of_model; or let the model "
                "compute F.linear(x, w) where it has x @ w.T, and h = h + b where it has h += b."
            )

    # -- Before and after a step -------------------------------------------------------------------------------

    def _before_step(self, frozen: Collection[int], optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse an optimiser that steps the model past the values; hooks of steps are called for anybody's."""
        held = [each for group in optimizer.param_groups for each in group["params"]]
        if any(each is self.values for each in held):
            self._end_first_pass()
            self._check_gradients()
            if self.steps and optimizer is not self._optimizer and not self._searched and _in_a_search():
                raise TrainingError(
                    "Inside learning(…), the second trial of a hyperparameter search would begin with the values of the first. "
                    "Give each trial a block and a ledger of its own: Ledger.of_model(model)."
                )
            self._optimizer = optimizer
            if any(id(each) in frozen and each.grad is not None for each in held):
                raise TrainingError(
                    "Inside learning(…), an optimiser would change weights that the task does not own: something let them have "
                    "gradients, such as requires_grad_(True). Leave them frozen."
                )
        elif any(getattr(each, "has_ended", False) for each in held):
            raise TrainingError(
                "Inside learning(…), an optimiser trains the region of an earlier task, whose block has ended: one Trainer, or "
                "one optimiser, serves several tasks. Make it anew inside each block."
            )
        elif any(id(each) in frozen for each in held):
            raise TrainingError(
                "Inside learning(…), an optimiser holds the model's weights, which are frozen, and not the values of the "
                "region: it was made before the block. Make it inside, for [p for p in model.parameters() if p.requires_grad]; "
                "a Trainer does so by itself, if optimizers= is left out."
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(each is self.values for group in optimizer.param_groups for each in group["params"]):
            self.steps += 1
            self.write()

    # -- Before and after a forward pass ------------------------------------------------------------------

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._running += 1
        if self._running == 1:
            with torch._C.DisableTorchFunctionSubclass():
                self._check()
            if self.reached or self._missed:
                self._end_first_pass()
                self._check_gradients()
            self.passes += torch.is_grad_enabled()
            self.write()

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._running -= 1

    def _check(self) -> None:
        """Raise ``TrainingError`` where the trainer took the tensors apart, or changed their precision or place."""
        reason = ""
        ddp = DistributedDataParallel._active_ddp_module
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
        elif ddp is not None and not any(each is self.values for each in ddp._module_parameters):
            reason = (
                "has wrapped the model for several processes before the block (DistributedDataParallel, accelerator.prepare), "
                "and the wrapper does not average the region's gradients. Wrap it inside the block."
            )
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


def _in_a_search() -> bool:
    """Return whether the caller is a trial of a hyperparameter search of transformers or of Optuna."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "hyperparameter_search" or frame.f_globals.get("__name__") == "optuna.study.study":
            return True
        frame = frame.f_back
    return False


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
