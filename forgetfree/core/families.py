"""Families of Hugging Face models: the names of their tensors, layers, heads and settings, and rules on these names.

A family is supported if the rules hold for it. If one does not, the family's names are added here, and nowhere else.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

# -- Tensors that are never grafted ----------------------------------------------------------------------

#: BERT's pooler, a part of the body; some models are loaded without it.
POOLER = r"(^|\.)pooler\."
#: LM heads, classifiers and poolers.
HEADS = (
    r"(^|\.)(lm_head|cls|predictions|vocab_transform|vocab_layer_norm|vocab_projector|decoder_head"
    r"|classifier|score|pooler|readouts)\."
)
#: Tensors that are never grafted, in any family of models: embeddings and heads (paper, A.1: embeddings and the LM
#: head are frozen). Embeddings include the norms and projections between the token embeddings and the first layer, the
#: projections between the last layer and the LM head, and every embedding within a layer (of relative positions, of
#: segments). So a graft lies in the layers and in other modules on their output, such as a last norm.
NOT_GRAFTABLE = (
    r"emb(ed\w*)?(\.|$)",  # embeddings, embed_tokens, word_embeddings_layernorm, layernorm_embedding, mask_emb, seg_embed …
    r"(^|\.)(wte|wpe|relative_attention_bias|decoder\.project_in|decoder\.project_out)\.",
    r"\.r_s_bias$",  # XLNet's segment bias
    HEADS,
)


def never_grafted(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that are never grafted: embeddings, `NOT_GRAFTABLE` names, and all outside the body."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    embeddings = {id(parameter) for table in tables for parameter in table.parameters()}
    return embeddings | named_like(model, NOT_GRAFTABLE) | outside_of_the_body(model)


def named_like(model: nn.Module, patterns: Sequence[str]) -> set[int]:
    """Return the ids of the parameters that have a name in which one of the patterns is found."""
    named = model.named_parameters(remove_duplicate=False)
    return {id(parameter) for name, parameter in named if any(re.search(each, name) for each in patterns)}


def outside_of_the_body(model: Any) -> set[int]:
    """Return the ids of a Hugging Face model's parameters in its head, its input embeddings and their norms."""
    body = getattr(model, "base_model", None)
    if not isinstance(body, nn.Module) or not hasattr(model, "get_input_embeddings"):
        return set()
    inside = {id(parameter) for parameter in body.parameters()}
    table = embeddings_of(model, "input")
    embeddings = {id(parameter) for parameter in table.parameters()} if table is not None else set()
    for module in body.modules():  # DeBERTa's norm of relative embeddings is named like a last norm
        if hasattr(module, "rel_embeddings") and isinstance(norm := getattr(module, "LayerNorm", None), nn.Module):
            embeddings |= {id(parameter) for parameter in norm.parameters()}
    return {id(parameter) for parameter in model.parameters()} - inside | embeddings


def embeddings_of(model: Any, side: Literal["input", "output"]) -> nn.Module | None:
    """Return the input or the output embeddings (the LM head) of a model of transformers; ``None`` where it has none."""
    try:
        found = getattr(model, f"get_{side}_embeddings", lambda: None)()
    except (NotImplementedError, AttributeError, TypeError):  # image or audio models, a user's own functions
        return None
    return found if isinstance(found, nn.Module) else None


#: First parts of tensor names in models that are their own bodies (T5). Other models hold their body in one attribute.
IN_OWN_BODY = frozenset({"encoder", "decoder"})

# -- The layer of a tensor and its role there, as counted in the paper's figures 9 and 10 ----------------

#: The roles in the order of the computation, each with its names in the families.
ROLES: tuple[tuple[str, str], ...] = tuple(
    (role, rf"\.({pattern})(\.|$)")
    for role, pattern in (
        ("query", r"\w*query|query_global|(pos_)?query_proj|q_proj|pos_q_proj|q_lin|q|Wq|q_bias|r_[rw]_bias"),
        ("key", r"key(_global)?|(pos_)?key_proj|k_proj|pos_proj|k_lin|k|Wk|r"),
        ("value", r"value(_global)?|value_proj|v_proj|v_lin|v|Wv|v_bias"),
        ("query+key+value", r"c_attn|query_key_value|qkv_proj|Wqkv|in_proj"),
        ("LayerNorm", r"(?i:\w*layer_?norm\w*|ln(_\w+)?|\w*norm(_\w+)?)"),
        (
            "attention output",
            r"attention\.output\.dense|\w*(attn|attention|Attention)\.(c_proj|dense|Wo|o)|out_proj|out_lin|o_proj",
        ),
        (
            "first feed-forward",
            r"intermediate\.dense|c_fc|fc1|fc_in|lin1|(gate_|up_|gate_up_)proj|mlp\.Wi|dense_h_to_4h|wi(_\d)?|ff\.layer_1"
            r"|ffn(\.0)?\.(weight|bias)",
        ),
        (
            "second feed-forward",
            r"output\.dense|c_proj|fc2|fc_out|lin2|down_proj|mlp\.Wo|dense_4h_to_h|wo|ff\.layer_2|ffn\.2|ffn_output",
        ),
    )
)


def layer_of(name: str) -> str:
    """Return the layer that a tensor belongs to: the first number in its name, or ``"–"``."""
    number = re.search(r"\.(\d+)\.", f".{name}")
    return number.group(1) if number else "–"


