"""``forgetfree serve``: a server in a process of its own, asked by real clients; its limits."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forgetfree import Predictor, cli

pytest.importorskip("fastapi", reason="the server is not installed: pip install 'forgetfree[serve]'")
pytest.importorskip("uvicorn", reason="the server is not installed: pip install 'forgetfree[serve]'")

MakeRun = Callable[..., Path]
WORDS = ["the", "lovely", "awful", "film", "story", "river", "city", "moon", "was", "is", "dull", "goal", "war", "bank"]


class Server:
    """A running server, as a client sees it."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process, self.address = process, address

    def ask(self, path: str, content: Any = None, kind: str = "application/json") -> tuple[int, Any]:
        """Return status and JSON; a content is posted as of this type."""
        data = content if isinstance(content, bytes | None) else json.dumps(content).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": kind})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def end(self, by: signal.Signals) -> tuple[int, str]:
        """Return its exit code, and what it said on stderr."""
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
    running = start(run, "--most-bytes", "5000", "--most-texts", "4", "--most-characters", "300")
    yield running
    code, said = running.end(signal.SIGTERM)
    assert code == 0 and "Traceback" not in said


def test_it_says_what_it_is(server: Server) -> None:
    assert server.address.startswith("http://127.0.0.1:")
    code, health = server.ask("/health")
    assert (code, health["status"], health["waiting"]) == (200, "ok", 0)
    code, tasks = server.ask("/tasks")
    assert code == 200 and [each["task"] for each in tasks] == ["qnli", "ag_news", "sst2"]
    assert tasks[0] == {"task": "qnli", "kind": "pair", "labels": ["entailment", "not_entailment"]}
    code, described = server.ask("/openapi.json")
    assert code == 200 and set(described["paths"]) == {"/predict", "/tasks", "/health"}
    assert {"200", "404", "413", "422", "503"} <= set(described["paths"]["/predict"]["post"]["responses"])


def test_32_clients_at_once_get_what_predict_says(server: Server, run: Path) -> None:
    """Labels are equal, and probabilities to 1e-5: texts of several tasks share a batch."""
    draw, predictor = random.Random(0), Predictor.of_run(run)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 20)))

    questions: list[dict[str, Any]] = []
    for number in range(96):
        task = ("sst2", "qnli", "ag_news")[number % 3]
        texts = [(text(), text()) if task == "qnli" else text() for _ in range(draw.randint(1, 4))]
        questions.append({"task": task, "text": texts[0]} if number % 2 else {"task": task, "texts": texts})
    gate = threading.Barrier(32)

    def ask(share: list[dict[str, Any]]) -> list[Any]:
        gate.wait()
        return [server.ask("/predict", question) for question in share]

    with ThreadPoolExecutor(32) as clients:
        answered = list(clients.map(ask, [questions[i::32] for i in range(32)]))
    for i, share in enumerate(answered):
        for question, (code, said) in zip(questions[i::32], share, strict=True):
            assert code == 200
            expected = predictor.answer(question["task"], question.get("texts") or [question["text"]])
            assert [each["label"] for each in said["answers"]] == [answer.label for answer in expected]
            for got, answer in zip(said["answers"], expected, strict=True):
                assert got["task"] == question["task"]
                assert got["probabilities"] == pytest.approx(answer.probabilities, abs=1e-5)
                assert got["probability"] == max(got["probabilities"].values())
                assert got["cut_tokens"] == 0


