"""Answers over HTTP: one resident model, all tasks of a run, requests of any tasks in one batch."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import h11
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as AnyHTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from forgetfree import __version__
from forgetfree.display import brief
from forgetfree.errors import ForgetfreeError, TaskError
from forgetfree.json_file import parse_json
from forgetfree.serve import chat
from forgetfree.serve.batcher import Batcher, Limits
from forgetfree.serve.classification import OneAnswer
from forgetfree.serve.generation import OneChosenText, OneWrittenText
from forgetfree.serve.inference import Predictor
from forgetfree.serve.served_task import Ending, Text
from forgetfree.serve.tagging import OneSentence

OneText = str | tuple[str, str]


class Question(BaseModel):
    """Texts to be answered by one task."""

    model_config = ConfigDict(extra="forbid")
    task: str = Field(description="a task of /tasks", examples=["sst2"])
    text: OneText | None = Field(None, description="one text, or a pair of texts", examples=["a joy from start to end"])
    texts: list[OneText] | None = Field(None, description="many, in place of text")


class Answers(BaseModel):
    """The answers, in the order of the texts."""

    answers: list[OneAnswer | OneSentence | OneChosenText | OneWrittenText]


class Fault(BaseModel):
    """Why a request is not answered."""

    error: str


class Task(BaseModel):
    """A task that can be asked."""

    task: str
    kind: str
    labels: list[str]


class Health(BaseModel):
    """That the server answers, and how many texts wait."""

    status: str
    version: str
    waiting: int


def application(
    predictor: Predictor,
    limits: Limits | None = None,
    *,
    hosts: Collection[str] | None = None,
    origins: Collection[str] = (),
    ending: Callable[[], bool] = lambda: False,
) -> FastAPI:
    """Return the application: ``/predict``, ``/tasks``, ``/health``, ``/docs``, ``/openapi.json``, and those of `chat`.

    Args:
        predictor: answers.
        limits: what is accepted.
        hosts: names of this server, beside addresses in numbers; default: any.
        origins: of pages that may ask, such as ``https://my.site``, beside the server's own.
        ending: whether the server is about to end.
    """
    limits = limits or Limits()
    batcher = Batcher(predictor, limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        work = asyncio.create_task(batcher.work())
        yield
        await batcher.end()
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work

    faults: dict[int | str, Any] = {code: {"model": Fault} for code in (403, 404, 408, 413, 422, 503)}
    app = FastAPI(title="forgetfree", version=__version__, lifespan=lifespan, responses=faults)
    app.add_middleware(_BodyLimit, most=limits.body, seconds=limits.seconds, ending=ending)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    if hosts is not None:
        app.add_middleware(_Doorkeeper, hosts=hosts, origins=origins)
    for kind in (AnyHTTPException, RequestValidationError, ForgetfreeError, Exception):
        app.add_exception_handler(kind, _refuse)

    @app.post("/predict")
    async def predict(question: Question, request: Request) -> Answers:
        """Answer one text or many by a task, with the probabilities of all its labels; or of its words' tags."""
        await _check_json(request)
        task = predictor.served(question.task)
        if (question.text is None) == (question.texts is None):
            raise HTTPException(422, "Expected one of text and texts. Give one text, or a list of them.")
        texts: list[Text] = [question.text] if question.text is not None else [*(question.texts or ())]
        _check(texts, limits)
        if task.size == 1 and isinstance(question.text, tuple):
            raise HTTPException(
                422,
                f"Task {brief(question.task)} reads one text, got 2: a list in text is a pair of texts. Give one text, or "
                "several texts as a list in texts.",
            )
        task.rows(texts)  # what does not fit its task is refused here, alone
        answers = await batcher.put(question.task, texts) if texts else []
        return Answers.model_validate({"answers": [task.response(answer) for answer in answers]})

    @app.get("/tasks")
    def tasks() -> list[Task]:
        """List the tasks, in the order in which they were learned."""
        return [Task(task=name, kind=task.kind, labels=list(task.labels)) for name, task in predictor.tasks.items()]

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    def health() -> Health:
        """Say that the server answers."""
        return Health(status="ok", version=__version__, waiting=batcher.size)

    def put(task: str, texts: list[Text], ending: Ending) -> asyncio.Future[list[Any]]:
        _check(texts, limits)
        return batcher.put(task, texts, ending)

    if any(predictor.served(task).writes for task in predictor.tasks):
        chat.add_routes(app, predictor, put, tokens=limits.tokens, beams=limits.beams)
    return app


async def _check_json(request: Request) -> None:
    """Raise ``HTTPException`` 422 for a body that is no JSON, or that has a key twice."""
    try:
        parse_json((await request.body()).decode())
    except ValueError as error:
        raise HTTPException(422, f"The request is no JSON that can be read: {error}. Correct it.") from None


def _check(texts: Sequence[Text], limits: Limits) -> None:
    """Raise ``HTTPException`` 413 for more, or longer, texts than are accepted."""
    if len(texts) > limits.texts:
        raise HTTPException(413, f"Expected at most {limits.texts} texts, got {len(texts)}. Ask in several requests.")
    longest = max((len(part) for text in texts for part in ([text] if isinstance(text, str) else text)), default=0)
    if longest > limits.characters:
        raise HTTPException(413, f"Expected at most {limits.characters} characters a text, got {longest}. Shorten it.")


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    """Return an error as JSON: ``{"error": …}``, with more in it where clients of OpenAI's API ask."""
    headers: Any = getattr(error, "headers", None)
    field: str | None = getattr(error, "field", None)
    match error:
        case AnyHTTPException():
            code, text = error.status_code, str(error.detail)
            if text in ("Not Found", "Method Not Allowed"):
                text = f"There is no {request.method} {request.url.path}. See /docs."
        case RequestValidationError():
            faults = list(dict.fromkeys(_fault(fault, error.body) for fault in error.errors()))
            code, text = 422, f"The request is not as /docs says: {'; '.join(faults[:5])}."
            # Of a body that is no JSON, the place is the number of a character.
            places = (place for fault in error.errors() for place in fault["loc"][1:2])
            field = next((place for place in places if isinstance(place, str)), None)
            if "json" not in request.headers.get("content-type", ""):
                text += " It has no 'Content-Type: application/json'. Add that header."
        case TaskError():
            code, text = 404, str(error)
        case ForgetfreeError():
            code, text = 422, str(error)
        case _:
            code, text = 500, f"The server failed ({type(error).__name__}). Its log says more."
    content = chat.fault(code, text, field) if request.url.path.startswith(chat.PREFIX) else {"error": text}
    return JSONResponse(content, code, headers)


