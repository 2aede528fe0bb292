"""A recipe: a compiled graph as plain values, for any number of rows. It is what the cache holds.

Slots are numbered: first the `places` (inputs, then outputs), then the `buffers` (intermediates, for which the arena
has an offset), then the views, then the constants. A call names an operator and the slots of its arguments.

Every size is `(constant, slope)`: constant + slope * rows. A graph is captured at two numbers of rows, and `merge`
finds the line through both. A size that is no such line (half of the rows, their square) is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lockstep.memory.arena import Buffer
from lockstep.memory.effects import WAITS

Affine = tuple[int, int]


@dataclass(frozen=True)
class View:
    """How a call sees a slot's memory. offset in bytes; sizes and strides in elements."""

    base: int
    dtype: str
    offset: Affine
    sizes: tuple[Affine, ...]
    strides: tuple[Affine, ...]


@dataclass(frozen=True)
class Scratch:
    """An intermediate: its bytes, and the first and the last call that touch it."""

    size: Affine
    first: int
    last: int


@dataclass(frozen=True)
class Place:
    """A tensor from outside that a recipe reads or writes. sizes: of a contiguous tensor; None: not looked at."""

    name: str
    dtype: str
    sizes: tuple[Affine, ...]

    def bytes(self, rows: int) -> int:
        count = ITEMSIZE[self.dtype]
        for size in self.sizes:
            count *= at(size, rows)
        return count


@dataclass(frozen=True)
class Call:
    """An operator and its arguments' slots. results: slots that its results are copied into, if it cannot write."""

    operator: str
    arguments: tuple[int, ...]
    results: tuple[int, ...] = ()


@dataclass(frozen=True)
class Workspace:
    """A result that nobody reads: bytes that an operator works in. How many is no line over the rows, so the operator
    is asked (`compile/workspace.py`). scratch, view, call: their indices. operator: in its functional form."""

    scratch: int
    view: int
    call: int
    operator: str
    result: int


@dataclass(frozen=True)
class Recipe:
    """inputs and outputs: the places. constants: see `constant` in `ops/csrc/program.cpp`.

    gives: for every result of the graph the index of its output, or None where there is none.
    """

    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    scratch: tuple[Scratch, ...]
    views: tuple[View, ...]
    constants: tuple[str, ...]
    calls: tuple[Call, ...]
    gives: tuple[int | None, ...]
    workspaces: tuple[Workspace, ...] = ()

    @cached_property
    def read(self) -> frozenset[int]:
        """The places that some call touches."""
        return frozenset(view.base for view in self.views if view.base < len(self.inputs) + len(self.outputs))

    def buffers(self, rows: int) -> list[Buffer]:
        """The intermediates at a number of rows, for the arena."""
        return [Buffer(at(one.size, rows), one.first, one.last) for one in self.scratch]


ITEMSIZE = {
    "float32": 4, "bfloat16": 2, "float64": 8, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1,
}  # fmt: skip


def sent(recipe: Recipe, rows: int) -> list[int]:
    """For each message of sums over ranks that a recipe begins, the bytes that are summed."""
    first = len(recipe.inputs) + len(recipe.outputs) + len(recipe.scratch)

    def size(slot: int) -> int:
        view = recipe.views[slot - first]
        count = ITEMSIZE[view.dtype]
        for one in view.sizes:
            count *= at(one, rows)
        return count

    found = []
    for call in recipe.calls:
        if call.operator.startswith(("lockstep_mesh::all_add", "lockstep_mesh::add_rows")):
            given = call.arguments[0]
            listed = given >= first + len(recipe.views)
            text = recipe.constants[given - first - len(recipe.views)][1:] if listed else str(given)
            found.append(sum(size(int(part)) for part in text.split(",")))
    return found


def begun(recipe: Recipe) -> list[str]:
    """The messages between ranks that a recipe begins, in order, by operator. The first of ranks that hand something
    on takes nothing over, and what another takes over is what the one before it hands on: that is left out."""
    left_out = (*WAITS, "lockstep_mesh::take_over")
    calls = [call.operator for call in recipe.calls]
    return [name for name in calls if name.startswith("lockstep_mesh::") and not name.startswith(left_out)]


