"""The engine's process (`process.py` starts it). Commands come in and reports go out through a socket.

It ends when the server does: a server that is gone has closed the socket, however it ended. With TP > 1 it is the first
of so many processes that share the model (`serve/tp`), and ends the others.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from lockstep.errors import LockstepError
from lockstep.serve.launch import Launched, begin, launch_ranks
from lockstep.serve.lean import import_torch
from lockstep.serve.params import Output
from lockstep.serve.state import PromptTooLong, QueueFull, RanksLost
from lockstep.serve.structured import StructuredOutputs
from lockstep.serve.tp import open_model
from lockstep.serve.trial import Trial, Words
from lockstep.serve.wire import (
    Abort,
    Accepted,
    EngineSpec,
    Failed,
    Message,
    Ping,
    Pong,
    Ready,
    Refused,
    Replaced,
    Submit,
    Told,
    Vocabulary,
    Weights,
    frame,
    receive,
)

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.model import Model
    from lockstep.serve.engine import Engine

log = logging.getLogger("lockstep.serve")
State = dict[str, "Tensor"]
_GRACE = 5.0
"""Seconds that a step may last after the server is gone."""
_SHORT = 2**11
"""Characters of a structure that is compiled at once: no structure that short takes a tenth of a second."""
_MOST_TRYING = 16
"""Long structures that may wait to be compiled."""


def main() -> None:
    link = begin()
    ranks = launch_ranks(int(sys.argv[3]))  # they import PyTorch while this process does
    gc.disable()  # what is imported and loaded stays: to look through it while it is made finds nothing
    import_torch()
    import lockstep.model
    import lockstep.serve.engine  # noqa: F401

    spec = receive(link)
    if not isinstance(spec, EngineSpec):
        return
    logging.basicConfig(level=spec.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    sender = _Sender(link)
    try:
        engine = build(spec, ranks, sender)
        gc.freeze()
        gc.enable()
        sender(Ready(engine.max_length, engine.stats()))
        Loop(engine, spec, sender).run(link)
        engine.close()
    except RanksLost as error:
        sender(Failed(str(error)))
        sys.exit(1)
    except (LockstepError, OSError, MemoryError) as error:
        sender(Failed(str(error), mistake=True))
    except Exception as error:
        log.exception("the engine failed")
        sender(Failed(f"{type(error).__name__}: {error}"))
        sys.exit(1)


def build(spec: EngineSpec, ranks: Sequence[Launched], send: Callable[[Message], None]) -> Engine:
    """The engine that a spec describes. ranks: the processes besides this one, which wait to be told. send: takes what
    the server can begin with while the rest is made."""
    from lockstep.model import Model, PackedCache, load
    from lockstep.serve.engine import Engine

    draft = spec.draft_model
    packed = PackedCache(log.info, spec.weight_cache) if spec.weight_cache else None
    model = open_model(spec.model, spec.tp, spec.dtype, spec.numerics, ranks, packed)
    send(_vocabulary(model if isinstance(model, Model) else model.model))
    engine = Engine(
        model,
        kv_memory=spec.kv_memory,
        kv_dtype=spec.kv_dtype,
        max_batch_tokens=spec.max_batch_tokens,
        step_seconds=spec.step_seconds,
        max_running=spec.max_running,
        max_queue=spec.max_queue,
        shares=spec.shares,
        prefix_cache=spec.prefix_cache,
        level=spec.level,
        drafts=spec.drafts,
        draft_model=None if draft is None else load(draft, dtype=spec.dtype, numerics=spec.numerics, packed=packed),
        debug=spec.log_level == "debug",
    )
    if spec.weights is not None:
        engine.update_weights(_state(spec.weights, engine.model))
    return engine


class Loop:
    """Obeys commands between the engine's steps, until the server is gone.

    A second thread reads the socket; structures are compiled and weights are read beside the steps.
    """

    def __init__(self, engine: Engine, spec: EngineSpec, send: _Sender) -> None:
        self._engine, self._spec, self._send = engine, spec, send
        self._inbox: queue.SimpleQueue[Message | tuple[Weights, State] | RanksLost | None] = queue.SimpleQueue()
        self._helpers = ThreadPoolExecutor(2)
        self._trials, self._room = ThreadPoolExecutor(1), threading.Semaphore(_MOST_TRYING)
        """A thread for long structures, and room for those that wait for it."""
        self._trial = Trial(lambda: _words(engine), spec.structure_seconds)
        self._server_ids: dict[int, int] = {}
        """By the engine's id of a request."""
        self._engine_ids: dict[int, int] = {}
        self._preparing: set[int] = set()
        self._dropped: set[int] = set()
        """Aborted while they were prepared."""
        self._left: dict[int, int] = {}
        """Choices that the engine has not finished."""

    def run(self, link: socket.socket) -> None:
        threading.Thread(target=self._read, args=(link,), daemon=True).start()
        self._engine.watch(lambda reason: self._inbox.put(RanksLost(reason)))
        while True:
            while not self._inbox.empty() or not self._engine.has_work():
                command = self._inbox.get()
                if command is None:
                    return
                self._obey(command)
            self._tell(self._engine.step())

    def _read(self, link: socket.socket) -> None:
        """The reading thread."""
        while (command := receive(link)) is not None:
            if isinstance(command, Submit) and command.params.structured_outputs is not None:
                self._preparing.add(command.identity)
                self._prepare(command, command.params.structured_outputs)
            elif isinstance(command, Weights):
                self._helpers.submit(self._load, command)
            else:
                self._inbox.put(command)
        self._inbox.put(None)
        time.sleep(_GRACE)
        os._exit(1)  # the other thread waits for a rank that does not answer

    def _prepare(self, command: Submit, structure: StructuredOutputs) -> None:
        if structure.size <= _SHORT or self._engine.guides.knows(structure):
            self._helpers.submit(self._compile, command, structure)
        elif self._room.acquire(blocking=False):
            self._trials.submit(self._try, command, structure)
        else:
            full = QueueFull(f"{_MOST_TRYING} long structures wait to be compiled already: try again later.")
            self._inbox.put(refusal(command.identity, full))

    def _try(self, command: Submit, structure: StructuredOutputs) -> None:
        """On a thread of its own: long structures wait for each other, and for nobody else."""
        try:
            if not self._engine.guides.knows(structure):
                self._trial.check(structure)
            self._compile(command, structure)
        except Exception as error:
            self._inbox.put(refusal(command.identity, error))
        finally:
            self._room.release()

    def _compile(self, command: Submit, structure: StructuredOutputs) -> None:
        try:
            self._engine.guides.check(structure)
            self._inbox.put(command)
        except Exception as error:
            self._inbox.put(refusal(command.identity, error))

    def _load(self, command: Weights) -> None:
        try:
            self._inbox.put((command, _state(command.path, self._engine.model)))
        except Exception as error:
            self._inbox.put(refusal(command.identity, error))

    def _obey(self, command: Message | tuple[Weights, State] | RanksLost) -> None:
        match command:
            case RanksLost():
                raise command
            case Refused(identity=identity):
                self._preparing.discard(identity)
                self._dropped.discard(identity)
                self._send(command)
            case Submit(identity=identity):
                self._preparing.discard(identity)
                if identity in self._dropped:
                    self._dropped.remove(identity)
                else:
                    self._submit(command)
            case Abort(identity=identity):
                if identity in self._preparing:
                    self._dropped.add(identity)
                elif identity in self._engine_ids:
                    self._tell(self._engine.abort(self._engine_ids[identity]))
            case Ping():
                self._send(Pong())
            case (Weights(identity=identity), state):
                try:
                    self._engine.update_weights(state)
                    self._send(Replaced(identity, len(state)))
                except RanksLost:
                    raise
                except LockstepError as error:
                    self._send(refusal(identity, error))

    def _submit(self, command: Submit) -> None:
        try:
            number = self._engine.add_request(
                command.prompt, command.params, priority=command.priority, timeout=command.timeout,
                salt=command.salt, client=command.client, embedding=command.embedding,
            )  # fmt: skip
        except LockstepError as error:
            return self._send(refusal(command.identity, error))
        self._server_ids[number], self._engine_ids[command.identity] = command.identity, number
        self._left[number] = command.params.n
        self._send(Accepted(command.identity))

    def _tell(self, outputs: list[Output]) -> None:
        if outputs:
            pairs = [(self._server_ids[output.request], output) for output in outputs]
            self._send(Told(pairs, self._engine.stats()))
        for output in outputs:
            self._left[output.request] -= output.finish_reason is not None
            if not self._left[output.request]:
                del self._left[output.request]
                del self._engine_ids[self._server_ids.pop(output.request)]


