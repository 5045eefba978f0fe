"""``forgetfree convert``, and the grafts that it takes: from files, the hub, runs and ledgers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from forgetfree.cli.hub import local_path, reach_hub
from forgetfree.cli.usage import Debug
from forgetfree.cli.use import Seed, Strategy
from forgetfree.display import counted, escaped, listed
from forgetfree.errors import UsageError
from forgetfree.jobs.running.environment import quiet_libraries
from forgetfree.output import check_empty, check_new_file
from forgetfree.terminal import tell

if TYPE_CHECKING:
    from forgetfree.ledger.graft import Graft


def convert(
    source: Annotated[
        str, Parameter(name="GRAFT|DIR", help="a graft, a run or a ledger; or the directory of a SHiRA adapter")
    ],
    /,
    *,
    to: Annotated[
        Literal["shira", "graft"], Parameter(help="shira: an adapter of PEFT, from a graft; graft: the way back")
    ],
    task: Annotated[str | None, Parameter(metavar="NAME", help="of a run or a ledger (default: the only one)")] = None,
    strategy: Strategy = None,
    seed: Seed = None,
    model: Annotated[
        str | None, Parameter(metavar="NAME|DIR", help="the base model (default: by the name that the file has for it)")
    ] = None,
    drop_others: Annotated[
        bool, Parameter(help="leave out what SHiRA cannot hold: all but weights of linear layers")
    ] = False,
    out: Annotated[Path, Parameter(metavar="PATH", help="the directory, or the graft's file, to write; must be new")],
    debug: Debug = False,
) -> None:
    """Write a graft as an adapter of PEFT, or an adapter as a graft."""
    quiet_libraries()
    from forgetfree.serve.apply import base_model_name
    from forgetfree.serve.shira import from_shira, to_shira

    if to == "graft":
        if drop_others:
            raise UsageError("--drop-others goes with --to shira: a graft holds all that an adapter has. Leave it out.")
        if task or strategy or seed is not None:
            raise UsageError(
                "--task, --strategy and --seed are for --to shira: an adapter is of one task. Leave them out."
            )
        check_new_file(out)
        reach_hub(model)
        graft = from_shira(source, model)
        graft.save(out)
        print(escaped(f"{out}: a graft of {counted(len(graft.region), 'entry')}."))
        if graft.origin is None:
            tell(
                "note: the adapter does not say for which task it is, so the graft has no readout: Graft.apply_ puts it in."
            )
        return
    check_empty(out)
    grafts, run_model = grafts_of([source], [task] if task else [], seed, strategy)
    if len(grafts) > 1:
        tasks = [graft.origin.task.name for graft in grafts.values() if graft.origin]
        raise UsageError(f"{source} holds {', '.join(tasks)}. Give one of them by --task.")
    (graft,) = grafts.values()
    name = base_model_name(model or run_model, graft)
    reach_hub(name)
    made = to_shira(graft, name, out, drop_others=drop_others)
    print(
        escaped(
            f"{out}: a SHiRA adapter, r = {made.rank}, of {made.entries:,} entries and {made.padding:,} with Δ = 0."
        )
    )
    if made.dropped:
        print(escaped(f"note: {sum(made.dropped.values()):,} entries are left out, in {listed(made.dropped, 8)}."))
    if made.rounded:
        print(f"note: {made.rounded:,} values are no θ_pre + Δ in float32, and are off by up to {made.error:.1e}.")


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
    from forgetfree.tasks import chosen_version

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
        for name in dict.fromkeys(chosen_version(task, ledger.tasks) for task in tasks or ledger.tasks):
            if name in ledger.tasks:
                grafts[f"{name} of {source}"] = ledger.graft(name)
                chosen.add(name)
        if ledger.composition == "union" and len(ledger.tasks) > 1:
            tell(f"note: in {file} each task has the entries of the tasks before it, too.")
    if tasks and not known:
        raise UsageError("--task is for a run or a ledger, and a graft is of one task. Leave it out.")
    if missing := [task for task in tasks if chosen_version(task, known) not in chosen]:
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
