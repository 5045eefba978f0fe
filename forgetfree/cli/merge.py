"""``forgetfree merge``: one model for the tasks of several grafts, or of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from forgetfree.cli.grafts import Tasks, grafts_of
from forgetfree.cli.hub import go_offline_if_cut_off, needs_hub
from forgetfree.cli.usage import Debug
from forgetfree.cli.use import Seed, Strategy
from forgetfree.cli.words import check_new_file
from forgetfree.display import escaped
from forgetfree.errors import UsageError
from forgetfree.jobs.running.environment import quiet_libraries


def command(
    *sources: Annotated[
        str, Parameter(name="GRAFT|DIR", help="grafts, runs or ledgers, which hold two tasks or more together")
    ],
    task: Tasks = (),
    strategy: Strategy = None,
    seed: Seed = None,
    by: Annotated[
        Literal["union", "task-arithmetic", "ties", "stitch"],
        Parameter(
            help="the rule (default: stitch): where grafts overlap, the first one's value, the weighted sum of the "
            "changes, the mean of those of one sign, or the mean of the values"
        ),
    ] = "stitch",
    weight: Annotated[
        float | None, Parameter(metavar="λ", help="of task-arithmetic (default: 0.4) and ties (default: 1)")
    ] = None,
    density: Annotated[
        float | None,
        Parameter(metavar="K", help="of ties: the share of all entries that each graft keeps (default: 0.2)"),
    ] = None,
    model: Annotated[
        str | None, Parameter(metavar="NAME|DIR", help="the base model (default: by the name the grafts have for it)")
    ] = None,
    out: Annotated[Path, Parameter(metavar="FILE", help="the ledger to write; must be new")],
    debug: Debug = False,
) -> None:
    """Write the ledger."""
    quiet_libraries()
    check_new_file(out)
    from forgetfree.serve.apply import base_model_name
    from forgetfree.serve.merge import merge_grafts

    grafts, named = grafts_of(list(dict.fromkeys(sources)), task, seed, strategy)
    if len(grafts) < 2:
        raise UsageError(f"Merging takes two different grafts or more, got {len(grafts)}. Give one a task.")
    name = base_model_name(model or named, *grafts.values())
    if needs_hub(name):
        go_offline_if_cut_off()
    ledger = merge_grafts(grafts, by, model=name, weight=weight, density=density)
    ledger.save(out)
    held = sum(len(graft.region) for graft in grafts.values())
    print(
        escaped(
            f"{out}: {', '.join(ledger.tasks)} merged by {by}: {len(ledger.owned()):,} entries of {held:,} in the grafts, "
            f"{out.stat().st_size:,} bytes."
        )
    )
