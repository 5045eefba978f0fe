"""Every module that parses what somebody may have changed is known."""

from __future__ import annotations

import ast
from pathlib import Path

import forgetfree

#: Modules that call a parser of JSON or of safetensors files, and what they read by it.
PARSERS = {
    "continual/__init__": "Avalanche's own configuration, which is left alone where it is sound",
    "gpu/results": "measurements of the kit: what is damaged is measured again",
    "gpu/unpacking": "the kit's manifest, whose files are compared with their SHA-256",
    "data/chats": "a turn that was written in the same call",
    "json_file": "JSON files and JSON in them",
    "models/model_files": "weights in Hugging Face layout: tests/models/test_model_files.py",
    "ledger/binding": "a network that `Binding.of_json` has checked; what a tokenizer says of itself",
    "results/runs": "answers for figures, compared with unit.json: tests/results/test_evidence.py",
    "results/configurations": "options that were written in the same call",
    "paper/experiment": "what was written in the same call",
    "paper/rows": "the header of a run file of the paper's experiments, which a commit holds",
    "jobs/directory": "what was written in the same call",
    "jobs/checkpoints": "headers of checkpoints that `TensorFile.read` has checked",
    "jobs/trackers": "the runs of trackers, which a resumed unit goes on in",
}


def test_every_module_that_parses_is_known() -> None:
    """A new one reads by `read_json`, `parse_json` or a `TensorFile`, or says here why it need not."""
    package = Path(forgetfree.__file__).parent
    found = set()
    linked = [path for name in ("strategies", "benchmarks") for path in (package / name).resolve().rglob("*.py")]
    for path in {*package.rglob("*.py"), *linked}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = node.func if isinstance(node, ast.Call) else None
            name = getattr(named, "attr", getattr(named, "id", ""))
            of_json = (
                isinstance(named, ast.Attribute) and isinstance(named.value, ast.Name) and named.value.id == "json"
            )
            if (name in ("load", "loads") and of_json) or name in ("safe_open", "load_file", "deserialize"):
                found.add(
                    path.stem
                    if path.is_relative_to(package) and path.parent == package
                    else path.parent.name + "/" + path.stem
                )
    assert found == PARSERS.keys()
