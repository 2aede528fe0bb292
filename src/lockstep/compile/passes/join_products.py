"""Three products of one input as one: query, key and value. Their panels are read one after the other in a single call,
so that threads meet once and share out all three."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx import Node

from lockstep.compile.passes.base import Changes, Pass, PassContext
from lockstep.compile.passes.region import Declined, Region, arguments, calls, fuse


def rewrite(module: fx.GraphModule, context: PassContext) -> Changes:
    """gemm(a, Q), gemm(a, K), gemm(a, V), all in a's dtype -> gemm_three."""
    return fuse(module, _three_products)


def _three_products(node: Node) -> Region | Declined | None:
    raw = torch.ops.lockstep
    if not calls(node, raw.gemm.default):
        return None
    a = node.args[0]
    assert isinstance(a, Node)
    place = {one: i for i, one in enumerate(node.graph.nodes)}
    nodes = tuple(sorted((user for user in a.users if calls(user, raw.gemm.default)), key=place.__getitem__))
    if len(nodes) != 3 or nodes[-1] is not node:
        return None
    _, weights, widths, biases, dtypes = zip(*map(arguments, nodes), strict=True)
    if set(dtypes) != {a.meta["val"].dtype} or any(one.args[0] is not a for one in nodes):
        return Declined(node, "a product of the same input is rounded to another dtype than its input's")
    return Region("joint products", nodes, raw.gemm_three.default, (a, *weights, *widths, *biases), nodes)


JOINT = Pass.of("join-products", rewrite)
