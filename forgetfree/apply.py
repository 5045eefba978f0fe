"""A graft put into its base model for good: an ordinary Hugging Face model directory, which needs nothing of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from forgetfree.data.rows import Rows
from forgetfree.errors import GraftError, ModelError, UsageError
from forgetfree.files import new_directory, write_atomically
from forgetfree.grafting import Graft, GraftOrigin
from forgetfree.model_card import Reading, model_card
from forgetfree.models.architecture import body_loader, reads_last
from forgetfree.models.body import body_of, body_prefix
from forgetfree.models.checkpoint import quiet, read_config, read_weights
from forgetfree.models.loading import LoadedModel, load_model, locate


@dataclass(frozen=True)
class WrittenModel:
    """What `apply_graft` wrote.

    Attributes:
        directory: where.
        architecture: its Hugging Face class.
        loader: the class of ``transformers`` that loads it by the name of its directory.
        note: what a user should know, if anything.
    """

    directory: Path
    architecture: str
    loader: str
    note: str = ""


def apply_graft(graft: Graft, model: str, out: Path) -> WrittenModel:
    """Put ``graft`` into ``model`` and write the result to ``out``: config, weights, tokenizer, model card.

    A linear readout becomes the layer of a token classifier, whose logits at the first token (the last, for causal models)
    are the task's. Where an architecture has no such class, it is a file of its own beside the body.

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
    _check_free(out)
    readout = origin.readout if origin.readout in ("prompt", "causal") else "linear"
    loaded = load_model(model, readout, max_length=origin.max_length)
    # Under some heads a body lacks a part (BERT's pooler) that whoever loads the body alone should find all the same.
    config = read_config(locate(model), model)
    whole, missing = read_weights(locate(model), body_loader(config, model), model)
    body = {name: tensor for name, tensor in whole.state_dict().items() if name not in missing}
    network, reading = _network(loaded, config, body, graft, origin)
    graft.apply_(network)
    rest = {}
    if type(body_of(network)) is type(whole):
        prefix = body_prefix(network)
        rest = {f"{prefix}{name}": tensor for name, tensor in body.items()}
    with new_directory(out) as directory:
        _save(directory, network, {**rest, **network.state_dict()}, loaded.tokenizer)
        if reading.own_readout:
            save_file(dict(graft.readout), directory / "readout.safetensors")
        write_atomically(directory / "README.md", model_card(graft, origin, model, reading))
        _verify(directory, network)
    note = ""
    if reading.own_readout:
        note = (
            f"{type(network).__name__} has no token classifier with one linear layer, so the readout is in "
            "readout.safetensors."
        )
    return WrittenModel(out, type(network).__name__, reading.loader, note)


def _origin(graft: Graft) -> GraftOrigin:
    if graft.origin is None or graft.space is None:
        raise GraftError(
            "The graft does not say for which task and model it was made, and a model cannot be written without. Give one "
            "that `forgetfree graft` or SingleTask.graft made."
        )
    return graft.origin


def _check_free(out: Path) -> None:
    if out.is_dir() and not out.is_symlink() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise UsageError(f"--out {str(out)!r} exists and is not an empty directory. Give another one.")


# -- The network -----------------------------------------------------------------------------------------


def _network(
    loaded: LoadedModel, config: Any, body: Mapping[str, Tensor], graft: Graft, origin: GraftOrigin
) -> tuple[Any, Reading]:
    """The Hugging Face model to write, its head filled but ``body`` not grafted, and how it is read."""
    task = origin.task
    encoder = loaded.encoder(task)
    pair = len(task.text_columns) == 2
    ids = torch.tensor(encoder(Rows(("a",), ("a",) if pair else (), (0,))))
    tokens: Any = loaded.model.tokens
    types = tokens.token_types(ids)
    separator = tokens.separator if types is not None and bool(types.any()) else None
    position = -1 if reads_last(config) else 0
    source = encoder.source(pair=pair)
    if origin.readout in ("prompt", "causal"):
        loader = "AutoModelForMaskedLM" if origin.readout == "prompt" else "AutoModelForCausalLM"
        return loaded.model.backbone, Reading(loader, source, separator=separator)
    if origin.readout == "classifier":
        config.pad_token_id = tokens.pad  # causal ones find a row's last token by it
        _name_labels(config, task.labels, origin.classes)
        network = _classifier(config, body, graft.readout, origin)
        return network, Reading("AutoModelForSequenceClassification", source, separator=separator)
    _check_linear(graft.readout, len(task.labels), loaded.model.hidden_size)
    _name_labels(config, task.labels)
    network = _token_classifier(config, body, graft.readout, ids)
    if network is None:
        return loaded.model.backbone, Reading("AutoModel", source, position, separator, own_readout=True)
    return network, Reading("AutoModelForTokenClassification", source, position, separator)


def _name_labels(config: Any, labels: tuple[str, ...], classes: tuple[int, ...] = ()) -> None:
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


def _token_classifier(config: Any, body: Mapping[str, Tensor], readout: Mapping[str, Tensor], ids: Tensor) -> Any:
    """The architecture's token classifier with ``readout`` as its head; ``None`` where its head is another."""
    import transformers

    try:
        loader: Any = transformers.AutoModelForTokenClassification
        network = loader.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    except ValueError:  # there is none
        return None
    if not _load_body(network, body):
        return None
    inside = {id(parameter) for parameter in body_of(network).parameters()}
    linears = [
        module
        for module in network.modules()
        if isinstance(module, nn.Linear) and module.weight.shape == readout["weight"].shape and module.bias is not None
    ]
    head = [parameter for parameter in network.parameters() if id(parameter) not in inside]
    if len(linears) != 1 or {id(each) for each in linears[0].parameters()} != {id(each) for each in head}:
        return None
    with torch.no_grad():
        linears[0].weight.copy_(readout["weight"])
        linears[0].bias.copy_(readout["bias"])
        # Whatever a class may do between its body and its layer: the logits must be the layer's on the hidden states.
        expected = linears[0](body_of(network)(ids).last_hidden_state)
        return network if torch.allclose(network(ids).logits, expected, atol=1e-5) else None


def _classifier(config: Any, body: Mapping[str, Tensor], readout: Mapping[str, Tensor], origin: GraftOrigin) -> Any:
    """The sequence classifier that the readout is the head of, with the base model's body."""
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
    """Fill the body of ``network``, and say whether nothing is lacking there; ``body`` may have more."""
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
    got = written.state_dict()
    wrong = [name for name, tensor in network.state_dict().items() if not torch.equal(got[name], tensor)]
    if missing or wrong:
        raise ModelError(
            f"What was written is not the grafted model: {(missing or wrong)[0]!r} is not what it should be. Nothing is left "
            "behind; report it with the model's name."
        )
