"""The binding of a ledger or a graft to the network's configuration, the tokenizer, and the way texts are read.

A fingerprint of weights does not distinguish GELU from ReLU, or a vocabulary from one with two words exchanged. A ledger or a
graft therefore keeps a `Binding`, too, and every use compares it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from torch import nn

from forgetfree.core.families import embeddings_of
from forgetfree.core.fingerprint import digest_of_tensors
from forgetfree.core.readout_model import ReadoutKind, body_prefix
from forgetfree.json_file import checked, parse_json

#: Keys of a Hugging Face configuration that do not affect answers: names, training, outputs, generation.
_INERT = re.compile(
    r"_.*|architectures|auto_map|(torch_)?dtype|transformers_version|name_or_path|tokenizer_class|id2label|label2id|num_labels|"
    r"problem_type|finetuning_task|task_specific_params|use_cache|output_.*|return_dict|torchscript|chunk_size_feed_forward|"
    r"gradient_checkpointing|"
    r".*(dropout|pdrop|layerdrop).*|initializer_.*|(bos|eos|pad|sep|cls|mask)_token_id"
)
#: Texts whose ids differ between tokenizers with one vocabulary: case, accents, spaces, numbers, scripts, special tokens.
_PROBES = (
    *(
        "",
        " ",
        "a",
        "The quick brown fox",
        "THE QUICK BROWN FOX",
        "isn't don't we'll",
        "naïve café",
        "nai\u0308ve cafe\u0301",
    ),
    *(
        "two  spaces",
        " leading",
        "trailing ",
        "tab\tand\nline",
        "3.14 1,000,000 20%",
        "#39; &amp; <br />",
        "a-b_c/d\\e",
    ),
    *("日本語の文章", "Привет, мир", "مرحبا", "😀 👩‍🔬", "ﬁ ½ ™", "x" * 200, "[SEP] </s> <mask> [MASK] <|endoftext|>"),
    *("antidisestablishmentarianism", "unbelievably", "\u200b\ufeff\u00ad", "what?! (yes)"),
)


def _network(text: str) -> str:
    if text and not isinstance(parse_json(text, finite=False), dict):  # a configuration may have an infinite limit
        raise ValueError("a JSON object")
    return text


#: A result of `network_of`; an empty text if it is not known.
Network = Annotated[str, AfterValidator(_network)]


@dataclass(frozen=True)
class Binding:
    """The dependencies of answers besides the weights.

    Attributes:
        network: the settings of the configuration that affect answers, as JSON (see `network_of`).
        tokenizer: the SHA-256 of the tokenizer's behaviour (see `tokenizer_digest`); empty for models that read no texts.
        readout: the kind of readout, such as ``linear``, ``prompt``, ``causal``; ``classifier``: heads of `architecture`.
        max_length: the maximum length of a row, in tokens.
        architecture: the Hugging Face class of a model that another trainer trained, see `forgetfree.learning`; the ledger's
            tensors are named as in its body. Empty for a run.
    """

    network: Network
    tokenizer: str = ""
    readout: ReadoutKind = "linear"
    max_length: Annotated[int, Field(ge=0)] = 0
    architecture: str = ""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  # pydantic's name

    @classmethod
    def of_json(cls, text: str) -> Binding:
        """Return the binding that `json` described.

        Raises:
            ValueError: a field is not known, is missing or does not fit; the message names each.
        """
        binding = checked(cls, parse_json(text))
        if not binding.network:
            raise ValueError("network must be a JSON object, got ''")
        return binding

    @property
    def json(self) -> str:
        """The binding as canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    def differences(self, now: Binding) -> list[str]:
        """Return a phrase for each field that differs from ``now``."""
        phrases = network_differences(self.network, now.network)
        if self.tokenizer != now.tokenizer:
            phrases.append(
                f"the tokenizer (expected {self.tokenizer[:12] or 'none'}, got {now.tokenizer[:12] or 'none'})"
            )
        for name in ("readout", "max_length"):
            expected, got = getattr(self, name), getattr(now, name)
            if expected != got:
                phrases.append(f"{name} (expected {expected}, got {got})")
        return phrases


def head_digest(model: Any) -> str:
    """Return the SHA-256 of a language model's head, with its output embeddings; empty if it has none.

    A tensor that also belongs to the body (tied embeddings) counts only by its name.
    """
    output = embeddings_of(model, "output")
    if output is None:
        return ""
    path = next(name for name, module in model.named_modules() if module is output)
    head = (
        path.rpartition(".")[0] or path
    )  # with the layers between the body and the embeddings, such as BERT's transform
    tensors, prefix = model.state_dict(keep_vars=True), body_prefix(model)
    inside = {id(tensor) for name, tensor in tensors.items() if name.startswith(prefix)}
    own = {name: tensor for name, tensor in sorted(tensors.items()) if name.startswith(f"{head}.")}
    apart = {name: tensor for name, tensor in own.items() if id(tensor) not in inside}
    return hashlib.sha256("\n".join([*own, digest_of_tensors(model, apart)]).encode()).hexdigest()


