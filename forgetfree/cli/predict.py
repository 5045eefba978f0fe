"""``forgetfree predict``: answer from a finished run."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from forgetfree.cli.hub import go_offline_if_cut_off, needs_hub
from forgetfree.cli.usage import Debug
from forgetfree.cli.words import say
from forgetfree.display import escaped
from forgetfree.errors import UsageError, first_line
from forgetfree.jobs.environment import quiet_libraries


def command(
    directory: Annotated[Path, Parameter(name="DIR", help="what forgetfree run wrote")],
    /,
    *texts: Annotated[str, Parameter(name="TEXT", help="default: lines of stdin; pairs with a tab between")],
    task: Annotated[str, Parameter(metavar="NAME", help="what the texts are classified by")],
    seed: Annotated[int | None, Parameter(metavar="S", help="whose ledger (default: the first)")] = None,
    strategy: Annotated[
        str | None, Parameter(metavar="NAME", help="whose ledger (default: grafting-continual's, else the first)")
    ] = None,
    model: Annotated[
        str | None, Parameter(metavar="NAME|DIR", help="the run's model, where it lies elsewhere now")
    ] = None,
    debug: Debug = False,
) -> None:
    """Print an answer a text."""
    quiet_libraries()
    for text in texts:
        if os.path.isfile(text):
            raise UsageError(
                f"{text!r} is the name of a file, and a TEXT is itself classified. To read the file, one text a line, write "
                f"< {shlex.quote(text)} in its place."
            )
    from forgetfree.results.config_file import load_run, located

    name = model or located(load_run(directory)["model"]["name"], directory)
    if needs_hub(name):
        go_offline_if_cut_off()
    from forgetfree.serve.inference import Predictor

    predictor = Predictor.of_run(directory, seed, strategy, model)
    pair = len(predictor.definition(task).text_columns) == 2
    if not texts and sys.stdin.isatty():
        say("Reading texts from the terminal, one a line; end with Ctrl-D.")
    lines = list(texts) or _lines()
    if pair and texts and not any("\t" in line for line in lines) and len(lines) % 2 == 0:
        rows: list[tuple[str, ...]] = [(lines[i], lines[i + 1]) for i in range(0, len(lines), 2)]
    else:
        rows = [tuple(line.split("\t")) if pair else (line,) for line in lines]
    for row, answer in zip(rows, predictor.answer(task, rows), strict=True):
        print(f"{escaped(answer.label)}\t{answer.probability:.3f}\t{escaped(' | '.join(row))}")


def _lines() -> list[str]:
    try:
        return [line.rstrip("\n") for line in sys.stdin]
    except UnicodeDecodeError as error:
        raise UsageError(f"The texts on stdin are not in UTF-8: {first_line(error)}. Write them in UTF-8.") from error
