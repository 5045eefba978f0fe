"""Makes docs/walkthrough.ipynb of docs/walkthrough.md: `python docs/notebook.py`. Its cells have no outputs."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat

PAGE = Path(__file__).with_name("walkthrough.md")


def notebook() -> str:
    """The page as a notebook: its blocks of Python are cells, and what stands between them is text."""
    cells = []
    for text, code in re.findall(
        r"(.*?)(?:^```python\n(.*?)^```\n|\Z)", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S
    ):
        if text.strip():
            cells.append(nbformat.v4.new_markdown_cell(text.strip()))
        if code.strip():
            cells.append(nbformat.v4.new_code_cell(code.strip()))
    for i, cell in enumerate(cells):
        cell["id"] = f"cell-{i}"  # not drawn at random: the same page is the same file
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.writes(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})) + "\n"


if __name__ == "__main__":
    PAGE.with_suffix(".ipynb").write_text(notebook(), encoding="utf-8")
