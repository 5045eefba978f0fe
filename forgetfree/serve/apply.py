"""A task's model as an ordinary Hugging Face directory, which needs nothing of ours: of a graft, or of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from forgetfree.core.body import body_fingerprint, body_of, body_prefix
from forgetfree.core.parameters import ParameterSpace
from forgetfree.data.rows import Rows
from forgetfree.errors import GraftError, ModelError, UsageError
from forgetfree.files import StrPath, new_directory, write_atomically
from forgetfree.ledger.binding import set_network_
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.graft_origin import GraftOrigin
from forgetfree.models.architecture import body_loader, reads_last
from forgetfree.models.checkpoint import explained, quiet, read_config, read_weights
from forgetfree.models.fine_tuned_directory import write_readout
from forgetfree.models.loading import LoadedModel, load_model, locate
from forgetfree.models.peft_directory import READOUT
from forgetfree.models.sequence_classifier import sequence_classifier
from forgetfree.serve.inference import Predictor
from forgetfree.serve.model_card import Change, Reading, model_card
from forgetfree.serve.token_classifier import token_classifier


@dataclass(frozen=True)
class WrittenModel:
    """What `apply_graft` or `export_task` wrote.

    Attributes:
        directory: the directory.
        architecture: its Hugging Face class.
        loader: the class of ``transformers`` that loads it by the name of its directory.
        usual: whether ``pipeline("text-classification")``, or ``"token-classification"``, answers as the task's own model.
        note: a note for the user, if there is one.
    """

    directory: Path
    architecture: str
    loader: str
    usual: bool = False
    note: str = ""


def apply_graft(graft: Graft, model: str, out: StrPath) -> WrittenModel:
    """Put ``graft`` into ``model`` and write the result to ``out``: config, weights, tokenizer, model card.

    A linear readout becomes the head of a sequence classifier, so that ``pipeline("text-classification")`` answers as it
    does; where words are labelled, of a token classifier, for ``pipeline("token-classification")``. If an architecture has no
    sequence classifier, it is written to a separate file. What is read in another way has no classes in its config.json, so
    that this call fails and does not answer by a random head.

    Args:
        graft: with its origin, as `Graft.load` gives it.
        model: the base model: ``minilm``, a directory, or a name on the hub.
        out: a directory that does not exist or is empty; it is written whole or not at all.

    Raises:
        GraftError: the graft does not say what it is for, or belongs to another model.
        ModelError: the model cannot be loaded, or what was written is not what was meant.
        UsageError: there is something in ``out``.
    """
    origin = _origin(graft)
    check_free(Path(out))
    readout = "linear" if origin.readout == "classifier" else origin.readout
    loaded = load_model(model, readout, max_length=origin.max_length)
    graft.apply_(loaded.model)
    if origin.tokenizer and origin.tokenizer != loaded.tokenizer_digest:
        raise GraftError(
            f"The graft was made with another tokenizer than model {model!r} has: expected {origin.tokenizer[:12]}, got "
            f"{loaded.tokenizer_digest[:12]}. Give the model with the tokenizer that it had then."
        )
    origin = replace(origin, model=model)
    return write_model(loaded, origin, graft.readout, out, Change("apply", "", len(graft.region), len(_space(graft))))


def export_task(predictor: Predictor, task: str, out: StrPath, strategy: str = "") -> WrittenModel:
    """Write the model that a run answers a task with to ``out``, as `apply_graft` does.

    Adapters are added to the weights, so their model answers as in the run up to rounding.

    Args:
        predictor: of the run, or of a ledger.
        task: a task that was learned.
        out: a directory that does not exist or is empty; it is written whole or not at all.
        strategy: its name, for the model card.

    Raises:
        TaskError: the task was not learned.
        ModelError: what was written is not what was meant.
        UsageError: there is something in ``out``.
    """
    definition, loaded = predictor.definition(task), predictor.loaded
    check_free(Path(out))
    origin = GraftOrigin(definition, loaded.readout, loaded.name, "", 0.0, max_length=loaded.max_length)
    with predictor.weights.merged(definition.name):
        return write_model(loaded, origin, predictor.readout(task), out, Change("export", strategy))


def write_model(
    loaded: LoadedModel, origin: GraftOrigin, readout: Mapping[str, Tensor], out: StrPath, change: Change
) -> WrittenModel:
    """Write a model that holds a task's weights.

    Args:
        loaded: the model.
        origin: the task, and how it is read.
        readout: the tensors that read it out.
        out: a directory that does not exist or is empty.
        change: what was done to the base model; its numbers are counted unless they are known.
    """
    # Some heads use a body without a part (BERT's pooler) that loading the body alone needs.
    model, out = loaded.name, Path(out)
    config = read_config(locate(model), model)
    whole, missing = read_weights(locate(model), body_loader(config, model), model)
    body = {name: tensor for name, tensor in whole.state_dict().items() if name not in missing}
    own = body_of(loaded.model)
    if not origin.fingerprint:
        pre, now = body, own.state_dict()
        moved = sum(int((pre[name] != now[name].cpu()).sum()) for name in pre if name in now)
        change = replace(change, entries=moved, size=len(loaded.model.space()))
        origin = replace(origin, fingerprint=body_fingerprint(whole))
    same_kind = type(own) is type(whole)
    if same_kind:
        body |= own.state_dict()
    network, tokenizer, reading = _network(loaded, config, body, readout, origin)
    # A token classifier has no pooler, whose tensors others keep.
    same_kind = same_kind and origin.task.kind != "tokens"
    rest = {f"{body_prefix(network)}{name}": tensor for name, tensor in body.items()} if same_kind else {}
    with new_directory(out) as directory:
        _save(directory, network, {**rest, **network.state_dict()}, tokenizer)
        if reading.own_readout:
            write_readout(directory / READOUT, readout, origin.task.labels, origin.readout)
        write_atomically(directory / "README.md", model_card(origin, reading, change))
        _verify(directory, network)
    return WrittenModel(out, type(network).__name__, reading.loader, reading.usual, _note(reading, network))


def _note(reading: Reading, network: Any) -> str:
    if not reading.own_readout:
        return ""
    return (
        f"transformers has no sequence classifier that answers as this {type(network).__name__} does with its readout and "
        f"tokenizer, so the readout is in {READOUT}."
    )


def _origin(graft: Graft) -> GraftOrigin:
    if graft.origin is None or graft.space is None:
        raise GraftError(
            "The graft does not say for which task and model it was made, and a model cannot be written without. Give one "
            "that `forgetfree graft` or SingleTask.graft made."
        )
    return graft.origin


def _space(graft: Graft) -> ParameterSpace:
    assert graft.space is not None  # see `_origin`
    return graft.space


def base_model_name(model: str | None, *grafts: Graft) -> str:
    """Return the base model's name: ``model``, or else the first that a graft has for it.

    Raises:
        UsageError: there is none.
    """
    names = [graft.origin.model for graft in grafts if graft.origin]
    if name := model or next(filter(None, names), ""):
        return name
    if names:
        raise UsageError("The graft comes from a ledger and does not name its base model. Give it by --model.")
    return "minilm"  # any: a graft without an origin is refused later, by name


def check_free(out: Path) -> None:
    """Raise ``UsageError`` unless ``out`` does not exist, or is an empty directory."""
    if out.is_dir() and not out.is_symlink() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise UsageError(f"--out {str(out)!r} exists and is not an empty directory. Give another one.")


# -- The network -----------------------------------------------------------------------------------------


def _network(
    loaded: LoadedModel, config: Any, body: Mapping[str, Tensor], readout: Mapping[str, Tensor], origin: GraftOrigin
) -> tuple[Any, Any, Reading]:
    """Return the Hugging Face model to write with graft and head, its tokenizer, and how it is read."""
    backbone, pair = loaded.model.backbone, len(origin.task.text_columns) == 2
    reading = Reading(
        "AutoModelForSequenceClassification",
        loaded.encoder(origin.task),
        position=-1 if reads_last(config) else 0,
        separator=cast(Any, loaded.model).tokens.separator if pair else None,
    )
    if origin.task.kind == "tokens":
        return _tagging(loaded, config, body, readout, origin, reading)
    if origin.readout in ("prompt", "causal"):
        _name_labels(backbone.config, ())
        loader = "AutoModelForMaskedLM" if origin.readout == "prompt" else "AutoModelForCausalLM"
        return backbone, loaded.tokenizer, replace(reading, loader=loader)
    network = tokenizer = None
    if origin.readout != "mean":  # which no sequence classifier reads
        network, tokenizer = _classifying(loaded, config, body, readout, origin, reading.position)
    if network is None:
        _name_labels(backbone.config, ())
        return backbone, loaded.tokenizer, replace(reading, loader=body_loader(config, loaded.name), own_readout=True)
    return network, tokenizer or loaded.tokenizer, replace(reading, usual=tokenizer is not None)


def _tagging(
    loaded: LoadedModel,
    config: Any,
    body: Mapping[str, Tensor],
    readout: Mapping[str, Tensor],
    origin: GraftOrigin,
    reading: Reading,
) -> tuple[Any, Any, Reading]:
    """Return the token classifier of a task that labels words, its tokenizer, and how it is read."""
    words = Rows(("What was it ?",), (), ((0,) * 4,))
    inputs = cast(Any, loaded.model).inputs(torch.tensor(reading.encoder(words)))
    _name_labels(config, origin.task.labels, origin.classes)
    _check_linear(readout, len(origin.task.labels), loaded.model.hidden_size)
    network = token_classifier(config, body, readout, inputs)
    return (
        network,
        _tokenizer(loaded, list(inputs)),
        replace(reading, loader="AutoModelForTokenClassification", usual=True),
    )


def _classifying(
    loaded: LoadedModel,
    config: Any,
    body: Mapping[str, Tensor],
    readout: Mapping[str, Tensor],
    origin: GraftOrigin,
    position: int,
) -> tuple[Any, Any]:
    """Return a sequence classifier, and the tokenizer for the usual call; either may be ``None``.

    With that tokenizer the call reads texts as our encoder does.
    """
    task, model = origin.task, cast(Any, loaded.model)
    rows = _probes(loaded, pair=task.kind == "pair")
    inputs = [model.inputs(torch.tensor([ids])) for ids in loaded.encoder(task)(rows)]
    tokenizer = _tokenizer(loaded, list(inputs[0]))
    if not _reads_alike(tokenizer, rows, inputs):
        tokenizer = None
    config.pad_token_id = model.tokens.pad  # causal ones find a row's last token by it
    config.problem_type = "single_label_classification"
    if hasattr(config, "use_mems_eval"):
        config.use_mems_eval = False  # XLNet's memory of earlier calls, which batches of the pipeline cannot hold
    _name_labels(config, task.labels, origin.classes)
    if origin.readout == "classifier":
        return _classifier(config, body, readout, origin), tokenizer
    _check_linear(readout, len(task.labels), loaded.model.hidden_size)
    if tokenizer is None:
        return None, None
    return sequence_classifier(config, body, readout, inputs[:-1], position), tokenizer


def _probes(loaded: LoadedModel, *, pair: bool) -> Rows:
    """Return rows that show whether a tokenizer reads texts as ours: long ones, and ones with special tokens."""
    long = "it was " * min(loaded.max_length, 10_000)
    texts = ("a", "What was it?", " ".join(loaded.tokenizer.all_special_tokens), long)
    return Rows(texts, texts[::-1] if pair else (), (0,) * len(texts))


def _tokenizer(loaded: LoadedModel, inputs: list[str]) -> Any:
    """Return the model's tokenizer, set to read texts as our encoder does, if it can.

    Args:
        loaded: the model.
        inputs: names of what the model is called with.
    """
    import transformers

    with explained(loaded.name), quiet(transformers):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            locate(loaded.name),
            model_max_length=loaded.max_length,
            model_input_names=inputs,
            split_special_tokens=True,
            truncation_side="right",
            trust_remote_code=False,
        )
    if tokenizer.pad_token_id is None:  # the pipeline reads no batches without one
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(loaded.pad)
    return tokenizer


def _reads_alike(tokenizer: Any, rows: Rows, inputs: Sequence[Mapping[str, Tensor]]) -> bool:
    """Return whether ``tokenizer``, called as in the pipeline, makes ``inputs`` of ``rows``."""
    texts = zip(rows.first, rows.second, strict=True) if rows.second else zip(rows.first)
    return all(
        dict(tokenizer(*each, truncation=True)) == {name: tensor[0].tolist() for name, tensor in expected.items()}
        for each, expected in zip(texts, inputs, strict=True)
    )


def _name_labels(config: Any, labels: tuple[str, ...], classes: tuple[int, ...] = ()) -> None:
    """Write into ``config`` which class is which label; without labels, that there are no classes."""
    numbers = classes or tuple(range(len(labels)))
    if sorted(numbers) != list(range(len(labels))):
        raise GraftError(
            f"The graft's classes {numbers} are not those of its {len(labels)} labels. Make the graft again."
        )
    config.id2label = dict(sorted(zip(numbers, labels, strict=True)))
    config.label2id = {label: number for number, label in config.id2label.items()}


def _check_linear(readout: Mapping[str, Tensor], labels: int, width: int) -> None:
    got = {name: tuple(tensor.shape) for name, tensor in readout.items()}
    expected = {"weight": (labels, width), "bias": (labels,)}
    if got != expected:
        raise GraftError(
            f"The graft's linear readout does not fit its task and model: expected {expected}, got {got}. Make the graft again."
        )


def _classifier(config: Any, body: Mapping[str, Tensor], readout: Mapping[str, Tensor], origin: GraftOrigin) -> Any:
    """Return the sequence classifier whose head is the readout, with the base model's body."""
    import transformers

    kind = getattr(transformers, origin.architecture, None)
    if not origin.architecture.endswith("ForSequenceClassification") or not isinstance(kind, type):
        raise GraftError(
            f"The graft's readout is the head of {origin.architecture!r}, which this version of transformers does not have. "
            "Expected a …ForSequenceClassification."
        )
    if getattr(kind, "config_class", None) is not type(config):
        raise GraftError(
            f"The graft's readout is the head of a {origin.architecture}, and the model is of type {config.model_type!r}. "
            "Give the model that the graft was made from."
        )
    if origin.network:  # what the head computes is not in the base model's
        set_network_(config, origin.network)
    network = kind(config).float().eval()
    own = network.state_dict()
    lacking = sorted(own.keys() - readout.keys() - {f"{body_prefix(network)}{name}" for name in body})
    unknown = sorted(name for name, tensor in readout.items() if name not in own or own[name].shape != tensor.shape)
    if lacking or unknown:
        raise GraftError(
            f"The graft's readout is no head of this {origin.architecture}: "
            f"{f'{lacking[0]!r} is not in it' if lacking else f'its {unknown[0]!r} does not fit'}. Give the model that the "
            "graft was made from."
        )
    _load_body(network, body)
    network.load_state_dict(dict(readout), strict=False)
    return network


