"""Writes a graft's or a run's model of a task as an ordinary Hugging Face directory with a card, usable without forgetfree."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgetfree.core.fingerprint import body_fingerprint
from forgetfree.core.readout_model import body_of, body_prefix
from forgetfree.display import escaped
from forgetfree.errors import GraftError, ModelError, UsageError
from forgetfree.files import StrPath, check_empty, new_directory, write_atomically
from forgetfree.kinds.kind import kind_of
from forgetfree.kinds.networks import READOUT, SEQUENCE_CLASSIFIER, TOKEN_CLASSIFIER, Parts, TaskNetwork
from forgetfree.ledger.graft import Graft, GraftOrigin
from forgetfree.models.loading import LoadedModel, body_loader, dtype_of, load_model, loader_of
from forgetfree.models.location import locate
from forgetfree.models.model_files import quiet, read_config, read_weights
from forgetfree.results.report.page import in_markdown
from forgetfree.results.run_folder import LEDGER
from forgetfree.serve.beside import merged, write_beside
from forgetfree.serve.inference import Predictor
from forgetfree.serve.weights import LedgerWeights
from forgetfree.tasks import TaskDefinition


@dataclass(frozen=True)
class WrittenModel:
    """The model that `apply_graft` or `export_task` wrote.

    Attributes:
        directory: the directory.
        architecture: its Hugging Face class.
        loader: the class of ``transformers`` that loads it from its directory.
        call: the call of transformers' pipeline that answers as the task's own model, with ``{}`` for the directory; empty
            if there is none.
        note: a note for the user, if there is one.
    """

    directory: Path
    architecture: str
    loader: str
    call: str = ""
    note: str = ""


def apply_graft(graft: Graft, model: str, out: StrPath) -> WrittenModel:
    """Put ``graft`` into ``model`` and write the result to ``out``: config, weights, tokenizer, model card.

    A linear readout becomes the head of a sequence classifier, so that ``pipeline("text-classification")`` gives the same
    answers; where words are labelled, the head of a token classifier, for ``pipeline("token-classification")``. If an
    architecture has no sequence classifier, the readout is written to a separate file. A model with another readout has no
    classes in its config.json, so that the pipeline fails instead of answering with a random head. A task with text answers is
    written as a language model, for ``pipeline("text-generation")``.

    Args:
        graft: the graft with its origin, as `Graft.load` returns it.
        model: the base model: ``minilm``, a directory, or a name on the hub.
        out: a directory that does not exist or is empty; it is written whole or not at all.

    Raises:
        GraftError: the graft has no origin, or belongs to another model.
        ModelError: the model cannot be loaded, or the written files differ from it.
        UsageError: ``out`` is not empty.
    """
    origin, space = graft.origin, graft.space
    if origin is None or space is None:
        raise GraftError(
            "The graft does not say for which task and model it was made, and a model cannot be written without. Give one "
            "that `forgetfree graft` or SingleTask.graft made."
        )
    check_empty(Path(out))
    bound, loaded = origin.binding, load_model(model, binding=origin.binding, dtype=dtype_of(space))
    graft.apply_(loaded.model)
    if bound.tokenizer and bound.tokenizer != loaded.tokenizer_digest:
        raise GraftError(
            f"The graft was made with another tokenizer than model {model!r} has: expected {bound.tokenizer[:12]}, got "
            f"{loaded.tokenizer_digest[:12]}. Give the model with the tokenizer that it had then."
        )
    origin = replace(origin, model=model)
    return write_model(loaded, origin, graft.readout, out)


def export_task(
    predictor: Predictor,
    task: str,
    out: StrPath,
    strategy: str = "",
    facts: Mapping[str, str] | None = None,
    *,
    merge: bool = False,
) -> WrittenModel:
    """Write the model of one task of a run to ``out``, as `apply_graft` does.

    Adapters are added to the weights, so the model answers as in the run up to rounding. A task beside the weights is written
    as its base, unchanged, with the ledger.

    Args:
        predictor: the predictor of the run, or of a ledger.
        task: a learned task.
        out: a directory that does not exist or is empty; it is written whole or not at all.
        strategy: the strategy's name, for the model card.
        facts: further entries of the card by name, such as the score.
        merge: write a task beside the weights as a plain model: quantised weights are dequantised, and the differences added;
            its answers are equal up to rounding.

    Raises:
        TaskError: the task was not learned.
        ModelError: the written files differ from the model.
        UsageError: ``out`` is not empty.
    """
    definition, loaded = predictor.definition(task), predictor.loaded
    check_empty(Path(out))
    binding = replace(loaded.binding(), network="")  # the written model has its own
    origin = GraftOrigin(definition, loaded.name, "", 0.0, binding)
    weights = predictor.weights
    if isinstance(weights, LedgerWeights) and weights.ledger.effect == "beside":
        with predictor.lock:
            if not merge:
                write_beside(loaded, weights.ledger, definition.name, Path(out))
                kind = loaded.model.architecture or type(loaded.model.backbone).__name__
                note = f"the base is as it was, and {LEDGER} is beside it; --merge writes a plain model."
                return WrittenModel(Path(out), kind, kind, note=note)
            with merged(loaded, weights.ledger, definition.name) as plain:
                dtype = f"{plain.model.backbone.dtype}".removeprefix("torch.")
                said = {"weights": f"dequantised to {dtype}, with the task's differences added: equal up to rounding"}
                return write_model(plain, origin, predictor.readout(task), out, strategy, {**(facts or {}), **said})
    if merge:
        raise UsageError("Nothing is to be merged: the task is in the weights themselves. Leave --merge out.")
    with predictor.lock, weights.merged(definition.name):
        return write_model(loaded, origin, predictor.readout(task), out, strategy, facts)


def write_model(
    loaded: LoadedModel,
    origin: GraftOrigin,
    readout: Mapping[str, Tensor],
    out: StrPath,
    strategy: str = "",
    facts: Mapping[str, str] | None = None,
) -> WrittenModel:
    """Write a model that holds a task's weights.

    Args:
        loaded: the model.
        origin: the task and its readout; a fingerprint of the base model means that it comes from a graft.
        readout: the tensors of the readout.
        out: a directory that does not exist or is empty.
        strategy: the strategy that trained it, for the model card.
        facts: further entries of the card.
    """
    import transformers
    from safetensors.torch import save_file

    # Some heads use a body without a part (BERT's pooler) that is needed to load the body alone.
    model, out = loaded.name, Path(out)
    config = read_config(locate(model), model)
    # An encoder-decoder that writes texts needs its whole body, a linear readout only a part of it.
    loader = loader_of(config, "generate", model) if loaded.writes_apart else body_loader(config, model)
    backbone: Any = loaded.model.backbone
    pre, missing = read_weights(locate(model), loader, model, backbone.dtype)
    whole, prefix = body_of(pre), body_prefix(pre)
    body = {name: tensor for name, tensor in whole.state_dict().items() if f"{prefix}{name}" not in missing}
    own = body_of(loaded.model)
    now = own.state_dict()
    moved = sum(int((tensor != now[name].cpu()).sum()) for name, tensor in body.items() if name in now)
    changed = (
        f"{moved:,} of {len(loaded.model.space()):,} parameters that training may move differ from the base model's"
    )
    command = "apply" if origin.fingerprint else "export"
    origin = replace(origin, fingerprint=origin.fingerprint or body_fingerprint(whole))
    same_kind = type(own) is type(whole)
    if same_kind:
        body |= own.state_dict()
    made = kind_of(origin.task).network(origin.task, Parts(loaded, config, body, readout, origin))
    network = made.network
    # A token classifier has no pooler; other classes keep the pooler's tensors.
    same_kind = same_kind and made.loader != TOKEN_CLASSIFIER
    rest = {f"{body_prefix(network)}{name}": tensor for name, tensor in body.items()} if same_kind else {}
    with new_directory(out) as directory:
        with quiet(transformers):
            network.save_pretrained(directory, state_dict={**rest, **network.state_dict()})
            made.tokenizer.save_pretrained(directory)
            if made.generation is not None:  # in place of the network's own
                made.generation.save_pretrained(directory)
        if made.own_readout:
            save_file(dict(readout), directory / READOUT, {"labels": json.dumps(origin.task.labels)})
        facts = {**(facts or {}), **_licence(Path(locate(model)))}
        write_atomically(directory / "README.md", model_card(origin, made, command, changed, strategy, facts))
        for file in directory.iterdir():  # else only their owner could read the weights
            file.chmod((directory / "config.json").stat().st_mode)
        _verify(directory, network)
    architecture, note = type(network).__name__, ""
    if made.own_readout:
        note = (
            f"transformers has no sequence classifier that answers as this {architecture} does with its readout and "
            f"tokenizer, so the readout is in {READOUT}."
        )
    elif network.dtype != backbone.dtype:
        note = f"the task was learned in {backbone.dtype}, and the model is written in {network.dtype}."
    return WrittenModel(out, architecture, made.loader, made.call, note)


def _verify(directory: Path, network: Any) -> None:
    """Raise ``ModelError`` unless the directory holds ``network``, bit for bit."""
    written, missing = read_weights(str(directory), type(network).__name__, str(directory), network.dtype)
    got, meant = written.state_dict(), network.state_dict()
    lacking = [name for name in missing if name in meant]  # a body may be loaded with a pooler that is not used
    wrong = lacking or [name for name, tensor in meant.items() if not torch.equal(got[name], tensor)]
    if wrong:
        raise ModelError(
            f"The exported files differ from the grafted model, first in {wrong[0]!r}. They were removed; report this with "
            "the model's name."
        )


# -- The card, README.md ----------------------------------------------------------------------------------


def _licence(base: Path) -> dict[str, str]:
    """Return the licence that the card of a base model names, by its identifier; nothing where it names none."""
    card = base / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    head = re.match(r"---\n(.*?)^---$", text, re.DOTALL | re.MULTILINE)
    named = re.search(r"^license: *([\w.-]+) *$", head[1], re.MULTILINE) if head else None
    return {"licence": named[1]} if named else {}


def model_card(
    origin: GraftOrigin,
    made: TaskNetwork,
    command: str,
    changed: str,
    strategy: str = "",
    facts: Mapping[str, str] | None = None,
) -> str:
    """Return the model card as Markdown.

    Args:
        origin: the task, and the base model.
        made: the written model and its readout.
        command: the command that wrote it, ``apply`` or ``export``.
        changed: a sentence on the number of parameters that differ from the base model's.
        strategy: the strategy that trained it.
        facts: further entries, by name.
    """
    said = dict(facts or {})
    licence = said.pop("licence", "")
    grafted, task = command == "apply", origin.task
    answers = ", ".join(task.labels)
    if kind_of(task).answer == "text":
        answers = f"a text after a {'chat' if task.form == 'messages' else 'prompt'}"
    table = {
        "task": f"{_code(task.name)}: {_shown(answers)}",
        "base model": _code(origin.model),
        "fingerprint of its body": f"`{origin.fingerprint}`",
        **({"sparsity": f"{origin.sparsity:g}"} if grafted else {}),
        **({"learned by": _code(strategy)} if strategy else {}),
        "class": f"`{made.loader}`",
        "readout": _shown(made.readout),
        "rows": f"{origin.binding.max_length:,} tokens at most, those of an answer included",
        **{name: _shown(fact) for name, fact in said.items()},
        "licence": f"`{licence}`, that of the base model" if licence else "not known: the base model's card names none",
    }
    tag, on = ("grafting", "grafted onto") if grafted else ("continual-learning", "on")
    title = f"{_shown(task.name)} {on} {_shown(origin.model)}"
    return "\n".join(
        [
            *("---", "library_name: transformers", f"tags: [forgetfree, {tag}]"),
            *([f"license: {licence}"] if licence else []),
            *("---", "", f"# {title}", ""),
            f"{changed} ([Panigrahi et al., 2023](https://arxiv.org/abs/2302.06600)). Written by `forgetfree {command}`.",
            *("", "| | |", "|---|---|", *(f"| {name} | {fact} |" for name, fact in table.items()), ""),
            *_use(task, made),
            "",
        ]
    )


def _use(task: TaskDefinition, made: TaskNetwork) -> list[str]:
    """Return the lines on how to use the model: the pipeline's call, if it answers as the task's own model."""
    writes = "If a prompt contains the characters of a special token, this call reads them as that token."
    if made.loader == "AutoModelForSeq2SeqLM":
        return [f"`generate` writes after its chat template. {writes}"]
    if not made.call and made.loader == SEQUENCE_CLASSIFIER:
        return ["The tokenizer by itself reads texts in another way, so `pipeline` does not answer exactly so."]
    if not made.call:
        return ["This is no sequence classifier: `pipeline` has no classes for it, and fails."]
    given = '"This is one text."'
    beside = "If a text contains the characters of a special token, this call reads them as ordinary text."
    if made.loader == TOKEN_CLASSIFIER:
        given, beside = '"Jane Smith works in Paris ."', "Each word is labelled at its first token."
    elif made.loader == "AutoModelForCausalLM":
        given = '[{"role": "user", "content": "What is to be answered?"}], return_full_text=False'
        beside = (
            f"{writes} Where a template puts words next to a prompt, both may become other tokens than in training."
        )
    elif len(task.text_columns) == 2:
        given = '{"text": "Is this one text?", "text_pair": "This is another."}'
        beside += " For an empty second text give a blank."
    call = made.call.format('"."')
    return ["```python", "from transformers import pipeline", "", f"print({call}({given}))", "```", "", beside]


def _code(name: str) -> str:
    """Return a name between backticks, so that it cannot end a line, a table's cell or the backticks."""
    return f"`{escaped(name).replace('`', chr(39)).replace('|', '/')}`"


def _shown(text: str) -> str:
    """Return a text escaped for markdown."""
    return in_markdown(escaped(text))
