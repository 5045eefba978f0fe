"""Texts over HTTP: what clients of OpenAI's API ask for, whole and as a stream."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prompted
import pytest
import tiny

from forgetfree import Predictor
from forgetfree.data.bad_rows import RowError
from forgetfree.data.chat_template import ChatTemplate
from forgetfree.errors import ForgetfreeError, ModelError
from forgetfree.serve.served_task import Ending, served
from forgetfree.tasks import Decoding

pytest.importorskip("fastapi", reason="the server is not installed: pip install 'forgetfree[serve]'")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    model = prompted.write_model("Llama", place / "model", chats=True)
    data = prompted.write_data(place / "data")
    closed = {"closed_answers": [*prompted.WORDS, "great great film"]}
    (data / "first" / "source.json").write_text(json.dumps(closed))
    return prompted.run(data, model, place / "run", "fine-tune", "grafting-continual", "lora")


@pytest.fixture(scope="module")
def client(run: Path) -> Iterator[Any]:
    from fastapi.testclient import TestClient

    from forgetfree.serve.batcher import Limits
    from forgetfree.serve.server import application

    with TestClient(application(Predictor.of_run(run), Limits(tokens=20, characters=500))) as asking:
        yield asking


def ask(model: str = "chat", content: Any = "great film", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], **more}


def test_tasks_are_models(client: Any) -> None:
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == list(prompted.TASKS)
    assert client.get("/v1/models/chat").json()["object"] == "model"


@pytest.mark.parametrize("task", ["chat", "last"])
def test_a_chat_is_answered_as_by_predict(run: Path, client: Any, task: str) -> None:
    (written,) = Predictor.of_run(run).answer(task, ["great film"])
    for content in ("great film", [{"type": "text", "text": "great "}, {"type": "text", "text": "film"}]):
        said = client.post("/v1/chat/completions", json=ask(task, content, temperature=0, top_p=0.5, seed=3)).json()
        (choice,) = said["choices"]
        assert choice["message"]["content"] == written.text
        assert (said["object"], said["model"]) == ("chat.completion", task)
        assert said["usage"]["completion_tokens"] == written.tokens
        assert choice["finish_reason"] == ("stop" if written.ended else "length")
    said = client.post("/predict", json={"task": task, "text": "great film"}).json()
    assert said == {"answers": [{"task": task, "text": written.text, "cut_tokens": 0}]}


def test_a_text_is_drawn_or_searched_as_a_request_says(run: Path, client: Any) -> None:
    def said(**asked: Any) -> str:
        answer = client.post("/v1/chat/completions", json=ask("last", **asked)).json()
        content: str = answer["choices"][0]["message"]["content"]
        return content

    predictor = Predictor.of_run(run)
    for asked, decoding in (
        ({"temperature": 1.5, "top_p": 0.9, "seed": 3}, Decoding(temperature=1.5, top_p=0.9, seed=3)),
        ({"num_beams": 3}, Decoding(num_beams=3)),
    ):
        (written,) = predictor.answer("last", ["great film"], ending=Ending(decoding=decoding))
        assert said(**asked) == said(**asked) == written.text
    assert len({said(temperature=5, seed=seed) for seed in range(4)}) > 1


def test_a_stream_has_the_same_text(client: Any) -> None:
    asked = ask("last", max_tokens=4)
    whole = client.post("/v1/chat/completions", json=asked).json()
    assert whole["usage"]["completion_tokens"] <= 4
    with client.stream(
        "POST", "/v1/chat/completions", json={**asked, "stream": True, "stream_options": {"include_usage": True}}
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    *chunks, last = map(json.loads, lines[:-1])
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert deltas[0]["delta"]["role"] == "assistant"
    pieces = [each["delta"].get("content", "") for each in deltas]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]
    assert len([piece for piece in pieces if piece]) > 1
    assert [each["finish_reason"] for each in deltas if each["finish_reason"]] == [whole["choices"][0]["finish_reason"]]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1


@pytest.mark.parametrize("strategy", ["fine-tune", "grafting-continual", "lora"])
def test_streams_and_other_requests_take_turns(run: Path, strategy: str) -> None:
    """What waits is answered before a stream is at its end, each task by its own weights, and every text is that of predict."""
    from forgetfree.serve.batcher import Batcher, Limits

    predictor, texts = Predictor.of_run(run, strategy=strategy), {}
    for task in prompted.TASKS:
        (texts[task],) = predictor.answer(task, ["great film"])

    async def talk() -> None:
        batcher, loop = Batcher(predictor, Limits(wait=0.0)), asyncio.get_running_loop()
        work, begun, go_on = asyncio.create_task(batcher.work()), asyncio.Event(), threading.Event()

        def send(piece: str) -> None:
            loop.call_soon_threadsafe(begun.set)
            go_on.wait(60)

        streams = [batcher.put("last", ["great film"], Ending(send=send))]
        await begun.wait()
        streams.append(batcher.put("chat", ["great film"], Ending(send=send)))
        others = [batcher.put(task, ["great film"]) for task in prompted.TASKS]
        while batcher._turns._waiting < 2:  # the other stream, and the batch
            await asyncio.sleep(0.001)
        go_on.set()
        whole = await asyncio.gather(*others)
        assert not streams[0].done()
        assert [each.text for (each,) in whole] == [texts[task].text for task in prompted.TASKS]
        (last,), (chat,) = await asyncio.gather(*streams)
        assert (last, chat) == (texts["last"], texts["chat"])
        begun.clear()
        go_on.clear()
        left = batcher.put("last", ["great film"], Ending(send=send))
        await begun.wait()
        end = asyncio.create_task(batcher.end())
        await asyncio.sleep(0)
        go_on.set()
        await end
        with pytest.raises(ForgetfreeError, match="The server ends"):
            await left
        assert batcher.size == 0
        work.cancel()

    asyncio.run(talk())


def test_a_client_that_goes_gets_nothing_more_and_leaves_nothing_behind() -> None:
    from forgetfree.serve import chat

    async def leave() -> None:
        pieces, answer = chat._Pieces(), asyncio.get_running_loop().create_future()
        events = chat._events({}, answer, pieces, False)
        await anext(events)
        reading = asyncio.create_task(anext(events))
        await asyncio.sleep(0)
        pieces.send("great")
        assert '"great"' in await reading
        reading = asyncio.create_task(anext(events))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        with pytest.raises(ForgetfreeError, match="has gone"):
            pieces.send("film")
        assert answer.cancelled()  # so the failure is none that asyncio logs because nobody saw it

    asyncio.run(leave())


def test_requests_that_wait_together_end_where_each_was_asked_to(run: Path, client: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    predictor = Predictor.of_run(run)
    (whole,) = predictor.answer("last", ["great film"])
    asked = [ask("last", max_tokens=1 + number % 3) for number in range(9)] + [ask("last", stop=whole.text[1])]
    with ThreadPoolExecutor(10) as clients:
        said = list(clients.map(lambda each: client.post("/v1/chat/completions", json=each).json(), asked))
    assert [each["usage"]["completion_tokens"] for each in said[:9]] == [1, 2, 3] * 3
    assert said[9]["choices"][0]["message"]["content"] == whole.text[:1]


@pytest.mark.parametrize(
    ("asked", "code", "field", "message"),
    [
        (ask("unknown"), 404, None, "There is no model 'unknown': a model is a task."),
        (ask(temperature=-1), 422, "temperature", "temperature must be 0, or from 1e-06 to 100, got -1.0"),
        (ask(temperature=1e-310), 422, "temperature", "temperature must be 0, or from 1e-06 to 100, got 1e-310"),
        (ask(temperature=1, num_beams=2), 422, "num_beams", "num_beams must be 1 where temperature draws texts"),
        (ask(top_p=0.5), 422, "top_p", "top_p must be 1 where texts are not drawn, got 0.5: give temperature, too"),
        (ask(num_beams=0, top_p=0.5), 422, "num_beams", "num_beams must be from 1 to 64, got 0; top_p must be 1 where"),
        (
            ask(num_beams=5),
            422,
            "num_beams",
            "Expected num_beams of at most 4, got 5. Ask for fewer, or start the server with --most-b",
        ),
        (ask(n=2), 422, "n", "n may be 1 alone here, got 2. Leave it out."),
        (ask(tool_choice="required"), 422, "tool_choice", 'tool_choice may be "none" alone here'),
        (ask(beams=2), 422, "beams", "There is no option 'beams' here. Leave it out."),
        (ask(max_tokens=21), 422, "max_tokens", "Expected max_tokens of at most 20, got 21"),
        (ask(max_completion_tokens=21), 422, "max_completion_tokens", "Expected max_completion_tokens of at most 20"),
        (ask(max_tokens=0), 422, "max_tokens", "body.max_tokens: Input should be greater than or equal to 1"),
        (ask(stop=[""]), 422, "stop", "no empty text in stop"),
        (ask("first", stop="a"), 422, "stop", "Task 'first' has closed answers, of which the likeliest is given whole"),
        (ask("first", temperature=1), 422, "temperature", "temperature would change nothing. Leave it out."),
        (ask("first", num_beams=2), 422, "num_beams", "num_beams would change nothing. Leave it out."),
        (ask(content="film " * 200), 413, None, "Expected at most 500 characters a text"),
        (ask(content=[{"type": "image_url"}]), 422, "messages", "The request is not as /docs says"),
        ({"model": "chat", "messages": []}, 422, "messages", "The request is not as /docs says"),
        (
            {"model": "chat", "messages": [{"role": "assistant", "content": "a"}]},
            422,
            None,
            "nothing is left to answer",
        ),
        ({"model": "last", "messages": prompted.chat("a")}, 422, None, "Task 'last' was trained on single prompts"),
    ],
)
def test_what_is_not_done_is_told_as_clients_read_it(
    client: Any, asked: dict[str, Any], code: int, field: str | None, message: str
) -> None:
    for stream in (False, True):  # a stream is refused before it begins
        answer = client.post("/v1/chat/completions", json={**asked, "stream": stream})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (code, "invalid_request_error", field)
        assert message in error["message"]
        assert error["code"] == ("model_not_found" if code == 404 else None)
    assert client.get("/v1/models/unknown").json()["error"]["code"] == "model_not_found"


def test_a_body_that_is_no_json_names_no_field(client: Any) -> None:
    answer = client.post("/v1/chat/completions", content='{"model": ', headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, None)


def test_a_closed_answer_is_whole_and_what_changes_nothing_is_accepted(run: Path, client: Any) -> None:
    (chosen,) = Predictor.of_run(run).answer("first", ["great film"])
    usual = {"temperature": 0, "top_p": 0.5, "n": 1, "seed": 3, "stop": None, "num_beams": 1, "tool_choice": "none"}
    said = client.post("/v1/chat/completions", json=ask("first", max_tokens=20, **usual)).json()
    assert (said["choices"][0]["message"]["content"], said["choices"][0]["finish_reason"]) == (chosen.text, "stop")
    answer = client.post("/v1/chat/completions", json=ask("first", max_tokens=1))
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "max_tokens")
    assert "which are given whole and have up to 5 tokens, got max_tokens=1" in answer.json()["error"]["message"]


def test_a_task_of_labels_is_no_model(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Predictor, "served", lambda *_: served(tiny.TASK))
    answer = client.get("/v1/models/first")
    assert (answer.status_code, client.get("/v1/models").json()["data"]) == (404, [])
    assert "Task 'first' is answered by labels, and models write texts." in answer.json()["error"]["message"]


def test_as_many_beams_as_the_run_s_may_be_asked_for() -> None:
    from forgetfree.serve.chat import ChatRequest

    asked = ChatRequest.model_validate(ask(num_beams=8))
    assert asked.decoding(Decoding(num_beams=8), 4) == Decoding(num_beams=8)


@pytest.fixture(scope="module")
def openai_client(run: Path) -> Iterator[Any]:
    """OpenAI's own client, of a server on a port of this machine."""
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed: pip install openai")
    import uvicorn

    from forgetfree.serve.batcher import Limits
    from forgetfree.serve.server import application

    app = application(Predictor.of_run(run), Limits(tokens=20))
    with socket.create_server(("127.0.0.1", 0)) as place:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [place]})
        thread.start()
        address = f"http://127.0.0.1:{place.getsockname()[1]}/v1"
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as asking:
            yield asking
        server.should_exit = True
        thread.join()


