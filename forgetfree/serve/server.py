"""Answers over HTTP: one resident model, all tasks of a run, one request at a time.

Tasks that write texts also answer clients of OpenAI's API, without streaming: ``/v1/models`` and ``/v1/chat/completions``.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from forgetfree import __version__
from forgetfree.data.chats import Chat
from forgetfree.display import brief
from forgetfree.errors import FieldError, ForgetfreeError, TaskError
from forgetfree.kinds.kind import GenerationOptions, kind_of
from forgetfree.serve.inference import Predictor

#: Maximum number of bytes per request.
MOST_BYTES = 2**20
#: Maximum number of texts per request.
MOST_TEXTS = 256
#: A number that may be given only as 0, where it has no effect.
_Zero = Field(None, ge=0, le=0)


class Question(BaseModel):
    """Texts to be answered by one task."""

    model_config = ConfigDict(extra="forbid")
    task: str = Field(description="a task of /tasks", examples=["sst2"])
    texts: list[Any] = Field(
        max_length=MOST_TEXTS,
        description="each a text; of a task about pairs a list of two; or a list of words, or the turns of a chat",
        examples=[["a joy from start to end"]],
    )


class ChatRequest(BaseModel):
    """A chat to be answered by one task. Unsupported fields are accepted only with values that have no effect."""

    model_config = ConfigDict(extra="forbid")
    model: str = Field(description="a task of /v1/models")
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = Field(None, description="passed to the chat template")
    max_tokens: int | None = Field(None, ge=1, description="the longest text; default: the task's own")
    max_completion_tokens: int | None = Field(None, ge=1, description="the same")
    stop: str | list[str] | None = Field(None, description="texts before which the answer ends")
    temperature: float | None = Field(None, description="0 alone: each token is the likeliest")
    top_p: float | None = Field(
        None, gt=0, le=1, description="changes nothing: the likeliest token is always among them"
    )
    seed: int | None = Field(None, description="changes nothing: a prompt has one answer")
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    frequency_penalty: float | None = _Zero
    presence_penalty: float | None = _Zero
    user: str | None = None

    @property
    def chat(self) -> Chat:
        """The chat in the form of training rows.

        Raises:
            FieldError: the messages are no chat.
        """
        try:
            return Chat.of({"messages": self.messages, "tools": self.tools})
        except ValueError as error:
            raise FieldError(f"Expected {error}, got {brief(self.messages)}. Correct it.", "messages") from error

    def options(self, most_tokens: int) -> GenerationOptions:
        """Return the options that determine where the answer ends.

        Args:
            most_tokens: the maximum number of tokens that a client may request.

        Raises:
            FieldError: a field is not supported, or more tokens are requested than allowed.
        """
        if self.stream:
            raise FieldError(
                "Texts are sent in one piece here. Leave stream out; or write the task's model by forgetfree export, and take "
                "vLLM or transformers serve.",
                "stream",
            )
        if self.temperature:
            raise FieldError(
                f"Expected temperature of 0, got {self.temperature}: texts are written greedily. Leave it out; or write "
                "the task's model by forgetfree export, and take vLLM or model.generate.",
                "temperature",
            )
        field = "max_completion_tokens" if self.max_tokens is None else "max_tokens"
        tokens: int | None = getattr(self, field)
        if tokens is not None and tokens > most_tokens:
            raise FieldError(
                f"Expected {field} of at most {most_tokens}, got {tokens}. Ask for fewer, or start the server with "
                "--most-tokens.",
                field,
            )
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not all(stop):
            raise FieldError("Expected no empty text in stop. Leave it out.", "stop")
        return GenerationOptions(tokens, tuple(stop))


def application(
    predictor: Predictor, *, hosts: Collection[str] = ("*",), origins: Collection[str] = (), most_tokens: int = 1024
) -> FastAPI:
    """Return the application: ``/predict``, ``/tasks``, ``/health``, ``/docs``, ``/openapi.json``, and ``/v1/…`` for texts.

    Args:
        predictor: the predictor that answers.
        hosts: names of this server. Requests for another host name are refused: a page of another site may send them by
            pointing its own name to this machine's address (DNS rebinding).
        origins: origins of pages that may read answers, such as ``https://my.site``.
        most_tokens: the maximum length of a chat reply that a client may request, in tokens.
    """
    app = FastAPI(title="forgetfree", version=__version__)
    app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    for kind in (HTTPException, RequestValidationError, ForgetfreeError, Exception):
        app.add_exception_handler(kind, _refuse)

    @app.middleware("http")
    async def check_size(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        """Refuse a body that is too large, before it is read."""
        length = request.headers.get("content-length", "0")
        if "transfer-encoding" in request.headers:
            return fault(411, "A request needs a Content-Length here. Send it in one piece.")
        if int(length) > MOST_BYTES:
            return fault(
                413, f"Expected a request of at most {MOST_BYTES:,} bytes, got {length}. Ask in several requests."
            )
        return await go_on(request)

    @app.post("/predict")
    def predict(question: Question) -> dict[str, list[Any]]:
        """Answer texts with a task, in their order, with the probabilities of all its labels or of its words' tags."""
        task = predictor.definition(question.task)
        return {"answers": [kind_of(task).json(task, each) for each in predictor.answer(task.name, question.texts)]}

    @app.get("/tasks")
    def tasks() -> list[dict[str, Any]]:
        """List the tasks with kind and labels, in the order in which they were learned."""
        return [
            {"task": name, "kind": task.kind, "labels": list(task.labels)} for name, task in predictor.tasks.items()
        ]

    @app.get("/health")
    def health() -> dict[str, str]:
        """Return the status of the server."""
        return {"status": "ok", "version": __version__}

    def writing() -> list[str]:
        return [name for name, task in predictor.tasks.items() if kind_of(task).answer == "text"]

    if not writing():
        return app

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        """List the tasks that write texts, as models."""
        return {
            "object": "list",
            "data": [{"id": name, "object": "model", "created": 0, "owned_by": "forgetfree"} for name in writing()],
        }

    @app.post("/v1/chat/completions")
    def complete(asked: ChatRequest) -> dict[str, Any]:
        """Answer a chat with a task."""
        try:
            task = predictor.definition(asked.model)
        except TaskError as error:
            raise TaskError(f"There is no model {brief(asked.model)}: a model is a task. {error}") from None
        text = kind_of(task).text_of_chat(task, asked.chat)
        (written,) = predictor.answer(asked.model, [text], options=asked.options(most_tokens))
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": written.text, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop" if written.ended else "length",
        }
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": asked.model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": written.prompt_tokens,
                "completion_tokens": written.tokens,
                "total_tokens": written.prompt_tokens + written.tokens,
            },
        }

    return app


def fault(status: int, message: str, field: str | None = None, code: str | None = None) -> JSONResponse:
    """Return an error in the format of OpenAI's API, with the field of the request that caused it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": field or None, "code": code}}, status)


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    """Return an error as a response."""
    match error:
        case HTTPException(status_code=404 | 405 as status):
            return fault(status, f"There is no {request.method} {request.url.path}. See /docs.")
        case HTTPException():
            return fault(error.status_code, str(error.detail))
        case RequestValidationError():
            faults = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5]]
            # For a body that is no JSON, the place is the number of a character.
            fields = [each["loc"][1] for each in error.errors() if len(each["loc"]) > 1]
            field = next((each for each in fields if isinstance(each, str)), None)
            return fault(422, f"The request is not as /docs says: {'; '.join(faults)}.", field)
        case ForgetfreeError():
            if isinstance(error, TaskError):
                return fault(404, str(error), code="model_not_found")
            return fault(422, str(error), getattr(error, "field", None))
        case _:
            return fault(500, f"The server failed ({type(error).__name__}). Its log says more.")
