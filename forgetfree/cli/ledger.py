"""``forgetfree ledger``: look into ledgers, check, change or merge them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from forgetfree.cli.hub import go_offline_if_cut_off, needs_hub
from forgetfree.cli.usage import AsJson, Debug
from forgetfree.display import counted, escaped, json_text
from forgetfree.errors import LedgerError

if TYPE_CHECKING:
    from forgetfree.ledger import Ledger

_REMEDY = "Restore it from a copy: the ledger lies in its run."
#: How damage is told where it is not known which of the two there is.
_TWO_WAYS = re.compile(r"Restore it from a copy, or run the stream again\.$")
File = Annotated[Path, Parameter(name="FILE", help="a ledger.safetensors")]
FileOrRun = Annotated[
    Path, Parameter(name="FILE|DIR", help="a ledger.safetensors; or a run, whose ledger with the first seed is meant")
]
Model = Annotated[
    str | None,
    Parameter(metavar="NAME|DIR", help="also compare with this model: weights, configuration, tokenizer"),
]

Run = Annotated[Path, Parameter(name="DIR", help="what forgetfree run wrote; it does not change")]
Out = Annotated[Path, Parameter(metavar="DIR", help="the directory to write; must be new or empty, unless --resume")]
RunModel = Annotated[str | None, Parameter(metavar="NAME|DIR", help="the run's model, if it lies elsewhere now")]
Resume = Annotated[bool, Parameter(help="continue in --out; what is finished is kept")]
Quiet = Annotated[bool, Parameter(help="say nothing but errors and the result")]
command = App(
    name="ledger",
    usage="Usage: forgetfree ledger ACTION FILE|DIR [OPTIONS]",
    help="Look into ledgers, check, change or merge them.",
    help_epilogue="Example: forgetfree ledger show runs/first",
)


@command.command
def show(file: FileOrRun, /, *, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show who owns what."""
    from forgetfree.cli.ledger_change import ledger_file
    from forgetfree.cli.ledger_view import describe_ledger, render_ledger

    file = ledger_file(file) if file.is_dir() else file
    ledger = _load(file)
    print(json_text(describe_ledger(ledger, file), indent=2).rstrip() if as_json else render_ledger(ledger, file))


