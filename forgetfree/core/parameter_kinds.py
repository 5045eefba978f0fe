"""Where a tensor lies, by its name: the paper's figures 9 and 10 count regions by layer and by kind of parameter."""

from __future__ import annotations

import re

#: The kinds in the order of the computation, each with the names that the families of models give them.
KINDS: tuple[tuple[str, str], ...] = tuple(
    (kind, rf"\.({pattern})(\.|$)")
    for kind, pattern in (
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


def parameter_kind(name: str) -> str:
    """Return the kind of a tensor (query, key, …, LayerNorm) with ``weight`` or ``bias``."""
    kind = next((kind for kind, pattern in KINDS if re.search(pattern, f".{name}")), "other")
    return f"{kind} {'bias' if name.endswith('bias') else 'weight'}"