def role_of(name: str) -> str:
    """Return the role of a tensor in its layer (query, key, …, LayerNorm, other) with ``weight`` or ``bias``."""
    role = next((role for role, pattern in ROLES if re.search(pattern, f".{name}")), "other")
    return f"{role} {'bias' if name.endswith('bias') else 'weight'}"


# -- Layers, buffers and heads ---------------------------------------------------------------------------


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is GPT-2's linear layer, from transformers, which stores its weight as ``(in, out)``."""
    cls = type(module)
    return (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D")  # without importing it


#: Buffers that older versions of transformers wrote to files; networks now make them themselves.
OLD_BUFFERS = (
    r"(^|\.)(position_ids|token_type_ids|inv_freq|(attn|attention)\.((masked_)?bias|causal_mask|scale_attn)|version)$"
)
#: LM heads that return the final logits, by model type. Other models scale or cap the logits (Gemma 2): they are called
#: as a whole.
LM_HEADS = {
    "bert": "cls",
    **dict.fromkeys(("gpt2", "llama", "mistral", "qwen2", "qwen3", "roberta", "xlm-roberta"), "lm_head"),
}
#: Settings by model type with which a sequence classifier can hold a linear readout: for ModernBERT, the pooled token, f, and
#: the bias of U (see `forgetfree.models.heads.sequence_classifier`).
CLASSIFIER_SETTINGS: dict[str, dict[str, Any]] = {
    "modernbert": {"classifier_pooling": "cls", "classifier_activation": "linear", "classifier_bias": True}
}

# -- Classes, by their names -----------------------------------------------------------------------------

#: A part of the class names of causal language models, and of some others.
CAUSAL_HEAD = "ForCausalLM|LMHeadModel"
#: A part of the class names of encoder-decoders that write texts.
WRITING_HEAD = "ForConditionalGeneration|LMHeadModel"
#: Models that were pre-trained to detect replaced tokens, not to fill in masked ones.
DISCRIMINATORS = ("ElectraForPreTraining", "FunnelForPreTraining")
#: Model types in which tokens attend to later tokens, whatever the class names are.
TWO_WAYS = ("xlnet",)
#: The class that loads the encoder of an encoder-decoder.
TEXT_ENCODER = "AutoModelForTextEncoding"
#: The class that loads an encoder-decoder for a linear readout: all of BART, as in its own classifier; T5's encoder.
ENCODER_DECODERS = {"bart": "AutoModel", **dict.fromkeys(("t5", "mt5", "umt5"), TEXT_ENCODER)}

# -- Settings --------------------------------------------------------------------------------------------

#: Settings that change answers without changing the shape of a tensor.
UNSEEN_SETTINGS = (
    *("model_type", "num_attention_heads", "hidden_act", "activation_function", "position_embedding_type"),
)
#: Model types that pass the given mask to attention unchanged, and use it nowhere else: neither for positions nor for a mean.
_ATTENTION: dict[str, Literal["bidirectional", "causal"]] = {
    **dict.fromkeys(
        ("albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta"), "bidirectional"
    ),
    **dict.fromkeys(("gpt_neox", "llama"), "causal"),
}


def attention_of(config: Any) -> Literal["bidirectional", "causal"] | None:
    """Return whether tokens of a Hugging Face model attend to all tokens or only to earlier ones; ``None``: not known."""
    if getattr(config, "_attn_implementation", "") != "sdpa" or getattr(config, "is_decoder", False):
        return None
    return _ATTENTION.get(config.model_type)


def hidden_size_of(config: Any) -> int:
    """Return the width of the hidden states; in OPT, after a last projection."""
    return int(getattr(config, "word_embed_proj_dim", config.hidden_size))


def head_dropout(config: Any) -> float:
    """Return the dropout before the architecture's own classification head."""
    for name in ("classifier_dropout", "hidden_dropout_prob", "resid_pdrop"):
        value = getattr(config, name, None)
        if value is not None:
            return float(value)
    return 0.1


def has_experts(config: Any) -> bool:
    """Return whether a Hugging Face model routes rows to experts, by its config."""
    numbers = re.findall(r'"\w*experts": (\d+)', json.dumps(config.get_text_config().to_dict(), default=str))
    return any(int(number) > 1 for number in numbers)


def positions_of(backbone: nn.Module) -> int:
    """Return the length of the longest row that a model can read, in tokens."""
    config: Any = backbone.config
    names = ("max_position_embeddings", "max_seq_len")  # GPT-2 maps n_positions; MPT's ALiBi ends there
    positions: int = next((size for name in names if (size := getattr(config, name, None))), -1)
    if positions < 0:  # relative positions
        return sys.maxsize
    tables = [module for name, module in backbone.named_modules() if name.endswith("position_embeddings")]
    # RoBERTa's kind of table begins after its padding index.
    padding = [index for table in tables if (index := getattr(table, "padding_idx", None)) is not None]
    return positions - max(padding, default=-1) - 1


def even_length_of(config: Any) -> int:
    """Return the row length, in tokens, up to which a batch's longest row leaves the positions of the other rows unchanged.

    LongRoPE (Phi-3) has position factors for long rows and others for short rows; a batch uses the factors of its longest row.
    """
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    by_layer = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    lengths = [each["original_max_position_embeddings"] for each in by_layer if each.get("rope_type") == "longrope"]
    return min(lengths, default=sys.maxsize)
