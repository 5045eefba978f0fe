"""``forgetfree ledger remove``, ``update`` and ``merge``: take a task back, learn it again, make one ledger of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from forgetfree.cli.hub import reach_hub
from forgetfree.cli.usage import AsJson, Debug
from forgetfree.cli.use import ledger_file
from forgetfree.data.sources import load_task
from forgetfree.display import PERCENT, Scale, escaped, json_text
from forgetfree.errors import UsageError
from forgetfree.jobs.running.environment import quiet_libraries
from forgetfree.output import check_new_file
from forgetfree.results.config_file import load_run, located
from forgetfree.results.metrics import scale_of
from forgetfree.tasks import version_of

if TYPE_CHECKING:
    from forgetfree.ledger import Ledger


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
    check_new_file(out)
    if len(set(ledgers)) < 2:
        raise UsageError(f"Merging takes two different ledgers or more, got {len(set(ledgers))}.")
    quiet_libraries()
    from forgetfree.jobs.stream_prefix import note
    from forgetfree.ledger import Ledger, joined_ledger
    from forgetfree.results.unit_folder import size_and_sha256

    files = {str(path): ledger_file(path) for path in ledgers}
    if data:
        model = model or _model_of(ledgers)
        reach_hub(model, data)
    joined, joined_tasks = joined_ledger(
        {name: Ledger.load(path) for name, path in files.items()}, as_versions=as_versions
    )
    before: dict[str, dict[str, float]] = {}
    after: dict[str, float] = {}
    if data and model:  # before anything is written
        names = {name: [each.name for each in joined_tasks if each.ledger == name] for name in files}
        before = {name: _scores(Ledger.load(path), model, data, names[name]) for name, path in files.items()}
        after = _scores(joined, model, data, joined.tasks)
    joined.save(out)
    rows = [
        asdict(each) | {"before": before.get(each.ledger, {}).get(each.name), "after": after.get(each.task)}
        for each in joined_tasks
    ]
    note(
        out,
        "merge",
        *({str(path): size_and_sha256(path) for path in paths} for paths in (files.values(), [out])),
        tasks=rows,
    )
    if as_json:
        shown = {"out": str(out), "composition": joined.composition, "bytes": out.stat().st_size, "tasks": rows}
        print(json_text(shown, indent=2), end="")
        return
    for row, record in zip(rows, joined.records, strict=True):
        print(escaped(_line(row, scale_of(record.definition.metric) if record.definition else PERCENT)))
    owned = len(joined.owned())
    print(escaped(f"{out}: {len(joined.tasks)} tasks, {owned:,} entries owned, {out.stat().st_size:,} bytes."))


def _scores(ledger: Ledger, model: str, data: str, tasks: Sequence[str]) -> dict[str, float]:
    """Return the score of each task on its test rows, by its name; the rows of a version are those of its task."""
    from forgetfree.serve.inference import Predictor

    predictor, scores = Predictor.of_ledger(ledger, model), dict[str, float]()
    for task in tasks:
        name, version = version_of(task)
        scores[task] = predictor.score(f"{name}@{version}", load_task(name, data).test)
    return scores


def _line(row: Mapping[str, Any], scale: Scale) -> str:
    own = row["task"] if row["task"] == row["name"] else f"{row['task']} (was {row['name']})"
    line = f"{own} of {row['ledger']}: {row['entries']:,} entries"
    if row["overlap"]:
        line += f", {row['overlap']:,} of them owned by earlier ledgers, {row['changed']:,} with another value"
    if row["after"] is not None:
        line += f"; score {scale.with_unit(row['before'])} before, {scale.with_unit(row['after'])} after"
    return line


def _model_of(ledgers: Sequence[Path]) -> str:
    """Return the model of the first run that is given."""
    runs = [path for path in ledgers if path.is_dir()]
    if not runs:
        raise UsageError("--data scores the tasks, and a ledger does not name its base model. Give --model, too.")
    return located(load_run(runs[0])["model"]["name"], runs[0])
