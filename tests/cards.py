"""What the python of a model card answers."""

from __future__ import annotations

import re
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgetfree.data.rows import Rows


def card_logits(directory: Path, rows: Rows) -> Tensor:
    """By the python of the model card, run inside the directory."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (directory / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    namespace: dict[str, Any] = {}
    with chdir(directory):
        exec(compile(code, "README.md", "exec"), namespace)
        texts = zip(rows.first, rows.second, strict=True) if rows.second else ((text,) for text in rows.first)
        return torch.stack([namespace["logits"](*each) for each in texts])
