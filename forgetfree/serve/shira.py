"""Grafts as SHiRA adapters of PEFT, and back (Bhardwaj et al., 2024, arXiv:2406.13175).

SHiRA adds a sparse Δ to the weight of a linear layer: W + Δ. It holds r (m + n) entries of every matrix of m × n that it has,
with one r for all. Matrices with fewer get further entries with Δ = 0, which change no bit.

    adapter_config.json, adapter_model.safetensors   as PEFT writes them
    readout.safetensors                              the linear readout, if the graft has one
    graft_origin.json                                the task and the base model, for the way back

The own head of a fine-tuned classifier is in the adapter, as PEFT's `modules_to_save`.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forgetfree.core.body import body_fingerprint, body_of, body_prefix, body_space
from forgetfree.core.parameters import ParameterSpace, TensorSpec
from forgetfree.core.readout_model import LINEAR
from forgetfree.core.regions import Region
from forgetfree.display import listed
from forgetfree.errors import GraftError, UsageError
from forgetfree.files import StrPath, new_directory, write_atomically
from forgetfree.ledger.binding import network_differences, network_of
from forgetfree.ledger.graft import Graft, GraftOrigin
from forgetfree.models.checkpoint import read_weights
from forgetfree.models.fine_tuned_directory import read_readout, write_readout
from forgetfree.models.loading import LoadedModel, dtype_of, load_model
from forgetfree.models.location import locate
from forgetfree.models.peft_adapter import READOUT, adapter_config, is_adapter, put_on
from forgetfree.models.task_model import ClassifierModel, head_names
from forgetfree.serve.served_task import served

ORIGIN = "graft_origin.json"
_CLASSIFIER = "AutoModelForSequenceClassification"
_CARD = """---
library_name: peft
tags: [shira, forgetfree]
---

# SHiRA adapter for the task `{task}`

