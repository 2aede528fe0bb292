"""Common subexpressions: what was computed once from the same values is not computed again."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx import Node

from lockstep.compile.passes.base import Changes, Pass, PassContext
from lockstep.memory.effects import (
    Storage,
    is_pure,
    is_view,
    returned_storages,
    storage,
    written,
    written_storages,
)


def rewrite(module: fx.GraphModule, context: PassContext) -> Changes:
    """Let equal pure nodes share the first one's value.

    Equal: the same operator over the same values, of memory that was not written in between. Memory of its own is
    kept where somebody writes into it, and where both values leave the graph (the caller may write into them).
    """
    mutable, returned = written_storages(module.graph), returned_storages(module.graph)
    versions: dict[Storage, int] = {}
    first: dict[Any, Node] = {}
    count, notes = 0, []
    for node in list(module.graph.nodes):
        for argument in written(node):
            where = storage(argument)
            versions[where] = versions.get(where, 0) + 1
        if not is_pure(node) or node.meta.get("recomputed"):
            continue
        if not is_view(node) and any(where[0] is node for where in mutable) and node.op != "get_attr":
            continue
        earlier = first.setdefault(_key(node, versions), node)
        if earlier is node:
            continue
        if not is_view(node) and _both_returned(earlier, node, returned):
            notes.append(f"{node.name} equals {earlier.name}; both kept: each is an output with memory of its own")
            continue
        node.replace_all_uses_with(earlier)
        returned.update((earlier, index) for where, index in list(returned) if where is node)
        module.graph.erase_node(node)
        count += 1
    return Changes(count, tuple(notes))


def _both_returned(a: Node, b: Node, returned: set[Storage]) -> bool:
    return all(any(where[0] is node for where in returned) for node in (a, b))


def _key(node: Node, versions: dict[Storage, int]) -> Any:
    """What a value is made of. Numbers carry their type and spelling: 1, 1.0 and True differ, 0.0 and -0.0 too."""

    def freeze(value: Any) -> Any:
        if isinstance(value, Node):
            return value, versions.get(storage(value), 0)
        if isinstance(value, (list, tuple)):
            return tuple(map(freeze, value))
        if isinstance(value, dict):
            return tuple((name, freeze(item)) for name, item in sorted(value.items()))
        if isinstance(value, slice):
            return "slice", freeze(value.start), freeze(value.stop), freeze(value.step)
        return type(value), repr(value)

    return node.op, node.target, freeze(node.args), freeze(node.kwargs)


DUPLICATES = Pass.of("common-subexpressions", rewrite)
