"""Tensor parallelism without sums across devices: every product is cut by outputs, and what is cut is gathered.

Each device has some heads of attention and a part of an MLP's middle; before the product that reads them all
(attention output, down) they are gathered, and so are its outputs. An output is one chain over the whole input on
whichever device makes it, so a model has the bits of a single device whatever its ``canonical_tp``. It takes two
gathers where the form of `cut_linear` takes a sum. Without gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.ops.cut_linear import alone, cut_operators
from lockstep.ops.operators import CutProduct, Operators


class Members(Protocol):
    """Devices that each have an equal part of a tensor."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every device's, in their order."""


def gathered_operators(ops: Operators, segments: int, members: Members) -> Operators:
    """The operators of one of the devices. segments: the model's ``canonical_tp``; each device makes all of them.

    A weight that `cut_linear` cuts by inputs is cut by outputs here. Those that it cuts by outputs give each device its
    own part.
    """
    whole = cut_operators(ops, segments, segments, alone)
    rows = whole.cut.get("rows", CutProduct(ops.linear, ops.pack))

    def linear(x: Tensor, weight: Any, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        return _joined(rows.linear(_joined(x, members), weight, bias, out_dtype=out_dtype), members)

    return replace(ops, cut={"rows": CutProduct(linear, rows.pack)})


def _joined(part: Tensor, members: Members) -> Tensor:
    """[T, n] of every device -> [T, devices x n]."""
    return torch.cat(members.gather(part), dim=1)
