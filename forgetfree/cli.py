"""The command line. Exit codes: 0 done, 1 failed, 2 wrong usage. Errors: one paragraph on stderr."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from forgetfree import __version__
from forgetfree.commands import apply, experiment, graft, ledger, predict, report, run
from forgetfree.commands import list as list_
from forgetfree.commands.shared import fail
from forgetfree.errors import ForgetfreeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = _parser()
    try:
        options, more = parser.parse_known_args(arguments)
        # argparse lets texts follow DIR, but not `DIR --task NAME`.
        if more and (options.command is not predict.command or any(text.startswith("--") for text in more)):
            parser.error(f"unrecognized arguments: {' '.join(more)}")
    except SystemExit as stop:  # argparse has said what is wrong, or has printed the help
        return int(stop.code or 0)
    if more:
        options.texts += more
    try:
        code: int = options.command(options)
        return code
    except ForgetfreeError as error:
        if options.debug:
            raise
        return fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return fail("Interrupted.", 1)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if options.debug:
            raise
        return fail(f"{error}. Check the disk and the permissions.", 1)
    except Exception as error:
        if options.debug:
            raise
        reason = (str(error).strip().splitlines() or [""])[0]
        return fail(
            f"Unexpected {type(error).__name__}: {reason.rstrip('.')}. This is a fault of forgetfree, or of a plug-in: run "
            "again with --debug, and report the traceback. A strategy of your own is checked by "
            "forgetfree.testing.check_strategy.",
            1,
        )


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks")
    parser = argparse.ArgumentParser(
        prog="forgetfree", description="Continual learning for pre-trained language models."
    )
    parser.add_argument("--version", action="version", version=f"forgetfree {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for each in (run, report, ledger, predict, experiment, graft, apply, list_):
        each.add(commands, common)
    return parser
