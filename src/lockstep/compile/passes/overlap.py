"""Overlap order: a collective begins as soon as what it sends is ready, and is waited for as late as possible.

Collectives keep their order among themselves, which every rank shares; computation moves in between.
"""

from __future__ import annotations

from torch import fx
from torch.fx import Node

from lockstep.compile.passes.base import Changes, Pass, PassContext
from lockstep.memory.effects import is_collective, is_pure, is_view, is_wait, storage, written


def rewrite(module: fx.GraphModule, context: PassContext) -> Changes:
    """Move the beginnings up and the waits down, never over a write to memory that they use."""
    graph, count = module.graph, 0
    for node in list(graph.nodes):
        if is_collective(node) and not is_wait(node) and not written(node):
            count += _earlier(node)
    for node in reversed(list(graph.nodes)):
        if is_wait(node):
            count += _later(node)
    return Changes(count)


def _earlier(node: Node) -> int:
    """Put a collective right behind the last node that it must follow; whether it moved past a computation."""
    needed = set(node.all_input_nodes)
    sent = {storage(source) for source in node.all_input_nodes}
    at, passed = node.prev, 0
    while at.op == "call_function" and at not in needed:
        fixed = is_collective(at) and not is_wait(at)
        if fixed or any(storage(target) in sent for target in written(at)):
            break
        passed += is_pure(at) and not is_view(at)
        at = at.prev
    if passed:
        at.append(node)
    return int(passed > 0)


def _later(node: Node) -> int:
    """Put a wait right before its first user; what it waits for must not be written in between."""
    begun = storage(node)[0]
    busy = {storage(source) for source in begun.all_input_nodes} | {storage(node)}
    at, passed = node.next, 0
    while at.op == "call_function" and node not in at.all_input_nodes:
        if any(storage(target) in busy for target in written(at)):
            break
        passed += not is_wait(at) and not is_view(at)
        at = at.next
    if passed:
        at.prepend(node)
    return int(passed > 0)


OVERLAP = Pass.of("overlap-collectives", rewrite)
