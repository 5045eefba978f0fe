"""The definition of a task that another library's trainer learns, with which all of forgetfree answers it from the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from forgetfree import registry
from forgetfree.core.families import TEXT_ENCODER, positions_of
from forgetfree.core.linear_layers import is_quantised
from forgetfree.core.readout_model import ReadoutKind
from forgetfree.core.trained import trainable
from forgetfree.data.prompts import PromptEncoder
from forgetfree.errors import LedgerError, UsageError, nearest
from forgetfree.kinds.kind import Kind
from forgetfree.ledger.binding import Binding, network_of, tokenizer_digest
from forgetfree.models.heads import head_names, own_readout, reads_alike
from forgetfree.models.loading import body_loader, usual_max_length
from forgetfree.models.model_files import check_weights
from forgetfree.tasks import TaskDefinition


@dataclass(frozen=True)
class Meaning:
    """The definition of a task, and the settings that its answers depend on.

    Attributes:
        definition: the task.
        binding: the binding of the model.
        head: from the names in the ledger of the tensors that read the task out to their names in the model.
    """

    definition: TaskDefinition
    binding: Binding
    head: Mapping[str, str]


def meaning_of(
    model: Any,
    body: nn.Module,
    bound: Binding | None,
    task: str,
    kind: str | None,
    labels: Sequence[str] | None,
    tokenizer: Any,
    settings: Mapping[str, Any],
) -> Meaning:
    """Return the `Meaning` of a task, from the arguments of `learning`; ``bound`` is the binding of the ledger, if known.

    Raises:
        UsageError: an argument does not fit the kind or the model; the message names it.
        ModelError: the tokenizer is not the model's, or the head cannot be separated from the model.
        LedgerError: the ledger's other tasks have another readout, tokenizer or length.
    """
    of_task: Kind = registry.kind(kind or "classification")
    form = kind if kind and kind in of_task.forms else next(iter(of_task.forms))
    known = of_task.settings
    if unknown := [name for name in settings if name not in known]:
        raise UsageError(
            f"learning has no argument {unknown[0]!r} for a task of kind {form!r}.{nearest(unknown[0], known)} Its settings "
            f"are {', '.join(known)}."
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UsageError(
            f"labels= and kind= need a tokenizer, which reads the texts, got tokenizer={type(tokenizer).__name__}. Give the "
            "model's own, which is saved with it: tokenizer=…."
        )
    name, settings = type(model).__name__, dict(settings)
    definition = _definition(task, form, labels, settings)
    length = settings.get("max_length", bound.max_length if bound else usual_max_length([definition]))
    if not isinstance(length, int) or length < 2:
        raise UsageError(f"max_length must be a number of tokens from 2 on, got {length!r}.")
    length = min(length, positions_of(model))
    readout: ReadoutKind = "generate" if of_task.answer == "text" else "classifier"
    check_weights(model, [], tokenizer, readout, name)
    head: dict[str, str] = {}
    if of_task.answer == "text":
        if not hasattr(model, "can_generate") or not model.can_generate():
            raise UsageError(f"kind={kind!r} needs a model that writes texts, and {name} does not. Give …ForCausalLM.")
        PromptEncoder(tokenizer, definition, length, closed=bool(model.config.is_encoder_decoder))
    else:
        readout, head = _head_of(model, definition, of_task, tokenizer)
    digest = tokenizer_digest(tokenizer, chats=readout == "generate")
    now = Binding(network_of(body), digest, readout, length, name)
    differ = []
    if bound and bound.readout != readout:
        differ = [f"by the readout {bound.readout}, and not {readout}"]
    elif bound and readout == "classifier" and bound.architecture != name:
        differ = [f"by heads of {bound.architecture}, and not of {name}"]
    elif bound:
        differ = bound.differences(now)
    if differ:
        raise LedgerError(
            f"Task {task!r} cannot join this ledger, whose tasks are read differently: {'; '.join(differ)}. "
            "Create another ledger with Ledger.of_model(model), or learn it without labels=, kind= and tokenizer=."
        )
    return Meaning(definition, bound or now, head)


def _definition(task: str, form: str, labels: Sequence[str] | None, settings: Mapping[str, Any]) -> TaskDefinition:
    """Return the definition of a task with these labels and settings."""
    fields = {"name": task, "kind": form, "labels": labels or (), "metric": registry.kind(form).metrics[0]}
    fields |= {name: value for name, value in settings.items() if name != "max_length"}
    if isinstance(stop := settings.get("stop"), str):
        fields["stop"] = [stop]
    try:
        definition = TaskDefinition.of_fields(fields)
        if faults := registry.faults_of(definition):
            raise ValueError(faults[0])
    except (ValueError, TypeError) as error:
        raise UsageError(f"Task {task!r} cannot be answered as it is described: {error}.") from error
    return definition


def _head_of(model: Any, definition: TaskDefinition, kind: Kind, tokenizer: Any) -> tuple[ReadoutKind, dict[str, str]]:
    """Return the readout of a transformers classifier, and the tensors of its head: see `Meaning`.

    Raises:
        UsageError: the model is no such classifier, or its head, separated from the body, does not compute the same bits.
    """
    name, count = type(model).__name__, len(definition.labels)
    words = kind.answer == "tags"
    if not name.endswith("ForTokenClassification" if words else "ForSequenceClassification"):
        raise UsageError(
            f"labels= of kind {definition.kind!r} are the outputs of a …For{'Token' if words else 'Sequence'}Classification, "
            f"and the model is {name}. Load it so, or say kind='generation' where it writes texts."
        )
    if model.config.num_labels != count:
        raise UsageError(
            f"labels= names {count} labels, and the head has {model.config.num_labels} outputs. Name each, or load the model "
            f"with num_labels={count}."
        )
    if body_loader(model.config, name) == TEXT_ENCODER:
        raise UsageError(
            f"The head of {name} reads the decoder, and of the type {model.config.model_type!r} the encoder alone is read. "
            "Leave labels= and tokenizer= out."
        )
    names = head_names(model)
    layers = {each.rpartition(".")[0] for each in names} & dict(model.named_modules()).keys()
    check_heads({each: model.get_submodule(each) for each in sorted(layers)})
    if (readout := own_readout(model)) is None:
        raise UsageError(f"The head of {name} is not one linear layer. Leave labels= and tokenizer= out.")
    with trainable(model, []):
        model.eval()
        alike = reads_alike(readout, model, tokenizer("What is it?", return_tensors="pt").to(model.device))
    if not alike:
        raise UsageError(
            f"The head of {name} computes something else apart from its body, so nothing but the model itself can answer by "
            "it. Leave labels= and tokenizer= out."
        )
    return ("linear" if words else "classifier"), {each.rpartition(".")[2] if words else each: each for each in names}


def check_heads(heads: Mapping[str, nn.Module]) -> None:
    """Raise ``UsageError`` if a head is quantised."""
    if packed := [name for name, head in heads.items() if is_quantised(head)]:
        raise UsageError(
            f"The head {packed[0]!r} is quantised, so it cannot be trained, and of a new model it holds random numbers. Load "
            f"the model with the head as it is: BitsAndBytesConfig(…, llm_int8_skip_modules={packed!r}), or TorchAoConfig(…, "
            f"modules_to_not_convert={packed!r})."
        )
