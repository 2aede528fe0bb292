"""A checked table laid out as one list of nodes in an order of dependencies: what a simulator walks through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lockstep.parallel.schedules.check import check_rows
from lockstep.parallel.schedules.dependencies import Need, gives, needs
from lockstep.parallel.schedules.table import ScheduleError, Step, Table


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


def walk(table: Table) -> Iterator[tuple[int, Step]]:
    """The steps of all devices, each after everything it depends on: an order for a single process."""
    return ((node.device, node.step) for node in table.program.nodes)


def lay_out(table: Table) -> Program:
    """Every device does its steps as far as it can, until it needs what another has not yet done.

    Raises :class:`ScheduleError` if the table is not valid or the devices wait for each other in a circle.
    """
    check_rows(table)
    nodes: list[Node] = []
    rows: list[list[int]] = [[] for _ in table.rows]
    origin: dict[Need, int] = {}  # the node that made what a step may need
    waiting: dict[Need, int] = {}
    ready = list(range(table.stages - 1, -1, -1))
    while ready:
        device = ready.pop()
        row, numbers = table.rows[device], rows[device]
        while len(numbers) < len(row):
            step = row[len(numbers)]
            wanted = needs(table, device, step)
            missing = next((need for need in wanted if need not in origin), None)
            if missing is not None:
                waiting[missing] = device
                break
            inputs = tuple((origin[need], nodes[origin[need]].device) for need in wanted)
            for given in gives(table, device, step):
                origin[given] = len(nodes)
                if given in waiting:
                    ready.append(waiting.pop(given))
            before = numbers[-1] if numbers else -1
            numbers.append(len(nodes))
            nodes.append(Node(device, step, before, inputs))
    if waiting:
        stands = {device: (need, table.rows[device][len(rows[device])]) for need, device in waiting.items()}
        raise ScheduleError(_circle(table, stands))
    return Program(nodes, rows)


def _circle(table: Table, stands: dict[int, tuple[Need, Step]]) -> str:
    """The circle of waiting devices, from any of them on: each waits for a step of the next."""
    device, path = next(iter(stands)), list[int]()
    while device not in path:
        path.append(device)
        device = table.holder(stands[device][0].group)[0]
    links = []
    for place in path[path.index(device) :]:
        need, step = stands[place]
        holder, chunk = table.holder(need.group)
        wanted = Step("F" if need.forward else "B", need.micro_batch, chunk)
        links.append(f"device {place} stands before {step} and waits for {wanted} of device {holder}")
    return f"{table.name} deadlocks: {'; '.join(links)}. Move an awaited step before the step that stands."
