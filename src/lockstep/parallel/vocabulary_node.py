"""A rank's part of the head and its loss as an operator: what a captured graph has in the place of `part_of_loss`.

How many chunks of rows there are is not known to a graph, and in each the ranks tell each other what they have of a
row's log-sum-exp. So it is one operator, which ends when all ranks have what they need (see `nodes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.ops.cut_vocabulary import Part
from lockstep.ops.head_parts import Asked, PartOfLoss, Segments, empty_part, part_of_loss, working_bytes
from lockstep.parallel.collectives import Axis
from lockstep.parallel.nodes import define_results

_ARGUMENTS = (
    "Tensor hidden, Tensor weight, Tensor targets, Tensor token_weights, float z_loss, float softcap, bool entropy, "
    "bool hidden_gradient, bool weight_gradient, int[] cut"
)


def node_of(segments: Segments, axis: str) -> Part:
    """`part_of_loss` under the contract, for a graph."""
    cut = [segments.vocabulary, segments.count, segments.here, segments.index]

    def part(hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, asked: Asked) -> PartOfLoss:
        found = torch.ops.lockstep_mesh.part_of_loss(hidden, weight, targets, token_weights, *asked, cut, axis)
        return PartOfLoss(*found[:-1])

    return part


def _shapes(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The results, and what is worked in: nobody reads that, so a program gives it a place among its intermediates."""
    asked = _asked(rest)
    size = working_bytes(Segments(*rest[-1]), hidden, asked)
    return *empty_part(hidden, weight, asked), hidden.new_empty(size, dtype=torch.uint8)


def _run(axis: Axis, out: Sequence[Tensor], hidden: Tensor, weight: Tensor, *rest: Any) -> None:
    targets, token_weights, *_, cut = rest
    rows, (*results, memory) = (hidden, weight, targets, token_weights), out
    part_of_loss("bitwise", Segments(*cut), axis.gather, *rows, _asked(rest), PartOfLoss(*results), memory)


def _asked(rest: Sequence[Any]) -> Asked:
    return Asked(*rest[2:7])


define_results("part_of_loss", _ARGUMENTS, len(PartOfLoss._fields) + 1, _shapes, _run)