@pytest.mark.parametrize(
    ("task", "texts", "lost"),
    [
        ("sst2", ["film " * 59], [13]),  # 59 and 2 special tokens, of which 48 are read
        ("sst2", ["film", "film", "film " * 46, "film " * 47], [0, 0, 0, 1]),
        ("qnli", [("Who?", "it was " * 30), ("Who?", "Ada")], [17, 0]),  # 2, 60 and 3 special tokens
    ],
)
def test_it_says_how_many_tokens_of_a_text_it_did_not_read(
    server: Server, task: str, texts: list[Any], lost: list[int]
) -> None:
    code, said = server.ask("/predict", {"task": task, "texts": texts})
    assert code == 200
    assert [each["cut_tokens"] for each in said["answers"]] == lost


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        ({"task": "sst", "text": "a"}, 404, "Did you mean 'sst2'?"),
        ({"task": "sst2"}, 422, "Expected one of text and texts"),
        ({"task": "sst2", "text": "a", "texts": ["b"]}, 422, "Expected one of text and texts"),
        ({"text": "a"}, 422, "body.task: Field required"),
        ({"task": "sst2", "text": "a", "top": 3}, 422, "body.top: Extra inputs are not permitted"),
        ({"task": "sst2", "text": ["a", "b"]}, 422, "reads one text, got 2"),
        (
            {"task": "qnli", "texts": [["a", "b"], "c"]},
            422,
            "reads pairs of texts, got 1 text(s) in 'c'. Give the two as two arguments or with a tab between, or as a list",
        ),
        ({"task": "sst2", "text": ["a", "b"]}, 422, "several texts as a list in texts"),
        ({"task": "sst2", "text": ["a", "b", "c"]}, 422, "body.text: expected one text, or a list of the two texts"),
        ({"task": "sst2", "texts": ["a", 3]}, 422, "body.texts.1: expected one text"),
        ({"task": "sst2", "text": 3}, 422, "The request is not as /docs says: body.text: expected one text"),
        (b'{"task": "sst2", "text": a}', 422, "JSON decode error in the field 'text', at character "),
        (b'{"task": "sst2", "text": "\\ud800"}', 422, "half of a surrogate pair"),
        (b"{", 422, "JSON decode error"),
        ({"task": "sst2", "texts": ["a"] * 5}, 413, "at most 4 texts, got 5"),
        ({"task": "sst2", "text": "a" * 301}, 413, "at most 300 characters a text, got 301"),
        ({"task": "sst2", "text": "a" * 5000}, 413, "a request of at most 5000 bytes"),
    ],
)
def test_what_it_refuses(server: Server, content: Any, code: int, message: str) -> None:
    got, said = server.ask("/predict", content)
    assert got == code and list(said) == ["error"] and message in said["error"]
    assert server.ask("/predict", {"task": "sst2", "text": "a"})[0] == 200  # it goes on


def test_a_request_without_its_type_is_told_to_name_it(server: Server) -> None:
    code, said = server.ask("/predict", {"task": "sst2", "text": "a"}, kind="application/x-www-form-urlencoded")
    assert code == 422 and "Add that header" in said["error"]
    assert "header" not in server.ask("/predict", {"task": "sst2"})[1]["error"]


def test_what_is_not_there(server: Server) -> None:
    assert server.ask("/nothing") == (404, {"error": "There is no GET /nothing. See /docs."})
    assert server.ask("/predict") == (405, {"error": "There is no GET /predict. See /docs."})
    assert server.ask("/predict", {"task": "sst2", "texts": []}) == (200, {"answers": []})


def test_a_queue_that_is_full_says_so_and_a_batch_that_fails_stops_nothing() -> None:
    from fastapi import HTTPException

    from forgetfree.serve.batcher import Batcher, Limits

    class Slow:
        batches: list[list[str]] = []  # noqa: RUF012

        def answer_mixed(self, tasks: list[str], texts: list[str], ending: Any) -> list[str]:
            self.batches.append(texts)
            if "bad" in texts:
                raise RuntimeError("out of memory")
            return [f"{task}: {text}" for task, text in zip(tasks, texts, strict=True)]

    async def talk() -> None:
        slow: Any = Slow()
        batcher = Batcher(slow, Limits(queue=6, batch=4))
        work = asyncio.create_task(batcher.work())
        asked = [batcher.put("t", texts) for texts in (["a", "b"], ["c"], ["d", "e"])]
        await asyncio.sleep(0)
        with pytest.raises(HTTPException, match=r"503: Too many texts wait: 5, of at most 6\. Ask again") as caught:
            await batcher.put("t", ["f", "g"])
        assert caught.value.headers == {"Retry-After": "1"}
        assert await asyncio.gather(*asked) == [["t: a", "t: b"], ["t: c"], ["t: d", "t: e"]]
        assert slow.batches == [["a", "b", "c"], ["d", "e"]]  # as many whole requests as go into four texts
        failing, beside = batcher.put("t", ["bad"]), batcher.put("u", ["good"])
        with pytest.raises(RuntimeError):
            await failing
        assert await beside == ["u: good"]
        assert batcher.size == 0
        work.cancel()

    asyncio.run(talk())


