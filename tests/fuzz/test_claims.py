"""What a header or a layout claims costs nothing before it is checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fuzz.mutations import HOSTILE

from forgetfree.core.parameters import ParameterSpace
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


@pytest.mark.sampled(share=0.2)
def test_a_ledger_that_claims_a_giant_model_takes_no_memory(tmp_path: Path) -> None:
    """Two billion entries would be 4 GB of owners; more than the system has addresses for is refused."""
    for entries in (2 * 10**9, 2**41):
        layout = json.dumps([["a", [entries], "float32"]], separators=(",", ":"))
        index = torch.tensor([3]).to(torch.uint32 if entries <= 2**32 else torch.int64)
        fields = {"sparsity": 0.1, "definition": None, "classes": [], "alone": False}
        one = TaskTensors("one", {"index": index, "value": torch.tensor([0.5])}, fields)
        about = {"composition": "union", "fingerprint": "f" * 64, "layout": layout}
        ledger.FILE.write_tasks(tmp_path / f"{entries}.safetensors", [one], about)
    code = (
        "import re, sys\nfrom pathlib import Path\n"
        "from forgetfree.errors import LedgerError\nfrom forgetfree.ledger import Ledger\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n        print(Ledger.load(path).tasks)\n    except LedgerError as error:\n        print(error)\n"
        # What getrusage says is at least what the process that started this one held.
        "print(re.search('VmHWM:[^0-9]*([0-9]+)', Path('/proc/self/status').read_text())[1])\n"
    )
    files = sorted(map(str, tmp_path.iterdir()))  # the larger last
    done = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True, timeout=120)
    large, giant, peak = done.stdout.splitlines()
    assert "['one']" in large or "does not fit into memory" in large
    assert "does not fit into memory" in giant
    assert int(peak) < 2 * 2**20, "in kilobytes"
