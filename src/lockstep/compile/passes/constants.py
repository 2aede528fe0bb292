"""Constant folding: what does not depend on the inputs is computed once, with the operators that the run would use."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx import Node

from lockstep.compile.passes.base import Changes, Pass, PassContext
from lockstep.memory.effects import is_pure, returned_storages, storage, written_storages

_LARGEST = 1 << 20
"""Bytes of a folded value: larger ones are quicker made in each run than kept and read."""


def rewrite(module: fx.GraphModule, context: PassContext) -> Changes:
    """Replace values made of constants alone by attributes of the module."""
    mutable, returned = written_storages(module.graph), returned_storages(module.graph)
    known: dict[Node, Tensor] = {}
    notes = []
    for node in module.graph.nodes:
        if node.op == "get_attr" and storage(node) not in mutable:
            value = _attribute(module, str(node.target))
            if isinstance(value, Tensor):
                known[node] = value
        elif _foldable(node, known):
            reason = _declined(node, mutable, returned)
            if reason:
                notes.append(f"{node.name} is constant and stays: {reason}")
            else:
                known[node] = _value(node, known)
    folded = [node for node in known if node.op != "get_attr" and any(user not in known for user in node.users)]
    for i, node in enumerate(folded):
        _replace(module, node, known[node], i)
    return Changes(len(folded), tuple(notes))


def _foldable(node: Node, known: dict[Node, Tensor]) -> bool:
    if node.op != "call_function" or not is_pure(node) or not isinstance(node.meta.get("val"), Tensor):
        return False
    return all(argument in known for argument in node.all_input_nodes) and not _empty(node)


def _empty(node: Node) -> bool:
    """Whether a node's value is not defined before somebody writes it."""
    return "empty" in str(node.target)


def _declined(node: Node, mutable: set[tuple[Node, int]], returned: set[tuple[Node, int]]) -> str:
    if storage(node) in mutable:
        return "it is written"
    if storage(node) in returned:
        return "it is a result, with memory of its own"
    size = node.meta["val"].untyped_storage().nbytes()
    return f"{size} bytes are more than {_LARGEST}" if size > _LARGEST else ""


def _value(node: Node, known: dict[Node, Tensor]) -> Tensor:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: known[argument])
    with torch.no_grad():
        value: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return value


def _replace(module: fx.GraphModule, node: Node, value: Tensor, number: int) -> None:
    name = f"_folded_{number}"
    while hasattr(module, name):
        number += 1
        name = f"_folded_{number}"
    module.register_buffer(name, value)
    with module.graph.inserting_before(node):
        constant = module.graph.get_attr(name)
    constant.meta = dict(node.meta)
    node.replace_all_uses_with(constant)
    module.graph.erase_node(node)


def _attribute(module: fx.GraphModule, target: str) -> object:
    value: object = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


CONSTANTS = Pass.of("constants", rewrite)
