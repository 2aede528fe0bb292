"""Recompute split: what the forward pass keeps for the backward one, and what that computes again.

The backward pass gets copies of the nodes that the policy chose, each right before its first use: the same operators
on the same values, so the same bits. What the forward pass itself needs is untouched.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx import Node

from lockstep.compile.passes.base import Changes, Pass, PassContext
from lockstep.memory.effects import Storage, is_element, is_pure, is_view, storage, written, written_storages
from lockstep.memory.recompute import Value, choose, kept_bytes, recomputed_flops
from lockstep.ops.costs import Cost, cost


def rewrite(module: fx.GraphModule, context: PassContext) -> Changes:
    """Split by the context's policy; nothing to do where there is no backward part or all is kept."""
    if context.forward_outputs is None or context.recompute.mode == "none":
        return Changes()
    graph = module.graph
    forward = forward_nodes(graph, context.forward_outputs)
    roots, values = _values(graph, forward)
    chosen = choose(context.recompute, values)
    again = {roots[i] for i in chosen}
    count = _copy(graph, forward, {node for node in graph.nodes if storage(node)[0] in again})
    before, after = kept_bytes(values, ()), kept_bytes(values, chosen)
    if not count:
        told = (f"{context.recompute.mode}: nothing to give up, {before:,} bytes are kept",) if before else ()
        return Changes(0, told)
    flops = recomputed_flops(values, chosen)
    return Changes(count, (f"kept for the backward pass: {after:,} bytes, {before:,} before; {flops:,.0f} FLOPs more",))


def forward_nodes(graph: fx.Graph, outputs: int) -> set[Node]:
    """The inputs, and whatever the first outputs need: by value, or by writes into memory that they read."""
    results: Any = next(iter(graph.find_nodes(op="output"))).args[0]
    needed = {node for node in results[:outputs] if isinstance(node, Node)}
    read = {storage(node) for node in needed}
    for node in reversed(graph.nodes):
        if node in needed or any(storage(argument) in read for argument in written(node)):
            needed.add(node)
            needed.update(node.all_input_nodes)
            read.update(storage(argument) for argument in node.all_input_nodes)
    return needed | {node for node in graph.nodes if node.op == "placeholder"}


def forward_of(graph: fx.Graph, outputs: int | None) -> set[Node]:
    """The forward part of a graph whose first results are its; all of one without a backward part (outputs: None)."""
    return set(graph.nodes) if outputs is None else forward_nodes(graph, outputs)


def node_cost(node: Node) -> Cost:
    """What a node costs by the shapes of its fake values; nothing for inputs, elements of tuples and views."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return Cost()
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
    return cost(node.target, args, kwargs, node.meta.get("val"))


def _values(graph: fx.Graph, forward: set[Node]) -> tuple[list[Node], list[Value]]:
    """The forward nodes that bring memory in, views and elements of tuples counted with them, and their values."""
    mutable = written_storages(graph)
    roots = [node for node in graph.nodes if node in forward and storage(node)[0] is node and not is_element(node)]
    places = {node: i for i, node in enumerate(roots)}
    used: dict[Node, set[Storage]] = {}
    behind: set[Node] = set()
    for node in graph.nodes:
        if not is_view(node) and not is_element(node):
            for where in map(storage, node.all_input_nodes):
                used.setdefault(where[0], set()).add(where)
                if node not in forward and node.op != "output":
                    behind.add(where[0])
    found = []
    for node in roots:
        price, touched = node_cost(node), {storage(argument) for argument in node.all_input_nodes}
        steady = not any(where in touched or where[0] is node for where in mutable)
        again = node.op == "call_function" and is_pure(node) and steady
        size = sum(_bytes(where) for where in used.get(node, ())) if node.op == "call_function" else 0
        sources = tuple(dict.fromkeys(places[where[0]] for where in sorted(touched, key=str) if where[0] in places))
        found.append(Value(size, sources, price.flops, again, node in behind))
    return roots, found


def _bytes(where: Storage) -> int:
    value = where[0].meta["val"]
    tensor = value if isinstance(value, Tensor) else value[where[1]]
    return int(tensor.numel()) * tensor.element_size()


def _copy(graph: fx.Graph, forward: set[Node], again: set[Node]) -> int:
    """Let the backward nodes read copies of these nodes, made at the first node that computes with them: a view taken
    early must not bring the copy of its source with it. The number of copies."""
    copies: dict[Node, Node] = {}

    def copied(node: Node) -> Node:
        if node not in again or node in copies:
            return copies.get(node, node)
        arguments = {source: copied(source) for source in node.all_input_nodes}
        copies[node] = graph.node_copy(node, lambda source: arguments[source])
        copies[node].meta = dict(node.meta) | {"recomputed": True}
        return copies[node]

    for node in list(graph.nodes):
        if node in forward or node.op == "output" or node in again:
            continue
        with graph.inserting_before(node):
            for source in node.all_input_nodes:
                node.replace_input_with(source, copied(source))
    for node in reversed(list(graph.nodes)):
        if node in again and node not in forward and not node.users:
            graph.erase_node(node)
    return sum(not is_view(copy) and not is_element(copy) for copy in copies.values())


RECOMPUTE = Pass.of("recompute", rewrite)
