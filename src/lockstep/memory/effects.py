"""What a node of a graph does to memory: which storage its value lies in, which it writes, and whether it is pure.

Read off the operator's schema (`Tensor(a)` is a view, `Tensor(a!)` is written), so an operator that is registered
with an honest schema needs no entry here. What is not known is taken to have an effect. Two inputs of a graph are
taken to lie in different memory: capture gives each tensor one input.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

Storage = tuple[Node, int]
"""Memory that a node allocates or brings in, and which of the node's results it is (0 where there is one)."""

_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem",
                "lockstep_mesh")  # fmt: skip
WAITS = ("_c10d_functional::wait_tensor", "lockstep_mesh::wait")
"""Operators that wait for what another one began, and send nothing."""
_IN_STEPS = ("lockstep_mesh::all_add", "lockstep_mesh::all_add_coalesced")


def storage(node: Node) -> Storage:
    """Where the value of a node lies: through views, in-place results and elements of tuples."""
    index = 0
    while True:
        if node.op == "call_function" and node.target is operator.getitem:
            node, index = node.args  # type: ignore[assignment]
        source = _aliased(node, index)
        if source is None:
            return node, index
        node, index = source, 0


def written(node: Node) -> tuple[Node, ...]:
    """The arguments that a node writes into."""
    if not isinstance(node.target, OpOverload):
        return ()
    places = _targets(node.target)
    return tuple(found for position, name in places for found in _nodes(_argument(node, position, name)))


def is_view(node: Node) -> bool:
    """Whether the value of a node lies in an argument's memory, nothing is written and nothing is waited for."""
    if node.op != "call_function" or written(node) or is_wait(node):
        return False
    return storage(node)[0] is not node and not (node.target is operator.getitem and storage(node)[0] is node.args[0])


def is_element(node: Node) -> bool:
    """Whether a node only takes one of another's several results."""
    return node.op == "call_function" and node.target is operator.getitem


def is_collective(node: Node) -> bool:
    """Whether a node talks to other ranks: every rank must run it, and all in one order."""
    return isinstance(node.target, OpOverload) and node.target.namespace in _COLLECTIVES


def is_wait(node: Node) -> bool:
    """Whether a node only waits for a collective; its value is the collective's."""
    return isinstance(node.target, OpOverload) and node.target.name() in WAITS


def sends_more(node: Node) -> bool:
    """Whether what a node begins may have more to send, when it is waited for or the next message begins."""
    return isinstance(node.target, OpOverload) and node.target.name() in _IN_STEPS


def is_random(node: Node) -> bool:
    """Whether a node draws from a generator, whose state is an effect."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def is_pure(node: Node) -> bool:
    """Whether a node's value depends on its arguments alone and running it leaves no trace."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload):
        return getattr(node.target, "__module__", None) in ("_operator", "math")
    return not (written(node) or is_collective(node) or is_random(node))


def written_storages(graph: Graph) -> set[Storage]:
    """Every storage that some node of the graph writes into."""
    return {storage(argument) for node in graph.nodes for argument in written(node)}


def returned_storages(graph: Graph) -> set[Storage]:
    """Every storage that an output of the graph lies in."""
    return {storage(value) for node in graph.nodes if node.op == "output" for value in node.all_input_nodes}


def _aliased(node: Node, index: int) -> Node | None:
    """The node in whose memory result `index` of a node lies, if any."""
    if node.op == "get_attr":
        twin = next(n for n in node.graph.find_nodes(op="get_attr", sort=False) if n.target == node.target)
        return None if twin is node else twin
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    if is_wait(node):
        return node.all_input_nodes[0]
    for position, name in _sources(node.target, index):
        nodes = list(_nodes(_argument(node, position, name)))
        if nodes:
            return nodes[min(index, len(nodes) - 1)]
    return None


@cache
def _sources(target: OpOverload, index: int) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments in whose memory result `index` of an operator may lie."""
    schema = target._schema
    info = schema.returns[min(index, len(schema.returns) - 1)].alias_info if schema.returns else None
    if info is None:
        return ()
    # A list of views (`split`) names its set on the elements only: then any aliased argument is the source.
    names = info.before_set
    return tuple(
        (i, a.name)
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and (not names or names & (a.alias_info.before_set | a.alias_info.after_set))
    )


@cache
def _targets(target: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator writes."""
    written = enumerate(target._schema.arguments)
    return tuple((i, a.name) for i, a in written if a.alias_info is not None and a.alias_info.is_write)


def _argument(node: Node, position: int, name: str) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _nodes(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes(item)
