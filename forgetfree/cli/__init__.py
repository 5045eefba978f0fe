"""The command line. Exit codes: 0 done, 1 failed, 2 wrong usage. Errors: one paragraph on stderr."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from forgetfree import __version__
from forgetfree.cli import apply, experiment, graft, ledger, predict, report, run
from forgetfree.cli import list as list_
from forgetfree.cli.shared import Parser, fail
from forgetfree.errors import ForgetfreeError, first_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    debug = False
    if isinstance(sys.stdout, io.TextIOWrapper):  # whatever it can say is said, rather than nothing
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = _options(arguments)
        debug = options.debug
        code: int = options.command(options)
        return code
    except SystemExit as stop:  # argparse has printed the help or the version
        return int(stop.code or 0)
    except ForgetfreeError as error:
        if debug:
            raise
        return fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return fail("Interrupted.", 1)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if debug:
            raise
        return fail(f"{error}. Check the name, the disk and the permissions.", 1)
    except MemoryError:
        if debug:
            raise
        return fail("There is not enough memory. Set a smaller batch_size or max_length, or give a smaller model.", 1)
    except Exception as error:
        if debug:
            raise
        return fail(
            f"Unexpected {type(error).__name__}: {first_line(error)}. This is a fault of forgetfree, or of a plug-in: run "
            "again with --debug, and report the traceback. A strategy of your own is checked by "
            "forgetfree.testing.check_strategy.",
            1,
        )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was typed.

    Raises:
        UsageError: it is no command.
    """
    parser = _parser()
    options: argparse.Namespace
    options, more = parser.parse_known_args(arguments)
    # argparse lets texts follow DIR, but not `DIR --task NAME`.
    if more and options.command is not predict.command:
        names = options.command is run.command and not any(each.startswith("-") for each in more)
        hint = f". Join the tasks of a stream by commas: {','.join([options.stream, *more])}" if names else ""
        parser.error(f"unrecognized arguments: {' '.join(more)}{hint}")
    if more:
        if "--" in more:  # what follows are texts, even if they look like flags
            more.remove("--")
        options.texts = [*options.texts, *more]
    return options


def _parser() -> Parser:
    common = Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks")
    parser = Parser(prog="forgetfree", description="Continual learning for pre-trained language models.")
    parser.add_argument("--version", action="version", version=f"forgetfree {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for each in (run, report, ledger, predict, experiment, graft, apply, list_):
        each.add(commands, common)
    return parser
