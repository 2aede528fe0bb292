"""Fusion of the residual sum with the norm that reads it, forward and backward: the rows pass through the cache once.

The sum stays a result: the residual stream goes on with it.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx import Node

from lockstep.compile.passes.base import Changes, Pass, PassContext
from lockstep.compile.passes.region import Declined, Region, arguments, calls, element, fuse

aten = torch.ops.aten


def rewrite(module: fx.GraphModule, context: PassContext) -> Changes:
    """rms_norm(x + h) -> add_rms_norm; d_sum + rms_norm_backward(...) -> add_rms_norm_backward."""
    forward, backward = fuse(module, _sum_and_norm), fuse(module, _norm_backward_and_sum)
    return Changes(forward.count + backward.count, forward.notes + backward.notes)


def _sum_and_norm(node: Node) -> Region | Declined | None:
    raw = torch.ops.lockstep
    if not calls(node, raw.rms_norm.default):
        return None
    total, weight, eps, offset = arguments(node)
    if not calls(total, aten.add.Tensor):
        return None
    pair = _residual(total, weight.meta["val"].dtype)
    if pair is None:
        return Declined(node, "what it norms is no sum of a float32 stream and a branch of the weight's dtype")
    y, rstd = element(node, 0), element(node, 1)
    nodes = tuple(n for n in (total, node, y, rstd) if n is not None)
    return Region("residual + norm", nodes, raw.add_rms_norm.default, (*pair, weight, eps, offset), (total, y, rstd))


def _residual(total: Node, branch_dtype: torch.dtype) -> tuple[Node, Node] | None:
    """The stream and the branch of a sum, if it is one of both; the addition's order changes no bit."""
    if total.kwargs or not all(isinstance(source, Node) for source in total.args):
        return None
    shape = total.meta["val"].shape
    for x, h in (arguments(total), arguments(total)[::-1]):
        stream, branch = x.meta["val"], h.meta["val"]
        same = stream.shape == branch.shape == shape and stream.is_contiguous() and branch.is_contiguous()
        if same and stream.dtype == torch.float32 and branch.dtype == branch_dtype:
            return x, h
    return None


def _norm_backward_and_sum(node: Node) -> Region | Declined | None:
    raw = torch.ops.lockstep
    if not calls(node, raw.rms_norm_backward.default):
        return None
    dx, dw = element(node, 0), element(node, 1)
    if dx is None or len(dx.users) != 1 or not calls(total := next(iter(dx.users)), aten.add.Tensor):
        return None
    if total.kwargs or len(total.args) != 2 or total.args[0] is total.args[1]:
        return Declined(node, "its input's gradient is not just added to one other")
    dy, x, weight, rstd, offset = arguments(node)
    other = total.args[0] if total.args[1] is dx else total.args[1]
    if not _stream(other, total) or not _stream(x, total):
        return Declined(node, "the sum of gradients is not that of a float32 stream")
    branch = dy.meta["val"].dtype
    cast = next((u for u in total.users if calls(u, aten._to_copy.default) and u.meta["val"].dtype == branch), None)
    nodes = tuple(n for n in (node, dx, dw, total, cast) if n is not None)
    call = (dy, other, x, weight, rstd, offset)
    return Region("norm + residual, backward", nodes, raw.add_rms_norm_backward.default, call, (total, cast, dw))


def _stream(source: object, total: Node) -> bool:
    if not isinstance(source, Node):
        return False
    value = source.meta["val"]
    return bool(value.dtype == torch.float32 and value.shape == total.meta["val"].shape and value.is_contiguous())


NORM = Pass.of("fuse-residual-norm", rewrite)
