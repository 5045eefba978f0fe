"""How a network is read, by its Hugging Face configuration: its language model, its body, its first or last token."""

from __future__ import annotations

import inspect
import re
from collections.abc import Container
from typing import Any, Literal

from forgetfree.core.readout_model import LINEAR, ReadoutKind
from forgetfree.errors import ModelError
from forgetfree.models.model_files import TEXT_ENCODER

#: The class that loads a language model, by its readout; see `loader_of`.
LANGUAGE_MODELS = {
    "prompt": "AutoModelForMaskedLM",
    "causal": "AutoModelForCausalLM",
    "generate": "AutoModelForCausalLM",
}
#: What the names of causal language models, and of some others, contain.
CAUSAL_HEAD = "ForCausalLM|LMHeadModel"
#: Models that were pre-trained to detect replaced tokens, not to fill in masked ones.
_DISCRIMINATORS = ("ElectraForPreTraining", "FunnelForPreTraining")


def language_model(config: Any) -> Literal["prompt", "causal"] | None:
    """Return the readout of an architecture's language model: ``prompt`` if masked, ``causal``, or none."""
    masked = config.model_type in _masked_kinds()
    for architecture in config.architectures or ():
        if architecture.endswith("WithLMHeadModel"):  # XLM's and FlauBERT's may be either
            return "causal" if config.causal else "prompt"
        if "ForMaskedLM" in architecture:
            return "prompt"
        if "ForPreTraining" in architecture and masked and architecture not in _DISCRIMINATORS:
            return "prompt"
        # In BERT's kinds and in XLNet, tokens see those after them, unless config.json says otherwise.
        if (
            re.search(CAUSAL_HEAD, architecture)
            and (_is_decoder(config) or not masked)
            and config.model_type != "xlnet"
        ):
            return "causal"
    return None


def writes_texts(config: Any) -> bool:
    """Return whether an architecture's language model writes texts: a causal one, or an encoder-decoder with its head."""
    named = any(re.search("ForConditionalGeneration|LMHeadModel", each) for each in config.architectures or ())
    return language_model(config) == "causal" or (bool(config.is_encoder_decoder) and named)


def loader_of(config: Any, readout: str, name: str) -> str:
    """Return the class of ``transformers`` that loads what a readout reads.

    Raises:
        ModelError: it is an encoder-decoder of a type without a known place to read it.
    """
    if readout == "generate" and config.is_encoder_decoder:
        return "AutoModelForSeq2SeqLM"
    return LANGUAGE_MODELS.get(readout) or body_loader(config, name)


#: What loads the part of an encoder-decoder that is read: all of BART, as its own classifier does; the encoder of T5.
_ENCODER_DECODERS = {"bart": "AutoModel", **dict.fromkeys(("t5", "mt5", "umt5"), TEXT_ENCODER)}


def body_loader(config: Any, name: str) -> str:
    """Return the class of ``transformers`` that loads what a linear readout reads.

    Raises:
        ModelError: it is an encoder-decoder of a type without a known place to read it.
    """
    if config.is_encoder_decoder and config.model_type not in _ENCODER_DECODERS:
        raise ModelError(
            f"Model {name!r} is an encoder-decoder of the type {config.model_type!r}, and of these only "
            f"{', '.join(_ENCODER_DECODERS)} are read. Give one of them, an encoder, or a causal model."
        )
    return _ENCODER_DECODERS.get(config.model_type, "AutoModel")


def reads_last(config: Any) -> bool:
    """Return whether a linear readout reads a row's last token rather than its first.

    It does where a token sees only those before it (by the head, or else by the purpose of its kind of model), and in
    encoder-decoders, which are trained to end a text with a special token and not to begin it with one.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.model_type
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in _masked_kinds()
    return causal or language_model(config) == "causal" or _is_decoder(config) or kind in _ENCODER_DECODERS


def _is_decoder(config: Any) -> bool:
    return bool(getattr(config, "is_decoder", False)) and not config.is_encoder_decoder


def _masked_kinds() -> Container[str]:
    """Return the kinds of models that have a masked language model in ``transformers``."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return MODEL_FOR_MASKED_LM_MAPPING_NAMES


def choose_readout(config: Any, readout: str, name: str) -> ReadoutKind:
    """Return the readout of a model: what was asked for, or for ``auto`` what the model has.

    Raises:
        ModelError: it has no head for the readout that was asked for, is an encoder-decoder that `body_loader` refuses, or one
            that does not say what a text begins with.
    """
    if readout == "generate" and writes_texts(config):
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            raise ModelError(
                f"Model {name!r} is an encoder-decoder, and its config.json does not say which token its decoder begins with: "
                "expected decoder_start_token_id. Set it (T5 has pad_token_id there, BART eos_token_id)."
            )
        return "generate"
    body_loader(config, name)  # refuses before tokenizer and weights are read
    own = language_model(config)
    if readout == "mean":
        return "mean"
    if readout == "linear" or (readout == "auto" and own is None):
        return "linear"
    if readout in ("auto", own):
        assert own is not None
        return own
    needed = "a masked" if readout == "prompt" else "a causal"
    architectures = " ".join(config.architectures or ()) or "without a head"
    if readout == "causal" and re.search(CAUSAL_HEAD, architectures):
        architectures += ", whose tokens see those after them"
    remedy = "Give one, or another readout."
    if readout == "generate":
        remedy = "Give one to --model, such as smollm2, which 'forgetfree fetch smollm2' gets."
    raise ModelError(
        f"The readout {readout!r} needs {needed} language model{' or an encoder-decoder' * (readout == 'generate')}, and "
        f"{name!r} is {architectures}. {remedy}"
    )


def loader_arguments(config: Any, readout: str) -> dict[str, Any]:
    """Return what else `loader_of` is called with: a linear readout leaves the pooler out, which some checkpoints lack."""
    from transformers import MODEL_MAPPING

    network: Any = MODEL_MAPPING.get(type(config), None)
    takes = inspect.signature(network).parameters if isinstance(network, type) else {}
    return {"add_pooling_layer": False} if readout in LINEAR and "add_pooling_layer" in takes else {}


def head_dropout(config: Any) -> float:
    """Return the dropout before the architecture's own classification head."""
    for name in ("classifier_dropout", "hidden_dropout_prob", "resid_pdrop"):
        value = getattr(config, name, None)
        if value is not None:
            return float(value)
    return 0.1
