"""``forgetfree serve``: a server in its own process, with requests by real clients, and its refusals."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forgetfree import Predictor, cli
from forgetfree.kinds.kind import kind_of

pytest.importorskip("fastapi", reason="the server is not installed: pip install 'forgetfree[serve]'")
pytest.importorskip("uvicorn", reason="the server is not installed: pip install 'forgetfree[serve]'")

MakeRun = Callable[..., Path]
WORDS = ["the", "lovely", "awful", "film", "story", "river", "city", "moon", "was", "is", "dull", "goal", "war", "bank"]


class Server:
    """A running server, from the view of a client."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process, self.address = process, address

    def ask(self, path: str, content: Any = None, **headers: str) -> tuple[int, Any]:
        """Return the status and the JSON of the response, or its text; a content is posted."""
        data = content if isinstance(content, bytes | None) else json.dumps(content).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read().decode()
            return error.code, json.loads(said) if said.startswith("{") else said

    def end(self, by: signal.Signals) -> tuple[int, str]:
        """Stop the server by a signal; return its exit code and its stderr."""
        self.process.send_signal(by)
        _, said = self.process.communicate(timeout=30)
        return self.process.returncode, said


def start(run: Path, *flags: str) -> Server:
    words = [sys.executable, "-m", "forgetfree", "serve", str(run), "--port", "0", *flags]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line.startswith("Serving "), process.stderr.read()
    return Server(process, line.split(" on ")[1].split(";")[0])


@pytest.fixture(scope="module")
def run(finished_run: MakeRun) -> Path:
    return finished_run("bert", "grafting-continual", "lora")


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Server]:
    running = start(run, "--allow-origin", "https://my.site", "--allow-host", "my.site")
    yield running
    code, said = running.end(signal.SIGTERM)
    assert code == 0 and "Traceback" not in said


def test_it_says_what_it_is(server: Server) -> None:
    assert server.address.startswith("http://127.0.0.1:")
    code, health = server.ask("/health")
    assert (code, health["status"]) == (200, "ok")
    code, tasks = server.ask("/tasks")
    assert code == 200 and [each["task"] for each in tasks] == ["qnli", "ag_news", "sst2"]
    assert tasks[0] == {"task": "qnli", "kind": "pair", "labels": ["entailment", "not_entailment"]}
    code, described = server.ask("/openapi.json")
    assert code == 200 and set(described["paths"]) == {"/predict", "/tasks", "/health"}
    for path, code in (("/", 404), ("/nothing", 404), ("/predict", 405)):
        got, said = server.ask(path)
        assert (got, said["error"]["message"]) == (code, f"There is no GET {path}. See /docs.")
        assert said["error"]["code"] is None  # a code is only for unknown models


def test_clients_at_once_get_what_predict_says(server: Server, run: Path) -> None:
    """Simultaneous clients ask for all tasks, and get the predictions to the bit."""
    draw, predictor = random.Random(0), Predictor.of_run(run)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 80)))  # some exceed the maximum of 48 tokens

    questions = list[dict[str, Any]]()
    for number in range(24):
        task, count = ("sst2", "qnli", "ag_news")[number % 3], draw.randint(0, 4)
        texts = [(text(), text()) if task == "qnli" else text() for _ in range(count)]
        questions.append({"task": task, "texts": texts})
    gate = threading.Barrier(8)

    def ask(share: list[dict[str, Any]]) -> list[Any]:
        gate.wait()
        return [server.ask("/predict", question) for question in share]

    with ThreadPoolExecutor(8) as clients:
        answered = list(clients.map(ask, [questions[i::8] for i in range(8)]))
    for i, share in enumerate(answered):
        for question, (code, said) in zip(questions[i::8], share, strict=True):
            task = predictor.definition(question["task"])
            expected = [kind_of(task).json(task, each) for each in predictor.answer(**question)]
            assert (code, said) == (200, {"answers": expected})


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        ({"task": "sst", "texts": ["a"]}, 404, "Did you mean 'sst2'?"),
        ({"texts": ["a"]}, 422, "The request is not as /docs says: body.task: Field required"),
        ({"task": "sst2", "texts": ["a"], "top": 3}, 422, "body.top: Extra inputs are not permitted"),
        ({"task": "sst2", "texts": "a"}, 422, "body.texts: Input should be a valid list"),
        ({"task": "sst2", "texts": [["a", "b"]]}, 422, "reads one text, got 2"),
        ({"task": "qnli", "texts": [["a", "b"], "c"]}, 422, "reads pairs of texts, got 1 text(s) in 'c'."),
        ({"task": "sst2", "texts": ["a", 3]}, 422, "Text 2: expected a text, got 3."),
        ({"task": "sst2", "texts": ["a", " "]}, 422, "Text 2 is empty."),
        (b'{"task": "sst2", "texts": ["\\ud800"]}', 422, "half of a surrogate pair"),
        (b"{", 422, "JSON decode error"),
        ({"task": "sst2", "texts": ["a"] * 257}, 422, "List should have at most 256 items"),
    ],
)
def test_wrong_requests_are_refused(server: Server, content: Any, code: int, message: str) -> None:
    got, said = server.ask("/predict", content)
    assert got == code and message in said["error"]["message"]
    assert server.ask("/predict", {"task": "sst2", "texts": ["a"]})[0] == 200  # the server still answers


@pytest.mark.parametrize(
    ("header", "code", "message"),
    [
        ("Transfer-Encoding: chunked", 411, "needs a Content-Length"),
        (f"Content-Length: {2**20 + 1}", 413, "at most 1,048,576 bytes, got 1048577."),
    ],
)
def test_a_body_is_refused_before_it_is_read(server: Server, header: str, code: int, message: str) -> None:
    """The test never sends a body, because the server may close the connection while a client sends."""
    host, _, port = server.address.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as line:
        line.sendall(f"POST /predict HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{header}\r\n\r\n".encode())
        said = b"".join(iter(lambda: line.recv(65536), b"")).decode()
    assert said.startswith(f"HTTP/1.1 {code} ") and message in said


def test_pages_of_other_sites_get_no_answers(server: Server) -> None:
    for host in ("127.0.0.1:1", "localhost", "[::1]:80", "my.site"):
        assert server.ask("/health", Host=host)[0] == 200
    for host in ("rebound.example", "127.0.0.1.rebound.example:1"):
        assert server.ask("/health", Host=host) == (400, "Invalid host header")
    for origin, allowed in (("https://my.site", "https://my.site"), ("https://other.site", None)):
        request = urllib.request.Request(server.address + "/health", headers={"Origin": origin})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.headers["access-control-allow-origin"] == allowed


def test_a_server_that_cannot_start_says_why(
    server: Server, run: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = server.address.rpartition(":")[2]
    assert cli.main(["serve", str(run), "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["serve", str(run)]) == 2
    assert "pip install 'forgetfree[serve]'" in capsys.readouterr().err