def has_other_head(model: nn.Module, expected: str) -> bool:
    """Return whether a language model's head has another digest than ``expected``; ``False`` if either is missing."""
    return bool(expected) and head_digest(model) not in ("", expected)


def network_of(model: nn.Module) -> str:
    """Return a description of a network's computation, without its weights, as JSON.

    For a Hugging Face model: its configuration without the keys that do not affect answers; for any other module: its ``repr``.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_diff_dict"):
        return json.dumps({"module": re.sub(r" at 0x[0-9a-f]+", "", repr(model))})
    content = {key: value for key, value in config.to_diff_dict().items() if not _INERT.fullmatch(key)}
    # RoBERTa counts positions from it, even if its configuration changes later. Embeddings use it only in training.
    content["padding_idx"] = [
        each.padding_idx
        for each in model.modules()
        if hasattr(each, "padding_idx") and not isinstance(each, nn.Embedding)
    ]
    return json.dumps(content, sort_keys=True, default=str)


def set_network_(config: Any, network: str) -> None:
    """Set a Hugging Face configuration to the settings from `network_of`; names, labels and token ids stay."""
    wanted, usual = json.loads(network), type(config)()
    for key in config.to_diff_dict():
        if key not in wanted and not _INERT.fullmatch(key):
            setattr(config, key, getattr(usual, key, None))
    for key in wanted.keys() - {"padding_idx"}:
        setattr(config, key, wanted[key])


def network_differences(expected: str, got: str) -> list[str]:
    """Return a phrase for each place where two results of `network_of` differ."""
    then, now = json.loads(expected), json.loads(got)
    return [
        f"the model's {key} (expected {_shown(then, key)}, got {_shown(now, key)})"
        for key in dict.fromkeys((*then, *now))
        if then.get(key) != now.get(key)
    ]


def _shown(content: Mapping[str, Any], key: str) -> str:
    text = json.dumps(content.get(key))
    return text if len(text) <= 60 else f"{text[:60]}…"


def tokenizer_digest(tokenizer: Any, *, chats: bool = False) -> str:
    """Return the SHA-256 of a Hugging Face tokenizer's behaviour; with ``chats``, of its chat template and decoder, too.

    It covers the vocabulary, the merges or scores, the special tokens, the rules that change and split texts, and the ids of
    test texts. The files do not count: another version of a library may write them differently.
    """
    names = ("bos", "eos", "pad", "sep", "cls", "mask", "unk")
    special = {name: getattr(tokenizer, f"{name}_token_id", None) for name in names}
    if special["pad"] == special["eos"]:  # end-of-text pads rows if there is no other token, declared or not
        special["pad"] = None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = {} if backend is None else json.loads(backend.to_str())  # a fast tokenizer describes itself
    content = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "pieces": _pieces(described),
        "rules": _rules(described),
        "special": special,
        "alone": [tokenizer(text, verbose=False)["input_ids"] for text in _PROBES],
        "pairs": [tokenizer(text, "b", verbose=False)["input_ids"] for text in _PROBES],
        "plain": [
            tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
            for text in _PROBES
        ],
    }
    if chats:
        clean = getattr(tokenizer, "clean_up_tokenization_spaces", None)
        content["texts"] = [tokenizer.chat_template, described.get("decoder"), clean]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


def _rules(described: Mapping[str, Any]) -> list[Any]:
    """Return names, patterns and numbers of the rules that change and split texts, in their order.

    Flags are left out, because libraries add some from version to version: their effect shows in the ids of test texts.
    """

    def leaves(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [leaf for key in sorted(value) for leaf in leaves(value[key])]
        if isinstance(value, list):
            return [leaf for each in value for leaf in leaves(each)]
        return [] if value is None or isinstance(value, bool) else [value]

    model = {key: value for key, value in described.get("model", {}).items() if key not in ("vocab", "merges")}
    return [
        *leaves([described.get("normalizer"), described.get("pre_tokenizer"), model]),
        described.get("added_tokens"),
    ]


def _pieces(described: Mapping[str, Any]) -> Any:
    """Return the merges of a BPE tokenizer, or the pieces with scores of a unigram tokenizer; ``None`` for others."""
    model = described.get("model", {})
    if model.get("merges") is not None:
        return [list(merge.split(" ")) if isinstance(merge, str) else list(merge) for merge in model["merges"]]
    return model["vocab"] if isinstance(model.get("vocab"), list) else None
