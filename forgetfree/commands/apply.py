"""``forgetfree apply``: put a graft into its base model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from forgetfree.commands.shared import go_offline_if_cut_off
from forgetfree.environment import quiet_libraries

if TYPE_CHECKING:
    from forgetfree.commands.shared import Commands


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
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
    from forgetfree.apply import apply_graft
    from forgetfree.graft_file import find_graft
    from forgetfree.grafting import Graft

    graft = Graft.load(find_graft(Path(options.graft)))
    model = options.model or (graft.origin.model if graft.origin else "minilm")
    if not (model == "minilm" or Path(model).is_dir()):
        go_offline_if_cut_off()
    written = apply_graft(graft, model, Path(options.out))
    call = f"transformers.{written.loader}.from_pretrained({str(written.directory)!r}); its README.md shows how it classifies."
    if written.usual:
        call = f'transformers.pipeline("text-classification", model={str(written.directory)!r}, truncation=True).'
    print(f"{written.directory}: {written.architecture} with {len(graft.region)} grafted entries. It loads by {call}")
    if written.note:
        print(f"note: {written.note}")
    return 0
