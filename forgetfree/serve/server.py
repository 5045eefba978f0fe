"""Answers over HTTP: one resident model, all tasks of a run, one request at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from threading import Lock
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from forgetfree import __version__
from forgetfree.errors import ForgetfreeError, TaskError
from forgetfree.kinds.kind import kind_of
from forgetfree.serve import chat
from forgetfree.serve.inference import Predictor

#: Bytes of a request, at most.
MOST_BYTES = 2**20
#: Texts of a request, at most.
MOST_TEXTS = 256


class Question(BaseModel):
    """Texts to be answered by one task."""

    model_config = ConfigDict(extra="forbid")
    task: str = Field(description="a task of /tasks", examples=["sst2"])
    texts: list[Any] = Field(
        max_length=MOST_TEXTS,
        description="each a text; of a task about pairs a list of two; or a list of words, or the turns of a chat",
        examples=[["a joy from start to end"]],
    )


def application(
    predictor: Predictor, *, hosts: Collection[str] = ("*",), origins: Collection[str] = (), most_tokens: int = 1024
) -> FastAPI:
    """Return the application: ``/predict``, ``/tasks``, ``/health``, ``/docs``, ``/openapi.json``, and those of `chat`.

    Args:
        predictor: answers.
        hosts: names of this server; requests by another one are refused, since a page of another site may have sent them: it
            can give its own name this machine's address (DNS rebinding).
        origins: of pages that may read answers, such as ``https://my.site``.
        most_tokens: of a text that a chat may ask for.
    """
    lock = Lock()  # the model has the weights of one task at a time

    def answer(task: str, texts: list[Any], **options: Any) -> list[Any]:
        with lock:
            return predictor.answer(task, texts, **options)

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
        """Answer texts by a task, in their order, with the probabilities of all its labels; or of its words' tags."""
        task = predictor.definition(question.task)
        return {"answers": [kind_of(task).json(task, each) for each in answer(task.name, question.texts)]}

    @app.get("/tasks")
    def tasks() -> list[dict[str, Any]]:
        """List the tasks with kind and labels, in the order in which they were learned."""
        return [
            {"task": name, "kind": task.kind, "labels": list(task.labels)} for name, task in predictor.tasks.items()
        ]

    @app.get("/health")
    def health() -> dict[str, str]:
        """Say that the server answers."""
        return {"status": "ok", "version": __version__}

    if not all(task.labels for task in predictor.tasks.values()):
        chat.add_routes(app, predictor, answer, most_tokens)
    return app


def fault(status: int, message: str, field: str | None = None) -> JSONResponse:
    """Return an error as clients of OpenAI's API read it, with the field of the request that it is about."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = "model_not_found" if status == 404 else None
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
            # Of a body that is no JSON, the place is the number of a character.
            fields = [each["loc"][1] for each in error.errors() if len(each["loc"]) > 1]
            field = next((each for each in fields if isinstance(each, str)), None)
            return fault(422, f"The request is not as /docs says: {'; '.join(faults)}.", field)
        case ForgetfreeError():
            return fault(404 if isinstance(error, TaskError) else 422, str(error), getattr(error, "field", None))
        case _:
            return fault(500, f"The server failed ({type(error).__name__}). Its log says more.")
