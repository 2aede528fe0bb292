"""Keeps an engine running in a process of its own, and lets asyncio talk to it.

When the process ends for any reason, every request in it fails at once and another process is started. The server
stays up all the while and tells that the engine is not ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import msgspec
from tokenizers import Tokenizer as Backend

from lockstep.errors import LockstepError
from lockstep.model.tokenizer import Tokenizer
from lockstep.serve.heartbeat import BEATS, Heartbeat, processor_seconds
from lockstep.serve.launch import Launched, launch
from lockstep.serve.params import Embedding, Output, SamplingParams
from lockstep.serve.state import PromptTooLong, QueueFull, Stats
from lockstep.serve.wire import (
    Abort,
    Accepted,
    EngineSpec,
    Failed,
    Ping,
    Ready,
    Refused,
    Replaced,
    Report,
    Submit,
    Told,
    Vocabulary,
    Weights,
    frame,
    read,
)

log = logging.getLogger("lockstep.serve")
T = TypeVar("T")
_SETTLED = 30.0
"""Seconds after which a process that ends has not ended at once: the next one is started without a pause."""
_LONGEST_PAUSE = 30.0
_GRACE = 2.0
"""Seconds that a process may take to end after the server has hung up."""


class EngineFailed(Exception):
    """The engine is not there: it is loading, it has just ended, or it cannot start."""


class Request:
    """A request in the engine: iterate it for outputs until each of its choices is finished."""

    def __init__(self, identity: int, choices: int) -> None:
        self.identity = identity
        self.running = choices
        """Choices that the engine has not finished."""
        self._open = choices
        self._outputs: asyncio.Queue[Output | EngineFailed] = asyncio.Queue()

    def deliver(self, output: Output | EngineFailed) -> None:
        if isinstance(output, Output):
            self.running -= output.finish_reason is not None
        self._outputs.put_nowait(output)

    async def outputs(self) -> AsyncIterator[Output]:
        while self._open:
            output = await self._outputs.get()
            if isinstance(output, EngineFailed):
                raise output
            self._open -= output.finish_reason is not None
            yield output


@dataclass(frozen=True)
class Loaded:
    """What the engine told of its model."""

    tokenizer: Tokenizer
    max_length: int
    vocabulary: int


class Supervisor:
    """One engine. `run` until `stop`; the other methods raise EngineFailed while the engine is not ready."""

    def __init__(
        self,
        spec: EngineSpec,
        first: Launched | None = None,
        threads: int | None = None,
        hang_seconds: float = 30.0,
    ) -> None:
        """first: a process that was launched before there was time to make this. threads: see `launch`. hang_seconds:
        after how many of neither answering nor computing an engine is ended."""
        self._spec = spec
        self._hang_seconds, self._heartbeat = hang_seconds, Heartbeat()
        self._threads = threads
        self._first = first
        self._writer: asyncio.StreamWriter | None = None
        self._loaded: Loaded | None = None
        self._tokenizer: Tokenizer | None = None
        self._vocabulary = 0
        self._requests: dict[int, Request] = {}
        self._calls: dict[int, asyncio.Future[Report]] = {}
        self._ids = count()
        self._replacing = 0
        """Replacements of the weights that are not answered yet."""
        self._stopping = False
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self.reason: str | None = "the model is being loaded: try again in a moment."
        """Why the engine is not ready; None when it is."""
        self.refusal: LockstepError | None = None
        """The engine could not be started even once, by a mistake of the user's."""
        self.stats: Stats | None = None
        self.starts = 0

    @property
    def ready(self) -> bool:
        return self.reason is None

    @property
    def has_loaded(self) -> bool:
        """Whether it was ready once."""
        return self._loaded is not None

    @property
    def load(self) -> int:
        """Requests that are not finished."""
        return len(self._requests)

    @property
    def loaded(self) -> Loaded:
        """Of the engine that runs or ran last."""
        if self._loaded is None:
            raise EngineFailed(self.reason)
        return self._loaded

    async def run(self) -> None:
        """Start the engine, and again whenever it ends, until `stop`, or until the first start was refused."""
        quick = 0
        while not self._stopping:
            begun = time.monotonic()
            reason, mistake = await self._live()
            if self._stopping:
                break
            if mistake and self._loaded is None:
                self.refusal = LockstepError(reason)
                break
            quick = 0 if time.monotonic() - begun > _SETTLED else quick + 1
            pause = 0.0 if quick < 2 else min(2.0 ** (quick - 2), _LONGEST_PAUSE)
            log.error("%s; starting it again in %g s", reason, pause)
            self._lose(f"{reason} and is being started again: send the request again in a moment.")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), pause)
        self._lose("the server is shutting down.")
        self._settled.set()

    async def first_start(self) -> None:
        """Wait until the engine is ready for the first time, or never will be."""
        await self._settled.wait()

    def stop(self) -> None:
        """Hang up; `run` then comes to its end."""
        self._stopping = True
        self._wake.set()
        if self._writer is not None:
            self._writer.close()

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        timeout: float | None = None,
        salt: str | None = None,
        client: str = "",
        embedding: Embedding | None = None,
    ) -> Request:
        """Hand a request to the engine; raises what `Engine.add_request` raises."""
        request = Request(next(self._ids), params.n)
        self._requests[request.identity] = request
        try:
            await self._ask(
                Submit(request.identity, list(prompt_ids), params, priority, timeout, salt, client, embedding), Accepted
            )
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                self.abort(request)
            self._requests.pop(request.identity, None)
            raise
        return request

    def abort(self, request: Request) -> None:
        """The client is gone: its pages are free before the next step."""
        if self._requests.pop(request.identity, None) is not None and self._writer is not None:
            self._writer.write(frame(Abort(request.identity)))

    async def update_weights(self, path: str) -> int:
        """Serve the weights at `path` from the next step on, and after a restart; gives their number of parameters."""
        self._replacing += 1
        try:
            answer = await self._ask(Weights(next(self._ids), path), Replaced)
        finally:
            self._replacing -= 1
        self._spec = msgspec.structs.replace(self._spec, weights=path)
        return answer.parameters

    async def _ask(self, command: Submit | Weights, kind: type[T]) -> T:
        """Send a command and await its answer."""
        if self.reason is not None or self._writer is None:
            raise EngineFailed(self.reason)
        future: asyncio.Future[Report] = asyncio.get_running_loop().create_future()
        self._calls[command.identity] = future
        self._writer.write(frame(command))
        try:
            answer = await future
        finally:
            self._calls.pop(command.identity, None)
        if isinstance(answer, Refused):
            raise _REFUSALS[answer.kind](answer.reason)
        assert isinstance(answer, kind)
        return answer

    async def _live(self) -> tuple[str, bool]:
        """One process from its start to its end: why it ended, and whether that is the user's mistake."""
        launched, self._first = self._first or launch(self._threads, self._spec.tp), None
        reader, writer = await asyncio.open_connection(sock=launched.link, limit=2**20)
        failed: Failed | None = None
        watch = asyncio.create_task(self._watch(launched.process, writer))
        try:
            writer.write(frame(self._spec))
            self._writer = writer
            while failed is None and not self._stopping:
                report = await read(reader)
                failed = report if isinstance(report, Failed) else None
                self._take(report)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # it ended, or `stop` hung up
        finally:
            self._writer = None
            watch.cancel()
            writer.close()
            code = await asyncio.to_thread(_end, launched.process, _GRACE if self._stopping or failed else 0.0)
        if watch.done() and not watch.cancelled():
            return f"the engine did not answer for {self._hang_seconds:g} seconds and was ended", False
        if failed is not None:
            return failed.reason if failed.mistake else f"the engine failed ({failed.reason})", failed.mistake
        return f"the engine ended unexpectedly ({_how(code)})", False

    async def _watch(self, process: subprocess.Popen[bytes], writer: asyncio.StreamWriter) -> None:
        """Ask at every beat whether the engine still works, and kill one that does not. While it loads, or takes new
        weights, which may compile, it is not asked."""
        while True:
            await asyncio.sleep(self._hang_seconds / BEATS)
            if self.reason is not None or self._replacing:
                self._heartbeat.answered()
            elif self._heartbeat.beat(processor_seconds(process.pid)):
                return process.kill()
            else:
                writer.write(frame(Ping()))

    def _take(self, report: Report) -> None:
        self._heartbeat.answered()
        match report:
            case Told(outputs=outputs, stats=stats):
                self.stats = stats
                for identity, output in outputs:
                    if (request := self._requests.get(identity)) is not None:
                        request.deliver(output)
                        if not request.running:
                            del self._requests[identity]
            case Vocabulary():
                self._tokenizer, self._vocabulary = _tokenizer(report), report.size
            case Ready():
                assert self._tokenizer is not None, "the vocabulary comes first"
                self._loaded, self.stats = Loaded(self._tokenizer, report.max_length, self._vocabulary), report.stats
                self.reason = None
                self.starts += 1
                self._settled.set()
            case Accepted() | Refused() | Replaced():
                future = self._calls.get(report.identity)
                if future is not None and not future.done():
                    future.set_result(report)

    def _lose(self, reason: str) -> None:
        """The engine is gone, and with it all that it was asked."""
        self.reason, self.stats = reason, None
        failure = EngineFailed(reason)
        for request in self._requests.values():
            request.deliver(failure)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(failure)
        self._requests.clear()


_REFUSALS: Mapping[str, type[Exception]] = {
    "mistake": LockstepError, "too long": PromptTooLong, "queue full": QueueFull, "failed": RuntimeError,
}  # fmt: skip


def _tokenizer(told: Vocabulary) -> Tokenizer:
    bos, eos, pad = told.special
    backend: Any = Backend.from_str(told.tokenizer)
    return Tokenizer(backend, told.template, bos, frozenset(eos), pad, told.settings)


def _end(process: subprocess.Popen[bytes], grace: float) -> int:
    """The exit code of a process that was hung up on, by force where it does not end in time."""
    try:
        return process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
