"""SIGTERM and SIGINT ask the loop to save and stop; a second one ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether somebody asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def take(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = signal.Signals(number).name


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Within the block the two signals set the request. Outside the main thread Python has no handlers: then never."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, request.take) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
