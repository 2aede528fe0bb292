"""Partition: the joint graph of a stage into a forward and a backward recipe, and what the one saves for the other."""

from __future__ import annotations

from torch.fx import Node

from lockstep.compile.capture import Joint
from lockstep.compile.halves import Halves
from lockstep.compile.lower import lower
from lockstep.memory.effects import Storage, is_view, storage, written


def split(joint: Joint, early: int | None = None) -> Halves:
    """Cut where the outputs of the function end: the forward is what they need, the backward everything else.

    early: how many gradients the backward gives; what only the others need is a third part, to be run later. Where no
    gradient comes in (a function without gradients, or with its whole backward pass inside) there is one recipe. Views
    are made again on the other side; only storages are saved. NotAffine for what cannot be lowered.
    """
    nodes = list(joint.module.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    results = list(next(node for node in nodes if node.op == "output").args[0])
    given = [(node, 0) for node in placeholders[: len(placeholders) - len(joint.tangents)]]
    loose = {given[i] for i in joint.loose}
    work = [node for node in nodes if node.op not in ("placeholder", "output")]
    if not joint.tangents:
        return Halves(lower(work, given, results, loose))
    first, gradients = results[: joint.outputs], results[joint.outputs :]
    forward = _needed(work, first)
    ahead, behind = ([n for n in work if (n in forward) is side] for side in (True, False))
    read = _read(behind, gradients)
    saved = [where for where in read if where[0] in forward and where not in given]
    used = tuple(i for i, where in enumerate(given) if where in read)
    tangents = [(node, 0) for node in placeholders[len(given) :]]
    back = [*(given[i] for i in used), *saved, *tangents]
    ahead_recipe = lower(ahead, given, [*first, *map(_node_of, saved)], loose)
    if early is None:
        return Halves(ahead_recipe, lower(behind, back, gradients, loose), len(saved), used, joint.tangents)
    now, later = gradients[:early], gradients[early:]
    at_once = _needed(behind, now)
    soon, late = ([n for n in behind if (n in at_once) is side] for side in (True, False))
    carried = [where for where in _read(late, later) if where[0] in soon or where in tangents]
    return Halves(
        ahead_recipe,
        lower(soon, back, [*now, *map(_node_of, carried)], loose),
        len(saved),
        used,
        joint.tangents,
        lower(late, [*(given[i] for i in used), *saved, *carried], later, loose),
        len(carried),
    )


def _needed(nodes: list[Node], results: list[Node | None]) -> set[Node]:
    """What the results need, and every effect that reaches beyond them: before the results it must not be lost."""
    needed = {node for node in results if node is not None}
    read = {storage(node) for node in needed}
    for node in reversed(nodes):
        if node in needed or any(storage(argument) in read for argument in written(node)):
            needed.add(node)
            needed.update(node.all_input_nodes)
            read.update(storage(argument) for argument in node.all_input_nodes)
    return needed


def _read(nodes: list[Node], results: list[Node | None]) -> dict[Storage, None]:
    """The storages that these nodes and results touch, in order."""
    found: dict[Storage, None] = {}
    for node in nodes:
        if not is_view(node):
            found.update(dict.fromkeys(storage(argument) for argument in node.all_input_nodes))
    found.update(dict.fromkeys(storage(node) for node in results if node is not None))
    return found


def _node_of(where: Storage) -> Node:
    """A node whose value is this storage: what allocates it, or the element of its tuple."""
    node, index = where
    if not isinstance(node.meta["val"], (tuple, list)):
        return node
    return next(user for user in node.users if storage(user) == where and user.args[1] == index)
