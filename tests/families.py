"""Tiny models of every supported family, and the tensors of their layers: a table that several tests use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
import torch
import transformers
from tiny import HEADS, HIDDEN, INNER, LAYERS, POSITIONS, SPREAD

#: The usual configuration keys for the sizes.
SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": POSITIONS,
    "initializer_range": SPREAD,
}
#: RoBERTa's positions begin after its padding index.
PADDED = SIZES | {"max_position_embeddings": POSITIONS + 2, "type_vocab_size": 1}
GROUPED = SIZES | {"num_key_value_heads": 1, "head_dim": HIDDEN // HEADS}
GPT = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS, "n_inner": INNER}
T5 = {
    **{"decoder_start_token_id": 0, "d_model": HIDDEN, "d_kv": HIDDEN // HEADS, "d_ff": INNER},
    **{"num_layers": LAYERS, "num_heads": HEADS},
}
BART = {
    **{"d_model": HIDDEN, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_ffn_dim": INNER},
    **{"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "decoder_ffn_dim": INNER},
    **{"max_position_embeddings": POSITIONS, "init_std": SPREAD},
}

#: The kinds of parameters under short names.
KINDS = {
    "query": "query",
    "key": "key",
    "value": "value",
    "fused": "query+key+value",
    "output": "attention output",
    "first": "first feed-forward",
    "second": "second feed-forward",
    "norm": "LayerNorm",
    "other": "other",
}


def kinds(inside: str = "", **modules: str) -> dict[str, str]:
    """Return the kind of each module of a layer, from its modules by kind; all names get the prefix ``inside``."""
    return {inside + module: KINDS[kind] for kind, names in modules.items() for module in names.split()}


_BERT_ATTENTION = kinds("attention.self.", query="query", key="key", value="value")
_BERT_OUTPUT = kinds(output="attention.output.dense", norm="attention.output.LayerNorm")
_BERT_FEED = kinds(first="intermediate.dense", second="output.dense", norm="output.LayerNorm")
_BERT = _BERT_ATTENTION | _BERT_OUTPUT | _BERT_FEED
#: BERT's modules with layer norms elsewhere.
_PRE_NORM = {name: kind for name, kind in _BERT.items() if not name.endswith("LayerNorm")}
_SELF = kinds("self_attn.", query="q_proj", key="k_proj", value="v_proj")
_LLAMA = (
    _SELF
    | kinds(output="self_attn.o_proj", norm="input_layernorm post_attention_layernorm")
    | kinds("mlp.", first="gate_proj up_proj", second="down_proj")
)
_NORMED = kinds("self_attn.", norm="q_norm k_norm")
_FEEDING = kinds(norm="pre_feedforward_layernorm post_feedforward_layernorm")
_GPT2 = kinds(fused="attn.c_attn", output="attn.c_proj", first="mlp.c_fc", second="mlp.c_proj", norm="ln_1 ln_2")
_4H = kinds(first="mlp.dense_h_to_4h", second="mlp.dense_4h_to_h", norm="input_layernorm")
_BLOOM = _4H | kinds("self_attention.", fused="query_key_value", output="dense")
_OPT = _SELF | kinds(
    output="self_attn.out_proj", first="fc1", second="fc2", norm="self_attn_layer_norm final_layer_norm"
)
_CROSS = kinds("encoder_attn.", query="q_proj", key="k_proj", value="v_proj", output="out_proj")
_T5 = kinds("layer.0.SelfAttention.", query="q", key="k", value="v", output="o")
_T5 |= kinds(second="layer.1.DenseReluDense.wo", norm="layer.0.layer_norm layer.1.layer_norm")
_T5_GATED = _T5 | kinds("layer.1.DenseReluDense.", first="wi_0 wi_1")


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        config: the sizes of a tiny model.
        layer: all graftable tensors of a layer, without ``.weight`` and ``.bias``, each with its kind.
        closing: the graftable modules outside of the layers, which are applied to the layers' output.
        head: the auto class of ``transformers`` for its language model.
        readout: the readout that ``auto`` chooses for that language model.
    """

    config: Mapping[str, Any]
    layer: Mapping[str, str]
    closing: tuple[str, ...] = ()
    head: str = "AutoModelForMaskedLM"
    readout: str = "prompt"


def _causal(config: Mapping[str, Any], layer: Mapping[str, str], *closing: str) -> Family:
    return Family(config, layer, closing, "AutoModelForCausalLM", "causal")


