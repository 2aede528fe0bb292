"""Which buffers a graph needs and when: one per storage that its nodes allocate; views share their source's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from lockstep.errors import LockstepError
from lockstep.memory.arena import Buffer
from lockstep.memory.effects import Storage, is_wait, returned_storages, storage


@dataclass(frozen=True)
class Liveness:
    """owners[i]: the node that allocates buffers[i], and which of its results. Steps are positions of nodes."""

    owners: tuple[Storage, ...]
    buffers: tuple[Buffer, ...]


def liveness(graph: fx.Graph, align: int = 64, keep_outputs: bool = False) -> Liveness:
    """The buffers of a graph whose nodes carry fake values (`meta["val"]`).

    A buffer lives from the node that allocates it to the last one that reads or writes it. Inputs, constants and
    results of the graph are not among them: they outlive a run (keep_outputs: results are, to the last step).
    """
    returned = returned_storages(graph)
    first: dict[Storage, int] = {}
    last: dict[Storage, int] = {}
    end = len(graph.nodes) - 1
    for step, node in enumerate(graph.nodes):
        for where in _allocated(node):
            first[where] = last[where] = step
        # What a collective sends is read until it has arrived.
        sent = storage(node)[0].all_input_nodes if is_wait(node) else ()
        for argument in (*node.all_input_nodes, *sent):
            for where in _storages(argument):
                if where in first:
                    last[where] = step
    owners = [where for where in first if keep_outputs or where not in returned]
    spans = [Buffer(_bytes(where), first[where], end if where in returned else last[where], align) for where in owners]
    return Liveness(tuple(owners), tuple(spans))


def _allocated(node: fx.Node) -> list[Storage]:
    """The storages that a node makes: one per result that is not a view of an argument."""
    if node.op != "call_function":
        return []
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return [(node, 0)] if storage(node) == (node, 0) else []
    if isinstance(value, (tuple, list)) and storage(node)[0] is node:
        return [(node, i) for i, item in enumerate(value) if isinstance(item, Tensor)]
    return []


def _storages(node: fx.Node) -> list[Storage]:
    """What a reader of this node reads; of a node with several results, by its elements only."""
    value = node.meta.get("val")
    return [storage(node)] if isinstance(value, Tensor) else []


def _bytes(where: Storage) -> int:
    """The bytes of a storage. LockstepError where a size is not known before the run."""
    node, index = where
    value = node.meta["val"]
    size = (value if isinstance(value, Tensor) else value[index]).untyped_storage().nbytes()
    if not isinstance(size, int):
        raise LockstepError(f"the size of {node.name} is {size}, which is not known before the run: it has no arena")
    return size
