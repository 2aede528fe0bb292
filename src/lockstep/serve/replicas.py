"""Several engines behind one server: each in a process of its own, a request goes where its prefix is known.

A replica that ends fails its own requests and is started again; the others go on. One replica is the usual case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import fields
from weakref import WeakKeyDictionary

from lockstep.errors import LockstepError
from lockstep.serve.launch import Launched, share_of_cores
from lockstep.serve.params import Embedding, SamplingParams
from lockstep.serve.router import Router
from lockstep.serve.state import QueueFull, Stats
from lockstep.serve.supervisor import EngineFailed, Loaded, Request, Supervisor
from lockstep.serve.wire import EngineSpec


class Replicas:
    """The engines. `run` until `stop`; the other methods raise EngineFailed while no engine is ready."""

    def __init__(
        self, spec: EngineSpec, count: int = 1, first: Launched | None = None, hang_seconds: float = 30.0
    ) -> None:
        """first: a process that was launched before there was time to make this. hang_seconds: see `Supervisor`."""
        threads = share_of_cores(count * spec.tp)
        self._all = [Supervisor(spec, first if i == 0 else None, threads, hang_seconds) for i in range(count)]
        self._router = Router()
        self._seen = [0] * count
        """The start of each replica that the router knows of."""
        self._at: WeakKeyDictionary[Request, Supervisor] = WeakKeyDictionary()

    @property
    def ready(self) -> bool:
        return any(replica.ready for replica in self._all)

    @property
    def reason(self) -> str | None:
        """Why no engine is ready; None when one is."""
        return None if self.ready else self._all[0].reason

    @property
    def refusal(self) -> LockstepError | None:
        """The engine could not be started even once, by a mistake of the user's."""
        return next((replica.refusal for replica in self._all if replica.refusal is not None), None)

    @property
    def loaded(self) -> Loaded:
        """Of an engine that runs or ran last."""
        return next((r for r in self._all if r.has_loaded), self._all[0]).loaded

    @property
    def stats(self) -> Stats | None:
        """Of all engines together."""
        told = [replica.stats for replica in self._all if replica.stats is not None]
        if not told:
            return None
        return Stats(*(sum(getattr(stats, field.name) for stats in told) for field in fields(Stats)))

    @property
    def starts(self) -> int:
        return sum(replica.starts for replica in self._all)

    @property
    def serving(self) -> int:
        """Replicas that are ready."""
        return sum(replica.ready for replica in self._all)

    async def run(self) -> None:
        """Keep every engine running until `stop`, or until the first start of one was refused."""
        running = [asyncio.create_task(replica.run()) for replica in self._all]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        self.stop()  # one was refused what all would be refused, or all are to end
        await asyncio.gather(*running)

    async def first_start(self) -> None:
        """Wait until every engine is ready for the first time, or never will be."""
        await asyncio.gather(*(replica.first_start() for replica in self._all))

    def stop(self) -> None:
        """Hang up; `run` then comes to its end."""
        for replica in self._all:
            replica.stop()

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
        """Hand a request to the engine that knows most of its prompt; raises what `Engine.add_request` raises.

        A full queue is no refusal while another engine has room.
        """
        loads = {i: replica.load for i, replica in enumerate(self._all) if replica.ready}
        if not loads:
            raise EngineFailed(self.reason)
        self._forget_old_starts()
        while True:
            # One engine needs no choice, and no hash of every prompt.
            chosen = 0 if len(self._all) == 1 else self._router.choose(prompt_ids, salt, loads)
            replica = self._all[chosen]
            try:
                request = await replica.submit(
                    prompt_ids,
                    params,
                    priority=priority,
                    timeout=timeout,
                    salt=salt,
                    client=client,
                    embedding=embedding,
                )
            except QueueFull:
                del loads[chosen]
                if not loads:
                    raise
            else:
                self._at[request] = replica
                return request

    def abort(self, request: Request) -> None:
        """The client is gone: its pages are free before the next step."""
        self._at[request].abort(request)

    async def update_weights(self, path: str) -> int:
        """Serve the weights at `path` from each engine's next step on; gives their number of parameters.

        Every engine must be ready: else two might serve different weights. A request that comes meanwhile is answered
        with the old weights or with the new ones, whole.
        """
        waiting = next((replica.reason for replica in self._all if not replica.ready), None)
        if waiting is not None:
            raise EngineFailed(waiting)
        counts = await asyncio.gather(*(replica.update_weights(path) for replica in self._all))
        for i in range(len(self._all)):
            self._router.forget(i)
        return counts[0]

    def _forget_old_starts(self) -> None:
        for i, replica in enumerate(self._all):
            if replica.starts != self._seen[i]:
                self._seen[i] = replica.starts
                self._router.forget(i)
