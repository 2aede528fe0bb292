"""Overlap order: a collective begins as soon as what it sends is ready, and is waited for as late as possible.

Collectives begin in the order in which they were captured, which every rank shares; that is all that ranks need
(`parallel.collectives.Outbox`), as each may wait when it likes. Computation moves in between: what the collective does
not need from before its beginning, and what does not need it from behind the wait.
"""

from __future__ import annotations

from torch import fx
from torch.fx import Node

from lockstep.compile.passes.base import Changes, Pass, PassContext
from lockstep.compile.passes.recompute import forward_of
from lockstep.memory.effects import (
    is_collective,
    is_element,
    is_pure,
    is_view,
    is_wait,
    sends_more,
    storage,
    written,
)


def rewrite(module: fx.GraphModule, context: PassContext) -> Changes:
    """Move the beginnings up and the waits down, never over a write to memory that they use, and fill the gaps with
    work of the same part, forward or backward."""
    graph, count = module.graph, 0
    ahead = forward_of(graph, context.forward_outputs)
    begun = [n for n in graph.nodes if is_collective(n) and _is_waited_for(n) and not written(n)]
    for node in begun:
        count += max(_earlier(node), _fill_from_before(node, ahead))
    for node in reversed(list(graph.nodes)):
        if is_wait(node):
            count += max(_fill_from_behind(node, ahead), _later(node))
    return Changes(count)


def _is_waited_for(node: Node) -> bool:
    """Whether a node only begins something; one that ends it too leaves nothing to do meanwhile."""
    users = [user for one in node.users for user in (one.users if is_element(one) else (one,))]
    return not is_wait(node) and any(map(is_wait, users))


def _earlier(node: Node) -> int:
    """Put a collective right behind the last node that it must follow; whether it moved past a computation.

    It stays behind the wait for a sum that has more to send: that would have to be sent before it begins, so the
    computation meanwhile would be meanwhile no more.
    """
    needed = set(node.all_input_nodes)
    sent = {storage(source) for source in node.all_input_nodes}
    at, passed = node.prev, 0
    while at.op == "call_function" and at not in needed:
        fixed = is_collective(at) and (not is_wait(at) or sends_more(storage(at)[0]))
        if fixed or any(storage(target) in sent for target in written(at)):
            break
        passed += is_pure(at) and not is_view(at)
        at = at.prev
    if passed:
        at.append(node)
    return int(passed > 0)


def _fill_from_before(node: Node, ahead: set[Node]) -> int:
    """Put computations that a collective does not need, back to the one before, right behind its beginning."""
    needed, free = set(node.all_input_nodes), list[Node]()
    at = node.prev
    while at.op == "call_function" and is_pure(at):
        if at in needed or (at in ahead) is not (node in ahead):
            needed.update(at.all_input_nodes)
        else:
            free.append(at)
        at = at.prev
    if all(is_view(one) for one in free):
        return 0
    for one in free:  # the last of them first: each goes right behind the beginning
        node.append(one)
    return 1


def _fill_from_behind(node: Node, ahead: set[Node]) -> int:
    """Put computations up to the next collective before a wait, if they need nothing that it gives, and nothing that
    does needs them: what is only prepared for later would take memory for longer."""
    within, needing = list[Node](), {node}
    at = node.next
    while at.op == "call_function" and (is_pure(at) or is_wait(at)):
        if is_wait(at) or (at in ahead) is not (node in ahead) or any(one in needing for one in at.all_input_nodes):
            needing.add(at)
        within.append(at)
        at = at.next
    free: set[Node] = set()
    for one in reversed(within):
        if one not in needing and all(user in free or user.op == "output" for user in one.users):
            free.add(one)
    behind, moved = set(within), list[Node]()
    for one in within:
        if one in free and not behind.intersection(one.all_input_nodes):
            behind.remove(one)  # it will stand before the wait, and so may what reads it
            moved.append(one)
    if all(is_view(one) for one in moved):
        return 0
    for one in moved:
        node.prepend(one)
    return 1


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
