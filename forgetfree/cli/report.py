"""``forgetfree report``: tables over what runs measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from forgetfree.cli.arguments import AsJson, Debug, check_there
from forgetfree.cli.refusal import lacks
from forgetfree.errors import UsageError

Format = Literal["rich", "markdown", "json", "html", "csv"]


def command(
    *paths: Annotated[Path, Parameter(name="DIR", validator=check_there, help="what run or graft wrote")],
    format: Annotated[Format | None, Parameter(help="how to write the tables (default: rich)")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Print the tables."""
    from forgetfree.results.report.run_report import render
    from forgetfree.results.table import load_results

    if not paths:
        raise lacks("forgetfree report", ["DIR"])
    if as_json and format not in (None, "json"):
        raise UsageError(f"--json and --format {format} are both given. Give one of them.")
    output_format = "json" if as_json else format or "rich"
    print(render(load_results(*paths), output_format), end="" if output_format in ("csv", "json") else "\n")
