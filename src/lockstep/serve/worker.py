"""The engine's thread, and how asyncio talks to it: commands go in through a queue, outputs come back per request."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from lockstep.serve.engine import Engine
from lockstep.serve.params import Output, SamplingParams

log = logging.getLogger("lockstep.serve")
T = TypeVar("T")


class EngineFailed(Exception):
    """The engine stopped because of an error of its own; nothing can be served until a restart."""


class Request:
    """A request on its way: iterate it for outputs until each of its choices is finished."""

    def __init__(self, identity: int, seed: int, choices: int) -> None:
        self.identity = identity
        self.seed = seed
        self.running = choices
        """Choices that the engine has not finished; the engine's thread counts them."""
        self._open = choices
        self._outputs: asyncio.Queue[Output | EngineFailed] = asyncio.Queue()

    def deliver(self, output: Output | EngineFailed) -> None:
        self._outputs.put_nowait(output)

    async def outputs(self) -> AsyncIterator[Output]:
        while self._open:
            output = await self._outputs.get()
            if isinstance(output, EngineFailed):
                raise output
            self._open -= output.finish_reason is not None
            yield output


class Worker:
    """Runs the engine in one thread, from `start` to `stop`. Its other methods belong to the event loop."""

    def __init__(self, engine: Engine, on_step: Callable[[list[Output]], None] | None = None) -> None:
        self.engine = engine
        self.failure: EngineFailed | None = None
        self._on_step = on_step
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._requests: dict[int, Request] = {}
        self._thread = threading.Thread(target=self._run, name="lockstep-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End after the present step. What is unfinished ends with EngineFailed."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        return self.failure is None and self._thread.is_alive()

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        timeout: float | None = None,
        salt: str | None = None,
    ) -> Request:
        """Hand a request to the engine; raises what `Engine.add_request` raises."""

        def add() -> Request:
            identity = self.engine.add_request(prompt_ids, params, priority=priority, timeout=timeout, salt=salt)
            request = Request(identity, self.engine.seed_of(identity), params.n)
            self._requests[identity] = request
            return request

        return await self.call(add)

    def abort(self, request: Request) -> None:
        """The client is gone: its pages are free before the next step."""

        def drop() -> None:
            self._requests.pop(request.identity, None)
            outputs = self.engine.abort(request.identity)
            if outputs and self._on_step:
                self._on_step(outputs)

        self._commands.put(drop)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread between two steps."""
        if not self.alive:
            raise self.failure or EngineFailed("the server is shutting down.")
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._commands.put(run)
        if self.failure is not None:  # it came while the thread was ending
            raise self.failure
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        """The thread: commands when there are some, else a step; asleep when there is nothing to do."""
        try:
            while True:
                while not self._commands.empty() or not self.engine.has_work():
                    command = self._commands.get()
                    if command is None:
                        return self._fail(EngineFailed("the server is shutting down."))
                    command()
                self._tell(self.engine.step())
        except Exception as error:
            log.exception("the engine failed")
            self._fail(EngineFailed(f"the engine failed: {type(error).__name__}: {error}"))

    def _tell(self, outputs: list[Output]) -> None:
        """Pass outputs to the event loop in one call."""
        if outputs and self._on_step:
            self._on_step(outputs)
        pairs = [(request, o) for o in outputs if (request := self._requests.get(o.request)) is not None]
        for request, output in pairs:
            request.running -= output.finish_reason is not None
            if not request.running:
                self._requests.pop(request.identity, None)
        if pairs and self._loop is not None:
            self._loop.call_soon_threadsafe(_deliver, pairs)

    def _fail(self, failure: EngineFailed) -> None:
        """Every unfinished request, and every one that is still to come, gets this error."""
        self.failure = failure
        pairs = [(request, failure) for request in self._requests.values()]
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()
        pairs += [(r, failure) for r in self._requests.values() if all(r is not known for known, _ in pairs)]
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_deliver, pairs)


def _deliver(pairs: Sequence[tuple[Request, Output | EngineFailed]]) -> None:
    for request, output in pairs:
        request.deliver(output)
