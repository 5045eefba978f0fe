"""What a model answers by its card, and by the usual call of transformers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgetfree.data.rows import Rows


def card_code(directory: Path) -> str:
    (code,) = re.findall(r"^```python\n(.*?)^```", (directory / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    return str(code)


def card_probabilities(directory: Path, rows: Rows, labels: Sequence[str]) -> Tensor:
    """By the python of the model card, run inside the directory: of each row and label."""
    namespace: dict[str, Any] = {}
    with chdir(directory):
        exec(compile(card_code(directory), "README.md", "exec"), namespace)
        texts = list(zip(rows.first, rows.second, strict=True) if rows.second else zip(rows.first))
        if "logits" in namespace:
            return torch.stack([namespace["logits"](*each) for each in texts]).softmax(1)
        return usual_probabilities(namespace["classify"], texts, labels)


def usual_probabilities(classify: Any, texts: Sequence[tuple[str, ...]], labels: Sequence[str]) -> Tensor:
    """By ``pipeline("text-classification")``: of each row and label."""
    given = [each[0] if len(each) == 1 else {"text": each[0], "text_pair": each[1] or " "} for each in texts]
    found = [
        torch.tensor(
            [[{each["label"]: each["score"] for each in answer}[label] for label in labels] for answer in answers]
        )
        for answers in ([classify(each, top_k=None) for each in given], classify(given, top_k=None, batch_size=4))
    ]
    assert torch.allclose(*found, rtol=0, atol=1e-4)
    return found[0]
