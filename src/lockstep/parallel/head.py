"""The output projection by parts of the vocabulary: each rank has some of its rows, the first gets all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.ops import Operators
from lockstep.ops.operators import CutProduct
from lockstep.parallel.collectives import Axis


def shared_head(ops: Operators, axis: Axis, vocabulary: int) -> CutProduct:
    """How `Decoder.head` multiplies where the axis' ranks share the vocabulary. A logit is a sum over the hidden width
    alone, so whoever computes it, it has the same bits. All ranks must call it; the others get their own part."""
    sizes = [len(part) for part in torch.empty(vocabulary, 0).tensor_split(axis.size)]

    def own(weight: Tensor) -> Tensor:
        return weight.tensor_split(axis.size)[axis.index]

    def pack(weight: Tensor, dtype: torch.dtype) -> Any:
        return ops.pack(own(weight), dtype)

    def linear(hidden: Tensor, weight: Any, bias: None, out_dtype: torch.dtype) -> Tensor:
        if isinstance(weight, Tensor) and len(weight) == vocabulary:
            weight = own(weight)
        mine: Tensor = ops.linear(hidden, weight, bias, out_dtype=out_dtype)
        if axis.index > 0:
            axis.send(mine, 0).wait()
            return mine
        parts = [mine, *(mine.new_empty(len(mine), size) for size in sizes[1:])]
        for pending in [axis.receive(part, rank) for rank, part in enumerate(parts) if rank]:
            pending.wait()
        return torch.cat(parts, dim=1)

    return CutProduct(linear, pack)