def test_a_stream_that_nobody_waits_for_is_not_begun() -> None:
    """Because its client has gone, or the server ends."""
    from forgetfree.serve.batcher import Batcher, Limits
    from forgetfree.serve.served_task import Ending

    go_on, begun = threading.Event(), list[str]()

    class Waiting:
        def answer_mixed(self, tasks: list[str], texts: list[str], ending: Any) -> list[str]:
            begun.extend(texts)
            go_on.wait(20)
            return texts

    async def talk() -> None:
        waiting: Any = Waiting()
        batcher = Batcher(waiting, Limits(streams=1))
        first, left, last = (batcher.put("t", [text], Ending(send=print)) for text in ("first", "left", "last"))
        while not begun:
            await asyncio.sleep(0.001)
        left.cancel()
        go_on.set()
        assert (await first, await last) == (["first"], ["last"])
        go_on.clear()
        under_way, late = (batcher.put("t", [text], Ending(send=print)) for text in ("under way", "late"))
        while "under way" not in begun:
            await asyncio.sleep(0.001)
        end = asyncio.create_task(batcher.end())
        await asyncio.sleep(0)
        go_on.set()
        await end
        assert await under_way == ["under way"] and late.cancelled()
        assert begun == ["first", "last", "under way"] and batcher.size == 0

    asyncio.run(talk())


def talk_raw(server: Server, text: str) -> bytes:
    """Return what is answered to these bytes, until the server closes."""
    host, _, port = server.address.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as line:
        line.sendall(text.replace("\n", "\r\n").encode())
        return b"".join(iter(lambda: line.recv(65536), b""))


def asked_as(**headers: str) -> str:
    lines = "".join(f"{name}: {value}\n" for name, value in headers.items())
    return f"GET /health HTTP/1.1\n{lines}Connection: close\n\n"


def test_pages_of_other_sites_are_refused(server: Server) -> None:
    for headers in (
        {"Host": "127.0.0.1:1"},
        {"Host": "localhost"},
        {"Host": "[::1]:80"},
        {"Host": "127.0.0.1:1", "Origin": "http://127.0.0.1:1"},
    ):
        assert b" 200 " in talk_raw(server, asked_as(**headers)).splitlines()[0]
    for headers in (
        {"Host": "rebound.example"},
        {"Host": "rebound.example", "Origin": "http://rebound.example"},
        {"Host": "127.0.0.1.rebound.example:1"},
        {"Host": "127.0.0.1:1", "Origin": "http://rebound.example"},
        {"Host": "127.0.0.1:1", "Origin": "null"},
    ):
        answer = talk_raw(server, asked_as(**headers))
        assert b" 403 " in answer.splitlines()[0] and b"--allow-origin" in answer


def test_small_things_of_requests(server: Server) -> None:
    answer = talk_raw(server, asked_as(Host="localhost").replace("GET", "HEAD"))
    assert b" 200 " in answer.splitlines()[0]
    code, said = server.ask("/predict", {"task": "x" * 4000, "text": "a"})
    assert code == 404 and len(said["error"]) < 400
    code, said = server.ask("/predict", b'{"task": "qnli", "task": "sst2", "text": "a"}')
    assert code == 422 and "the key 'task' stands twice" in said["error"]


