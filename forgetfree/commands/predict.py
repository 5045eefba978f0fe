"""``forgetfree predict``: answer from a finished run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from forgetfree.environment import quiet_libraries

if TYPE_CHECKING:
    from forgetfree.commands.shared import Commands


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """The command and its arguments."""
    predict = commands.add_parser(
        "predict", parents=[common], help="answer from a finished run of a strategy with a ledger"
    )
    predict.set_defaults(command=command)
    predict.add_argument("directory", metavar="DIR")
    predict.add_argument("--task", required=True, metavar="NAME")
    predict.add_argument("--seed", type=int, metavar="S", help="whose ledger (default: the first)")
    predict.add_argument(
        "--strategy", metavar="NAME", help="whose ledger (default: grafting-continual's, else the first)"
    )
    predict.add_argument("texts", nargs="*", metavar="TEXT", help="default: lines of stdin; pairs with a tab between")


def command(options: argparse.Namespace) -> int:
    """Print an answer a text."""
    quiet_libraries()
    from forgetfree.inference import Predictor

    predictor = Predictor.of_run(Path(options.directory), options.seed, options.strategy)
    pair = len(predictor.definition(options.task).text_columns) == 2
    if not options.texts and sys.stdin.isatty():
        print("Reading texts from the terminal, one a line; end with Ctrl-D.", file=sys.stderr)
    lines = options.texts or [line.rstrip("\n") for line in sys.stdin]
    if pair and options.texts and not any("\t" in line for line in lines) and len(lines) % 2 == 0:
        texts = [(lines[i], lines[i + 1]) for i in range(0, len(lines), 2)]
    else:
        texts = [tuple(line.split("\t")) if pair else (line,) for line in lines]
    for text, answer in zip(texts, predictor.answer(options.task, texts), strict=True):
        print(f"{answer.label}\t{answer.probability:.3f}\t{' | '.join(text)}")
    return 0
