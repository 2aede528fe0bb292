"""Regions: several nodes that one fused operator replaces, and what must hold for that to change nothing.

Every fusion finds regions; this decides whether one may be replaced, says why not, and replaces it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.fx import Node

from lockstep.compile.passes.base import Changes
from lockstep.memory.effects import is_pure, is_view, written_storages


@dataclass(frozen=True)
class Region:
    """Nodes to replace by one call.

    nodes: all of them, views between them too. operator, args: the call. results: the nodes whose values the call
    gives, in the order of its results; the other nodes' values are gone. effect: the one node with an effect, if any.
    """

    name: str
    nodes: tuple[Node, ...]
    operator: Any
    args: tuple[Any, ...]
    results: tuple[Node | None, ...]
    effect: Node | None = None


@dataclass(frozen=True)
class Declined:
    """A place that looks like a region but is none."""

    where: Node
    reason: str


Finder = Callable[[Node], Region | Declined | None]
"""Looks for a region that ends at a node."""


@dataclass
class _Order:
    """Where every node stands; made anew after each replacement."""

    graph: fx.Graph
    at: dict[Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.at = {node: i for i, node in enumerate(self.graph.nodes)}


def fuse(module: fx.GraphModule, finder: Finder) -> Changes:
    """Replace every region that the finder finds and that may be replaced."""
    count, notes, gone = 0, [], set[Node]()
    order = _Order(module.graph)
    for node in list(module.graph.nodes):
        found = None if node in gone or node.op != "call_function" else finder(node)
        if isinstance(found, Declined):
            notes.append(f"{found.where.name}: {found.reason}")
        elif found is not None:
            reason = _obstacle(found, order)
            if reason:
                notes.append(f"{found.name} of {', '.join(n.name for n in found.nodes)}: {reason}")
                continue
            _replace(module.graph, found, order)
            gone.update(found.nodes)
            order = _Order(module.graph)
            count += 1
    return Changes(count, tuple(notes))


def plain(node: Any) -> Any:
    """The node that this one only reshapes: through views of all its elements in the same order."""
    while isinstance(node, Node) and is_view(node) and len(node.all_input_nodes) == 1:
        source = node.all_input_nodes[0]
        a, b = node.meta.get("val"), source.meta.get("val")
        if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.numel() == b.numel() and a.dtype == b.dtype):
            break
        if not (a.is_contiguous() and b.is_contiguous()):
            break
        node = source
    return node


def views_between(node: Any, source: Node) -> list[Node]:
    """The views from a node down to (not including) a source that `plain` finds."""
    found = []
    while node is not source:
        found.append(node)
        node = node.all_input_nodes[0]
    return found


def element(node: Node, index: int) -> Node | None:
    """The node that takes this result of a node with several, if somebody needs it."""
    return next((u for u in node.users if u.target is operator.getitem and u.args[1] == index), None)


def arguments(node: Node) -> tuple[Any, ...]:
    """The positional arguments of a node, for unpacking: their types are those of its operator's schema."""
    return node.args


def calls(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target is target


def _obstacle(region: Region, order: _Order) -> str:
    """Why a region may not be replaced, or nothing."""
    inside, kept = set(region.nodes), {node for node in region.results if node is not None}
    for node in region.nodes:
        outside = [user for user in node.users if user not in inside]
        if outside and node not in kept:
            return f"{node.name} is needed by {outside[0].name}"
        if node is not region.effect and not is_pure(node):
            return f"{node.name} has an effect"
    places = [order.at[node] for node in region.nodes]
    for node in list(order.graph.nodes)[min(places) : max(places)]:
        if node not in inside and node.op == "call_function" and not is_pure(node):
            return f"{node.name} stands in between and has an effect"
    if region.effect is None and any(where[0] in inside for where in written_storages(order.graph)):
        return "its memory is written later"
    last_input = max((order.at[node] for node in _inputs(region)), default=-1)
    first_user = min((order.at[user] for user in _users(region)), default=len(order.at))
    if last_input >= first_user:
        return "a value that it needs comes after one of its results is used"
    return ""


def _inputs(region: Region) -> Iterable[Node]:
    inside = set(region.nodes)
    given: list[Node] = []
    fx.map_arg(region.args, given.append)
    return [node for node in given if node not in inside]


def _users(region: Region) -> Iterable[Node]:
    inside = set(region.nodes)
    return [user for node in region.nodes for user in node.users if user not in inside]


def _replace(graph: fx.Graph, region: Region, order: _Order) -> None:
    first_user = min((order.at[user] for user in _users(region)), default=len(order.at))
    end = max(region.nodes, key=order.at.__getitem__)
    at = next((n for n in graph.nodes if order.at.get(n) == first_user), None) if first_user < order.at[end] else end
    with graph.inserting_before(at):
        call = graph.call_function(region.operator, region.args)
        several = len(region.results) > 1
        parts = [_part(graph, call, i, node) if several else call for i, node in enumerate(region.results)]
    args = fx.map_arg(region.args, lambda argument: argument.meta["val"])
    call.meta = dict(end.meta) | {"val": region.operator(*args)}  # fake values: shapes, of results nobody needs too
    call.meta["fused"] = (region.name, tuple(node.name for node in region.nodes))
    for node, part in zip(region.results, parts, strict=True):
        if node is not None and part is not None:
            node.replace_all_uses_with(part)
    for node in sorted(region.nodes, key=order.at.__getitem__, reverse=True):
        graph.erase_node(node)


def _part(graph: fx.Graph, call: Node, index: int, node: Node | None) -> Node | None:
    if node is None:
        return None
    part = graph.call_function(operator.getitem, (call, index))
    part.meta = dict(node.meta)
    return part
