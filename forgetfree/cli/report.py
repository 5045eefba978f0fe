"""``forgetfree report``: tables over what other commands wrote."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forgetfree.errors import ReportError, UsageError

if TYPE_CHECKING:
    from forgetfree.cli.shared import Commands, Parser


def add(commands: Commands, common: Parser) -> None:
    """The command and its arguments."""
    report = commands.add_parser("report", parents=[common], help="tables over runs")
    report.set_defaults(command=command)
    report.add_argument("directories", nargs="+", metavar="DIR", help="what run, graft or experiment wrote")
    report.add_argument("--draw", metavar="DIR", help="of experiments: also draw their figures into DIR")
    report.add_argument("--format", default="rich", choices=("rich", "markdown", "json", "html", "latex"))


def command(options: argparse.Namespace) -> int:
    """Print the tables."""
    from forgetfree.results.reports import command_of, render
    from forgetfree.results.run_results import load_results, merge

    paths = [Path(directory) for directory in options.directories]
    for path in paths:
        if not path.exists():
            raise ReportError(f"{path} does not exist. Give what forgetfree run, graft or experiment wrote.")
    wrote = {command_of(path) for path in paths}
    if len(wrote) > 1:
        raise UsageError(f"Results of {' and '.join(sorted(wrote))} have no table in common. Report them one by one.")
    if "experiment" in wrote:
        return _report_experiments(paths, options)
    if options.draw:
        raise UsageError("--draw is for the results of experiments: others have no figure. Leave it out.")
    if "graft" in wrote:
        return _report_grafts(paths, options)
    print(render(merge([load_results(path) for path in paths]), options.format))
    return 0


def _report_experiments(paths: Sequence[Path], options: argparse.Namespace) -> int:
    from forgetfree.jobs.environment import make_directory
    from forgetfree.jobs.experiments import draw_outcome, load_experiment_results, outcome
    from forgetfree.results.rendering import render_page

    all_results = [load_experiment_results(path) for path in paths]
    if options.format == "json":
        raise UsageError(
            "--format json is for runs of strategies: an experiment's results.json is JSON already. Give another."
        )
    if options.draw:
        make_directory(Path(options.draw), "--draw")
    for results in all_results:
        print(render_page(outcome(results), options.format))
        if options.draw:
            draw_outcome(results, Path(options.draw))
    return 0


def _report_grafts(paths: Sequence[Path], options: argparse.Namespace) -> int:
    from forgetfree.results.graft_report import lay_out_graft, load_graft_results
    from forgetfree.results.rendering import render_page

    if options.format == "json":
        raise UsageError(
            "--format json is for runs of strategies: a graft's results.json is JSON already. Give another."
        )
    for path in paths:
        print(render_page(lay_out_graft(load_graft_results(path)), options.format))
    return 0
