"""``forgetfree graft``: find a task's region, and write it as one small file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.cli.hub import go_offline_if_cut_off, needs_hub
from forgetfree.cli.shared import free_directory, print_recipe, say, settings_of
from forgetfree.display import escaped
from forgetfree.errors import UsageError
from forgetfree.jobs.environment import quiet_libraries

if TYPE_CHECKING:
    from forgetfree.cli.shared import Commands, Parser


def add(commands: Commands, common: Parser) -> None:
    """The command and its arguments."""
    graft = commands.add_parser("graft", parents=[common], help="find a task's region, and write it as one small file")
    graft.set_defaults(command=command)
    graft.add_argument("task", metavar="TASK", help="a registered task, or one under --data DIR")
    graft.add_argument(
        "--model", default="minilm", metavar="NAME|DIR", help="minilm (default), a directory, or a hub name"
    )
    graft.add_argument("--data", metavar="hub|demo|DIR", help="default: $FORGETFREE_DATA, else hub")
    graft.add_argument("--readout", default="auto", choices=("auto", "prompt", "linear", "causal"))
    graft.add_argument("--shots", type=int, metavar="K", help="training rows per label (default: all)")
    graft.add_argument("--steps", type=int, metavar="N", help="updates of fine-tuning (default: the paper's 16·n·k)")
    graft.add_argument(
        "--sparsity",
        type=float,
        action="append",
        metavar="F",
        help="share of parameters the region may have; may be given several times",
    )
    graft.add_argument(
        "--base",
        metavar="movement|empty|random|fisher|bias|FILE",
        help="γ_base of eq. 4, or a graft whose region it is; --set mask_steps=0 grafts it as it is",
    )
    graft.add_argument(
        "--fine-tuned",
        metavar="DIR",
        help="a model fine-tuned from --model, in Hugging Face layout; none is trained then",
    )
    graft.add_argument("--seed", type=int, action="append", metavar="S", help="may be given several times (default: 0)")
    graft.add_argument(
        "--set",
        action="append",
        metavar="key=value",
        help="any option of fine-tuning and localizing: see grafting-continual in 'forgetfree list strategies --verbose'",
    )
    graft.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    graft.add_argument("--jobs", type=int, default=1, metavar="N", help="seeds at a time (default: 1)")
    graft.add_argument("--resume", action="store_true", help="continue in --out; finished seeds are kept")
    graft.add_argument("--out", metavar="DIR", help="where to write (default: runs/graft-TASK)")


def command(options: argparse.Namespace) -> int:
    """Graft, then print the report and the files."""
    from forgetfree.cli.perform import execution, perform
    from forgetfree.data.sources import default_data
    from forgetfree.jobs.graft_config import GraftConfig

    config = GraftConfig(
        task=options.task,
        model=options.model,
        data=options.data or default_data(),
        readout=options.readout,
        shots=options.shots,
        steps=options.steps,
        seeds=tuple(options.seed or (0,)),
        sparsities=tuple(options.sparsity or ()),
        base=options.base,
        fine_tuned=options.fine_tuned,
        settings=settings_of(options.set),
        device=options.device,
        out=options.out or free_directory(f"graft-{options.task}"),
    )
    if options.resume and not options.out:
        raise UsageError("--resume needs --out DIR. Give the graft to continue.")
    quiet_libraries()
    if needs_hub(config.model, config.data):
        go_offline_if_cut_off()
    from forgetfree.jobs.graft_run import run_graft

    say(f"Grafting {config.task} into {config.out}")
    print_recipe(config.model, config.recipe())
    how = execution(options.resume, options.jobs, options.debug)
    return perform(
        lambda: run_graft(config, **how),
        lambda results: _show(results, Path(config.out)),
        config.out,
        config.settings.get("cache"),
        options.debug,
    )


def _show(results: dict[str, Any], out: Path) -> None:
    from forgetfree.results.graft_report import lay_out_graft
    from forgetfree.results.rendering import render_page

    if results["rows"]:
        print(render_page(lay_out_graft(results), "rich"))
        for graft in results["grafts"]:
            print(escaped(f"Graft: {out / graft['file']} ({graft['bytes']:,} bytes)"))
        print(escaped(f"Report: {out / 'report.md'}"))
