"""Constant folding: what does not depend on the inputs is computed once, with the operators that the run would use.

A folded value becomes `full`: one number everywhere. So a graph keeps no tensors of its own, and sizes in it may
still follow the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx import Node

from lockstep.compile.passes.base import Changes, Pass, PassContext
from lockstep.memory.effects import Storage, is_pure, is_view, returned_storages, storage, written_storages

_LARGEST = 1 << 20
"""Bytes up to which a value is computed to see whether it can be folded."""
_FILLS = {"full", "full_like", "new_full", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones"}


def rewrite(module: fx.GraphModule, context: PassContext) -> Changes:
    """Replace values made of constants alone, where they are one number everywhere."""
    mutable, returned = written_storages(module.graph), returned_storages(module.graph)
    known: dict[Node, Tensor] = {}
    count, notes = 0, []
    for node in list(module.graph.nodes):
        if not _constant(module, node, known, mutable):
            continue
        size = node.meta["val"].untyped_storage().nbytes()
        if size > _LARGEST:
            notes.append(f"{node.name} is constant and stays: {size} bytes are more than {_LARGEST}")
            continue
        known[node] = _value(module, node, known)
        if node.op == "get_attr" or _name(node) in _FILLS or is_view(node):
            continue
        reason = _declined(node, known[node], returned)
        if reason:
            notes.append(f"{node.name} is constant and stays: {reason}")
        else:
            value = known.pop(node)
            known[_filled(node, value)] = value
            count += 1
    return Changes(count, tuple(notes))


def _constant(module: fx.GraphModule, node: Node, known: dict[Node, Tensor], mutable: set[Storage]) -> bool:
    if not isinstance(node.meta.get("val"), Tensor) or not is_pure(node) or storage(node) in mutable:
        return False
    if node.op == "get_attr":
        return isinstance(_attribute(module, str(node.target)), Tensor)
    # What `empty` holds is not defined before somebody writes it.
    return all(argument in known for argument in node.all_input_nodes) and "empty" not in _name(node)


def _declined(node: Node, value: Tensor, returned: set[Storage]) -> str:
    if storage(node) in returned:
        return "it is a result, with memory of its own"
    first = value.reshape(-1)[:1]
    if not value.numel() or not value.is_contiguous():
        return "it is empty or not laid out row by row"
    # Bytes, so that -0.0 is not 0.0. A NaN's payload would not survive as a Python number.
    same = torch.equal(_raw(value), _raw(first.expand(value.numel()).contiguous()))
    return "" if same and not bool(torch.isnan(first).any()) else "it is not one number everywhere"


def _raw(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def _value(module: fx.GraphModule, node: Node, known: dict[Node, Tensor]) -> Tensor:
    if node.op == "get_attr":
        return _attribute(module, str(node.target))  # type: ignore[return-value]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: known[argument])
    with torch.no_grad():
        value: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return value


def _filled(node: Node, value: Tensor) -> Node:
    """Put `full` in the place of a node."""
    args = (list(value.shape), value.reshape(-1)[0].item())
    with node.graph.inserting_before(node):
        full = node.graph.call_function(torch.ops.aten.full.default, args, {"dtype": value.dtype})
    full.meta = dict(node.meta)
    node.replace_all_uses_with(full)
    node.graph.erase_node(node)
    return full


def _name(node: Node) -> str:
    return str(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))


def _attribute(module: fx.GraphModule, target: str) -> object:
    value: object = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


CONSTANTS = Pass.of("constants", rewrite)
