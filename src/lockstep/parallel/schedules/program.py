"""A checked table laid out as one list of nodes in an order of dependencies: what a simulator walks through."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.parallel.schedules.check import Need, check, gives, needs, walk
from lockstep.parallel.schedules.table import Step, Table


class Node(NamedTuple):
    """A step of a device. ``before``: the node that the same device does before it (-1: none). ``inputs``: the nodes
    of other groups whose result it needs, with the device they come from."""

    device: int
    step: Step
    before: int
    inputs: tuple[tuple[int, int], ...]


class Program(NamedTuple):
    """All nodes, and for every device the numbers of its nodes in the order of its row."""

    nodes: list[Node]
    rows: list[list[int]]


def lay_out(table: Table) -> Program:
    """Raises :class:`ScheduleError` if the table is not valid."""
    check(table)
    nodes: list[Node] = []
    rows: list[list[int]] = [[] for _ in table.rows]
    origin: dict[Need, int] = {}
    for device, index in walk(table):
        step = table.rows[device][index]
        sources = (origin[need] for need in needs(table, device, step))
        inputs = tuple((source, nodes[source].device) for source in sources)
        origin.update(dict.fromkeys(gives(table, device, step), len(nodes)))
        nodes.append(Node(device, step, rows[device][-1] if rows[device] else -1, inputs))
        rows[device].append(len(nodes) - 1)
    return Program(nodes, rows)
