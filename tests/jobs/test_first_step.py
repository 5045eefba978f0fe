"""The number of our functions on the stack at the first update of a command, and of our files that were imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

#: Upper limits, so that any growth is noticed.
MOST_FRAMES, MOST_FILES = 13, 95
PROBE = """
import json, os, sys, traceback
from pathlib import Path
import forgetfree
from torch.optim.optimizer import register_optimizer_step_pre_hook
root = Path(forgetfree.__file__).parents[1]
ours = lambda file: file and Path(file).is_relative_to(root / "forgetfree") and "tests" not in Path(file).parts

def tell(*_):
    frames = [f"{each.filename}:{each.name}" for each in traceback.extract_stack() if ours(each.filename)]
    files = {each.__file__ for each in list(sys.modules.values()) if ours(getattr(each, "__file__", None))}
    print(json.dumps([frames, sorted(files)]), flush=True)
    os._exit(0)

register_optimizer_step_pre_hook(tell)
from forgetfree.cli import main
main(sys.argv[1:])
"""


def test_the_way_to_the_first_step_is_short(data_directory: Path, model_directory: Any, tmp_path: Path) -> None:
    given = ["--data", str(data_directory), "--model", str(model_directory("bert")), "--shots", "4", "--steps", "2"]
    given += ["--sparsity", "0.01"]
    words = ["run", "sst2", *given, "--strategy", "grafting-continual", "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", PROBE, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout, done.stderr
    frames, files = json.loads(done.stdout.splitlines()[-1])
    assert 0 < len(frames) <= MOST_FRAMES, "\n".join(frames)
    assert 0 < len(files) <= MOST_FILES, "\n".join(files)
