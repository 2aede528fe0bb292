"""Fusions of a product with what is done to its result: gate and up with their gated activation, linear with its
activation. The product's tile is activated while it is in the cache; every rounding stays where it was."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx import Node

from lockstep.compile.passes.base import Changes, Pass, PassContext
from lockstep.compile.passes.region import Declined, Region, arguments, calls, fuse, plain, views_between


def rewrite(module: fx.GraphModule, context: PassContext) -> Changes:
    """gated(gemm(x, gate), gemm(x, up)) -> gemm_gated; activation(gemm(x, weight) + bias) -> gemm_activation."""
    gated, active = fuse(module, _gated_product), fuse(module, _active_product)
    return Changes(gated.count + active.count, gated.notes + active.notes)


def _gated_product(node: Node) -> Region | Declined | None:
    raw = torch.ops.lockstep
    if not calls(node, raw.gated.default):
        return None
    gate, up = (plain(source) for source in node.args[:2])
    if not (calls(gate, raw.gemm.default) and calls(up, raw.gemm.default)):
        return Declined(node, "its gate or its up is no product")
    a, gate_weight, n, gate_bias, dtype = arguments(gate)
    b, up_weight, up_n, up_bias, _ = arguments(up)
    if a is not b or n != up_n:
        return Declined(node, "gate and up are products of different inputs or sizes")
    if gate_bias is not None or up_bias is not None:
        return Declined(node, "gate or up has a bias, which the fused product does not add")
    if dtype != a.meta["val"].dtype or node.meta["val"].dtype != dtype:
        return Declined(node, "gate and up are rounded to another dtype than their input's")
    views = [view for source, end in ((node.args[0], gate), (node.args[1], up)) for view in views_between(source, end)]
    nodes = (gate, up, *dict.fromkeys(views), node)
    keep = any(user not in nodes for source in (gate, up) for user in source.users)
    results = (node, gate, up) if keep else (node, None, None)
    call = (a, gate_weight, up_weight, n, node.args[2], keep)
    return Region("gate/up + gated activation", nodes, raw.gemm_gated.default, call, results)


def _active_product(node: Node) -> Region | Declined | None:
    raw = torch.ops.lockstep
    if not calls(node, raw.activation.default) or not calls(product := plain(node.args[0]), raw.gemm.default):
        return None
    a, weight, n, bias, dtype = arguments(product)
    if dtype != a.meta["val"].dtype:
        return Declined(node, "its product is rounded to another dtype than its input's")
    nodes = (product, *views_between(node.args[0], product), node)
    keep = any(user not in nodes for user in product.users)
    call = (a, weight, n, bias, node.args[1], keep)
    results = (node, product if keep else None)
    return Region("linear + activation", nodes, raw.gemm_activation.default, call, results)


PRODUCTS = Pass.of("fuse-products", rewrite)
