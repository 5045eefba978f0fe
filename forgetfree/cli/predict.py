"""``forgetfree predict``: answer from a finished run."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from forgetfree.cli.hub import go_offline_if_cut_off, needs_hub
from forgetfree.cli.shared import say
from forgetfree.display import escaped
from forgetfree.errors import UsageError, first_line
from forgetfree.jobs.environment import quiet_libraries

if TYPE_CHECKING:
    from forgetfree.cli.shared import Commands, Parser


def add(commands: Commands, common: Parser) -> None:
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
    predict.add_argument("--model", metavar="NAME|DIR", help="the run's model, where it lies elsewhere now")
    predict.add_argument(
        "texts", nargs="*", default=[], metavar="TEXT", help="default: lines of stdin; pairs with a tab between"
    )


def command(options: argparse.Namespace) -> int:
    """Print an answer a text."""
    quiet_libraries()
    for text in options.texts:
        if os.path.isfile(text):
            raise UsageError(
                f"{text!r} is the name of a file, and a TEXT is itself classified. To read the file, one text a line, write "
                f"< {shlex.quote(text)} in its place."
            )
    from forgetfree.results.config_file import load_run, located

    directory = Path(options.directory)
    model = options.model or located(load_run(directory)["model"]["name"], directory)
    if needs_hub(model):
        go_offline_if_cut_off()
    from forgetfree.serve.inference import Predictor

    predictor = Predictor.of_run(directory, options.seed, options.strategy, options.model)
    pair = len(predictor.definition(options.task).text_columns) == 2
    if not options.texts and sys.stdin.isatty():
        say("Reading texts from the terminal, one a line; end with Ctrl-D.")
    lines = options.texts or _lines()
    if pair and options.texts and not any("\t" in line for line in lines) and len(lines) % 2 == 0:
        texts = [(lines[i], lines[i + 1]) for i in range(0, len(lines), 2)]
    else:
        texts = [tuple(line.split("\t")) if pair else (line,) for line in lines]
    for text, answer in zip(texts, predictor.answer(options.task, texts), strict=True):
        print(f"{escaped(answer.label)}\t{answer.probability:.3f}\t{escaped(' | '.join(text))}")
    return 0


def _lines() -> list[str]:
    try:
        return [line.rstrip("\n") for line in sys.stdin]
    except UnicodeDecodeError as error:
        raise UsageError(f"The texts on stdin are not in UTF-8: {first_line(error)}. Write them in UTF-8.") from error
