"""``forgetfree apply``: put a graft into its base model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from forgetfree.cli.hub import go_offline_if_cut_off, needs_hub
from forgetfree.cli.shared import no_empty_directories
from forgetfree.display import escaped
from forgetfree.jobs.environment import make_directory, quiet_libraries

if TYPE_CHECKING:
    from forgetfree.cli.shared import Commands, Parser


def add(commands: Commands, common: Parser) -> None:
    """The command and its arguments."""
    apply = commands.add_parser(
        "apply", parents=[common], help="put a graft into its base model: an ordinary Hugging Face model"
    )
    apply.set_defaults(command=command)
    apply.add_argument("graft", metavar="GRAFT", help="a graft.safetensors, or the directory that holds it")
    apply.add_argument("--model", metavar="NAME|DIR", help="the base model (default: by the name the graft has for it)")
    apply.add_argument("--out", required=True, metavar="DIR", help="where to write the model; must be new or empty")


def command(options: argparse.Namespace) -> int:
    """Write the model."""
    quiet_libraries()
    from forgetfree.core.graft import Graft
    from forgetfree.core.graft_file import find_graft
    from forgetfree.serve.apply import apply_graft

    graft = Graft.load(find_graft(Path(options.graft)))
    model = options.model or (graft.origin.model if graft.origin else "minilm")
    if needs_hub(model):
        go_offline_if_cut_off()
    out = Path(options.out)
    with no_empty_directories(out):
        if not out.exists():
            make_directory(out)
        written = apply_graft(graft, model, out)
    call = f"transformers.{written.loader}.from_pretrained({str(written.directory)!r}); its README.md shows how it classifies."
    if written.usual:
        call = f'transformers.pipeline("text-classification", model={str(written.directory)!r}, truncation=True).'
    entries = len(graft.region)
    print(escaped(f"{written.directory}: {written.architecture} with {entries} grafted entries. It loads by {call}"))
    if written.note:
        print(f"note: {written.note}")
    return 0
