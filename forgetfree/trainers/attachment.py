"""A region's values attached to a model as its one trainable parameter, which any trainer can train.

The values are a parameter of the model; the model's own tensors are frozen. After each optimiser step the values are written
into the tensors; each backward pass computes their gradients (`forgetfree.core.taps`). So optimisers, clipping, accumulation
and DistributedDataParallel see an ordinary parameter, and no other entry can change.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from forgetfree.core.differences import Differences
from forgetfree.core.families import embeddings_of
from forgetfree.core.linear_layers import LinearLayers, is_sharded
from forgetfree.core.parameters import ParameterSpace, values_at
from forgetfree.core.readout_model import body_prefix
from forgetfree.core.regions import Region
from forgetfree.core.taps import Hook
from forgetfree.core.trained import RegionParameters, trainable
from forgetfree.errors import TrainingError
from forgetfree.ledger.ledger import Effect

#: The name of the values among the model's parameters.
NAME = "region_values"
#: The name in a checkpoint of the task and region that its values belong to.
_OF = f"{NAME}_of"
#: With these, transformers refuses to train a model without adapters of PEFT, and TRL casts trained parameters to bfloat16.
_QUANTISED = ("is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit")
_APART = (
    "the trainer replaced the model's parameters, as FSDP, DeepSpeed's ZeRO-3 and torchao do, and a region that is written "
    "needs them whole. Train with DistributedDataParallel (accelerate's MULTI_GPU), on one device, or with a ledger of tasks "
    "beside the weights: Ledger.of_model(model, effect='beside')."
)


class AttachedRegion:
    """The values of a region in a model of a trainer, as one parameter ``(s,)``.

    Args:
        model: the model.
        body: the part of the model with the parameter space; the model itself, if it has no head.
        space: the parameter space of the body.
        region: the entries to train; their initial values are the body's.
        effect: ``beside``: the values are differences beside the weights, and start at zero.
        task: the task of the region; checkpoints record it.

    Attributes:
        region: the values.
        steps: the number of optimiser steps on them.
        passes: the number of the model's forward passes with gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        body: nn.Module,
        space: ParameterSpace,
        region: Region,
        effect: Effect = "written",
        task: str = "",
    ) -> None:
        self.region: RegionParameters | Differences
        self._touched: list[nn.Parameter] = []  # the tensors that the values are written into
        if effect == "beside":
            layers = LinearLayers(body, space)
            self.values = nn.Parameter(torch.zeros(len(region), device=layers.device))
            self.region = Differences(layers, region, self.values)
        else:
            self.region = written = RegionParameters(body, space, region, model)
            self.values, self._touched = written.values, written.touched
        self.steps = self.passes = 0
        self._model, self._body, self._is_beside = model, body, effect == "beside"
        prefix, pieces = body_prefix(model, body), list(space.split(region.indices))
        self._names = [prefix + space.tensors[number].name for number, _, _ in pieces]
        self._locals = [local for _, local, _ in pieces]
        self._space, self._region = space, region
        digest = hashlib.sha256(f"{task}\0".encode() + region.indices.numpy().tobytes()).digest()
        self._identity = torch.tensor(list(digest), dtype=torch.uint8, device="cpu")
        self._reached = torch.zeros_like(self.values, dtype=torch.bool)  # entries that have had a gradient other than 0
        self._written = -1  # the version of the values that the tensors hold
        self._refusal: TrainingError | None = None
        self._optimizer: torch.optim.Optimizer | None = None  # the last one that has made a step
        self._searched = _in_a_search()

    @contextmanager
    def attached(self, heads: Sequence[nn.Parameter] = ()) -> Iterator[None]:
        """Inside, the values and the parameters ``heads`` are the model's only trainable parameters.

        Afterwards the model's tensors hold the trained values, on the same device and in the same dtype as before.

        Raises:
            TrainingError: the trainer was refused inside, even if it continued.
        """
        model: Any = self._model
        with ExitStack() as stack:
            stack.enter_context(trainable(model, heads))
            model.register_parameter(NAME, self.values)
            stack.callback(model._parameters.pop, NAME)
            stack.callback(setattr, self.values, "has_ended", True)
            for module in dict.fromkeys((model, self._body)):
                stack.callback(module.register_forward_pre_hook(Hook(self._begin)).remove)
            if (embeddings := embeddings_of(model, "input")) is not None:
                stack.callback(embeddings.register_forward_hook(Hook(self._reach_embeddings)).remove)
            stack.callback(self.values.register_hook(Hook(self._note_gradient)).remove)  # type: ignore[no-untyped-call]
            region = self.region
            stack.enter_context(region.applied() if isinstance(region, Differences) else region.sampling())
            for mark in _QUANTISED:
                if getattr(model, mark, False):
                    stack.callback(setattr, model, mark, True)
                    setattr(model, mark, False)
            self._remember({id(each) for each in heads})
            stack.callback(self._put_back)
            frozen = {id(each) for each in self._body.parameters()} - {id(each) for each in heads} - {id(self.values)}
            stack.callback(register_optimizer_step_pre_hook(partial(self._before_step, frozen)).remove)
            # So the tensors are up to date whenever they are read; fused optimisers do not signal that they wrote.
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            stack.callback(model.register_state_dict_pre_hook(Hook(lambda *_: self._write())).remove)
            stack.callback(model.register_state_dict_post_hook(Hook(self._leave_out)).remove)
            stack.callback(model.register_load_state_dict_pre_hook(Hook(self._take_in)).remove)
            try:
                yield
            except Exception:
                # FSDP's own pass fails before `_begin`.
                if self._refusal is None and not self._is_beside and is_sharded(model):
                    self._refuse(_APART)
                raise
            if self._refusal is not None:
                raise self._refusal
            if not self._is_cast():
                self._write(always=True)

    def _note_gradient(self, gradient: Tensor) -> Tensor:
        if self._is_beside and is_sharded(
            self._model
        ):  # FSDP averages only sharded parameters, and the values are not sharded
            gradient = gradient.clone()
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        self._reached = self._reached.to(gradient.device) | (gradient != 0)
        return gradient

    @property
    def reached(self) -> dict[str, bool]:
        """Whether an entry of a tensor has had a gradient other than 0, by the tensor's name in the model."""
        parts = torch.split(self._reached.cpu(), self.sizes)
        return {name: bool(part.any()) for name, part in zip(self._names, parts, strict=True)}

    @property
    def sizes(self) -> list[int]:
        """The number of entries in each tensor that has any."""
        return [len(local) for local in self._locals]

    def trained(self) -> Tensor:
        """Return the trained values ``(s,)``: the tensors' entries in the space's dtype, or the differences."""
        if self._is_beside:
            return self.values.detach().clone()
        return self._space.gather(self._body, self._region.indices)

    def _write(self, always: bool = False) -> None:
        """Write the values into the model's tensors, if they have changed."""
        self._follow()
        if always or self.values._version != self._written:
            if not isinstance(self.region, Differences):
                self.region.write()
            self._written = self.values._version

    def _refuse(self, message: str) -> None:
        """Raise ``TrainingError``; the block ends with this error even if the trainer catches it."""
        self._refusal = self._refusal or TrainingError(f"Inside learning(…), {message}")
        raise self._refusal

    # -- Changes of the model by the trainer ----------------------------------------------------------------

    def _remember(self, heads: Collection[int]) -> None:
        """Remember the tensors of the model and their memory."""
        modules = list(self._model.modules())
        self._tensors = [
            (home, name, each, each.data, type(each))
            for home in (module._parameters for module in modules)
            for name, each in home.items()
            if each is not None and id(each) not in heads
        ]
        self._buffers = [
            (home, name, each)
            for home in (module._buffers for module in modules)
            for name, each in home.items()
            if each is not None
        ]
        self._memory = self._memory_now()

    def _memory_now(self) -> list[Any]:
        own = self.values.data_ptr() if self._is_beside else 0  # if written, the tensors count, which follow
        return [self.values.device, own, *(each.data_ptr() for each in self._touched)]

    def _follow(self) -> None:
        """Follow a model that the trainer moved; refuse it if its weights have changed."""
        if self._memory_now() == self._memory or self._is_cast():  # the next forward pass refuses a cast
            return
        if not all(torch.equal(each.data.to(data.device), data) for _, _, each, data, _ in self._tensors):
            self._refuse(
                "the trainer changed weights when it moved the model, as by model.half().float(). Load the model with the "
                "dtype wanted before Ledger.of_model, and let nothing else write into its weights."
            )
        self._tensors = [(home, name, each, each.data, kind) for home, name, each, _, kind in self._tensors]
        self._memory, self._written = self._memory_now(), -1
        self.region.renew()

    def _is_cast(self) -> bool:
        """Return whether the trainer changed the dtype of a tensor of the model."""
        return any(each.dtype != data.dtype for _, _, each, data, _ in self._tensors)

    def _put_back(self) -> None:
        """Restore the model's tensors that a trainer replaced, changed or cast."""
        if self._refusal is not None or self._is_cast():
            for home, name, tensor, data, _ in self._tensors:
                home[name], tensor.data = tensor, data
            for buffers, name, buffer in self._buffers:
                buffers[name] = buffer

    # -- Before and after a step ----------------------------------------------------------------------------

    def _before_step(self, frozen: Collection[int], optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse an optimiser that trains the model's tensors instead of the values; the hook runs for every optimiser."""
        held = [each for group in optimizer.param_groups for each in group["params"]]
        if any(each is self.values for each in held):
            if self._is_beside:  # a compiled forward pass checks nothing
                self._check()
            if self.steps and optimizer is not self._optimizer and not self._searched and _in_a_search():
                self._refuse(
                    "the second trial of a hyperparameter search would begin with the values of the first. Give each trial its "
                    "own block and ledger: Ledger.of_model(model)."
                )
            self._optimizer = optimizer
            if any(id(each) in frozen and each.grad is not None for each in held):
                self._refuse(
                    "an optimiser would change weights that the task does not own: something let them have gradients, such as "
                    "requires_grad_(True). Leave them frozen."
                )
        elif any(getattr(each, "has_ended", False) for each in held):
            self._refuse(
                "an optimiser trains the region of an earlier task, whose block has ended: a Trainer or optimiser "
                "cannot be used for several tasks. Create it inside each block."
            )
        elif any(id(each) in frozen for each in held):
            self._refuse(
                "an optimiser holds weights of the model, which are frozen, and not the values of the region. Most often it "
                "was made before the block. Make it inside, for [p for p in model.parameters() if p.requires_grad]; a Trainer "
                "does so by itself, if optimizers= is left out."
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(each is self.values for group in optimizer.param_groups for each in group["params"]):
            self.steps += 1
            self._write(always=True)

    # -- Before a forward pass ------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if self._is_beside and torch.compiler.is_compiling():  # the rest cannot be compiled
            return
        if self._is_beside and is_sharded(
            self._model
        ):  # the ledger's fingerprint shows at the end whether they changed
            self._tensors, self._buffers = [], []
        self._check()
        self.passes += torch.is_grad_enabled()
        self._write()

    def _check(self) -> None:
        """Refuse a trainer that sharded the tensors, or changed their precision or device."""
        ddp = DistributedDataParallel._active_ddp_module
        if hasattr(self._model, "peft_config"):
            self._refuse(
                "the trainer put adapters of PEFT into the model (peft_config=). Leave them out, since the region is trained, "
                "and load the model again, which has them now."
            )
        elif torch.compiler.is_compiling():
            self._refuse(
                "the trainer compiles the model, and a compiled model does not see which entries are trained. Leave "
                "torch_compile out, or begin a ledger of tasks beside the weights: Ledger.of_model(model, effect='beside')."
            )
        elif self._is_beside and (
            self._model._parameters.get(NAME) is not self.values or hasattr(self.values, "ds_id")
        ):
            self._refuse(
                "the trainer sharded the values of the region, as FSDP does with all parameters that are not ignored. Give "
                "fully_shard(…, ignored_params={skill.values}); in a Trainer, before train(), "
                "trainer.accelerator.state.fsdp_plugin.ignored_modules = [nn.ParameterList([skill.values])]. FSDP1 and ZeRO-3 "
                "are not supported."
            )
        elif self._model._parameters.get(NAME) is not self.values or any(
            type(each) is not kind or home.get(name) is not each or each.shape != data.shape
            for home, name, each, data, kind in self._tensors
        ):
            self._refuse(_APART)
        elif self._is_cast():
            self._refuse(
                "the trainer changed the dtype of the weights, which the ledger's values belong to. Load the model with the "
                "dtype wanted (dtype=torch.bfloat16) before Ledger.of_model, or use mixed precision (bf16=True)."
            )
        elif len(devices := {each.device for each in self._touched} | {self.values.device}) > 1:
            self._refuse(
                f"the trainer spread the model over {', '.join(sorted(map(str, devices)))}. Put it on one device."
            )
        elif ddp is not None and not any(each is self.values for each in ddp._module_parameters):
            self._refuse(
                "the trainer has wrapped the model for several processes before the block (DistributedDataParallel, "
                "accelerator.prepare), and the wrapper does not average the region's gradients. Wrap it inside the block."
            )
        elif ddp is not None and self._is_reentrant() and torch.is_grad_enabled():
            self._refuse(
                "gradient checkpoints are reentrant, and DistributedDataParallel expects one gradient of the region in each "
                'backward pass. Train with gradient_checkpointing_kwargs={"use_reentrant": False}.'
            )

    def _reach_embeddings(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Let a reentrant checkpoint back-propagate: it needs an input that requires a gradient."""
        if self._is_beside and torch.compiler.is_compiling():  # compiled passes have no reentrant checkpoints
            return
        if torch.is_grad_enabled() and isinstance(output, Tensor) and not output.requires_grad and self._is_reentrant():
            output.requires_grad_(True)

    def _is_reentrant(self) -> bool:
        checkpoints = (each for each in self._body.modules() if getattr(each, "gradient_checkpointing", False))
        functions = (getattr(each, "_gradient_checkpointing_func", None) for each in checkpoints)
        return any(getattr(function, "keywords", {}).get("use_reentrant") for function in functions)

    # -- A trainer saves and loads checkpoints as a plain model --------------------------------------------

    def _leave_out(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Leave the values out of a state where the tensors hold them without rounding.

        With values beside the weights, add the identity of their task and region.
        """
        if self._is_beside:
            state[prefix + _OF] = self._identity
        elif all(each.dtype == self.values.dtype for each in self._touched):
            state.pop(prefix + NAME, None)

    def _take_in(self, module: nn.Module, state: dict[str, Any], prefix: str, *more: Any) -> None:
        """Take the values from the tensors of a state that lacks them; refuse the values of another region."""
        if self._is_beside:
            of = state.pop(prefix + _OF, None)
            if prefix + NAME in state and (of is None or not torch.equal(of.cpu(), self._identity)):
                self._refuse(
                    "a checkpoint of another task, or of another region, was loaded. Give each task its own output_dir, "
                    "and resume with the same batches or the same region=."
                )
            return
        if prefix + NAME in state or not all(prefix + name in state for name in self._names):
            return
        pairs = zip(self._names, self._locals, strict=True)
        state[prefix + NAME] = torch.cat(
            [values_at(state[prefix + name], local).to(self.values) for name, local in pairs]
        )


def _in_a_search() -> bool:
    """Return whether the caller is a trial of a hyperparameter search of transformers or of Optuna."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "hyperparameter_search" or frame.f_globals.get("__name__") == "optuna.study.study":
            return True
        frame = frame.f_back
    return False