class _Sender:
    """Writes reports from any thread, one after the other."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._lock = link, threading.Lock()

    def __call__(self, message: Message) -> None:
        with self._lock:
            try:
                self._link.sendall(frame(message))
            except ConnectionError:  # the server is gone: the reading thread notices too
                log.debug("nobody hears %s", type(message).__name__)


def refusal(identity: int, error: Exception) -> Refused:
    """An error as an answer."""
    match error:
        case PromptTooLong():
            return Refused(identity, "too long", str(error))
        case QueueFull():
            return Refused(identity, "queue full", str(error))
        case LockstepError() | OSError():
            return Refused(identity, "mistake", str(error))
    log.error("a command failed", exc_info=error)
    return Refused(identity, "failed", f"{type(error).__name__}: {error}")


def _state(path: str, model: Model) -> State:
    """The parameters of the model at `path`, in the dtype that is served."""
    from lockstep.model import load
    from lockstep.serve.runner import name_of

    new = load(path, dtype=name_of(model.dtype), numerics=model.ops.numerics)
    return {name: parameter.detach() for name, parameter in new.decoder.named_parameters()}


def _words(engine: Engine) -> Words:
    """The vocabulary as structures need it."""
    tokenizer = engine.model.tokenizer
    return Words(tokenizer.backend.to_str(), engine.model.config.vocab_size, sorted(tokenizer.eos_ids))


def _vocabulary(model: Model) -> Vocabulary:
    tokenizer = model.tokenizer
    return Vocabulary(
        tokenizer.backend.to_str(),
        tokenizer.template,
        (tokenizer.bos_id, sorted(tokenizer.eos_ids), tokenizer.pad_id),
        tokenizer.settings,
        model.config.vocab_size,
    )
