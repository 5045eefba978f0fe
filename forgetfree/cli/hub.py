"""Checks whether the hub answers, before the hub's client waits for it."""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from forgetfree.display import tell
from forgetfree.errors import UsageError, first_line
from forgetfree.files import is_place
from forgetfree.recipes import IN_MEMORY, MODELS

#: Seconds to wait for the hub's answer.
_PATIENCE = 2.5


def needs_hub(model: str | None, data: Any = "") -> bool:
    """Return whether the model or the data are read from the hub."""
    packaged = model in MODELS and not MODELS[model].on_hub
    here = not model or packaged or Path(model).is_dir() or is_place(model) or model.endswith(IN_MEMORY)
    return data == "hub" or not here


def reach_hub(model: str | None) -> None:
    """Check whether the hub answers, if the model is read from it; see `go_offline_if_cut_off`."""
    if needs_hub(model):
        go_offline_if_cut_off()


def go_offline_if_cut_off() -> None:
    """Restrict the hub's client to its cache if the hub does not answer; otherwise, the client would retry for minutes.

    The check uses the client itself, so that ``HF_ENDPOINT``, proxies and certificates apply as they will later. If
    ``HF_HUB_OFFLINE`` is set, nothing is checked.

    Raises:
        UsageError: the client's cache would be a directory named ``~``.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_CACHE.startswith("~"):
        raise UsageError(
            "The hub's client has no directory for its cache: the user has no home directory, and HOME is not set. "
            "Set HF_HOME to a directory."
        )
    if "HF_HUB_OFFLINE" in os.environ:
        return
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    if not constants.HF_HUB_OFFLINE and (reason := _silence(endpoint)):
        tell(
            f"note: the hub ({urlsplit(endpoint).hostname}) cannot be reached ({reason}): using only files from its "
            "cache. Set HF_HUB_OFFLINE=0 to wait for it."
        )
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True


def _silence(endpoint: str) -> str:
    """Return why an endpoint does not answer; empty if it does, even with an error."""
    from huggingface_hub import get_session

    answer: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=_PATIENCE)
            answer.put("")
        except Exception as error:  # from whichever HTTP library the client uses
            answer.put(first_line(error))

    # Name resolution has no time limit, so the thread is not joined.
    threading.Thread(target=ask, daemon=True).start()
    try:
        return answer.get(timeout=_PATIENCE)
    except queue.Empty:
        return f"no answer in {_PATIENCE} seconds"
