"""When a run of one process that names no level compiles: so that no run is slower than without.

What is in the cache is taken before the first step. Otherwise the first step runs operator by operator, and then the
run compiles if that pays for the steps that are left. The bits are the same either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lockstep.compile import NotCached
from lockstep.config import Config
from lockstep.train.execution import Execution

GAIN = 0.08
"""The part of a step that O2 saves at least (docs/performance.md)."""
COST = 3.0
"""Seconds that compiling takes, whatever the depth: the half of it imports what traces."""


class Chosen:
    """The execution of a run, chosen before each of its first two steps. made: at the level, of what is in the cache
    alone (True; NotCached) or compiled now. eager: operator by operator."""

    def __init__(
        self, config: Config, eager: Execution, made: Callable[[bool], Execution], note: Callable[[str], None]
    ) -> None:
        self._config, self._made, self._note = config, made, note
        self._now, self._settled = eager, config.compile.of_model == "O0" and not config.compile.explain
        self._began: float | None = None

    @property
    def now(self) -> Execution:
        return self._now

    def before_step(self, done: int) -> Execution:
        """What runs the next step, so many being done."""
        if not self._settled:
            self._choose(done)
        return self._now

    def _choose(self, done: int) -> None:
        how, now = self._config.compile, time.perf_counter()
        self._settled = True
        if how.wanted:
            self._now = self._made(False)
        elif self._began is None:
            try:
                self._now = self._made(True)
            except NotCached:
                self._began, self._settled = time.perf_counter(), False
        elif pays(left := self._config.train.steps - done, seconds := now - self._began):
            self._now = self._made(False)
            self._note(f"compiled in {time.perf_counter() - now:.1f} s, and kept for the next run (docs/compile.md)")
        else:
            self._note(
                f"operators run one by one (O0): {left} steps of {seconds:.2g} s are over before compiling would pay; "
                "compile.level O2 does it all the same"
            )


def pays(steps: int, seconds: float) -> bool:
    """Whether compiling saves more than it takes, with so many steps of so many seconds left."""
    return GAIN * steps * seconds > COST
