"""The graph view: a page that shows every compiled graph before and after the passes. Self-contained, no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx import Node

from lockstep.compile.graph_page import PAGE
from lockstep.compile.layout import layout
from lockstep.compile.passes.recompute import forward_nodes, node_cost
from lockstep.memory.effects import is_collective, is_element, is_view, written


def save_graph_view(path: str | Path, title: str, stages: Sequence[Mapping[str, Any]]) -> None:
    """Write the page. stages: what `stage_data` gave, in the order in which they are to be shown."""
    data = json.dumps(stages, separators=(",", ":")).replace("</", "<\\/")
    Path(path).write_text(PAGE.replace("@TITLE@", escape(title)).replace("@DATA@", data), "utf-8")


def stage_data(
    name: str, before: fx.GraphModule, after: fx.GraphModule, outputs: int, notes: Sequence[str]
) -> dict[str, Any]:
    """One stage's two graphs as plain values. outputs: how many results are the forward pass's; notes: of the passes.

    A node of the first graph that a fusion replaced carries the fusion's name, as the fused node of the second does.
    """
    fused = {}
    for node in after.graph.nodes:
        region = node.meta.get("fused")
        if region:
            fused.update(dict.fromkeys(region[1], region[0]))
    return {
        "name": name,
        "notes": list(notes),
        "before": _graph(before.graph, outputs, fused),
        "after": _graph(after.graph, outputs, {}),
    }


def _graph(graph: fx.Graph, outputs: int, fused: Mapping[str, str]) -> dict[str, Any]:
    boxes, edges = _boxes(graph)
    forward = forward_nodes(graph, outputs)
    drawn = layout(edges, [int(node not in forward) for node in boxes])
    return {
        "nodes": [
            _node(node, place, "forward" if node in forward else "backward", fused)
            for node, place in zip(boxes, drawn.places, strict=True)
        ],
        "edges": [[a, b, [[round(x, 2), y] for x, y in path]] for (a, b), path in zip(edges, drawn.paths, strict=True)],
    }


def _boxes(graph: fx.Graph) -> tuple[list[Node], list[tuple[int, int]]]:
    """The nodes to draw and the edges between them, by index. Elements of tuples are part of their operator; an input
    is drawn again for every user, for a weight would tie the whole picture together."""
    boxes: list[Node] = []
    edges: list[tuple[int, int]] = []
    index: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or is_element(node):
            continue
        sources = []
        for source in dict.fromkeys(map(_whole, node.all_input_nodes)):
            if source not in index:
                boxes.append(source)
            sources.append(index.get(source, len(boxes) - 1))
        index[node] = len(boxes)
        boxes.append(node)
        edges += [(source, index[node]) for source in sources]
    return boxes, edges


def _node(node: Node, place: tuple[float, int], part: str, fused: Mapping[str, str]) -> dict[str, Any]:
    price, region = node_cost(node), node.meta.get("fused")
    return {
        "name": node.name,
        "given": node.meta.get("given", node.name),
        "op": _operator(node),
        "kind": _kind(node),
        "part": part,
        "result": _result(node.meta.get("val")),
        "args": _call(node),
        "flops": price.flops,
        "bytes": price.bytes,
        "fused": region[0] if region else fused.get(node.name, ""),
        "of": list(region[1]) if region else [],
        "again": bool(node.meta.get("recomputed")),
        "x": round(place[0], 2),
        "y": place[1],
    }


def _whole(node: Node) -> Node:
    """The operator that a node is a result of: elements of tuples are drawn as part of it."""
    while is_element(node):
        node = node.all_input_nodes[0]
    return node


def _operator(node: Node) -> str:
    if node.op != "call_function":
        return "input" if node.op == "placeholder" else "constant"
    name = node.target._schema.name if isinstance(node.target, OpOverload) else str(node.target)
    return str(name).rpartition("::")[2]


_KINDS = (
    ("gemm mm bmm addmm linear", "product"),
    ("attention", "attention"),
    ("norm softmax log_sum_exp entropy", "rows"),
    ("copy clone pack contiguous embedding index gather cat", "movement"),
    ("full zeros ones empty arange", "movement"),
)
"""Words in an operator's name, and the kind that it is drawn as; the first that is found counts."""


def _kind(node: Node) -> str:
    if node.op != "call_function":
        return "input"
    if is_view(node):
        return "view"
    if is_collective(node):
        return "collective"
    if written(node):
        return "write"
    name = _operator(node)
    return next((kind for words, kind in _KINDS if any(word in name for word in words.split())), "elementwise")


def _result(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return ", ".join(_result(item) for item in value if isinstance(item, Tensor) and item.numel())
    return ""


def _call(node: Node) -> str:
    return ", ".join([*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())])
