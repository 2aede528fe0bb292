"""View elimination: a view that undoes others is its source; a chain of views of plain layout is one; copies that
nobody could tell from their source go."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx import Node

from lockstep.compile.passes.base import Changes, Pass, PassContext
from lockstep.memory.effects import is_view, returned_storages, storage, written_storages

_COPIES = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}


def rewrite(module: fx.GraphModule, context: PassContext) -> Changes:
    """Shorten every chain of views; the operators left see the same sizes and strides."""
    count, notes = 0, []
    for node in list(module.graph.nodes):
        if not isinstance(node.meta.get("val"), Tensor) or not node.users:
            continue
        if is_view(node):
            count += _shorten(node)
        elif node.target in _COPIES and _same_layout(node, node.args[0]):
            reason = _needs_own_memory(module.graph, node)
            if reason:
                notes.append(f"{node.name} copies {node.args[0]} and stays: {reason}")
            else:
                node.replace_all_uses_with(node.args[0])
                module.graph.erase_node(node)
                count += 1
    return Changes(count, tuple(notes))


def _shorten(node: Node) -> int:
    """Replace a view by the farthest source that looks the same, or take it straight from a source of plain layout."""
    sources = _sources(node)
    for source in reversed(sources):
        if _same_layout(node, source):
            node.replace_all_uses_with(source)
            node.graph.erase_node(node)
            return 1
    plain = [s for s in sources[1:] if s.meta["val"].is_contiguous() and _spans(s, node)]
    if not plain or not node.meta["val"].is_contiguous() or node.meta["val"].dtype != plain[-1].meta["val"].dtype:
        return 0
    with node.graph.inserting_before(node):
        short = node.graph.call_function(torch.ops.aten.view.default, (plain[-1], list(node.meta["val"].shape)))
    short.meta = dict(node.meta)
    node.replace_all_uses_with(short)
    node.graph.erase_node(node)
    return 1


def _sources(node: Node) -> list[Node]:
    """The tensors that a view is a view of, the nearest first; an element of a list is a view of the list's source."""
    found = []
    while is_view(node):
        node = node.all_input_nodes[0]
        if isinstance(node.meta.get("val"), Tensor):
            found.append(node)
    return found


def _spans(source: Node, view: Node) -> bool:
    a, b = source.meta["val"], view.meta["val"]
    return a.numel() == b.numel() and a.storage_offset() == b.storage_offset()


def _same_layout(a: Node, b: object) -> bool:
    if not isinstance(b, Node):
        return False
    x, y = a.meta.get("val"), b.meta.get("val")
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)) or (x.dtype, x.device) != (y.dtype, y.device):
        return False
    if x.shape != y.shape or x.stride() != y.stride():
        return False
    return not is_view(a) or x.storage_offset() == y.storage_offset()


def _needs_own_memory(graph: fx.Graph, copy: Node) -> str:
    """Why a copy may not share its source's memory, or nothing."""
    source, mutable = storage(copy.args[0]), written_storages(graph)  # type: ignore[arg-type]
    if source in mutable or storage(copy) in mutable:
        return "one of the two is written"
    if storage(copy) in returned_storages(graph):
        return "it is a result, with memory of its own"
    return ""


VIEWS = Pass.of("views", rewrite)
