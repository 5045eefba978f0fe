"""The grafts that a command is given: files, a place on the hub, or tasks of a run or a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from forgetfree.cli.hub import local_path
from forgetfree.cli.words import say
from forgetfree.errors import UsageError

if TYPE_CHECKING:
    from forgetfree.ledger.graft import Graft

Tasks = Annotated[
    tuple[str, ...],
    Parameter(name="--task", metavar="NAME", help="of a run or a ledger (default: all), may be given several times"),
]


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
    from forgetfree.tasks import chosen_version

    grafts: dict[str, Graft] = {}
    found, known = set[str](), list[str]()
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
        for name in dict.fromkeys(chosen_version(task, ledger.tasks) for task in tasks or ledger.tasks):
            if name in ledger.tasks:
                grafts[f"{name} of {source}"] = ledger.graft(name)
                found.add(name)
        if ledger.composition == "union" and len(ledger.tasks) > 1:
            say(f"note: in {file} each task has the entries of the tasks before it, too.")
    if tasks and not known:
        raise UsageError("--task is for a run or a ledger, and a graft is of one task. Leave it out.")
    if missing := [task for task in tasks if chosen_version(task, known) not in found]:
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
        say(f"Taking the grafts from {file}; --strategy and --seed choose another.")
    return file
