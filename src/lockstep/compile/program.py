"""Programs: recipes with memory, ready to run. The C++ side is `ops/csrc/program.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.compile.recipe import Affine, Place, Recipe, View
from lockstep.compile.workspace import sized
from lockstep.memory.arena import plan
from lockstep.ops.called import called

if TYPE_CHECKING:
    from lockstep.parallel.nodes import Group

ALIGN = 64
"""Bytes: a cache line; every buffer begins at a multiple."""


@dataclass(frozen=True)
class Placed:
    """A recipe whose intermediates have their places in a scratch area of `scratch` bytes, in the lists that the C++
    side takes: its slots are the recipe's places, then the scratch area, then the views, then the constants.

    offsets: of the recipe's intermediates in it.
    """

    recipe: Recipe
    scratch: int
    offsets: tuple[int, ...]
    types: list[str]
    views: list[list[int]]
    constants: list[str]
    names: list[str]
    calls: list[list[int]]
    results: list[list[int]]


def place(recipe: Recipe, rows: int) -> Placed:
    """Plan the scratch area for up to so many rows (offsets are those of the largest number)."""
    recipe = sized(recipe, rows)
    buffers = recipe.buffers(rows)
    arena = plan(buffers)
    places = [*recipe.inputs, *recipe.outputs]
    slots: dict[int, int] = {i: i for i in range(len(places))}
    types: list[str] = []
    views: list[list[int]] = []
    first = len(places) + len(buffers)
    for number, view in enumerate(recipe.views):
        if view.base < len(places) and _is_place(view, places[view.base]):
            slots[first + number] = view.base
            continue
        inner = view.base - len(places)
        base = view.base if inner < 0 else len(places)
        offset = (view.offset[0] + (0 if inner < 0 else arena.offsets[inner]), view.offset[1])
        slots[first + number] = len(places) + 1 + len(views)
        types.append(view.dtype)
        views.append([base, *flat([offset, *view.sizes, *view.strides])])
    after = len(places) + 1 + len(views)
    constants = [_renumbered(text, slots) for text in recipe.constants]
    slots |= {first + len(recipe.views) + i: after + i for i in range(len(constants))}
    return Placed(
        recipe, arena.peak, arena.offsets, types, views, constants,
        [c.operator for c in recipe.calls],
        [[slots[a] for a in c.arguments] for c in recipe.calls],
        [[slots[r] for r in c.results] for c in recipe.calls],
    )  # fmt: skip


class Placer:
    """Plans each recipe once, for up to so many rows."""

    def __init__(self, rows: int) -> None:
        self.rows, self._placed = rows, dict[int, Placed]()

    def __call__(self, recipe: Recipe) -> Placed:
        if id(recipe) not in self._placed:
            self._placed[id(recipe)] = place(recipe, self.rows)
        return self._placed[id(recipe)]


def flat(pairs: Sequence[Affine]) -> list[int]:
    return [number for pair in pairs for number in pair]


class Program:
    """Values and calls; see `ops/csrc/program.cpp`. Running it is one call from Python."""

    def __init__(self, device: torch.device | str = "cpu", groups: Mapping[str, Group] | None = None) -> None:
        """groups: the ranks that recipes name, by axis."""
        self.device, self.groups = torch.device(device), dict(groups or {})
        self._run = called().lockstep_program_run
        self._raw: Any = torch.classes.lockstep.Program()
        self._address = int(self._raw.address())
        self._calls = 0
        self._recipes: dict[int, tuple[int, Placed]] = {}
        """By the identity of a placed recipe (which is kept, so that it stays its own): its number."""
        self._shapes: dict[Place, int] = {}

    def tensor(self, tensor: Tensor) -> int:
        """A tensor from outside, which `bind` may replace."""
        return self.tensors([tensor])[0]

    def tensors(self, tensors: Iterable[Tensor]) -> range:
        """Tensors from outside, one value after the other."""
        given = [tensor.detach() for tensor in tensors]
        first = int(self._raw.external(given))
        return range(first, first + len(given))

    def memory(self, size: int) -> int:
        """Memory of its own of so many bytes."""
        return self.tensor(torch.empty(max(size, 1) + ALIGN, dtype=torch.uint8, device=self.device))

    def place(self, memory: int, offset: int, place: Place) -> int:
        """A contiguous tensor of a place's dtype and sizes at a byte offset of some memory."""
        if place not in self._shapes:
            pairs = flat([(0, 0), *place.sizes, *contiguous(place.sizes)])
            self._shapes[place] = int(self._raw.shape(place.dtype, pairs))
        return int(self._raw.view(memory, self._shapes[place], offset))

    def append(self, placed: Placed, places: Sequence[int], memory: int, offset: int = 0) -> None:
        """The calls of a recipe on these places (inputs, then outputs); its scratch lies at a byte offset of memory."""
        if id(placed) not in self._recipes:
            named = [f"s{self.groups[text[1:]].handle}" if text[:1] == "g" else text for text in placed.constants]
            lists = (placed.types, placed.views, named, placed.names, placed.calls, placed.results)
            self._recipes[id(placed)] = int(self._raw.recipe(len(places), *lists)), placed
        self._raw.append(self._recipes[id(placed)][0], [*places, memory], offset)
        self._calls += len(placed.calls)

    def call(self, operator: str, *values: int) -> None:
        """One more call of an operator that writes into its arguments."""
        self._raw.call(operator, list(values))
        self._calls += 1

    def constant(self, text: str) -> int:
        return int(self._raw.constant(text))

    def bind(self, values: Sequence[int], tensors: Sequence[Tensor]) -> None:
        self._raw.bind(list(values), list(tensors))

    def set_floats(self, values: Sequence[int], numbers: Sequence[float]) -> None:
        self._raw.set_floats(list(values), list(numbers))

    def resize(self, rows: int) -> None:
        """From now on every size is that of so many rows."""
        self._raw.resize(rows)

    def value(self, index: int) -> Tensor:
        found: Tensor = self._raw.tensor(index)
        return found

    def run(self, values: Sequence[int] = (), tensors: Sequence[Tensor] = ()) -> None:
        """Bind these tensors, then run every call in order."""
        self._go(values, tensors, None)

    def profile(self, values: Sequence[int] = (), tensors: Sequence[Tensor] = ()) -> list[float]:
        """`run`; seconds within the operator of every call."""
        taken = (ctypes.c_double * self._calls)()
        self._go(values, tensors, ctypes.addressof(taken))
        return list(taken)

    def _go(self, values: Sequence[int], tensors: Sequence[Tensor], seconds: int | None) -> None:
        if values:
            self.bind(values, tensors)
        if not self._run(self._address, seconds):
            self._raw.fail()

    def __len__(self) -> int:
        """The number of calls."""
        return self._calls


def contiguous(sizes: Sequence[Affine]) -> list[Affine]:
    """The strides of a contiguous tensor; at most one of the sizes after the first may grow with the rows."""
    strides: list[Affine] = []
    stride: Affine = (1, 0)
    for size in reversed(sizes):
        strides.append(stride)
        if stride[1] and size[1]:
            stride = (1, 0) if len(strides) == len(sizes) else _too_many(sizes)
        else:
            stride = (stride[0] * size[0], stride[0] * size[1] + stride[1] * size[0])
    return strides[::-1]


def _too_many(sizes: Sequence[Affine]) -> Affine:
    from lockstep.compile.recipe import NotAffine

    raise NotAffine(f"two inner sizes of {sizes} grow with the number of rows")


def _is_place(view: View, place: Place) -> bool:
    """Whether a view is the place as it is."""
    same = view.dtype == place.dtype and view.sizes == place.sizes and view.offset == (0, 0)
    return same and view.strides == tuple(contiguous(place.sizes))


def _renumbered(text: str, slots: dict[int, int]) -> str:
    if text[:1] != "t":
        return text
    return "t" + ",".join(str(slots[int(part)]) for part in text[1:].split(","))
