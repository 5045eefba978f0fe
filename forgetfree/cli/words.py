"""What a command says."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO

from forgetfree import registry
from forgetfree.display import escaped_lines, stderr
from forgetfree.recipes import MODELS

#: The longest message, in characters.
_LONGEST = 4000
#: Where errors are told while nothing else is.
_errors: TextIO | None = None


def fail(message: str, code: int) -> int:
    """Say what went wrong, in one paragraph or a list of them, with a table where there is one, and return the exit code."""
    text = "\n- ".join(map(escaped_lines, message.split("\n- ")))  # the lines of `SeveralFaultsError`
    most = 2 * _LONGEST if "\n  " in text else _LONGEST  # with a table
    if len(text) > most:
        text = f"{text[: most // 2]} … {text[-most // 2 :]}"
    print(f"forgetfree: error: {text}", file=_errors or stderr())
    return code


@contextmanager
def silence(quiet: bool) -> Iterator[None]:
    """Let nothing through to stderr inside but errors, if ``quiet``."""
    global _errors
    if not quiet:
        yield
        return
    before, _errors = _errors, _errors or stderr()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        _errors = before


def recipe_of(config: Any) -> str:
    """Say what the model of a run brings; an empty text where it brings nothing, and the optimizer is set."""
    if chosen := {key: value for key, value in config.recipe().items() if _is_an_option(key)}:
        options = " ".join(f"{key}={value}" for key, value in chosen.items())
        return f"Recipe of {config.model}: {options} (--set changes any of them)"
    if config.model in MODELS and MODELS[config.model].recipe:
        return (
            f"note: the optimizer that is set drops the recipe of {config.model}; the defaults are used in its place."
        )
    trains = config.fine_tuned is None
    if trains and not any(key.rpartition(".")[2] == "optimizer" for key in config.settings):
        return (
            f"No recipe for {config.model}: the paper's options train it, by SGD (--set optimizer=adamw, with a learning rate "
            "such as 1e-4, often needs fewer steps)"
        )
    return ""


def _is_an_option(key: str) -> bool:
    """Say whether a strategy has its option of a recipe, where the key names one of ours."""
    strategy, _, name = key.rpartition(".")
    return strategy not in registry.STRATEGIES or name in registry.strategy(strategy).Options.__dataclass_fields__
