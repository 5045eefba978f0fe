"""``forgetfree report``: tables over what other commands wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from forgetfree.cli.usage import AsJson, Debug, lacks
from forgetfree.errors import ReportError, UsageError

Format = Literal["rich", "markdown", "json", "html", "latex", "csv"]


def command(
    *paths: Annotated[Path, Parameter(name="DIR", help="what run or graft wrote")],
    format: Annotated[Format | None, Parameter(help="how to write the tables (default: rich)")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Print the tables."""
    if not paths:
        raise lacks("forgetfree report", ["DIR"])
    if as_json and format not in (None, "json"):
        raise UsageError(f"--json and --format {format} are both given. Give one of them.")
    output_format: Format = "json" if as_json else format or "rich"
    for path in paths:
        if not path.exists():
            raise ReportError(f"{path} does not exist. Give what forgetfree run or graft wrote.")
    _print(_of_runs(paths, output_format), output_format)


def _of_runs(paths: Sequence[Path], output_format: Format) -> str:
    """Return the tables by task; where other tasks, rows or models forbid them, a leaderboard."""
    from forgetfree.results.comparison import differing, merge, one_file
    from forgetfree.results.report.run_report import render, render_leaderboard
    from forgetfree.results.stored import load_run_results

    runs = [load_run_results(path) for path in paths]
    if output_format == "csv":
        return one_file(runs)
    return render_leaderboard(runs, output_format) if differing(runs) else render(merge(runs), output_format)


def _print(text: str, format: str) -> None:
    print(text, end="" if format in ("csv", "json") else "\n")  # what stands in a file
