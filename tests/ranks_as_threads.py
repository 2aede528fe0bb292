"""Ranks as threads of this process: many layouts without paying for processes."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lockstep.parallel.collectives import Mesh
from lockstep.parallel.mesh import MeshShape
from lockstep.parallel.transport import Pending


class _Done:
    def wait(self) -> None:
        pass


class _Get:
    """A receive. Those of one sender are filled in the order in which they were begun, whichever is waited for."""

    def __init__(self, line: queue.Queue[Tensor], begun: deque[_Get], out: Tensor) -> None:
        self._line, self._begun, self._out, self._done = line, begun, out, False
        begun.append(self)

    def wait(self) -> None:
        while not self._done:
            self._begun.popleft()._fill()

    def _fill(self) -> None:
        found = self._line.get(timeout=60)
        assert found.shape == self._out.shape
        assert found.dtype == self._out.dtype
        self._out.copy_(found)
        self._done = True


class ThreadTransport:
    """A queue for each ordered pair. Like a real one it gives no message twice and keeps the order."""

    def __init__(self, rank: int, size: int, lines: dict[tuple[int, int], queue.Queue[Tensor]]) -> None:
        self.rank, self.size, self._lines = rank, size, lines
        self._begun: dict[int, deque[_Get]] = {source: deque() for source in range(size)}

    def send(self, tensor: Tensor, to: int) -> Pending:
        assert tensor.is_contiguous()
        self._lines[self.rank, to].put(tensor.clone())
        return _Done()

    def receive(self, out: Tensor, source: int) -> Pending:
        return _Get(self._lines[source, self.rank], self._begun[source], out)


def on_threads(shape: MeshShape, work: Callable[[Mesh], Any]) -> list[Any]:
    """``work(mesh)`` on every rank at once; the results by rank. The first error of any rank is raised."""
    lines = {(a, b): queue.Queue() for a in range(shape.size) for b in range(shape.size)}
    results: list[Any] = [None] * shape.size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(Mesh(shape, ThreadTransport(rank, shape.size, lines)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(shape.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not errors:
            thread.join(0.05)
    if errors:
        raise errors[0]
    assert all(line.empty() for line in lines.values()), "a message was sent that nobody took"
    return results
