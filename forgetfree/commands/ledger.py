"""``forgetfree ledger``: look into a ledger, or check it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from forgetfree.commands.hub import go_offline_if_cut_off, needs_hub
from forgetfree.display import escaped
from forgetfree.errors import LedgerError

if TYPE_CHECKING:
    from forgetfree.commands.shared import Commands, Parser
    from forgetfree.ledger import Ledger


def add(commands: Commands, common: Parser) -> None:
    """The command and its arguments."""
    ledger = commands.add_parser("ledger", help="look into a ledger, or check it")
    actions = ledger.add_subparsers(metavar="ACTION", required=True)
    for action, text in (("show", "who owns what"), ("verify", "check everything about it")):
        sub = actions.add_parser(action, parents=[common], help=text)
        sub.set_defaults(command=command, action=action, model=None)
        sub.add_argument("file", metavar="FILE")
        if action == "verify":
            sub.add_argument("--model", metavar="NAME|DIR", help="also compare the fingerprint with this model's")


def command(options: argparse.Namespace) -> int:
    """Show or verify."""
    from forgetfree.ledger import Ledger
    from forgetfree.ledger.view import render_ledger

    path = Path(options.file)
    ledger = Ledger.load(path)
    if options.action == "show":
        print(render_ledger(ledger, path))
        return 0
    disjointness = "" if ledger.composition == "alone" else "disjointness, "  # those that stand alone may overlap
    checked = f"layout, bounds, order, {disjointness}dtypes, finiteness, checksum"
    if options.model:
        if needs_hub(options.model):
            go_offline_if_cut_off()
        _verify_model(ledger, options.model)
        checked += f", and the fingerprint of {options.model}"
    sound = f"{path}: sound. {len(ledger.records)} tasks, {len(ledger.owned())} entries; checked: {checked}."
    print(escaped(sound))
    return 0


def _verify_model(ledger: Ledger, name: str) -> None:
    """Raise ``LedgerError`` unless the ledger belongs to the model, loaded with its LM head or without."""
    from forgetfree.ledger import LedgerSwitch
    from forgetfree.models.loading import load_model

    try:
        LedgerSwitch(ledger, load_model(name).model.backbone)
    except LedgerError:
        LedgerSwitch(ledger, load_model(name, "linear").model.backbone)