class NotAffine(Exception):
    """A graph whose sizes are not lines over the number of rows, or whose shape depends on it."""


def at(size: Affine, rows: int) -> int:
    return size[0] + size[1] * rows


def merge(one: Recipe, rows: int, two: Recipe, more: int) -> Recipe:
    """The recipe for every number of rows, from those captured at `rows` and at `more`."""
    merged: Recipe = _merge(one, two, rows, more)
    return merged


def _merge(a: Any, b: Any, rows: int, more: int) -> Any:
    if type(a) is not type(b):
        raise NotAffine(f"{a!r} becomes {b!r}")
    if isinstance(a, tuple) and len(a) == len(b):
        if len(a) == 2 and a[1] == b[1] == 0 and type(a[0]) is type(b[0]) is int and a[0] != b[0]:
            return _line(a[0], b[0], rows, more)
        return tuple(_merge(x, y, rows, more) for x, y in zip(a, b, strict=True))
    if isinstance(a, (Recipe, View, Scratch, Place, Call, Workspace)):
        return type(a)(*(_merge(getattr(a, f), getattr(b, f), rows, more) for f in a.__dataclass_fields__))
    if isinstance(a, str) and a != b and a[:1] == b[:1] and a[:1] in ("i", "l"):
        return _line_of_numbers(a, b, rows, more)
    if a != b:
        raise NotAffine(f"{a!r} becomes {b!r}")
    return a


def _line_of_numbers(a: str, b: str, rows: int, more: int) -> str:
    """Two constants that are a whole number each, or a list of them, as one that grows with the rows."""
    low, high = ([int(part) for part in text[1:].split(",")] for text in (a, b))
    if len(low) != len(high):
        raise NotAffine(f"{a!r} becomes {b!r}")
    pairs = [_line(x, y, rows, more) for x, y in zip(low, high, strict=True)]
    return ("a" if a[:1] == "i" else "m") + ",".join(f"{constant},{slope}" for constant, slope in pairs)


def _line(low: int, high: int, rows: int, more: int) -> Affine:
    slope, rest = divmod(high - low, more - rows)
    constant = low - slope * rows
    if rest or slope < 0 or constant < 0:
        raise NotAffine(f"a size is {low} with {rows} rows and {high} with {more}")
    return constant, slope


def recipe_from(tree: dict[str, Any]) -> Recipe:
    """The recipe of `asdict`; ValueError, KeyError or TypeError if the tree is not one."""
    return Recipe(
        inputs=tuple(_place(one) for one in tree["inputs"]),
        outputs=tuple(_place(one) for one in tree["outputs"]),
        scratch=tuple(Scratch(_pair(s["size"]), int(s["first"]), int(s["last"])) for s in tree["scratch"]),
        views=tuple(
            View(int(v["base"]), str(v["dtype"]), _pair(v["offset"]), _pairs(v["sizes"]), _pairs(v["strides"]))
            for v in tree["views"]
        ),
        constants=tuple(map(str, tree["constants"])),
        calls=tuple(
            Call(str(c["operator"]), tuple(map(int, c["arguments"])), tuple(map(int, c["results"])))
            for c in tree["calls"]
        ),
        gives=tuple(None if g is None else int(g) for g in tree["gives"]),
        workspaces=tuple(
            Workspace(int(w["scratch"]), int(w["view"]), int(w["call"]), str(w["operator"]), int(w["result"]))
            for w in tree["workspaces"]
        ),
    )


def _place(tree: dict[str, Any]) -> Place:
    return Place(str(tree["name"]), str(tree["dtype"]), _pairs(tree["sizes"]))


def _pair(value: list[int]) -> Affine:
    constant, slope = value
    return int(constant), int(slope)


def _pairs(values: list[list[int]]) -> tuple[Affine, ...]:
    return tuple(_pair(value) for value in values)
