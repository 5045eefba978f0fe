"""``learning``: any trainer trains a task within its own region of a model; ``answering``: the model answers the task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from forgetfree.core.families import embeddings_of
from forgetfree.core.linear_layers import LinearLayers, full_tensor, is_quantised, is_sharded
from forgetfree.core.parameters import TensorSpec, align_, persistent_buffers
from forgetfree.core.readout_model import keeping_mode, part_named
from forgetfree.core.regions import Region
from forgetfree.core.selection import ROWS, Graftable, PlainTensors
from forgetfree.display import brief, counted, listed, tell_note
from forgetfree.errors import LedgerError, ModelError, TrainingError, UnknownNameError, UsageError, nearest
from forgetfree.kinds.networks import naming_labels
from forgetfree.ledger.binding import head_digest
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.ledger import Effect, Ledger, Record
from forgetfree.ledger.switch import LedgerSwitch, changed_buffers, check_weights, has_weights
from forgetfree.models.heads import linear_head
from forgetfree.trainers.attachment import NAME, AttachedRegion
from forgetfree.trainers.definition import Meaning, check_heads, meaning_of
from forgetfree.trainers.region_of_batches import Loss, Source, region_of_batches


def loss_of_model(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that the model itself computes from a batch, as transformers' models do when given labels.

    Raises:
        UsageError: it computes none.
    """
    remedy = (
        "Give batches as the trainer's own loader makes them (trainer.get_train_dataloader()); and where the trainer computes "
        "the loss, loss=lambda model, batch: trainer.compute_loss(model, batch)."
    )
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"The batches give no loss: expected dictionaries with labels, got {type(batch).__name__}. {remedy}"
        )
    try:
        output = model(**batch)
    except (TypeError, LookupError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise UsageError(
            f"{type(model).__name__} computes no loss from the batches: it fails at {', '.join(map(str, batch))} "
            f"({brief(str(error), 200)}). {remedy}"
        ) from error
    if not isinstance(loss := getattr(output, "loss", None), Tensor):
        raise UsageError(
            "The batches give no loss: expected labels, from which model(**batch) computes it, got "
            f"{', '.join(map(str, batch))}. {remedy}"
        )
    return loss


@dataclass(frozen=True)
class Skill:
    """The parameters that a task trains: inside `learning`, the model has no other trainable parameters.

    Attributes:
        task: its name.
        region: γ, as it was chosen.
        free: γ without the entries that the tasks below own: the parent and its own parents.
        values: the parameter ``(s,)`` of the free entries.
        heads: the names of the modules that are trained whole.
    """

    task: str
    region: Region = field(repr=False)
    free: Region = field(repr=False)
    values: nn.Parameter = field(repr=False)
    heads: tuple[str, ...]


@contextmanager
def learning(
    model: nn.Module,
    ledger: Ledger,
    task: str,
    *,
    batches: Iterable[Any] | None = None,
    sparsity: float = 1e-3,
    region_from: Source = "snip",
    region: Region | None = None,
    fine_tuned: Mapping[str, Tensor] | None = None,
    loss: Loss = loss_of_model,
    rows: int = ROWS,
    among: Literal["all", "free"] = "free",
    parent: str | None = None,
    heads: Sequence[str] | None = None,
    seed: int = 0,
    labels: Sequence[str] | None = None,
    kind: str | None = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    metric: str | None = None,
    instruction: str | None = None,
    template: str | None = None,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    closed_answers: Sequence[str] | None = None,
) -> Iterator[Skill]:
    """Let any trainer train a task inside, within its region alone; at the end the ledger has the task, and the model θ_pre.

    Step (2) of GraftingContinual (paper, §5.2 and C.3) for other trainers: transformers' `Trainer`, TRL's, Lightning,
    accelerate, or a custom loop. If the ledger keeps tasks beside the weights, differences are trained.

    >>> ledger = Ledger.of_model(model)  # doctest: +SKIP
    >>> with learning(model, ledger, "billing", batches=loader):  # doctest: +SKIP
    ...     SFTTrainer(model=model, args=args, train_dataset=rows).train()

    Args:
        model: a transformers model or any module, which holds θ_pre, the ledger's weights.
        ledger: gets the task.
        task: its name.
        batches: batches whose gradients choose γ, such as ``trainer.get_train_dataloader()``.
        sparsity: the maximum size of γ, as a share of the graftable entries; the paper: 1e-4.
        region_from: ``snip`` |g·θ| (default), ``gradient`` |g|, ``gallop`` |g|/(|θ| + 0.001), or ``fisher``, all at the weights
            that the task stands on; ``movement``: the distance of θ_ft from them; or ``random``. See
            `forgetfree.core.selection.saliency`.
        region: γ itself, in place of a choice.
        fine_tuned: for ``movement``, the state dict of the fine-tuned model.
        loss: maps ``(model, batch)`` to the mean loss over the batch's rows; default: ``model(**batch).loss``.
        rows: the minimum number of rows read to choose γ; batches are read whole. The sum of the gradients of several batches
            takes 4 bytes per entry.
        among: the entries among which γ is chosen. ``free``: the entries that no task below owns, because tasks of one kind
            have their largest gradients at the same entries; ``all``: all entries, of which only the free ones are trained, as
            in the paper (C.3).
        parent: the earlier task that this one stands on: it is trained on top of the parent's weights. If each task stands on
            the one before it, ``ledger.last``, tasks are answered with unions (C.3). ``None``: it stands on θ_pre.
        heads: names of modules that the task trains whole and stores in the ledger, such as ``["score"]``. Default: all
            modules outside of the model's body that are not frozen, except for an LM head.
        seed: seed of ``region_from="random"``.
        labels: the names of the head's outputs, in order. With ``tokenizer``, all of forgetfree can answer the task from the
            ledger; for a model that writes texts, with ``kind`` and ``tokenizer``. Default: only `answering` can.
        kind: ``generation``, ``messages`` (chats), ``pair`` (of texts) or ``tagging``; default: ``classification``, of a text.
        tokenizer: the model's tokenizer.
        max_length: the maximum number of tokens per row. Default: the usual one of the kind.
        metric: the metric that scores answers. Default: the kind's first.
        instruction: for text answers; this and the following as in `forgetfree.tasks.TaskDefinition`.
        template: for text answers: the template around the prompt.
        max_new_tokens: for text answers: the maximum number of tokens to write.
        stop: for text answers: texts that end an answer, in addition to the end token.
        closed_answers: for text answers: the possible answers; the model gives the likeliest.

    Raises:
        TaskError: the ledger has the task, or does not have the parent.
        LedgerError: the model is not the ledger's, or does not hold θ_pre; or the ledger's other tasks have another readout.
        UsageError: the arguments cannot be used for training, or leave no entry free; nothing has changed.
        TrainingError: the task has learned nothing; the loss is not finite; or the trainer trains something else than the
            region, or shards the model. The ledger is unchanged, and the model holds θ_pre.
    """
    ledger.check_new(task)
    body = check_model(model, ledger, anew=True)
    graftable = LinearLayers(body, ledger.space) if ledger.effect == "beside" else PlainTensors(body, ledger.space)
    frozen = _frozen(graftable)
    named = _heads(model, body, heads)
    settings = {
        "max_length": max_length,
        "metric": metric,
        "instruction": instruction,
        "template": template,
        "max_new_tokens": max_new_tokens,
        "stop": stop,
        "closed_answers": closed_answers,
    }
    meaning = _meaning(
        model, body, ledger, task, named, kind=kind, labels=labels, tokenizer=tokenizer, settings=settings
    )
    if not isinstance(rows, int) or rows < 1:
        raise UsageError(f"rows must be a whole number of at least 1, got {brief(rows)}. Leave it out for {ROWS}.")
    if among not in ("all", "free"):
        raise UnknownNameError("among", among, ("all", "free"))
    if ledger.composition == "selection":
        raise UsageError(
            "The tasks of this ledger are selections, which share the values of earlier ones, so no other task can join them. "
            "Create another ledger with Ledger.of_model(model)."
        )
    switch = LedgerSwitch(ledger, body, check=False)
    stage = ledger.stage(parent := parent or "")
    if region is None:
        try:
            switch.to(stage)
            region = region_of_batches(
                model,
                body,
                graftable,
                task,
                source=region_from,
                sparsity=sparsity,
                batches=batches,
                rows=rows,
                loss=loss,
                fine_tuned=fine_tuned,
                seed=seed,
                taken=ledger.taken(parent) if among == "free" else Region.empty(),
                frozen=frozen,
            )
        finally:
            switch.to(0)
    elif named_frozen := [spec.name for spec in frozen if _has_entry(region, spec)]:
        raise UsageError(
            f"region= has entries of {listed(named_frozen)}, which the model has frozen (requires_grad=False). Leave them out, "
            "or let them be trained: requires_grad_(True)."
        )
    free = _free(ledger, task, region, parent)
    own = [f"{name}.{key}" for name, head in named.items() for key in head.state_dict()]
    kept = meaning.head if meaning else {name: name for name in own}
    before = _state(model, {*own, *kept.values(), *persistent_buffers(model)})
    buffers = {name: buffer.clone() for name, buffer in persistent_buffers(body).items()}
    try:
        with ExitStack() as stack:
            stack.enter_context(keeping_mode(model))
            stack.callback(switch.to, 0)
            stack.enter_context(switch.learning(free, parent=parent, check=False))
            attached = AttachedRegion(model, body, ledger.space, free, ledger.effect, task)
            start = attached.trained()
            with attached.attached([each for head in named.values() for each in head.parameters()]):
                yield Skill(task, region, free, attached.values, tuple(named))
            changed = {name: buffer.clone() for name, buffer in changed_buffers(body, buffers).items()}
            state = _state(model, {*own, *kept.values()})
            values = attached.trained()
    finally:
        _load(model, before)
    if not has_weights(ledger, body, anew=True):
        raise LedgerError(
            f"The trainer changed weights that task {task!r} does not own, so the model no longer holds θ_pre and the task was "
            "not recorded. Load the model again, and let nothing else write into its weights inside learning(…); a checkpoint "
            "must be of the same region."
        )
    moved = _moved(attached, start, values)
    if not bool(moved.any()):
        weights = {f"{name}.{key}" for name, head in named.items() for key, _ in head.named_parameters()}
        _check_learned(task, attached, any(not torch.equal(state[name], before[name]) for name in weights))
    elif unreached := [name for name, reached in attached.reached.items() if not reached]:
        tell_note(f"task {task!r}: no row reached {listed(unreached)}, so nothing was learned there.")
    owned = Graft(Region(free.indices[moved]), values.cpu()[moved])
    gamma, share = region - Region(free.indices[~moved]), len(region) / len(ledger.space)
    readout, definition = {name: state[there] for name, there in kept.items()}, meaning.definition if meaning else None
    ledger.append(Record(task, gamma, owned, share, readout, changed, definition, parent=parent))
    ledger.binding = meaning.binding if meaning else ledger.binding
    ledger.head = ledger.head or head_digest(model)


def _meaning(
    model: nn.Module,
    body: nn.Module,
    ledger: Ledger,
    task: str,
    heads: Mapping[str, nn.Module],
    *,
    kind: str | None,
    labels: Sequence[str] | None,
    tokenizer: Any,
    settings: Mapping[str, Any],
) -> Meaning | None:
    """Return how all of forgetfree answers a task from its ledger; ``None`` without labels, kind, tokenizer and settings."""
    given = {name: value for name, value in settings.items() if value is not None}
    if labels is None and kind is None and tokenizer is None and not given:
        return None
    meaning = meaning_of(model, body, ledger.binding, task, kind, labels, tokenizer, given)
    if heads and meaning.binding.readout == "generate":
        raise UsageError(f"Texts are written by the model's own head, got heads={list(heads)}. Leave heads= out.")
    return meaning


def _free(ledger: Ledger, task: str, region: Region, parent: str) -> Region:
    """Return the free entries of γ; raise ``UsageError`` if there are none."""
    free = ledger.free(region, parent)
    if len(free):
        return free
    reason = (
        f"{parent!r} and the tasks below it own its whole region. Start it from θ_pre (parent=None), or create a ledger "
        "with a smaller sparsity"
        if parent
        else "its region is empty. Give batches whose loss depends on the graftable entries, or some entries as region=…"
    )
    raise UsageError(f"No entry is free for task {task!r}: {reason}.")


def _moved(attached: AttachedRegion, start: Tensor, values: Tensor) -> Tensor:
    """Return which free entries moved ``(s,)``; after an optimiser's steps, only those that a row reached: decay moves all."""
    moved = (values != start).cpu()
    if attached.steps:
        sizes = torch.tensor(attached.sizes, device="cpu")
        moved &= torch.tensor(list(attached.reached.values()), device="cpu").repeat_interleave(sizes)
    return moved


def _check_learned(task: str, attached: AttachedRegion, head_moved: bool) -> None:
    """Print why no entry of a task moved; raise ``TrainingError`` if its head did not move either."""
    if head_moved:
        tell_note(f"task {task!r}: its head alone was trained, and no entry of its region moved: it owns none.")
        return
    if not attached.passes and not attached.steps and attached.values.requires_grad:
        reason = (
            "the block is empty, or another model was trained in it, such as a fresh one of model_init=. Train the model that "
            "learning(…) was given"
        )
    elif not attached.values.requires_grad:
        reason = (
            "something froze the values of its region (requires_grad=False), as prepare_model_for_kbit_training does. Call it "
            "before the block"
        )
    elif not attached.steps:
        reason = (
            "no optimiser made a step on the values of its region. Make the optimiser, or the Trainer, inside the block"
        )
    elif not any(attached.reached.values()):
        reason = "the loss does not depend on its region. Compute it by the model that learning(…) was given"
    else:
        reason = (
            f"after {counted(attached.steps, 'step')} all values are unchanged: the dtype rounds smaller updates away, "
            "or the first checkpoint was loaded again. Train with a higher rate, or load the model in float32"
        )
    raise TrainingError(f"Task {task!r} has learned nothing, so it was not recorded: {reason}.")


@contextmanager
def answering(model: nn.Module, ledger: Ledger, task: str) -> Iterator[nn.Module]:
    """Let a model answer a task of the ledger inside, bit for bit as right after it was learned; afterwards it holds θ_pre.

    >>> with answering(model, ledger, "billing"):  # doctest: +SKIP
    ...     model.generate(**inputs)

    Inside, the model is in evaluation mode; afterwards each module has its former mode. If the ledger has the task's labels,
    the model's ``config`` names them, so transformers' pipelines return them.

    Args:
        model: the ledger's model.
        ledger: the ledger.
        task: one of its tasks.

    Raises:
        TaskError: the ledger does not have the task.
        LedgerError: the model is not the ledger's, or answers another task; or its weights were changed inside.
        TrainingError: an optimiser updates the model inside.
    """
    record = ledger.records[ledger.position(task)]
    check_model(model, ledger)
    readout = _placed(model, record)
    before = _state(model, readout)
    try:
        with ExitStack() as stack:
            if record.definition is not None and record.definition.labels:
                stack.enter_context(naming_labels(model.config, record.definition.labels))
            stack.enter_context(LedgerSwitch(ledger, model, check=False).task(task))
            _load(model, readout)
            yield model
    finally:
        _load(model, before)


def check_model(model: nn.Module, ledger: Ledger, *, anew: bool = False) -> nn.Module:
    """Return the part of a model that the ledger belongs to, its body or the model itself; it holds θ_pre.

    Args:
        model: the model.
        ledger: the ledger.
        anew: read the weights again, even if no change is known.

    Raises:
        ModelError: a model of this form cannot be grafted.
        LedgerError: it is another model, or does not hold θ_pre.
        UsageError: a task is being learned on it.
    """
    if NAME in model._parameters:
        raise UsageError(
            "A task is being learned on this model. End that block first; one model learns one task at a time."
        )
    check_plain(model, ledger.effect)
    check_weights(ledger, model, anew=anew)
    align_(model)
    return part_named(model, ledger.space)


def check_plain(model: nn.Module, effect: Effect = "written") -> None:
    """Raise ``ModelError``, with the remedy, for a model that is wrapped, on several devices, or cannot be written."""
    reason = ""
    if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
        reason = "it is wrapped for several devices. Give model.module, and wrap that inside the block"
    elif hasattr(model, "_orig_mod"):
        reason = "it is compiled. Give the model itself, model._orig_mod; its compiled form then has tasks beside the weights"
    elif effect == "written" and getattr(model, "_compiled_call_impl", None) is not None:
        reason = (
            "it is compiled, and its compiled code does not see which entries are trained. Give the model as it was before, or "
            "begin a ledger of tasks beside the weights: Ledger.of_model(model, effect='beside')"
        )
    elif hasattr(model, "peft_config"):
        reason = "it carries adapters of PEFT. Give merge_and_unload() of it, or the model without them"
    elif len(devices := {str(each.device) for each in model.parameters()}) > 1 or "meta" in devices:
        reason = f"it lies on {', '.join(sorted(devices))}. Put it on one device: load it without device_map"
    elif effect == "written" and (is_quantised(model) or is_sharded(model)):
        reason = (
            "its weights are quantised or sharded, so nothing can be written into them. Begin a ledger of tasks beside them: "
            "Ledger.of_model(model, effect='beside')"
        )
    if reason:
        raise ModelError(f"This {type(model).__name__} cannot be grafted: {reason}.")


def _frozen(graftable: Graftable) -> list[TensorSpec]:
    """Return the tensors of a space that are frozen in the model, so that no task owns them; none if all are frozen."""
    tensors = graftable.space.tensors
    frozen = [spec for number, spec in enumerate(tensors) if graftable.is_frozen(number)]
    if len(frozen) < len(tensors):
        return frozen
    tell_note("all graftable tensors of the model are frozen (requires_grad=False), so any of them may be trained.")
    return []


def _has_entry(region: Region, spec: TensorSpec) -> bool:
    """Return whether a region has an entry of a tensor."""
    first, end = torch.searchsorted(
        region.indices, torch.tensor([spec.offset, spec.offset + spec.size], device="cpu")
    ).tolist()
    return bool(first < end)


def _heads(model: nn.Module, body: nn.Module, names: Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the modules with these names; default: those outside of the body that are not frozen, except for an LM head."""
    output = embeddings_of(model, "output")
    inside = {id(each) for each in body.parameters()} | {id(each) for each in (output.parameters() if output else ())}
    outside = {
        name: child
        for name, child in model.named_children()
        if child is not body and any(id(each) not in inside for each in child.parameters())
    }
    if names is None and not (model is body or output is not None):
        check_heads(outside)
        trained = any(each.requires_grad for each in model.parameters())
        heads = {
            name: head
            for name, head in outside.items()
            if any(each.requires_grad for each in head.parameters()) or not trained
        }
        return heads
    if names is None:
        return {}
    modules = dict(model.named_modules())
    graftable = {id(each) for name, each in body.named_parameters()}
    for name in names:
        known = name in modules and name != ""
        if not known or (any(id(each) in graftable for each in modules[name].parameters()) and "pooler" not in name):
            raise UsageError(
                f"heads names {name!r}, expected modules outside of the body: {', '.join(outside) or 'none'}."
                f"{nearest(name, outside)} Of the body, a task trains its region."
            )
    heads = {name: modules[name] for name in names}
    check_heads(heads)
    return heads


def _placed(model: nn.Module, record: Record) -> dict[str, Tensor]:
    """Return the readout tensors of a task, by their names in the model.

    Raises:
        LedgerError: the model has no place for it.
    """
    readout, own = dict(record.own_readout), model.state_dict()
    if "weight" in readout:  # of words, or of a run
        if (found := linear_head(model)) is None:
            raise LedgerError(
                f"Task {record.task!r} has its own linear layer, and this {type(model).__name__} has no head that could be "
                "replaced by it. Predict with forgetfree.TaskSwitch(ledger, model)."
            )
        readout = {f"{found[0]}.{name}": tensor for name, tensor in readout.items()}
    for name, tensor in readout.items():
        if name not in own:
            raise LedgerError(
                f"The task was learned with the head {name.rpartition('.')[0]!r}, which this {type(model).__name__} lacks. "
                "Load the model with the head that the task was learned with."
            )
        if own[name].shape != tensor.shape:
            raise LedgerError(
                f"Task {record.task!r} was learned with a head of another size: expected {name!r} of shape "
                f"{tuple(tensor.shape)}, got {tuple(own[name].shape)}. Load the model with num_labels={len(tensor)}."
            )
    return readout


def _state(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return copies of tensors of a model, on the CPU; sharded tensors are gathered."""
    own: dict[str, Any] = model.state_dict()
    return {name: full_tensor(own[name]).cpu().clone() for name in sorted(names)}  # in one order in all processes


@torch.no_grad()
def _load(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors with these names into a model."""
    own: dict[str, Any] = model.state_dict()
    for name, tensor in tensors.items():
        there = own[name]
        if hasattr(there, "full_tensor"):
            from torch.distributed.tensor import distribute_tensor

            # Each process has the whole tensor and takes its shard.
            where = there.device_mesh, there.placements
            tensor = distribute_tensor(tensor.to(there.device), *where, src_data_rank=None)
        there.copy_(tensor)
