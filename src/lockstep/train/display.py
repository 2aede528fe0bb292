"""What a person sees while a run prepares and trains: a bar in a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_EVERY_SECONDS = 10.0
_QUIET_SECONDS = 2.0


@dataclass(frozen=True)
class StepLine:
    """The numbers of one step on the bar. memory: resident bytes. mfu: a fraction, None where no peak is known.
    seconds_left: None while nobody can know."""

    step: int
    steps: int
    loss: float
    tokens_per_second: float
    mfu: float | None
    memory: int
    seconds_left: float | None

    def text(self) -> str:
        mfu = "" if self.mfu is None else f"  MFU {100 * self.mfu:.1f}%"
        return f"loss {self.loss:.4f}  {self.tokens_per_second:,.0f} tok/s{mfu}  {self.memory / 2**30:.2f} GiB"


class Display:
    """Progress on stderr; use as a context. Nothing is shown for preparation that takes under two seconds."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._live = self.console.is_terminal
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[numbers]}"))
        self._bar = Progress(*columns, TimeRemainingColumn(), console=self.console, transient=False)
        self._task: TaskID | None = None
        self._what = ""
        self._began = self._last = time.monotonic()

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish()

    def preparing(self, what: str, done: int, total: int) -> None:
        """Bytes of text done, of ``total`` (0: not known yet)."""
        numbers = f"{done / 1e6:.1f} MB"
        self._going(what, done, total, numbers, f"{done / 1e6:.1f} of {total / 1e6:.1f} MB" if total else numbers)

    def counted(self, what: str, done: int, total: int) -> None:
        """Steps done, of ``total``, of something that may take long."""
        self._going(what, done, total, f"{done:,} of {total:,}", f"{done:,} of {total:,}")

    def _going(self, what: str, done: int, total: int, numbers: str, line: str) -> None:
        now = time.monotonic()
        if what != self._what:
            self._finish()
            self._what, self._began, self._last = what, now, now - _EVERY_SECONDS + _QUIET_SECONDS
        if self._live:
            if now - self._began > _QUIET_SECONDS:
                self._show(what, numbers, done, total or None)
            return
        ended = done == total and now - self._began > _QUIET_SECONDS
        if self._due(now) or ended:
            self.console.print(f"{what}: {line}")
        if ended:
            self._what = ""  # said once

    def step(self, line: StepLine) -> None:
        """One training step is done."""
        if self._what != "train":
            self._finish()
            self._what, self._last = "train", 0.0
        if self._live:
            self._show(f"step {line.step}/{line.steps}", line.text(), line.step, line.steps)
        elif self._due(time.monotonic()) or line.step == line.steps:
            left = "" if (left := line.seconds_left) is None else f"  {int(left) // 60}:{int(left) % 60:02d} left"
            self.console.print(f"step {line.step}/{line.steps}  {line.text()}{left}", highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _due(self, now: float) -> bool:
        if now - self._last < _EVERY_SECONDS:
            return False
        self._last = now
        return True

    def _show(self, description: str, numbers: str, done: int, total: int | None) -> None:
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task(description, total=total, numbers=numbers)
        self._bar.update(self._task, description=description, numbers=numbers, completed=done, total=total)

    def _finish(self) -> None:
        if self._task is not None:
            self._bar.refresh()
            self._bar.stop()
            self._bar.remove_task(self._task)
            self._task = None