def _fault(fault: Any, body: Any) -> str:
    """Return a phrase that names the field of a fault, and what is wrong there."""
    place = fault["loc"]
    if fault["type"] == "json_invalid":
        begun = str(body)[: place[-1]] if isinstance(place[-1], int) else ""
        names = re.findall(r'"(\w{1,40})"\s*:', begun)
        where = f"in the field {names[-1]!r}" if names else "before any field"
        return f"JSON decode error {where}, at character {place[-1]}: {fault.get('ctx', {}).get('error', fault['msg'])}"
    if place[1:2] in (("text",), ("texts",)) and len(place) > 2:
        where = ".".join(str(part) for part in place[:3] if part == place[1] or isinstance(part, int) or part == "body")
        return f"{where}: expected one text, or a list of the two texts of a pair; several texts are a list in texts"
    return f"{'.'.join(map(str, place))}: {fault['msg']}"


class _Doorkeeper:
    """Refuses requests that a page of another site may have sent: by the names in ``Host`` and ``Origin``.

    A page can give its own name the address of this machine (DNS rebinding), and a browser then takes the server for that
    page's; but the browser still sends that name. Addresses in numbers cannot be given in this way.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], hosts: Collection[str], origins: Collection[str]) -> None:
        self._app, self._origins = app, {origin.lower().rstrip("/") for origin in origins}
        self._hosts = {host.lower() for host in hosts} | {_name_of(urlsplit(origin).netloc) for origin in self._origins}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (fault := self._fault(scope)):
            await JSONResponse({"error": fault}, 403)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _fault(self, scope: Any) -> str:
        """Say what is wrong with where a request comes from; an empty text where nothing is."""
        headers = {
            name: value.decode("latin-1").lower() for name, value in scope["headers"] if name in (b"host", b"origin")
        }
        host, origin = headers.get(b"host"), headers.get(b"origin")
        if host is not None and not _is_address(_name_of(host)) and _name_of(host) not in self._hosts:
            return (
                f"The host {brief(host)} is not a name of this server. Ask it by its address, or start it with "
                "--allow-origin http://NAME."
            )
        if origin is not None and origin not in (*self._origins, f"http://{host}", f"https://{host}"):
            return f"A page of {brief(origin)} may not ask this server. Start it with --allow-origin and that origin."
        return ""


def _name_of(host: str) -> str:
    """Return a host without its port.

    >>> _name_of("localhost:8000"), _name_of("[::1]:8000")
    ('localhost', '::1')
    """
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class TimelyProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose headers do not come to their end in time: uvicorn waits for them for ever.

    Args:
        seconds: how long they may take.
        options: what uvicorn gives.
    """

    def __init__(self, *, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._seconds = seconds
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for headers."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request, and wait for the rest of its headers."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:  # the headers are here
            self._unwatch()
        elif self._late is None:
            self._late = self.loop.call_later(self._seconds, self._end)

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        self._late = None
        if self.conn.trailing_data[0] and not self.transport.is_closing():  # else nothing was asked
            text = f"The headers did not come to their end within {self._seconds:g} seconds. Send the request again, whole."
            body = json.dumps({"error": text}).encode()
            lines = ("HTTP/1.1 408 Request Timeout", "content-type: application/json", f"content-length: {len(body)}")
            self.transport.write("\r\n".join([*lines, "connection: close", "", ""]).encode() + body)
        self.transport.close()


class _BodyLimit:
    """Refuses requests whose body is too large, as soon as that much of it has come, or does not come to its end in time."""

    def __init__(
        self, app: Callable[..., Awaitable[None]], most: int, seconds: float, ending: Callable[[], bool]
    ) -> None:
        self._app, self._most, self._seconds, self._ending = app, most, seconds, ending

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size, whole, until = 0, False, time.monotonic() + self._seconds

        async def counted() -> Any:
            nonlocal size, whole
            message = await (receive() if whole else self._in_time(receive, until))
            size += len(message.get("body", b""))
            whole = whole or not message.get("more_body", False)
            if size > self._most:
                raise HTTPException(413, f"Expected a request of at most {self._most} bytes. Ask in several requests.")
            return message

        await self._app(scope, counted, send)

    async def _in_time(self, receive: Any, until: float) -> Any:
        """Return the next part of a body.

        Raises:
            HTTPException: 408 if it comes too late, 503 if the server is to end.
        """
        part = asyncio.ensure_future(receive())
        try:
            while not (await asyncio.wait([part], timeout=0.1))[0]:
                if self._ending():
                    raise HTTPException(503, "The server ends. Ask again later.", {"Connection": "close"})
                if time.monotonic() > until:
                    text = (
                        f"The request did not come to its end within {self._seconds:g} seconds. Send it again, whole."
                    )
                    raise HTTPException(408, text, {"Connection": "close"})
            return part.result()
        finally:
            part.cancel()
