"""docs/walkthrough.ipynb has the content of docs/walkthrough.md, and runs from top to bottom in a real kernel."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from test_docs import ROOT, needs_minilm

NOTEBOOK = ROOT / "docs" / "walkthrough.ipynb"


def test_the_notebook_is_the_page() -> None:
    """``python docs/notebook.py`` would not change it."""
    pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'forgetfree[dev]'")
    made = runpy.run_path(str(ROOT / "docs" / "notebook.py"))["notebook"]()
    assert NOTEBOOK.read_text(encoding="utf-8") == made


@pytest.mark.sampled(share=0.25)
@pytest.mark.slow
@needs_minilm
def test_the_walk_through_runs_in_a_notebook_and_shows_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "no notebook can be run here: pip install 'forgetfree[dev]'"
    nbclient, nbformat = (pytest.importorskip(name, reason=reason) for name in ("nbclient", "nbformat"))
    pytest.importorskip("ipykernel", reason=reason)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises if a cell raises
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    tables = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    shown = [table for table in tables if "After the last task" in table]
    assert len(shown) == 4 and ">grafting-continual</th>" in shown[0] and ">Naive</th>" in shown[1]
    assert ">bare-graft</th>" in tables[-1]
    told = "".join(output["text"] for output in outputs if output.get("name") == "stderr")
    assert "Recipe of minilm: optimizer=adamw learning_rate=0.0001" in told
    assert {path.name for path in tmp_path.iterdir()} == {"scores.png", "ledger.safetensors", "graft.safetensors"}
