"""The level compiler: capture to a graph, passes, levels, the compile cache, the report (`docs/compile.md`)."""

from lockstep.compile.blockwise import Blockwise
from lockstep.compile.cache import Cache
from lockstep.compile.capture import CannotCompile
from lockstep.compile.compiler import Compiler, StageReport
from lockstep.compile.micro_batch import MicroBatch
from lockstep.compile.serving import ServingProgram
from lockstep.compile.sink import sink
from lockstep.compile.update import GlobalNorm, Update

__all__ = [
    "Blockwise",
    "Cache",
    "CannotCompile",
    "Compiler",
    "GlobalNorm",
    "MicroBatch",
    "ServingProgram",
    "StageReport",
    "Update",
    "sink",
]
