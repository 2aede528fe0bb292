"""Dead code: nodes whose value nobody needs, and writes into memory that nobody reads afterwards."""

from __future__ import annotations

from torch import fx
from torch.fx import Node

from lockstep.compile.passes.base import Changes, Pass, PassContext
from lockstep.memory.effects import Storage, is_pure, storage, written


def rewrite(module: fx.GraphModule, context: PassContext) -> Changes:
    """Remove what does not reach an output, an input's memory, or another effect."""
    needed = _needed(module.graph)
    dead = [node for node in reversed(module.graph.nodes) if node not in needed]
    for node in dead:
        module.graph.erase_node(node)
    if dead:
        module.delete_all_unused_submodules()
    return Changes(len(dead))


def _needed(graph: fx.Graph) -> set[Node]:
    """The nodes that must stay, from the end: a write stays if its memory came from outside or is read below."""
    needed: set[Node] = set()
    read: set[Storage] = set()
    for node in reversed(graph.nodes):
        writes = [storage(argument) for argument in written(node)]
        effect = node.op in ("placeholder", "output") or not (writes or is_pure(node))
        seen = any(where in read or where[0].op in ("placeholder", "get_attr") for where in writes)
        if effect or seen or node in needed:
            needed.add(node)
            needed.update(node.all_input_nodes)
            read.update(storage(argument) for argument in node.all_input_nodes)
    return needed


DEAD_CODE = Pass.of("dead-code", rewrite)
