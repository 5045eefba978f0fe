"""Parents that a probe is made to prefer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from forgetfree.ledger import switch
from forgetfree.training import parents


def prefer(monkeypatch: pytest.MonkeyPatch, tree: Mapping[str, str]) -> None:
    """Let rows of these tasks lose nothing on these parents, and those of others nothing on θ_pre."""

    def probe(model: Any, task: Any, options: Any) -> tuple[float]:
        return (float(switch._IN_PLACE.get(model.backbone, "") != tree.get(task.name, "")),)

    monkeypatch.setattr(parents, "probe", probe)