@command.command(help_epilogue="Example: forgetfree ledger verify ledger.safetensors --model minilm")
def verify(file: File, /, *, model: Model = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Check everything about it."""
    try:
        ledger = _load(file)
    except LedgerError as error:
        raise LedgerError(_TWO_WAYS.sub(lambda _: _one_way(file), str(error))) from error
    disjointness = "" if ledger.composition == "alone" else "disjointness, "  # those that stand alone may overlap
    checked = [f"layout, bounds, order, {disjointness}dtypes, finiteness, checksum"]
    if run := _verify_run(ledger, file):
        checked.append(f"labels and prompts of {run}")
    if model:
        if needs_hub(model):
            go_offline_if_cut_off()
        _verify_model(ledger, model, file)
        beside = ", configuration, tokenizer, readout and maximum length" if ledger.binding else ""
        checked.append(f"weights{beside} of {model}")
    if as_json:
        counts = {"tasks": len(ledger.records), "entries": len(ledger.owned())}
        is_bound = {"binding": bool(ledger.binding)}
        print(json_text({"file": str(file), "sound": True, **counts, "checked": checked, **is_bound}, indent=2), end="")
        return
    what = f"{counted(len(ledger.records), 'task')}, {counted(len(ledger.owned()), 'entry')}"
    print(escaped(f"{file}: sound. {what}; checked: {', and the '.join(checked)}."))
    if not ledger.binding:
        print("note: it does not say which configuration, tokenizer, labels and prompts it needs.")


@command.command(help_epilogue="Example: forgetfree ledger remove runs/first --task sst2 --out runs/without-sst2")
def remove(
    run: Run,
    /,
    *,
    task: Annotated[
        str, Parameter(metavar="NAME", help="the task to take back, with all its versions; or one: NAME@2")
    ],
    out: Out,
    data: Annotated[
        str | None,
        Parameter(metavar="hub|demo|DIR|FILE", help="the rows of the other tasks, if they lie elsewhere now"),
    ] = None,
    model: RunModel = None,
    resume: Resume = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Write the run that would have been, had a task never been learned."""
    from forgetfree.cli.ledger_change import revise

    shown: dict[str, bool] = {"quiet": quiet, "as_json": as_json, "debug": debug}
    return revise("remove", run, task, out, data=data, model=model, resume=resume, **shown)


@command.command(help_epilogue="Example: forgetfree ledger update runs/first --task sst2 --out runs/again")
def update(
    run: Run,
    /,
    *,
    task: Annotated[str, Parameter(metavar="NAME", help="the task that is met again")],
    out: Out,
    data: Annotated[
        str | None, Parameter(metavar="hub|demo|DIR|FILE", help="its rows now (default: those of the run)")
    ] = None,
    model: RunModel = None,
    or_fewer: Annotated[bool, Parameter(help="take all rows of a label that has fewer than the run's --shots")] = False,
    resume: Resume = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Learn a task again, as its next version, on top of all that was learned since."""
    from forgetfree.cli.ledger_change import revise

    shown: dict[str, bool] = {"quiet": quiet, "as_json": as_json, "debug": debug}
    return revise("update", run, task, out, data=data, model=model, resume=resume, or_fewer=or_fewer, **shown)


@command.command(
    help_epilogue="Example: forgetfree ledger merge runs/a runs/b --out both.safetensors --data demo",
    usage="Usage: forgetfree ledger merge FILE|DIR FILE|DIR... --out FILE [OPTIONS]",
)
def merge(
    *ledgers: Annotated[
        Path,
        Parameter(name="LEDGER", help="files, or runs whose ledger is meant; where they overlap, the first decides"),
    ],
    out: Annotated[Path, Parameter(metavar="FILE", help="the ledger to write; must be new")],
    as_versions: Annotated[bool, Parameter(help="a task whose name is taken becomes its next version")] = False,
    data: Annotated[
        str | None, Parameter(metavar="hub|demo|DIR|FILE", help="score each task on its test rows, before and after")
    ] = None,
    model: Annotated[
        str | None, Parameter(metavar="NAME|DIR", help="the base model, to score with (default: that of the first run)")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make one ledger of several of one base model, and say what it costs."""
    from forgetfree.cli.ledger_change import merge_ledgers

    merge_ledgers(ledgers, out, as_versions=as_versions, data=data, model=model, as_json=as_json)


def _load(file: Path) -> Ledger:
    """Return a ledger, which must be its unit's own where it lies in the folder of one."""
    from forgetfree.ledger import Ledger
    from forgetfree.results.unit_folder import check_own

    ledger = Ledger.load(file)
    check_own(file, LedgerError)
    return ledger


def _one_way(file: Path) -> str:
    """Say what to do about a damaged ledger: where its run is there, resuming makes it again, to the same bits."""
    if _config_beside(file) is None:
        return "Restore it from a copy."
    run = file.parents[2] if len(file.parents) > 2 else file.absolute().parents[2]
    again = shlex.join(["forgetfree", "run", "--config", str(run / "config.json"), "--out", str(run), "--resume"])
    return f"Run `{again}`, which makes it again, to the same bits."


def _config_beside(file: Path) -> Path | None:
    """Return the config.json of the run that a ledger lies in, if there is one."""
    config = file.absolute().parents[2] / "config.json"
    in_unit = file.name == "ledger.safetensors" and file.absolute().parent.name.startswith("seed-")
    return config if in_unit and config.is_file() else None


def _verify_run(ledger: Ledger, path: Path) -> Path | None:
    """Compare the config.json of the run that the ledger lies in, if there is one, with the ledger."""
    from forgetfree.ledger import check_definitions
    from forgetfree.results.config_file import load_run
    from forgetfree.tasks import TaskDefinition

    if (config := _config_beside(path)) is None:
        return None
    tasks = [TaskDefinition.of_fields(fields) for fields in load_run(config.parent, _REMEDY)["tasks"]]
    check_definitions(ledger, {task.name: task for task in tasks}, str(config))
    return config


def _verify_model(ledger: Ledger, name: str, path: Path) -> None:
    """Raise ``LedgerError`` unless the ledger belongs to the model, and would answer with it as it did."""
    from forgetfree.ledger import check_binding, check_weights
    from forgetfree.models.loading import load_model

    if binding := ledger.binding:
        loaded = load_model(name, binding.readout, max_length=binding.max_length)
        check_weights(ledger, loaded.model.backbone, loaded.fingerprint)
        check_binding(ledger, loaded.binding(binding.precision), str(path))
        return
    try:
        check_weights(ledger, load_model(name).model.backbone)
    except LedgerError:
        check_weights(ledger, load_model(name, "linear").model.backbone)
