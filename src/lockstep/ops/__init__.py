"""The operators under the bit contract: kernels, plain references, and the batch layouts they share."""

from lockstep.ops import raw
from lockstep.ops.adamw import AdamWFactors
from lockstep.ops.attention import check_head_dim
from lockstep.ops.batch import PAGE, Int8Pages, KVPages, LatentPages, Packed, Paged, Pages, Routes, Routing
from lockstep.ops.operators import Numerics, Operators, operators

__all__ = [
    "PAGE",
    "AdamWFactors",
    "Int8Pages",
    "KVPages",
    "LatentPages",
    "Numerics",
    "Operators",
    "Packed",
    "Paged",
    "Pages",
    "Routes",
    "Routing",
    "check_head_dim",
    "operators",
    "raw",
]
