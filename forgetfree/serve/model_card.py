"""The README.md of a model that contains a graft: a description, and python that classifies with transformers alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from forgetfree.core.graft import Graft
from forgetfree.core.graft_origin import GraftOrigin
from forgetfree.display import escaped
from forgetfree.models.fine_tuned_directory import READOUT


@dataclass(frozen=True)
class Reading:
    """How the written model is read.

    Attributes:
        loader: the class of ``transformers`` that loads it: ``AutoModelForMaskedLM``, say.
        encoder: python that defines ``encode``, see `Encoder.source`.
        position: of the token that a linear readout is on: 0, or −1 for causal models.
        separator: the token between two texts, for models with token types that tell them apart; else ``None``.
        own_readout: whether the linear layer is in a separate file.
        usual: whether ``pipeline("text-classification")`` reads it so, too.
    """

    loader: str
    encoder: str
    position: int = 0
    separator: int | None = None
    own_readout: bool = False
    usual: bool = False


def model_card(graft: Graft, origin: GraftOrigin, model: str, reading: Reading) -> str:
    """Return the model card as Markdown.

    Args:
        graft: what was put into the model.
        origin: where it comes from.
        model: the base model's name, as the user gave it.
        reading: how to read the written model.
    """
    task, labels, model = _plain(origin.task.name), _plain(", ".join(origin.task.labels)), _plain(model)
    size = f"{len(graft.space):,}" if graft.space else "?"
    return f"""\
---
library_name: transformers
tags: [forgetfree, grafting]
---

# {task} grafted onto {model}

`{model}` with a *graft* for the task `{task}`: {len(graft.region):,} of {size} graftable parameters have the values of
a fine-tuned model, all others are the base model's own ([Panigrahi et al., 2023](https://arxiv.org/abs/2302.06600)).
Written by `forgetfree apply`; it needs nothing but transformers.

| | |
|---|---|
| task | `{task}`: {labels} |
| base model | `{model}` |
| fingerprint of its body | `{origin.fingerprint}` |
| sparsity | {origin.sparsity:g} ({len(graft.region):,} entries) |
| class | `{reading.loader}` |
| readout | {_readout(origin, reading)} |

Inside this directory:

```python
{_usual_code(origin) if reading.usual else _code(origin, reading)}
```

{_remark(origin, reading)}
"""


def _readout(origin: GraftOrigin, reading: Reading) -> str:
    where = "first" if reading.position == 0 else "last"
    if origin.readout == "classifier":
        return "the fine-tuned model's own classification head"
    if origin.readout == "linear":
        layer = (
            f"the linear layer in `{READOUT}`" if reading.own_readout else "a linear layer, inside the model's head,"
        )
        return f"{layer} at the {where} token"
    words = _plain(
        ", ".join(f"{label}: {word!r}" for label, word in zip(origin.task.labels, origin.task.label_words, strict=True))
    )
    return (
        f"the logits of label words {'at the mask' if origin.readout == 'prompt' else 'after the last token'} ({words})"
    )


def _remark(origin: GraftOrigin, reading: Reading) -> str:
    if reading.usual:
        empty = " For an empty second text give a blank." if origin.task.kind == "pair" else ""
        return (
            f"Rows are read up to {origin.max_length} tokens: `truncation=True` cuts longer ones. A text that spells a special "
            f"token is read as a text.{empty}"
        )
    if reading.loader == "AutoModelForSequenceClassification":
        return "The tokenizer by itself reads texts in another way, so `pipeline` does not answer exactly as this code does."
    return (
        'This is no sequence classifier: for `pipeline("text-classification")` it has no classes, and that call fails with '
        "an error."
    )


def _usual_code(origin: GraftOrigin) -> str:
    example = '"This is one text."'
    if origin.task.kind == "pair":
        example = '{"text": "Is this one text?", "text_pair": "This is another."}'
    return "\n".join(
        [
            "from transformers import pipeline",
            "",
            'classify = pipeline("text-classification", model=".", truncation=True)',
            f"print(classify({example}))",
        ]
    )


def _code(origin: GraftOrigin, reading: Reading) -> str:
    task = origin.task
    columns = ", ".join(task.text_columns)
    prompted = origin.readout in ("prompt", "causal")
    lines = [
        *(["import string", ""] if "string." in reading.encoder else []),
        "import torch",
        *(["from safetensors.torch import load_file"] if reading.own_readout else []),
        f"from transformers import {reading.loader}, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        f'model = {reading.loader}.from_pretrained(".").eval()',
    ]
    if prompted or reading.own_readout:
        lines.append(f"labels = {_listed(task.labels)}")
    else:
        lines.append("labels = [model.config.id2label[i] for i in range(model.config.num_labels)]")
    if prompted:
        lines.append(f"words = {_listed(task.label_words)}")
    if reading.own_readout:
        lines.append(f'readout = load_file("{READOUT}")')
    lines += [
        "",
        "",
        reading.encoder,
        "",
        "",
        *(['label_words = [inside(" " + word)[0] for word in words]', "", ""] if prompted else []),
        "@torch.no_grad()",
        f"def logits({columns}):",
        f"    ids = encode({columns})",
    ]
    inputs = "torch.tensor([ids])"
    if reading.separator is not None:
        lines.append(f"    types = [int(ids[:i].count({reading.separator}) == 1) for i in range(len(ids))]")
        inputs += ", token_type_ids=torch.tensor([types])"
    at = {
        "prompt": ".logits[0, ids.index(tokenizer.mask_token_id)][label_words]",
        "causal": ".logits[0, -1][label_words]",
        "linear": f".logits[0, {reading.position}]",
        "classifier": ".logits[0]",
    }[origin.readout]
    if reading.own_readout:
        lines += [
            f"    hidden = model({inputs}).last_hidden_state[0, {reading.position}]",
            '    return torch.nn.functional.linear(hidden, readout["weight"], readout["bias"])',
        ]
    else:
        lines.append(f"    return model({inputs}){at}")
    example = ", ".join(f'"{text}"' for text in ("Is this one text?", "This is another.")[-len(task.text_columns) :])
    lines += ["", "", f"def classify({columns}):", f"    return labels[int(logits({columns}).argmax())]", "", ""]
    return "\n".join([*lines, f"print(classify({example}))"])


def _plain(text: str) -> str:
    """Return a name that is safe in markdown: it cannot end a line, a table's cell or code between backticks."""
    return escaped(text).replace("`", "'").replace("|", "/")


def _listed(texts: Sequence[str]) -> str:
    return escaped(json.dumps(list(texts), ensure_ascii=False))  # a list of texts reads the same in python
