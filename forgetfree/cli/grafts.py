"""``forgetfree merge``, and the grafts that it takes: from files, the hub, runs and ledgers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from forgetfree.cli.hub import local_path, reach_hub
from forgetfree.cli.usage import Debug
from forgetfree.cli.use import Seed, Strategy
from forgetfree.display import escaped
from forgetfree.errors import UsageError
from forgetfree.jobs.running.environment import quiet_libraries
from forgetfree.output import check_new_file
from forgetfree.terminal import tell

if TYPE_CHECKING:
    from forgetfree.ledger.graft import Graft

Tasks = Annotated[
    tuple[str, ...],
    Parameter(name="--task", metavar="NAME", help="of a run or a ledger (default: all), may be given several times"),
]


def merge(
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
    """Write one ledger of several grafts."""
    quiet_libraries()
    check_new_file(out)
    from forgetfree.serve.apply import base_model_name
    from forgetfree.serve.merge import merge_grafts

    grafts, run_model = grafts_of(list(dict.fromkeys(sources)), task, seed, strategy)
    if len(grafts) < 2:
        raise UsageError(f"Merging takes two different grafts or more, got {len(grafts)}. Give one a task.")
    name = base_model_name(model or run_model, *grafts.values())
    reach_hub(name)
    ledger = merge_grafts(grafts, by, model=name, weight=weight, density=density)
    ledger.save(out)
    entries = sum(len(graft.region) for graft in grafts.values())
    print(
        escaped(
            f"{out}: {', '.join(ledger.tasks)} merged by {by}: {len(ledger.owned()):,} entries of {entries:,} in the grafts, "
            f"{out.stat().st_size:,} bytes."
        )
    )


# -- Which grafts ----------------------------------------------------------------------------------------


def grafts_of(
    sources: Sequence[str], tasks: Sequence[str], seed: int | None, strategy: str | None
) -> tuple[dict[str, Graft], str | None]:
    """Return grafts by what messages call them, and the name of the base model, where a run says it.

    Args:
        sources: files of grafts or ledgers, directories of ``forgetfree graft`` or ``run``, ``hf://OWNER/NAME``.
        tasks: of runs and ledgers; empty: all.
        seed: of runs.
        strategy: of runs.

    Raises:
        UsageError: none holds a task, or the options are for runs and there is none.
        GraftError, LedgerError, RunError: something is damaged or missing.
    """
    from forgetfree.ledger import Ledger
    from forgetfree.ledger.file import FILE as LEDGER_FILE
    from forgetfree.ledger.graft import FILE as GRAFT_FILE
    from forgetfree.ledger.graft import Graft, find_graft
    from forgetfree.results.config_file import check_whole, load_run, located
    from forgetfree.results.unit_folder import check_own

    grafts: dict[str, Graft] = {}
    chosen, known = set[str](), list[str]()
    model: str | None = None
    runs = False
    for source in sources:
        path = local_path(source)
        if is_run := path.is_dir() and any(path.glob("*/seed-*")):
            file, runs = _ledger_of(path, seed, strategy), True
            model = model or located(load_run(path)["model"]["name"], path)
        else:
            check_whole(path)
            file = find_graft(path)
        if not is_run and not LEDGER_FILE.is_at(file):
            if file.is_file() and file.suffix != ".safetensors" and not GRAFT_FILE.is_at(file):
                raise UsageError(
                    f"{source} is neither a graft nor a ledger. Give the file of one, the directory of a run, or what "
                    "forgetfree graft wrote."
                )
            grafts[source] = Graft.load(file)
            check_own(file)
            continue
        check_own(file)
        ledger = Ledger.load(file)
        known += ledger.tasks
        for name in dict.fromkeys(tasks or ledger.tasks):
            if name in ledger.tasks:
                grafts[f"{name} of {source}"] = ledger.graft(name)
                chosen.add(name)
        if ledger.composition == "union" and len(ledger.tasks) > 1:
            tell(f"note: in {file} each task has the entries of the tasks before it, too.")
    if tasks and not known:
        raise UsageError("--task is for a run or a ledger, and a graft is of one task. Leave it out.")
    if missing := [task for task in tasks if task not in chosen]:
        raise UsageError(f"There is no task {', '.join(missing)}. Give one of these: {', '.join(known)}.")
    if not runs and (seed is not None or strategy is not None):
        raise UsageError("--seed and --strategy are for the directory of a run. Leave them out.")
    return grafts, model


def _ledger_of(run: Path, seed: int | None, strategy: str | None) -> Path:
    from forgetfree.serve.source import LEDGER, saved_file

    file = saved_file(run, seed, strategy)
    if file.name != LEDGER:
        raise UsageError(
            f"{file.parts[-3]} kept no ledger, so {run} has no grafts of it. Give a run of grafting-continual, or another "
            "strategy with a ledger, or make grafts by `forgetfree graft`."
        )
    if strategy is None:
        tell(f"Taking the grafts from {file}; --strategy and --seed choose another.")
    return file
