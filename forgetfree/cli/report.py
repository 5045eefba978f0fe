"""``forgetfree report``: tables over what other commands wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from forgetfree.cli.usage import Debug, lacks
from forgetfree.errors import ReportError, UsageError

Format = Literal["rich", "markdown", "json", "html", "latex"]


def command(
    *paths: Annotated[Path, Parameter(name="DIR", help="what run, graft or experiment wrote")],
    draw: Annotated[
        Path | None, Parameter(metavar="DIR", help="of experiments: also draw their figures into DIR")
    ] = None,
    format: Annotated[Format, Parameter(help="how to write the tables")] = "rich",
    debug: Debug = False,
) -> None:
    """Print the tables."""
    from forgetfree.results.reports import command_of, render
    from forgetfree.results.run_results import load_results, merge

    if not paths:
        raise lacks("forgetfree report", ["DIR"])
    for path in paths:
        if not path.exists():
            raise ReportError(f"{path} does not exist. Give what forgetfree run, graft or experiment wrote.")
    wrote = {command_of(path) for path in paths}
    if len(wrote) > 1:
        raise UsageError(f"Results of {' and '.join(sorted(wrote))} have no table in common. Report them one by one.")
    if draw and "experiment" not in wrote:
        raise UsageError("--draw is for the results of experiments: others have no figure. Leave it out.")
    if wrote == {"run"}:
        print(render(merge([load_results(path) for path in paths]), format))
        return
    if format == "json":
        a = "an experiment" if "experiment" in wrote else "a graft"
        raise UsageError(f"--format json is for runs of strategies: {a}'s results.json is JSON already. Give another.")
    if "experiment" in wrote:
        _report_experiments(paths, format, draw)
    else:
        _report_grafts(paths, format)


def _report_experiments(paths: Sequence[Path], format: Format, draw: Path | None) -> None:
    from forgetfree.jobs.environment import make_directory
    from forgetfree.jobs.experiments import draw_outcome, load_experiment_results, outcome
    from forgetfree.results.rendering import render_page

    all_results = [load_experiment_results(path) for path in paths]
    if draw:
        make_directory(draw, "--draw")
    for results in all_results:
        print(render_page(outcome(results), format))
        if draw:
            draw_outcome(results, draw)


def _report_grafts(paths: Sequence[Path], format: Format) -> None:
    from forgetfree.results.graft_report import lay_out_graft, load_graft_results
    from forgetfree.results.rendering import render_page

    for path in paths:
        print(render_page(lay_out_graft(load_graft_results(path)), format))
