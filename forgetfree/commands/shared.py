"""What several commands need."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.errors import UsageError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def fail(message: str, code: int) -> int:
    """Say what went wrong; the exit code."""
    print(f"forgetfree: error: {message}", file=sys.stderr)
    return code


def settings_of(given: Sequence[str] | None) -> dict[str, str]:
    """What ``--set key=value`` says."""
    settings = {}
    for setting in given or ():
        key, separator, value = setting.partition("=")
        if not separator or not key:
            raise UsageError(f"--set needs key=value, got {setting!r}.")
        settings[key.strip()] = value.strip()
    return settings


def needs_hub(model: str, data: str) -> bool:
    """Whether one of them is read from the hub."""
    return data == "hub" or not (model == "minilm" or Path(model).is_dir())


def go_offline_if_cut_off() -> None:
    """Where the hub's name cannot be resolved, its client would retry for half a minute.

    Offline it answers at once, from its cache if it can.
    """
    import socket
    from urllib.parse import urlsplit

    proxied = any(name.lower() in ("https_proxy", "all_proxy") for name in os.environ)
    if "HF_HUB_OFFLINE" not in os.environ and not proxied:
        try:
            socket.getaddrinfo(urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname, 443)
        except OSError:
            os.environ["HF_HUB_OFFLINE"] = "1"


def print_recipe(model: str, recipe: Mapping[str, Any]) -> None:
    """What a registered model brings."""
    if recipe:
        chosen = " ".join(f"{key}={value}" for key, value in recipe.items())
        print(f"Recipe of {model}: {chosen} (each gives way to --set)", file=sys.stderr)


def free_directory(stream: str) -> str:
    """``runs/STREAM``, or with the first number that is free."""
    name = stream.replace(",", "-").replace("/", "-")[:60]
    path, number = Path("runs") / name, 2
    while path.exists():
        path, number = Path("runs") / f"{name}-{number}", number + 1
    return str(path)


@contextmanager
def no_empty_directory(out: Path) -> Iterator[None]:
    """What is refused leaves nothing behind: ``out``, if it was made inside and holds nothing, is gone after an error."""
    there = out.exists()
    try:
        yield
    except BaseException:
        if not there and out.is_dir() and not any(out.iterdir()):
            out.rmdir()
        raise
