"""The check whether the hub can be reached, through the same proxies as its client."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from forgetfree.cli.hub import needs_hub

SCRIPT = """
import json, os, sys
from forgetfree.cli import hub
hub._PATIENCE = float(sys.argv[1])
hub.go_offline_if_cut_off()
from huggingface_hub import constants
print(json.dumps([constants.HF_HUB_OFFLINE, os.environ.get("HF_HUB_OFFLINE")]))
"""


def asked(patience: float = 60, **variables: str) -> tuple[bool, str | None, str]:
    """Return ``HF_HUB_OFFLINE`` in the client and in the environment, and the printed note.

    The time limit is longer than the user's by default, because tests may keep the machine busy.
    """
    clean = {name: value for name, value in os.environ.items() if "proxy" not in name.lower() and name[:3] != "HF_"}
    command = [sys.executable, "-c", SCRIPT, str(patience)]
    done = subprocess.run(command, env=clean | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    offline, variable = json.loads(done.stdout)
    return offline, variable, done.stderr


@pytest.fixture
def silent() -> Iterator[str]:
    """Yield HOST:PORT of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=8) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def refusing() -> str:
    """Return HOST:PORT without a server."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def answering() -> Iterator[tuple[str, list[str]]]:
    """Yield HOST:PORT of a server that answers every request with an error, and the requested paths."""
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            paths.append(self.path)
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}", paths
        server.shutdown()


@pytest.mark.sampled(share=0.15)
def test_a_hub_that_never_answers_is_not_waited_for(silent: str) -> None:
    offline, variable, said = asked(0.2, HF_ENDPOINT=f"http://{silent}")
    assert (offline, variable) == (True, "1")
    assert said.startswith("note: the hub (127.0.0.1) cannot be reached (")
    assert "Set HF_HUB_OFFLINE=0 to wait for it." in said


def test_a_hub_that_refuses_is_known_at_once(refusing: str) -> None:
    offline, _, said = asked(HF_ENDPOINT=f"http://user:secret@{refusing}")
    assert offline
    assert "refused" in said and "secret" not in said


def test_a_hub_that_answers_with_an_error_is_reached(answering: tuple[str, list[str]]) -> None:
    address, paths = answering
    assert asked(HF_ENDPOINT=f"http://{address}")[:2] == (False, None)
    assert len(paths) == 1


def test_a_hub_is_reached_through_its_proxy(answering: tuple[str, list[str]], silent: str) -> None:
    address, paths = answering
    assert asked(HF_ENDPOINT="http://hub.invalid", HTTP_PROXY=f"http://{address}")[:2] == (False, None)
    assert paths and paths[0].startswith("http://hub.invalid")
    past = {"HTTP_PROXY": f"http://{silent}", "NO_PROXY": "127.0.0.1"}
    assert asked(HF_ENDPOINT=f"http://{address}", **past)[:2] == (False, None)


@pytest.mark.parametrize("value", ["0", "1"])
def test_who_says_whether_to_go_offline_is_obeyed_and_nobody_is_asked(
    value: str, answering: tuple[str, list[str]]
) -> None:
    address, paths = answering
    assert asked(HF_ENDPOINT=f"http://{address}", HF_HUB_OFFLINE=value) == (value == "1", value, "")
    assert paths == []


def test_only_names_of_the_hub_need_it(tmp_path) -> None:
    assert needs_hub("minilm", "hub") and needs_hub("gpt2", "demo") and needs_hub("owner/name")
    assert not any(needs_hub(model, "demo") for model in ("minilm", str(tmp_path), "nosuch/", "./nosuch", "/no/such"))
