"""The level compiler: capture to a graph, passes, levels, the compile cache, the report (`docs/compile.md`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import importer

if TYPE_CHECKING:
    from lockstep.compile.block_calls import BlockCalls as BlockCalls
    from lockstep.compile.blockwise import Blockwise as Blockwise
    from lockstep.compile.cache import Cache as Cache
    from lockstep.compile.capture import CannotCompile as CannotCompile
    from lockstep.compile.capture import NotCached as NotCached
    from lockstep.compile.capture import not_possible as not_possible
    from lockstep.compile.compiler import Compiler as Compiler
    from lockstep.compile.compiler import StageReport as StageReport
    from lockstep.compile.group import GroupPrograms as GroupPrograms
    from lockstep.compile.group import Pool as Pool
    from lockstep.compile.group_memory import Span as Span
    from lockstep.compile.group_steps import Flight as Flight
    from lockstep.compile.micro_batch import MicroBatch as MicroBatch
    from lockstep.compile.program import Placer as Placer
    from lockstep.compile.serving import ServingProgram as ServingProgram
    from lockstep.compile.update import GlobalNorm as GlobalNorm
    from lockstep.compile.update import Update as Update

_FILES = {
    "BlockCalls": "block_calls", "Blockwise": "blockwise", "Cache": "cache", "CannotCompile": "capture",
    "Compiler": "compiler", "Flight": "group_steps", "GlobalNorm": "update", "GroupPrograms": "group",
    "MicroBatch": "micro_batch", "NotCached": "capture", "Placer": "program", "Pool": "group",
    "ServingProgram": "serving", "Span": "group_memory",
    "StageReport": "compiler", "Update": "update", "not_possible": "capture",
}  # fmt: skip
"""Where each public name lives. It is imported when asked for: a server has no use for what trains."""

__all__ = [
    "BlockCalls", "Blockwise", "Cache", "CannotCompile", "Compiler", "Flight", "GlobalNorm", "GroupPrograms",
    "MicroBatch", "NotCached", "Placer", "Pool", "ServingProgram", "Span", "StageReport", "Update", "not_possible",
]  # fmt: skip

__getattr__ = importer(__name__, _FILES)
