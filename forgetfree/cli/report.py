"""``forgetfree report``: print the results of runs as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from forgetfree.cli.arguments import Debug, check_there
from forgetfree.cli.refusal import lacks

Format = Literal["rich", "markdown", "json", "html", "latex", "csv"]


def command(
    *paths: Annotated[
        Path,
        Parameter(
            name="DIR", validator=check_there, help="directories that run or graft wrote, or csv files from report"
        ),
    ],
    format: Annotated[Format, Parameter(help="output format (default: rich)")] = "rich",
    debug: Debug = False,
) -> None:
    """Print the tables."""
    from forgetfree.results.report.run_report import render
    from forgetfree.results.table import load_results

    if not paths:
        raise lacks("forgetfree report", ["DIR"])
    print(render(load_results(*paths), format), end="" if format in ("csv", "json") else "\n")
