"""The page of a run: the outcome in a sentence, figures, tables, and how to repeat it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from forgetfree.errors import RunError
from forgetfree.options import typed
from forgetfree.results.config_file import PLACES, load_run, located, of_each
from forgetfree.results.inline import style_sheet
from forgetfree.results.rendering import Page, Table, render_html
from forgetfree.results.run_figures import sections_of
from forgetfree.results.run_results import Comparison


def render_run_page(comparison: Comparison, page: Page) -> str:
    """Return the page as HTML.

    Args:
        comparison: what the figures show.
        page: its tables.
    """
    tables, notes = list[Table](), list[str]()
    for source in comparison.sources:
        try:
            tables += _configuration(Path(source))
        except RunError as error:
            notes.append(f"The configuration of {source} is left out: {error}")
    page = replace(page, notes=(*page.notes, *notes), tables=(*page.tables, *tables))
    return render_html(page, sections_of(comparison), style_sheet())


def _configuration(source: Path) -> Iterator[Table]:
    """Yield a table of what a run was asked for and ran with, where its config.json is there.

    Raises:
        RunError: it is damaged.
    """
    directory = source.parent if source.suffix == ".json" else source
    if not (directory / "config.json").exists():
        return
    config = load_run(directory)
    asked: Mapping[str, Any] = config["run"]
    rows = [("command to repeat it", command_of(asked, directory))]
    named = ((key if key == "stream" else f"--{key.replace('_', '-')}", value) for key, value in asked.items())
    rows += [(name, typed(value)) for name, value in named if value not in (None, "", [], {})]
    rows += [(f"version of {name}", typed(value)) for name, value in config.get("versions", {}).items()]
    machine = config.get("machine")
    rows += [(name, typed(value)) for name, value in machine.items()] if isinstance(machine, dict) else []
    yield Table(f"Configuration of {source}", ("option", "value"), tuple(rows))


def command_of(asked: Mapping[str, Any], directory: Path) -> str:
    """Return the command that repeats a run, from its section of config.json.

    Args:
        asked: the section.
        directory: where the config.json lies: places are relative to it.
    """
    words = ["forgetfree", "run", asked["stream"]]
    for key, value in asked.items():
        flag = f"--{key.replace('_', '-')}"
        if isinstance(value, Mapping):
            held = of_each(located, value, directory) if key in PLACES else value
            words += [word for name, one in held.items() for word in (flag, f"{name}={typed(one)}")]
        elif isinstance(value, list):
            held = of_each(located, value, directory) if key in PLACES else value
            words += [word for each in held for word in (flag, str(each))]
        elif value is True:
            words.append(flag)
        elif key != "stream" and value not in (None, ""):
            words += [flag, located(value, directory) if key in ("model", "data") else str(value)]
    return " ".join(map(shlex.quote, [*words, "--out", os.path.join("runs", "again")]))
