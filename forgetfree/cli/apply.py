"""``forgetfree apply``: put a graft into its base model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from forgetfree.cli.hub import go_offline_if_cut_off, local_path, needs_hub
from forgetfree.cli.usage import Debug
from forgetfree.cli.words import no_empty_directories
from forgetfree.display import counted, escaped
from forgetfree.errors import GraftError
from forgetfree.jobs.running.environment import make_directory, quiet_libraries

if TYPE_CHECKING:
    from forgetfree.serve.apply import WrittenModel

GraftFile = Annotated[
    Path, Parameter(name="GRAFT", help="a graft.safetensors, the directory that holds it, or hf://OWNER/NAME")
]
Model = Annotated[
    str | None, Parameter(metavar="NAME|DIR", help="the base model (default: by the name the graft has for it)")
]
Out = Annotated[Path, Parameter(metavar="DIR", help="where to write the model; must be new or empty")]


def command(graft_file: GraftFile, /, *, model: Model = None, out: Out, debug: Debug = False) -> None:
    """Write the model."""
    quiet_libraries()
    from forgetfree.ledger.graft import Graft, find_graft
    from forgetfree.results.unit_folder import check_own
    from forgetfree.serve.apply import apply_graft, base_model_name

    path = find_graft(local_path(graft_file))
    graft = Graft.load(path)
    check_own(path, GraftError)
    name = base_model_name(model, graft)
    if needs_hub(name):
        go_offline_if_cut_off()
    with no_empty_directories(out):
        if not out.exists():
            make_directory(out)
        written = apply_graft(graft, name, out)
    print_written(written, f"with {counted(len(graft.region), 'grafted entry')}")


def print_written(written: WrittenModel, what: str) -> None:
    """Say what was written and how it loads."""
    call = f"transformers.{written.loader}.from_pretrained({str(written.directory)!r}); its README.md shows how it classifies."
    if written.usual:
        call = f'transformers.pipeline("text-classification", model={str(written.directory)!r}, truncation=True).'
    if written.loader == "AutoModelForTokenClassification":
        call = f'transformers.pipeline("token-classification", model={str(written.directory)!r}, aggregation_strategy="first").'
    print(escaped(f"{written.directory}: {written.architecture} {what}. It loads by {call}"))
    if written.note:
        print(f"note: {written.note}")
