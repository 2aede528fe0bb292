"""A running server seen from outside: its processes, its gauges, and long requests that run while something happens."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import httpx

LONG = {"model": "tiny", "prompt": "the", "max_tokens": 900, "ignore_eos": True}


def children_of(pid: int) -> list[int]:
    """The processes that this one started and that have not been waited for."""
    entries = (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return sorted(int(entry.name) for entry in entries if _parent(entry) == pid)


def engine_of(process: subprocess.Popen[str]) -> int:
    """The id of the engine's process, the only child of the server's."""
    (child,) = children_of(process.pid)
    return child


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not waited for does not."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def gauge(url: str, name: str, **headers: str) -> float:
    lines = httpx.get(f"{url}/metrics", headers=headers).text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@contextmanager
def meanwhile(url: str, count: int, **changes: object) -> Iterator[list[httpx.Response]]:
    """So many long requests, all of which run when the body begins. Their answers are in the list when it has ended."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(f"{url}/v1/completions", json={**LONG, **changes}, timeout=60))

    threads = [Thread(target=ask, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    wait_for(lambda: gauge(url, "vllm:num_requests_running") == count)
    yield answers
    for thread in threads:
        thread.join(60)


def _parent(entry: Path) -> int | None:
    """Of a process, by its folder in /proc; None for one that has just ended."""
    try:
        found = re.search(r"^PPid:\t(\d+)$", (entry / "status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
