"""Work that recurses as deep as a client's text is nested, on a thread with room for it.

A library that overflows its stack ends the whole process; no exception tells.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
_STACK = 2**29
"""Bytes; the system gives what is used."""
_starting = threading.Lock()
"""The size of a new thread's stack is the whole process's."""


def on_a_deep_stack(work: Callable[[], T]) -> T:
    """What `work` gives or raises."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="deep stack")
    with _starting:
        usual = threading.stack_size(_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return result.result()
