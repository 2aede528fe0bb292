"""Fusions around the rotary embedding: with the per-head norm before it, and with the write into the KV pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx import Node

from lockstep.compile.passes.base import Changes, Pass, PassContext
from lockstep.compile.passes.region import Declined, Region, arguments, calls, element, fuse, plain, views_between
from lockstep.memory.effects import is_element


def rewrite(module: fx.GraphModule, context: PassContext) -> Changes:
    """write_kv(rope(k)) -> rope_write_kv; then rope(rms_norm(x)) -> norm_rope where the norm has its own input."""
    writes, norms = fuse(module, _rope_and_write), fuse(module, _norm_and_rope)
    return Changes(writes.count + norms.count, writes.notes + norms.notes)


def _rope_and_write(node: Node) -> Region | Declined | None:
    raw = torch.ops.lockstep
    if not calls(node, raw.write_kv.default) or not calls(turned := plain(node.args[0]), raw.rope.default):
        return None
    k, positions, rotary, sign = arguments(turned)
    _, v, k_pages, v_pages, table, starts, written_positions = arguments(node)
    if sign != 1.0 or positions is not written_positions:
        return Declined(node, "its keys are turned by other positions than those they are written at")
    nodes = (turned, *views_between(node.args[0], turned), node)
    call = (k, v, rotary, k_pages, v_pages, table, starts, positions)
    return Region("rotary + KV write", nodes, raw.rope_write_kv.default, call, (), effect=node)


def _norm_and_rope(node: Node) -> Region | Declined | None:
    raw = torch.ops.lockstep
    if not calls(node, raw.rope.default) or node.args[3] != 1.0:
        return None
    normed: Any = plain(node.args[0])
    if not is_element(normed) or not calls(norm := normed.args[0], raw.rms_norm.default) or normed.args[1] != 0:
        return None
    x, weight, eps, offset = arguments(norm)
    if x.meta["val"].dim() != 3 or x.meta["val"].dtype != weight.meta["val"].dtype:
        return Declined(node, "the norm before it is not one of heads in one dtype")
    rstd = element(norm, 1)
    nodes = tuple(n for n in (norm, normed, *views_between(node.args[0], normed), rstd, node) if n is not None)
    call = (x, weight, node.args[1], node.args[2], eps, offset)
    return Region("head norm + rotary", nodes, raw.norm_rope.default, call, (node, rstd))


ROPE = Pass.of("fuse-rotary", rewrite)
