"""Bucketing: collectives of one kind and group that are ready close together go as one message.

A coalesced collective moves the same elements between the same ranks. A float sum over ranks keeps its bits only if
each element's order of additions does not depend on where it lies in the message: so it is with `parallel.nodes`, whose
sums are trees over ranks; a ring does not promise it.

What needs a member's result waits for the whole bucket, so pure nodes that do may stand before its last member: they
are put off. So the gradients of one value from several products (query, key and value; gate and up), which are added
one after the other, still go as one message.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from lockstep.compile.passes.base import Changes, Pass, PassContext
from lockstep.compile.passes.recompute import forward_of
from lockstep.compile.passes.region import arguments
from lockstep.memory.effects import is_pure, is_wait, storage, written
from lockstep.parallel import nodes


def rewrite(module: fx.GraphModule, context: PassContext) -> Changes:
    """Coalesce all-gathers, reduce-scatters and sums up to `context.bucket_bytes` each, forward and backward apart."""
    coalesced, ahead = _coalesced(), forward_of(module.graph, context.forward_outputs)
    opened: dict[Any, _Bucket] = {}
    closed: list[_Bucket] = []
    notes = []
    for node in module.graph.nodes:
        for key, bucket in list(opened.items()):
            if bucket.ends_at(node):
                closed.append(opened.pop(key))
            elif bucket.needed_by(node):
                bucket.late.append(node)
        if node.target not in coalesced:
            continue
        reason = _unordered(node, context)
        if reason:
            notes.append(f"{node.name}: {reason}")
            continue
        key = (node.target, node.args[1:], node.meta["val"].dtype, node in ahead)
        bucket = opened.setdefault(key, _Bucket())
        bucket.members.append(node)
        if bucket.bytes >= context.bucket_bytes:
            closed.append(opened.pop(key))
    full = [bucket for bucket in (*closed, *opened.values()) if len(bucket.members) > 1]
    for bucket in full:
        _merge(module.graph, bucket, coalesced[bucket.members[0].target])
    return Changes(sum(len(bucket.members) for bucket in full), tuple(notes))


@dataclass
class _Bucket:
    """Collectives that may still wait for others. late: nodes that need a result of theirs, and can be put off."""

    members: list[Node] = field(default_factory=list)
    late: list[Node] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        values = [arguments(member)[0].meta["val"] for member in self.members]
        return sum(int(value.numel()) * value.element_size() for value in values)

    def needed_by(self, node: Node) -> bool:
        """Whether a node needs a member's result: itself, or through what was put off."""
        mine = {(m, 0) for m in self.members} | {storage(one) for one in self.late}
        return not is_wait(node) and any(storage(source) in mine for source in node.all_input_nodes)

    def ends_at(self, node: Node) -> bool:
        """Whether a node needs a member's result now, or writes what a member sends or what was put off reads."""
        if is_wait(node):
            return False
        if self.needed_by(node) and not is_pure(node):
            return True
        read = {storage(arguments(m)[0]) for m in self.members}
        read |= {storage(source) for one in self.late for source in one.all_input_nodes}
        return any(storage(target) in read for target in written(node))


def _unordered(node: Node, context: PassContext) -> str:
    """Why a collective's bits could change with its place in a message, or nothing."""
    if "reduce" not in str(node.target) or context.sums_by_element or not node.meta["val"].is_floating_point():
        return ""
    if node.args[1] in ("max", "min"):
        return ""
    return "stays alone: this library's float sums depend on where an element lies in the message"


def _merge(graph: fx.Graph, bucket: _Bucket, target: Any) -> None:
    """One collective right after the last member, then the members' waits, then what was put off."""
    members = bucket.members
    waits = [user for member in members for user in list(member.users) if is_wait(user)]
    order = {node: i for i, node in enumerate(graph.nodes)}
    late = [node for node in bucket.late if order[node] < order[members[-1]]]
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
    for node in (*waits, *late):
        at.append(node)
        at = node
    for member in members:
        graph.erase_node(member)


def _coalesced() -> dict[Any, Any]:
    """Collectives and the form of each that takes a list."""
    ops = torch.ops._c10d_functional
    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
    found = {getattr(ops, name).default: getattr(ops, f"{name}_coalesced").default for name in names}
    return found | nodes.COALESCED


BUCKETS = Pass.of("bucket-collectives", rewrite)