def test_openai_s_client_gets_the_texts_of_predict(run: Path, openai_client: Any) -> None:
    """Whole and streamed, with its helper for streams, too."""
    predictor = Predictor.of_run(run)
    assert [model.id for model in openai_client.models.list()] == list(prompted.TASKS)
    create, messages = openai_client.chat.completions.create, [{"role": "user", "content": "great film"}]
    for task in ("chat", "last"):
        (written,) = predictor.answer(task, ["great film"])
        said = create(model=task, messages=messages, temperature=0)
        assert said.choices[0].message.content == written.text
        assert said.usage.total_tokens == written.prompt_tokens + written.tokens
        chunks = list(create(model=task, messages=messages, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == written.text
        assert chunks[-1].usage == said.usage
    short = create(model="last", messages=messages, max_completion_tokens=2)
    assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (2, "length")


def test_openai_s_client_reads_what_is_refused(openai_client: Any) -> None:
    import openai

    create, messages = openai_client.chat.completions.create, [{"role": "user", "content": "great film"}]
    with pytest.raises(openai.NotFoundError, match="There is no model 'unknown'"):
        create(model="unknown", messages=messages)
    with pytest.raises(openai.UnprocessableEntityError, match="Expected max_tokens of at most 20"):
        create(model="chat", messages=messages, max_tokens=21, stream=True)


def test_turns_that_the_chat_template_refuses_are_told(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one paragraph, whole and as a stream, before it begins."""

    def refuse(*_: Any, **__: Any) -> str:
        raise RowError("chat that the template refuses", "expected another chat.")

    monkeypatch.setattr(ChatTemplate, "put_together", refuse)
    for stream in (False, True):
        answer = client.post("/v1/chat/completions", json=ask(stream=stream))
        told = (answer.status_code, answer.json()["error"]["message"])
        assert told == (422, "Prompt 1: expected another chat.")


def test_what_fails_while_a_stream_is_written_is_told_in_it(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> list[Any]:
        raise ModelError("No text can be written.")

    monkeypatch.setattr(Predictor, "answer_mixed", fail)
    whole = client.post("/v1/chat/completions", json=ask())
    streamed = client.post("/v1/chat/completions", json=ask(stream=True)).text.split("\n\n")
    assert json.loads(streamed[1].removeprefix("data: ")) == whole.json()
