"""What several commands need."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from forgetfree.display import brief, escaped, is_text
from forgetfree.errors import UnknownNameError, UsageError
from forgetfree.options import parse

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["Parser"]

#: The longest message, in characters.
_LONGEST = 4000


class Parser(argparse.ArgumentParser):
    """Says what is wrong as all of forgetfree does: a paragraph, with the name that may be meant."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})
        self.register("action", None, _Once)

    def error(self, message: str) -> NoReturn:
        """Raise ``UsageError``."""
        raise UsageError(f"{message[:1].upper()}{message[1:]}. See '{self.prog} --help'.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse arguments that have no UTF-8 form, and flags that are none: before what else may be lacking."""
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        for argument in sys.argv[1:] if args is None else args:
            if not is_text(argument) or "\0" in argument:
                raise UsageError(f"The argument {argument!r} is not in UTF-8. Type it, or name the file, in UTF-8.")
            if argument == "--" or (self._subparsers and not argument.startswith("-")):
                break  # texts follow, or a command, which knows its own flags
            name = argument.partition("=")[0]
            if name.startswith("--") and " " not in argument and name not in known:
                raise UnknownNameError(f"flag of '{self.prog}'", name, known)
        return super().parse_known_args(args, namespace)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.type in (int, float):
            return parse(arg_string, action.type, _name(action))
        return super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise UnknownNameError(_name(action), value, action.choices)


class _Once(argparse._StoreAction):
    """Keeps a value. A flag that is given twice is refused: of two values, one would be left out without a word."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        if option_string is not None:
            given = vars(namespace).setdefault("given", {})
            flag = self.option_strings[0]
            if flag in given:
                raise UsageError(f"{flag} is given twice, as {brief(given[flag])} and {brief(values)}. Give it once.")
            if values == "":
                raise UsageError(f"{flag} needs a value, got an empty text. Give one, or leave {flag} out.")
            given[flag] = values
        setattr(namespace, self.dest, values)


def _name(action: argparse.Action) -> str:
    """A flag or an argument, in a message."""
    return "/".join(action.option_strings) or str(action.metavar or "argument").lower()


def fail(message: str, code: int) -> int:
    """Say what went wrong, in one paragraph; the exit code."""
    text = escaped(message)
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
    print(f"forgetfree: error: {text}", file=sys.stderr)
    return code


def say(message: str) -> None:
    """One line on stderr, which is for who watches."""
    print(escaped(message), file=sys.stderr)


def settings_of(given: Sequence[str] | None) -> dict[str, str]:
    """What ``--set key=value`` says.

    Raises:
        UsageError: it says nothing, or two things of one key.
    """
    settings: dict[str, str] = {}
    for setting in given or ():
        key, separator, value = (part.strip() for part in setting.partition("="))
        if not separator or not key:
            raise UsageError(f"--set needs key=value, got {brief(setting)}. Write, say, --set batch_size=16.")
        if key in settings:
            raise UsageError(f"--set {key} is given twice, as {brief(settings[key])} and {brief(value)}. Give it once.")
        settings[key] = value
    return settings


def print_recipe(model: str, recipe: Mapping[str, Any]) -> None:
    """What a registered model brings."""
    if recipe:
        chosen = " ".join(f"{key}={value}" for key, value in recipe.items())
        say(f"Recipe of {model}: {chosen} (each gives way to --set)")


def free_directory(stream: str) -> str:
    """``runs/STREAM``, or with the first number that is free."""
    name = stream.replace(",", "-").replace("/", "-")[:60]
    path, number = Path("runs") / name, 2
    while os.path.lexists(path):
        path, number = Path("runs") / f"{name}-{number}", number + 1
    return str(path)


@contextmanager
def no_empty_directories(*paths: Any) -> Iterator[None]:
    """What is refused leaves nothing behind: directories made inside that hold nothing are gone after an error.

    Args:
        paths: that may be made, with the folders they lie in; what is no path, as a file may have it, does not count.
    """
    given = [Path(path) for path in paths if path and isinstance(path, str | Path)]
    made = [each for path in given for each in (path, *path.parents) if not os.path.lexists(each)]
    try:
        yield
    except BaseException:
        for path in made:
            try:
                path.rmdir()
            except (OSError, ValueError):  # it holds something, or was not made
                continue
        raise