def _load_body(network: nn.Module, body: Mapping[str, Tensor]) -> bool:
    """Load the body of ``network``, and return whether it is complete; ``body`` may have more tensors."""
    return not body_of(network).load_state_dict(body, strict=False).missing_keys


# -- The directory ---------------------------------------------------------------------------------------


def _save(directory: Path, network: Any, tensors: Mapping[str, Tensor], tokenizer: Any) -> None:
    import transformers

    with quiet(transformers):
        network.save_pretrained(directory, state_dict=dict(tensors))
        tokenizer.save_pretrained(directory)
    mode = (directory / "config.json").stat().st_mode
    for file in directory.iterdir():  # else weights are for their owner alone
        file.chmod(mode)


def _verify(directory: Path, network: Any) -> None:
    """Raise ``ModelError`` unless the directory holds ``network``, bit for bit."""
    written, missing = read_weights(str(directory), type(network).__name__, str(directory))
    got, meant = written.state_dict(), network.state_dict()
    lacking = [name for name in missing if name in meant]  # a body may be loaded with a pooler, which nothing reads
    wrong = lacking or [name for name, tensor in meant.items() if not torch.equal(got[name], tensor)]
    if wrong:
        raise ModelError(
            f"What was written is not the grafted model: {wrong[0]!r} is not what it should be. Nothing is left "
            "behind; report it with the model's name."
        )
