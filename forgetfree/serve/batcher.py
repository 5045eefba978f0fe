"""Requests that wait for the one model of a server: batches of them, and streams, which pass it on after every token."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import HTTPException

from forgetfree.errors import ForgetfreeError
from forgetfree.serve.inference import Predictor
from forgetfree.serve.served_task import UNTIL_THE_END, Ending, Pause, Text


@dataclass(frozen=True)
class Limits:
    """What a server accepts.

    Attributes:
        body: bytes of a request.
        texts: texts of a request.
        characters: characters of a text.
        queue: texts that wait to be answered.
        batch: texts that are answered together, if they come in several requests.
        wait: how long the first of a batch waits for others, in seconds.
        seconds: how long the headers of a request may take to come, and as long its body.
        tokens: the longest text that a request may ask for, in tokens.
        beams: the most that a request may ask for.
        streams: texts that are sent while they are written, side by side; further ones wait.
    """

    body: int = 2**20
    texts: int = 256
    characters: int = 20_000
    queue: int = 2048
    batch: int = 64
    wait: float = 0.003
    seconds: float = 30.0
    tokens: int = 1024
    beams: int = 4
    streams: int = 4


@dataclass(frozen=True)
class _Asked:
    """Texts that wait: their task, where their answers end, and the answers to come."""

    task: str
    texts: Sequence[Text]
    ending: Ending
    future: Future[list[Any]]


class _Turns:
    """The model, for one at a time, in the order in which it is asked for."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()  # serves those who wait in their order
        self._waiting = 0

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for the model."""
        return self._waiting > 0

    @asynccontextmanager
    async def mine(self) -> AsyncIterator[None]:
        """Have the model within the block, from when it is one's turn."""
        await self._take()
        try:
            yield
        finally:
            self._lock.release()

    async def pass_on(self) -> None:
        """Give the model to those who wait now, and have it again after them."""
        self._lock.release()
        await self._take()

    async def _take(self) -> None:
        self._waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._waiting -= 1


class Batcher:
    """Answers what comes within a few milliseconds together, and one batch after another; streams go on between batches.

    Args:
        predictor: answers.
        limits: how much waits, and how much goes into a batch.
    """

    def __init__(self, predictor: Predictor, limits: Limits) -> None:
        self._predictor, self._limits = predictor, limits
        self._waiting: list[_Asked] = []
        self._arrived = asyncio.Event()
        self._turns, self._ends = _Turns(), False
        self._streams, self._places = set[asyncio.Task[None]](), asyncio.Semaphore(limits.streams)
        self._threads = ThreadPoolExecutor(limits.streams + 1)  # each stream keeps one, and batches need another
        self.size = 0

    def put(self, task: str, texts: Sequence[Text], ending: Ending = UNTIL_THE_END) -> Future[list[Any]]:
        """Return the answers to come, of texts that fit their task.

        Raises:
            HTTPException: 503 if too many wait.
        """
        if self.size + len(texts) > self._limits.queue:
            detail = f"Too many texts wait: {self.size}, of at most {self._limits.queue}. Ask again in a second."
            raise HTTPException(503, detail, {"Retry-After": "1"})
        asked = _Asked(task, texts, ending, asyncio.get_running_loop().create_future())
        self.size += len(texts)
        if ending.send is None:
            self._waiting.append(asked)
            self._arrived.set()
        else:
            stream = asyncio.create_task(self._stream(asked))
            self._streams.add(stream)
            stream.add_done_callback(self._streams.discard)
        return asked.future

    async def work(self) -> None:
        """Answer batches for ever."""
        while True:
            await self._arrived.wait()
            await asyncio.sleep(self._limits.wait)
            async with self._turns.mine():
                batch = self._next()
                await self._answer(batch)
            self.size -= sum(len(each.texts) for each in batch)

    async def end(self) -> None:
        """End the streams, each at its next token."""
        self._ends = True
        await asyncio.gather(*self._streams)
        self._threads.shutdown(wait=False)

    async def _stream(self, asked: _Asked) -> None:
        """Answer a request whose text is sent while it is written."""
        loop = asyncio.get_running_loop()

        def is_due() -> bool:
            """Return whether others wait; raise where nobody reads on. This is asked by the thread that writes."""
            if self._ends or asked.future.done():
                raise ForgetfreeError("The server ends. Ask again later.")
            return self._turns.wanted

        def pass_on() -> None:
            asyncio.run_coroutine_threadsafe(self._turns.pass_on(), loop).result()

        async with self._places, self._turns.mine():
            if self._ends or asked.future.done():  # nobody waits for it any more
                asked.future.cancel()
            else:
                await self._answer([replace(asked, ending=replace(asked.ending, pause=Pause(is_due, pass_on)))])
        self.size -= len(asked.texts)

    async def _answer(self, batch: Sequence[_Asked]) -> None:
        """Answer requests together; where that fails, one by one, so that only those fail that cannot be answered."""
        tasks = [each.task for each in batch for _ in each.texts]
        texts = [text for each in batch for text in each.texts]
        ask = partial(self._predictor.answer_mixed, tasks, texts, ending=batch[0].ending)
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        except Exception as error:  # the next batch may be answered
            if len(batch) > 1:
                for each in batch:
                    await self._answer([each])
            elif not batch[0].future.done():
                batch[0].future.set_exception(error)
            return
        for each in batch:
            mine, answers = answers[: len(each.texts)], answers[len(each.texts) :]
            if not each.future.done():  # the client may have gone
                each.future.set_result(mine)

    def _next(self) -> list[_Asked]:
        """Take the next requests that fit into a batch, at least one: those whose texts end alike."""
        first, *others = self._waiting
        count, size = 1, len(first.texts)
        for each in others:
            size += len(each.texts)
            if size > self._limits.batch or each.ending != first.ending:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        if not self._waiting:
            self._arrived.clear()
        return batch
