"""Sizes in a header or a layout take no memory before they are checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fuzz.mutations import HOSTILE

from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region
from forgetfree.errors import RegionError
from forgetfree.ledger import ledger
from forgetfree.ledger.binding import Binding
from forgetfree.tensor_file import TaskTensors

LAYOUTS = {
    "a giant shape": '[["a",[4611686018427387904,4],"float32"]]',
    "a shape beyond 64 bits": '[["a",[99999999999999999999],"float32"]]',
    "many giant shapes": json.dumps([[f"a{i}", [2**40], "float32"] for i in range(9)]),
    "a negative shape": '[["a",[-1,4],"float32"]]',
    "a shape of truths": '[["a",[true],"float32"]]',
    "a dtype of integers": '[["a",[1],"int64"]]',
    "a dtype that is a function": '[["a",[1],"load"]]',
    "one name twice": '[["a",[1],"float32"],["a",[1],"float32"]]',
    **{f"hostile {i}": text for i, text in enumerate(HOSTILE)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_is_none_is_refused(layout: str) -> None:
    with pytest.raises(RegionError, match="its layout cannot be read"):
        ParameterSpace.of_layout(LAYOUTS[layout])


@pytest.mark.parametrize("text", [*HOSTILE, '{"network": "[1]"}', json.dumps({"network": "[" * 10_000})])
def test_a_binding_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Binding.of_json(text)


@pytest.mark.parametrize("entries", [2 * 10**9, 2**41])
def test_a_ledger_takes_memory_for_what_is_owned_and_not_for_the_model_that_it_claims(
    entries: int, tmp_path: Path
) -> None:
    """The larger model has more entries than can be allocated."""
    layout = json.dumps([["a", [entries], "float32"]], separators=(",", ":"))
    index = torch.tensor([3]).to(torch.uint32 if entries <= 2**32 else torch.int64)
    fields = {"sparsity": 0.1, "definition": None, "classes": [], "parent": ""}
    one = TaskTensors("one", {"index": index, "value": torch.tensor([0.5])}, fields)
    about = {"composition": "parents", "fingerprint": "f" * 64, "layout": layout}
    ledger.FILE.write_tasks(tmp_path / "l.safetensors", [one], about)
    loaded = ledger.Ledger.load(tmp_path / "l.safetensors")
    assert loaded.owned() == Region.of([3]) and len(loaded.free(Region.of([3, entries - 1]), "one")) == 1
