"""Errors of a command line as messages in forgetfree's form, and the output of all errors."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from cyclopts import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
)

from forgetfree.display import brief, escaped_lines, stderr
from forgetfree.errors import UnknownNameError, UsageError


def refusal(error: CycloptsError, words: Sequence[str]) -> UsageError:
    """Return the error for the words that the parser refused; ``words`` are the arguments before two dashes."""
    command = " ".join(["forgetfree", *(error.command_chain or ())])
    app, see = error.app, f"See '{command} --help'."
    assert app is not None
    commands = [] if app.default_command else [each for each in app if not each.startswith("-")]
    what, first = "command" if command == "forgetfree" else "action", next(iter(words[command.count(" ") :]), "-")
    if commands and not first.startswith("-") and first not in commands:  # before its flags, which depend on it
        return UnknownNameError(what, first, commands)
    arguments = [each for each in app.assemble_argument_collection() if each.parse] if app.default_command else []
    flags = [name for each in arguments for name in each.names if name.startswith("-")]
    flags += [name for name in app if name.startswith("--")]
    typed = [word.partition("=")[0] for word in words if word.startswith("--") and " " not in word]
    unknown = [name for name in typed if name not in flags]
    if isinstance(error, UnknownOptionError):
        unknown.append(error.token.keyword or error.token.value)
    options = _options() if unknown and "--set" in flags else set()
    if unknown and (option := unknown[0].strip("-").replace("-", "_")) in options:
        return UsageError(f"{unknown[0]} is no flag. Give this option with --set {option}=VALUE.")
    if unknown:
        hint = "Options without a flag are set with --set KEY=VALUE." if options else ""
        meant = get_close_matches(option, options, n=1, cutoff=0.8) if options else []
        if meant and f"--{meant[0].replace('_', '-')}" not in flags:
            return UsageError(f"Unknown flag of '{command}' {brief(unknown[0])}. Did you mean --set {meant[0]}=VALUE?")
        return UnknownNameError(f"flag of '{command}'", unknown[0], flags, hint)
    match error:
        case UnknownCommandError(unused_tokens=[name, *_]):
            return UnknownNameError(what, name, commands)
        case MissingArgumentError(keyword=str(flag)):
            return UsageError(f"{flag} needs a value. {see}")
        case MissingArgumentError(argument=lacked) if lacked is not None:
            required = [each for each in arguments if each.required and each.name not in typed]
            lacking = [each.name for each in required if each.field_info.is_keyword_only or each.name == lacked.name]
            choices = lacked.get_choices(force=True)
            return lacks(command, [f"{each} ({', '.join(choices)})" if choices else each for each in lacking])
        case RepeatArgumentError(token=token):
            return UsageError(f"{token.keyword} is given twice. Give it once.")
        case CoercionError(token=token, argument=argument) if token and argument:
            name = token.keyword or (argument.name if argument.field_info.is_keyword_only else "argument")
            if choices := argument.get_choices(force=True):
                return UnknownNameError(name, token.value, choices)
            from forgetfree.options import type_name

            expected = type_name(argument.hint).removesuffix(" or none")  # which nobody types
            return UsageError(f"{name} must be {expected}, got {brief(token.value)}. {see}")
    return UsageError(f"{' '.join(str(error).split()).rstrip('.')}. {see}")


def lacks(command: str, names: Sequence[str]) -> UsageError:
    """Return the error that a command lacks arguments."""
    return UsageError(f"The following arguments are required: {', '.join(names)}. See '{command} --help'.")


#: The longest message, in characters.
_LONGEST = 4000


def fail(message: str, code: int) -> int:
    """Print an error message, one paragraph or a list of them, perhaps with a table, and return the exit code."""
    text = "\n- ".join(map(escaped_lines, message.split("\n- ")))  # the lines of `SeveralFaultsError`
    most = 2 * _LONGEST if "\n  " in text else _LONGEST  # with a table
    if len(text) > most:
        text = f"{text[: most // 2]} … {text[-most // 2 :]}"
    print(f"forgetfree: error: {text}", file=stderr())
    return code


def _options() -> set[str]:
    """Return the names of the ``--set`` options of a run and of its default strategies."""
    from forgetfree.jobs.config import RunConfig, RunOptions

    return {
        name for each in (RunOptions, *(s.Options for s in RunConfig().classes.values())) for name in each.model_fields
    }
