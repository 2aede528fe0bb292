"""Bucketing: collectives of one kind and group that are ready close together go as one message.

A coalesced collective moves the same elements between the same ranks. A float sum over ranks keeps its bits only if
each element's order of additions does not depend on where it lies in the message, which a ring does not promise.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from lockstep.compile.passes.base import Changes, Pass, PassContext
from lockstep.compile.passes.region import arguments
from lockstep.memory.effects import is_wait, storage, written


def rewrite(module: fx.GraphModule, context: PassContext) -> Changes:
    """Coalesce all-gathers, reduce-scatters and all-reduces up to `context.bucket_bytes` each."""
    coalesced = _coalesced()
    opened: dict[Any, _Bucket] = {}
    closed: list[_Bucket] = []
    notes = []
    for node in module.graph.nodes:
        for key, bucket in list(opened.items()):
            if bucket.ends_at(node):
                closed.append(opened.pop(key))
        if node.target not in coalesced:
            continue
        reason = _unordered(node, context)
        if reason:
            notes.append(f"{node.name}: {reason}")
            continue
        key = (node.target, node.args[1:], node.meta["val"].dtype)
        bucket = opened.setdefault(key, _Bucket())
        bucket.members.append(node)
        if bucket.bytes >= context.bucket_bytes:
            closed.append(opened.pop(key))
    full = [bucket.members for bucket in (*closed, *opened.values()) if len(bucket.members) > 1]
    for members in full:
        _merge(module.graph, members, coalesced[members[0].target])
    return Changes(sum(map(len, full)), tuple(notes))


@dataclass
class _Bucket:
    """Collectives that may still wait for others: nobody needs their results yet."""

    members: list[Node] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        values = [arguments(member)[0].meta["val"] for member in self.members]
        return sum(int(value.numel()) * value.element_size() for value in values)

    def ends_at(self, node: Node) -> bool:
        """Whether a node needs a member's result, or writes what a member sends."""
        if is_wait(node):
            return False
        mine, sent = {(m, 0) for m in self.members}, {storage(arguments(m)[0]) for m in self.members}
        needs = any(storage(source) in mine for source in node.all_input_nodes)
        return needs or any(storage(target) in sent for target in written(node))


def _unordered(node: Node, context: PassContext) -> str:
    """Why a collective's bits could change with its place in a message, or nothing."""
    if "reduce" not in str(node.target) or context.sums_by_element or not node.meta["val"].is_floating_point():
        return ""
    if node.args[1] in ("max", "min"):
        return ""
    return "stays alone: this library's float sums depend on where an element lies in the message"


def _merge(graph: fx.Graph, members: list[Node], target: Any) -> None:
    """One collective right after the last member, and the members' waits after it."""
    waits = [user for member in members for user in list(member.users) if is_wait(user)]
    sent = [arguments(member)[0] for member in members]
    with graph.inserting_after(members[-1]):
        whole = graph.call_function(target, (sent, *members[0].args[1:]))
    whole.meta["val"] = [member.meta["val"] for member in members]
    at = whole
    for i, member in enumerate(members):
        with graph.inserting_after(at):
            part = graph.call_function(operator.getitem, (whole, i))
        part.meta = dict(member.meta)
        member.replace_all_uses_with(part)
        at = part
    for wait in waits:
        at.append(wait)
        at = wait
    for member in members:
        graph.erase_node(member)


def _coalesced() -> dict[Any, Any]:
    """Collectives and the form of each that takes a list."""
    ops = torch.ops._c10d_functional
    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
    return {getattr(ops, name).default: getattr(ops, f"{name}_coalesced").default for name in names}


BUCKETS = Pass.of("bucket-collectives", rewrite)