def _two_sided(config: Mapping[str, Any], layer: Mapping[str, str], *closing: str) -> Family:
    return Family(config, layer, closing, "AutoModelForSeq2SeqLM", "linear")


FAMILIES: dict[str, Family] = {
    "Bert": Family(SIZES, _BERT),
    "Roberta": Family(PADDED, _BERT),
    "XLMRoberta": Family(PADDED, _BERT),
    "Camembert": Family(PADDED, _BERT),
    "BigBird": Family(SIZES | {"attention_type": "original_full"}, _BERT),
    "Electra": Family(SIZES | {"embedding_size": 8}, _BERT),
    "DistilBert": Family(
        {
            "dim": HIDDEN,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "hidden_dim": INNER,
            "max_position_embeddings": POSITIONS,
        },
        kinds("attention.", query="q_lin", key="k_lin", value="v_lin", output="out_lin")
        | kinds(first="ffn.lin1", second="ffn.lin2", norm="sa_layer_norm output_layer_norm"),
    ),
    "Albert": Family(
        SIZES | {"embedding_size": 8},
        kinds("albert_layers.0.attention.", query="query", key="key", value="value", output="dense", norm="LayerNorm")
        | kinds("albert_layers.0.", first="ffn", second="ffn_output", norm="full_layer_layer_norm"),
    ),
    "MPNet": Family(
        PADDED,
        kinds("attention.attn.", query="q", key="k", value="v", output="o")
        | kinds(norm="attention.LayerNorm")
        | _BERT_FEED,
    ),
    "Deberta": Family(
        SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
        kinds("attention.self.", fused="in_proj", query="q_bias pos_q_proj", key="pos_proj", value="v_bias")
        | _BERT_OUTPUT
        | _BERT_FEED,
    ),
    "DebertaV2": Family(
        SIZES
        | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "type_vocab_size": 0}
        | {"norm_rel_ebd": "layer_norm", "conv_kernel_size": 3, "conv_act": "gelu"},
        kinds("attention.self.", query="query_proj pos_query_proj", key="key_proj pos_key_proj", value="value_proj")
        | _BERT_OUTPUT
        | _BERT_FEED,
        ("encoder.conv.conv", "encoder.conv.LayerNorm"),
    ),
    "ModernBert": Family(
        SIZES,
        kinds(fused="attn.Wqkv", output="attn.Wo", first="mlp.Wi", second="mlp.Wo", norm="attn_norm mlp_norm"),
        ("final_norm",),
    ),
    "MegatronBert": Family(SIZES, _PRE_NORM | kinds(norm="attention.ln ln"), ("encoder.ln",)),
    "XLMRobertaXL": Family(
        PADDED, _PRE_NORM | kinds(norm="attention.self_attn_layer_norm LayerNorm"), ("encoder.LayerNorm",)
    ),
    "XLNet": Family(
        {"d_model": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "d_inner": INNER},
        kinds("rel_attn.", query="q r_w_bias r_r_bias", key="k r", value="v", output="o", norm="layer_norm")
        | kinds("ff.", first="layer_1", second="layer_2", norm="layer_norm"),
        head="AutoModelForCausalLM",
        readout="linear",
    ),
    "GPT2": _causal(GPT, _GPT2, "ln_f"),
    "OpenAIGPT": _causal(GPT, _GPT2),
    "CTRL": _causal(
        {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS, "dff": INNER},
        kinds("multi_head_attention.", query="Wq", key="Wk", value="Wv", output="dense")
        | kinds(first="ffn.0", second="ffn.2", norm="layernorm1 layernorm2"),
        "layernorm",
    ),
    "GPTBigCode": _causal(GPT, _GPT2, "ln_f"),
    "GPTJ": _causal(
        GPT | {"rotary_dim": 4},
        kinds("attn.", query="q_proj", key="k_proj", value="v_proj", output="out_proj")
        | kinds(first="mlp.fc_in", second="mlp.fc_out", norm="ln_1"),
        "ln_f",
    ),
    "GPTNeo": _causal(
        {"hidden_size": HIDDEN, "num_layers": LAYERS, "num_heads": HEADS, "intermediate_size": INNER}
        | {"attention_types": [[["global"], LAYERS]], "max_position_embeddings": POSITIONS},
        kinds("attn.attention.", query="q_proj", key="k_proj", value="v_proj", output="out_proj")
        | kinds(first="mlp.c_fc", second="mlp.c_proj", norm="ln_1 ln_2"),
        "ln_f",
    ),
    "GPTNeoX": _causal(
        SIZES,
        _4H | kinds(fused="attention.query_key_value", output="attention.dense", norm="post_attention_layernorm"),
        "final_layer_norm",
    ),
    "OPT": _causal(
        {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "ffn_dim": INNER}
        | {"word_embed_proj_dim": 8, "max_position_embeddings": POSITIONS},
        _OPT,
        "decoder.final_layer_norm",
    ),
    "Bloom": _causal(
        {"hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS},
        _BLOOM | kinds(norm="post_attention_layernorm"),
        "ln_f",
    ),
    "Falcon": _causal(SIZES | {"bias": True, "ffn_hidden_size": INNER}, _BLOOM, "ln_f"),
    "Mpt": _causal(
        {"d_model": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": POSITIONS},
        kinds(
            fused="attn.Wqkv", output="attn.out_proj", first="ffn.up_proj", second="ffn.down_proj", norm="norm_1 norm_2"
        ),
        "norm_f",
    ),
    "Llama": _causal(GROUPED, _LLAMA, "norm"),
    "Mistral": _causal(GROUPED, _LLAMA, "norm"),
    "Mixtral": _causal(
        GROUPED | {"num_local_experts": 2},
        {name: kind for name, kind in _LLAMA.items() if not name.startswith("mlp.")}
        | kinds("mlp.", other="gate", first="experts.gate_up_proj", second="experts.down_proj"),
        "norm",
    ),
    "Qwen2": _causal(GROUPED, _LLAMA, "norm"),
    "Qwen3": _causal(GROUPED, _LLAMA | _NORMED, "norm"),
    "Gemma": _causal(GROUPED, _LLAMA, "norm"),
    "Gemma2": _causal(GROUPED, _LLAMA | _FEEDING, "norm"),
    "Gemma3Text": _causal(GROUPED, _LLAMA | _FEEDING | _NORMED, "norm"),
    "Phi": _causal(
        SIZES,
        _SELF | kinds(output="self_attn.dense", first="mlp.fc1", second="mlp.fc2", norm="input_layernorm"),
        "final_layernorm",
    ),
    "Phi3": _causal(
        SIZES,
        kinds(fused="self_attn.qkv_proj", output="self_attn.o_proj", norm="input_layernorm post_attention_layernorm")
        | kinds("mlp.", first="gate_up_proj", second="down_proj"),
        "norm",
    ),
    "T5": _two_sided(T5, _T5 | kinds(first="layer.1.DenseReluDense.wi"), "encoder.final_layer_norm"),
    "MT5": _two_sided(T5, _T5_GATED, "encoder.final_layer_norm"),
    "UMT5": _two_sided(T5, _T5_GATED, "encoder.final_layer_norm"),
    "Bart": _two_sided(BART, _OPT | _CROSS | kinds(norm="encoder_attn_layer_norm")),
}

COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")


def tokenizer(name: str) -> Any:
    """Return a tokenizer of the family's kind."""
    family = FAMILIES[name]
    if name == "XLNet" or name.endswith("T5"):
        return getattr(transformers, f"{name.lstrip('UM')}Tokenizer")(vocab=tiny.unigrams())
    if family.readout == "prompt" and family.config is not PADDED:
        return tiny.wordpiece()
    return tiny.byte_level(causal=family.readout == "causal")


def config(name: str, *, layers: int = LAYERS) -> Any:
    """Return the family's configuration."""
    sizes = {key: layers if key in COUNTS else value for key, value in FAMILIES[name].config.items()}
    if "attention_types" in sizes:  # GPT-Neo's, layer by layer
        sizes["attention_types"] = [[["global"], layers]]
    words = tokenizer(name)
    special = {f"{kind}_token_id": getattr(words, f"{kind}_token_id") for kind in ("bos", "eos", "pad", "cls", "sep")}
    return getattr(transformers, f"{name}Config")(vocab_size=len(words), **sizes, **special)


def body(name: str) -> torch.nn.Module:
    """Return a tiny model without a head."""
    return tiny.pre_trained(lambda: transformers.AutoModel.from_config(config(name)))


def write(name: str, directory: Path) -> Path:
    """Write a tiny model with its LM head and its tokenizer, in Hugging Face layout."""
    loader = getattr(transformers, FAMILIES[name].head)
    model = tiny.pre_trained(lambda: loader.from_config(config(name)))
    model.save_pretrained(directory)  # type: ignore[operator]
    tokenizer(name).save_pretrained(directory)
    return directory
