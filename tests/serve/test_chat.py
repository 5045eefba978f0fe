"""Tasks of texts over HTTP, by requests of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prompted
import pytest
import tiny

from forgetfree import Predictor

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

    from forgetfree.serve.server import application

    with TestClient(application(Predictor.of_run(run), most_tokens=20), raise_server_exceptions=False) as asking:
        yield asking


ANSWER = {"role": "assistant", "content": "a"}


def ask(model: str = "chat", content: Any = "great film", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], **more}


def test_tasks_are_models(client: Any) -> None:
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == list(prompted.TASKS)


@pytest.mark.parametrize("task", ["chat", "last"])
def test_a_chat_is_answered_as_by_predict(run: Path, client: Any, task: str) -> None:
    (written,) = Predictor.of_run(run).answer(task, ["great film"])
    for content in ("great film", [{"type": "text", "text": "great "}, {"type": "text", "text": "film"}]):
        said = client.post("/v1/chat/completions", json=ask(task, content, top_p=0.5, seed=3)).json()
        (choice,) = said["choices"]
        assert choice["message"]["content"] == written.text
        assert (said["object"], said["model"]) == ("chat.completion", task)
        assert said["usage"]["completion_tokens"] == written.tokens
        assert choice["finish_reason"] == ("stop" if written.ended else "length")
    said = client.post("/predict", json={"task": task, "texts": ["great film"]}).json()
    assert said == {"answers": [{"task": task, "text": written.text, "cut_tokens": 0}]}


def test_requests_at_once_end_where_each_was_asked_to(run: Path, client: Any) -> None:
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
        (ask(temperature=1), 422, "temperature", "Expected temperature of 0, got 1.0: texts are written greedily."),
        (ask(tool_choice="required"), 422, "tool_choice", "body.tool_choice: Input should be 'none' or 'auto'"),
        (ask(num_beams=2), 422, "num_beams", "body.num_beams: Extra inputs are not permitted"),
        (ask(stream=True), 422, "stream", "write the task's model by forgetfree export, and take vLLM"),
        (ask(max_tokens=21), 422, "max_tokens", "Expected max_tokens of at most 20, got 21"),
        (ask(stop=[""]), 422, "stop", "no empty text in stop"),
        (ask("first", stop="a"), 422, "stop", "Task 'first' has closed answers, of which the likeliest is given whole"),
        (ask(content=[{"type": "image_url"}]), 422, "messages", "without a part of the type 'image_url'"),
        ({"model": "chat", "messages": []}, 422, "messages", "The request is not as /docs says"),
        ({"model": "chat", "messages": [ANSWER]}, 422, None, "nothing is left to answer"),
        ({"model": "last", "messages": prompted.chat("a")}, 422, None, "Task 'last' was trained on single prompts"),
        ('{"model": ', 422, None, "JSON decode error"),
    ],
)
def test_what_is_not_done_is_told_as_clients_read_it(
    client: Any, asked: dict[str, Any] | str, code: int, field: str | None, message: str
) -> None:
    body = (
        {"content": asked, "headers": {"Content-Type": "application/json"}}
        if isinstance(asked, str)
        else {"json": asked}
    )
    answer = client.post("/v1/chat/completions", **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (code, "invalid_request_error", field)
    assert message in error["message"]
    assert error["code"] == ("model_not_found" if code == 404 else None)


def test_a_closed_answer_is_whole_and_what_changes_nothing_is_accepted(run: Path, client: Any) -> None:
    (chosen,) = Predictor.of_run(run).answer("first", ["great film"])
    usual = {
        "temperature": 0,
        "top_p": 0.5,
        "n": 1,
        "seed": 3,
        "stop": None,
        "presence_penalty": 0.0,
        "tool_choice": "none",
    }
    said = client.post("/v1/chat/completions", json=ask("first", max_tokens=20, **usual)).json()
    assert (said["choices"][0]["message"]["content"], said["choices"][0]["finish_reason"]) == (chosen.text, "stop")
    answer = client.post("/v1/chat/completions", json=ask("first", max_tokens=1))
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "max_tokens")
    assert "which are given whole and have up to 5 tokens, got max_tokens=1" in answer.json()["error"]["message"]


def test_a_task_of_labels_is_no_model(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Predictor, "tasks", {"first": tiny.TASK})
    answer = client.post("/v1/chat/completions", json=ask("first"))
    assert (answer.status_code, client.get("/v1/models").json()["data"]) == (422, [])
    assert "is answered by labels. Ask it by POST /predict." in answer.json()["error"]["message"]


def test_a_fault_of_the_server_is_told_without_its_words(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> list[Any]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Predictor, "answer", fail)
    answer = client.post("/v1/chat/completions", json=ask())
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert answer.json()["error"]["message"] == "The server failed (RuntimeError). Its log says more."