@pytest.mark.sampled(share=0.3)
def test_an_origin_can_be_allowed_and_a_request_without_end_does_not_delay_the_end(run: Path) -> None:
    server = start(run, "--allow-origin", "https://my.site")
    answer = talk_raw(server, asked_as(Host="127.0.0.1:1", Origin="https://my.site"))
    assert b" 200 " in answer.splitlines()[0] and b"access-control-allow-origin: https://my.site" in answer.lower()
    assert b" 200 " in talk_raw(server, asked_as(Host="my.site")).splitlines()[0]
    assert b" 403 " in talk_raw(server, asked_as(Host="127.0.0.1:1", Origin="https://other.site")).splitlines()[0]
    host, _, port = server.address.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as line:
        line.sendall(
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        time.sleep(0.5)
        begin = time.monotonic()
        code, said = server.end(signal.SIGTERM)
        assert code == 0 and "Traceback" not in said
        assert time.monotonic() - begin < 5
        assert b" 503 " in line.recv(65536).splitlines()[0]


def test_a_body_that_does_not_come_in_time_is_refused() -> None:
    from fastapi import HTTPException

    from forgetfree.serve.server import _BodyLimit

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass

    parts = iter([{"type": "http.request", "body": b"{", "more_body": True}])

    async def receive() -> Any:
        for part in parts:
            return part
        await asyncio.sleep(60)

    with pytest.raises(HTTPException, match=r"408: The request did not come to its end within 0\.2 seconds"):
        asyncio.run(_BodyLimit(app, 100, 0.2, lambda: False)({}, receive, None))


def test_headers_that_do_not_come_in_time_end_the_connection() -> None:
    """However slowly they trickle in; a whole request, and a second one on its connection, are answered."""
    import uvicorn

    from forgetfree.serve.server import TimelyProtocol

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def ask() -> None:
        config = uvicorn.Config(app, http=partial(TimelyProtocol, seconds=0.5), lifespan="off")
        config.load()
        state = uvicorn.server.ServerState()

        def protocol() -> Any:
            return config.http_protocol_class(config=config, server_state=state, app_state={}, _loop=loop)

        loop = asyncio.get_running_loop()
        server = await loop.create_server(protocol, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        silent = await asyncio.open_connection("127.0.0.1", port)
        slow, whole = await asyncio.open_connection("127.0.0.1", port), await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            whole[1].write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b" 200 " in await whole[0].readuntil(b"\r\n\r\n")
        slow[1].write(b"GET / HTTP/1.1\r\n")
        await asyncio.sleep(0.1)
        slow[1].write(b"X-More: a\r\n")
        told = await asyncio.wait_for(slow[0].read(), 10)
        assert b" 408 " in told.splitlines()[0] and b"within 0.5 seconds" in told
        assert await asyncio.wait_for(silent[0].read(), 10) == b""
        server.close()
        for _, writer in (silent, slow, whole):
            writer.close()
            await writer.wait_closed()

    asyncio.run(ask())


@pytest.mark.slow
def test_other_strategies_are_served_and_ctrl_c_ends_it(run: Path) -> None:
    server = start(run, "--strategy", "lora")
    code, said = server.ask("/predict", {"task": "sst2", "texts": ["a lovely film", "a dull story"]})
    expected = Predictor.of_run(run, strategy="lora").answer("sst2", ["a lovely film", "a dull story"])
    assert code == 200 and [each["label"] for each in said["answers"]] == [each.label for each in expected]
    assert server.end(signal.SIGINT)[0] == 0


def test_a_server_that_cannot_start_says_why(server: Server, run: Path, capsys: Any, tmp_path: Path) -> None:
    port = server.address.rpartition(":")[2]
    for arguments, message in (
        ([str(run), "--port", port], f"cannot listen on 127.0.0.1, port {port}"),
        ([str(run), "--port", "70000"], "--port must be a number from 0 to 65535"),
        ([str(run), "--port", "0", "--most-texts", "0"], "--most-texts must be at least 1, got 0."),
    ):
        assert cli.main(["serve", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["serve", str(tmp_path), "--port", "0"]) == 1
    assert "config.json" in capsys.readouterr().err


def test_without_its_library_it_names_the_remedy(run: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["serve", str(run)]) == 2
    assert "pip install 'forgetfree[serve]'" in capsys.readouterr().err
