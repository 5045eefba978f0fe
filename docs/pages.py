"""Writes what the site is built from: docs/, pages of other folders, and pages made from the code. See mkdocs.yml."""

from __future__ import annotations

import importlib
import os
import posixpath
import re
import shutil
from collections.abc import Iterable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import gallery

from forgetfree.cli import app, main
from forgetfree.json_file import parse_json

ROOT = Path(__file__).parent.parent
#: Pages that lie elsewhere, for a code host shows them there.
ELSEWHERE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "claims.md": "benchmarks/claims.md",
}
#: The pages of the API: what a page is about, and its modules.
API = {
    "forgetfree": ("The public names of `import forgetfree`. Heavy packages load only when needed.", ["forgetfree"]),
    "strategy": (
        "The contract of a strategy, and the adapter for Avalanche's plugins. [Your own plug-in](../plug-in.md) explains both.",
        [f"forgetfree.continual.{name}" for name in ("strategy", "strategy_parts", "adapter")],
    ),
    "kinds": (
        "The contract of a kind of task: how its rows are read, predicted and scored.",
        ["forgetfree.kinds.kind", "forgetfree.data.rows"],
    ),
    "metrics": (
        "From predictions to scores, and from scores to the metrics of a stream.",
        [f"forgetfree.results.{name}" for name in ("metrics", "learning_matrix", "answers")],
    ),
    "core": (
        "Regions, grafts and masks on any `torch.nn.Module` (paper, section 2).",
        [f"forgetfree.core.{name}" for name in ("parameters", "regions", "selection", "mask", "trained")],
    ),
    "ledger": (
        "Which task owns which entry, and its value.",
        [f"forgetfree.ledger.{name}" for name in ("ledger", "switch", "graft")],
    ),
    "testing": ("Checks for a strategy or a kind of your own.", ["forgetfree.testing"]),
}
#: What `forgetfree list` prints, in the order of the page.
LISTS = ("strategies", "streams", "tasks", "kinds", "metrics", "models")


def write(pages: Path) -> None:
    """Write all that the site is made from: what docs/ has, and what it has not."""
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("*.py", "__pycache__", "gallery.html"))
    sources = {path.relative_to(pages).as_posix(): f"docs/{path.relative_to(pages)}" for path in pages.rglob("*.md")}
    sources |= ELSEWHERE
    for name, source in sources.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        (pages / name).write_text(relinked(text, name, source, sources), encoding="utf-8")
    (pages / "gallery.html").write_text(gallery.page(gallery.results()), encoding="utf-8")
    (pages / "api").mkdir()
    made = {"command-line": command_line(), "names": names()} | {f"api/{name}": text for name, text in api().items()}
    for name, text in made.items():
        (pages / f"{name}.md").write_text(text, encoding="utf-8")


def relinked(text: str, name: str, source: str, sources: dict[str, str]) -> str:
    """Let links lead to pages of the site; one to a file that the site has not becomes its text."""
    places = {path: page for page, path in sources.items()}
    titles = {
        page: (ROOT / path).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        for page, path in sources.items()
    }

    def linked(match: re.Match[str]) -> str:
        label, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        page = places.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if label == target or label.endswith(".md"):  # a file's name says little here
            label = titles.get(page or "", label)
        return f"[{label}]({posixpath.relpath(page, posixpath.dirname(name) or '.')}{anchor})" if page else label

    return re.sub(r"\[([^\[\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)", linked, text)


def command_line() -> str:
    """All commands with their flags, as ``--help`` tells them."""
    text = app.generate_docs(output_format="markdown")
    text = re.sub(r"## Table of Contents\n.*?(?=\*\*Commands)", "", text, count=1, flags=re.S)
    text = re.sub(r"forgetfree (\w+) \1 ", r"forgetfree \1 ", text)
    return text.replace("# forgetfree\n", "# Command line\n", 1)


def names() -> str:
    """What there is by name: each list of ``forgetfree list``, strategies with their options."""
    parts = ["# Names and options", "This page shows the output of `forgetfree list`. Plug-ins add to it."]
    for what in LISTS:
        parts.append(f"## {what.capitalize()}")
        rows = listed(what)
        if what == "strategies":
            common = [option for option in rows[0]["options"] if all(option in row["options"] for row in rows)]
            parts += ["Every strategy has these options:", options(common)]
            for row in rows:
                own = [option for option in row["options"] if option not in common]
                forgets = "Forget-free." if row["forget_free"] else "May forget."
                parts += [
                    f"### {row['name']}",
                    f"{sentence(row['summary'])} {forgets}",
                    *([options(own)] if own else []),
                ]
        else:
            parts.append(table(list(rows[0]), ([shown(value) for value in row.values()] for row in rows)))
    return "\n\n".join(parts) + "\n"


def listed(what: str) -> list[dict[str, Any]]:
    """What ``forgetfree list`` knows of each name."""
    verbose = ["--verbose"] if what == "strategies" else []
    with redirect_stdout(StringIO()) as told:
        main(["list", what, "--json", *verbose])
    rows: list[dict[str, Any]] = parse_json(told.getvalue())
    return rows


def sentence(words: str) -> str:
    """The words with a capital and a full stop."""
    return f"{words[0].upper()}{words[1:]}."


def options(rows: list[dict[str, Any]]) -> str:
    """A table of options of a strategy."""
    cells = ([f"`{row['name']}`", f"`{row['default']}`", row["type"], row["help"]] for row in rows)
    return table(["option", "default", "type", "meaning"], cells)


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    """A table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def shown(value: object) -> str:
    """A cell."""
    if isinstance(value, dict):
        return ", ".join(f"`{key}={each}`" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "no", None: "–"}[value]
    return str(value)


def api() -> dict[str, str]:
    """The pages of the API: a directive of mkdocstrings for each public name, where it is first shown."""
    pages, seen = {}, dict[str, str]()
    for page, (about, modules) in sorted(API.items(), key=lambda item: item[0] == "forgetfree"):
        parts = [f"# {page}" if page == "forgetfree" else f"# {page.capitalize()}", about]
        for module in modules:
            if len(modules) > 1:
                parts.append(f"## `{module}`")
            for name in public(module):
                home = str(getattr(getattr(importlib.import_module(module), name), "__module__", module))
                full = f"{home if home.startswith('forgetfree.') else module}.{name}"
                if full in seen:
                    parts.append(f"`{name}`: [{seen[full]}]({seen[full]}.md#{full})")
                else:
                    seen[full] = page
                    parts.append(f"::: {full}")
        pages[page] = "\n\n".join(parts) + "\n"
    return pages


def public(module: str) -> list[str]:
    """What a module's ``__all__`` names, else its own functions and classes without an underscore."""
    there = importlib.import_module(module)
    names = getattr(there, "__all__", None) or [
        name
        for name, value in vars(there).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module
    ]
    return [name for name in names if name != "__version__"]


if __name__ == "__main__":
    write(Path(os.environ.get("FORGETFREE_PAGES", ROOT / "build" / "pages")))
