"""Texts over HTTP as clients of OpenAI's API ask for them, in one piece: ``/v1/models`` and ``/v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from forgetfree.data.chats import Chat
from forgetfree.display import brief
from forgetfree.errors import FieldError, TaskError
from forgetfree.kinds.kind import GenerationOptions, kind_of
from forgetfree.serve.inference import Predictor

#: A number that may be named where it changes nothing.
_Zero = Field(None, ge=0, le=0)


class ChatRequest(BaseModel):
    """A chat to be answered by one task. Of what is not done here, a value that changes nothing may be named."""

    model_config = ConfigDict(extra="forbid")
    model: str = Field(description="a task of /v1/models")
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = Field(None, description="what a chat template shows of them is read")
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
        """The chat as rows of training have it.

        Raises:
            FieldError: it is none.
        """
        try:
            return Chat.of({"messages": self.messages, "tools": self.tools})
        except ValueError as error:
            raise FieldError(f"Expected {error}, got {brief(self.messages)}. Correct it.", "messages") from error

    def options(self, most_tokens: int) -> GenerationOptions:
        """Return where the answer ends.

        Args:
            most_tokens: that may be asked for.

        Raises:
            FieldError: it is not done here, or more than may be asked for.
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


def add_routes(app: FastAPI, predictor: Predictor, answer: Callable[..., list[Any]], most_tokens: int) -> None:
    """Add the routes for the tasks that write.

    Args:
        app: the application.
        predictor: whose tasks.
        answer: answers texts by a task, when the model is free.
        most_tokens: of a text that a request may ask for.
    """

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        """List the tasks that write, as models."""
        names = [name for name, task in predictor.tasks.items() if not task.labels]
        return {
            "object": "list",
            "data": [{"id": name, "object": "model", "created": 0, "owned_by": "forgetfree"} for name in names],
        }

    @app.post("/v1/chat/completions")
    def complete(asked: ChatRequest) -> dict[str, Any]:
        """Answer a chat by a task."""
        try:
            task = predictor.definition(asked.model)
        except TaskError as error:
            raise TaskError(f"There is no model {brief(asked.model)}: a model is a task. {error}") from None
        text = kind_of(task).text_of_chat(task, asked.chat)
        (written,) = answer(asked.model, [text], options=asked.options(most_tokens))
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