Made from a graft of [forgetfree](https://pypi.org/project/forgetfree/). In Python:

    network = transformers.{loader}.from_pretrained(BASE{more})  # {model}
    network = peft.PeftModel.from_pretrained(network, DIRECTORY).eval()
{reading}"""


@dataclass(frozen=True)
class WrittenAdapter:
    """What `to_shira` wrote.

    Attributes:
        directory: where.
        entries: the graft's entries that the adapter has.
        padding: the further entries, with Δ = 0.
        rank: SHiRA's r.
        dropped: the graft's entries that it does not have, by tensor.
        rounded: how many values are not θ_pre + Δ for any Δ in float32, and so off by a rounding.
        error: the most that one of them is off by.
    """

    directory: Path
    entries: int
    padding: int
    rank: int
    dropped: Mapping[str, int]
    rounded: int
    error: float


def to_shira(graft: Graft, model: str, out: StrPath, *, drop_others: bool = False) -> WrittenAdapter:
    """Write a graft as a SHiRA adapter.

    Args:
        graft: one in float32; on the weights of linear layers alone, unless ``drop_others``.
        model: its base model's name or directory.
        out: a directory that does not exist or is empty; it is written whole or not at all.
        drop_others: leave out what SHiRA cannot hold: biases, norms, GPT-2's `Conv1D`, buffers.

    Raises:
        GraftError: the graft does not say what it is for, or belongs to another model.
        UsageError: SHiRA cannot hold it; the message names what.
    """
    origin, space = graft.origin, graft.space
    if origin is None or space is None:
        raise GraftError(
            "The graft does not say for which task and model it was made. Give one that `forgetfree graft` made."
        )
    headed = origin.readout == "classifier"
    readout = "linear" if headed else origin.readout
    loaded = load_model(model, readout, max_length=origin.max_length, dtype=dtype_of(space))
    before = graft.apply_(loaded.model)
    before.apply_(loaded.model, check=False)
    network: Any = _classifier(loaded, origin) if headed else loaded.model.backbone
    plain, head = (copy.deepcopy(network), _put_head(network, graft.readout)) if headed else (None, [])
    layers = {f"{name}.weight": layer for name, layer in body_of(network).named_modules() if type(layer) is nn.Linear}
    entries, dropped = _by_layer(graft, before.values, space, layers)
    _check_held(dropped, [*graft.buffers], entries, drop_others)
    rank = _rank(entries, layers)
    delta = {name: _padded(each, rank * sum(layers[name].weight.shape)) for name, each in entries.items()}
    rounded = torch.cat([each.error for each in entries.values()])
    with new_directory(Path(out)) as directory:
        _save(network, layers, delta, rank, origin, loaded.name, directory, head)
        if headed:
            _check_head(plain, directory, graft.readout)
        if origin.readout in LINEAR:
            write_readout(directory / READOUT, graft.readout, origin.task.labels, origin.readout)
        write_atomically(directory / ORIGIN, origin.json)
        where = (
            "each word's first token"
            if served(origin.task).of_words
            else "the mean of all tokens"
            if origin.readout == "mean"
            else "the first token (at the last, for causal models)"
        )
        reading = f"    # readout.safetensors reads the labels at {where}.\n" if origin.readout in LINEAR else ""
        if headed:
            named = sorted(zip(origin.classes, origin.task.labels, strict=True))
            reading = f"    # Its logits are those of {', '.join(label for _, label in named)}.\n"
        card = _CARD.format(
            task=origin.task.name,
            loader=_loader(origin),
            more=f", num_labels={len(origin.task.labels)}, pad_token_id={loaded.pad}" if headed else "",
            model=origin.model or model,
            reading=reading,
        )
        write_atomically(directory / "README.md", card)
    kept = sum(len(each.local) for each in entries.values())
    size = sum(len(indices) for indices, _ in delta.values())
    return WrittenAdapter(
        Path(out), kept, size - kept, rank, dropped, int(rounded.count_nonzero()), float(rounded.max())
    )


def from_shira(directory: StrPath, model: str | None = None) -> Graft:
    """Return a SHiRA adapter as a graft: the entries that it changes, with the values W + Δ.

    Args:
        directory: what `to_shira` or PEFT wrote. Only from `to_shira` the graft has a readout and an origin.
        model: the base model; default: by the name that the adapter has for it.

    Raises:
        UsageError: it is no SHiRA adapter.
        GraftError: it belongs to another model, or changes what is no graftable tensor.
        ModelError: it is damaged.
    """
    path = Path(directory)
    if not is_adapter(path):
        raise UsageError(
            f"{str(path)!r} is no adapter of PEFT: expected a directory with adapter_config.json. Give one."
        )
    config = adapter_config(path)
    if config["peft_type"] != "SHIRA":
        raise UsageError(
            f"{str(path)!r} is a {config['peft_type']} adapter, which changes whole matrices. Make a graft of it by "
            "`forgetfree graft TASK --fine-tuned DIR`."
        )
    origin = _origin(path / ORIGIN)
    name = model or (origin.model if origin else "") or config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise UsageError(f"{str(path)!r} does not name its base model. Give it to --model.")
    headed = origin is not None and origin.readout == "classifier"
    loaded = load_model(name, "linear" if headed else origin.readout if origin else "auto")
    model_of: Any = loaded.model
    if origin and headed:
        model_of = ClassifierModel(_classifier(loaded, origin), model_of.tokens, origin.classes)
    network: Any = model_of.backbone
    if origin and origin.fingerprint != (got := body_fingerprint(network)):
        raise GraftError(
            f"The adapter belongs to other weights, those of {origin.model!r}: expected fingerprint {origin.fingerprint[:12]}, "
            f"that of {name!r} is {got[:12]}. Give the very weights it was made from to --model."
        )
    space, before = model_of.space(), {key: tensor.clone() for key, tensor in network.state_dict().items()}
    after = put_on(network, path)
    head = head_names(after) if headed else []
    graftable = {*head, *(spec.name for spec in space.tensors)}
    changed = [key for key, tensor in after.state_dict().items() if not torch.equal(tensor, before[key])]
    if outside := [key for key in changed if key not in graftable]:
        raise GraftError(f"The adapter changes {outside[0]!r}, which is no graftable tensor. Use it by PEFT.")
    pre = torch.cat([before[spec.name].reshape(-1) for spec in space.tensors])
    theta = space.flatten(after)
    region = Region.from_mask(theta != pre)
    readout = read_readout(path / READOUT)[1] if (path / READOUT).is_file() else {}
    readout |= {key: after.state_dict()[key].clone() for key in head}
    return Graft(region, theta[region.indices], body_space(network, space), readout, origin=origin)


# -- One matrix ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entries:
    """A graft's entries in one matrix: their flat indices ``(s,)``, Δ there, what W + Δ is off by, and W's shape."""

    local: Tensor
    delta: Tensor
    error: Tensor
    shape: tuple[int, ...]


def _by_layer(
    graft: Graft, pre: Tensor, space: ParameterSpace, layers: Mapping[str, Any]
) -> tuple[dict[str, _Entries], dict[str, int]]:
    """Return the entries of each linear layer, and the numbers of all others by tensor."""
    entries: dict[str, _Entries] = {}
    dropped: dict[str, int] = {}
    for number, local, where in space.split(graft.region.indices):
        spec: TensorSpec = space.tensors[number]
        if spec.name not in layers or spec.dtype != torch.float32:
            dropped[spec.name] = len(local)
            continue
        # Exact where the value is within a factor of two of θ_pre (Sterbenz), and mostly elsewhere.
        delta = graft.values[where] - pre[where]
        error = (pre[where] + delta - graft.values[where]).abs()
        entries[spec.name] = _Entries(local, delta, error, spec.shape)
    return entries, dropped


def _check_held(
    dropped: Mapping[str, int], buffers: list[str], entries: Mapping[str, _Entries], drop_others: bool
) -> None:
    if not entries:
        raise UsageError("SHiRA holds weights of linear layers in float32, and the graft has no entry there.")
    if (dropped or buffers) and not drop_others:
        names = [f"{name} ({count})" for name, count in dropped.items()] + buffers
        raise UsageError(
            f"SHiRA holds weights of linear layers in float32 alone, not {listed(names, 8)}: {sum(dropped.values())} "
            "entries. --drop-others leaves them out, and the adapter answers otherwise then. `forgetfree graft … --set "
            "graftable='(query|key|value|dense)\\.weight'` makes a graft without them."
        )


def _rank(entries: Mapping[str, _Entries], layers: Mapping[str, Any]) -> int:
    """Return the smallest r for which every matrix has room for the graft's entries.

    Raises:
        UsageError: a smaller matrix has fewer entries than r asks of it.
    """
    rank, fullest = max((math.ceil(len(each.local) / sum(each.shape)), name) for name, each in entries.items())
    for name, each in entries.items():
        if rank * sum(each.shape) > math.prod(each.shape):
            raise UsageError(
                f"SHiRA holds r (m + n) entries of every matrix, with one r for all: {fullest!r} has "
                f"{len(entries[fullest].local)} entries and needs r = {rank}, for which {name!r} of {tuple(each.shape)} is too "
                "small. Make a sparser graft."
            )
    return rank


def _padded(entries: _Entries, count: int) -> tuple[Tensor, Tensor]:
    """Return sorted flat indices and Δ of ``count`` entries: further ones have Δ = −0, which changes no bit of any W."""
    free = torch.ones(math.prod(entries.shape), dtype=torch.bool, device="cpu")
    free[entries.local] = False
    more = free.nonzero().squeeze(1)[: count - len(entries.local)]
    indices, order = torch.cat([entries.local, more]).sort()
    return indices, torch.cat([entries.delta, entries.delta.new_full((len(more),), -0.0)])[order]


# -- A classifier's own head -----------------------------------------------------------------------------


def _classifier(loaded: LoadedModel, origin: GraftOrigin) -> Any:
    """Return the base model as a sequence classifier, as its name alone loads it; its head may be random.

    Raises:
        UsageError: the graft's head needs another network.
    """
    classes: dict[str, Any] = {"num_labels": len(origin.task.labels), "pad_token_id": loaded.pad}
    network, _ = read_weights(locate(loaded.name), _CLASSIFIER, loaded.name, **classes)
    differ = [f"the class (expected {origin.architecture}, got {type(network).__name__})"]
    if type(network).__name__ == origin.architecture:
        differ = network_differences(origin.network, network_of(body_of(network))) if origin.network else []
    if differ:
        raise UsageError(
            f"The graft is read by the own head of a fine-tuned model, and {loaded.name!r} as a classifier computes otherwise: "
            f"{'; '.join(differ)}. An adapter does not change that. Use `forgetfree apply`."
        )
    return network


def _put_head(network: Any, readout: Mapping[str, Tensor]) -> list[str]:
    """Put the head into the network, and return the modules that have its tensors.

    Only modules without others inside: of larger ones PEFT's SHiRA merges none.
    """
    expected = {name: tuple(network.state_dict()[name].shape) for name in head_names(network)}
    got = {name: tuple(tensor.shape) for name, tensor in readout.items()}
    if expected != got:
        raise GraftError(
            f"The graft's readout is no head of this {type(network).__name__}: expected {expected}, got {got}. Give the model "
            "that the graft was made from."
        )
    network.load_state_dict(dict(readout), strict=False)
    return list(dict.fromkeys(name.rpartition(".")[0] for name in readout))


def _check_head(plain: Any, directory: Path, readout: Mapping[str, Tensor]) -> None:
    """Raise ``UsageError`` unless PEFT puts the head, bit for bit, onto the base model with another one."""
    actual = put_on(plain, directory).state_dict()
    if wrong := [name for name, tensor in readout.items() if not torch.equal(actual[name], tensor)]:
        raise UsageError(
            f"PEFT does not keep {wrong[0]!r} of the own head of this {type(plain).__name__}. Use `forgetfree apply`."
        )


# -- The directory ---------------------------------------------------------------------------------------


def _save(
    network: Any,
    layers: Mapping[str, Any],
    delta: Mapping[str, tuple[Tensor, Tensor]],
    rank: int,
    origin: GraftOrigin,
    model: str,
    directory: Path,
    head: list[str],
) -> None:
    """Let PEFT make the adapter, fill it, and let PEFT write it."""
    from peft import ShiraConfig, get_peft_model

    masks = {id(layers[name]): _mask(indices, layers[name].weight) for name, (indices, _) in delta.items()}
    prefix = body_prefix(network)
    targets = [f"{prefix}{name.removesuffix('.weight')}" for name in delta]
    kinds = {**dict.fromkeys(LINEAR, "FEATURE_EXTRACTION"), "causal": "CAUSAL_LM"}
    # As one expression: of a list of many names PEFT keeps endings, which other networks with this body have elsewhere, too.
    exactly = "|".join(re.escape(target) for target in targets)
    # Without PEFT's task type for classifiers, which would take the whole head for one module.
    config = ShiraConfig(
        r=rank, target_modules=exactly, task_type=kinds.get(origin.readout), modules_to_save=head or None
    )
    config.mask_fn = lambda layer, r, **_: masks[id(layer)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted: Any = get_peft_model(network, config)
        for name, target in zip(delta, targets, strict=True):
            with torch.no_grad():
                adapted.base_model.model.get_submodule(target).shira_weight["default"].copy_(delta[name][1])
        adapted.peft_config["default"].base_model_name_or_path = model
        adapted.save_pretrained(str(directory))


def _mask(indices: Tensor, weight: Tensor) -> Tensor:
    mask = torch.zeros_like(weight)
    mask.view(-1)[indices] = 1
    return mask


def _loader(origin: GraftOrigin) -> str:
    loaders = {"prompt": "AutoModelForMaskedLM", "causal": "AutoModelForCausalLM", "classifier": _CLASSIFIER}
    return loaders.get(origin.readout, "AutoModel")


def _origin(path: Path) -> GraftOrigin | None:
    if not path.is_file():
        return None
    try:
        return GraftOrigin.of_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise GraftError(
            f"{path} cannot be read ({error}). Restore it from a copy, or convert the graft again."
        ) from error
