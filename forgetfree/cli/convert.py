"""``forgetfree convert``: a graft as an adapter of PEFT, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from forgetfree.cli.grafts import grafts_of
from forgetfree.cli.hub import go_offline_if_cut_off, needs_hub
from forgetfree.cli.usage import Debug
from forgetfree.cli.use import Seed, Strategy
from forgetfree.cli.words import check_new_file, say
from forgetfree.display import counted, escaped
from forgetfree.errors import UsageError
from forgetfree.jobs.running.environment import quiet_libraries


def command(
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
    """Convert."""
    quiet_libraries()
    from forgetfree.serve.apply import base_model_name, check_free
    from forgetfree.serve.shira import from_shira, to_shira

    if to == "graft":
        if drop_others:
            raise UsageError("--drop-others goes with --to shira: a graft holds all that an adapter has. Leave it out.")
        if task or strategy or seed is not None:
            raise UsageError(
                "--task, --strategy and --seed are for --to shira: an adapter is of one task. Leave them out."
            )
        check_new_file(out)
        _reach(model)
        graft = from_shira(source, model)
        graft.save(out)
        print(escaped(f"{out}: a graft of {counted(len(graft.region), 'entry')}."))
        if graft.origin is None:
            say(
                "note: the adapter does not say for which task it is, so the graft has no readout: Graft.apply_ puts it in."
            )
        return
    check_free(out)
    grafts, named = grafts_of([source], [task] if task else [], seed, strategy)
    if len(grafts) > 1:
        tasks = [graft.origin.task.name for graft in grafts.values() if graft.origin]
        raise UsageError(f"{source} holds {', '.join(tasks)}. Give one of them by --task.")
    (graft,) = grafts.values()
    name = base_model_name(model or named, graft)
    _reach(name)
    made = to_shira(graft, name, out, drop_others=drop_others)
    print(
        escaped(
            f"{out}: a SHiRA adapter, r = {made.rank}, of {made.entries:,} entries and {made.padding:,} with Δ = 0."
        )
    )
    if made.dropped:
        names = [*made.dropped]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        print(escaped(f"note: {sum(made.dropped.values()):,} entries are left out, in {', '.join(names[:8])}{more}."))
    if made.rounded:
        print(f"note: {made.rounded:,} values are no θ_pre + Δ in float32, and are off by up to {made.error:.1e}.")


def _reach(model: str | None) -> None:
    if model and needs_hub(model):
        go_offline_if_cut_off()
