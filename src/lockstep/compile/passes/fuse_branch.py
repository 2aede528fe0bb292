"""Fusion of a branch's last product with the sum that it joins the residual stream by, where no norm takes that sum
within the graph (`fuse_norm.py`): the rounded product is added while its tile is in the cache."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx import Node

from lockstep.compile.passes.base import Changes, Pass, PassContext
from lockstep.compile.passes.region import Declined, Region, arguments, calls, fuse, plain, views_between

aten = torch.ops.aten


def rewrite(module: fx.GraphModule, context: PassContext) -> Changes:
    """x float32 + gemm(a, weight) -> gemm_add."""
    return fuse(module, _sum_of_product)


def _sum_of_product(node: Node) -> Region | Declined | None:
    raw = torch.ops.lockstep
    if not calls(node, aten.add.Tensor) or node.kwargs or not all(isinstance(source, Node) for source in node.args):
        return None
    orders = (arguments(node), arguments(node)[::-1])
    pair = next(((x, h) for x, h in orders if calls(plain(h), raw.gemm.default)), None)
    if pair is None:
        return None
    x, h = pair
    product = plain(h)
    a, weight, n, bias, dtype = arguments(product)
    stream, total = x.meta["val"], node.meta["val"]
    if stream.dtype != torch.float32 or stream.shape != (a.meta["val"].shape[0], n) or not stream.is_contiguous():
        return Declined(node, "what the product is added to is no float32 stream of its shape")
    if bias is not None or dtype != a.meta["val"].dtype or total.shape != stream.shape:
        return Declined(node, "the product has a bias or is rounded to another dtype than its input's")
    nodes = (product, *views_between(h, product), node)
    return Region("product + residual", nodes, raw.gemm_add.default, (x, a, weight), (node,))


BRANCH = Pass.of("fuse-residual-product", rewrite)
