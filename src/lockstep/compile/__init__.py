"""The level compiler: capture to a graph, passes, levels, the compile cache, the report (`docs/compile.md`)."""

from lockstep.compile.block_calls import BlockCalls
from lockstep.compile.blockwise import Blockwise
from lockstep.compile.cache import Cache
from lockstep.compile.capture import CannotCompile, not_possible
from lockstep.compile.compiler import Compiler, StageReport
from lockstep.compile.group import Flight, GroupPrograms, Span
from lockstep.compile.micro_batch import MicroBatch
from lockstep.compile.program import Placer
from lockstep.compile.serving import ServingProgram
from lockstep.compile.sink import sink
from lockstep.compile.update import GlobalNorm, Update

__all__ = [
    "BlockCalls",
    "Blockwise",
    "Cache",
    "CannotCompile",
    "Compiler",
    "Flight",
    "GlobalNorm",
    "GroupPrograms",
    "MicroBatch",
    "Placer",
    "ServingProgram",
    "Span",
    "StageReport",
    "Update",
    "not_possible",
    "sink",
]
