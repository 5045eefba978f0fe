"""``forgetfree graft``: find a task's region, and write it as one small file."""

from __future__ import annotations

import sys
from pathlib import Path

from forgetfree.cli.job import Execution, begun, command_of
from forgetfree.cli.words import print_recipe, say
from forgetfree.display import escaped
from forgetfree.errors import ForgetfreeError
from forgetfree.jobs.graft_config import GraftConfig


def _graft(execution: Execution[GraftConfig]) -> int:
    """Graft, then print the report and the files."""
    from forgetfree.cli.progress import make_monitor
    from forgetfree.jobs.graft_run import run_graft
    from forgetfree.results.graft_report import lay_out_graft
    from forgetfree.results.rendering import render_page

    config, out = execution.config, Path(execution.config.out)
    say(f"Grafting {config.task} into {config.out}")
    print_recipe(config.model, config.recipe())
    with begun(execution, config.model, _held_grafts, passed=(ForgetfreeError, OSError)):
        results = run_graft(
            config,
            resume=execution.resume,
            jobs=execution.jobs or 1,
            monitor=lambda title: make_monitor(title, sys.stderr),
            debug=execution.debug,
        )
    print(render_page(lay_out_graft(results), "rich"))
    for graft in results["grafts"]:
        print(escaped(f"Graft: {out / graft['file']} ({graft['bytes']:,} bytes)"))
    print(escaped(f"Report: {out / 'report.md'}"))
    return 0


command = command_of(GraftConfig, _graft)


def _held_grafts(out: Path) -> str:
    """Return what a graft that was cut short has left behind."""
    names = ", ".join(sorted(path.name for path in out.glob("*.safetensors")))
    return f"{out} holds {names or 'no graft yet'}; --cache {out / 'fine-tuned'} takes up the models fine-tuned so far."
