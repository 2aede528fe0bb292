"""The compiler: a stage to its recipes, through the cache or through capture, passes and lowering."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import fx

from lockstep.compile.cache import Cache
from lockstep.compile.capture import TRACING, CannotCompile, Function, NotCached, capture, import_tracer
from lockstep.compile.halves import Halves
from lockstep.compile.own_code import OwnCode
from lockstep.compile.partition import split
from lockstep.compile.passes import Level, PassContext, PassReport, apply, pipeline
from lockstep.compile.recipe import begun
from lockstep.compile.stage import Stage
from lockstep.errors import LockstepError
from lockstep.memory.recompute import RecomputePolicy

ROWS, MORE = 1009, 1041
"""Rows (units of them, where ranks share them) that a stage is captured with. Recipes hold lines through both, so that
they serve every number of rows. They are odd and 32 apart, so that a size in blocks of rows (halves, panels of sixteen)
lies on no line and is refused; and neither they, one more, nor a few times as many are the width of anything."""


@dataclass
class StageReport:
    """What was done for one stage: seconds by phase, the passes' reports, and whether the cache had it.

    before, after: the joint graph without and with the passes; None from the cache.
    """

    name: str
    cached: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    passes: tuple[PassReport, ...] = ()
    before: fx.GraphModule | None = None
    after: fx.GraphModule | None = None


@dataclass
class Compiler:
    """Compiles every kind of stage once. keep_graphs: put the graphs into the reports (then the cache is not read).

    note: where one-line messages go. only_cached: capture nothing (NotCached).
    """

    level: Level
    disable: Sequence[str] = ()
    only: Sequence[str] = ()
    cache: Cache | None = None
    keep_graphs: bool = False
    note: Callable[[str], None] = print
    recompute: RecomputePolicy = field(default_factory=RecomputePolicy)
    only_cached: bool = False
    reports: list[StageReport] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Time of the phases that belong to no stage: planning memory, building programs."""
    _done: list[tuple[Any, Halves]] = field(default_factory=list)
    _told: bool = False

    def __post_init__(self) -> None:
        if self.level == "O0":
            raise LockstepError("level O0 compiles nothing")
        self.passes = pipeline(self.level, self.disable, self.only)

    def compile(self, stage: Stage) -> Halves:
        """The recipes of a stage. CannotCompile where it does something that a graph cannot hold."""
        what = [stage.key, stage.whole, stage.early]
        for other, done in self._done:
            if other == what:  # to write every layer's key down would cost ten times as much as to compare it
                return done
        key = _key_text([*what, [*(step.name for step in self.passes), self.recompute.mode]])
        report = StageReport(stage.name)
        halves = self._from_cache(key, report)
        if halves is None:
            with TRACING:  # another thread may have compiled it while this one waited
                halves = self._from_cache(key, report) or self._captured(stage, key, report)
        self.reports.append(report)
        self._done.append((what, halves))
        return halves

    def capture(self, stage: Stage) -> Halves:
        """The recipes of a stage, without a cache."""
        report = StageReport(stage.name)
        self.reports.append(report)
        return self._captured(stage, None, report)

    def messages(self) -> int:
        """One number for the messages between ranks that all that was compiled begins, and their order."""
        parts = [[h.forward, h.backward, h.weights] for _, h in self._done]
        text = json.dumps([[] if one is None else begun(one) for one in chain.from_iterable(parts)])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])

    @contextmanager
    def phase(self, name: str) -> Any:
        """Adds the time within to `seconds`."""
        begun = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun

    def _from_cache(self, key: str | None, report: StageReport) -> Halves | None:
        if self.cache is None or key is None or self.keep_graphs:
            return None
        begun = time.perf_counter()
        found = self.cache.load(key, self._refused)
        report.seconds["cache"] = time.perf_counter() - begun
        report.cached = found is not None
        return found

    def _refused(self, line: str) -> None:
        """Tell of an entry that is not used, once: where one was made by other sources all were."""
        if not self._told and not self.only_cached:
            self._told = True
            self.note(line)

    def _captured(self, stage: Stage, key: str | None, report: StageReport) -> Halves:
        if self.only_cached:
            raise NotCached(f"{stage.name}: it is not in the compile cache")
        with self.phase("import"):
            import_tracer()
        try:
            function = stage.function()
            halves = self._at(stage, function, MORE, report)
            if stage.grows:
                halves = self._at(stage, function, ROWS, report).at_any(ROWS, halves, MORE)
        except Exception as error:
            # Whatever a stage does that tracing cannot follow (reading a value, a shape that depends on data) comes
            # as an exception of any type; the eager operators are right in every case.
            raise CannotCompile(f"{stage.name}: {_first_line(error)}") from error
        if self.cache is not None and key is not None:
            self.cache.store(key, halves, self.note)
        return halves

    def _at(self, stage: Stage, function: Function, rows: int, report: StageReport) -> Halves:
        """The recipes for one number of rows."""
        with _timed(report, "capture"):
            joint = capture(function, stage.given, rows, stage.whole, stage.share)
        if self.keep_graphs and rows == MORE:
            report.before = _copy(joint.module)
        with _timed(report, "passes"):
            # Where forward and backward run as one, nothing is kept from the one to the other.
            policy = RecomputePolicy() if stage.whole else self.recompute
            report.passes = apply(joint.module, self.passes, PassContext(joint.outputs, policy))
        if self.keep_graphs and rows == MORE:
            report.after = joint.module
        with _timed(report, "lower"):
            return split(joint, stage.early)


def _key_text(key: Any) -> str | None:
    """A key as text: JSON, sorted. None where it holds a caller's code, which no text stands for."""
    try:
        return json.dumps(key, sort_keys=True, default=_text)
    except _NoText:
        return None


def _text(value: Any) -> str:
    if isinstance(value, OwnCode):
        raise _NoText
    return str(value)


class _NoText(Exception):
    """Of a value that is known within this process only."""


def _first_line(error: Exception) -> str:
    """An error's class, and the first line of what it says if it says anything."""
    said = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *said[:1]])


@contextmanager
def _timed(report: StageReport, phase: str) -> Any:
    begun = time.perf_counter()
    yield
    report.seconds[phase] = report.seconds.get(phase, 0.0) + time.perf_counter() - begun


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, values))
    return fx.GraphModule(module, graph)
