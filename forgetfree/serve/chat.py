"""Texts over HTTP as clients of OpenAI's API ask for them: ``/v1/models`` and ``/v1/chat/completions``, whole or as a stream.

A model is a task that writes. A text is written in its turn, and a stream sends it meanwhile, one text at a time.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from asyncio import Future
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from forgetfree.data.chats import Chat
from forgetfree.display import brief
from forgetfree.errors import FieldError, ForgetfreeError, TaskError
from forgetfree.serve.inference import Predictor
from forgetfree.serve.served_task import Ending, ServedTask, Text
from forgetfree.tasks import Decoding

#: Puts a text into the queue of a task, with where its answer ends.
Put = Callable[[str, list[Text], Ending], "Future[list[Any]]"]
#: What a request may say beside the fields of `ChatRequest`, and the values that change no text; none: any.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "tool_choice": ("none", "auto"),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    **dict.fromkeys(("user", "metadata", "store", "service_tier", "parallel_tool_calls"), ()),
}
#: Where errors have the form of that API.
PREFIX = "/v1/"


class Part(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A turn of a chat, with whatever else a chat template reads of one, such as ``tool_calls``."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None


class StreamOptions(BaseModel):
    """What a stream ends with."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """A chat to be answered by one task."""

    model_config = ConfigDict(extra="allow")
    model: str = Field(description="a task of /v1/models")
    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = Field(None, description="what a chat template shows of them is read")
    max_tokens: int | None = Field(None, ge=1, description="the longest text; default: the task's own")
    max_completion_tokens: int | None = Field(None, ge=1, description="the same")
    stop: str | list[str] | None = Field(None, description="texts before which the answer ends")
    temperature: float | None = Field(None, description="that at which tokens are drawn; 0: the likeliest, always")
    top_p: float | None = Field(
        None,
        description="with a temperature, tokens are drawn among the likeliest, which make up this probability; without one, "
        "only 1 is accepted",
    )
    seed: int | None = Field(
        None,
        description="with a temperature, equal seeds give a prompt equal answers; without one, answers are always equal, and "
        "it changes nothing",
    )
    num_beams: int | None = Field(None, description="texts that are searched side by side for the likeliest")
    stream: bool | None = Field(False, description="send the text as server-sent events")
    stream_options: StreamOptions | None = None

    @property
    def chat(self) -> Chat:
        """The chat as rows of training have it.

        Raises:
            FieldError: a message has no content, and calls no tool.
        """
        messages = [message.model_dump(exclude_unset=True) for message in self.messages]
        try:
            return Chat.of({"messages": messages, "tools": self.tools})
        except ValueError as error:
            raise FieldError(f"Expected {error}, got {brief(messages)}. Correct it.", "messages") from error

    def decoding(self, usual: Decoding, most: int) -> Decoding:
        """Return how the answer is to be written.

        Args:
            usual: how, where nothing is said.
            most: the most beams that may be asked for, beside as many as are usual.

        Raises:
            FieldError: it cannot be.
        """
        if self.num_beams is not None and self.num_beams > max(most, usual.num_beams):
            raise FieldError(
                f"Expected num_beams of at most {most}, got {self.num_beams}. Ask for fewer, or start the server with "
                "--most-beams.",
                "num_beams",
            )
        asked = usual.otherwise(num_beams=self.num_beams, temperature=self.temperature)
        if asked.temperature:
            asked = asked.otherwise(top_p=self.top_p, seed=self.seed)
        elif self.temperature is None:  # at 0 a token is the likeliest, by any seed and among any of the likeliest
            asked = asked.otherwise(top_p=self.top_p)
        if faults := asked.faults():  # each begins with the name of its field
            raise FieldError(f"{'; '.join(faults)}.", faults[0].partition(" ")[0])
        return asked

    def ending(self, usual: Decoding, tokens: int, beams: int) -> Ending:
        """Return where the answer is to end, and how it is to be written.

        Args:
            usual: how texts of the task are written.
            tokens: the most that may be asked for.
            beams: the same.

        Raises:
            FieldError: it is not done here, or more than may be asked for.
        """
        for name, value in (self.model_extra or {}).items():
            if name not in _NEUTRAL:
                raise FieldError(f"There is no option {brief(name)} here. Leave it out.", name)
            neutral = _NEUTRAL[name]
            if neutral and value is not None and value not in neutral:
                only = json.dumps(neutral[0])
                raise FieldError(f"{name} may be {only} alone here, got {brief(value)}. Leave it out.", name)
        field = "max_completion_tokens" if self.max_tokens is None else "max_tokens"
        asked: int | None = getattr(self, field)
        if asked is not None and asked > tokens:
            raise FieldError(
                f"Expected {field} of at most {tokens}, got {asked}. Ask for fewer, or start the server with --most-tokens.",
                field,
            )
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not all(stop):
            raise FieldError("Expected no empty text in stop. Leave it out.", "stop")
        return Ending(asked, tuple(stop), self.decoding(usual, beams))


def add_routes(app: FastAPI, predictor: Predictor, put: Put, *, tokens: int, beams: int) -> None:
    """Add the routes for the tasks that write.

    Args:
        app: the application.
        predictor: whose tasks.
        put: puts a text into the queue.
        tokens: the most of a text that a request may ask for.
        beams: the most that a request may ask for.
    """

    def served(name: str) -> ServedTask:
        try:
            return predictor.served(name)
        except TaskError as error:
            raise TaskError(f"There is no model {brief(name)}: a model is a task. {error}") from None

    def model(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "forgetfree"}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        """List the tasks that write, as models."""
        return {"object": "list", "data": [model(name) for name in predictor.tasks if predictor.served(name).writes]}

    @app.get("/v1/models/{name}")
    def one_model(name: str) -> dict[str, Any]:
        """Return a task that writes, as a model."""
        if not served(name).writes:
            raise TaskError(
                f"Task {brief(name)} is answered by labels, and models write texts. Ask it by POST /predict; /v1/models lists "
                "the others."
            )
        return model(name)

    @app.post("/v1/chat/completions", response_model=None)
    async def complete(asked: ChatRequest) -> dict[str, Any] | StreamingResponse:
        """Answer a chat by a task, whole or as server-sent events."""
        task = served(asked.model)
        text = task.chat(asked.chat)
        ending = asked.ending(task.task.decoding, tokens, beams)
        task.check(ending)
        predictor.check(asked.model, text)  # what does not fit its task, or its model, is refused here
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": asked.model}
        if asked.stream:
            with_usage = asked.stream_options is not None and asked.stream_options.include_usage
            pieces = _Pieces()
            answer = put(asked.model, [text], replace(ending, send=pieces.send))
            events = _events(head, answer, pieces, with_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        (written,) = await put(asked.model, [text], ending)
        message = {"role": "assistant", "content": written.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(written)}
        return {**head, "object": "chat.completion", "choices": [choice], "usage": _usage(written)}


class _Pieces:
    """The pieces of a text, from the thread that writes it to the client that reads it."""

    def __init__(self) -> None:
        self._loop, self._pieces = asyncio.get_running_loop(), asyncio.Queue[str | None]()
        self._gone = False

    def send(self, piece: str) -> None:
        """Hand a piece over; raise ``ForgetfreeError`` if nobody reads it, so that nothing more is written."""
        if self._gone:
            raise ForgetfreeError("The client has gone.")
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def until(self, answer: Future[list[Any]]) -> AsyncGenerator[str]:
        """Yield the pieces until the answer is there, or has failed; who goes before wants none."""
        answer.add_done_callback(lambda _: self._pieces.put_nowait(None))
        try:
            while (piece := await self._pieces.get()) is not None:
                yield piece
        finally:
            self._gone = True
            answer.cancel()  # if it is still to come; else its failure would be logged as one that nobody saw


async def _events(
    head: dict[str, Any], answer: Future[list[Any]], pieces: _Pieces, with_usage: bool
) -> AsyncIterator[str]:
    """Yield the events of a stream: the role at once, then the pieces of the text while it is written."""

    def event(delta: dict[str, Any], reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return _event({**head, "object": "chat.completion.chunk", "choices": [choice]})

    yield event({"role": "assistant", "content": ""})
    try:
        async with aclosing(pieces.until(answer)) as coming:
            async for piece in coming:
                yield event({"content": piece})
        (written,) = await answer
    except ForgetfreeError as error:  # the status is sent already
        yield _event(fault(422, str(error), getattr(error, "field", None)))
        return
    except Exception as error:
        yield _event(fault(500, f"The server failed ({type(error).__name__}). Its log says more."))
        raise
    yield event({}, _reason(written))
    if with_usage:
        yield _event({**head, "object": "chat.completion.chunk", "choices": [], "usage": _usage(written)})
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _reason(written: Any) -> str:
    return "stop" if written.ended else "length"


def _usage(written: Any) -> dict[str, int]:
    total = written.prompt_tokens + written.tokens
    return {"prompt_tokens": written.prompt_tokens, "completion_tokens": written.tokens, "total_tokens": total}


def fault(status: int, text: str, field: str | None = None) -> dict[str, Any]:
    """Return an error as clients of that API read it, with the field of the request that it is about."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = "model_not_found" if status == 404 else None
    return {"error": {"message": text, "type": kind, "param": field or None, "code": code}}
