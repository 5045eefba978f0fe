"""``forgetfree export``: a task of a run as an ordinary Hugging Face model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from forgetfree.cli.apply import print_written
from forgetfree.cli.usage import Debug
from forgetfree.cli.use import BaseModel, Run, Seed, Strategy, predictor_of
from forgetfree.cli.words import no_empty_directories
from forgetfree.display import escaped
from forgetfree.jobs.running.environment import make_directory

Task = Annotated[str, Parameter(metavar="NAME", help="the task to export")]
Out = Annotated[Path, Parameter(metavar="DIR", help="where to write the model; must be new or empty")]


def command(
    run: Run,
    /,
    *,
    task: Task,
    out: Out,
    format: Annotated[
        Literal["transformers", "onnx"],
        Parameter(help="transformers (default): weights for from_pretrained; onnx: model.onnx, for any ONNX runtime"),
    ] = "transformers",
    strategy: Strategy = None,
    seed: Seed = None,
    model: BaseModel = None,
    debug: Debug = False,
) -> None:
    """Write the model."""
    from forgetfree.serve.apply import check_free, export_task

    if format == "onnx":
        from forgetfree.serve.onnx_model import FILE, TOLERANCE, export_onnx, require_onnx

        require_onnx()
    check_free(out)
    predictor, source = predictor_of(run, seed, strategy, model)
    predictor.definition(task)
    with no_empty_directories(out):
        if not out.exists():
            make_directory(out)
        write = partial(export_task, predictor, task, strategy=source.strategy)
        written = write(out) if format == "transformers" else export_onnx(write, out)
    what = f"that answers {task} as {source.file} does"
    if format == "onnx":
        print(escaped(f"{out / FILE}: {written.architecture} {what}; logits equal torch's to {TOLERANCE:.0e}."))
    else:
        print_written(written, what)
    if predictor.weights.precision != "fp32":
        print(f"note: the run answered in {predictor.weights.precision}, and the model is written in fp32.")
